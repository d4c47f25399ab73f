"""What one process has taken of its epoch and what failed on the way, step by step, in a file of its own.

The line of a step is written before the step is made. A step ends for all processes together, so a checkpoint of rank 0
at step s means that every process has written its line s - 1, or that it had ended before, whenever it is killed. Lines
behind s tell of steps that nobody kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.classify.checkpoint import Moment
from training.classify.journal import Journal, lines

if TYPE_CHECKING:
    from training.data.batch import Batch, Failure
    from training.data.taken import Taken


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a record says of the steps before a moment.

    Attributes:
        taken: of the moment's epoch.
        failed: in the moment's epoch.
    """

    taken: Taken
    failed: list[Failure]


class Record:
    """Writes the file of one process.

    Args:
        path: of the file.
        since: where the training goes on; what was written behind it is taken back.

    Attributes:
        taken: of the epoch that was begun.
        failed: of it.
    """

    taken: Taken
    failed: list[Failure]

    def __init__(self, path: Path, since: Moment) -> None:
        self._journal = Journal(path)
        self._journal.cut(since.epoch, since.step)

    def begin(self, epoch: int, past: Past) -> None:
        """A new epoch, of which that much is taken.

        What was written in the epoch before is of use until its end is in a checkpoint, which rank 0 may be writing.
        """
        self._journal.forget(epoch - 1)
        self.taken, self.failed = past.taken, list(past.failed)

    def add(self, moment: Moment, batch: Batch) -> None:
        """A step is about to be made of a batch."""
        self._note(moment, batch, {})

    def end(self, moment: Moment, batch: Batch | None) -> None:
        """Nothing is left of the epoch; `batch` has failures only."""
        if batch is not None:
            self._note(moment, batch, {"ended": True})
        else:
            self._journal.add(moment.epoch, moment.step, {"ended": True, "taken": self.taken.to_json()})

    def close(self) -> None:
        """Write no more."""
        self._journal.close()

    def _note(self, moment: Moment, batch: Batch, more: dict[str, Any]) -> None:
        self.taken = self.taken.after(batch)
        self.failed += batch.failed
        failed = {"failed": [asdict(failure) for failure in batch.failed]} if batch.failed else {}
        self._journal.add(moment.epoch, moment.step, {"taken": self.taken.to_json(), **failed, **more})


def knows(path: Path, moment: Moment) -> bool:
    """Whether a record says what was taken until a moment."""
    if moment.step == 0:
        return True
    of_epoch = [line for line in lines(path) if line["epoch"] == moment.epoch and line["step"] <= moment.step]
    return any(line["step"] == moment.step - 1 or line.get("ended") for line in of_epoch)


def past(path: Path, moment: Moment) -> Past:
    """What a record says of the steps of the moment's epoch before it."""
    from training.data.batch import Failure
    from training.data.taken import NOTHING, Taken

    before = [line for line in lines(path) if line["epoch"] == moment.epoch and line["step"] < moment.step]
    failed = [Failure(**failure) for line in before for failure in line.get("failed", ())]
    return Past(taken=Taken.from_json(before[-1]["taken"]) if before else NOTHING, failed=failed)


def listed(failures: Sequence[Failure], most: int = 5) -> str:
    """The first failures, for a message."""
    told = [f"{one.shard}{one.key and f' {one.key}'}: {one.message}" for one in failures[:most]]
    more = f"; and {len(failures) - most} more" if len(failures) > most else ""
    return "; ".join(told) + more
