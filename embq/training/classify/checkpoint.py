"""Checkpoints of a training, the record of what each process took of its epoch, and where a training resumes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embq.core.errors import InputError, OutputError
from embq.core.storage.beneath import require_regular
from embq.core.storage.durable import drop, fsync_folder
from embq.training.classify.config import Config, Resume, differences
from embq.training.classify.inputs import InputPlan
from embq.training.data.split import DEALING
from embq.training.run.folder import RunFolder, replacing
from embq.training.run.journal import Journal, lines

if TYPE_CHECKING:
    from embq.training.classify.process_group import GroupMember
    from embq.training.data.batch import Batch, EpochPosition, Failure

FORMAT = "embq-classify-1"
"""`format` of config.json and model.json."""
_NAME = re.compile(r"epoch-(\d{4,})-step-(\d{8,})\.pt")
KEPT = 2
"""Newest checkpoints that are kept. The newest at the start of an epoch, which fits any number of processes, is too."""


class Folder(RunFolder):
    """The folder that `--output` names, and the paths of the files in it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "config.json")
        self.log = root / "log.jsonl"
        self.failures = root / "failures.jsonl"
        self.checkpoints = root / "checkpoints"
        self.weights = root / "model.safetensors"
        self.model = root / "model.json"
        self.curve = root / "curve.png"

    def taken(self, rank: int) -> Path:
        """The record of a process."""
        return self.checkpoints / f"taken-{rank:04d}.jsonl"

    def keys(self, rank: int) -> Path:
        """The keys of the samples that a process trained on, with --log-keys."""
        return self.root / "keys" / f"rank-{rank:04d}.jsonl"

    def read_config(self) -> dict[str, Any] | None:
        """The record of settings; None in a new folder. OutputError if the folder is something else."""
        record = self.read_record()
        if record is not None and record.get("format") != FORMAT:
            raise OutputError(
                f"{self.record} is not that of a training with `embq train classify`",
                next_step="name a folder that is new or empty",
            )
        return record


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Moment:
    """A point of a training: before step `step` of epoch `epoch`, both counted from 0."""

    epoch: int
    step: int

    @property
    def name(self) -> str:
        """File name of its checkpoint."""
        return f"epoch-{self.epoch:04d}-step-{self.step:08d}.pt"

    def __str__(self) -> str:
        """For people: epochs from 1, steps as in the log."""
        if self.step:
            return f"before step {self.step} of epoch {self.epoch + 1}"
        return f"after epoch {self.epoch}" if self.epoch else "before the first step"


BEGINNING = Moment(epoch=0, step=0)


def moments(folder: Path) -> list[Moment]:
    """The moments of the checkpoints in a folder, newest first."""
    matches = [_NAME.fullmatch(path.name) for path in folder.glob("epoch-*.pt")]
    return sorted((Moment(epoch=int(name[1]), step=int(name[2])) for name in matches if name), reverse=True)


def save(folder: Path, moment: Moment, state: Mapping[str, Any]) -> None:
    """Write a checkpoint, complete and durable, and remove superfluous ones."""
    import torch

    with replacing(folder / moment.name, (OSError, RuntimeError)) as temporary:  # torch's writer raises the latter
        torch.save(dict(state), temporary)
    existing = moments(folder)
    epoch_start = next((moment for moment in existing if moment.step == 0), None)
    for old in existing[KEPT:]:
        if old != epoch_start:
            drop(folder / old.name)
    for unfinished in folder.glob(".epoch-*"):  # of a process that was killed
        drop(unfinished)


def load(folder: Path, moment: Moment) -> dict[str, Any]:
    """Read a checkpoint onto the CPU, without running code from it. OutputError if it is damaged."""
    import torch

    path = folder / moment.name
    try:
        state: dict[str, Any] = torch.load(require_regular(path), map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zipfile and pickle raise many kinds for a damaged file
        raise OutputError(
            f"the checkpoint {path} cannot be read: {type(error).__name__}",
            next_step="remove it; the same command then goes on from the one before",
        ) from error
    return state


def drop_after(folder: Path, moment: Moment) -> None:
    """Remove, durably, the checkpoints after a moment."""
    later = [other for other in moments(folder) if other > moment]
    for checkpoint in later:
        drop(folder / checkpoint.name)
    if later:
        fsync_folder(folder)


class Record:
    """The samples that one process has taken of its epoch, step by step.

    The line of a step is written before the step is made. A step ends for all processes together, so a checkpoint of
    rank 0 at step s implies that every process has written its line s - 1, or had ended before. Lines after s belong to
    steps that are made again.

    Args:
        path: file of the record.
        since: where the training resumes; later lines are removed.

    Attributes:
        taken: samples of the current epoch.
        failed: failures of the current epoch.
    """

    taken: EpochPosition
    failed: list[Failure]

    def __init__(self, path: Path, since: Moment) -> None:
        self._journal = Journal(path)
        self._journal.cut(since.epoch, since.step)

    def begin(self, moment: Moment) -> None:
        """Start an epoch, or resume it with what the file says of the steps before the moment.

        Lines of the epoch before are kept: rank 0 may still be writing the checkpoint at its end.
        """
        from embq.training.data.batch import EPOCH_START, EpochPosition, Failure

        path = self._journal.path
        earlier = [line for line in lines(path) if line["epoch"] == moment.epoch and line["step"] < moment.step]
        self.failed = [Failure(**failure) for line in earlier for failure in line.get("failed", ())]
        self.taken = EpochPosition.from_json(earlier[-1]["taken"]) if earlier else EPOCH_START
        self._journal.forget(moment.epoch - 1)

    def add(self, moment: Moment, batch: Batch, *, last: bool = False) -> None:
        """Record the batch of a step before it is made.

        Args:
            last: whether the batch has only failures, and nothing follows it in the epoch.
        """
        self.taken = self.taken.after(batch)
        self.failed += batch.failed
        failed = {"failed": [asdict(failure) for failure in batch.failed]} if batch.failed else {}
        self._write(moment, {**failed, **({"ended": True} if last else {})})

    def end(self, moment: Moment) -> None:
        """Record the end of the process's part of the epoch."""
        self._write(moment, {"ended": True})

    def _write(self, moment: Moment, fields: Mapping[str, Any]) -> None:
        self._journal.add(moment.epoch, moment.step, {"taken": asdict(self.taken), **fields})

    def close(self) -> None:
        """Close the file."""
        self._journal.close()


def key_journal(config: Config, folder: Folder, member: GroupMember, since: Moment) -> Journal | None:
    """The journal of --log-keys, without earlier lines of steps that are made again, in any process's file."""
    leftover = takewhile(Path.exists, map(folder.keys, count(member.world))) if member.leads else ()
    for path in (folder.keys(member.rank), *leftover):
        if path.exists():
            earlier = Journal(path)
            earlier.cut(since.epoch, since.step)
            earlier.close()
    return Journal(folder.keys(member.rank)) if config.log_keys else None


def _covers(record: Path, moment: Moment) -> bool:
    """True if a process's record reaches a moment."""
    if moment.step == 0:
        return True
    of_epoch = [line for line in lines(record) if line["epoch"] == moment.epoch and line["step"] <= moment.step]
    return any(line["step"] == moment.step - 1 or line.get("ended") for line in of_epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The point at which a training begins or resumes.

    Attributes:
        moment: the first step to make.
        state: checkpoint on the process that leads; None at the beginning, and on other processes.
        note: for the user; "" for a new training.
    """

    moment: Moment
    state: Mapping[str, Any] | None
    note: str


def found_start(folder: Folder, config: Config, plan: InputPlan, member: GroupMember) -> Start:
    """Choose the newest checkpoint that all processes can resume from, and record the settings. Collective.

    Args:
        config: with everything filled in that was left to be chosen.

    Raises InputError if the folder holds another training.
    """
    recorded = folder.read_config() if member.leads else None
    available = moments(folder.checkpoints) if recorded is not None else []
    why_anew = ""
    if recorded is not None and (available or folder.weights.exists()):  # else there is nothing to lose
        _check_same(folder, recorded, config, plan)
        why_anew = _why_anew(recorded, config, member)
    available, why_anew = member.from_rank(0, (available, why_anew))
    usable = [moment for moment in available if moment.step == 0 or not why_anew]
    covered = member.gathered([_covers(folder.taken(member.rank), moment) for moment in usable])
    agreed = [moment for at, moment in enumerate(usable) if all(covers[at] for covers in covered)]
    moment = agreed[0] if agreed else BEGINNING
    if member.leads:
        # Before any process records new steps: a later start would take those for the steps of these checkpoints.
        drop_after(folder.checkpoints, moment)
        folder.write_record(
            {
                "format": FORMAT,
                "config": asdict(config),
                "digest": plan.shards.digest,
                "classes": plan.classes,
                "world": member.world,
                "dealing": DEALING,
            }
        )
    return Start(
        moment=moment,
        state=load(folder.checkpoints, moment) if agreed and member.leads else None,
        note=_resume_note(available, moment, why_anew) if recorded is not None else "",
    )


def _check_same(folder: Folder, recorded: Mapping[str, Any], config: Config, plan: InputPlan) -> None:
    differ = differences(recorded["config"], config)
    if recorded["digest"] != plan.shards.digest:
        differ.insert(0, f"shards {recorded['config']['shards']}, now {config.shards}")
    if recorded["classes"] != plan.classes:
        differ.append("the names of the classes")
    if differ:
        raise InputError(
            f"{folder.root} holds another training; these differ: {'; '.join(differ)}",
            next_step="give the flags that it was begun with to go on with it, they are in its config.json; or another "
            "--output for a new one",
            code="other_training",
        )


def _why_anew(recorded: Mapping[str, Any], config: Config, member: GroupMember) -> str:
    """Reason to begin an interrupted epoch anew; "" if it can be resumed."""
    differ = differences(recorded["config"], config, Resume.EPOCH)
    if recorded["world"] != member.world:
        differ.insert(0, f"{recorded['world']} processes, now {member.world}")
    if config.splitshards and recorded.get("dealing") != DEALING:
        differ.append(f"shards dealt out {recorded.get('dealing', 'in turn')}, now {DEALING}")
    return "; ".join(differ)


def _resume_note(available: list[Moment], moment: Moment, why_anew: str) -> str:
    if not available:
        return "there is no checkpoint yet: it begins anew"
    if available[0] == moment:
        return f"goes on at epoch {moment.epoch + 1}, step {moment.step}"
    because = f"it was begun with {why_anew}" if why_anew else "a process does not know how far it was then"
    return f"begins epoch {moment.epoch + 1} anew, and drops the checkpoint at step {available[0].step}: {because}"
