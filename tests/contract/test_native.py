"""The native library under AddressSanitizer: the pixels of Pillow in every size, and no byte read or written beside.

It is built from `native/` with sanitizers, and each test runs in a process that has them loaded; the rest of the tests
use the one that is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lazy import lazy

lazy("torch")


NATIVE = Path(__file__).parents[2] / "native"
HEADER = "#include <cstdio>\n#include <jpeglib.h>\n"

BEGIN = """
import sys, types
sys.modules["embq_native"] = types.SimpleNamespace(LIBRARY=sys.argv[1])
import io, random, tarfile
import numpy as np
from PIL import Image
from embq.core.native import library
from embq.worker.embedders.image.native import native
from embq.worker.embedders.image.preprocess import Fit

chance = random.Random(int(sys.argv[2]))
noise = np.random.default_rng(3).integers(0, 256, (64, 64, 3), dtype=np.uint8)
smooth = Image.fromarray(noise).resize((700, 700), Image.Resampling.BICUBIC)
KINDS = ("gray", "progressive", "4:2:0", "4:4:4", "4:2:2", "4:1:1")

def jpeg(width, height, kind):
    image = smooth.resize((width, height), box=(0, 0, 700, chance.randint(300, 700)))
    options = {} if kind in ("gray", "progressive") else {"subsampling": kind}
    made = io.BytesIO()
    image = image.convert("L") if kind == "gray" else image
    image.save(made, "JPEG", quality=chance.choice((75, 92)), progressive=kind == "progressive", **options)
    return made.getvalue()

def prepared(images, fits, fast=False):
    rows = [np.full((len(images), fit.height, fit.width, 3), 99, np.uint8) for fit in fits]
    return native().prepare(images, fits, rows, fast=fast), rows

assert native() is not None
"""

SIZES = """
for number in range(int(sys.argv[3])):
    width, height = chance.randint(8, 1400), chance.randint(8, 1400)
    if max(width, height) > 40 * min(width, height):
        continue
    kind = KINDS[number % len(KINDS)]
    sides = [chance.choice((32, 224, 225, 336)) for _ in range(chance.choice((1, 1, 3)))]
    bicubic = chance.random() < 0.7
    way = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    fits = [
        Fit(height=side, width=side, mode="shortest", interpolation="bicubic" if bicubic else "bilinear", edge=side)
        for side in sides
    ]
    data = jpeg(width, height, kind)
    statuses, rows = prepared([data], fits)
    assert statuses == [0], (width, height, kind)
    library().embq_kernels(1)
    _, plainly = prepared([data], fits)
    library().embq_kernels(0)
    for side, made, plain in zip(sides, rows, plainly):
        longest = int(side * max(width, height) / min(width, height))
        size = (side, longest) if width <= height else (longest, side)
        left, top = (round((edge - side) / 2) for edge in size)
        resized = Image.open(io.BytesIO(data)).resize(size, way)
        expected = np.asarray(resized.crop((left, top, left + side, top + side)).convert("RGB"))
        off = np.abs(made[0].astype(int) - expected).max()
        assert off <= 2, (width, height, kind, side, bicubic, off)
        assert np.array_equal(made, plain), "the kernels differ"
    for_engines = native().sides(*native().buffers([b"", data, None]))
    assert [one[1] for one in for_engines] == ([0, 0] if kind == "progressive" else [height, width])
    decoded = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).reshape(-1, 3)
    pixels = np.concatenate([np.pad(decoded, ((0, 0), (0, 1)))] * 2)
    both = [np.full((3, *one.shape[1:]), 99, np.uint8) for one in rows]
    heights, widths, places = np.array([[height] * 2, [width] * 2, [2, 0]], np.int32)
    assert native().resize_all(pixels, heights, widths, places, fits, both) == [2, 0]
    assert all(np.array_equal(one[place], made[0]) for one, made in zip(both, rows) for place in (0, 2))
    assert all((one[1] == 99).all() for one in both)
    prepared([data], fits, fast=True)
    mode = ("longest", "squash", "shortest")[number % 3]
    other = Fit(height=90, width=130, mode=mode, interpolation="bilinear", fill=7)
    prepared([data], [other, *fits])
"""

HEADERS = """
from threading import Thread

# A thread begins without memory of larger images, so nothing lies behind the last row.
for width, side in ((1400, 32), (900, 7), (60, 32)):
    fit = Fit(height=side, width=side, mode="squash", interpolation="bicubic")
    wide = Thread(target=prepared, args=([jpeg(width, width, "4:4:4")], [fit]))
    wide.start()
    wide.join()

# Each number in the headers of a frame and of its scan: sides, samplings, components, tables.
data = jpeg(40, 30, "4:2:0")
frame, scan = data.index(b"\\xff\\xc0"), data.index(b"\\xff\\xda")
fits = [Fit(height=8, width=8, mode="shortest", interpolation="bilinear")]
for at in (*range(frame + 2, frame + 19), *range(scan + 2, scan + 14)):
    made = [data[:at] + bytes([value]) + data[at + 1:] for value in range(256)]
    native().sides(*native().buffers(made))
    prepared(made, fits)
# A scan of one component of three: nothing has set the tables of the others.
alone = data[:scan] + b"\\xff\\xda\\x00\\x08\\x01\\x01\\x00\\x00\\x3f\\x00" + data[scan + 14 :]
assert native().sides(*native().buffers([alone]))[0][0] == 0
# Geometries that only a configuration can have.
row = np.empty((1, 8, 8, 3), np.uint8)
for edge in (-1, 32_769, 2**31 - 1):
    fit = Fit(height=8, width=8, mode="shortest", interpolation="bicubic", edge=edge)
    assert prepared([data], [fit])[0] == [1]
    assert not native().resize(np.empty((4, 4, 4), np.uint8), fit, row[0])
assert not native().resize(np.empty((0, 4, 4), np.uint8), fits[0], row[0])
# Arrays of another length, type or layout than the library counts on.
files, pixels, numbers = native().buffers([data]), np.empty((16, 4), np.uint8), np.array([4], np.int32)
wrong = {
    "rows": lambda: native().prepare([data] * 2, fits, [row], fast=False),
    "fits": lambda: native().prepare([data], fits * 2, [row], fast=False),
    "type": lambda: native().prepare([data], fits, [row.view(np.int8)], fast=False),
    "layout": lambda: native().resize(np.empty((8, 8, 8), np.uint8)[..., ::2], fits[0], row[0]),
    "row": lambda: native().resize(np.empty((4, 4, 4), np.uint8), fits[0], row[0, :7]),
    "sizes": lambda: native().sides(files[0][:0], files[1]),
    "pixels": lambda: native().resize_all(pixels[:15], numbers, numbers, numbers - 4, fits, [row]),
    "place": lambda: native().resize_all(pixels, numbers, numbers, numbers - 3, fits, [row]),
    "negative": lambda: native().resize_all(pixels, numbers - 8, numbers - 8, numbers - 4, fits, [row]),
}
for name, call in wrong.items():
    try:
        call()
    except ValueError:
        continue
    raise AssertionError(name)
"""

DAMAGE = """
from embq.core.errors import SampleError
from embq.core.units import Sample
from embq.worker.embedders.image.decoding import quiet_pillow
from embq.worker.embedders.image.pixels import pixels_of

quiet_pillow()
paths = [pixels_of(64, "cpu-exact"), pixels_of(64, "reference")]

def outcome(path, data):
    try:
        return path.of(data).astype(int)
    except SampleError as error:
        return error.code

refused = 0
for number in range(int(sys.argv[3])):
    data = bytearray(jpeg(chance.randint(20, 300), chance.randint(20, 300), KINDS[number % len(KINDS)]))
    if number % 3 == 0:
        del data[chance.randrange(len(data)):]
    else:
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(min(len(data), chance.choice((64, 700, len(data)))))
            data[at : at + chance.randint(1, 8)] = chance.randbytes(chance.randint(1, 8))
    found, expected = (outcome(path, bytes(data)) for path in paths)
    assert type(found) is type(expected), (found, expected)
    if isinstance(found, str):
        assert found == expected
        refused += 1
    else:
        assert np.abs(found - expected).max() <= 2
    prepared([bytes(data), None, b"", b"\\xff\\xd8\\xff"], [paths[0].fit], fast=True)
    held = bytes(data)
    is_for_engines = native().sides(*native().buffers([held]))[0][0] > 0
    assert not is_for_engines or not isinstance(found, str) or found == "corrupt"
assert refused > 10
"""

ARCHIVES = """
from embq.sources.formats import tar_headers
from embq.sources.formats.tar_headers import walk

def archive(form):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as tar:
        for number in range(chance.randint(1, 30)):
            name = chance.choice(("a", "folder/b", "\\u00e9", "x" * 120)) + f"{number}.jpg"
            member = tarfile.TarInfo(name)
            member.size = chance.choice((0, 1, 511, 512, 513, 3000))
            member.mtime = chance.choice((0, 1_700_000_000.25))
            member.type = chance.choice((tarfile.REGTYPE,) * 8 + (tarfile.AREGTYPE, tarfile.DIRTYPE))
            member.size = 0 if member.type == tarfile.DIRTYPE else member.size
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    return made.getvalue()

def found(data, most):
    try:
        members, at, damage, cut, ended = walk(data, "a.tar", most)
    except Exception as error:
        return str(error)
    return members, at, str(damage), cut, ended

by_native = 0
for number in range(int(sys.argv[3])):
    data = bytearray(archive((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)[number % 2]))
    if number % 3:
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(data))
            data[at : at + chance.randint(1, 9)] = chance.randbytes(chance.randint(1, 9))
    if number % 5 == 0:
        del data[chance.randrange(len(data)):]
    data, most = bytes(data), chance.choice((3, 10_000))
    here = found(data, most)
    plain, tar_headers.library = tar_headers.library, lambda: None
    assert here == found(data, most)
    tar_headers.library = plain
    by_native += tar_headers._PlainMembers(data).read(0, [], 10_000) > 0
assert by_native > 10
"""


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The library with sanitizers, and the environment in which Python can load it."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    there = subprocess.run(
        ["g++", "-x", "c++", "-fsyntax-only", "-"], input=HEADER, text=True, capture_output=True, check=False
    )
    if there.returncode:
        pytest.skip("no headers of libjpeg")
    made = tmp_path_factory.mktemp("native") / "embq_native.so"
    options = (
        "-std=c++17",
        "-O1",
        "-g",
        "-fPIC",
        "-shared",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    )
    subprocess.run(["g++", *options, "-o", made, *sorted(NATIVE.glob("*.cpp")), "-ldl"], check=True)
    runtime = [
        subprocess.run(
            ["g++", f"-print-file-name=lib{name}.so"], text=True, capture_output=True, check=True
        ).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    # Leaks would be those of the interpreter, and an exception that is caught is none.
    return made, {**os.environ, "LD_PRELOAD": " ".join(runtime), "ASAN_OPTIONS": "detect_leaks=0"}


@pytest.mark.parametrize(
    ("what", "count"),
    [
        pytest.param(SIZES, 30, id="sizes"),
        pytest.param(HEADERS, 0, id="headers"),
        pytest.param(DAMAGE, 100, id="damage"),
        pytest.param(ARCHIVES, 200, id="tar"),
        pytest.param(SIZES, 90, id="more sizes", marks=pytest.mark.slow),
    ],
)
def test_nothing_beside_is_touched(sanitized: tuple[Path, dict[str, str]], what: str, count: int) -> None:
    made, environment = sanitized
    seed = os.environ.get("EMBQ_TEST_SEED", "1")
    command = [sys.executable, "-c", BEGIN + what, str(made), seed, str(count)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
