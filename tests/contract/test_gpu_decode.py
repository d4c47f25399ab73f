"""JPEGs decoded by the engines of a GPU: on a real one where there is one, and by Pillow in their place on a simulated
one, with the same calls but for those of nvJPEG.

Pillow cannot show the pixels of the engines, nor which damage they notice. The tests for that are the same ones, marked
for a GPU.
"""

from __future__ import annotations

import ctypes
import io
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from embq.core.errors import DeviceError, ModelError, SampleError
from embq.core.models import GPU, ModelConfig, NamedModel
from embq.core.units import Sample
from embq.worker.embedders.image import gpu_decode, upload
from embq.worker.embedders.image.gpu_decode import GpuDecoder
from embq.worker.embedders.image.native import FITS_MAX, native
from embq.worker.embedders.image.pixels import Pixels, prepared
from embq.worker.embedders.image.preprocess import usual
from embq.worker.embedders.image.upload import ImageBatcher, image_rows
from embq.worker.embedders.registry import load
from embq.worker.meter.meter import Meter
from embq.worker.stages.embed import EmbedStage
from tests.contract import test_image_kinds as kinds
from tests.contract import test_preprocess as fits
from tests.contract.test_embedders import make_clip
from tests.contract.test_image_kinds import data_of, failures, preprocess_of, psnr, reference, rows
from tests.contract.test_preprocess import photograph
from tests.support.fakes import cuda as fake_cuda
from tests.support.lazy import lazy
from tests.support.picture_files import EQUAL, encoded
from tests.unit.test_image_passes import give, ready_of, spec  # noqa: F401 - a fixture
from tests.unit.test_stages import make_work, stages, texts  # noqa: F401 - a fixture

torch = lazy("torch")


if native() is None:
    pytest.skip("embq-native is not installed: make install", allow_module_level=True)

USUAL = "224 shortest bicubic"
SIZES = [(512, 384), (384, 512), (255, 383), (333, 251), (225, 224), (640, 480), (150, 113), (1024, 768), (500, 1700)]
LEAST = 60
"""PSNR to the path that has Pillow decode, in dB. Where only a few bytes are off by 1 it is 90 and more."""

DAMAGED = "jpeg damaged in the data"


class Engines:
    """Pillow in place of the engines, on the card of the stream. `calls` has the number of images of each call."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def state(self) -> None:
        return None

    def decode(self, state: None, addresses: Any, sizes: Any, pixels: Any, starts: Any, widths: Any) -> int:
        self.calls.append(len(addresses))
        try:
            files = [ctypes.string_at(int(at), int(size)) for at, size in zip(addresses, sizes, strict=True)]
            decoded = [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in files]
        except OSError:
            return 8
        for start, image in zip(starts, decoded, strict=True):
            pixels[start : start + image.size].copy_(torch.from_numpy(image.copy()).view(-1))
        return 0


ON = [
    "simulated",
    pytest.param(
        "real",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
        ],
    ),
]


quiet = kinds.quiet


@pytest.fixture(params=ON)
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuDecoder]:
    if request.param == "real":
        yield GpuDecoder(torch.device("cuda:0"))
        return
    monkeypatch.setattr(gpu_decode, "NvJpeg", Engines)
    with fake_cuda.installed():
        yield GpuDecoder(torch.device("cuda:0"))


@pytest.fixture
def calls(decoder: GpuDecoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images of each call of nvJPEG."""
    counted: list[int] = []
    plain = gpu_decode._Call.pixels

    def call(self: Any, addresses: Any, *others: Any) -> Any:
        counted.append(len(addresses))
        return plain(self, addresses, *others)

    monkeypatch.setattr(gpu_decode._Call, "pixels", call)
    return counted


@pytest.fixture
def everywhere(decoder: GpuDecoder, monkeypatch: pytest.MonkeyPatch) -> str:
    """Models decode by `decoder`; gives the device."""
    monkeypatch.setattr(upload, "gpu_decoder", lambda device: decoder)
    return "cuda:0"


def samples_of(images: Sequence[bytes]) -> list[Sample]:
    return [Sample(ordinal=n, key=str(n), image=data) for n, data in enumerate(images)]


def taken(data: bytes) -> bool:
    """True if the device is asked to decode the file."""
    library = native()
    assert library is not None
    return bool(library.sides(*library.buffers([data]))[0][0])


def rows_of(images: Sequence[bytes], decoder: GpuDecoder) -> Iterator[np.ndarray | str]:
    """The pixels of each image, or the code of its failure, as a chunk of a worker has them."""
    path = Pixels(preprocess_of(USUAL), GPU, decoder)
    made = np.empty((len(images), *path.shape), np.uint8)
    (errors,) = prepared(samples_of(images), [path], [made])
    for pixels, error in zip(made, errors, strict=True):
        yield pixels if error is None else error.code


def by_device(images: Sequence[bytes], decoder: GpuDecoder) -> list[np.ndarray | None]:
    """The pixels that the device gives, None of an image that it leaves to the CPU."""
    made = np.zeros((len(images), 224, 224, 3), np.uint8)
    done = decoder.decoded(images, [usual(224).fit], [made])
    return [row if is_done else None for row, is_done in zip(made, done, strict=True)]


def exact(data: bytes) -> np.ndarray:
    return Pixels(preprocess_of(USUAL), "cpu-exact").of(data)


def same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
def test_photographs_have_the_pixels_of_the_exact_path(decoder: GpuDecoder, mode: str, interpolation: str) -> None:
    preprocess = fits.preprocess_of(size=224, resize_mode=mode, interpolation=interpolation, fill_color=3)[1]
    images = [photograph(width, height) for width, height in SIZES]
    made = np.zeros((len(images), 224, 224, 3), np.uint8)
    assert all(decoder.decoded(images, [preprocess.fit], [made]))
    for data, row in zip(images, made, strict=True):
        assert psnr(row, Pixels(preprocess, "cpu-exact").of(data)) >= LEAST


def test_every_kind_of_image_is_a_row_by_the_device_or_by_the_cpu(decoder: GpuDecoder) -> None:
    found = rows_of([file.data for file in rows().values()], decoder)
    for file, row in zip(rows().values(), found, strict=True):
        assert not isinstance(row, str), file.name
        expected = reference(file.data, USUAL)
        if file.outcome == EQUAL and not taken(file.data):
            assert np.array_equal(row, expected), file.name
        else:
            assert psnr(row, expected) >= 55, file.name


def test_what_cannot_be_decoded_has_the_code_of_the_other_paths(decoder: GpuDecoder) -> None:
    found = [
        row if isinstance(row, str) else "a row" for row in rows_of([f.data for f in failures().values()], decoder)
    ]
    assert dict(zip(failures(), found, strict=True)) == {name: file.outcome for name, file in failures().items()}


def test_whole_plain_jpegs_are_for_the_device_and_nothing_else_is() -> None:
    names = {name for name, file in {**rows(), **failures()}.items() if taken(file.data)}
    assert {"jpeg 4:2:0", "jpeg 4:4:4", "jpeg gray", "jpeg turned by exif"} <= names
    others = ("progressive", "cmyk", "without a", "without q", "lossless", "frames", "png", "webp", "gif", "tiff")
    assert not any(word in name for name in names for word in others)
    data = photograph(333, 251)
    assert taken(data)
    assert not taken(data + b"\0")
    assert not taken(data[:-2])
    assert not taken(data[:-2] + data[2:]), "a second frame"


@pytest.mark.parametrize("orientation", range(2, 9))
def test_orientation_is_not_applied(decoder: GpuDecoder, orientation: int) -> None:
    with Image.open(io.BytesIO(photograph(384, 256))) as image:
        exif = image.getexif()
        exif[0x0112] = orientation
        plain, turned = encoded(image, "JPEG", quality=90), encoded(image, "JPEG", quality=90, exif=exif)
    assert plain != turned
    upright, other = by_device([plain, turned], decoder)
    assert upright is not None
    assert other is not None
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


def damaged() -> bytes:
    """A JPEG that suits the device, and of which libjpeg warns."""
    data = bytearray(photograph(320, 240))
    at = len(data) // 2
    data[at : at + 64] = bytes(64)
    return bytes(data)


def test_an_image_that_fails_costs_its_neighbours_nothing(decoder: GpuDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    good = [photograph(width, height) for width, height in SIZES[:4]]
    alone = [row for data in good for row in by_device([data], decoder)]
    bad, plain, tried = damaged(), gpu_decode._Call.pixels, []
    assert taken(bad)

    def call(self: Any, addresses: Any, sizes: Any, *sides: Any) -> Any:
        tried.append(len(sizes))
        return None if len(bad) in sizes else plain(self, addresses, sizes, *sides)

    monkeypatch.setattr(gpu_decode._Call, "pixels", call)
    found = by_device([*good[:2], bad, *good[2:]], decoder)
    assert same(found[:2] + found[3:], alone)
    assert found[2] is None
    assert tried == [5, 1, 1, 1, 1, 1]


def test_a_chunk_that_finds_all_calls_taken_is_for_the_cpu(decoder: GpuDecoder) -> None:
    taken = [decoder._idle.get() for _ in range(gpu_decode.AT_ONCE)]
    images = [photograph(64, 48)]
    assert by_device(images, decoder) == [None]
    assert same(list(rows_of(images, decoder)), [exact(images[0])])
    decoder._idle.put(taken[0])
    assert by_device(images, decoder)[0] is not None


def test_more_models_than_one_call_of_the_library_takes_are_for_the_cpu(decoder: GpuDecoder) -> None:
    paths = [Pixels(preprocess_of(USUAL), GPU, decoder)] * (FITS_MAX + 1)
    made = [np.zeros((1, *path.shape), np.uint8) for path in paths]
    assert prepared(samples_of([photograph(64, 48)]), paths, made) == [[None]] * len(paths)
    assert all(np.array_equal(one[0], exact(photograph(64, 48))) for one in made)


def test_threads_each_get_the_pixels_of_their_own_images(decoder: GpuDecoder, calls: list[int]) -> None:
    images = [photograph(width, height) for width, height in [(160, 120), (120, 160), (90, 70), (64, 64)]]
    chunks = [images[turn:] + images[:turn] for turn in range(len(images))] * 6
    start = threading.Barrier(12)
    with ThreadPoolExecutor(12, initializer=start.wait) as pool:
        found = list(pool.map(lambda chunk: list(rows_of(chunk, decoder)), chunks))
    for chunk, made in zip(chunks, found, strict=True):
        assert min(psnr(row, exact(data)) for data, row in zip(chunk, made, strict=True)) >= LEAST
    assert calls
    assert decoder._idle.qsize() == gpu_decode.AT_ONCE


def test_a_device_that_is_full_leaves_images_to_the_cpu(decoder: GpuDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    images = [photograph(512, 384), photograph(333, 251)]
    with monkeypatch.context() as patch:
        patch.setattr("torch.empty", full)
        for _ in range(2 * gpu_decode.AT_ONCE):
            assert by_device(images, decoder) == [None, None]
    assert all(row is not None for row in by_device(images, decoder)), "and takes the next ones again"


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decode, "NvJpeg", Engines)


def test_everything_is_done_on_the_card_that_is_named_and_on_streams_of_its_own(simulated: None) -> None:
    images = [photograph(160, 120), damaged(), photograph(90, 70)]
    with fake_cuda.installed([{}, {}]) as cards:
        decoder = GpuDecoder(torch.device("cuda:1"))
        cards.records.clear()
        assert by_device(images, decoder)[0] is not None
        fake_cuda.assert_only_on(1, kinds=["allocation", "kernel", "copy"])
        assert torch.cuda.default_stream("cuda:1").queue.added == 0, "which is the stream of the passes"


def test_a_card_that_breaks_is_told_from_a_damaged_image(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [photograph(160, 120), photograph(90, 70)]

    def breaking(*_: Any) -> int:
        fake_cuda.break_device()
        return 8

    with fake_cuda.installed([{}, {}]):
        decoder = GpuDecoder(torch.device("cuda:1"))
        monkeypatch.setattr(Engines, "decode", lambda *_: 8)
        assert by_device(images, decoder) == [None, None]
        monkeypatch.setattr(Engines, "decode", breaking)
        for _ in range(2):  # while it decodes, and from then on
            with pytest.raises(DeviceError, match="illegal memory access"):
                by_device(images, decoder)


def test_a_card_without_room_for_a_chunk_leaves_it_to_the_cpu(simulated: None) -> None:
    images = [photograph(640, 480), photograph(160, 120)]
    with fake_cuda.installed([{"bytes": 2_000_000}]):
        found = by_device(images, GpuDecoder(torch.device("cuda:0")))
    assert [row is None for row in found] == [True, True]


def test_rows_of_both_ways_are_in_order_and_a_damaged_image_harms_no_other(
    decoder: GpuDecoder, everywhere: str
) -> None:
    rows = ImageBatcher(preprocess_of(USUAL), GPU, torch.device(everywhere))
    names = ["jpeg 4:2:0", "png rgb", "jpeg cut in the middle", "jpeg gray", "jpeg progressive", "jpeg 4:4:4"]
    (found,) = image_rows(samples_of([data_of(name) for name in names]), [rows])
    kept = {name: row for name, row in zip(names, found, strict=True) if not isinstance(row, SampleError)}
    failed = {name: row.code for name, row in zip(names, found, strict=True) if isinstance(row, SampleError)}
    assert failed == {"jpeg cut in the middle": "truncated"}
    numbers = rows.batch(list(kept.values()), torch.float32)
    black = rows.batch([rows.black()], torch.float32)
    white = (numbers - black).cpu() / (1 / torch.tensor(usual(224).std)).view(1, 3, 1, 1)
    for name, image in zip(kept, white, strict=True):
        pixels = (image.permute(1, 2, 0) * 255).round().numpy()
        assert psnr(pixels, reference(data_of(name), USUAL)) >= 55, name


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
    assert calls == [2], "once for all sizes"
    assert [type(one) for one in ready] == [dict, SampleError, SampleError, dict]
    for name, side in sides.items():
        pixels = ready[0][name]["image"].pixels
        assert pixels.shape == (side, side, 3)
        assert torch.equal(pixels, ready[3][name]["image"].pixels)


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ModelError, match="needs a CUDA device, not cpu") as caught:
        ImageBatcher(preprocess_of(USUAL), GPU, torch.device("cpu"))
    assert "--decode cpu-exact" in str(caught.value.next_step)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda.installed():
        monkeypatch.setattr(torch.version, "cuda", "99.0")
        with pytest.raises(ModelError, match="needs nvJPEG") as caught:
            GpuDecoder(torch.device("cuda:0"))
        assert caught.value.next_step == "pip install nvidia-nvjpeg-cu99"
        monkeypatch.setattr(gpu_decode, "native", lambda: None)
        with pytest.raises(ModelError, match="needs embq-native"):
            GpuDecoder(torch.device("cuda:0"))


def test_a_card_without_engines_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decode, "_library", lambda: SimpleNamespace(nvjpegCreateEx=lambda *_: 7))
    with fake_cuda.installed(), pytest.raises(ModelError, match="no JPEG engine") as caught:
        GpuDecoder(torch.device("cuda:0"))
    assert caught.value.next_step == "use --decode cpu-exact"


def test_a_stub_that_decodes_is_refused() -> None:
    config = ModelConfig(spec="stub:8?pixels=32", modalities=("image",), precision="fp32", decode=GPU)
    with pytest.raises(ModelError, match="a stub decodes by the CPU only"):
        load(config, "cpu")
