"""`embq index` in a container of a stack: a broker that is not its own, no home, and only the output to write to."""

from __future__ import annotations

from pathlib import Path

import pytest

from embq.core.errors import Exit
from embq.core.rows.spec import RowSpec
from tests.e2e.session import called, process_ended
from tests.support.outputs.build import build, write_jsonl

NOBODY = "redis://laptop@127.0.0.1:1"


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An output with an index, which a process made that could write to the output and a scratch folder only."""
    folder = tmp_path_factory.mktemp("indexed")
    lines: list[object] = [{"id": f"k{i}", "text": f"text {i}"} for i in range(60)]
    source = write_jsonl(folder / "t.jsonl", lines)
    root = build(folder / "out", [source], model="stub:16", rows=RowSpec(normalize=True))
    scratch = folder / "scratch"
    scratch.mkdir()
    environment = {"EMBQ_BROKER_URL": NOBODY, "HOME": "/proc/none", "TMPDIR": str(scratch)}
    status, _, said = process_ended("index", root, environment=environment)
    assert status == Exit.DONE, said
    assert list(scratch.iterdir()) == []
    return root


def test_an_index_is_built_here_unless_a_broker_is_named(indexed: Path) -> None:
    index = indexed / "index" / "text"
    assert (index / "CURRENT").is_file()
    assert not (index / "_work").exists() or not list((index / "_work").iterdir())
    asked = ["index", indexed, "--broker", "redis://127.0.0.1:1", "--overwrite"]
    status, _, said = called(*asked, environment={"EMBQ_BROKER_URL": NOBODY})
    assert (status, "error[broker]" in said) == (Exit.UNAVAILABLE, True), said


@pytest.mark.parametrize("verb", ["add", "delete", "compact"])
def test_a_change_of_an_index_asks_no_broker_either(verb: str, indexed: Path) -> None:
    keys = ["k3"] if verb == "delete" else []
    status, _, said = called("index", verb, indexed, *keys, environment={"EMBQ_BROKER_URL": NOBODY})
    assert status == Exit.DONE, said
