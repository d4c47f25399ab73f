"""Changes of an index that are killed: a process that forks one for each moment, and looks at what is left.

    python tests/indexer/killed_changes.py CHANGE INDEX FOLDER EVERY

A process of its own, with one thread, because it forks: faiss and numpy would not stand that in a test session. It ends
with the number of moments on stdout, and status 0 where all was well at each of them.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from embq.core.process.libraries import leave_out_pandas
from embq.index.change.compaction import compact
from embq.index.change.deletes import delete
from embq.index.index_files.version import read_current
from embq.index.searcher import Searcher
from tests.indexer.indexes_that_grow import Quiet, add_part, copy_of, grown, litter, rows, runner

MOMENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "open")
"""Audit events before something changes in a folder; of "open", those that write."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
GONE = [f"p0.npy:{row}" for row in range(20)]


def grow_index(index: Path) -> None:
    """Add a part; all of them are there from the second time on."""
    if not (index.parent / "data" / "q.npy").exists():
        add_part(index.parent / "data", "q", rows(100, 60))
    grown(index)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "grow": grow_index,
    "delete": lambda index: delete(index, GONE),
    "compact": lambda index: compact(index, runner(), Quiet()),
}


def answers(index: Path) -> list[np.ndarray]:
    """Answers of the current version, and the number of its rows."""
    searcher = Searcher.open(index, memory="mmap")
    found = searcher.search(rows(50, 99).astype(np.float32), 10, nprobe=16, k_factor=4)
    return [found.ids, found.scores, np.array([searcher.n])]


def versions(index: Path) -> list[str]:
    """The versions that are there, and the current one."""
    return [*sorted(one.name for one in index.glob("v*")), read_current(index).name]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    """True where the answers are the same."""
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def die_at(moment: int, folder: Path) -> None:
    """Make this process kill itself before the given change in a folder, counted from 1."""
    count = 0

    def look(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in MOMENTS or (event == "open" and not (isinstance(args[2], int) and args[2] & WRITING)):
            return
        if event != "open" or str(args[0]).startswith(str(folder)):
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def forked(work: Callable[[], None]) -> int:
    """Do something in a process of its own; gives its status, which is negative where a signal ended it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - process boundary
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def keep_answers(index: Path) -> None:
    """Write the answers of an index beside it, for every later process."""
    np.savez(index.with_suffix(".npz"), *answers(index))


def kept_answers(index: Path) -> list[np.ndarray]:
    """The answers that `keep_answers` wrote."""
    with np.load(index.with_suffix(".npz")) as arrays:
        return list(arrays.values())


def look_after(index: Path, change: Callable[[Path], Any], before: Path, wanted: Path) -> None:
    """A reader sees one version or another after the kill; the change again finishes, and leaves no litter."""
    seen, after = answers(index), kept_answers(wanted)
    assert same(seen, kept_answers(before)) or same(seen, after), "a reader sees neither the old nor the new version"
    change(index)
    assert same(answers(index), after), "the answers are not those of a change that nobody killed"
    assert read_current(index).n == read_current(wanted).n
    assert versions(index) == versions(wanted)
    assert len(read_current(index).groups) == len(read_current(wanted).groups)
    assert not (left := litter(index)), left


def main(name: str, index: Path, folder: Path, every: int) -> int:
    """Kill a change at every `every`-th moment; gives 1 where something was wrong at one of them."""
    change = CHANGES[name]
    before, wanted = copy_of(index, folder / "before"), copy_of(index, folder / "wanted")

    def first() -> None:
        keep_answers(before)
        change(wanted)
        keep_answers(wanted)

    if forked(first):
        return 1
    moment = 1
    while True:
        copy = copy_of(index, folder / f"{moment}")

        def killed(copy: Path = copy, moment: int = moment) -> None:
            die_at(moment, copy)
            change(copy)

        status = forked(killed)
        if status == 0:
            break
        if status != -signal.SIGKILL:
            return 1
        if forked(lambda copy=copy: look_after(copy, change, before, wanted)):  # type: ignore[misc]
            sys.stderr.write(f"{name}: killed at moment {moment}\n")
            return 1
        moment += every
    sys.stdout.write(f"{moment}\n")
    return 0


if __name__ == "__main__":
    leave_out_pandas()  # as the processes of embq do: it would be half of the time of each fork
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])))
