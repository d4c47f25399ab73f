"""A helper process that takes long to start costs no input: on a cold network disk its imports take minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embq.retrieval.ui.thumbnails.decoder import Decoders
from embq.sources.kinds import is_guarded
from embq.testing.sources import ROWS, Case
from tests.contract.inputs import CASES
from tests.e2e.session import succeed
from tests.support.picture_files import encoded, photograph

pytestmark = pytest.mark.slow

START_S, STALL_S = 8, 2

GUARDED = {case.kind: case for case in CASES if is_guarded(case.kind)}


def late(folder: Path, module: str) -> dict[str, str]:
    """The environment in which processes that run a module take `START_S` to start."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"import sys, time\nif any({module!r} in argument for argument in sys.orig_argv):\n    time.sleep({START_S})\n"
    )
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize("case", GUARDED.values(), ids=GUARDED)
def test_a_reader_that_starts_slowly_is_charged_to_no_unit(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    environment = {**late(tmp_path / "site", "embq.sources.reader_process.server"), "EMBQ_STALL_S": str(STALL_S)}
    succeed("run", path, "-o", tmp_path / "out", "-m", "stub:8", "--quiet", environment=environment)
    status = json.loads(succeed("status", tmp_path / "out", "--json"))
    assert (status["rows"], status["failures"]) == (len(ROWS), 0), status


def test_a_decoder_that_starts_slowly_makes_its_thumbnail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", late(tmp_path / "site", "thumbnails.decoder_process")["PYTHONPATH"])
    monkeypatch.setattr("embq.retrieval.ui.thumbnails.decoder.IMAGE_S", float(STALL_S))
    decoders = Decoders(1)
    try:
        assert decoders.thumbnail(encoded(photograph(), "JPEG"), 16).startswith(b"\xff\xd8")
    finally:
        decoders.close()
