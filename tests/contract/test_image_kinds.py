"""Every kind of image file by every path from a file to pixels: the reference's pixels, or one failure code for all.

The reference is open_clip's own evaluation transform on what Pillow opens, without its last two steps, which make
numbers of pixels.
"""

from __future__ import annotations

import io
import math
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from embq.core.errors import SampleError
from embq.core.models import CPU_DECODES
from embq.worker.embedders.image.decoding import quiet_pillow
from embq.worker.embedders.image.native import native
from embq.worker.embedders.image.pixels import Pixels
from embq.worker.embedders.image.preprocess import Preprocess, of_open_clip
from tests.support.lazy import lazy
from tests.support.picture_files import EQUAL, KINDS, NEAR, PictureFile, files_of, picture_files

transform = lazy("open_clip.transform")
lazy("torch")


FITS: Mapping[str, dict[str, Any]] = {
    "224 shortest bicubic": {"size": 224, "resize_mode": "shortest", "interpolation": "bicubic"},
    "256 squash bilinear": {"size": 256, "resize_mode": "squash", "interpolation": "bilinear"},
    "336 longest bicubic": {"size": 336, "resize_mode": "longest", "interpolation": "bicubic"},
}
USUAL = "224 shortest bicubic"

LARGE = ("jpeg large", "20,000x400 jpeg")
"""Images that the decoder makes smaller, if at least twice as much is left as the model reads."""


def is_row(file: PictureFile) -> bool:
    return file.outcome in (EQUAL, NEAR)


def rows() -> dict[str, PictureFile]:
    """By name, every file that becomes a row."""
    return {file.name: file for file in picture_files() if is_row(file)}


def failures() -> dict[str, PictureFile]:
    """By name, every file that becomes a failure."""
    return {file.name: file for file in picture_files() if not is_row(file)}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        quiet_pillow()
        yield


def data_of(name: str) -> bytes:
    """The bytes of one file."""
    (file,) = (file for file in picture_files() if file.name == name)
    return file.data


@cache
def transform_of(fit: str) -> Any:
    return transform.image_transform_v2(transform.PreprocessCfg(**FITS[fit]), is_train=False)


@cache
def preprocess_of(fit: str) -> Preprocess:
    return of_open_clip(transform_of(fit), FITS[fit], "a model")


def reference(data: bytes, fit: str) -> np.ndarray:
    """By nothing of embq's: uint8 of shape (side, side, 3)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = Image.open(io.BytesIO(data))
        for step in transform_of(fit).transforms[:-2]:
            image = step(image)
    return np.asarray(image)


def made(data: bytes, fit: str, decode: str) -> np.ndarray:
    return Pixels(preprocess_of(fit), decode).of(data)


def psnr(ours: np.ndarray, theirs: np.ndarray) -> float:
    error = float(np.mean((ours.astype(np.float64) - theirs) ** 2))
    return math.inf if not error else 10 * math.log10(255**2 / error)


def largest_step(ours: np.ndarray, theirs: np.ndarray) -> int:
    return int(np.abs(ours.astype(np.int16) - theirs).max())


def test_there_are_many_kinds() -> None:
    assert len(rows()) >= 60
    assert len(failures()) >= 40
    assert {"truncated", "corrupt", "too_large", "bad_aspect", "unsupported_mode", "unidentified"} == {
        file.outcome for file in failures().values()
    }


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_has_the_pixels_of_the_reference(kind: str, fit: str, subtests: pytest.Subtests) -> None:
    for file in filter(is_row, files_of(kind)):
        with subtests.test(file.name):
            expected = reference(file.data, fit)
            assert np.array_equal(made(file.data, fit, "reference"), expected)
            exact, fast = made(file.data, fit, "cpu-exact"), made(file.data, fit, "cpu-fast")
            if file.outcome == EQUAL:
                assert np.array_equal(exact, expected)
                assert np.array_equal(fast, expected)
                continue
            step, ratio = (2, 65) if fit == USUAL else (4, 55)
            assert largest_step(exact, expected) <= step
            assert psnr(exact, expected) >= ratio
            if file.name in LARGE and native() is not None:
                assert psnr(fast, expected) >= 42
                assert np.array_equal(fast, exact) == (file.name != "jpeg large" and fit != "336 longest bicubic")
            else:  # too small to be made smaller while it is decoded, or no baseline JPEG
                assert np.array_equal(fast, exact)


@pytest.mark.parametrize("decode", CPU_DECODES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_decoded_has_its_code_on_every_path(kind: str, decode: str, subtests: pytest.Subtests) -> None:
    for file in files_of(kind):
        if is_row(file):
            continue
        with subtests.test(file.name):
            with pytest.raises(SampleError) as caught:
                made(file.data, USUAL, decode)
            assert caught.value.code == file.outcome
            assert caught.value.message


@pytest.mark.parametrize("decode", CPU_DECODES)
def test_a_thread_gives_each_image_its_own_pixels_whatever_came_before(decode: str) -> None:
    some = ("jpeg 4", "jpeg gray", "png rgb", "png 1", "1x1 j", "jpeg c")
    images = [file.data for name, file in rows().items() if name.startswith(some)]
    alone = [made(data, USUAL, decode).copy() for data in images]
    pixels = Pixels(preprocess_of(USUAL), decode)
    failing = [data_of(name) for name in ("jpeg cut in the middle", "empty", "jpeg 12 bit")]
    for (data, expected), bad in zip(2 * list(zip(images, alone, strict=True)), cycle(failing), strict=False):
        with pytest.raises(SampleError):
            pixels.of(bad)
        assert np.array_equal(pixels.of(data), expected)


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "gif", "bmp", "tiff", "avif"])
def test_whatever_is_damaged_has_one_outcome_on_every_path(kind: str) -> None:
    chance = random.Random(11)
    files = [file for file in picture_files() if file.name.startswith(kind) and file.name != "jpeg large"]
    paths = [Pixels(preprocess_of(USUAL), decode) for decode in CPU_DECODES]
    seen = Counter()
    for _ in range(250):
        data = bytearray(chance.choice(files).data)[:1_000_000]
        for _ in range(chance.randint(1, 6)):
            at, length = chance.randrange(min(len(data), chance.choice((64, 400, len(data))))), chance.randint(1, 8)
            data[at : at + length] = chance.choice((bytes(length), b"\xff" * length, chance.randbytes(length)))
        outcomes = {outcome_of(bytes(data), pixels) for pixels in paths}
        assert len(outcomes) == 1, bytes(data[:400])
        seen.update(outcomes)
    assert len(seen) > 2, seen


def outcome_of(data: bytes, pixels: Pixels) -> str:
    try:
        pixels.of(data)
    except SampleError as error:
        return error.code
    return "row"


HOSTILE = """
import sys, warnings
from pathlib import Path

from embq.core.errors import SampleError
from embq.core.models import CPU_DECODES
from embq.worker.embedders.image.decoding import quiet_pillow
from embq.worker.embedders.image.pixels import pixels_of


def look(path, pixels):
    try:
        pixels.of(path.read_bytes())
    except SampleError as error:
        return error.code
    return "row"


def peak_bytes():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


quiet_pillow()
small, *others = sorted(Path(sys.argv[1]).iterdir())
paths = [pixels_of(224, decode) for decode in CPU_DECODES]
assert {look(small, pixels) for pixels in paths} == {"row"}
before = peak_bytes()
for path in others:
    assert "row" not in {look(path, pixels) for pixels in paths}
print(peak_bytes() - before)
"""


def test_what_is_refused_takes_no_memory_for_its_pixels(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(data_of("jpeg 4:2:0"))
    for number, file in enumerate(failures().values(), 1):
        (tmp_path / f"{number:04d}").write_bytes(file.data)
    done = subprocess.run([sys.executable, "-c", HOSTILE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    longest = max(len(file.data) for file in failures().values())
    # The longest file itself, and what the pixels of an 81 MP image do not fit into.
    assert int(done.stdout) < longest + 40_000_000
