"""A run is a folder: a copy of it, taken while the run goes on, verifies, and is resumed to its end."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from embq.core.errors import Exit
from tests.e2e.check import check_complete, read_output
from tests.e2e.session import await_in, committed, ended, started, succeed, write_texts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "deploy" / "backup.md"
DIM, UNITS = 16, 300


def by_rsync(folder: Path) -> None:
    """As the docs have it, word for word."""
    text = PAGE.read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if "rsync" in one]
    subprocess.run(["sh", "-e", "-c", block], cwd=folder, check=True)


def by_hand(folder: Path) -> None:
    """In the same order, by other means."""
    shutil.copytree(folder / "out" / "commits", folder / "backup" / "commits")
    for entry in sorted((folder / "out").iterdir()):
        if entry.is_file():
            shutil.copy2(entry, folder / "backup")
        elif entry.name == "_inputs" or (entry.name[0] not in "_" and entry.name not in ("commits", "index")):
            shutil.copytree(entry, folder / "backup" / entry.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "copy",
    [
        pytest.param(
            by_rsync,
            marks=pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed"),
        ),
        by_hand,
    ],
    ids=["rsync", "by hand"],
)
def test_a_copy_of_a_run_that_goes_on_verifies_and_is_resumed_to_its_end(
    copy: Callable[[Path], None], short_tmp: Path
) -> None:
    root, backup, texts = short_tmp / "out", short_tmp / "backup", short_tmp / "texts.jsonl"
    expected = write_texts(texts, 10 * UNITS)
    run = ["run", texts, "-o", root, "-m", f"stub:{DIM}?ms_per_sample=4", "--unit-size", "10"]
    with started(*run) as command:
        await_in(command, lambda: len(committed(root)) >= 40)
        copy(short_tmp)
        await_in(command, lambda: len(committed(root)) > len(committed(backup)))
        command.kill_all()
    there = committed(backup)
    assert 40 <= len(there) < UNITS
    read_output(backup)  # every file that a record names is there, with the size and hash that it says
    succeed("verify", backup)
    assert not (backup / "_broker").exists()
    # The other order, data first, is what verify tells: its records name what was not there yet.
    shutil.copytree(backup, short_tmp / "other", ignore=shutil.ignore_patterns("commits"))
    shutil.copytree(root / "commits", short_tmp / "other" / "commits")
    assert ended("verify", short_tmp / "other")[0] == Exit.BAD_INPUT

    shutil.rmtree(root)
    succeed("resume", backup)
    check_complete(backup, expected, units=UNITS, dim=DIM)
    assert committed(backup)[: len(there)] == there, "what was in the copy was embedded again"
    succeed("verify", backup)
