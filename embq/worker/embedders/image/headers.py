"""Image headers, checked against the limits before anything large is allocated."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from embq.core.errors import SampleError
from embq.worker.embedders.image import avif, tiff

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"

_UNUSED_CHUNKS = (b"iCCP", b"tEXt", b"zTXt", b"iTXt")

SIGNATURES = (_JPEG, _PNG, b"GIF87a", b"GIF89a", b"BM", *tiff.SIGNATURES)
"""First bytes of the formats, but for WebP and AVIF, which have theirs after a length."""

FILE_MAX_BYTES = 32_000_000
"""Longest encoded image; photographs of 64 MP are shorter."""

JPEG_MAX_PIXELS = 64_000_000
"""Pixels of a JPEG: what current cameras and telephones write."""

OTHER_MAX_PIXELS = 32_000_000
"""Pixels of the other formats, which can hold 81 MP in a quarter of a megabyte."""

SIDE_MAX_PIXELS = 32_768
"""Longest side."""

ASPECT_MAX = 50
"""Long side over short side. Resizing the short side of 5000x10 to 224 makes a picture of 112000x224 first."""

JPEG_MAX_SCANS = 64
"""Scans of a progressive JPEG; each costs a pass over all pixels. Pillow writes 10."""

JPEG_MAX_SCANNED_PIXELS = 1_024_000_000
"""Pixels of a progressive JPEG times its scans: 64 MP in 16 scans, 16 MP in 64. They take a core 6 s."""

UNDECODED_FRAMES = frozenset({0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF})
"""JPEG frame types that libjpeg-turbo does not decode: lossless and hierarchical."""

PLAIN_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
"""JPEG frames: baseline, extended and progressive with Huffman coding, which every decoder reads."""

ONE_SCAN_FRAMES = frozenset({0xC0, 0xC1})
"""Markers of frames with a single scan where the first holds all components: libjpeg refuses a second one."""

_MARKER = re.compile(rb"\xff[^\0\xff]")
"""A JPEG's marker; as many bytes of 255 as one likes may stand before it, and 255 with a zero behind it is none."""

JPEG_IN_TIFF = 7
"""Compression of a TIFF."""

DECODER_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    SyntaxError,
    IndexError,
    TypeError,
    KeyError,
    OverflowError,
    RuntimeError,
    struct.error,
    zlib.error,
)
"""Errors of Pillow's plugins for damaged files."""


class Frame(NamedTuple):
    """Header of a JPEG's first frame (ITU-T T.81, B.2.2) and first scan (B.2.3).

    Attributes:
        kind: low byte of its marker: 0xC0 baseline, 0xC2 progressive.
        bits: per channel.
        components: 1 gray, 3 colour, 4 CMYK or YCCK.
        in_first_scan: how many of them the first scan holds; 0 if the data ends before it, or has something
            between two markers.
        scan_at: offset of the first scan's marker; 0 if `in_first_scan` is.
    """

    kind: int
    bits: int
    height: int
    width: int
    components: int
    in_first_scan: int = 0
    scan_at: int = 0

    @property
    def has_one_scan(self) -> bool:
        """Whether every decoder reads one scan of it, or fails."""
        return self.kind in ONE_SCAN_FRAMES and self.in_first_scan == self.components

    @property
    def is_plain(self) -> bool:
        """Whether libjpeg-turbo returns the very pixels that Pillow returns: with four components they differ."""
        return self.kind in PLAIN_FRAMES and self.bits == 8 and self.components in (1, 3)


def check_file(data: bytes) -> Frame | None:
    """Refuse what is beyond a limit before a decoder sees it; the first frame of a JPEG.

    Looks at what Pillow does not, or only after it has allocated memory for it. Raises SampleError.
    """
    if len(data) > FILE_MAX_BYTES:
        raise SampleError("too_large", f"the file has {len(data)} bytes, more than {FILE_MAX_BYTES}")
    if data.startswith(_JPEG):
        return _check_jpeg(data)
    try:
        if data.startswith(tiff.SIGNATURES):
            _check_tiff(data)
        elif avif.is_avif(data):
            _check_frames(avif.coded_sizes(data))
        else:
            webp_size = _webp_size(data)
            if webp_size is not None:
                # Pillow allocates the whole canvas of a WebP while it opens the file.
                check_size(webp_size, OTHER_MAX_PIXELS)
    except DECODER_ERRORS as error:
        raise damaged(data, error) from error
    return None


def check_size(size: tuple[int, int], pixels_max: int) -> None:
    """Refuse an image of this (width, height)."""
    width, height = size
    if width < 1 or height < 1:
        raise SampleError("corrupt", f"the image says that it has {width}x{height} pixels")
    if width * height > pixels_max or max(size) > SIDE_MAX_PIXELS:
        raise SampleError("too_large", f"the image has {width}x{height} pixels")
    if max(size) > ASPECT_MAX * min(size):
        raise SampleError("bad_aspect", f"the image has {width}x{height} pixels, more than {ASPECT_MAX}:1")


def without_texts(data: bytes) -> bytes:
    """A PNG without its profile and texts; other data as it is.

    They change no pixel, and Pillow refuses the image if they are large (`PngImagePlugin.MAX_TEXT_CHUNK`).
    """
    pieces, begun, at = [], 0, len(_PNG)
    while data.startswith(_PNG) and (name := data[at + 4 : at + 8]) not in (b"", b"IEND"):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if name in _UNUSED_CHUNKS and end <= len(data):
            pieces.append(data[begun:at])
            begun = end
        at = end
    return b"".join([*pieces, data[begun:]]) if pieces else data


def damaged(data: bytes, error: Exception, *, ends_early: bool = False) -> SampleError:
    """The failure that an error of a decoder stands for: `truncated` or `corrupt`.

    Args:
        ends_early: whether it is known that the file is cut.
    """
    cut = ends_early or isinstance(error, EOFError) or "truncated" in str(error).lower() or _is_cut(data)
    return SampleError("truncated" if cut else "corrupt", str(error) or type(error).__name__)


def unidentified(data: bytes, formats: Iterable[str]) -> SampleError:
    """The failure of a file of which Pillow makes nothing."""
    if data.startswith(tiff.SIGNATURES):
        return SampleError("unsupported_mode", "a TIFF of samples that Pillow has no mode for")
    if data.startswith(SIGNATURES) or avif.is_avif(data):
        return SampleError("truncated" if _is_cut(data) else "corrupt", "the header is damaged")
    return SampleError("unidentified", f"not one of {', '.join(formats)}")


def frame_of(data: bytes) -> Frame | None:
    """The first frame of a JPEG; None if the data ends before it. What stands between two markers is skipped."""
    frame, is_clean = None, True
    at = 2
    while (match := _MARKER.search(data, at)) and (start := match.start()) + 10 <= len(data):
        # libjpeg goes on to the next marker, where others may not.
        is_clean = is_clean and not data[at:start].strip(b"\xff")
        if frame is not None and not is_clean:
            return frame
        at, marker = start, data[start + 1]
        if marker == 0xDA:
            return None if frame is None else frame._replace(in_first_scan=data[at + 4], scan_at=at)
        if frame is None and 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = (int.from_bytes(data[at + start : at + start + 2], "big") for start in (5, 7))
            frame = Frame(marker, data[at + 4], height, width, data[at + 9])
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return frame


def _check_jpeg(data: bytes) -> Frame:
    frame = frame_of(data)
    scans = _scans(data, frame)
    if scans > JPEG_MAX_SCANS:
        raise SampleError("too_large", f"the JPEG has more than {JPEG_MAX_SCANS} scans")
    if frame is None:
        raise SampleError("truncated", "the JPEG ends before its first picture")
    if frame.bits != 8 or frame.kind in UNDECODED_FRAMES:
        raise SampleError("unsupported_mode", f"JPEG frame type {frame.kind:#x} with {frame.bits} bits per channel")
    check_size((frame.width, frame.height), JPEG_MAX_PIXELS)
    if frame.width * frame.height * scans > JPEG_MAX_SCANNED_PIXELS:
        raise SampleError("too_large", f"the JPEG has {frame.width}x{frame.height} pixels in {scans} scans")
    return frame


def _scans(data: bytes, frame: Frame | None) -> int:
    """Most scans that a JPEG with this first frame has."""
    # Counting looks at every byte, and keeps all other threads from Python meanwhile.
    return 1 if frame is not None and frame.has_one_scan else data.count(b"\xff\xda")


def scanned_pixels(data: bytes) -> int | None:
    """Pixels of a JPEG or PNG times the passes that a decoder makes over them; 0 for what is no image.

    None for the other formats, whose headers do not tell.
    """
    if data.startswith(_JPEG):
        frame = frame_of(data)
        return 0 if frame is None else frame.width * frame.height * _scans(data, frame)
    if data.startswith(_PNG):
        width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
        return width * height
    return None if data.startswith((*SIGNATURES, b"RIFF")) or avif.is_avif(data) else 0


def _check_tiff(data: bytes) -> None:
    page = tiff.first_page(data)
    check_size(page.size, OTHER_MAX_PIXELS)
    if page.compression not in tiff.COMPRESSIONS:
        raise SampleError("unsupported_mode", f"TIFF compression {page.compression}")
    if page.compression == JPEG_IN_TIFF and b"\xff\xc2" in data:
        # libtiff allows 100 scans in each strip, and all strips may be the same bytes.
        raise SampleError("unsupported_mode", "a progressive JPEG in a TIFF")
    if page.tile[0] * page.tile[1] > OTHER_MAX_PIXELS or page.values > tiff.VALUES_MAX:
        width, height = page.tile
        raise SampleError(
            "too_large", f"the TIFF has tiles of {width}x{height} pixels, and {page.values} values in tags"
        )


def _check_frames(sizes: Iterable[tuple[int, int]]) -> None:
    """The coded frames of an AVIF: colours, alpha, both of an animation's first picture as well."""
    total = 0
    for width, height in sizes:
        total += width * height
        # Their headers may allow frames of nearly twice the width and height of those that there are.
        if width * height > 4 * OTHER_MAX_PIXELS or total > 16 * OTHER_MAX_PIXELS:
            raise SampleError("too_large", f"the AVIF holds coded frames of up to {width}x{height} pixels")


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) of a WebP's canvas from its header; None for other formats and headers too short to tell."""
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    chunk = data[12:16]
    if chunk == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if chunk == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1
    width, height = struct.unpack("<HH", data[26:30])
    return width & 0x3FFF, height & 0x3FFF


def _is_cut(data: bytes) -> bool:
    """Whether a file ends before it should, if its decoder names no reason for a failure."""
    if data[:4] == b"RIFF":
        return len(data) < int.from_bytes(data[4:8], "little") + 8
    if data.startswith(b"\x89PNG"):
        return b"IEND" not in data
    if data.startswith(b"GIF8"):
        return not data.rstrip(b"\0").endswith(b";")
    return avif.is_avif(data) and avif.is_cut(data)
