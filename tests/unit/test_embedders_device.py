"""What happens when a device is too small, broken, or not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from core.errors import ConfigError, DeviceError, DeviceFullError, ModelError
from core.models import ModelConfig

torch = pytest.importorskip("torch")

from worker.embedders.device import device_of, dtype_of, forward  # noqa: E402

CONFIG = ModelConfig(spec="hf:./model", modalities=("text",), precision="fp32")


def failing(error: Exception) -> Callable[[Sequence[int]], dict[str, torch.Tensor]]:
    """A model on a device that answers with an error."""

    def run(batch: Sequence[int]) -> dict[str, torch.Tensor]:
        raise error

    return run


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["cuda", "cublas", "cpu"],
)
def test_a_batch_too_large_for_the_memory_has_an_error_that_keeps_nothing_of_it_alive(error: Exception) -> None:
    with pytest.raises(DeviceFullError, match="too small") as caught:
        forward(failing(error), [1, 2], {"text": 2})
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_a_broken_device_asks_for_another_process() -> None:
    run = failing(RuntimeError("CUDA error: an illegal memory access was encountered\nmore"))
    with pytest.raises(DeviceError, match="illegal memory access"):
        forward(run, [1, 2], {"text": 2})


def test_a_bug_stays_a_bug() -> None:
    with pytest.raises(RuntimeError, match="shape mismatch"):
        forward(failing(RuntimeError("shape mismatch")), [1, 2], {"text": 2})


def test_gradients_are_not_recorded() -> None:
    weight = torch.ones(1, 2, requires_grad=True, dtype=torch.bfloat16)
    rows = forward(lambda batch: {"text": weight * len(batch)}, [1], {"text": 2})["text"]
    np.testing.assert_array_equal(rows, [[1, 1]])
    assert rows.dtype == np.float32


@pytest.mark.parametrize("name", ["gpu0", "cuda:99", ""])
def test_a_device_that_is_not_here_is_a_configuration_error(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        device_of(name)
    assert caught.value.next_step


def test_a_cpu_computes_in_fp32_and_bf16_but_not_in_fp16() -> None:
    cpu = device_of("cpu")
    assert dtype_of(CONFIG, cpu) == torch.float32
    assert dtype_of(ModelConfig(spec="x", modalities=("text",), precision="bf16"), cpu) == torch.bfloat16
    with pytest.raises(ModelError, match="fp16"):
        dtype_of(ModelConfig(spec="x", modalities=("text",), precision="fp16"), cpu)
