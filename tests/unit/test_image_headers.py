"""TIFF and AVIF that say one thing and hold another: refused by their headers, before anything large is allocated."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from PIL import Image

from embq.core.errors import SampleError
from embq.worker.embedders.image import avif, headers, tiff
from embq.worker.embedders.image.decoding import open_image
from tests.support.picture_files import encoded


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, size=(height, width, 3), dtype=np.uint8))


@pytest.fixture
def code_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], str]:
    """The code with which an image is refused while nothing is decoded, nor even opened by Pillow."""

    def explode(*_: object, **__: object) -> None:
        raise AssertionError("opened")

    def code(data: bytes) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(Image, "open", explode)
            with pytest.raises(SampleError) as caught:
                open_image(data)
        return caught.value.code

    return code


# --- TIFF ---

SHORT, LONG = 3, 4
Entry = tuple[int, int, int, int]
"""Tag, type, count, and the value or where the values are."""

SMALL: list[Entry] = [
    (256, SHORT, 1, 10),
    (257, SHORT, 1, 10),
    (258, SHORT, 1, 8),
    (259, SHORT, 1, 1),
    (262, SHORT, 1, 1),
    (273, LONG, 1, 200),
    (279, LONG, 1, 100),
]
"""A gray picture of 10x10 pixels."""


def tiff_of(entries: Sequence[Entry], order: str = "<", length: int = 300) -> bytes:
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, len(entries))
    short = {SHORT: "HHIHxx", LONG: "HHII"}
    tags = b"".join(struct.pack(order + short[kind if count == 1 else LONG], tag, kind, count, value)
                    for tag, kind, count, value in sorted(entries))  # fmt: skip
    return (head + tags + bytes(4)).ljust(length, b"\x50")


def big_tiff_of(entries: Sequence[Entry]) -> bytes:
    head = b"II+\0" + struct.pack("<HHQQ", 8, 0, 16, len(entries))
    tags = b"".join(struct.pack("<HHQQ", *entry) for entry in sorted(entries))
    return (head + tags + bytes(8)).ljust(400, b"\x50")


def with_tag(*changed: Entry) -> list[Entry]:
    tags = [entry[0] for entry in changed]
    return [entry for entry in SMALL if entry[0] not in tags] + list(changed)


@pytest.mark.parametrize("data", [tiff_of(SMALL), tiff_of(SMALL, ">"), big_tiff_of(SMALL)], ids=["II", "MM", "big"])
def test_a_tiff_is_read_in_either_byte_order_and_as_bigtiff(data: bytes) -> None:
    assert tiff.first_page(data) == tiff.Page((10, 10), (1, 1), 1, 7)
    assert np.all(np.asarray(open_image(data)) == 0x50)


@pytest.mark.parametrize(
    ("code", "data"),
    [
        ("too_large", tiff_of(with_tag((256, SHORT, 1, 9000), (257, SHORT, 1, 9000)))),
        ("too_large", tiff_of(with_tag((256, LONG, 1, 40_000), (257, LONG, 1, 800)))),
        ("bad_aspect", tiff_of(with_tag((256, SHORT, 1, 5000)))),
        ("too_large", tiff_of([*SMALL, (322, LONG, 1, 30_000), (323, LONG, 1, 30_000)])),
        ("too_large", tiff_of(with_tag((273, SHORT, 1_000_001, 200)), length=2_100_000)),
        ("too_large", tiff_of([*SMALL, (40_000, SHORT, 1_000_001, 200)], length=2_100_000)),
        ("unsupported_mode", tiff_of(with_tag((259, SHORT, 1, 34925)))),
        ("unsupported_mode", tiff_of(with_tag((259, SHORT, 1, 6)))),
        ("unsupported_mode", tiff_of(with_tag((259, SHORT, 1, 7))) + b"\xff\xc2"),
        ("corrupt", tiff_of([*SMALL, (256, LONG, 1, 20_000)])),
        ("corrupt", tiff_of([entry for entry in SMALL if entry[0] != 257])),
        ("corrupt", tiff_of(with_tag((256, SHORT, 1, 0)))),
        ("truncated", tiff_of(with_tag((273, LONG, 50, 280)))),
        ("truncated", tiff_of(SMALL)[:60]),
        ("truncated", b"II*\0" + struct.pack("<I", 5000)),
    ],
    ids=[
        "81 MP",
        "40,000 pixels on a side",
        "500:1",
        "a small picture in one huge tile",
        "more strips than a picture has",
        "more values than a picture has",
        "LZMA",
        "the JPEG of before 1995",
        "progressive JPEG",
        "two widths",
        "no height",
        "no width",
        "strips behind the end",
        "cut in its tags",
        "cut before its tags",
    ],
)
def test_a_tiff_is_refused_by_its_tags(code_of: Callable[[bytes], str], code: str, data: bytes) -> None:
    assert code_of(data) == code


def test_tags_of_exif_count_as_well(code_of: Callable[[bytes], str]) -> None:
    exif = struct.pack("<HHHII", 1, 37_500, SHORT, 1_000_001, 400)
    data = tiff_of([*SMALL, (0x8769, LONG, 1, 300)]) + exif
    assert code_of(data.ljust(2_100_000, b"\0")) == "too_large"


def test_folders_of_tags_that_hold_each_other_have_an_end() -> None:
    assert tiff.first_page(tiff_of([*SMALL, (0x8769, LONG, 1, 8)])).size == (10, 10)


# --- AVIF ---


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def test_the_size_of_an_avif_is_that_of_its_coded_frames() -> None:
    data = encoded(noise(60, 40), "AVIF")
    assert list(avif.coded_sizes(data)) == [(60, 40)]


def test_frames_of_an_animation_may_be_as_large_as_their_header_allows() -> None:
    frames = [noise(60, 40), noise(60, 40).rotate(180)]
    sizes = list(avif.coded_sizes(encoded(frames[0], "AVIF", save_all=True, append_images=frames[1:])))
    assert sizes
    assert all(60 <= width < 120 and 40 <= height < 80 for width, height in sizes)


def test_alpha_is_a_coded_frame_of_its_own() -> None:
    picture = noise(60, 40)
    picture.putalpha(noise(60, 40).convert("L"))
    assert list(avif.coded_sizes(encoded(picture, "AVIF"))) == [(60, 40)] * 2


def test_an_avif_that_says_it_is_small_is_refused_for_its_coded_frame(
    code_of: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(noise(600, 400), "AVIF")
    at = data.index(b"ispe") + 8
    said_small = data[:at] + struct.pack(">II", 10, 10) + data[at + 8 :]
    assert Image.open(io.BytesIO(said_small)).size == (10, 10)
    monkeypatch.setattr(headers, "OTHER_MAX_PIXELS", 50_000)
    assert code_of(said_small) == "too_large"


ITEM = box(b"iinf", struct.pack(">IH", 0, 1) + box(b"infe", struct.pack(">IHH4s", 2 << 24, 1, 0, b"av01") + b"\0"))


def avif_of(iloc: bytes) -> bytes:
    meta = box(b"meta", bytes(4) + ITEM + box(b"iloc", iloc))
    return box(b"ftyp", b"avif" + bytes(4) + b"avif") + meta + box(b"mdat", bytes(100))


@pytest.mark.parametrize(
    "iloc",
    [
        struct.pack(">IBBHHHH", 0, 0x00, 0x00, 1, 1, 0, 65535),
        struct.pack(">IBBHHHH", 0, 0x44, 0x00, 1, 1, 0, 50) + struct.pack(">II", 0, 100) * 50,
        struct.pack(">IBBHHHH", 0, 0x44, 0x00, 1, 1, 0, 1) + struct.pack(">II", 0, 4),
        struct.pack(">IBBHHHH", 0, 0x44, 0x00, 1, 1, 0, 1),
        struct.pack(">IBBH", 0, 0x44, 0x00, 0),
    ],
    ids=["parts without a place", "parts that overlap", "no sequence header", "cut", "no pictures"],
)
def test_an_avif_with_damaged_boxes_is_corrupt(code_of: Callable[[bytes], str], iloc: bytes) -> None:
    assert code_of(avif_of(iloc)) == "corrupt"


# --- JPEG ---


@pytest.mark.parametrize("marker", [0x01, *range(0xD0, 0xD8)])
def test_a_marker_without_a_length_is_passed_over(marker: int) -> None:
    data = encoded(noise(16, 24), "JPEG")
    frame = headers.frame_of(data)
    assert frame is not None
    moved = headers.frame_of(data[:2] + bytes([0xFF, marker]) + data[2:])
    assert moved is not None
    assert (moved.width, moved.height, moved.scan_at) == (16, 24, frame.scan_at + 2)
