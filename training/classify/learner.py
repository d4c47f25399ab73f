"""What learns: a model, its optimiser, and one step of both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError, DeviceFullError
from training.classify.config import Config
from training.classify.process_group import Member, explained

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The precision of a training on one device.

    Attributes:
        name: fp32, bf16 or fp16.
        device: "cuda" or "cpu".
    """

    name: str
    device: str

    @classmethod
    def chosen(cls, asked: str, device: torch.device) -> Precision:
        """What was asked for, or what suits the device; ConfigError where it cannot compute in it."""
        import torch

        on_gpu = device.type == "cuda"
        bf16 = not on_gpu or torch.cuda.is_bf16_supported(including_emulation=False)
        if asked == "fp16" and not on_gpu:
            raise ConfigError("--precision fp16 needs a GPU", next_step="leave it out, or take bf16")
        if asked == "bf16" and not bf16:
            raise ConfigError(
                f"--precision bf16: {torch.cuda.get_device_name(device)} does not compute in it",
                next_step="take fp16 or fp32",
            )
        return cls(name=asked or ("bf16" if on_gpu and bf16 else "fp32"), device=device.type)

    def autocast(self) -> AbstractContextManager[object]:
        """For the forward pass and the loss."""
        import torch

        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device, dtype=torch.bfloat16 if self.name == "bf16" else torch.float16)

    def scaler(self) -> torch.amp.GradScaler:
        """Scales the loss in fp16; in the others it does nothing."""
        import torch

        return torch.amp.GradScaler(self.device, enabled=self.name == "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A model on its device with its optimiser.

    Attributes:
        model: the network itself; its weights are what is kept.
        trained: what a step calls: the network, or DDP around it, which averages the gradients of all processes.
        optimizer: SGD with momentum.
        scaler: of the loss, for fp16.
        precision: of the forward pass.
        loss: cross entropy, with label smoothing.
        clip: highest norm of the gradient; 0 for any.
        device: where all of this is.
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
    def around(cls, model: nn.Module, config: Config, precision: Precision, member: Member) -> Learner:
        """A learner of a model that is on its device; with several processes all take the weights of rank 0."""
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        trained: nn.Module = model
        if member.world > 1:
            ids = [member.device.index] if member.device.type == "cuda" else None
            with explained(member):
                trained = DistributedDataParallel(model, device_ids=ids)
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

    def moved(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A batch on the device, in the order of memory that its convolutions are fastest with."""
        import torch

        on_gpu = self.device.type == "cuda"
        order = torch.channels_last if on_gpu else torch.preserve_format
        return (
            images.to(self.device, non_blocking=on_gpu, memory_format=order),
            labels.to(self.device, non_blocking=on_gpu),
        )

    def step(
        self, images: Tensor, labels: Tensor, *, lr: float, at_rest: Callable[[], None] = lambda: None
    ) -> tuple[Tensor, Tensor]:
        """Learn from one batch.

        Args:
            images: float32 (n, 3, height, width).
            labels: int64 (n,).
            lr: learning rate of this step.
            at_rest: called when nothing is changed yet, and all processes have the same weights and running statistics:
                DDP evens those out at the beginning of a step, by the statistics of one process, under Join not rank 0.

        Returns the mean loss of the batch, and how many of it were told right before the step; both stay on the device.
        """
        import torch

        images, labels = self.moved(images, labels)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        with _before(self.model, at_rest), _norms_at_rest(self.model) if len(labels) == 1 else nullcontext():
            with self.precision.autocast():
                output = self.trained(images)
                loss = self.loss(output.float(), labels)
            self.scaler.scale(loss).backward()
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach(), (output.detach().argmax(1) == labels).sum()

    def state(self) -> dict[str, Any]:
        """All that a step changes."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }


@contextmanager
def _before(model: nn.Module, call: Callable[[], None]) -> Iterator[None]:
    """For the length of the block, `call` comes before each forward pass of the network itself."""
    hook = model.register_forward_pre_hook(lambda *_: call())
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _norms_at_rest(model: nn.Module) -> Iterator[None]:
    """Batch normalisation by its running statistics: over one sample with maps of one pixel there are none to take."""
    from torch.nn.modules.batchnorm import _BatchNorm

    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()


def seed_step(*parts: int) -> None:
    """Begin torch's random numbers anew, as seed, epoch, step and rank say: a resumed step draws what it would have."""
    import torch

    text = "/".join(map(str, parts)).encode()
    torch.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1)


@contextmanager
def device_faults() -> Iterator[None]:
    """DeviceFullError, or DeviceError, of what torch raises within the block where a device is full, or broken."""
    from worker.embedders.device.errors import translated_device_errors

    try:
        with translated_device_errors():
            yield
    except DeviceFullError as error:
        raise DeviceFullError(
            error.message, next_step="a smaller --batch-size or --image-size takes less, on a GPU --precision bf16 too"
        ) from error
