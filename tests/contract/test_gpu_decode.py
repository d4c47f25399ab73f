"""JPEGs decoded and resized by nvImageCodec: on a GPU where there is one, and on a CPU by the same calls.

What a CPU cannot show is what the GPU's own decoders do: their pixels, and which damage they notice. The tests for that
are the same ones, marked for a GPU.
"""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if find_spec("nvidia") is None or find_spec("nvidia.nvimgcodec") is None:
    pytest.skip("nvImageCodec is not installed: pip install 'embq[gpu-decode]'", allow_module_level=True)

from contract import test_image_kinds as kinds  # noqa: E402
from contract import test_preprocess as fits  # noqa: E402
from contract.test_image_kinds import FAILURES, FILES, ROWS, preprocess_of, psnr, reference  # noqa: E402
from contract.test_preprocess import photograph  # noqa: E402
from picture_files import EQUAL, encoded  # noqa: E402
from PIL import Image  # noqa: E402
from unit.test_image_passes import give, ready_of, spec  # noqa: E402, F401 - a fixture
from unit.test_stages import make_work, stages, texts  # noqa: E402, F401 - a fixture

from core.errors import ModelError, SampleError  # noqa: E402
from core.models import GPU, ModelConfig  # noqa: E402
from core.units import Sample  # noqa: E402
from worker.embed import EmbedStage  # noqa: E402
from worker.embedders import gpu_decode, image_rows  # noqa: E402
from worker.embedders.gpu_decode import GpuDecoder, suits  # noqa: E402
from worker.embedders.image_rows import ImageRows  # noqa: E402
from worker.embedders.images import Picture  # noqa: E402
from worker.embedders.jpeg import frame_of  # noqa: E402
from worker.embedders.pixels import Pixels  # noqa: E402
from worker.embedders.preprocess import usual  # noqa: E402
from worker.embedders.registry import load  # noqa: E402
from worker.progress import ProgressBoard  # noqa: E402
from worker.stats import Stats  # noqa: E402

USUAL = "224 shortest bicubic"
SIZES = [(512, 384), (384, 512), (255, 383), (333, 251), (225, 224), (640, 480), (150, 113), (1024, 768), (500, 1700)]
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


def taken(name: str) -> bool:
    """Whether a file is one that the device is asked to decode."""
    with Picture(Sample(ordinal=0, key=name, image=FILES[name].data)) as picture:
        return picture.frame is not None and suits(picture.data, picture.frame)


def made(data: bytes, decoder: GpuDecoder) -> np.ndarray:
    with Picture(Sample(ordinal=0, key="", image=data)) as picture:
        return Pixels(preprocess_of(USUAL), GPU, decoder).of(picture)


def alone(data: bytes, decoder: GpuDecoder) -> np.ndarray | None:
    """The pixels that the device gives, or None where it leaves the image to the CPU."""
    frame = frame_of(data)
    assert frame is not None
    row = np.zeros((224, 224, 3), np.uint8)
    return row if decoder.into(data, frame, usual(224).fit, row) else None


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("mode", ["shortest", "squash", "longest"])
def test_photographs_have_nearly_the_pixels_of_open_clip(decoder: GpuDecoder, mode: str, interpolation: str) -> None:
    transform, preprocess = fits.preprocess_of(size=224, resize_mode=mode, interpolation=interpolation, fill_color=3)
    found = []
    for width, height in SIZES:
        data = photograph(width, height)
        row, frame = np.zeros((224, 224, 3), np.uint8), frame_of(data)
        assert frame is not None
        assert decoder.into(data, frame, preprocess.fit, row)
        found.append(min(99.0, psnr(row, fits.by_open_clip(data, transform))))
    # On a CPU only the steps of resizing differ; a GPU's decoders may also have other chroma.
    least, mean = (65, 70) if decoder.device.type == "cpu" else (42, 48)
    assert min(found) >= least
    assert np.mean(found) >= mean


@pytest.mark.parametrize("name", ROWS)
def test_every_kind_of_image_is_a_row_by_the_device_or_by_the_cpu(decoder: GpuDecoder, name: str) -> None:
    row, expected = made(FILES[name].data, decoder), reference(name, USUAL)
    if FILES[name].outcome == EQUAL:
        assert np.array_equal(row, expected)
    else:
        assert psnr(row, expected) >= (42 if taken(name) else 55)


@pytest.mark.parametrize("name", FAILURES)
def test_what_cannot_be_decoded_has_the_code_of_the_other_paths(decoder: GpuDecoder, name: str) -> None:
    with pytest.raises(SampleError) as caught:
        made(FILES[name].data, decoder)
    assert caught.value.code == FILES[name].outcome


def test_whole_plain_jpegs_are_for_the_device_and_nothing_else_is() -> None:
    names = {name for name in ROWS if taken(name)}
    assert {"jpeg 4:2:0", "jpeg 4:4:4", "jpeg gray"} <= names
    assert not any(word in name for name in names for word in ("progressive", "cmyk", "png", "webp", "gif", "tiff"))
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


def test_orientation_is_not_applied(decoder: GpuDecoder) -> None:
    with Image.open(io.BytesIO(photograph(384, 256))) as image:
        exif = image.getexif()
        exif[0x0112] = 6
        plain, turned = encoded(image, "JPEG", quality=90), encoded(image, "JPEG", quality=90, exif=exif)
    assert plain != turned
    upright = alone(plain, decoder)
    assert upright is not None
    assert np.array_equal(upright, alone(turned, decoder))


def test_chroma_is_not_repeated(decoder: GpuDecoder) -> None:
    """Where every second column is of another colour, means of neighbours and their repetition are far apart."""
    random = np.random.default_rng(0)
    with Image.open(io.BytesIO(photograph(224, 224))) as image:
        colours = np.asarray(image).astype(int) + np.repeat(random.integers(-60, 60, (224, 112, 3)), 2, axis=1)
    data = encoded(Image.fromarray(colours.clip(0, 255).astype(np.uint8)), "JPEG", quality=95, subsampling="4:2:0")
    row = alone(data, decoder)
    assert row is not None
    assert psnr(row, np.asarray(Image.open(io.BytesIO(data)))) >= 48


def test_threads_each_get_the_pixels_of_their_own_image(decoder: GpuDecoder) -> None:
    images = [photograph(width, height) for width, height in SIZES] * 8
    expected = [alone(data, decoder) for data in images[: len(SIZES)]] * 8
    start = threading.Barrier(12)
    with ThreadPoolExecutor(12, initializer=start.wait) as pool:
        found = list(pool.map(lambda data: alone(data, decoder), images))
    assert all(row is not None for row in expected)
    for row, known in zip(found, expected, strict=True):
        assert np.array_equal(row, known)


def test_a_device_that_is_full_leaves_the_image_to_the_cpu(decoder: GpuDecoder, monkeypatch: Any) -> None:
    data = photograph(512, 384)
    by_device = made(data, decoder)

    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(gpu_decode, "interpolate", full)
        for _ in range(2 * gpu_decode.AT_ONCE):
            with Picture(Sample(ordinal=0, key="", image=data)) as picture:
                exact = Pixels(preprocess_of(USUAL), "cpu-exact").of(picture)
            assert np.array_equal(made(data, decoder), exact)
    assert np.array_equal(made(data, decoder), by_device), "and takes the next one again"


def test_rows_of_both_ways_are_in_order_and_a_damaged_image_harms_no_other(
    decoder: GpuDecoder, monkeypatch: Any
) -> None:
    monkeypatch.setattr(image_rows, "gpu_decoder", lambda device: decoder)  # which refuses a CPU
    rows = ImageRows(preprocess_of(USUAL), GPU, torch.device("cpu"))
    names = ["jpeg 4:2:0", "png rgb", "jpeg cut in the middle", "jpeg gray", "jpeg progressive", "jpeg 4:4:4"]
    kept, failed = {}, {}
    for name in names:
        with Picture(Sample(ordinal=0, key=name, image=FILES[name].data)) as picture:
            try:
                kept[name] = rows.row(picture)
            except SampleError as error:
                failed[name] = error.code
    assert failed == {"jpeg cut in the middle": "truncated"}
    numbers = rows.batch(list(kept.values()), torch.float32)
    black = rows.batch([rows.black()], torch.float32)
    white = (numbers - black) / (1 / torch.tensor(usual(224).std)).view(1, 3, 1, 1)
    for name, image in zip(kept, white, strict=True):
        pixels = (image.permute(1, 2, 0) * 255).round().numpy()
        assert psnr(pixels, reference(name, USUAL)) >= 48, name


def test_a_run_of_mixed_and_damaged_images_has_the_rows_and_failures_of_the_exact_path(
    stages: SimpleNamespace,  # noqa: F811
    spec: str,  # noqa: F811
    decoder: GpuDecoder,
    monkeypatch: Any,
) -> None:
    on = decoder.device.type
    if on == "cpu":
        monkeypatch.setattr(image_rows, "gpu_decoder", lambda device: decoder)
    names = ["png rgb", "jpeg 4:2:0", "jpeg cut in the middle", "jpeg 4:4:4", "jpeg gray", "empty", "jpeg progressive"]
    samples = [Sample(ordinal=n, key=str(n), image=FILES[name].data) for n, name in enumerate(8 * names)]
    found = {}
    for decode in ("cpu-exact", GPU):
        embedder: Any = load(ModelConfig(spec=spec, modalities=("image",), precision="fp32", decode=decode), on)
        finished: list[Any] = []
        stage = EmbedStage(embedder, stages.leases, Stats(), ProgressBoard(), hand_on=finished.append)
        work = make_work(stages, texts(stages, f"{decode}.txt", ["x"]), decode)
        give(stage, work, ready_of(embedder, samples))
        stage.flush()
        assert finished == [work]
        rows = np.concatenate(work.vectors["image"]).astype(np.float32)
        by_ordinal = {sample.ordinal: row for sample, row in zip(work.samples, rows, strict=True)}
        found[decode] = {one.ordinal: one.code for one in work.failures}, by_ordinal, embedder.fingerprint
    (failed, exact, identity), (also_failed, vectors, other_identity) = found.values()
    assert also_failed == failed
    assert set(failed.values()) == {"truncated", "unidentified"}
    assert vectors.keys() == exact.keys()
    assert len(vectors) == 8 * (len(names) - 2)
    for ordinal, vector in vectors.items():
        assert float(vector @ exact[ordinal]) >= 0.999, ordinal
    assert identity != other_identity


QUIET = """
import os, sys
import torch
from worker.embedders.gpu_decode import GpuDecoder
from worker.embedders.jpeg import frame_of
from worker.embedders.preprocess import usual
import numpy as np
before = dict(os.environ)
decoder = GpuDecoder(torch.device("cpu"))
assert dict(os.environ) == before
data = sys.stdin.buffer.read()
row = np.empty((224, 224, 3), np.uint8)
assert decoder.into(data, frame_of(data), usual(224).fit, row)
"""


def test_nothing_is_printed_of_libraries_that_are_not_here() -> None:
    done = subprocess.run([sys.executable, "-c", QUIET], input=photograph(333, 251), capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_cpu_is_refused() -> None:
    with pytest.raises(ModelError, match="needs a CUDA device, not cpu") as caught:
        ImageRows(preprocess_of(USUAL), GPU, torch.device("cpu"))
    assert "--decode cpu-exact" in str(caught.value.next_step)


def test_a_missing_package_is_named(monkeypatch: Any) -> None:
    monkeypatch.setattr(gpu_decode, "PACKAGE", "nvidia_that_is_not_here.nvimgcodec")
    with pytest.raises(ModelError, match="needs the package") as caught:
        GpuDecoder(torch.device("cpu"))
    assert "embq[gpu-decode]" in str(caught.value.next_step)


def test_a_stub_that_decodes_is_refused() -> None:
    config = ModelConfig(spec="stub:8?pixels=32", modalities=("image",), precision="fp32", decode=GPU)
    with pytest.raises(ModelError, match="a stub decodes by the CPU only"):
        load(config, "cpu")
