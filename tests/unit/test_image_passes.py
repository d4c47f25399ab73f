"""Images through a real model: from encoded bytes to vectors, and what the device may do meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embq.core.errors import DeviceError, DeviceFullError, Exit, SampleError
from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.base import BuffersImages, HasVariants, PendingVectors
from embq.worker.embedders.device.warm_up import warm_up
from embq.worker.embedders.image.buffer_pool import ROWS, gathered
from embq.worker.embedders.registry import load
from embq.worker.meter.meter import Meter
from embq.worker.stages.embed import EmbedStage
from embq.worker.stages.read import Chunk, EndOfUnit
from tests.contract.test_embedders import a_jpeg, make_clip
from tests.support.lazy import lazy
from tests.unit.test_stages import make_work, stages, texts  # noqa: F401 - a fixture

torch = lazy("torch")


SIDE = 32
WAIT_S = 30.0


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = make_clip(tmp_path_factory.mktemp("models") / "clip", seed=3, image_size=SIDE)
    return f"open_clip:local-dir:{folder}?batch_size=16"


@pytest.fixture
def embedder(spec: str) -> Any:
    return loaded(spec)


def loaded(spec: str, device: str = "cpu", precision: str = "fp32") -> Any:
    config = ModelConfig(spec=spec, modalities=("image",), precision=precision, decode="cpu-exact")
    return load(config, device)


@pytest.fixture(scope="module")
def images() -> list[Sample]:
    random = np.random.default_rng(0)
    made = [Sample(ordinal=n, key=str(n), image=a_jpeg(random)) for n in range(3 * ROWS)]
    made[5] = Sample(ordinal=5, key="5", image=b"\xff\xd8\xff cut")
    made[40] = Sample(ordinal=40, key="40", image=(made[40].image or b"")[:300])
    return made


def ready_of(embedder: Any, samples: Sequence[Sample], threads: int = 3) -> list[tuple[Sample, Any]]:
    """The samples prepared by threads, chunk by chunk."""
    with ThreadPoolExecutor(threads) as pool:
        chunks = [samples[start : start + 20] for start in range(0, len(samples), 20)]
        return list(zip(samples, (one for chunk in pool.map(embedder.prepare, chunks) for one in chunk), strict=True))


@pytest.fixture
def stage(stages: SimpleNamespace, embedder: Any) -> EmbedStage:  # noqa: F811
    return EmbedStage(embedder, Meter(), hand_on=stages.finished.append)


def give(stage: EmbedStage, work: Any, ready: Sequence[tuple[Sample, Any]]) -> None:
    for start in range(0, len(ready), 20):
        prepared: Future[Any] = Future()
        prepared.set_result(tuple(zip(*ready[start : start + 20], strict=True)))
        stage.add(Chunk(work, [sample for sample, _ in ready[start : start + 20]], prepared))
    stage.add(EndOfUnit(work, len(ready)))


@pytest.fixture(scope="module")
def expected(spec: str, images: list[Sample]) -> dict[int, np.ndarray]:
    """The vector of each image that can be decoded, embedded by itself."""
    embedder = loaded(spec)
    found = {}
    for sample in images:
        (ready,) = embedder.prepare([sample])
        if not isinstance(ready, SampleError):
            found[sample.ordinal] = embedder.embed([ready])["image"][0]
    return found


def check_rows(work: Any, expected: dict[int, np.ndarray], failed: set[int]) -> None:
    assert {failure.ordinal for failure in work.failures} == failed
    rows = np.concatenate(work.vectors["image"]).astype(np.float32)
    assert sorted(sample.ordinal for sample in work.samples) == sorted(set(expected) - failed)
    for sample, row in zip(work.samples, rows, strict=True):
        np.testing.assert_allclose(row, expected[sample.ordinal], atol=2e-3)


def test_images_keep_their_vectors_whatever_lies_beside_them_in_memory(
    stages: SimpleNamespace,  # noqa: F811
    embedder: Any,
    stage: EmbedStage,
    images: list[Sample],
    expected: dict[int, np.ndarray],
) -> None:
    work = make_work(stages, texts(stages, "a.txt", ["x"]), "t")
    ready = ready_of(embedder, images)
    rows = [one["image"] for _, one in ready[:5]]
    assert gathered(rows).data_ptr() == rows[0].pixels.data_ptr(), "a chunk lies in one piece"
    give(stage, work, ready)
    stage.flush()
    check_rows(work, expected, {5, 40})


@pytest.fixture
def passing(spec: str) -> Iterator[Any]:
    """An embedder whose passes go on beside the caller, as on several cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield loaded(spec)
    torch.set_num_threads(before)


def test_what_the_device_still_reads_is_not_overwritten_by_images_that_are_decoded_meanwhile(
    passing: Any, images: list[Sample], expected: dict[int, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given passes that stand still on the device, when images are decoded and let go, then the passes are unharmed."""
    good = [sample for sample in images if sample.ordinal not in (5, 40)]
    go_on = threading.Event()
    plain = passing.images.batch
    monkeypatch.setattr(passing.images, "batch", lambda rows, dtype: go_on.wait(WAIT_S) and plain(rows, dtype))
    passes = []
    for start in (0, 16):
        batch = [one for _, one in ready_of(passing, good[start : start + 16])]
        passes.append(passing.embed(batch))
        assert isinstance(passes[-1], PendingVectors)
        del batch
    for _ in range(5):
        ready_of(passing, good)
    slabs = passing.images._slabs.allocated
    go_on.set()
    for start, vectors in zip((0, 16), passes, strict=True):
        for place, row in enumerate(dict(vectors)["image"]):
            np.testing.assert_allclose(row, expected[good[start + place].ordinal], atol=1e-5)
    ready_of(passing, good)
    assert passing.images._slabs.allocated == slabs, "what the passes held is free again"


@pytest.mark.parametrize("is_late", [False, True], ids=["told at once", "told later"])
@pytest.mark.parametrize("room", [7, 1])
def test_a_device_with_room_for_few_images_embeds_all_of_them(
    stages: SimpleNamespace,  # noqa: F811
    embedder: Any,
    stage: EmbedStage,
    images: list[Sample],
    expected: dict[int, np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    room: int,
    is_late: bool,
) -> None:
    if not is_late:  # as a GPU tells it: before the pass is begun
        embedder._network._lanes = None
    plain = embedder._model.encode_image
    sizes = []

    def full(pixels: torch.Tensor, **options: Any) -> torch.Tensor:
        sizes.append(len(pixels))
        if len(pixels) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return plain(pixels, **options)

    monkeypatch.setattr(embedder._model, "encode_image", full)
    work = make_work(stages, texts(stages, "a.txt", ["x"]), "t")
    give(stage, work, ready_of(embedder, images))
    stage.flush()
    check_rows(work, expected, {5, 40})
    assert max(sizes) == 16
    assert is_late or max(sizes[-8:]) <= room, "later passes are no larger than what fits"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered\nmore"),
        torch.AcceleratorError("device-side assert triggered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ],
    ids=["context", "accelerator", "cudnn"],
)
def test_a_broken_device_ends_the_process_and_no_image_becomes_a_failure(
    stages: SimpleNamespace,  # noqa: F811
    embedder: Any,
    stage: EmbedStage,
    images: list[Sample],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def broken(pixels: torch.Tensor, **options: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(embedder._model, "encode_image", broken)
    work = make_work(stages, texts(stages, "a.txt", ["x"]), "t")
    give(stage, work, ready_of(embedder, images[:5]))
    with pytest.raises(DeviceError) as caught:
        stage.flush()
    assert caught.value.exit_code == Exit.DEVICE == 71
    assert not work.failures
    assert not work.samples


def test_the_bytes_that_wait_are_those_of_the_input_size(embedder: Any) -> None:
    assert isinstance(embedder, BuffersImages)
    assert embedder.image_bytes == SIDE * SIDE * 3
    assert isinstance(embedder, HasVariants)
    embedder.choose_variant(compile_s=1.0)  # of a CPU there is one way


def test_a_made_up_image_leaves_the_main_thread_its_cores(embedder: Any) -> None:
    cores = torch.get_num_threads()
    warm_up(embedder, ("image",))
    assert torch.get_num_threads() == cores


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_on_a_gpu_the_vectors_are_those_of_the_cpu_by_the_way_that_is_chosen_as_well(
    spec: str,
    images: list[Sample],
    expected: dict[int, np.ndarray],
    caplog: pytest.LogCaptureFixture,
    precision: str,
) -> None:
    good = [sample for sample in images if sample.ordinal in expected]
    vectors = np.stack([expected[sample.ordinal] for sample in good])
    embedder = loaded(spec, "cuda", precision)
    ready = [one for _, one in ready_of(embedder, good)]

    def least() -> float:
        passes = [embedder.embed(ready[start : start + 16]) for start in range(0, len(ready), 16)]
        found = np.concatenate([one["image"] for one in passes])
        return float((found * vectors).sum(axis=1).min())

    bar = 0.9999 if precision == "fp32" else 0.999
    assert least() >= bar
    with caplog.at_level("INFO", logger="worker"):
        embedder.choose_variant(compile_s=0)
    assert "image_path" in caplog.messages[-1]
    assert least() >= bar
    embedder.embed_in_fp32(ready[:2])
    assert least() >= bar, "the weights of a recorded pass are those of before"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_on_a_gpu_a_pass_that_does_not_fit_is_told_so_and_the_next_one_works(spec: str, images: list[Sample]) -> None:
    embedder = loaded(spec, "cuda")
    ready = [one for _, one in ready_of(embedder, images[:4])]
    expected = embedder.embed(ready)["image"]
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + (64 << 20)) / total))
    try:
        with pytest.raises(DeviceFullError):
            dict(embedder.embed(ready * 50_000))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    np.testing.assert_allclose(embedder.embed(ready)["image"], expected, atol=1e-5)
