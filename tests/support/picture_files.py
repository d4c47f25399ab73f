"""Image files of every kind that people have, and of every kind that nobody should: made when they are asked for.

`picture_files` gives them all, each with what must become of it. Photographs are those inside the scikit-image wheel;
what no library writes is put together here, byte by byte.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image, ImageCms

NEAR = "near"
"""A row; pixels that are plain colours or grays, which a fast path may be a step of 255 off."""

EQUAL = "equal"
"""A row; pixels in a mode of which only Pillow knows how it becomes RGB, so every path gives the same bytes."""

SIZE = (333, 251)
"""Size of most pictures: odd, so that cutting to a square has halves to round."""


@dataclass(frozen=True, slots=True)
class PictureFile:
    """An image file, and what must become of it: `NEAR`, `EQUAL`, or the code of a failure."""

    name: str
    data: bytes
    outcome: str


def photograph(mode: str = "RGB", size: tuple[int, int] = SIZE) -> Image.Image:
    """A piece of a photograph, never enlarged; skips the test without scikit-image."""
    spec = find_spec("skimage")
    if spec is None or spec.origin is None:
        pytest.skip("photographs come with scikit-image")
    name = "camera.png" if mode == "L" else "coffee.png"
    with Image.open(Path(spec.origin).parent / "data" / name) as whole:
        return whole.crop((10, 20, 10 + size[0], 20 + size[1])).convert(mode)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    """The image as a file of this kind."""
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


KINDS = (
    "jpegs",
    "odd_jpegs",
    "pngs",
    "webps_and_gifs",
    "tiffs",
    "avifs",
    "bmps",
    "small_and_long",
    "beyond_limits",
    "cut",
    "damaged",
    "no_images",
)
"""The functions below that make them, by name: making the files of all takes seconds."""


@cache
def files_of(kind: str) -> Sequence[PictureFile]:
    """The files of one kind."""
    return [PictureFile(*each) for each in globals()[kind]()]


@cache
def picture_files() -> Sequence[PictureFile]:
    """All of them; names are unique, and say what is odd."""
    files = [file for kind in KINDS for file in files_of(kind)]
    assert len({file.name for file in files}) == len(files)
    return files


# --- JPEG ---


def jpegs() -> Iterator[tuple[str, bytes, str]]:
    rgb = photograph()
    plain = encoded(rgb, "JPEG", quality=90)
    for subsampling in ("4:4:4", "4:2:2", "4:2:0", "4:1:1"):
        yield f"jpeg {subsampling}", encoded(rgb, "JPEG", quality=90, subsampling=subsampling), NEAR
    yield "jpeg gray", encoded(photograph("L"), "JPEG", quality=90), NEAR
    yield "jpeg progressive", encoded(rgb, "JPEG", quality=90, progressive=True), NEAR
    yield "jpeg progressive gray", encoded(photograph("L"), "JPEG", quality=90, progressive=True), NEAR
    yield "jpeg optimised", encoded(rgb, "JPEG", quality=90, optimize=True), NEAR
    yield "jpeg quality 1", encoded(rgb, "JPEG", quality=1), NEAR
    yield "jpeg quality 100", encoded(rgb, "JPEG", quality=100, subsampling=0), NEAR
    yield "jpeg with restart markers", encoded(rgb, "JPEG", quality=90, restart_marker_blocks=4), NEAR
    yield "jpeg of RGB without a colour transform", encoded(rgb, "JPEG", quality=90, keep_rgb=True), NEAR
    yield "jpeg large", encoded(mosaic(2000, 1500), "JPEG", quality=90), NEAR
    yield "jpeg without JFIF", plain[:2] + plain[plain.index(b"\xff\xdb") :], NEAR
    yield "jpeg with a comment", segment(plain, 0xFE, b"\xff\xda" * 20), NEAR
    yield "jpeg with padded markers", plain.replace(b"\xff\xdb", b"\xff\xff\xff\xff\xdb", 1), NEAR
    for at, junk in ((b"\xff\xdb", b"junk"), (b"\xff\xc0", bytes(7)), (b"\xff\xc4", b"\xff\0\xff\0")):
        name = f"jpeg with junk before its marker {at[1]:x}"
        yield name, plain[: plain.index(at)] + junk + plain[plain.index(at) :], NEAR
    yield "jpeg with bytes behind its end", plain + b"\r\n\r\n--boundary--\r\n" + bytes(1000), NEAR
    yield "jpeg with another behind its end", plain + encoded(rgb.rotate(180), "JPEG"), NEAR
    yield "jpeg as mpo", encoded(rgb, "MPO", save_all=True, append_images=[rgb.rotate(180)]), NEAR
    exif = Image.Exif()
    exif[0x0112] = 6
    yield "jpeg turned by exif", encoded(rgb, "JPEG", quality=90, exif=exif), NEAR
    yield "jpeg with broken exif", segment(plain, 0xE1, b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01\x03\0"), NEAR
    yield "jpeg with exif of nothing but its name", segment(plain, 0xE1, b"Exif\0\0"), NEAR
    thumbnail = encoded(rgb.rotate(180).resize((80, 60)), "JPEG", progressive=True)
    yield "jpeg with a thumbnail", segment(plain, 0xE1, exif_with_thumbnail(thumbnail)), NEAR
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    yield "jpeg with an icc profile", encoded(rgb, "JPEG", quality=90, icc_profile=srgb), NEAR
    yield "jpeg with a broken icc profile", encoded(rgb, "JPEG", quality=90, icc_profile=b"\xff" * 90_000), NEAR
    yield "jpeg with half an icc profile", segment(plain, 0xE2, b"ICC_PROFILE\0\x02\x05" + srgb[:100]), NEAR


def odd_jpegs() -> Iterator[tuple[str, bytes, str]]:
    rgb = photograph()
    plain = encoded(rgb, "JPEG", quality=90)
    cmyk = encoded(rgb.convert("CMYK"), "JPEG", quality=90)
    yield "jpeg cmyk", cmyk, EQUAL
    at = cmyk.index(b"Adobe")
    yield "jpeg ycck", cmyk[: at + 11] + b"\x02" + cmyk[at + 12 :], EQUAL
    yield "jpeg cmyk that is not inverted", cmyk[: at - 4] + cmyk[at + 12 :], EQUAL
    frame = plain.index(b"\xff\xc0")
    patches = [
        ("jpeg 12 bit", 4, b"\x0c", "unsupported_mode"),
        ("jpeg lossless", 1, b"\xc3", "unsupported_mode"),
        ("jpeg hierarchical", 1, b"\xc5", "unsupported_mode"),
        ("jpeg lossless arithmetic", 1, b"\xcb", "unsupported_mode"),
        ("jpeg without width", 7, b"\0\0", "corrupt"),
        ("jpeg without height", 5, b"\0\0", "corrupt"),
        ("jpeg of 81 MP", 5, struct.pack(">HH", 9000, 9000), "too_large"),
        ("jpeg of 40,000 pixels on a side", 5, struct.pack(">HH", 900, 40_000), "too_large"),
    ]
    for name, offset, patch, outcome in patches:
        yield name, plain[: frame + offset] + patch + plain[frame + offset + len(patch) :], outcome
    # An arithmetic decoder makes something of any bits.
    yield "jpeg arithmetic", plain[: frame + 1] + b"\xc9" + plain[frame + 2 :], NEAR
    yield "jpeg without a frame", plain[:frame] + plain[plain.index(b"\xff\xda") :], "truncated"
    whole_scan = plain[plain.index(b"\xff\xda") : -2]
    yield "jpeg with 65 scans of everything", plain[:-2] + whole_scan * 64 + plain[-2:], "corrupt"
    slow = encoded(rgb, "JPEG", quality=90, progressive=True)
    yield "jpeg with 74 scans", slow[:-2] + slow[slow.rindex(b"\xff\xda") : -2] * 64 + slow[-2:], "too_large"
    tables = plain.index(b"\xff\xdb")
    yield "jpeg without quantisation tables", plain[:tables] + plain[frame:], "corrupt"
    yield "jpeg with two frames", plain[:-2] + plain[frame:], "corrupt"


def segment(jpeg: bytes, marker: int, content: bytes) -> bytes:
    """A JPEG with one more segment behind its JFIF header."""
    at = 4 + int.from_bytes(jpeg[4:6], "big")
    return jpeg[:at] + b"\xff" + bytes([marker]) + struct.pack(">H", len(content) + 2) + content + jpeg[at:]


def exif_with_thumbnail(thumbnail: bytes) -> bytes:
    """EXIF with a second folder of tags that holds a picture of its own."""
    second = struct.pack("<HHHIIHHIII", 2, 0x0201, 4, 1, 44, 0x0202, 4, 1, len(thumbnail), 0)
    return b"Exif\0\0" + struct.pack("<2sHIHI", b"II", 42, 8, 0, 14) + second + thumbnail


def mosaic(width: int, height: int) -> Image.Image:
    """A large picture of many pieces of photographs, none enlarged."""
    picture = Image.new("RGB", (width, height))
    tile = photograph(size=(400, 300))
    for number, top in enumerate(range(0, height, 300)):
        for left in range(0, width, 400):
            picture.paste(tile if (left // 400 + number) % 2 else tile.rotate(180), (left, top))
    return picture


# --- PNG ---


def pngs() -> Iterator[tuple[str, bytes, str]]:
    rgb = photograph()
    plain = encoded(rgb, "PNG")
    alpha = Image.linear_gradient("L").resize(SIZE)
    yield "png rgb", plain, NEAR
    yield "png gray", encoded(photograph("L"), "PNG"), NEAR
    yield "png interlaced", interlaced_png(np.asarray(rgb)), NEAR
    yield "png rgb of 16 bits", sixteen_bit_png(np.asarray(rgb)), NEAR
    yield "png rgb with a transparent colour", encoded(rgb, "PNG", transparency=(1, 2, 3)), NEAR
    yield "png with a broken icc profile", chunk_inserted(plain, b"iCCP", b"x\0\0" + b"\xff" * 50), NEAR
    yield "png with a broken exif", chunk_inserted(plain, b"eXIf", b"II*\0\xff\xff"), NEAR
    yield "png with an unknown chunk", chunk_inserted(plain, b"quEr", b"\0" * 1000), NEAR
    yield "png with bytes behind its end", plain + b"behind" * 100, NEAR
    turned = rgb.rotate(180)
    yield "png animated", encoded(rgb, "PNG", save_all=True, append_images=[turned]), NEAR
    still = encoded(rgb, "PNG", save_all=True, append_images=[turned], default_image=True)
    yield "png animated with a still picture", still, NEAR
    yield "png palette", encoded(rgb.convert("P"), "PNG"), EQUAL
    yield "png palette of 4 bits", encoded(rgb.quantize(16), "PNG", bits=4), EQUAL
    yield "png palette transparent", encoded(rgb.convert("P"), "PNG", transparency=bytes(range(256))), EQUAL
    yield "png 1 bit", encoded(rgb.convert("1"), "PNG"), EQUAL
    yield "png gray and alpha", encoded(merged("LA", photograph("L"), alpha), "PNG"), EQUAL
    yield "png rgba", encoded(merged("RGBA", *rgb.split(), alpha), "PNG"), EQUAL
    sixteen = Image.fromarray(np.asarray(photograph("L")).astype(np.uint16) * 257)
    yield "png gray of 16 bits", encoded(sixteen, "PNG"), EQUAL


def merged(mode: str, *bands: Image.Image) -> Image.Image:
    return Image.merge(mode, bands)


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def chunk_inserted(png: bytes, kind: bytes, content: bytes) -> bytes:
    """A PNG with one more chunk behind its header."""
    return png[:33] + chunk(kind, content) + png[33:]


def png_of(width: int, height: int, bits: int, colour: int, rows: bytes, *, interlaced: bool = False) -> bytes:
    """A PNG of rows with their filter bytes."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, int(interlaced))
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def sixteen_bit_png(pixels: np.ndarray) -> bytes:
    height, width, _ = pixels.shape
    rows = (pixels.astype(">u2") * 257).tobytes()
    step = width * 6
    return png_of(width, height, 16, 2, b"".join(b"\0" + rows[at : at + step] for at in range(0, len(rows), step)))


def interlaced_png(pixels: np.ndarray) -> bytes:
    """Adam7, PNG specification 8.2."""
    height, width, _ = pixels.shape
    rows = b""
    for left, top, wide, tall in ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)):  # fmt: skip  # noqa: E501
        rows += b"".join(b"\0" + row.tobytes() for row in pixels[top::tall, left::wide])
    return png_of(width, height, 8, 2, rows, interlaced=True)


# --- WebP, GIF, BMP ---


def webps_and_gifs() -> Iterator[tuple[str, bytes, str]]:
    rgb = photograph()
    turned = rgb.rotate(180)
    see_through = rgb.copy()
    see_through.putalpha(Image.linear_gradient("L").resize(SIZE))
    yield "webp lossy", encoded(rgb, "WEBP", quality=90), NEAR
    yield "webp lossless", encoded(rgb, "WEBP", lossless=True), NEAR
    yield "webp with a broken exif", encoded(rgb, "WEBP", exif=b"Exif\0\0II*\0\xff\xff"), NEAR
    yield "webp animated", encoded(rgb, "WEBP", save_all=True, append_images=[turned]), NEAR
    yield "webp alpha", encoded(see_through, "WEBP", quality=90), EQUAL
    yield "webp animated alpha", encoded(see_through, "WEBP", save_all=True, append_images=[turned]), EQUAL
    yield "gif", encoded(rgb, "GIF"), EQUAL
    yield "gif gray", encoded(photograph("L"), "GIF"), EQUAL
    yield "gif transparent", encoded(rgb.quantize(255), "GIF", transparency=0), EQUAL
    frames = [rgb.quantize(200), turned.quantize(200)]
    yield "gif animated", encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], loop=0), EQUAL
    small = encoded(rgb.quantize(100).crop((0, 0, 100, 80)), "GIF")
    yield "gif with a frame within a larger screen", small[:6] + struct.pack("<HH", 120, 100) + small[10:], EQUAL
    yield "gif without its trailer", encoded(rgb, "GIF")[:-1], EQUAL


def bmps() -> Iterator[tuple[str, bytes, str]]:
    rgb = photograph()
    plain = encoded(rgb, "BMP")
    yield "bmp rgb", plain, NEAR
    yield "bmp gray", encoded(photograph("L"), "BMP"), NEAR
    yield "bmp palette", encoded(rgb.convert("P"), "BMP"), EQUAL
    yield "bmp 1 bit", encoded(rgb.convert("1"), "BMP"), EQUAL
    rows = np.asarray(rgb)[:, :, ::-1]
    padded = np.pad(rows.reshape(SIZE[1], -1), ((0, 0), (0, -SIZE[0] * 3 % 4))).tobytes()
    yield "bmp from its top down", plain[:22] + struct.pack("<i", -SIZE[1]) + plain[26:54] + padded, NEAR
    yield "bmp of a compression of its own", plain[:30] + struct.pack("<I", 9) + plain[34:], "corrupt"


# --- TIFF ---


def tiffs() -> Iterator[tuple[str, bytes, str]]:
    rgb, gray = photograph(), photograph("L")
    pixels = np.asarray(gray)
    yield "tiff rgb", encoded(rgb, "TIFF"), NEAR
    yield "tiff gray", encoded(gray, "TIFF"), NEAR
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"):
        yield f"tiff {compression}", encoded(rgb, "TIFF", compression=compression), NEAR
    yield "tiff of many strips", encoded(rgb, "TIFF", strip_size=2048), NEAR
    yield "tiff of two pages", encoded(rgb, "TIFF", save_all=True, append_images=[gray.rotate(180)]), NEAR
    yield "tiff as bigtiff", encoded(rgb, "TIFF", big_tiff=True), NEAR
    yield "tiff big end first, in tiles", tiled_tiff(pixels), NEAR
    # Pillow turns TIFF, and no other format.
    yield "tiff turned", encoded(rgb, "TIFF", tiffinfo={274: 6}), NEAR
    yield "tiff lzma", encoded(rgb, "TIFF", compression="lzma"), "unsupported_mode"
    yield "tiff zstd", encoded(rgb, "TIFF", compression="zstd"), "unsupported_mode"
    yield "tiff gray of 16 bits", encoded(Image.fromarray(pixels.astype(np.uint16) * 257), "TIFF"), EQUAL
    yield "tiff gray of 32 bits", encoded(Image.fromarray(pixels.astype(np.int32)), "TIFF"), EQUAL
    yield "tiff gray of floats", encoded(Image.fromarray(pixels.astype(np.float32)), "TIFF"), EQUAL
    nan = pixels.astype(np.float32)
    nan[50:60], nan[90:95] = np.nan, np.inf
    yield "tiff gray of floats that are no numbers", encoded(Image.fromarray(nan), "TIFF"), EQUAL
    yield "tiff 1 bit as a fax", encoded(rgb.convert("1"), "TIFF", compression="group4"), EQUAL
    yield "tiff palette", encoded(rgb.convert("P"), "TIFF", compression="tiff_lzw"), EQUAL
    yield "tiff cmyk", encoded(rgb.convert("CMYK"), "TIFF", compression="tiff_lzw"), EQUAL
    if int(PIL.__version__.partition(".")[0]) >= 13:  # older ones cannot read what they write
        yield "tiff ycbcr", encoded(rgb.convert("YCbCr"), "TIFF"), EQUAL
    yield "tiff lab", encoded(rgb_to_lab(rgb), "TIFF"), EQUAL
    yield "tiff gray and alpha", encoded(merged("LA", gray, gray.rotate(90).resize(SIZE)), "TIFF"), EQUAL
    yield "tiff of samples without a mode", tiled_tiff(pixels, bits=7), "unsupported_mode"
    yield "tiff in one huge tile", tiled_tiff(pixels, side=30_000), "too_large"


def rgb_to_lab(image: Image.Image) -> Image.Image:
    lab = ImageCms.createProfile("LAB")
    made = ImageCms.profileToProfile(image, ImageCms.createProfile("sRGB"), lab, outputMode="LAB")
    assert made is not None
    made.info.pop("icc_profile", None)
    return made


def tiled_tiff(pixels: np.ndarray, bits: int = 8, side: int = 64) -> bytes:
    """A gray TIFF in tiles, without compression, big end first."""
    height, width = pixels.shape
    tile = min(side, 64)
    filled = np.pad(pixels, ((0, -height % tile), (0, -width % tile)))
    tiles = [
        filled[top : top + tile, left : left + tile].tobytes()
        for top in range(0, height, tile)
        for left in range(0, width, tile)
    ]
    start = 8 + 2 + 10 * 12 + 4
    places = [start + 8 * len(tiles) + tile * tile * number for number in range(len(tiles))]
    entries: Sequence[tuple[int, int, int, int]] = [
        (256, 4, 1, width),
        (257, 4, 1, height),
        (258, 4, 1, bits),
        (259, 4, 1, 1),
        (262, 4, 1, 1),
        (277, 4, 1, 1),
        (322, 4, 1, side),
        (323, 4, 1, side),
        (324, 4, len(tiles), start),
        (325, 4, len(tiles), start + 4 * len(tiles)),
    ]
    head = b"MM\0*" + struct.pack(">IH", 8, len(entries)) + b"".join(struct.pack(">HHII", *entry) for entry in entries)
    lists = struct.pack(f">{len(tiles)}I", *places) + struct.pack(f">{len(tiles)}I", *[tile * tile] * len(tiles))
    return head + bytes(4) + lists + b"".join(tiles)


# --- AVIF ---


def avifs() -> Iterator[tuple[str, bytes, str]]:
    rgb = photograph()
    for subsampling in ("4:2:0", "4:4:4"):
        yield f"avif {subsampling}", encoded(rgb, "AVIF", subsampling=subsampling, speed=10), NEAR
    yield "avif gray", encoded(photograph("L"), "AVIF", speed=10), NEAR
    see_through = rgb.copy()
    see_through.putalpha(Image.linear_gradient("L").resize(SIZE))
    yield "avif alpha", encoded(see_through, "AVIF", speed=10), EQUAL
    animated = encoded(rgb, "AVIF", speed=10, save_all=True, append_images=[rgb.rotate(180)])
    yield "avif animated", animated, NEAR
    exif = Image.Exif()
    exif[0x0112] = 6
    yield "avif turned", encoded(rgb, "AVIF", speed=10, exif=exif), NEAR
    plain = encoded(rgb, "AVIF", speed=10)
    yield "avif with bytes behind its end", plain + b"behind" * 100, NEAR
    at = plain.index(b"ispe") + 8
    yield "avif of 81 MP", plain[:at] + struct.pack(">II", 9000, 9000) + plain[at + 8 :], "too_large"
    yield "avif of 268 MP that says it is small", avif_of(sequence_header(16_384, 16_384), (10, 10)), "too_large"
    yield "avif of nothing coded", avif_of(b"\x12\0", (10, 10)), "corrupt"


def box(kind: bytes, content: bytes) -> bytes:
    """A box of an ISO file."""
    return struct.pack(">I4s", 8 + len(content), kind) + content


def avif_of(coded: bytes, size: tuple[int, int]) -> bytes:
    """An AVIF of one item, as it says of this size; `coded` is its AV1."""
    ftyp = box(b"ftyp", b"avif" + bytes(4) + b"avifmif1miaf")
    entry = box(b"infe", struct.pack(">IHH4s", 2 << 24, 1, 0, b"av01") + b"\0")
    boxes = [
        box(b"hdlr", bytes(8) + b"pict" + bytes(13)),
        box(b"pitm", struct.pack(">IH", 0, 1)),
        box(b"iinf", struct.pack(">IH", 0, 1) + entry),
        box(b"iprp", box(b"ipco", box(b"ispe", struct.pack(">III", 0, *size)))),
    ]
    start = len(ftyp) + 12 + sum(map(len, boxes)) + 30 + 8
    iloc = box(b"iloc", struct.pack(">IBBHHHHII", 0, 0x44, 0, 1, 1, 0, 1, start, len(coded)))
    assert len(iloc) == 30
    return ftyp + box(b"meta", bytes(4) + b"".join(boxes) + iloc) + box(b"mdat", coded)


def sequence_header(width: int, height: int) -> bytes:
    """An AV1 sequence header for still pictures of this size, specification 5.5.1, and no picture."""
    fields = [(0, 3), (1, 1), (1, 1), (0, 5), (15, 4), (15, 4), (width - 1, 16), (height - 1, 16), (0, 32)]
    bits = "".join(f"{value:0{length}b}" for value, length in fields)
    content = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
    return bytes([1 << 3 | 2, len(content)]) + content


# --- sizes ---


def small_and_long() -> Iterator[tuple[str, bytes, str]]:
    rgb = photograph()
    kinds = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
    for kind in kinds:
        yield f"1x1 {kind.lower()}", encoded(rgb.crop((0, 0, 1, 1)), kind), EQUAL if kind == "GIF" else NEAR
    yield "1x50 png", encoded(rgb.crop((0, 0, 1, 50)), "PNG"), NEAR
    yield "50x1 jpeg", encoded(rgb.crop((0, 0, 50, 1)), "JPEG"), NEAR
    yield "224x224 png", encoded(rgb.crop((0, 0, 224, 224)), "PNG"), NEAR
    yield "224x225 png", encoded(rgb.crop((0, 0, 224, 225)), "PNG"), NEAR
    yield "227x224 jpeg", encoded(rgb.crop((0, 0, 227, 224)), "JPEG"), NEAR
    yield "150x113 jpeg", encoded(rgb.crop((0, 0, 150, 113)), "JPEG"), NEAR
    yield "20,000x400 jpeg", encoded(mosaic(20_000, 400), "JPEG"), NEAR
    yield "400x20,000 png", encoded(Image.new("L", (400, 20_000), 77), "PNG"), NEAR
    yield "1x51 png", encoded(rgb.crop((0, 0, 1, 51)), "PNG"), "bad_aspect"
    yield "20,000x399 jpeg", encoded(Image.new("L", (20_000, 399)), "JPEG"), "bad_aspect"
    for kind in kinds:
        yield f"5000x10 {kind.lower()}", encoded(Image.new("L", (5000, 10)), kind), "bad_aspect"


def beyond_limits() -> Iterator[tuple[str, bytes, str]]:
    rgb = photograph()
    black = Image.new("L", (9000, 9000))
    yield "a real jpeg of 81 MP", encoded(black, "JPEG"), "too_large"
    yield "a real png of 81 MP", encoded(black, "PNG", compress_level=1), "too_large"
    yield "png of 3,600 MP", png_of(60_000, 60_000, 8, 2, b""), "too_large"
    yield "png of 2^31 pixels on a side", png_of(2**31 - 1, 1, 8, 0, b""), "too_large"
    gif = encoded(rgb.crop((0, 0, 100, 80)), "GIF")
    yield "gif of 81 MP", gif[:6] + struct.pack("<HH", 9000, 9000) + gif[10:], "too_large"
    descriptor = gif.index(b"\x2c\0\0\0\0" + struct.pack("<HH", 100, 80)) + 5
    frame = gif[:descriptor] + struct.pack("<HH", 60_000, 60_000) + gif[descriptor + 4 :]
    yield "gif with a frame beyond its screen", frame, "too_large"
    lossless = b"WEBPVP8L" + struct.pack("<IBI", 5, 0x2F, (16_000 - 1) | (16_000 - 1) << 14) + bytes(40)
    yield "webp of 256 MP", b"RIFF" + struct.pack("<I", len(lossless)) + lossless, "too_large"
    canvas = b"WEBPVP8X" + struct.pack("<IB", 10, 2) + bytes(3) + b"\xff\xff\x0f" * 2 + bytes(40)
    yield "webp with a canvas of 2^40 pixels", b"RIFF" + struct.pack("<I", len(canvas)) + canvas, "too_large"
    tiff = encoded(rgb, "TIFF")
    for tag, side in ((256, SIZE[0]), (257, SIZE[1])):
        tiff = tiff.replace(struct.pack("<HHII", tag, 4, 1, side), struct.pack("<HHII", tag, 4, 1, 9000))
    yield "tiff of 81 MP", tiff, "too_large"
    bmp = encoded(rgb, "BMP")
    yield "bmp of 81 MP", bmp[:18] + struct.pack("<ii", 9000, 9000) + bmp[26:], "too_large"
    yield "jpeg of 33 MB", encoded(rgb, "JPEG") + bytes(33_000_000), "too_large"


# --- damage ---


def cut() -> Iterator[tuple[str, bytes, str]]:
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"):
        data = encoded(photograph(), kind)
        for place, length in (
            ("in its header", 30),
            ("in the middle", len(data) // 2),
            ("near its end", len(data) * 9 // 10),
        ):
            yield f"{kind.lower()} cut {place}", data[:length], "truncated"
    data = encoded(photograph(), "JPEG", progressive=True)
    yield "jpeg progressive cut in the middle", data[: len(data) // 2], "truncated"
    yield "jpeg with a thumbnail, cut", segment(data, 0xE1, exif_with_thumbnail(data[:5000]))[:6000], "truncated"
    for compression in ("tiff_lzw", "jpeg"):
        data = encoded(photograph(), "TIFF", compression=compression)
        yield f"tiff {compression} cut in the middle", data[: len(data) // 2], "truncated"


def damaged() -> Iterator[tuple[str, bytes, str]]:
    plain = encoded(photograph(), "JPEG", quality=90)
    middle = len(plain) // 2
    # A decoder finds its way again behind damage, or has too few bits at the end: Pillow decides which it is.
    yield "jpeg with 20 bytes of zero", plain[:middle] + bytes(20) + plain[middle + 20 :], NEAR
    png = encoded(photograph(), "PNG")
    at = png.index(b"IDAT") + 2000
    yield "png with 40 bytes of zero", png[:at] + bytes(40) + png[at + 40 :], "corrupt"
    yield "png with a wrong checksum of its header", png[:29] + b"\0\0\0\0" + png[33:], "corrupt"
    webp = encoded(photograph(), "WEBP")
    yield "webp with 200 bytes of 255", webp[:40] + b"\xff" * 200 + webp[240:], "corrupt"
    tiff = encoded(photograph(), "TIFF", compression="tiff_adobe_deflate")
    yield "tiff with 200 bytes of 255", tiff[:2000] + b"\xff" * 200 + tiff[2200:], "corrupt"
    avif = encoded(photograph(), "AVIF", speed=10)
    yield "avif with its pixels zero", avif[:-5000] + bytes(5000), NEAR


def no_images() -> Iterator[tuple[str, bytes, str]]:
    yield "empty", b"", "unidentified"
    yield "one byte", b"\xff", "unidentified"
    yield "a page", b"<!DOCTYPE html><html><title>404</title></html>", "unidentified"
    yield "svg", b'<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"/>', "unidentified"
    yield "pdf", b"%PDF-1.7\n", "unidentified"
    yield "zeros", bytes(10_000), "unidentified"
    yield "sound", b"RIFF\x24\0\0\0WAVEfmt " + bytes(30), "unidentified"
    yield "heic", box(b"ftyp", b"heic" + bytes(4) + b"mif1heic") + bytes(200), "unidentified"
    yield "jpeg 2000", encoded(photograph(), "JPEG2000"), "unidentified"
    yield "icon", encoded(photograph(), "ICO"), "unidentified"
    yield "postscript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "unidentified"
    yield "a pickle", b"\x80\x04\x95\x1f\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.", "unidentified"
