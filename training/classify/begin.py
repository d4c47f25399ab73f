"""From flags and what lies in the folder to a training that stands at its next step."""

from __future__ import annotations

from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from core.service.stopping import StopFlag
from training.classify.agreement import share_optimizer
from training.classify.checkpoint import Moment
from training.classify.config import Config
from training.classify.failures import FailureList
from training.classify.folder import Folder
from training.classify.group import Member
from training.classify.journal import Journal
from training.classify.learner import Learner, seed_step
from training.classify.log import Log
from training.classify.models import built, load_weights
from training.classify.plan import Plan, check_spread
from training.classify.precision import Precision
from training.classify.record import Record
from training.classify.resume import Start, found_start
from training.classify.training import Training

if TYPE_CHECKING:
    from torch import nn

    from training.data.view import View


def begun(
    config: Config, plan: Plan, folder: Folder, member: Member, precision: Precision, stop: StopFlag
) -> tuple[Training, Start]:
    """A training where it begins or goes on. Each process has to call it.

    Args:
        config: with everything filled in that was left to be chosen.

    Raises InputError where the folder is of another training, ModelError where the architecture cannot be built.
    """
    start = found_start(folder, config, plan, member)
    learner, told = _learner(config, plan, member, precision, start)
    schedule = plan.schedule(config, member.world)
    training = Training(
        config=config,
        plan=plan,
        folder=folder,
        member=member,
        view=_view(config, plan, member),
        schedule=schedule,
        learner=learner,
        record=Record(folder.taken(member.rank), start.moment),
        keys=_keys(config, folder, member, start.moment),
        log=Log(folder, member, schedule, start.moment) if member.leads else None,
        failures=FailureList(folder.failures),
        stop=stop,
    )
    if start.state is not None:
        training.take(start.state)
    for sentence in (told, start.told, check_spread(config, plan, member.world)):
        if sentence and training.log is not None:
            training.log.say(sentence)
    return training, start


def _learner(config: Config, plan: Plan, member: Member, precision: Precision, start: Start) -> tuple[Learner, str]:
    """The model with the weights to go on from, on its device, and a sentence about it."""
    seed_step(config.seed)
    model = built(config.arch, classes=len(plan.classes), image_size=config.image_size)
    told = f"{config.arch}: {sum(p.numel() for p in model.parameters()):,} weights, {len(plan.classes):,} classes, "
    told += f"{precision.name} on {member.world} x {member.device.type}"
    if start.state is not None:
        model.load_state_dict(start.state["model"])
    elif config.start and member.leads:  # the others take over the weights of rank 0
        left = load_weights(model, Path(config.start))
        told += f"; begins with the weights of {config.start}" + (f", but for {', '.join(left)}" if left else "")
    learner = Learner.around(_placed(model, member), config, precision, member)
    if start.state is not None:
        learner.optimizer.load_state_dict(start.state["optimizer"])
        learner.scaler.load_state_dict(start.state["scaler"])
    share_optimizer(learner, member, source=0)
    return learner, told


def _placed(model: nn.Module, member: Member) -> nn.Module:
    """On the device, in the order of memory that its convolutions are fastest with."""
    import torch

    if member.device.type == "cuda":
        model = model.to(device=member.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _view(config: Config, plan: Plan, member: Member) -> View:
    from training.data.view import View

    return View(
        rank=member.rank,
        world=member.world,
        loader_workers=config.loader_workers,
        batch_size=config.batch_size,
        image_size=config.image_size,
        seed=config.seed,
        shuffle_buffer=config.shuffle_buffer,
        classes=len(plan.classes),
        pin_memory=member.device.type == "cuda",
    )


def _keys(config: Config, folder: Folder, member: Member, since: Moment) -> Journal | None:
    """The journal of --log-keys, without what an earlier process noted of steps that are made anew."""
    left = takewhile(Path.exists, map(folder.keys, count(member.world))) if member.leads else ()
    for path in (folder.keys(member.rank), *left):
        if path.exists():
            noted = Journal(path)
            noted.cut(since.epoch, since.step)
            noted.close()
    return Journal(folder.keys(member.rank)) if config.log_keys else None
