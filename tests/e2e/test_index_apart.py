"""`embq index` in a container of a stack: a broker that is not its own, no home, and only the output to write to."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.session import Command

from core.errors import Exit
from core.rows.spec import RowSpec
from tests.support.outputs.build import build, write_jsonl


def test_an_index_is_built_here_unless_a_broker_is_named(tmp_path: Path) -> None:
    lines: list[object] = [{"id": f"k{i}", "text": f"text {i}"} for i in range(60)]
    source = write_jsonl(tmp_path / "t.jsonl", lines)
    root = build(tmp_path / "out", [source], model="stub:16", rows=RowSpec(normalize=True))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {"EMBQ_BROKER_URL": "redis://laptop@127.0.0.1:1", "HOME": "/proc/none", "TMPDIR": str(scratch)}
    command = Command("index", root, environment=environment)
    try:
        assert command.wait(120) == Exit.DONE, command.said
    finally:
        command.close()
    assert (root / "index" / "text" / "CURRENT").is_file()
    assert list(scratch.iterdir()) == []
    assert not (root / "index" / "text" / "_work").exists() or not list((root / "index" / "text" / "_work").iterdir())
    command = Command("index", root, "--broker", "redis://127.0.0.1:1", "--rebuild", environment=environment)
    try:
        assert command.wait(120) == Exit.UNAVAILABLE, command.said
        assert "error[broker]" in command.stderr
    finally:
        command.close()


@pytest.mark.parametrize("option", ["--delete", "--compact"])
def test_a_change_of_an_index_asks_no_broker_either(option: str, tmp_path: Path) -> None:
    lines: list[object] = [{"id": f"k{i}", "text": f"text {i}"} for i in range(60)]
    source = write_jsonl(tmp_path / "t.jsonl", lines)
    root = build(tmp_path / "out", [source], model="stub:16", rows=RowSpec(normalize=True))
    environment = {"EMBQ_BROKER_URL": "redis://laptop@127.0.0.1:1"}
    for arguments in ([], [option, "k3"] if option == "--delete" else [option]):
        command = Command("index", root, *arguments, environment=environment)
        try:
            assert command.wait(120) == Exit.DONE, command.said
        finally:
            command.close()
