"""JPEGs decoded and resized in batches by torchcodec: on a GPU where there is one, and on a CPU by the same calls.

A CPU cannot show the pixels of a GPU's decoders, nor which damage they notice. The tests for that are the same ones,
marked for a GPU.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
try:
    import torchcodec.decoders  # noqa: F401
except (ImportError, OSError, RuntimeError) as error:
    pytest.skip(f"torchcodec cannot be imported ({error}): pip install 'embq[gpu-decode]'", allow_module_level=True)

from contract import test_image_kinds as kinds  # noqa: E402
from contract import test_preprocess as fits  # noqa: E402
from contract.test_embedders import make_clip  # noqa: E402
from contract.test_image_kinds import data_of, failures, preprocess_of, psnr, reference, rows  # noqa: E402
from contract.test_preprocess import photograph  # noqa: E402
from PIL import Image  # noqa: E402
from unit.test_image_passes import give, ready_of, spec  # noqa: E402, F401 - a fixture
from unit.test_stages import make_work, stages, texts  # noqa: E402, F401 - a fixture

from embq.core.errors import DeviceError, ModelError, SampleError  # noqa: E402
from embq.core.models import GPU, ModelConfig, NamedModel  # noqa: E402
from embq.core.units import Sample  # noqa: E402
from embq.worker.embedders.image import gpu_decode, upload  # noqa: E402
from embq.worker.embedders.image.gpu_decode import GpuDecoder, suits  # noqa: E402
from embq.worker.embedders.image.headers import check_file  # noqa: E402
from embq.worker.embedders.image.jpeg import frame_of  # noqa: E402
from embq.worker.embedders.image.pixels import Pixels, prepared  # noqa: E402
from embq.worker.embedders.image.preprocess import usual  # noqa: E402
from embq.worker.embedders.image.upload import ImageBatcher, image_rows  # noqa: E402
from embq.worker.embedders.registry import load  # noqa: E402
from embq.worker.meter.meter import Meter  # noqa: E402
from embq.worker.stages.embed import EmbedStage  # noqa: E402
from tests.support.fakes import cuda as fake_cuda  # noqa: E402
from tests.support.picture_files import EQUAL, encoded  # noqa: E402

USUAL = "224 shortest bicubic"
SIZES = [(512, 384), (384, 512), (255, 383), (333, 251), (225, 224), (640, 480), (150, 113), (1024, 768), (500, 1700)]
LEAST, MEAN = 36, 44
"""PSNR of photographs, in dB, that a GPU has to reach. It repeats the chroma of subsampled JPEGs: with a decoder of a
CPU that does the same, those of `SIZES` have 39 dB at least and 47 in the mean."""

FAILING = "jpeg without quantisation tables"
"""A file that suits the device, and that libjpeg refuses."""

ON = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
        ],
    ),
]


quiet = kinds.quiet


@pytest.fixture(scope="module", params=ON)
def decoder(request: pytest.FixtureRequest) -> GpuDecoder:
    return GpuDecoder(torch.device(request.param))


@pytest.fixture
def calls(decoder: GpuDecoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images of each call of torchcodec."""
    counted: list[int] = []
    plain = decoder._call

    def call(sources: Sequence[Any]) -> Any:
        counted.append(len(sources))
        return plain(sources)

    monkeypatch.setattr(decoder, "_call", call)
    return counted


@pytest.fixture
def everywhere(decoder: GpuDecoder, monkeypatch: pytest.MonkeyPatch) -> str:
    """Models decode by `decoder`, also on a CPU, which a run refuses; gives the device."""
    monkeypatch.setattr(upload, "gpu_decoder", lambda device: decoder)
    return decoder._device.type


def samples_of(images: Sequence[bytes]) -> list[Sample]:
    return [Sample(ordinal=n, key=str(n), image=data) for n, data in enumerate(images)]


def taken(data: bytes) -> bool:
    """True if the device is asked to decode the file."""
    frame = check_file(data)
    return frame is not None and suits(data, frame)


def rows_of(images: Sequence[bytes], decoder: GpuDecoder) -> Iterator[np.ndarray | str]:
    """The pixels of each image, or the code of its failure, as a chunk of a worker has them."""
    path = Pixels(preprocess_of(USUAL), GPU, decoder)
    made = np.empty((len(images), *path.shape), np.uint8)
    (errors,) = prepared(samples_of(images), [path], [made])
    for pixels, error in zip(made, errors, strict=True):
        yield pixels if error is None else error.code


def by_device(images: Sequence[bytes], decoder: GpuDecoder) -> list[np.ndarray | None]:
    """The pixels that the device gives, None of an image that it leaves to the CPU."""
    made = dict(decoder.decoded(samples_of(images), usual(224).fit))
    return [made.get(place) for place in range(len(images))]


def exact(data: bytes) -> np.ndarray:
    return Pixels(preprocess_of(USUAL), "cpu-exact").of(data)


def same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
def test_photographs_have_nearly_the_pixels_of_open_clip(decoder: GpuDecoder, mode: str, interpolation: str) -> None:
    transform, preprocess = fits.preprocess_of(size=224, resize_mode=mode, interpolation=interpolation, fill_color=3)
    images = [photograph(width, height) for width, height in SIZES]
    made = dict(decoder.decoded(samples_of(images), preprocess.fit))
    found = [min(99.0, psnr(made[place], fits.by_open_clip(data, transform))) for place, data in enumerate(images)]
    # On a CPU only the steps of resizing differ.
    least, mean = (65, 70) if decoder._device.type == "cpu" else (LEAST, MEAN)
    assert min(found) >= least
    assert np.mean(found) >= mean


def test_every_kind_of_image_is_a_row_by_the_device_or_by_the_cpu(decoder: GpuDecoder) -> None:
    found = rows_of([file.data for file in rows().values()], decoder)
    for file, row in zip(rows().values(), found, strict=True):
        assert not isinstance(row, str), file.name
        expected = reference(file.data, USUAL)
        if file.outcome == EQUAL:
            assert np.array_equal(row, expected), file.name
        else:
            assert psnr(row, expected) >= (LEAST if taken(file.data) else 55), file.name


def test_what_cannot_be_decoded_has_the_code_of_the_other_paths(decoder: GpuDecoder) -> None:
    found = rows_of([file.data for file in failures().values()], decoder)
    assert dict(zip(failures(), found, strict=True)) == {name: file.outcome for name, file in failures().items()}


def test_whole_plain_jpegs_are_for_the_device_and_nothing_else_is() -> None:
    names = {name for name, file in rows().items() if taken(file.data)}
    assert {"jpeg 4:2:0", "jpeg 4:4:4", "jpeg gray", "jpeg turned by exif"} <= names
    not_plain = ("progressive", "cmyk", "without a colour transform", "png", "webp", "gif", "tiff")
    assert not any(word in name for name in names for word in not_plain)
    large = photograph(4200, 3000)
    frame = frame_of(large)
    assert frame is not None
    assert not suits(large, frame), "more than the device has room for"
    data = photograph(333, 251)
    frame = frame_of(data)
    assert frame is not None
    assert suits(data, frame)
    assert not suits(data + b"\0", frame)
    assert not suits(data[:-2], frame)


@pytest.mark.parametrize("orientation", range(2, 9))
def test_orientation_is_not_applied(decoder: GpuDecoder, orientation: int) -> None:
    with Image.open(io.BytesIO(photograph(384, 256))) as image:
        exif = image.getexif()
        exif[0x0112] = orientation
        plain, turned = encoded(image, "JPEG", quality=90), encoded(image, "JPEG", quality=90, exif=exif)
    assert plain != turned
    upright, other = by_device([plain, turned], decoder)
    assert upright is not None
    assert np.array_equal(upright, other)


def test_a_chunk_is_one_call_and_a_call_has_no_more_pixels_than_there_is_room_for(
    decoder: GpuDecoder, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [photograph(64, 48)] * 20 + [photograph(48, 64)] * 12
    together = by_device(images, decoder)
    assert calls == [32]
    calls.clear()
    monkeypatch.setattr(gpu_decode, "MAX_PIXELS", 10 * 64 * 48)
    assert same(by_device([*images, photograph(333, 251)], decoder), [*together, None])
    assert calls == [10, 10, 10, 2]


def test_an_image_that_fails_costs_its_neighbours_nothing(decoder: GpuDecoder, calls: list[int]) -> None:
    good = [photograph(width, height) for width, height in SIZES[:4]]
    alone = [row for data in good for row in by_device([data], decoder)]
    calls.clear()
    mixed = [*good[:2], data_of(FAILING), *good[2:]]
    assert taken(data_of(FAILING))
    found = list(rows_of(mixed, decoder))
    assert same(found[:2] + found[3:], alone)
    assert found[2] == "corrupt"
    if decoder._device.type == "cpu":  # a GPU's decoder may take it for a whole one
        assert calls == [5, 1, 1, 1, 1, 1]


def test_threads_each_get_the_pixels_of_their_own_images(decoder: GpuDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [photograph(width, height) for width, height in [(160, 120), (120, 160), (90, 70), (64, 64)]]
    chunks = [images[turn:] + images[:turn] for turn in range(len(images))] * 6
    expected = [by_device(chunk, decoder) for chunk in chunks]
    under_way, most, lock = 0, 0, threading.Lock()
    plain, several = decoder._call, threading.Event()

    def call(sources: Sequence[Any]) -> Any:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
            if most > 1:
                several.set()
        several.wait(10)  # on a busy machine, one thread might else be through before the next one begins
        try:
            return plain(sources)
        finally:
            with lock:
                under_way -= 1

    monkeypatch.setattr(decoder, "_call", call)
    start = threading.Barrier(12)
    with ThreadPoolExecutor(12, initializer=start.wait) as pool:
        found = list(pool.map(lambda chunk: by_device(chunk, decoder), chunks))
    assert all(map(same, found, expected))
    assert 1 < most <= gpu_decode.AT_ONCE


def full(*args: Any, **options: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("where", ["decoding", "resizing"])
def test_a_device_that_is_full_leaves_images_to_the_cpu(
    decoder: GpuDecoder, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [photograph(512, 384), photograph(333, 251)]
    expected = by_device(images, decoder)
    with monkeypatch.context() as patch:
        patch.setattr(*((decoder, "_call") if where == "decoding" else (gpu_decode, "interpolate")), full)
        for _ in range(2 * gpu_decode.AT_ONCE):
            assert same(list(rows_of(images, decoder)), [exact(data) for data in images])
    assert all(row is not None for row in expected)
    assert same(by_device(images, decoder), expected), "and takes the next ones again"


def on_cards(images: Sequence[Any], *, mode: str, device: Any) -> Any:
    """As torchcodec decodes on a card."""
    from torchcodec.decoders import decode_jpeg

    return [image.to(device) for image in decode_jpeg(images, mode=mode)]


def test_everything_is_done_on_the_card_that_is_named_and_on_streams_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_decode, "_torchcodec", lambda: on_cards)
    images = [photograph(160, 120), data_of(FAILING), photograph(90, 70)]
    expected = by_device(images, GpuDecoder(torch.device("cpu")))
    with fake_cuda.installed() as cards:
        decoder = GpuDecoder(torch.device("cuda:1"))
        cards.records.clear()
        assert same(by_device(images, decoder), expected)
        fake_cuda.assert_only_on(1, kinds=["allocation", "kernel", "copy"])
        assert torch.cuda.default_stream("cuda:1").queue.added == 0, "which is the stream of the passes"
        assert cards.cards[1].used == 0, "nothing is left on the card"


def test_a_card_that_breaks_is_told_from_a_damaged_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchcodec reports both as a RuntimeError of its own."""
    monkeypatch.setattr(gpu_decode, "_torchcodec", lambda: on_cards)
    images = [photograph(160, 120), photograph(90, 70)]

    def failing(sources: Sequence[Any]) -> Any:
        raise RuntimeError("nvjpegDecode failed: 8")

    def breaking(sources: Sequence[Any]) -> Any:
        fake_cuda.break_device()
        failing(sources)

    with fake_cuda.installed():
        decoder = GpuDecoder(torch.device("cuda:1"))
        monkeypatch.setattr(decoder, "_call", failing)
        assert by_device(images, decoder) == [None, None]
        monkeypatch.setattr(decoder, "_call", breaking)
        for _ in range(2):  # while it decodes, and from then on
            with pytest.raises(DeviceError, match="illegal memory access"):
                by_device(images, decoder)


def test_a_card_without_room_for_a_chunk_leaves_it_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decode, "_torchcodec", lambda: on_cards)
    images = [photograph(640, 480), photograph(160, 120)]
    with fake_cuda.installed([{"bytes": 3_000_000}]):
        found = by_device(images, GpuDecoder(torch.device("cuda:0")))
    assert [row is None for row in found] == [True, True]


def test_rows_of_both_ways_are_in_order_and_a_damaged_image_harms_no_other(
    decoder: GpuDecoder, everywhere: str
) -> None:
    rows = ImageBatcher(preprocess_of(USUAL), GPU, torch.device(everywhere))
    names = ["jpeg 4:2:0", "png rgb", "jpeg cut in the middle", "jpeg gray", FAILING, "jpeg progressive", "jpeg 4:4:4"]
    (found,) = image_rows(samples_of([data_of(name) for name in names]), [rows])
    kept = {name: row for name, row in zip(names, found, strict=True) if not isinstance(row, SampleError)}
    failed = {name: row.code for name, row in zip(names, found, strict=True) if isinstance(row, SampleError)}
    assert failed == {"jpeg cut in the middle": "truncated", FAILING: "corrupt"}
    numbers = rows.batch(list(kept.values()), torch.float32)
    black = rows.batch([rows.black()], torch.float32)
    white = (numbers - black).cpu() / (1 / torch.tensor(usual(224).std)).view(1, 3, 1, 1)
    for name, image in zip(kept, white, strict=True):
        pixels = (image.permute(1, 2, 0) * 255).round().numpy()
        assert psnr(pixels, reference(data_of(name), USUAL)) >= LEAST, name


def test_a_run_of_mixed_and_damaged_images_has_the_rows_and_failures_of_the_exact_path(
    stages: SimpleNamespace,  # noqa: F811
    spec: str,  # noqa: F811
    everywhere: str,
    calls: list[int],
) -> None:
    names = ["png rgb", "jpeg 4:2:0", "jpeg cut in the middle", "jpeg 4:4:4", "jpeg gray", "empty", "jpeg progressive"]
    samples = [Sample(ordinal=n, key=str(n), image=data_of(name)) for n, name in enumerate(8 * names)]
    found = {}
    for decode in ("cpu-exact", GPU):
        config = ModelConfig(spec=spec, modalities=("image",), precision="fp32", decode=decode)
        embedder: Any = load(config, everywhere)
        finished: list[Any] = []
        stage = EmbedStage(embedder, Meter(), hand_on=finished.append)
        work = make_work(stages, texts(stages, f"{decode}.txt", ["x"]), decode)
        give(stage, work, ready_of(embedder, samples))
        stage.flush()
        assert finished == [work]
        rows = np.concatenate(work.vectors["image"]).astype(np.float32)
        by_ordinal = {sample.ordinal: row for sample, row in zip(work.samples, rows, strict=True)}
        found[decode] = {one.ordinal: one.code for one in work.failures}, by_ordinal, embedder.fingerprint
        assert bool(calls) == (decode == GPU)
    assert sum(calls) == 8 * 3, "the plain JPEGs"
    assert len(calls) == 3, "one call for each chunk of 20"
    (failed, exact, identity), (also_failed, vectors, other_identity) = found.values()
    assert also_failed == failed
    assert set(failed.values()) == {"truncated", "unidentified"}
    assert vectors.keys() == exact.keys()
    assert len(vectors) == 8 * (len(names) - 2)
    for ordinal, vector in vectors.items():
        assert float(vector @ exact[ordinal]) >= 0.999, ordinal
    assert identity != other_identity


def test_several_models_that_read_the_same_pixels_have_an_image_decoded_once(
    tmp_path: Path, everywhere: str, calls: list[int]
) -> None:
    sides = {"a": 32, "b": 32, "c": 48}
    folders = {name: make_clip(tmp_path / name, seed=3, image_size=side) for name, side in sides.items()}
    members = [
        NamedModel(name=name, spec=f"open_clip:local-dir:{folder}", modalities=("image",))
        for name, folder in folders.items()
    ]
    config = ModelConfig.several(members, modalities=("image",), precision="fp32", decode=GPU)
    samples = [Sample(ordinal=n, key=str(n), image=photograph(333, 251)) for n in range(4)]
    samples[1] = Sample(ordinal=1, key="1", image=b"nothing")
    samples[2] = Sample(ordinal=2, key="2", error=("corrupt", "before"))
    together: Any = load(config, everywhere)
    calls.clear()
    ready = together.prepare(samples)
    assert calls == [2, 2], "once for each of two sizes"
    assert [type(one) for one in ready] == [dict, SampleError, SampleError, dict]
    for name, side in sides.items():
        pixels = ready[0][name]["image"].pixels
        assert pixels.shape == (side, side, 3)
        assert torch.equal(pixels, ready[3][name]["image"].pixels)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ModelError, match="needs a CUDA device, not cpu") as caught:
        ImageBatcher(preprocess_of(USUAL), GPU, torch.device("cpu"))
    assert "--decode cpu-exact" in str(caught.value.next_step)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(ModelError, match="needs torchcodec") as caught:
        GpuDecoder(torch.device("cpu"))
    assert "embq[gpu-decode]" in str(caught.value.next_step)


@pytest.mark.parametrize(("error", "kind"), [("not compiled with nvJPEG", ModelError), ("CUDA error", DeviceError)])
def test_a_build_that_does_not_decode_on_the_device_is_found_before_the_first_image(
    error: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*args: Any, **options: Any) -> Any:
        raise RuntimeError(error)

    monkeypatch.setattr(gpu_decode, "_torchcodec", lambda: refusing)
    with pytest.raises(kind, match=error):
        GpuDecoder(torch.device("cpu"))


def test_a_stub_that_decodes_is_refused() -> None:
    config = ModelConfig(spec="stub:8?pixels=32", modalities=("image",), precision="fp32", decode=GPU)
    with pytest.raises(ModelError, match="a stub decodes by the CPU only"):
        load(config, "cpu")
