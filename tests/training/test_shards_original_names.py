"""Commands of the ImageNet kit, examples/imagenet: `shardsum` and `convert-image.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from embq.training.shards.shard_set import open_shards
from embq.training.shards.sizes import classes_beside
from tests.training.pictures_converted import class_tree

IMAGENET = Path(__file__).resolve().parents[2] / "examples" / "imagenet"


def script(name: str, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """A file of examples/imagenet."""
    command = [sys.executable, str(IMAGENET / name), *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=120)


def test_a_listing_of_imagenet_is_summed_as_the_kit_shows_it() -> None:
    names = [f"imagenet-{part}-{i:06d}.tar\n" for part, count in (("train", 1282), ("val", 50)) for i in range(count)]
    done = script("shardsum", text="".join(names))
    assert done.stdout == "imagenet-train-{000000..001281}.tar\nimagenet-val-{000000..000049}.tar\n"


def test_the_two_halves_of_imagenet_become_shards_with_the_same_classes(tmp_path: Path) -> None:
    class_tree(tmp_path / "imagenet" / "train", 9)
    class_tree(tmp_path / "imagenet" / "val", 3)
    done = script("convert-image.py", str(tmp_path / "imagenet"), "--odir", str(tmp_path / "shards"))
    assert done.returncode == 0, done.stderr
    assert open_shards(str(tmp_path / "shards")).counts == (9, 3)
    assert classes_beside(str(tmp_path / "shards")) == ["cat", "dog", "owl"]


def test_an_option_that_is_not_there_is_refused_without_a_traceback() -> None:
    done = script("convert-image.py", "--root", "x")
    assert done.returncode == 2
    assert "No such option" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_without_the_two_halves_is_told_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    done = script("convert-image.py", str(tmp_path))
    assert done.returncode == 65
    assert f"{tmp_path}/val: is no folder" in done.stderr
    assert "next:" in done.stderr
