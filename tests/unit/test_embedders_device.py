"""What happens when a device is too small, broken, or not there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from core.errors import ConfigError, DeviceError, ModelError
from core.models import ModelConfig

torch = pytest.importorskip("torch")

from worker.embedders.device import device_of, dtype_of, embed_by_length, embed_in_halves  # noqa: E402

CONFIG = ModelConfig(spec="hf:./model", modalities=("text",), precision="fp32")


def with_memory_for(rows: int, error: Exception) -> tuple[list[int], object]:
    """A model that fails on more than `rows` rows, or on a row that is negative; with the sizes it was tried on."""
    tried: list[int] = []

    def run(batch: Sequence[float]) -> dict[str, torch.Tensor]:
        tried.append(len(batch))
        if len(batch) > rows or min(batch) < 0:
            raise error
        return {"text": torch.tensor([[value, value + 1] for value in batch], dtype=torch.bfloat16)}

    return tried, run


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["cuda", "cublas", "cpu"],
)
def test_a_batch_too_large_for_the_memory_is_embedded_in_halves_in_order(error: Exception) -> None:
    tried, run = with_memory_for(3, error)
    rows = embed_in_halves(run, range(10), {"text": 2})["text"]
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows[:, 0], np.arange(10))
    assert tried[0] == 10
    assert max(tried[1:]) == 5


def test_one_sample_that_never_fits_becomes_not_a_number_and_spares_the_others() -> None:
    _, run = with_memory_for(8, torch.OutOfMemoryError("CUDA out of memory"))
    rows = embed_in_halves(run, [1, 2, -3, 4], {"text": 2})["text"]
    np.testing.assert_array_equal(rows, [[1, 2], [2, 3], [np.nan, np.nan], [4, 5]])


def test_a_broken_device_asks_for_another_process() -> None:
    _, run = with_memory_for(0, RuntimeError("CUDA error: an illegal memory access was encountered\nmore"))
    with pytest.raises(DeviceError, match="illegal memory access"):
        embed_in_halves(run, [1, 2], {"text": 2})


def test_a_bug_stays_a_bug() -> None:
    _, run = with_memory_for(0, RuntimeError("shape mismatch"))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        embed_in_halves(run, [1, 2], {"text": 2})


def test_gradients_are_not_recorded() -> None:
    weight = torch.ones(1, 2, requires_grad=True)
    rows = embed_in_halves(lambda batch: {"text": weight * len(batch)}, [1], {"text": 2})["text"]
    np.testing.assert_array_equal(rows, [[1, 1]])


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


def test_length_ordered_pieces_keep_the_rows_of_the_batch_in_order_and_within_the_token_budget() -> None:
    lengths = [3, 50, 7, 50, 1, 20, 2, 9]
    pieces: list[int] = []

    def run(items: Sequence[int]) -> dict[str, torch.Tensor]:
        pieces.append(max(lengths[i] for i in items) * len(items))
        return {"text": torch.tensor([[float(i)] for i in items])}

    vectors = embed_by_length(run, list(range(8)), lengths, {"text": 1}, 60)
    assert vectors["text"][:, 0].tolist() == [float(i) for i in range(8)]
    assert max(pieces) <= 60
    assert len(pieces) < 8
