"""Before a model is compiled it is known whether that can be done here."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embq.core.models import ModelConfig
from embq.worker.embedders.device.tuning import lacking, tune
from embq.worker.embedders.registry import load

MODEL = ModelConfig(spec="stub:8", modalities=("text",), precision="fp32")


@pytest.fixture
def able(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with all that is needed; gives the folder of its `bin` and `include`."""
    for name in ("bin/gcc", "include/Python.h"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not" / "yet"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


@pytest.fixture
def noexec(able: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache folder is on such a file system as Docker mounts for `tmpfs`."""
    mounted = {able: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID)}
    monkeypatch.setattr(os, "statvfs", lambda path: mounted[path])


def test_a_machine_with_a_compiler_headers_and_a_cache_to_run_code_from_can_compile(able: Path) -> None:
    assert lacking() == ""


def test_without_a_compiler_it_is_named(able: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (able / "bin" / "gcc").unlink()
    assert lacking() == "no C compiler (gcc or clang)"
    monkeypatch.setenv("CC", "icx")
    assert lacking() == "no C compiler (icx)"


def test_without_headers_the_package_is_named(able: Path) -> None:
    (able / "include" / "Python.h").unlink()
    assert "python3-dev" in lacking()


@pytest.mark.usefixtures("noexec")
def test_a_cache_from_which_nothing_can_be_run_is_named(able: Path) -> None:
    assert lacking().startswith(f"{able / 'not' / 'yet'} is mounted noexec")


@pytest.mark.parametrize(
    ("lacks", "device", "asked", "allowed", "told"),
    [
        ("", "cuda:0", 60.0, 60.0, 0),
        ("no C compiler", "cuda:0", 60.0, 0.0, 1),
        ("no C compiler", "cuda:0", 0.0, 0.0, 0),
        ("no C compiler", "cpu", 60.0, 0.0, 0),
    ],
)
def test_what_cannot_be_compiled_is_not_tried_and_a_gpu_that_was_to_is_told_of(
    lacks: str,
    device: str,
    asked: float,
    allowed: float,
    told: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("embq.worker.embedders.device.tuning.lacking", lambda: lacks)
    embedder: Any = load(MODEL, "cpu")
    spent: list[float] = []
    embedder.choose_variant = lambda *, compile_s: spent.append(compile_s)
    tune(embedder, MODEL, device=device, batch_size=1, compile_s=asked)
    assert spent == [allowed]
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == told
    assert all(line.startswith("compile_refused") and lacks in line and "EMBQ_COMPILE_S" in line for line in warned)
