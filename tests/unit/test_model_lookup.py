"""A model's files are found without loading it, and without a network where that is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from embq.core.errors import ModelError
from embq.core.models import ModelSpec
from embq.worker.embedders.lookup import locate

pytest.importorskip("huggingface_hub")

PROGRAM = """
import json, sys
from embq.core.errors import ModelError
from embq.core.models import ModelSpec
from embq.worker.embedders.lookup import locate
for spec in sys.argv[1:]:
    try:
        found = locate(ModelSpec.parse(spec))
        print(json.dumps([found.here, found.where]))
    except ModelError as error:
        print(json.dumps([None, f"{error.message} | {error.next_step}"]))
"""


def looked(home: Path, *specs: str, **environment: str) -> list[tuple[bool | None, str]]:
    """(whether it is here, where; None and why not) of each model, found by a process of its own: the hub's client
    reads the environment when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *specs],
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()[-len(specs) :]]


def cached(home: Path, repository: str, *names: str) -> None:
    """A model in the hub's cache, with these files."""
    folder = home / "hub" / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    for name in names:
        (snapshot / name).touch()


def test_a_model_is_found_in_its_folder_or_in_the_cache_and_only_with_weights(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "model"
    folder.mkdir()
    stub, empty, nowhere = looked(home, "stub:4", f"st:{folder}", "st:/nowhere/at-all")
    assert stub[0] is True
    assert empty[0] is None
    assert "holds no weights" in empty[1]
    assert "there is no model folder" in nowhere[1]

    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    cached(home, "org/whole", "config.json", "model.safetensors")
    cached(home, "org/half", "config.json")
    cached(home, "sentence-transformers/short", "model.safetensors")
    specs = (f"hf:{folder}?pooling=mean", "hf:org/whole?pooling=mean", "st:short", "st:org/half")
    in_folder, whole, short, half = looked(home, *specs)
    assert in_folder == (True, f"in the folder {folder}")
    assert whole == (True, f"in the cache {home / 'hub'}")
    assert short[0] is True
    assert half[0] is None
    assert "HF_HUB_OFFLINE is set | unset HF_HUB_OFFLINE" in half[1]


def test_a_file_or_a_windows_path_is_no_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").touch()
    for spec in ("st:model.safetensors", "hf:models\\mine?pooling=mean"):
        with pytest.raises(ModelError, match="there is no model folder"):
            locate(ModelSpec.parse(spec))


def test_a_hub_that_cannot_be_reached_is_told_with_the_ways_around_it(tmp_path: Path) -> None:
    environment = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:1"}
    [(here, why)] = looked(tmp_path, "st:org/model", **environment)
    assert here is None
    assert "http://127.0.0.1:1 cannot be reached" in why
    assert "HF_ENDPOINT" in why


@pytest.mark.slow
def test_the_weights_of_open_clip_are_those_that_it_lists_itself() -> None:
    pytest.importorskip("open_clip")
    from embq.worker.embedders.lookup import open_clip_architectures, open_clip_weights

    # In a process of its own: other tests register architectures.
    program = (
        "import json, open_clip\n"
        "at = open_clip.get_pretrained_cfg\n"
        "listed = [[*pair, at(*pair).get('hf_hub', '')] for pair in open_clip.list_pretrained()]\n"
        "print(json.dumps([listed, open_clip.list_models()]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    listed, architectures = json.loads(done.stdout.splitlines()[-1])
    read = [[arch, tag, at] for arch, tags in open_clip_weights().items() for tag, at in tags.items()]
    assert sorted(read) == sorted(listed)
    assert len(read) > 100
    assert open_clip_architectures() >= set(architectures)
