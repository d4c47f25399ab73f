"""Image decoding under limits that are checked before anything large is allocated."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

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
from embq.worker.embedders.image import headers, jpeg, tiff
from embq.worker.embedders.image.preprocess import Fit
from embq.worker.embedders.sample_fields import image_of, prepare_each

T = TypeVar("T")

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
    """The image of a sample, decoded when it is first asked for, and once for all models that look at it.

    For one thread, which closes one before it opens the next: what `pixels` gives stands in memory of the thread.

    Attributes:
        resized: pixels that a GPU has made of it already, by the fit of the model that reads them.
    """

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self.resized: dict[Fit, np.ndarray] = {}
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
        self.resized.clear()
        if self._waited:
            _large.release()
            self._waited = False

    @property
    def data(self) -> bytes:
        """The encoded image; SampleError `missing_member` for a sample without one."""
        return image_of(self._sample)

    @property
    def frame(self) -> jpeg.Frame | None:
        """Header of a JPEG that libjpeg-turbo decodes as Pillow does; None for all other images.

        Raises SampleError where the image is beyond a limit.
        """
        if not self._looked:
            frame = headers.check_file(self.data)
            self._frame = frame if frame is not None and frame.is_plain else None
            self._looked = True
        return self._frame

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the whole image; raises as `decoded` does."""
        frame = self.frame
        return self.decoded().size[::-1] if frame is None else (frame.height, frame.width)

    @property
    def has_clear_colour(self) -> bool:
        """Whether one of its colours stands for what is transparent, as a PNG may say; raises as `decoded` does."""
        return self.frame is None and self.decoded().info.get("transparency") is not None

    def pixels(self, scale: int = 1) -> np.ndarray | None:
        """The decoded image: uint8 of shape (height, width, 3), or (height, width, 1) of a gray one.

        None where it has another mode, of which only Pillow knows how it becomes RGB. What is given is overwritten by
        the next image of this thread.

        Args:
            scale: by which a JPEG with a `frame` is made smaller, each way, unless it is damaged; 1 for other images.

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
        pixels = np.empty((image.height, image.width, len(image.getbands())), np.uint8)
        for top in range(0, image.height, STRIP_ROWS):
            # Pillow copies twice to give its pixels away; of strips that costs no memory to speak of.
            strip = image.crop((0, top, image.width, min(top + STRIP_ROWS, image.height)))
            pixels[top : top + STRIP_ROWS] = np.asarray(strip).reshape(strip.height, strip.width, -1)
        return pixels

    def _wait_if_large(self, pixels: int) -> None:
        if pixels > LARGE_PIXELS and not self._waited:
            _large.acquire()
            self._waited = True


def prepare_pictures(
    samples: Sequence[Sample],
    prepare: Callable[[Sample, Picture], T],
    decode_ahead: Callable[[Sequence[Picture]], object],
) -> list[T | SampleError]:
    """Apply `prepare` to each sample and its picture, in order; a SampleError that it raises stands in its place.

    Args:
        decode_ahead: called with all pictures first; see `embq.worker.embedders.base.ImageEmbedder`.
    """
    pictures = [Picture(sample) for sample in samples if sample.error is None]
    decode_ahead(pictures)
    waiting = iter(pictures)

    def alone(sample: Sample) -> T:
        with next(waiting) as picture:
            return prepare(sample, picture)

    return prepare_each(samples, alone)


def open_image(data: bytes, about_to_decode: Callable[[int], object] = int, *, least: int = 0) -> Image.Image:
    """The first frame of an encoded image, decoded, in its own mode and without turning it by its EXIF orientation.

    Raises SampleError with the code `too_large`, `bad_aspect`, `unidentified`, `truncated`, `corrupt` or
    `unsupported_mode`. Content decides the format, never a name.

    Args:
        about_to_decode: called with the number of pixels before memory is taken for them.
        least: where it is not 0, the decoder may make a JPEG smaller, down to so many pixels on its short side.
    """
    headers.check_file(data)
    image = None
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
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
