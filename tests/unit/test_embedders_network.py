"""The forward passes of a network: what a device answers, and numbers that half precision cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from embq.core.errors import DeviceError, DeviceFullError
from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.base import Embedder
from embq.worker.embedders.device.network import Network
from embq.worker.embedders.registry import load
from embq.worker.meter.meter import Meter
from embq.worker.stages.embed import EmbedStage
from embq.worker.stages.read import Chunk, EndOfUnit
from tests.contract.test_embedders import make_encoder
from tests.support.lazy import lazy
from tests.unit.test_stages import make_work, stages, texts  # noqa: F401 - a fixture

torch = lazy("torch")


BROKEN = "nothing"
"""A word whose weights are not finite in the file."""


def network(run: Callable[[Sequence[int]], dict[str, torch.Tensor]]) -> Network[int]:
    """A network that runs `run`, but for the first sample, by which lengths are found."""
    first = iter([{"text": torch.zeros(1, 2)}])
    module = torch.nn.Linear(2, 2)
    cpu = torch.device("cpu")
    return Network(module, lambda batch: next(first, None) or run(batch), device=cpu, dtype=torch.float32, example=0)


def failing(error: Exception) -> Callable[[Sequence[int]], dict[str, torch.Tensor]]:
    """A pass on a device that answers with an error."""

    def run(batch: Sequence[int]) -> dict[str, torch.Tensor]:
        raise error

    return run


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory"),
        RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1165'),
    ],
    ids=["cuda", "cublas", "cpu", "mig"],
)
def test_a_batch_too_large_for_the_memory_has_an_error_that_keeps_nothing_of_it_alive(error: Exception) -> None:
    with pytest.raises(DeviceFullError, match="too small") as caught:
        dict(network(failing(error)).embed([1, 2]))
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_a_broken_device_asks_for_another_process() -> None:
    broken = network(failing(RuntimeError("CUDA error: an illegal memory access was encountered\nmore")))
    with pytest.raises(DeviceError, match="illegal memory access"):
        dict(broken.embed([1, 2]))


def test_a_bug_stays_a_bug() -> None:
    with pytest.raises(RuntimeError, match="shape mismatch"):
        dict(network(failing(RuntimeError("shape mismatch"))).embed([1, 2]))


def test_gradients_are_not_recorded_and_vectors_are_float32() -> None:
    weight = torch.ones(1, 2, requires_grad=True, dtype=torch.bfloat16)
    rows = network(lambda batch: {"text": weight * len(batch)}).embed([1])["text"]
    np.testing.assert_array_equal(rows, [[1, 1]])
    assert rows.dtype == np.float32


# --- numbers that half precision cannot hold ---


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The spec of a model with weights that fp32 holds and bf16 does not, and with a word that nothing helps."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    root: Path = tmp_path_factory.mktemp("overflowing")
    trunk = Transformer(str(make_encoder(root / "trunk", seed=4)))
    up, down = (Dense(32, 32, bias=False, activation_function=torch.nn.Identity()) for _ in range(2))
    with torch.no_grad():
        up.linear.weight.copy_(torch.eye(32) * 3.4e38)
        down.linear.weight.copy_(torch.eye(32) * 1e-36)
        trunk.auto_model.encoder.layer[-1].output.LayerNorm.weight.mul_(0.01)
        word = trunk.processor.convert_tokens_to_ids(BROKEN)
        trunk.auto_model.embeddings.word_embeddings.weight[word] = torch.nan
    model = SentenceTransformer(modules=[trunk, Pooling(32, "mean"), up, down, Normalize()], device="cpu")
    model.save(str(root / "model"), create_model_card=False)
    return f"st:{root / 'model'}"


def of(spec: str, precision: str) -> Embedder:
    return load(ModelConfig(spec=spec, modalities=("text",), precision=precision), "cpu")


def prepared(embedder: Embedder, *lines: str) -> list[object]:
    return embedder.prepare([Sample(ordinal=n, key=str(n), text=line) for n, line in enumerate(lines)])


@pytest.mark.usefixtures("bf16_cpu")
def test_what_bf16_cannot_hold_is_computed_in_fp32_and_the_weights_are_as_before(overflowing: str) -> None:
    half, full = of(overflowing, "bf16"), of(overflowing, "fp32")
    batch = prepared(half, "a word", "another one, and longer")
    first = half.embed(batch)["text"]
    assert not np.isfinite(first).any(axis=1).all()
    expected = full.embed(batch)["text"]
    assert np.isfinite(expected).all()
    # All other weights were rounded to bf16 before.
    mended = half.embed_in_fp32(batch)["text"]
    assert (mended * expected).sum(axis=1).min() > 0.999
    assert not np.array_equal(mended[0], mended[1])
    np.testing.assert_array_equal(half.embed(batch)["text"], first)
    # `embed` takes the path that was faster when the model was loaded, and that rounds otherwise.
    np.testing.assert_allclose(full.embed_in_fp32(batch)["text"], expected, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("bf16_cpu")
@pytest.mark.parametrize(("precision", "recomputed"), [("bf16", 3), ("fp32", 1)])
def test_a_row_that_is_not_finite_is_computed_once_more_before_it_is_a_failure(
    stages: SimpleNamespace,  # noqa: F811
    overflowing: str,
    precision: str,
    recomputed: int,
) -> None:
    embedder, stats = of(overflowing, precision), Meter()
    stage = EmbedStage(embedder, stats, hand_on=stages.finished.append)
    work = make_work(stages, texts(stages, "a.txt", ["x"]), "t")
    lines = ["a word", f"{BROKEN} to see", "another one, and longer"]
    samples = [Sample(ordinal=n, key=str(n), text=line) for n, line in enumerate(lines)]
    ready: Future[object] = Future()
    ready.set_result((samples, prepared(embedder, *lines)))
    stage.add(Chunk(work, samples, ready))
    stage.add(EndOfUnit(work, samples=3))
    stage.flush()
    assert [(failure.ordinal, failure.code) for failure in work.failures] == [(1, "non_finite")]
    assert sorted(sample.ordinal for sample in work.samples) == [0, 2]
    assert np.isfinite(np.concatenate(work.vectors["text"])).all()
    assert stats.recomputed == recomputed
    assert stages.finished == [work]
