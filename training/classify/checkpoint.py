"""Checkpoints: all that a step changes, at one step, complete under its name or not there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import InputError, OutputError
from core.storage.durable import drop, fsync_folder, publish
from training.classify.config import Config, differences, rereads
from training.classify.plan import Plan
from training.classify.process_group import Member
from training.data.split import DEALING
from training.run.folder import Folder, writing
from training.run.journal import Journal, lines

if TYPE_CHECKING:
    from training.data.batch import Batch, Failure, Taken


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
    from training.data.batch import NOTHING, Failure, Taken

    before = [line for line in lines(path) if line["epoch"] == moment.epoch and line["step"] < moment.step]
    failed = [Failure(**failure) for line in before for failure in line.get("failed", ())]
    return Past(taken=Taken.from_json(before[-1]["taken"]) if before else NOTHING, failed=failed)


def listed(failures: Sequence[Failure], most: int = 5) -> str:
    """The first failures, for a message."""
    told = [f"{one.shard}{one.key and f' {one.key}'}: {one.message}" for one in failures[:most]]
    more = f"; and {len(failures) - most} more" if len(failures) > most else ""
    return "; ".join(told) + more


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a training begins or goes on.

    Attributes:
        moment: the first step that is made.
        state: of the checkpoint, on the process that leads; None at the very beginning, and on the others.
        told: what a user should know of it; "" of a new training.
    """

    moment: Moment
    state: Mapping[str, Any] | None
    told: str


def found_start(folder: Folder, config: Config, plan: Plan, member: Member) -> Start:
    """Look for checkpoints, agree on one, and keep what this training is. Each process has to call it.

    Args:
        config: as it is kept: with everything filled in that was left to be chosen.

    Raises InputError where the folder is of another training.
    """
    said = folder.read_config() if member.leads else None
    there = moments(folder.checkpoints) if said is not None else []
    why_anew = ""
    if said is not None and (there or folder.weights.exists()):  # else nothing was learnt that could be lost
        _check_same(folder, said, config, plan)
        why_anew = _why_anew(said, config, member)
    there, why_anew = member.from_rank(0, (there, why_anew))
    usable = [moment for moment in there if moment.step == 0 or not why_anew]
    known = member.gathered([knows(folder.taken(member.rank), moment) for moment in usable])
    agreed = [moment for at, moment in enumerate(usable) if all(one[at] for one in known)]
    moment = agreed[0] if agreed else BEGINNING
    if member.leads:
        # Before anybody writes of steps of its own: a later start would take those for the steps of this checkpoint.
        drop_after(folder.checkpoints, moment)
        read = {"world": member.world, "dealing": DEALING}
        folder.write_config({"config": config.to_json(), "digest": plan.shards.digest, "classes": plan.classes, **read})
    return Start(
        moment=moment,
        state=load(folder.checkpoints, moment) if agreed and member.leads else None,
        told=_told(there, moment, why_anew) if said is not None else "",
    )


def _check_same(folder: Folder, said: Mapping[str, Any], config: Config, plan: Plan) -> None:
    differ = differences(said["config"], config)
    if said["digest"] != plan.shards.digest:
        differ.insert(0, f"shards {said['config']['shards']}, now {config.shards}")
    if said["classes"] != plan.classes:
        differ.append("the names of the classes")
    if differ:
        raise InputError(
            f"{folder.root} holds another training; these differ: {'; '.join(differ)}",
            next_step="give the flags that it was begun with to go on with it, they are in its config.json; or another "
            "--out for a new one",
            code="other_training",
        )


def _why_anew(said: Mapping[str, Any], config: Config, member: Member) -> str:
    """Why an epoch cannot go on in its middle; "" where it can."""
    differ = rereads(said["config"], config)
    if said["world"] != member.world:
        differ.insert(0, f"{said['world']} processes, now {member.world}")
    if config.splitshards and said.get("dealing") != DEALING:
        differ.append(f"shards dealt out {said.get('dealing', 'in turn')}, now {DEALING}")
    return "; ".join(differ)


def _told(there: list[Moment], moment: Moment, why_anew: str) -> str:
    newest = there[0] if there else None
    if newest is None:
        return "there is no checkpoint yet: it begins anew"
    if newest == moment:
        return f"goes on at epoch {moment.epoch + 1}, step {moment.step}"
    because = f"it was begun with {why_anew}" if why_anew else "a process does not know how far it was then"
    return f"begins epoch {moment.epoch + 1} anew, and drops the checkpoint at step {newest.step}: {because}"


_NAME = re.compile(r"epoch-(\d{4,})-step-(\d{8,})\.pt")

KEPT = 2
"""The newest ones; and the newest at the beginning of an epoch, for the case that only that one is of use."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Moment:
    """Where in a training something is: before step `step` of epoch `epoch`, both counted from 0."""

    epoch: int
    step: int

    @property
    def name(self) -> str:
        """Of the checkpoint."""
        return f"epoch-{self.epoch:04d}-step-{self.step:08d}.pt"

    def __str__(self) -> str:
        """For people: epochs from 1, steps as the log has them."""
        if self.step:
            return f"before step {self.step} of epoch {self.epoch + 1}"
        return f"after epoch {self.epoch}" if self.epoch else "before the first step"


BEGINNING = Moment(epoch=0, step=0)


def moments(folder: Path) -> list[Moment]:
    """The moments at which there are checkpoints, the newest first."""
    found = [_NAME.fullmatch(path.name) for path in folder.glob("epoch-*.pt")]
    return sorted((Moment(epoch=int(name[1]), step=int(name[2])) for name in found if name), reverse=True)


def save(folder: Path, moment: Moment, state: Mapping[str, Any]) -> None:
    """Write a checkpoint, durably, and drop those that it makes superfluous."""
    import torch

    temporary = folder / f".{moment.name}.{os.getpid()}"
    try:
        with writing(folder / moment.name, (OSError, RuntimeError)):  # torch's writer raises the latter
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(dict(state), temporary)
            publish(temporary, folder / moment.name)
    finally:
        drop(temporary)
    _drop_old(folder)


def load(folder: Path, moment: Moment) -> dict[str, Any]:
    """What was saved, on the CPU. Nothing in the file is executed. OutputError where it is damaged."""
    import torch

    path = folder / moment.name
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zipfile and pickle raise what they like for a damaged file
        raise OutputError(
            f"the checkpoint {path} cannot be read: {type(error).__name__}",
            next_step="remove it; the same command then goes on from the one before",
        ) from error
    return state


def drop_after(folder: Path, moment: Moment) -> None:
    """Drop, durably, the checkpoints behind a moment from which the training goes on."""
    later = [one for one in moments(folder) if one > moment]
    for one in later:
        drop(folder / one.name)
    if later:
        fsync_folder(folder)


def _drop_old(folder: Path) -> None:
    there = moments(folder)
    beginning = next((moment for moment in there if moment.step == 0), None)
    for moment in there[KEPT:]:
        if moment != beginning:
            drop(folder / moment.name)
    for litter in folder.glob(".epoch-*"):  # of a process that was killed while it wrote
        drop(litter)
