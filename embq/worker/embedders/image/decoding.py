"""Image decoding under limits that are checked before anything large is allocated."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable
from types import TracebackType

import numpy as np

# The plugins are imported by name because `Image.open` would otherwise import them on first use, from many threads.
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
    features,
)

from embq.core.errors import SampleError
from embq.core.units import Sample
from embq.worker.embedders.image import headers, tiff
from embq.worker.embedders.sample_fields import image_of

FORMATS = (
    "JPEG",
    "PNG",
    "WEBP",
    "GIF",
    "BMP",
    *(["TIFF"] if features.check("libtiff") else []),
    *(["AVIF"] if features.check("avif") else []),
)
"""Formats that are tried, all of which Pillow's wheels hold. Most of its security fixes are in the rarely used plugins
that are left out. Of those that are let in:

- JPEG, PNG, WebP and GIF are what the web is made of, and their decoders the best tested of all; BMP has none.
- TIFF is what scanners, microscopes and satellites write. Its plugin and libtiff have a long list of mended faults,
  most of them in rare compressions and in tags that contradict each other. So tags are read here first, those that
  disagree are refused, and only `tiff.COMPRESSIONS` are decoded.
- AVIF is what the web changes to. dav1d decodes it, which browsers let loose on every page; but it allocates what the
  coded frame asks for, whatever the file says of itself. So the frame's own header is read here first.
"""

PLUGINS = (
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
    GifImagePlugin,
    BmpImagePlugin,
    TiffImagePlugin,
    AvifImagePlugin,
)

LARGE_PIXELS = 16_000_000
"""An image with more waits until fewer than `LARGE_AT_ONCE` of them are decoded, whatever the number of threads."""

LARGE_AT_ONCE = 2

STRIP_ROWS = 64
"""Rows that are taken out of an image of Pillow's at once."""

_large = threading.BoundedSemaphore(LARGE_AT_ONCE)


class Picture:
    """The image of a sample as Pillow decodes it, when it is first asked for, and once for all models that look at it.

    For one thread.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._decoded: Image.Image | None = None
        self._waited = False

    def __enter__(self) -> Picture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._decoded = None
        if self._waited:
            _large.release()
            self._waited = False

    @property
    def has_clear_colour(self) -> bool:
        """Whether one of its colours stands for what is transparent, as a PNG may say; raises as `decoded` does."""
        return self.decoded().info.get("transparency") is not None

    def pixels(self) -> np.ndarray | None:
        """The decoded image: uint8 of shape (height, width, 3), or (height, width, 1) of a gray one.

        None if it has another mode, of which only Pillow knows how it becomes RGB. Raises SampleError as
        `open_image` does.
        """
        image = self.decoded()
        return _raw(image, image.mode, len(image.getbands())) if image.mode in ("RGB", "L") else None

    def padded(self) -> np.ndarray:
        """An image of the mode RGB or L: uint8 of shape (height, width, 4), of which the last channel means nothing."""
        return _raw(self.decoded(), "RGBX", 4)

    def decoded(self) -> Image.Image:
        """See `open_image`, and for a sample without an image `image_of`. The image belongs to all: change a copy."""
        if self._decoded is None:
            self._decoded = open_image(image_of(self._sample), self._wait_if_large)
        return self._decoded

    def _wait_if_large(self, pixels: int) -> None:
        if pixels > LARGE_PIXELS and not self._waited:
            _large.acquire()
            self._waited = True


def _raw(image: Image.Image, mode: str, channels: int) -> np.ndarray:
    pixels = np.empty((image.height, image.width, channels), np.uint8)
    for top in range(0, image.height, STRIP_ROWS):
        # Pillow copies twice to give its pixels away; of strips that costs no memory to speak of.
        strip = image.crop((0, top, image.width, min(top + STRIP_ROWS, image.height)))
        raw = (strip.convert("RGB") if mode == "RGBX" else strip).tobytes("raw", mode)
        pixels[top : top + STRIP_ROWS] = np.frombuffer(raw, np.uint8).reshape(strip.height, strip.width, channels)
    return pixels


def open_image(data: bytes, about_to_decode: Callable[[int], object] = int, *, least: int = 0) -> Image.Image:
    """The first frame of an encoded image, decoded, in its own mode and without turning it by its EXIF orientation.

    Raises SampleError with the code `too_large`, `bad_aspect`, `unidentified`, `truncated`, `corrupt` or
    `unsupported_mode`. Content decides the format, never a name.

    Args:
        about_to_decode: called with the number of pixels before memory is taken for them.
        least: if it is not 0, the decoder may make a JPEG smaller, down to this many pixels on its short side.
    """
    headers.check_file(data)
    image = None
    try:
        image = Image.open(io.BytesIO(headers.without_texts(data)), formats=FORMATS)
        is_jpeg = image.format in ("JPEG", "MPO")
        headers.check_size(image.size, headers.JPEG_MAX_PIXELS if is_jpeg else headers.OTHER_MAX_PIXELS)
        about_to_decode(image.width * image.height)
        if is_jpeg and least:
            image.draft(None, (least, least))
        image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise SampleError("too_large", str(error)) from error
    except MemoryError as error:
        raise SampleError("too_large", "there is not enough memory to decode the image") from error
    except UnidentifiedImageError as error:
        raise headers.unidentified(data, FORMATS) from error
    except headers.DECODER_ERRORS as error:
        tags = getattr(image, "tag_v2", {})
        raise headers.damaged(data, error, ends_early=tiff.ends_behind(tags, len(data))) from error
    return image


def quiet_pillow() -> None:
    """Have Pillow behave in a process of many threads: no warnings about odd metadata on stderr, its warning of bombs
    an error, and one thread for each image.

    Warning filters belong to the process, not to a thread, so this is for a program to call once, not per image.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
    warnings.filterwarnings("error", category=Image.DecompressionBombWarning)
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
