"""A disk that fills up while a part is written: one message, what is committed stays, and the rest comes later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from embq.core.rows.spec import FORMATS
from tests.e2e.session import ended, logs, succeed, write_texts
from tests.faults.kit.disk import SmallDisk

DIM = 512
FIRST, LATER = 200, 2000
LATER_BYTES = LATER * DIM * 2


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    """A disk of 32 MB."""
    with closing(SmallDisk(32)) as disk:
        yield disk


SENTENCE = "the disk fills up while a part is written: one message; room is made, and `embq resume`"


def _with_gate(format: str) -> object:
    """HDF5 in every run of the tests: its library ends the process where a write fails."""
    return pytest.param(format, marks=pytest.mark.fault("S3", SENTENCE, gate=format == "hdf5"))


@pytest.mark.parametrize("format", [_with_gate(format) for format in FORMATS])
def test_a_disk_that_fills_up_in_mid_part_ends_the_run_with_one_message_and_nothing_is_lost(
    disk: SmallDisk, short_tmp: Path, format: str
) -> None:
    # Given some rows that are committed, and room for the staged result of one more unit and half of its part
    first, later, root = short_tmp / "first.jsonl", short_tmp / "later.jsonl", disk.path / "out"
    write_texts(first, FIRST)
    write_texts(later, LATER, name="later")
    options = ("-m", f"stub:{DIM}", "--unit-size", str(LATER), "--output-format", format, "--quiet")
    succeed("run", first, "-o", root, *options)
    disk.leave(LATER_BYTES * 3 // 2)

    # When the unit is done
    status, stdout, stderr = ended("run", first, later, "-o", root, *options, "--add", "--transport", "staging")

    # Then there is one message, and what was committed is whole
    assert (status, stdout) == (74, ""), stderr + logs(root)
    errors = [line.partition(": ")[0] for line in stderr.splitlines() if "error" in line]
    assert errors == ["error[no_space]"], stderr
    what = Path(stderr.partition("no space left for ")[2].split()[0])
    assert what.parent.name == "parts" or what.name == "metadata", stderr
    assert stderr.count("next:  ") == 1
    assert "Traceback" not in stderr + logs(root)
    before = verified(root)
    assert (before["state"], before["rows"]) == ("incomplete", FIRST)

    # And with room, the same run goes on to its end
    disk.make_room()
    succeed("resume", root, "--quiet")
    after = verified(root)
    assert (after["state"], after["rows"], after["failures"]) == ("complete", FIRST + LATER, 0)
    assert after["vectors_recomputed"] == after["samples_checked"] == after["rows"]
    assert after["litter"] == 0


def verified(root: Path) -> dict[str, object]:
    """Report of `embq verify` on a sound output."""
    report: dict[str, object] = json.loads(succeed("verify", root, "--json"))
    return report
