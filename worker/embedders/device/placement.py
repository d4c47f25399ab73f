"""What the device decides: where a model runs, in which numbers, how many samples at once, and what may go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from core.errors import ConfigError, DeviceError, DeviceFullError, EmbqError, ModelError
from core.models import ModelConfig
from core.service.log import Events
from worker.embedders.device.hardware import cpu_flags, precisions_of, simulated_speed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.float32}
"""Precision of the config -> type of weights and activations in torch; what int8 is computed in has its own runtime."""

CPU_NEEDS = {
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "int8": ("avx512_vnni", "avx_vnni", "amx_int8"),
}
"""Precision of the config -> instructions of a CPU, as Linux calls them, of which it has to have one. Without bf16 ones
torch is a hundred times slower than in fp32 (efficiency page of sentence-transformers); without int8 ones sums of two
products are cut off at 16 bits."""

CPU_TEXT_BATCH, ACCELERATOR_TEXT_BATCH = 256, 2_048
"""Most texts of one forward pass, which is bounded by `token_budget` where they are longer than some words."""

CPU_WINDOW, ACCELERATOR_WINDOW = 4_096, 32_768
"""Texts that are sorted by length before they are cut into passes. Of 8,897 docstrings of the standard library, in
tokens of all-MiniLM-L6-v2 and passes of 2,048 tokens, 81 % of what is computed is text with a window of 256, 94 % with
1,024, 98 % with 4,096; with passes of 16,384 tokens 45 %, 70 %, 86 %, and 94 % with 16,384."""

CPU_TOKENS = 1_024
"""Padded tokens of one forward pass. Measured on two Zen 4 cores with all-MiniLM-L6-v2, a pass on each: 512 and 1,024
are equal, 2,048 is 14 % slower in fp32 and 8 % in bf16 (1,536), 4,096 is 23 % slower."""

ACCELERATOR_TOKENS = 16_384
"""Padded tokens of one forward pass: enough to fill a data-centre GPU with a small model."""

CPU_IMAGE_BATCH = 16
"""A CPU gains nothing from more images at once, and a smaller batch is a shorter wait when a worker stops."""

ACCELERATOR_IMAGE_BATCH = 256
"""Fills a data-centre GPU with a small model."""

DEVICE_FAULTS = (
    *("CUDA error", "CUDA driver", "CUDA unknown error", "CUDA GPUs", "NVIDIA driver", "HIP error"),
    *("CUBLAS_STATUS", "CUDNN_STATUS", "device-side"),
)
"""Parts of what torch says where a device or its driver is at fault, also while a context is made."""


def device_of(name: str) -> torch.device:
    """The torch device called `name`; ConfigError where this machine or this torch has none."""
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
    """The type in which the model computes on the device; ModelError where the device does not compute so.

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
    """ModelError where an NVIDIA GPU emulates bf16; a warning where it has fp16, and fp32 is faster."""
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


def text_batch_size_of(device: torch.device) -> int:
    """Most texts of one forward pass."""
    return CPU_TEXT_BATCH if device.type == "cpu" else ACCELERATOR_TEXT_BATCH


def text_window_of(device: torch.device) -> int:
    """Texts that are sorted by length at once."""
    return CPU_WINDOW if device.type == "cpu" else ACCELERATOR_WINDOW


def image_batch_size_of(device: torch.device) -> int:
    """Most samples with an image of one forward pass."""
    return CPU_IMAGE_BATCH if device.type == "cpu" else ACCELERATOR_IMAGE_BATCH


def token_budget_of(device: torch.device) -> int:
    """Most padded tokens of one forward pass of a text model."""
    return CPU_TOKENS if device.type == "cpu" else ACCELERATOR_TOKENS


def on_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same on a device, which is not waited for: from ordinary memory a GPU copies only when it is through with
    what it was given before. torch keeps the page-locked memory until it is copied.
    """
    if device.type != "cuda":
        return numbers.to(device)
    with torch.cuda.device(device):
        return numbers.pin_memory().to(device, non_blocking=True)


@contextmanager
def using(device: torch.device) -> Iterator[None]:
    """Make a device the current one of the thread, and turn what it raises into our own errors, see `device_error`.

    In CUDA a stream, an event, page-locked memory and a copy belong to the thread's current device where they name
    none. That is cuda:0 in each thread at first, whatever device the tensors are on.
    """
    with foreign_faults(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


@contextmanager
def foreign_faults() -> Iterator[None]:
    """Turn what torch raises for a device that is full or broken into our own errors, see `device_error`."""
    try:
        yield
    except RuntimeError as error:
        if (told := device_error(error)) is not None:
            raise told from error
        raise


def device_error(error: Exception) -> EmbqError | None:
    """The DeviceFullError or DeviceError that a foreign exception stands for; None where the device is not at fault."""
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError) or _says_out_of_memory(error):
        return DeviceFullError(f"the memory of the device is too small: {first}")
    return DeviceError(f"the device failed: {first}") if is_device_fault(error) else None


def _says_out_of_memory(error: Exception) -> bool:
    """cuBLAS and the CPU allocator report it with a plain RuntimeError. So does torch on MIG instances and on Jetson,
    where it fails to ask NVML for what its message would say (pytorch issues 112377, 185240)."""
    parts = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "NVML_SUCCESS == r INTERNAL ASSERT")
    return isinstance(error, RuntimeError) and any(part in str(error) for part in parts)


def is_device_fault(error: Exception) -> bool:
    """Whether a foreign exception says that the device, not the model or the input, is at fault."""
    accelerator_error = getattr(torch, "AcceleratorError", None)  # since torch 2.8
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return True
    return any(word in str(error) for word in DEVICE_FAULTS)
