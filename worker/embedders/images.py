"""Encoded images in, decoded PIL images out, under limits that hold before anything large is allocated."""

from __future__ import annotations

import io
import struct
import threading
import warnings
import zlib
from collections.abc import Callable
from types import TracebackType

import numpy as np

# The plugins are imported by name because `Image.open` would otherwise import them on first use, from many threads.
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from core.errors import SampleError
from core.units import Sample
from worker.embedders import jpeg
from worker.embedders.members import image_of

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Formats that are tried. Most of Pillow's security fixes are in the rarely used plugins that are left out."""

PLUGINS = (JpegImagePlugin, PngImagePlugin, WebPImagePlugin, GifImagePlugin, BmpImagePlugin)

SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM")
"""First bytes of the formats, but for WebP, which has its own after the file's size."""

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

UNDECODED_FRAMES = frozenset({0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF})
"""JPEG frame types that libjpeg-turbo does not decode: lossless and hierarchical."""


LARGE_PIXELS = 16_000_000
"""An image with more waits until fewer than `LARGE_AT_ONCE` of them are decoded, whatever the number of threads."""

LARGE_AT_ONCE = 2

_large = threading.BoundedSemaphore(LARGE_AT_ONCE)


class Picture:
    """The image of a sample, decoded when it is first asked for, and once for all models that look at it.

    For one thread, which closes one before it opens the next: what `pixels` gives stands in memory of the thread.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._decoded: Image.Image | None = None
        self._pixels: tuple[int, np.ndarray] | None = None
        self._frame: jpeg.Frame | None = None
        self._looked = self._waited = False

    def __enter__(self) -> Picture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._decoded = self._pixels = None
        if self._waited:
            _large.release()
            self._waited = False

    @property
    def data(self) -> bytes:
        """The encoded image; SampleError `missing_member` for a sample without one."""
        return image_of(self._sample)

    @property
    def frame(self) -> jpeg.Frame | None:
        """What the header of a JPEG says that libjpeg-turbo decodes as Pillow does; None for all other images.

        Raises SampleError where the image is beyond a limit.
        """
        if not self._looked:
            self._looked = True
            frame = _check_file(self.data)
            if frame is not None and frame.is_plain:
                _check_size((frame.width, frame.height), JPEG_MAX_PIXELS)
                self._frame = frame
        return self._frame

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the whole image; raises as `decoded` does."""
        frame = self.frame
        return self.decoded().size[::-1] if frame is None else (frame.height, frame.width)

    def pixels(self, scale: int = 1) -> np.ndarray | None:
        """The decoded image: uint8 of shape (height, width, 3), or (height, width, 1) of a gray one.

        None where it has another mode, of which only Pillow knows how it becomes RGB. What is given is overwritten by
        the next image of this thread.

        Args:
            scale: by which a JPEG with a `frame` is made smaller, each way; 1 for other images.

        Raises SampleError as `open_image` does.
        """
        if self._pixels is None or self._pixels[0] != scale:
            pixels = self._jpeg_pixels(scale)
            if pixels is None:
                pixels = self._pillow_pixels()
            if pixels is None:
                return None
            self._pixels = scale, pixels
        return self._pixels[1]

    def decoded(self) -> Image.Image:
        """See `open_image`, and for a sample without an image `image_of`. The image belongs to all: change a copy."""
        if self._decoded is None:
            self._decoded = open_image(self.data, self._wait_if_large)
        return self._decoded

    def _jpeg_pixels(self, scale: int) -> np.ndarray | None:
        """By libjpeg-turbo, without Pillow; None where that does not know the image, or finds any damage."""
        frame = self.frame
        if frame is None:
            return None
        self._wait_if_large(frame.height * frame.width)
        return jpeg.pixels(self.data, frame, scale)

    def _pillow_pixels(self) -> np.ndarray | None:
        image = self.decoded()
        if image.mode not in ("RGB", "L"):
            return None
        pixels: np.ndarray = np.array(image).reshape(image.height, image.width, -1)
        return pixels

    def _wait_if_large(self, pixels: int) -> None:
        if pixels > LARGE_PIXELS and not self._waited:
            _large.acquire()
            self._waited = True


def open_image(data: bytes, about_to_decode: Callable[[int], object] = int) -> Image.Image:
    """The first frame of an encoded image, decoded, in its own mode and without turning it by its EXIF orientation.

    Raises SampleError with the code `too_large`, `bad_aspect`, `unidentified`, `truncated`, `corrupt` or
    `unsupported_mode`. Content decides the format, never a name.

    Args:
        about_to_decode: called with the number of pixels before memory is taken for them.
    """
    _check_file(data)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        _check_size(image.size, JPEG_MAX_PIXELS if image.format in ("JPEG", "MPO") else OTHER_MAX_PIXELS)
        about_to_decode(image.width * image.height)
        image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise SampleError("too_large", str(error)) from error
    except MemoryError as error:
        raise SampleError("too_large", "there is not enough memory to decode the image") from error
    except UnidentifiedImageError as error:
        if data.startswith(SIGNATURES):
            raise SampleError("corrupt", "the header is damaged") from error
        raise SampleError("unidentified", f"not one of {', '.join(FORMATS)}") from error
    except (OSError, EOFError, ValueError, SyntaxError, IndexError, TypeError, struct.error, zlib.error) as error:
        cut = isinstance(error, EOFError) or "truncated" in str(error).lower() or _is_cut(data)
        raise SampleError("truncated" if cut else "corrupt", str(error) or type(error).__name__) from error
    return image


def quiet_pillow() -> None:
    """Keep Pillow's warnings about odd metadata off stderr, and make its bomb warning an error, for the process.

    Warning filters belong to the process, not to a thread, so this is for a program to call once, not per image.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
    warnings.filterwarnings("error", category=Image.DecompressionBombWarning)


def _check_file(data: bytes) -> jpeg.Frame | None:
    """Refuse what is beyond a limit before a decoder sees it; the first frame of a JPEG."""
    if len(data) > FILE_MAX_BYTES:
        raise SampleError("too_large", f"the file has {len(data)} bytes, more than {FILE_MAX_BYTES}")
    if data.startswith(jpeg.SIGNATURE):
        return _check_jpeg(data)
    webp_size = _webp_size(data)
    if webp_size is not None:
        # Pillow allocates the whole canvas of a WebP while it opens the file.
        _check_size(webp_size, OTHER_MAX_PIXELS)
    return None


def _check_size(size: tuple[int, int], pixels_max: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise SampleError("corrupt", f"the image says that it has {width}x{height} pixels")
    if width * height > pixels_max or max(size) > SIDE_MAX_PIXELS:
        raise SampleError("too_large", f"the image has {width}x{height} pixels")
    if max(size) > ASPECT_MAX * min(size):
        raise SampleError("bad_aspect", f"the image has {width}x{height} pixels, more than {ASPECT_MAX}:1")


def _check_jpeg(data: bytes) -> jpeg.Frame:
    if data.count(b"\xff\xda") > JPEG_MAX_SCANS:
        raise SampleError("too_large", f"the JPEG has more than {JPEG_MAX_SCANS} scans")
    frame = jpeg.frame_of(data)
    if frame is None:
        raise SampleError("truncated", "the JPEG ends before its first picture")
    if frame.bits != 8 or frame.kind in UNDECODED_FRAMES:
        raise SampleError("unsupported_mode", f"JPEG frame type {frame.kind:#x} with {frame.bits} bits per channel")
    return frame


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
    """Whether a WebP is shorter than it says; its decoder gives no reason for a failure."""
    return data[:4] == b"RIFF" and len(data) < int.from_bytes(data[4:8], "little") + 8
