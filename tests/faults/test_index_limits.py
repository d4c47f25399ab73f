"""A build of an index within a memory limit, and on a disk that fills up."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from embq.index.faiss_module import faiss
from embq.index.index_files.lists import empty_lists, write_lists
from tests.faults.kit.disk import SmallDisk
from tests.faults.kit.indexes import PATIENCE_S, SLICES, Building, MakeBuilding, write_collection
from tests.faults.kit.table import Recovery

CGROUP = Path("/sys/fs/cgroup/memory")
MEMORY = 300 << 20
"""Stated limit in bytes. The libraries take a third of it; the vectors would take two thirds, the lists some more."""
ROWS, DIM = 400_000, 128
LEFT = (150_000, 100_000, 60_000)
"""Bytes that are free at each attempt. All stages write some 600 kB; each attempt goes on where the last one ended."""

PAGE_BYTES = 4096


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    """A disk of 8 MB."""
    with closing(SmallDisk(8)) as disk:
        yield disk


@pytest.fixture
def capped() -> Iterator[Path]:
    """A control group that ends what takes more memory than what is stated for a build."""
    group = CGROUP / f"embq-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(MEMORY))
    except OSError as error:
        pytest.skip(f"no control group for memory can be made here: {error}")
    yield group
    group.rmdir()


@pytest.mark.fault("X8", "the disk fills up while an index is built: one message each time, until there is room")
def test_a_disk_that_fills_up_ends_the_build_with_one_message_and_it_goes_on_with_room(
    disk: SmallDisk, vectors_folder: Path, undisturbed: Building, tmp_path: Path, recovery: Recovery
) -> None:
    building = Building(vectors_folder, tmp_path, recovery, at=disk.path / "index")
    try:
        for left in LEFT:
            disk.leave(left)
            command = building.begin()
            assert command.wait(PATIENCE_S) == 74, command.said
            recovery.injected()
            errors = [line.partition(": ")[0] for line in command.stderr.splitlines() if "error" in line]
            assert errors == ["error[no_space]"], command.stderr
            assert "give the same command again" in command.stderr
            assert not (building.index / "CURRENT").exists()
            disk.make_room()
        assert building.sidecars(), "it was full before anything was done"

        building.run()

        building.assert_published()
        building.assert_same_as(undisturbed)
    finally:
        building.close()


@pytest.mark.fault("X9", "a build in a control group with the memory that it was told of")
def test_a_build_stays_within_the_memory_that_is_stated(
    make_building: MakeBuilding, capped: Path, tmp_path: Path, recovery: Recovery
) -> None:
    building = make_building(
        source=write_collection(tmp_path / "large", ROWS, DIM),
        options=("--index-key", "IVF256,SQ8", "--nb-indices-to-keep", str(SLICES), "--quiet"),
    )
    inside = ("sh", "-c", f'echo $$ > {capped}/cgroup.procs && exec "$@"', "sh")
    command = building.begin("--current-memory-available", str(MEMORY), prefix=inside)
    recovery.injected()
    assert command.wait(PATIENCE_S) in (0, 3), command.said
    building.assert_published()
    infos = json.loads((building.index / "v0001" / "infos.json").read_text())
    peaks = infos["peak_rss_bytes"]
    assert 0 < max(peaks.values()) <= MEMORY, peaks


@pytest.mark.fault("X8", "the disk is full when the last bytes of a file of lists are written", gate=True)
def test_a_file_of_lists_that_was_cut_is_an_error(disk: SmallDisk, tmp_path: Path, recovery: Recovery) -> None:
    """faiss's own writer says on stderr that it could not close the file, and nothing else."""
    lists = empty_lists(4, 32)
    for number in range(4):
        ids, codes = np.arange(300 + number), np.zeros((300 + number, 32), np.uint8)
        lists.add_entries(number, len(ids), faiss().swig_ptr(ids), faiss().swig_ptr(codes))
    write_lists(lists, tmp_path / "whole")
    size = (tmp_path / "whole").stat().st_size
    assert size % PAGE_BYTES
    for pages in (0, 1, size // PAGE_BYTES):
        disk.leave(pages * PAGE_BYTES)
        recovery.injected()
        with pytest.raises(OSError, match="No space left"):
            write_lists(lists, disk.path / "cut")
        (disk.path / "cut").unlink()
        disk.make_room()
    write_lists(lists, disk.path / "good")
    assert (disk.path / "good").read_bytes() == (tmp_path / "whole").read_bytes()
