"""What a step is computed in: autocast, and for fp16 the scale that keeps small gradients from becoming 0."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.errors import ConfigError

if TYPE_CHECKING:
    import torch


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
