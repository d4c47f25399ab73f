"""Model, optimiser and precision of a training, one step of them, and what keeps them equal in all processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from embq.core.errors import ConfigError, DeviceFullError
from embq.training.classify.config import Config
from embq.training.classify.models import built, load_weights
from embq.training.classify.process_group import GroupMember, explained


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Compute precision of a training: fp32, bf16 or fp16 on "cuda" or "cpu"."""

    name: str
    device: str

    @classmethod
    def chosen(cls, requested: str, device: torch.device) -> Precision:
        """The precision asked for, or the default of the device; ConfigError if the device lacks it."""
        on_gpu = device.type == "cuda"
        bf16 = not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False)
        if requested == "fp16" and not on_gpu:
            raise ConfigError("--precision fp16 needs a GPU", next_step="leave it out, or take bf16")
        if requested == "bf16" and not bf16:
            raise ConfigError(
                f"--precision bf16: {torch.cuda.get_device_name(device)} does not compute in it",
                next_step="take fp16 or fp32",
            )
        return cls(name=requested or ("bf16" if on_gpu and bf16 else "fp32"), device=device.type)

    def autocast(self) -> AbstractContextManager[object]:
        """For the forward pass and the loss."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16 if self.name == "bf16" else torch.float16)

    def scaler(self) -> torch.amp.GradScaler:
        """Loss scaling for fp16, which keeps small gradients from becoming 0; no effect in other precisions."""
        return torch.amp.GradScaler(self.device, enabled=self.name == "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A model on its device with its optimiser.

    Attributes:
        model: the network, whose weights are saved.
        trained: the network, or DDP around it, which averages the gradients of all processes.
        optimizer: SGD with momentum.
        scaler: loss scaling for fp16.
        precision: of the forward pass.
        loss: cross entropy with label smoothing.
        clip: highest norm of the gradient; 0 for none.
        device: where all of this lies.
    """

    model: nn.Module
    trained: nn.Module
    optimizer: torch.optim.SGD
    scaler: torch.amp.GradScaler
    precision: Precision
    loss: nn.CrossEntropyLoss
    clip: float
    device: torch.device

    @classmethod
    def around(cls, model: nn.Module, config: Config, precision: Precision, member: GroupMember) -> Learner:
        """A learner of a model on the CPU, which goes to the member's device and takes the weights of rank 0."""
        on_gpu = member.device.type == "cuda"
        if on_gpu:  # convolutions are fastest with channels last
            model = model.to(device=member.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        trained: nn.Module = model
        if member.world > 1:
            with explained(member):
                trained = DistributedDataParallel(model, device_ids=[member.device.index] if on_gpu else None)
        return cls(
            model=model,
            trained=trained,
            optimizer=torch.optim.SGD(
                model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
            ),
            scaler=precision.scaler(),
            precision=precision,
            loss=nn.CrossEntropyLoss(label_smoothing=config.label_smoothing),
            clip=config.clip,
            device=member.device,
        )

    def to_device(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A batch on the device; on a GPU with channels last."""
        on_gpu = self.device.type == "cuda"
        order = torch.channels_last if on_gpu else torch.preserve_format
        return (
            images.to(self.device, non_blocking=on_gpu, memory_format=order),
            labels.to(self.device, non_blocking=on_gpu),
        )

    def step(
        self, images: Tensor, labels: Tensor, *, lr: float, before_forward: Callable[[], None] = lambda: None
    ) -> tuple[Tensor, Tensor]:
        """One optimiser step.

        Args:
            images: float32 (n, 3, height, width).
            labels: int64 (n,).
            lr: learning rate of this step.
            before_forward: called when all processes have the same weights and running statistics. DDP makes the
                latter equal at the start of a step, under Join to those of a process that may not be rank 0.

        Returns the mean loss of the batch and the number of correct predictions before the step, on the device.
        """
        images, labels = self.to_device(images, labels)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        hook = self.model.register_forward_pre_hook(lambda *_: before_forward())
        try:
            with _running_statistics(self.model) if len(labels) == 1 else nullcontext():
                with self.precision.autocast():
                    output = self.trained(images)
                    loss = self.loss(output.float(), labels)
                self.scaler.scale(loss).backward()
        finally:
            hook.remove()
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach(), (output.detach().argmax(1) == labels).sum()

    def state(self) -> dict[str, Any]:
        """Everything that a step changes."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }


def prepared(
    config: Config, classes: int, precision: Precision, member: GroupMember, state: Mapping[str, Any] | None
) -> tuple[Learner, str]:
    """The learner with which a training begins or resumes, and a sentence about it. Collective.

    Args:
        classes: number of classes.
        state: checkpoint on the process that leads; None at the beginning, and on other processes.
    """
    seed_step(config.seed)
    model = built(config.arch, classes=classes, image_size=config.image_size)
    note = f"{config.arch}: {sum(p.numel() for p in model.parameters()):,} weights, {classes:,} classes, "
    note += f"{precision.name} on {member.world} x {member.device.type}"
    if state is not None:
        model.load_state_dict(state["model"])
    elif config.start and member.leads:  # the others take over the weights of rank 0
        fresh = load_weights(model, Path(config.start))
        note += f"; begins with the weights of {config.start}" + (f", but for {', '.join(fresh)}" if fresh else "")
    learner = Learner.around(model, config, precision, member)
    if state is not None:
        learner.optimizer.load_state_dict(state["optimizer"])
        learner.scaler.load_state_dict(state["scaler"])
    share_optimizer(learner, member, source=0)
    return learner, note


@contextmanager
def _running_statistics(model: nn.Module) -> Iterator[None]:
    """Batch normalisation by its running statistics: one sample with maps of one pixel has no variance."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()


def seed_step(*parts: int) -> None:
    """Seed torch from seed, epoch, step and rank, so that a resumed step draws the same numbers."""
    text = "/".join(map(str, parts)).encode()
    torch.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1)


def joined(learner: Learner, member: GroupMember) -> AbstractContextManager[object]:
    """Around the loop over an exact epoch: a process that ends early answers the collectives of the others.

    Within the block only the collectives of DDP's forward and backward passes are allowed. `Join` gives such a process
    the weights of the others in the end, but leaves its optimiser behind: `agree` has to follow.
    """
    if member.world == 1:
        return nullcontext()
    return Join([learner.trained])  # type: ignore[list-item]


def agree(learner: Learner, member: GroupMember, steps: int) -> int:
    """Give all processes the optimiser of the one that made most steps, and return its steps.

    Without it a process with fewer steps keeps another momentum, and its weights move away from those of the others
    (reproduced: momenta of 0.3 and 0.07 after three steps against five).

    Args:
        steps: steps of this process in the epoch.
    """
    if member.world == 1:
        return steps
    all_steps = member.gathered(steps)
    most = max(all_steps)
    share_optimizer(learner, member, source=all_steps.index(most))
    return int(most)


def share_optimizer(learner: Learner, member: GroupMember, *, source: int) -> None:
    """Give all processes the momentum and the loss scale of one."""
    if member.world == 1:
        return
    state = learner.optimizer.state
    parameters = [parameter for group in learner.optimizer.param_groups for parameter in group["params"]]
    held = [state.get(parameter, {}).get("momentum_buffer") for parameter in parameters]
    moving = member.from_rank(source, [momentum is not None for momentum in held])
    for parameter, momentum, moves in zip(parameters, held, moving, strict=True):
        if not moves:
            state.pop(parameter, None)
            continue
        if momentum is None:
            momentum = torch.empty_like(parameter, memory_format=torch.preserve_format)
            state[parameter]["momentum_buffer"] = momentum
        with explained(member):
            dist.broadcast(momentum, source)
    learner.scaler.load_state_dict(member.from_rank(source, learner.scaler.state_dict()))


def share_buffers(learner: Learner, member: GroupMember) -> None:
    """Give all processes the running statistics of rank 0. DDP does so before each step, not after the last one."""
    if member.world == 1:
        return
    for buffer in learner.model.buffers():
        with explained(member):
            dist.broadcast(buffer, 0)


@contextmanager
def device_faults() -> Iterator[None]:
    """Translate errors of torch for a full or broken device to DeviceFullError and DeviceError."""
    from embq.worker.embedders.device.errors import translated_device_errors

    try:
        with translated_device_errors():
            yield
    except DeviceFullError as error:
        raise DeviceFullError(
            error.message, next_step="a smaller --batch-size or --image-size takes less, on a GPU --precision bf16 too"
        ) from error
