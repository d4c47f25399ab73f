"""Where a training goes on: the newest checkpoint that all processes can go on from, of the same training only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.errors import InputError
from training.classify.checkpoint import Moment, drop_after, load, moments
from training.classify.config import Config, differences, rereads
from training.classify.folder import Folder
from training.classify.group import Member
from training.classify.plan import Plan
from training.classify.record import knows
from training.data.split import DEALING

BEGINNING = Moment(epoch=0, step=0)


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
