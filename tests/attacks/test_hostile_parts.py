"""Workers that change a part between the writer's check and its commit, or after it, in a folder and in a bucket."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from embq.core.broker.embedded import EmbeddedServer
from embq.core.queue.result_stream import PublishVerdict
from embq.core.storage.paths import Place
from tests.contract.test_worker_parts import make_any, make_far, staged
from tests.support.outputs.run_case import MakeRun, RunCase, write

__all__ = ["make_any", "make_far"]  # fixtures

NOBODY = 65_534


@pytest.fixture(scope="module")
def server(broker: EmbeddedServer) -> EmbeddedServer:
    return broker


def shortened(path: Place) -> None:
    write(path, path.read_bytes()[:-1])


def in_place_of(path: Place) -> Path:
    assert isinstance(path, Path)
    path.unlink()
    return path


CHANGES: dict[str, tuple[str, Callable[[Place], object]]] = {
    "shortened": ("folder", shortened),
    "lengthened": ("folder", lambda path: write(path, path.read_bytes() + b"x")),
    "a link": ("folder", lambda path: in_place_of(path).symlink_to("/etc/passwd")),
    "a link to nothing": ("folder", lambda path: in_place_of(path).symlink_to("/nowhere/x")),
    "a pipe": ("folder", lambda path: os.mkfifo(in_place_of(path))),
    "a folder": ("folder", lambda path: in_place_of(path).mkdir()),
    "shortened in a bucket": ("bucket", shortened),
}


def accepted(run: RunCase) -> list[Place]:
    """The parts of the units 0 and 1, in that order, which a writer has checked."""
    for u in (0, 1):
        assert run.publish_part(u, run.claim(u)) is PublishVerdict.ACCEPTED
    parts = {path.name.partition(".")[0]: path for path in staged(run)}
    return [parts[run.units[u].unit_id] for u in (0, 1)]


@pytest.mark.parametrize(("make_any", "change"), CHANGES.values(), ids=CHANGES, indirect=["make_any"])
def test_a_part_that_changes_after_its_check_is_refused_alone(
    make_any: MakeRun, change: Callable[[Place], object]
) -> None:
    """The writer of `embq run` ended, or a record named a part of another length, which ended every reader."""
    run = make_any(3)
    writer = run.writer()
    first, _ = accepted(run)
    writer.step()
    assert len(writer.buffer.results) == 2
    change(first)
    writer.drain()
    assert writer.counts.rejected == {"bad_result": 1}
    run.assert_exact([1])
    assert [path for path in run.layout.staged_parts.iterdir() if path.name == first.name and not path.is_dir()] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_part_of_another_user_shares_no_inode_with_the_output(run: RunCase) -> None:
    """Its owner could change committed rows, also where the system lets the writer link it."""
    writer = run.writer()
    first, second = accepted(run)
    assert isinstance(first, Path)
    os.chown(first, NOBODY, NOBODY)
    inodes = [path.stat().st_ino for path in (first, second) if isinstance(path, Path)]
    writer.step()
    with open(first, "r+b") as still_open:
        writer.drain()
        still_open.write(b"other bytes")
    run.assert_exact([0, 1])
    committed = {path.stat().st_ino for path in Path(str(run.layout.parts)).iterdir()}
    assert inodes[0] not in committed
    assert inodes[1] in committed, "the writer's own user is trusted with the folder"
