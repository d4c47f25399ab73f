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
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from open_clip.transform import PreprocessCfg, image_transform_v2
from picture_files import EQUAL, NEAR, PictureFile, picture_files
from PIL import Image

from core.errors import SampleError
from core.models import CPU_DECODES
from core.units import Sample
from worker.embedders.image.decoding import Picture, quiet_pillow
from worker.embedders.image.pixels import Pixels
from worker.embedders.image.preprocess import Preprocess, of_open_clip

FITS: Mapping[str, dict[str, Any]] = {
    "224 shortest bicubic": {"size": 224, "resize_mode": "shortest", "interpolation": "bicubic"},
    "256 squash bilinear": {"size": 256, "resize_mode": "squash", "interpolation": "bilinear"},
    "336 longest bicubic": {"size": 336, "resize_mode": "longest", "interpolation": "bicubic"},
}
USUAL = "224 shortest bicubic"

FILES = {file.name: file for file in picture_files()}
LARGE = ("jpeg large", "20,000x400 jpeg")
"""What the decoder makes smaller, where at least twice as much is left as the model reads."""

ROWS = [name for name, file in FILES.items() if file.outcome in (EQUAL, NEAR)]
FAILURES = [name for name in FILES if name not in ROWS]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        quiet_pillow()
        yield


@cache
def transform_of(fit: str) -> Any:
    return image_transform_v2(PreprocessCfg(**FITS[fit]), is_train=False)


@cache
def preprocess_of(fit: str) -> Preprocess:
    return of_open_clip(transform_of(fit), FITS[fit], "a model")


@cache
def reference(name: str, fit: str) -> np.ndarray:
    """By nothing of embq's: uint8 of shape (side, side, 3)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = Image.open(io.BytesIO(FILES[name].data))
        for step in transform_of(fit).transforms[:-2]:
            image = step(image)
    return np.asarray(image)


def made(name: str, fit: str, decode: str) -> np.ndarray:
    with Picture(Sample(ordinal=0, key=name, image=FILES[name].data)) as picture:
        return Pixels(preprocess_of(fit), decode).of(picture)


def code_of(file: PictureFile, decode: str) -> str:
    with pytest.raises(SampleError) as caught:
        made(file.name, USUAL, decode)
    assert caught.value.message
    return caught.value.code


def psnr(ours: np.ndarray, theirs: np.ndarray) -> float:
    error = float(np.mean((ours.astype(np.float64) - theirs) ** 2))
    return math.inf if not error else 10 * math.log10(255**2 / error)


def largest_step(ours: np.ndarray, theirs: np.ndarray) -> int:
    return int(np.abs(ours.astype(np.int16) - theirs).max())


def test_there_are_many_kinds() -> None:
    assert len(ROWS) >= 60
    assert len(FAILURES) >= 40
    assert {"truncated", "corrupt", "too_large", "bad_aspect", "unsupported_mode", "unidentified"} == {
        FILES[name].outcome for name in FAILURES
    }


@pytest.mark.parametrize("fit", list(FITS))
@pytest.mark.parametrize("name", ROWS)
def test_an_image_has_the_pixels_of_the_reference(name: str, fit: str) -> None:
    expected = reference(name, fit)
    assert np.array_equal(made(name, fit, "reference"), expected)
    exact = made(name, fit, "cpu-exact")
    if FILES[name].outcome == EQUAL:
        assert np.array_equal(exact, expected)
        assert np.array_equal(made(name, fit, "cpu-fast"), expected)
        return
    step, ratio = (2, 65) if fit == USUAL else (4, 55)
    assert largest_step(exact, expected) <= step
    assert psnr(exact, expected) >= ratio
    fast = made(name, fit, "cpu-fast")
    if name in LARGE:
        assert psnr(fast, expected) >= 42
        assert np.array_equal(fast, exact) == (name != "jpeg large" and fit != "336 longest bicubic")
    else:  # too small to be made smaller while it is decoded, or no baseline JPEG
        assert np.array_equal(fast, exact)


@pytest.mark.parametrize("decode", CPU_DECODES)
@pytest.mark.parametrize("name", FAILURES)
def test_what_cannot_be_decoded_has_its_code_on_every_path(name: str, decode: str) -> None:
    assert code_of(FILES[name], decode) == FILES[name].outcome


@pytest.mark.parametrize("decode", CPU_DECODES)
def test_a_thread_gives_each_image_its_own_pixels_whatever_came_before(decode: str) -> None:
    names = [name for name in ROWS if name.startswith(("jpeg 4", "jpeg gray", "png rgb", "png 1", "1x1 j", "jpeg c"))]
    alone = {name: made(name, USUAL, decode).copy() for name in names}
    pixels = Pixels(preprocess_of(USUAL), decode)
    failing = ["jpeg cut in the middle", "empty", "jpeg 12 bit"]
    for name, bad in zip(names * 2, failing * len(names), strict=False):
        with Picture(Sample(ordinal=0, key=bad, image=FILES[bad].data)) as picture, pytest.raises(SampleError):
            pixels.of(picture)
        with Picture(Sample(ordinal=0, key=name, image=FILES[name].data)) as picture:
            assert np.array_equal(pixels.of(picture), alone[name])


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "gif", "bmp", "tiff", "avif"])
def test_whatever_is_damaged_has_one_outcome_on_every_path(kind: str) -> None:
    chance = random.Random(11)
    files = [file for name, file in FILES.items() if name.startswith(kind) and name != "jpeg large"]
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
        with Picture(Sample(ordinal=0, key="", image=data)) as picture:
            pixels.of(picture)
    except SampleError as error:
        return error.code
    return "row"


HOSTILE = """
import sys, warnings
from pathlib import Path

from core.errors import SampleError
from core.models import CPU_DECODES
from core.units import Sample
from worker.embedders.image.decoding import Picture, quiet_pillow
from worker.embedders.image.pixels import pixels_of


def look(path, pixels):
    try:
        with Picture(Sample(ordinal=0, key=path.name, image=path.read_bytes())) as picture:
            pixels.of(picture)
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
    (tmp_path / "0").write_bytes(FILES["jpeg 4:2:0"].data)
    for number, name in enumerate(FAILURES, 1):
        (tmp_path / f"{number:04d}").write_bytes(FILES[name].data)
    done = subprocess.run([sys.executable, "-c", HOSTILE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    longest = max(len(FILES[name].data) for name in FAILURES)
    # The longest file itself, and what the pixels of an 81 MP image do not fit into.
    assert int(done.stdout) < longest + 40_000_000
