"""The whole story: photographs become shards, a model is trained on them, and embeds them, and finds them again.

At every step there are 90.
"""

from __future__ import annotations

import io
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from embq.app.cli import entry_point
from embq.core.run.reader import row_tables
from tests.e2e.session import process_ended
from tests.support.models.clip import tiny_clip
from tests.support.picture_files import encoded
from tests.training.pictures_converted import samples_of

PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "ihc.png", "rocket.jpg")
"""Inside scikit-image; 15 pieces of each."""
PIECE = 96


def photographs(folder: Path) -> Path:
    """90 different pieces of photographs in class folders, each with a caption that no other one has."""
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        pytest.skip("photographs come with scikit-image")
    for name in PHOTOGRAPHS:
        place = folder / name.partition(".")[0]
        place.mkdir(parents=True)
        with Image.open(Path(spec.origin).parent / "data" / name) as whole:
            rgb = whole.convert("RGB")
        for number in range(15):
            left, top = 90 + 61 * (number % 5), 20 + 89 * (number // 5)
            piece = rgb.crop((left, top, left + PIECE, top + PIECE))
            (place / f"piece{number:02d}.jpg").write_bytes(encoded(piece, "JPEG", quality=92))
            (place / f"piece{number:02d}.txt").write_text(f"piece {number} of {place.name}")
    return folder


@dataclass
class Story:
    """A folder in which it takes place, and how long each step took."""

    root: Path
    told: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began

    def here(self, step: str, *arguments: object) -> str:
        """A command that does its own work, in this process."""
        with self.step(step), redirect_stdout(io.StringIO()) as out:
            status = entry_point.run([str(argument) for argument in arguments])
        assert status == 0, f"embq {' '.join(map(str, arguments))} -> {status}\n{out.getvalue()}"
        return out.getvalue()

    def there(self, step: str, *arguments: object) -> str:
        """A command with processes below it, as a process of its own."""
        with self.step(step):
            # Threads of a model this small only wait for each other.
            status, stdout, stderr = process_ended(*map(str, arguments), environment={"OMP_NUM_THREADS": "1"})
        assert status == 0, f"embq {' '.join(map(str, arguments))} -> {status}\n{stdout}\n{stderr}"
        return stdout

    def __str__(self) -> str:
        steps = "\n".join(f"{name:<12} {seconds:6.1f} s" for name, seconds in self.seconds.items())
        return f"{steps}\n{'in all':<12} {sum(self.seconds.values()):6.1f} s"


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """From photographs to embeddings."""
    root = tmp_path_factory.mktemp("story")
    it = Story(root)
    with it.step("pictures"):
        photographs(root / "pictures")
        tiny_clip(root / "tiny")
    shards = ("shards", "convert", root / "pictures", f"{root}/shards/train-%06d.tar", "--samples-per-shard", 18)
    it.told["convert"] = json.loads(it.here("convert", *shards, "--workers", 1, "--json"))
    it.told["sum"] = json.loads(it.here("sum", "shards", "sum", root / "shards", "--json"))
    train = (
        "train",
        "openclip",
        root / "shards",
        "--model",
        root / "tiny",
        "--output",
        root / "clip",
        "--device",
        "cpu",
    )
    exact = ("--exact", "--epochs", 1, "--batch-size", 15, "--workers", 1, "--lr", 1e-3, "--warmup-steps", 2)
    it.told["train"] = json.loads(it.there("train", *train, *exact, "--log-every", 1, "--json"))
    export = ("train", "export", root / "clip", root / "model", "--json")
    it.told["export"] = json.loads(it.here("export", *export))
    run = ("run", f"{root}/shards/train-*.tar", "-o", root / "out", "-m", it.told["export"]["spec"])
    it.there("embed", *run)
    it.told["verify"] = json.loads(it.here("verify", "verify", root / "out", "--json"))
    return it


def rows_of(out: Path) -> dict[str, list[Any]]:
    """The columns of all rows, in order."""
    columns: dict[str, list[Any]] = {}
    for table in row_tables(out):
        for name in table.column_names:
            columns.setdefault(name, []).extend(table[name].to_pylist())
    return columns


@pytest.mark.slow
def test_every_photograph_is_a_sample_is_trained_on_once_and_is_a_row(story: Story) -> None:
    root = story.root
    originals = {path.read_bytes() for path in (root / "pictures").rglob("*.jpg")}
    samples = samples_of(root / "shards")
    assert len(originals) == len(samples) == 90
    assert {parts["jpg"] for parts in samples.values()} == originals
    assert sum(json.loads((root / "shards" / "sizes.json").read_text()).values()) == 90

    assert story.told["train"]["exact"] is True
    assert story.told["train"]["samples_per_epoch"] == 90
    trained = (root / "clip" / "keys" / "epoch-0-rank-0.txt").read_text().splitlines()
    shards = sorted((root / "shards").glob("*.tar"))
    wanted = [f"{path}\t{key}" for path in shards for key in samples_of(root / "shards", path.name)]
    assert Counter(trained) == dict.fromkeys(wanted, 1)
    steps = re.findall(r"Train Epoch: 0 \[\s*(\d+)/(\d+)", (root / "clip" / "out.log").read_text())
    assert steps == [(str(15 * step), "90") for step in range(1, 7)]

    assert story.told["export"]["provenance"]["samples_seen"] == 90
    assert story.told["export"]["provenance"]["checkpoint"]["epoch"] == 1

    rows = rows_of(root / "out")
    assert len(rows["key"]) == 90
    assert set(rows["caption"]) == {parts["txt"].decode() for parts in samples.values()}
    assert len(set(rows["caption"])) == 90
    assert story.told["verify"]["ok"] is True
    assert (story.told["verify"]["rows"], story.told["verify"]["failures"]) == (90, 0)


@pytest.mark.slow
def test_the_rows_have_the_fingerprint_that_the_export_told(story: Story) -> None:
    records = [json.loads(path.read_text()) for path in sorted((story.root / "out" / "commits").glob("*.json"))]
    found = {record["fingerprint"] for record in records} - {""}
    assert found == {story.told["export"]["provenance"]["fingerprint"]}


@pytest.mark.slow
def test_the_rows_are_what_the_trained_model_gives(story: Story) -> None:
    """By open_clip alone, from the checkpoint: its network, its weights, its transform."""
    import open_clip
    import torch

    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{story.root / 'tiny'}")
    open_clip.load_checkpoint(model, str(story.root / "clip" / "checkpoints" / "epoch_1.pt"))
    model.eval()
    rows = rows_of(story.root / "out")
    samples = {parts["txt"].decode(): parts["jpg"] for parts in samples_of(story.root / "shards").values()}
    with torch.inference_mode():
        images = [Image.open(io.BytesIO(samples[caption])) for caption in rows["caption"]]
        of_images = model.encode_image(torch.stack([transform(image) for image in images]), normalize=True)
    # Stored as float16, and images decoded by the faster path.
    np.testing.assert_allclose(np.array(rows["embedding"]), of_images.numpy(), atol=5e-3)


@pytest.mark.slow
def test_each_photograph_is_found_by_itself(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    root = story.root
    story.there("index", "index", root / "out")
    rows = rows_of(root / "out")
    (infos,) = (root / "out" / "index").rglob("infos.json")
    assert json.loads(infos.read_text())["nb vectors"] == 90
    for name in PHOTOGRAPHS[:2]:
        picture = root / "pictures" / name.partition(".")[0] / "piece07.jpg"
        answer = json.loads(story.there("search", "search", root / "out", "--image", picture, "-k", 90, "--json"))
        assert answer["results"][0]["caption"] == picture.with_suffix(".txt").read_text()
        assert len({one["key"] for one in answer["results"]}) == len(set(rows["key"]))
    with capsys.disabled():
        print(f"\n{story}")  # noqa: T201 - what takes how long is what this test is to show


@pytest.mark.slow
def test_rows_of_two_checkpoints_never_share_an_output(story: Story, tmp_path: Path) -> None:
    import shutil

    import torch

    root = story.root
    shards = sorted((root / "shards").glob("*.tar"))
    for path in shards[:4]:
        shutil.copy(path, tmp_path / path.name)
    shutil.copytree(root / "clip", tmp_path / "clip")
    model = story.told["export"]["spec"].replace(str(root), str(tmp_path))
    story.here("export", "train", "export", tmp_path / "clip", tmp_path / "model")
    run = ("run", f"{tmp_path}/train-*.tar", "-o", tmp_path / "out", "-m", model)
    story.there("embed", *run)

    latest = tmp_path / "clip" / "checkpoints" / "epoch_1.pt"
    content = torch.load(latest)
    content["state_dict"]["logit_scale"].add_(0.125)  # what another step would change
    torch.save({**content, "epoch": 2}, latest.with_name("epoch_2.pt"))
    shutil.rmtree(tmp_path / "model")
    story.here("export", "train", "export", tmp_path / "clip", tmp_path / "model")
    shutil.copy(shards[4], tmp_path / shards[4].name)
    status, stdout, stderr = process_ended(*map(str, run))
    assert status != 0
    assert "other weights" in stdout + stderr
    assert len(rows_of(tmp_path / "out")["key"]) == 72
