"""A disk that fills up while a part is written: one message, what is committed stays, and the rest comes later."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.session import ended, logs, write_texts
from faults.kit.disk import DiskError, SmallDisk

from core.rows import FORMATS

DIM = 512
UNITS, UNIT_SAMPLES = 4, 1000
UNIT_MB = UNIT_SAMPLES * DIM * 2 / 2**20
DISK_MB = 32


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    """A disk of which a good two and a half parts are free beside a staged result."""
    try:
        disk = SmallDisk(DISK_MB)
    except DiskError as error:
        pytest.skip(str(error))
    with open(disk.path / "ballast", "wb") as ballast:
        ballast.write(bytes(int((DISK_MB - 3.6 * UNIT_MB) * 2**20)))
    yield disk
    disk.close()


@pytest.mark.parametrize("format", FORMATS)
def test_a_disk_that_fills_up_in_mid_part_ends_the_run_with_one_message_and_nothing_is_lost(
    disk: SmallDisk, short_tmp: Path, format: str
) -> None:
    # Given units whose staged results are as large as their parts, so that it is a part that finds no room
    texts, root = short_tmp / "texts.jsonl", disk.path / "out"
    write_texts(texts, UNITS * UNIT_SAMPLES)
    model = f"stub:{DIM}?ms_per_sample=0.2"
    options = ("--unit-size", str(UNIT_SAMPLES), "--write-batch-size", str(UNIT_SAMPLES), "--transport", "staging")
    run = ("run", texts, "-o", root, "-m", model, *options, "--output-format", format, "--prefetch", "1", "--quiet")

    # When the disk fills up
    status, stdout, stderr = ended(*run)

    # Then there is one message, and what was committed is whole
    assert (status, stdout) == (74, ""), stderr + logs(root)
    errors = [line.partition(": ")[0] for line in stderr.splitlines() if "error" in line]
    assert errors == ["error[no_space]"], stderr
    what = Path(stderr.partition("no space left for ")[2].split()[0])
    assert what.parent.name == "parts" or what.name == "metadata", stderr
    assert stderr.count("next:  ") == 1
    assert "Traceback" not in stderr + logs(root)
    before = verified(root)
    assert before["state"] == "incomplete"
    assert 0 < before["rows"] < UNITS * UNIT_SAMPLES

    # And with room, the same run goes on to its end
    disk.make_room()
    status, _, stderr = ended("resume", root, "--quiet")
    assert status == 0, stderr + logs(root)
    after = verified(root)
    assert (after["state"], after["rows"], after["failures"]) == ("complete", UNITS * UNIT_SAMPLES, 0)
    assert after["vectors_recomputed"] == after["samples_checked"] == after["rows"]
    assert after["litter"] == 0


def verified(root: Path) -> dict[str, object]:
    """What `embq verify` says of a sound output."""
    status, stdout, stderr = ended("verify", root, "--json")
    assert status == 0, stdout + stderr
    report: dict[str, object] = json.loads(stdout)
    return report
