"""All processes go on from the same state after an epoch in which they made different numbers of steps.

`Join` lets a process that has run out of samples take part in the averages of those that have not, and gives it their
weights in the end. What the optimiser has gathered, it leaves as it is: a process with fewer steps then goes into the
next epoch with another momentum, and its weights move away from the others' (reproduced: 0.3 and 0.07 after three steps
against five).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from training.classify.group import Member, explained
from training.classify.learner import Learner

if TYPE_CHECKING:
    import torch


def joined(learner: Learner, member: Member) -> AbstractContextManager[object]:
    """Around the loop over an exact epoch: whoever ends early answers the others until they end too.

    Inside there must be no collective but those of DDP's forward and backward passes.
    """
    if member.world == 1:
        return nullcontext()
    from torch.distributed.algorithms.join import Join

    return Join([learner.trained])  # type: ignore[list-item]


def agree(learner: Learner, member: Member, steps: int) -> int:
    """Take over the optimiser of the process that made most steps; gives that number.

    Args:
        steps: that this process made in the epoch.
    """
    if member.world == 1:
        return steps
    made = member.gathered(steps)
    most = max(made)
    share_optimizer(learner, member, source=made.index(most))
    return int(most)


def share_optimizer(learner: Learner, member: Member, *, source: int) -> None:
    """All take over momentum and scale of one process."""
    if member.world == 1:
        return
    import torch
    import torch.distributed as dist

    held = [_momentum(learner, parameter) for parameter in _parameters(learner)]
    moving = member.from_rank(source, [momentum is not None for momentum in held])
    for parameter, momentum, moves in zip(_parameters(learner), held, moving, strict=True):
        if not moves:
            learner.optimizer.state.pop(parameter, None)
            continue
        if momentum is None:
            momentum = torch.empty_like(parameter, memory_format=torch.preserve_format)
            learner.optimizer.state[parameter]["momentum_buffer"] = momentum
        with explained(member):
            dist.broadcast(momentum, source)
    learner.scaler.load_state_dict(member.from_rank(source, learner.scaler.state_dict()))


def share_buffers(learner: Learner, member: Member) -> None:
    """All take over rank 0's running statistics, which DDP evens out before a step, and not after the last."""
    if member.world == 1:
        return
    import torch.distributed as dist

    for buffer in learner.model.buffers():
        with explained(member):
            dist.broadcast(buffer, 0)


def _parameters(learner: Learner) -> list[torch.nn.Parameter]:
    return [parameter for group in learner.optimizer.param_groups for parameter in group["params"]]


def _momentum(learner: Learner, parameter: torch.nn.Parameter) -> torch.Tensor | None:
    momentum: torch.Tensor | None = learner.optimizer.state.get(parameter, {}).get("momentum_buffer")
    return momentum
