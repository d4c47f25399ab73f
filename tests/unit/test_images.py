"""Encoded images that open, their pixels and resizing, and the code of each that does not open."""

from __future__ import annotations

import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from embq.core.errors import SampleError
from embq.worker.embedders.image import headers
from embq.worker.embedders.image.decoding import open_image, quiet_pillow
from tests.support.picture_files import chunk, chunk_inserted, encoded


def noise(mode: str = "RGB", size: tuple[int, int] = (80, 60)) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, size=(size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def code_of(data: bytes) -> str:
    with pytest.raises(SampleError) as caught:
        open_image(data)
    assert caught.value.message
    return caught.value.code


@pytest.mark.parametrize("behind", [False, True])
def test_profiles_and_texts_of_a_png_are_ignored_however_large_they_are(behind: bool) -> None:
    plain, huge = encoded(noise(), "PNG"), zlib.compress(bytes(80_000_000))
    texts = {b"iCCP": b"x\0\0" + huge, b"zTXt": b"x\0\0" + huge, b"iTXt": b"x\0\1\0\0\0" + huge, b"tEXt": b"x\0" + huge}
    data = plain
    for kind, content in texts.items():
        data = data[:-12] + chunk(kind, content) + data[-12:] if behind else chunk_inserted(data, kind, content)
    np.testing.assert_array_equal(np.asarray(open_image(data)), np.asarray(noise()))
    with pytest.raises(SampleError) as caught:
        open_image(data[: len(plain) // 2 if behind else -len(plain) // 2])
    assert caught.value.code == "truncated"


def test_a_jpeg_may_have_more_pixels_than_other_formats() -> None:
    assert headers.JPEG_MAX_PIXELS > headers.OTHER_MAX_PIXELS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headers, "JPEG_MAX_PIXELS", 80 * 60)
        patch.setattr(headers, "OTHER_MAX_PIXELS", 80 * 60 - 1)
        assert open_image(encoded(noise(), "JPEG")).size == (80, 60)
        assert code_of(encoded(noise(), "PNG")) == "too_large"
        assert code_of(encoded(noise(), "WEBP")) == "too_large"


def test_the_scans_of_a_baseline_jpeg_are_counted_where_there_can_be_more_than_one() -> None:
    data = bytearray(encoded(noise(), "JPEG"))
    scan = bytes(data[data.index(b"\xff\xda") : -2])
    with_many = bytes(data[:-2]) + scan * 64 + b"\xff\xd9"
    assert code_of(with_many) == "corrupt", "a decoder read a second scan of all components"
    data[data.index(b"\xff\xda") + 4] = 1
    assert code_of(bytes(data[:-2]) + scan * 64 + b"\xff\xd9") == "too_large"


def test_what_looks_like_scans_in_a_comment_is_none() -> None:
    comment = b"\xff\xda" * 100
    data = encoded(noise(), "JPEG")
    data = data[:2] + b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment + data[2:]
    assert open_image(data).size == (80, 60)


def test_pillows_complaints_about_metadata_do_not_escape() -> None:
    exif = b"Exif\0\0II*\0\x08\0\0\0\x02\0\x1a\x01\x05\0\x01\0\0\0\xff\xff\0\0"
    data = encoded(noise(), "JPEG")
    app1 = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    start = data.index(b"\xff\xdb")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_pillow()
        assert open_image(data[:2] + app1 + data[start:]).size == (80, 60)
    assert caught == []
