"""Models on a CUDA device that is not the first: simulated cards everywhere, and real ones where there are two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from embq.core.errors import DeviceError, DeviceFullError, EmbqError, Exit, SampleError
from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.device.hardware import free_memory
from embq.worker.embedders.device.network import on_host
from embq.worker.embedders.device.placement import on_device
from embq.worker.embedders.device.tuning import tune
from embq.worker.embedders.device.warm_up import warm_up
from embq.worker.embedders.image.buffer_pool import ROWS, SlabPool, together
from embq.worker.embedders.image.upload import Uploader
from embq.worker.embedders.registry import load
from tests.contract.test_embedders import a_jpeg, make_clip
from tests.support.fakes import cuda as fake_cuda
from tests.support.lazy import lazy
from tests.support.models.text import save_trunk
from tests.support.models.vision import save_vision

torch = lazy("torch")


REAL = torch.cuda.device_count()
SECOND = "cuda:1"
PASS = 9
"""Samples of one."""

CASES = {
    "text padded": ("hf:{bert}", ("text",), "fp32"),
    "text flat": ("hf:{bert}?pooling=mean", ("text",), "bf16"),
    "sentence-transformers": ("st:{bert}", ("text",), "fp32"),
    "image": ("hf:{vit}", ("image",), "fp32"),
    "image in bf16": ("hf:{vit}?normalize=true", ("image",), "bf16"),
    "both": ("open_clip:local-dir:{clip}", ("image", "text"), "fp32"),
    "both in fp16": ("open_clip:local-dir:{clip}", ("image", "text"), "fp16"),
}
"""Spec, modalities, precision."""

needs_none = pytest.mark.skipif(
    REAL > 0, reason="there are real cards, which the simulated ones would be mixed up with"
)
SIMULATED = pytest.param("simulated", marks=needs_none)
CARDS = [
    SIMULATED,
    pytest.param(
        "real",
        marks=[pytest.mark.gpu, pytest.mark.skipif(REAL < 2, reason=f"torch sees {REAL} CUDA devices, 2 are needed")],
    ),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models with random weights."""
    root = tmp_path_factory.mktemp("models")
    return {
        "bert": str(save_trunk(root / "bert", "bert")),
        "vit": str(save_vision(root / "vit", "vit")),
        "clip": str(make_clip(root / "clip", seed=3, image_size=32)),
    }


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Images with texts of all lengths."""
    random = np.random.default_rng(0)
    texts = ["the quick brown fox " * (1 + n % 5) for n in range(4 * PASS)]
    return [Sample(ordinal=n, key=str(n), image=a_jpeg(random), text=text) for n, text in enumerate(texts)]


@contextmanager
def cards(kind: str, **options: Any) -> Iterator[None]:
    """Two cards; those of the machine are there anyway."""
    if kind == "real":
        yield
        return
    with fake_cuda.installed(**options):
        yield


def check_only(kind: str, *kinds: str) -> None:
    """Fail where anything happened on another simulated card than the second."""
    if kind == "simulated":
        fake_cuda.assert_only_on(1, kinds=kinds)


def loaded(case: str, folders: dict[str, str], device: str) -> Any:
    spec, modalities, precision = CASES[case]
    used = precision if device.startswith("cuda") else "fp32"
    return load(ModelConfig(spec=spec.format(**folders), modalities=modalities, precision=used), device)


def prepared_of(embedder: Any, samples: Sequence[Sample]) -> list[Any]:
    """As the read stage has it done, by threads."""
    with ThreadPoolExecutor(2) as pool:
        parts = [samples[start : start + PASS] for start in range(0, len(samples), PASS)]
        ready = [one for part in pool.map(embedder.prepare, parts) for one in part]
    assert not [one for one in ready if isinstance(one, SampleError)]
    return ready


def vectors_of(embedder: Any, ready: Sequence[Any]) -> dict[str, np.ndarray]:
    """As the embed stage has it done: a pass is begun before the vectors of the one before are asked for."""
    before, arrived = None, []
    for start in range(0, len(ready), PASS):
        after = embedder.embed(ready[start : start + PASS])
        if before is not None:
            arrived.append(dict(before))
        before = after
    arrived.append(dict(before or {}))
    return {output: np.concatenate([one[output] for one in arrived]) for output in arrived[0]}


def check_vectors(made: dict[str, np.ndarray], expected: dict[str, np.ndarray], precision: str) -> None:
    assert made.keys() == expected.keys()
    for output, rows in made.items():
        wanted = expected[output]
        cosines = (rows * wanted).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(wanted, axis=1)
        assert cosines.min() > (1 - 1e-6 if precision == "fp32" else 0.999), output
        if precision == "fp32":
            np.testing.assert_allclose(rows, wanted, rtol=0, atol=2e-5 * float(np.abs(wanted).max()))


def _often(case: str) -> object:
    """Images in fp32 only: `text flat` computes in bf16, and the trials and broken cards in both."""
    return pytest.param(case, marks=pytest.mark.slow if case in ("image in bf16", "both in fp16") else ())


@pytest.mark.parametrize("kind", CARDS)
@pytest.mark.parametrize("case", [_often(case) for case in CASES])
def test_vectors_of_the_second_card_are_those_of_a_cpu(
    case: str, kind: str, folders: dict[str, str], samples: list[Sample]
) -> None:
    """Given a thread whose current device is the first card, when a model embeds on the second, then everything is done
    there, and no vector is read before it has arrived."""
    modalities, precision = CASES[case][1:]
    here = loaded(case, folders, "cpu")
    expected = vectors_of(here, prepared_of(here, samples))
    with cards(kind):
        there = loaded(case, folders, SECOND)
        assert torch.cuda.current_device() == 0
        warm_up(there, modalities)
        ready = prepared_of(there, samples)
        check_vectors(vectors_of(there, ready), expected, precision)
        again = dict(there.embed_in_fp32(ready[:PASS]))
        check_vectors(again, {output: rows[:PASS] for output, rows in expected.items()}, precision)
        check_vectors(vectors_of(there, ready), expected, precision)
        free_memory(SECOND)
        check_only(
            kind, "event", "copy", "pinned", "allocation", "kernel", *(["stream"] if "image" in modalities else [])
        )


@pytest.mark.parametrize("kind", CARDS)
@pytest.mark.parametrize("case", ["image", pytest.param("both in fp16", marks=pytest.mark.slow), "text flat"])
def test_the_trials_of_the_second_card_are_made_there(
    case: str, kind: str, folders: dict[str, str], samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("embq.worker.embedders.device.trial.TRIAL_S", float("inf"))
    spec, modalities, precision = CASES[case]
    here = loaded(case, folders, "cpu")
    expected = vectors_of(here, prepared_of(here, samples))
    with cards(kind):
        there = loaded(case, folders, SECOND)
        there.batch_size = PASS
        config = ModelConfig(spec=spec.format(**folders), modalities=modalities, precision=precision)
        tune(there, config, device=SECOND, batch_size=PASS)
        check_vectors(vectors_of(there, prepared_of(there, samples)), expected, precision)
        check_only(kind, "kernel", *(["graph", "stream"] * ("image" in modalities)))


@pytest.mark.parametrize("kind", CARDS)
def test_every_piece_that_names_a_device_uses_no_other(kind: str) -> None:
    with cards(kind), torch.inference_mode():
        device = torch.device(SECOND)
        sent = on_device(torch.arange(100_000), device)
        arrived = on_host({"text": sent[:, None] * 2}, device)
        assert dict(arrived)["text"][:, 0].tolist() == list(range(0, 200_000, 2))
        slabs, uploader = SlabPool(2, 2, device), Uploader(device)
        for mark in range(5):
            rows = slabs.rows(ROWS // 2 + 1)
            together(rows).fill(mark)
            numbers = uploader.send(rows, torch.Tensor.float)
            del rows
            assert dict(on_host({"image": numbers.flatten(1)}, device))["image"].max() == mark
        check_only(kind, "event", "copy", "pinned", "stream", "wait")


# --- what goes wrong ---


@needs_none
@pytest.mark.parametrize("case", ["text flat", "sentence-transformers", "image in bf16", "both"])
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("no room for the model", DeviceFullError),
        ("no room for a context", DeviceFullError),
        ("no kernels for the card", DeviceError),
        ("context broken", DeviceError),
        ("driver too old", DeviceError),
    ],
)
def test_a_card_that_a_model_cannot_be_moved_to_is_at_fault_and_not_the_model(
    case: str, fault: str, error: type[EmbqError], folders: dict[str, str]
) -> None:
    options: dict[str, Any] = {"bytes": 20_000} if fault == "no room for the model" else {}
    options |= {"capability": (13, 0)} if fault == "no kernels for the card" else {}
    with fake_cuda.installed([{}, options]) as state:
        state.broken = {
            "no room for a context": "CUDA error: out of memory",
            "context broken": fake_cuda.ILLEGAL,
            "driver too old": "CUDA driver initialization failed, you might not have a CUDA gpu.",
        }.get(fault, "")
        with pytest.raises(error) as caught:
            loaded(case, folders, SECOND)
    assert caught.value.exit_code == Exit.DEVICE == 71
    assert "\n" not in caught.value.message


def in_fp32(embedder: Any, samples: Sequence[Sample]) -> None:
    ready = embedder.prepare(samples[:2])
    fake_cuda.break_device()
    embedder.embed_in_fp32(ready)


def arrives_late(embedder: Any, samples: Sequence[Sample]) -> None:
    vectors = embedder.embed(embedder.prepare(samples[:2]))
    fake_cuda.break_device()
    dict(vectors)


def memory_given_back(embedder: Any, samples: Sequence[Sample]) -> None:
    fake_cuda.break_device()
    free_memory(SECOND)


def prepares_first(embedder: Any, samples: Sequence[Sample]) -> None:
    fake_cuda.break_device()
    prepared_of(embedder, list(samples) * 2)


def warms_up(embedder: Any, samples: Sequence[Sample]) -> None:
    fake_cuda.break_device()
    warm_up(embedder, ("image", "text"))


def is_tuned(embedder: Any, samples: Sequence[Sample]) -> None:
    fake_cuda.break_device()
    embedder.choose_variant(compile_s=0.0)


@needs_none
@pytest.mark.parametrize(
    "use", [prepares_first, in_fp32, arrives_late, memory_given_back, warms_up, is_tuned], ids=lambda use: use.__name__
)
def test_a_broken_context_is_a_device_error_wherever_it_is_seen_first(
    use: Callable[[Any, Sequence[Sample]], None], folders: dict[str, str], samples: list[Sample]
) -> None:
    with fake_cuda.installed():
        embedder = loaded("both in fp16", folders, SECOND)
        with pytest.raises(DeviceError, match="illegal memory access"):
            use(embedder, samples)


@needs_none
def test_a_card_with_room_for_the_model_but_not_for_fp32_says_so_and_computes_on(
    folders: dict[str, str], samples: list[Sample]
) -> None:
    here = loaded("both in fp16", folders, "cpu")
    with fake_cuda.installed() as state:
        there = loaded("both in fp16", folders, SECOND)
        ready = prepared_of(there, samples[:PASS])
        dict(there.embed(ready))
        room = state.cards[1].bytes
        state.cards[1].bytes = state.cards[1].used + 2**20
        with pytest.raises(DeviceFullError):
            there.embed_in_fp32(ready)
        state.cards[1].bytes = room
        expected = dict(here.embed(prepared_of(here, samples[:PASS])))
        check_vectors(dict(there.embed(ready)), expected, "fp16")


@needs_none
def test_weights_that_cannot_be_cast_back_end_the_process(
    folders: dict[str, str], samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_cuda.installed() as state:
        there = loaded("both in fp16", folders, SECOND)
        ready = prepared_of(there, samples[:PASS])

        def while_others_take_the_rest(batch: Any) -> Any:
            torch.cuda.synchronize(1)
            state.cards[1].bytes = state.cards[1].used
            raise DeviceFullError("full")

        monkeypatch.setattr(there._network, "_pass", while_others_take_the_rest)
        with pytest.raises(DeviceError, match="cast back"):
            there.embed_in_fp32(ready)
