"""Device, dtype and batch sizes of a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from embq.core.errors import ConfigError, ModelError
from embq.core.models import ModelConfig
from embq.core.service.log import Events
from embq.worker.embedders.device.hardware import cpu_flags, precisions_of, simulated_speed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.float32}
"""Precision of the config -> type of weights and activations in torch; what int8 is computed in has its own runtime."""

CPU_NEEDS = {
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "int8": ("avx512_vnni", "avx_vnni", "amx_int8"),
}
"""Precision of the config -> instructions of a CPU, as Linux calls them, of which it has to have one. Without bf16 ones
torch is a hundred times slower than in fp32 (efficiency page of sentence-transformers); without int8 ones sums of two
products are cut off at 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSizes:
    """Usual sizes of a forward pass.

    Attributes:
        texts: most texts of a pass, which `tokens` bounds if they are longer than some words.
        window: texts that are sorted by length before they are cut into passes. Of 8,897 docstrings of the standard
            library, in tokens of all-MiniLM-L6-v2 and passes of 2,048 tokens, 81 % of what is computed is text with a
            window of 256, 94 % with 1,024, 98 % with 4,096; with passes of 16,384 tokens 45 %, 70 %, 86 %, and 94 %
            with 16,384.
        tokens: most padded tokens of a pass.
        images: most samples with an image of a pass.
    """

    texts: int
    window: int
    tokens: int
    images: int


CPU_SIZES = PassSizes(texts=256, window=4_096, tokens=1_024, images=16)
"""Measured on two Zen 4 cores with all-MiniLM-L6-v2, a pass on each: 512 and 1,024 tokens are equal, 2,048 is 14 %
slower in fp32 and 8 % in bf16 (1,536), 4,096 is 23 % slower. A CPU gains nothing from more images at once, and fewer of
them are a shorter wait when a worker stops."""

ACCELERATOR_SIZES = PassSizes(texts=2_048, window=32_768, tokens=16_384, images=256)
"""Enough tokens, or images, to fill a data-centre GPU with a small model."""

FLAT_WINDOW = 4_096
"""Window without padding. Sorting then only keeps short texts apart from very long ones, and a device waits for its
first whole window: for 32,768 texts of 256 tokens more than a second."""


def sizes_of(device: torch.device) -> PassSizes:
    """Usual sizes of a pass on a device."""
    return CPU_SIZES if device.type == "cpu" else ACCELERATOR_SIZES


def device_of(name: str) -> torch.device:
    """The torch device called `name`; ConfigError if this machine or this torch has none."""
    if simulated_speed(name):
        raise ConfigError(
            f"{name} is a simulated device, which only stub models run on",
            next_step="use cpu, cuda or cuda:<number>, or a model such as stub:384?ms_per_sample=10",
        )
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}", next_step="use cpu, cuda or cuda:<number>") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name} is not here: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices",
            next_step="use --devices cpu, or install the CUDA build of torch and a driver",
        )
    return device


def dtype_of(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The type in which the model computes on the device; ModelError if the device does not compute so.

    CPUs have no fp16 arithmetic, and NVIDIA GPUs before compute capability 8.0 no bf16 arithmetic: torch would emulate
    it, slowly. For fp32 on CUDA this turns TF32 off for the process, which rounds to 10 bits and is on by default for
    convolutions.
    """
    if config.precision == "fp16" and device.type == "cpu":
        raise ModelError(f"{config.spec}: a CPU does not compute in fp16", next_step=_admitting("fp32"))
    if config.precision in ("bf16", "fp16") and device.type == "cuda" and torch.version.hip is None:
        _check_capability(config, device)
    if config.precision == "int8" and device.type != "cpu":
        raise ModelError(
            f"{config.spec}: only a CPU computes in int8, not {device}",
            next_step="use bf16 or fp16 there, or --devices cpu",
        )
    needs = CPU_NEEDS.get(config.precision, ()) if device.type == "cpu" else ()
    if needs and not cpu_flags().intersection(needs):
        raise ModelError(
            f"{config.spec}: this CPU does not compute in {config.precision}, it has none of {', '.join(needs)}",
            next_step=_admitting("fp32"),
        )
    if config.precision == "fp32" and device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    return DTYPES[config.precision]


def _check_capability(config: ModelConfig, device: torch.device) -> None:
    """ModelError if an NVIDIA GPU emulates bf16; a warning if it has fp16, and fp32 is faster."""
    capability = torch.cuda.get_device_capability(device)
    fast = precisions_of(capability)
    if config.precision in fast:
        return
    card = f"{torch.cuda.get_device_name(device)} (compute capability {capability[0]}.{capability[1]})"
    if config.precision == "bf16":
        raise ModelError(
            f"{config.spec}: the {card} does not compute in bf16, torch emulates it slowly",
            next_step=_admitting(fast[0]),
        )
    Events("worker").warning("slow_precision", device=card, precision=config.precision, faster=fast[0])


def _admitting(precision: str) -> str:
    return f"--precision {precision} when the run is made admits this device"


def on_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on a device, without waiting for it: from ordinary memory a GPU copies only after all of its work.

    torch keeps the page-locked memory until it is copied, and uses it again (its caching host allocator).
    """
    if device.type != "cuda":
        return numbers.to(device)
    with torch.cuda.device(device):
        return numbers.pin_memory().to(device, non_blocking=True)


def all_on_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """One-dimensional arrays of one type on a device, by one copy, see `on_device`."""
    sent = on_device(torch.from_numpy(np.concatenate(arrays)), device)
    return list(torch.split(sent, [len(array) for array in arrays]))


def kernels_for_any_shape(device: torch.device) -> AbstractContextManager[object]:
    """Keep cuDNN out of torch's attention, for passes that each have another shape.

    torch prefers it on Hopper and Blackwell, and it makes a plan for each new shape, which takes 20 to 400 ms (FunASR
    issue 3704; pytorch issue 187770).
    """
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
