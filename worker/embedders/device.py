"""What the device decides: where a model runs, in which numbers, how many samples at once, and what may go wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch

from core.errors import ConfigError, DeviceError, ModelError
from core.models import ModelConfig
from worker.embedders.hardware import simulated_speed

T = TypeVar("T")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision of the config -> type of weights and activations."""

CPU_TEXT_BATCH = 256
"""Texts from which batches of like length are cut; the forward passes themselves are bounded by `token_budget`."""

CPU_TOKENS = 2_048
"""Padded tokens of one forward pass. Measured on two Zen 4 cores: 512 is 5 % slower, 8,192 is 16 % slower."""

ACCELERATOR_TOKENS = 16_384
"""Padded tokens of one forward pass: enough to fill a data-centre GPU with a small model."""

CPU_IMAGE_BATCH = 16
"""A CPU gains nothing from more images at once, and a smaller batch is a shorter wait when a worker stops."""

ACCELERATOR_BATCH = 256
"""Fills a data-centre GPU with a small model; halved by `embed_in_halves` where the memory is less."""


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
    """The type in which the model computes on the device; ModelError for fp16 on a CPU.

    CPUs have no fp16 arithmetic: torch would emulate it, slowly and with overflow. For fp32 on CUDA this turns
    TF32 off for the process, which rounds to 10 bits and is on by default for convolutions.
    """
    if config.precision == "fp16" and device.type == "cpu":
        raise ModelError(f"{config.spec}: a CPU does not compute in fp16", next_step="use fp32 or bf16")
    if config.precision == "fp32" and device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    return DTYPES[config.precision]


def text_batch_size_of(device: torch.device) -> int:
    """Texts per call of `embed` for models whose forward passes are bounded by `token_budget`."""
    return CPU_TEXT_BATCH if device.type == "cpu" else 8 * ACCELERATOR_BATCH


def token_budget(device: torch.device) -> int:
    """Most padded tokens of one forward pass of a text model."""
    return CPU_TOKENS if device.type == "cpu" else ACCELERATOR_TOKENS


def embed_by_length(
    run: Callable[[Sequence[T]], Mapping[str, torch.Tensor]],
    batch: Sequence[T],
    lengths: Sequence[int],
    dims: Mapping[str, int],
    budget: int,
) -> dict[str, np.ndarray]:
    """`embed_in_halves` of pieces of like length, longest first, each of at most `budget` padded tokens.

    Texts that are padded to a much longer neighbour waste most of their arithmetic. The rows come in the batch's order.
    """
    vectors = {modality: np.empty((len(batch), dim), dtype=np.float32) for modality, dim in dims.items()}
    order = sorted(range(len(batch)), key=lambda i: -lengths[i])
    start = 0
    while start < len(order):
        stop = start + max(1, budget // max(1, lengths[order[start]]))
        rows = order[start:stop]
        for modality, block in embed_in_halves(run, [batch[i] for i in rows], dims).items():
            vectors[modality][rows] = block
        start = stop
    return vectors


def embed_in_halves(
    run: Callable[[Sequence[T]], Mapping[str, torch.Tensor]], batch: Sequence[T], dims: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """`run` of the batch as float32 arrays of shape (len(batch), dim); in halves where the memory is too small.

    A single sample that does not fit becomes a vector of NaN, which the caller turns into a failure. Raises
    DeviceError for any other error of the device: after one, a CUDA context is broken for good.
    """
    if not batch:
        return {modality: np.empty((0, dim), dtype=np.float32) for modality, dim in dims.items()}
    try:
        with torch.inference_mode():
            return {
                modality: vectors.to(device="cpu", dtype=torch.float32).numpy()
                for modality, vectors in run(batch).items()
            }
    except torch.OutOfMemoryError:
        pass
    except RuntimeError as error:
        if not _says_out_of_memory(error):
            if is_device_fault(error):
                raise DeviceError(f"the device failed: {str(error).splitlines()[0]}") from error
            raise
    # Outside of the except block, because the traceback keeps the failed batch's tensors alive.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if len(batch) == 1:
        return {modality: np.full((1, dim), np.nan, dtype=np.float32) for modality, dim in dims.items()}
    middle = len(batch) // 2
    first = embed_in_halves(run, batch[:middle], dims)
    second = embed_in_halves(run, batch[middle:], dims)
    return {modality: np.concatenate([first[modality], second[modality]]) for modality in dims}


def _says_out_of_memory(error: RuntimeError) -> bool:
    """cuBLAS and the CPU allocator report it with a plain RuntimeError."""
    text = str(error)
    return "out of memory" in text or "ALLOC_FAILED" in text or "can't allocate memory" in text


def is_device_fault(error: Exception) -> bool:
    """Whether a foreign exception says that the device, not the model or the input, is at fault."""
    accelerator_error = getattr(torch, "AcceleratorError", None)  # since torch 2.8
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return True
    return any(word in str(error) for word in ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "device-side"))
