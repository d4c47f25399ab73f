"""A model's files are found without loading it, and without a network where that is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

PROGRAM = """
import json, sys
from core.errors import ModelError
from core.models import ModelSpec
from worker.embedders.lookup import locate
try:
    found = locate(ModelSpec.parse(sys.argv[1]))
    print(json.dumps([found.here, found.where]))
except ModelError as error:
    print(json.dumps([None, f"{error.message} | {error.next_step}"]))
"""


def looked(spec: str, home: Path, **environment: str) -> tuple[bool | None, str]:
    """(whether it is here, where; None and why not), found by a process of its own: the hub's client reads the
    environment when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, spec],
        env={**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    here, where = json.loads(done.stdout.splitlines()[-1])
    return here, where


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
    assert looked("stub:4", home)[0] is True
    here, why = looked(f"st:{folder}", home)
    assert here is None
    assert "holds no weights" in why
    (folder / "model.safetensors").touch()
    assert looked(f"hf:{folder}?pooling=mean", home) == (True, f"in the folder {folder}")
    assert "there is no model folder" in looked("st:/nowhere/at-all", home)[1]

    cached(home, "org/whole", "config.json", "model.safetensors")
    cached(home, "org/half", "config.json")
    cached(home, "sentence-transformers/short", "model.safetensors")
    assert looked("hf:org/whole?pooling=mean", home) == (True, f"in the cache {home / 'hub'}")
    assert looked("st:short", home)[0] is True
    here, why = looked("st:org/half", home)
    assert here is None
    assert "HF_HUB_OFFLINE is set | unset HF_HUB_OFFLINE" in why


def test_a_hub_that_cannot_be_reached_is_told_with_the_ways_around_it(tmp_path: Path) -> None:
    environment = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:1"}
    here, why = looked("st:org/model", tmp_path, **environment)
    assert here is None
    assert "http://127.0.0.1:1 cannot be reached" in why
    assert "HF_ENDPOINT" in why
