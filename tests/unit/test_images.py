"""Encoded images that open, their pixels and resizing, and the code of each that does not open."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from embq.core.errors import SampleError
from embq.worker.embedders.image import headers
from embq.worker.embedders.image.decoding import FORMATS, open_image, quiet_pillow
from tests.support.picture_files import chunk, chunk_inserted, encoded


def noise(mode: str = "RGB", size: tuple[int, int] = (80, 60)) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, size=(size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def code_of(data: bytes) -> str:
    with pytest.raises(SampleError) as caught:
        open_image(data)
    assert caught.value.message
    return caught.value.code


def outcome_of(data: bytes) -> str:
    try:
        open_image(data)
    except SampleError as error:
        return error.code
    return "opened"


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("RGB", "JPEG"),
        ("L", "JPEG"),
        ("CMYK", "JPEG"),
        ("RGB", "PNG"),
        ("RGBA", "PNG"),
        ("LA", "PNG"),
        ("P", "PNG"),
        ("1", "PNG"),
        ("I;16", "PNG"),
        ("RGB", "WEBP"),
        ("RGBA", "WEBP"),
        ("P", "GIF"),
        ("RGB", "BMP"),
        ("RGB", "TIFF"),
        ("1", "TIFF"),
        ("I;16", "TIFF"),
        ("RGB", "AVIF"),
        ("RGBA", "AVIF"),
        ("L", "AVIF"),
    ],
)
def test_an_image_opens_decoded_in_its_own_mode(mode: str, kind: str) -> None:
    source = Image.new("I;16", (80, 60), 40000) if mode == "I;16" else noise(mode)
    if mode == "RGBA":
        source.putalpha(120)
    image = open_image(encoded(source, kind))
    assert image.mode == mode
    assert image.size == (80, 60)
    assert image.resize((20, 20)).convert("RGB").size == (20, 20)


def test_a_progressive_jpeg_and_one_without_subsampling_open() -> None:
    assert open_image(encoded(noise(), "JPEG", progressive=True)).size == (80, 60)
    assert open_image(encoded(noise(), "JPEG", subsampling=0)).size == (80, 60)


def test_the_exif_orientation_is_not_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(noise(), "JPEG", exif=exif)
    assert Image.open(io.BytesIO(data)).getexif()[0x0112] == 6
    assert open_image(data).size == (80, 60)


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (20, 20), color) for color in ("red", "blue")]
    for kind in ("GIF", "WEBP"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], lossless=True)
        assert np.asarray(open_image(data).convert("RGB"))[5, 5, 0] > 200


def test_one_pixel_is_an_image() -> None:
    assert open_image(encoded(Image.new("RGB", (1, 1)), "PNG")).size == (1, 1)


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


@pytest.mark.parametrize("kind", FORMATS)
def test_a_cut_image_is_truncated(kind: str) -> None:
    data = encoded(noise(size=(200, 150)), kind)
    assert code_of(data[: len(data) // 2]) == "truncated"


@pytest.mark.parametrize("kind", FORMATS)
def test_no_cut_of_an_image_raises_anything_but_a_sample_error(kind: str) -> None:
    data = encoded(noise(size=(40, 30)), kind)
    with warnings.catch_warnings():
        quiet_pillow()
        for length in range(0, len(data) - 1, max(1, len(data) // 150)):
            assert outcome_of(data[:length]) in {"truncated", "corrupt", "unidentified", "opened"}


@pytest.mark.parametrize("kind", FORMATS)
def test_no_damage_raises_anything_but_a_sample_error(kind: str) -> None:
    data = encoded(noise(size=(40, 30)), kind)
    random = np.random.default_rng(0)
    with warnings.catch_warnings():
        quiet_pillow()
        for _ in range(300):
            damaged = bytearray(data)
            at = int(random.integers(0, min(len(data), 400)))
            damaged[at : at + 4] = random.bytes(4)
            assert outcome_of(bytes(damaged))


def test_a_scan_with_damaged_markers_is_corrupt() -> None:
    data = bytearray(encoded(noise(size=(200, 150)), "PNG"))
    at = data.index(b"IDAT") + 200
    data[at : at + 40] = b"\0" * 40
    assert code_of(bytes(data)) in {"corrupt", "truncated"}


@pytest.mark.parametrize("data", [b"", b"<!DOCTYPE html><html></html>", b"\0" * 100, b"RIFF____WAVEfmt "])
def test_what_is_no_image_is_unidentified(data: bytes) -> None:
    assert code_of(data) == "unidentified"


def test_formats_that_are_not_on_the_list_are_unidentified() -> None:
    assert code_of(encoded(noise(), "ICO")) == "unidentified"
    assert code_of(encoded(noise(), "PPM")) == "unidentified"


def test_bombs_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise AssertionError("decoded")

    bombs = [png_header(9000, 9000), webp_header(16000, 16000), png_header(20000, 20000), png_header(40000, 1000)]
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", explode)
    assert [code_of(bomb) for bomb in bombs] == ["too_large"] * 4


def png_header(width: int, height: int) -> bytes:
    data = encoded(Image.new("L", (1, 1)), "PNG")
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def webp_header(width: int, height: int) -> bytes:
    body = (
        b"WEBPVP8L" + struct.pack("<I", 5) + b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + b"\0" * 40
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_a_jpeg_may_have_more_pixels_than_other_formats() -> None:
    assert headers.JPEG_MAX_PIXELS > headers.OTHER_MAX_PIXELS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headers, "JPEG_MAX_PIXELS", 80 * 60)
        patch.setattr(headers, "OTHER_MAX_PIXELS", 80 * 60 - 1)
        assert open_image(encoded(noise(), "JPEG")).size == (80, 60)
        assert code_of(encoded(noise(), "PNG")) == "too_large"
        assert code_of(encoded(noise(), "WEBP")) == "too_large"


def test_a_file_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "FILE_MAX_BYTES", 100)
    assert code_of(b"\xff\xd8\xff" + b"\0" * 98) == "too_large"


def test_a_strip_has_a_bad_aspect_ratio() -> None:
    assert code_of(encoded(Image.new("RGB", (5000, 10)), "PNG")) == "bad_aspect"
    assert code_of(encoded(Image.new("RGB", (10, 501)), "JPEG")) == "bad_aspect"
    assert open_image(encoded(Image.new("RGB", (10, 500)), "JPEG")).size == (10, 500)


def test_a_jpeg_of_too_many_scans_is_refused() -> None:
    data = encoded(noise(), "JPEG", progressive=True)
    last_scan = data[data.rindex(b"\xff\xda") : -2]
    assert code_of(data[:-2] + last_scan * 64 + data[-2:]) == "too_large"


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


@pytest.mark.parametrize(("offset", "value"), [(1, 0xC3), (4, 12)], ids=["lossless", "12 bit"])
def test_jpegs_that_no_decoder_reads_have_an_unsupported_mode(offset: int, value: int) -> None:
    data = bytearray(encoded(noise(), "JPEG"))
    data[data.index(b"\xff\xc0") + offset] = value
    assert code_of(bytes(data)) == "unsupported_mode"


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
