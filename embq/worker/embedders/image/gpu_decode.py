"""Plain JPEGs decoded and resized by the GPU that embeds them, many in one call: by torchcodec, that is by nvJPEG and
the JPEG engines that some GPUs have.

Pixels come back to host memory before the model reads them, 150 kB for an image of 224x224. So a damaged image fails
before it is in a batch with others, images that the GPU does not decode take the path `cpu-exact`, and a pass is the
same as on the other paths.

No GPU has run this file, and its speed is not measured. It is called from `embq.worker.embedders.image.pixels` only.
"""

from __future__ import annotations

import io
import queue
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

from embq.core.errors import DeviceFullError, ModelError, SampleError
from embq.core.units import Sample
from embq.worker.embedders.device.errors import using
from embq.worker.embedders.image.headers import check_file
from embq.worker.embedders.image.jpeg import Frame
from embq.worker.embedders.image.preprocess import Fit, placed

AT_ONCE = 4
"""Calls on the device at the same time, whatever the number of threads: it bounds the memory. Not measured."""

MAX_PIXELS = 12_500_000
"""Most pixels of one call; a larger image is decoded by the CPU. In a call, all images take about 6 bytes per pixel
(3 decoded, 3 in the decoder), and the one that is resized 14 more (12 as float32, 2 with one side made smaller): with
`AT_ONCE` 1.0 GB where images are as large as this, 370 MB where they have 1.2 megapixels."""

END = b"\xff\xd9"
"""Last bytes of a whole JPEG. A GPU's decoder may fill up what is cut off without an error, so a file that ends
otherwise is for the CPU."""

FRAME = re.compile(rb"\xff[\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf]")
"""Begin of a frame. Of a JPEG with a second one nvJPEG decodes the first, where libjpeg refuses the file."""

STORED_RGB = re.compile(rb"Adobe.{6}\0", re.DOTALL)
"""Segment of a JPEG whose colours are stored as red, green and blue; no document says that nvJPEG looks at it."""

EXIF = re.compile(rb"\xff\xe1(..Exif\0\0)", re.DOTALL)
"""Begin of a segment with an orientation, which torchcodec applies and embq does not."""

COMMENT = b"\xff\xfe\\1"
"""The same as the begin of a comment."""

Suited = tuple[int, bytes, Frame]


class GpuDecoder:
    """Decodes and resizes plain JPEGs on one device. Safe to use from any thread.

    Raises ModelError where torchcodec is not installed or does not decode on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._decode_jpeg = _torchcodec()
        self._idle: queue.LifoQueue[Any] = queue.LifoQueue()
        example = io.BytesIO()
        Image.new("RGB", (64, 64)).save(example, "JPEG")
        try:
            with using(device):
                for _ in range(AT_ONCE):
                    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
                    self._idle.put(stream)
            with self._stream():
                self._call([_source(example.getvalue(), 0)])
        except RuntimeError as error:
            raise ModelError(
                f"torchcodec does not decode JPEGs on {device}: {error}",
                next_step="install the torchcodec of torch's CUDA version, or use another --decode",
            ) from error

    def decoded(self, samples: Sequence[Sample], fit: Fit) -> Iterator[tuple[int, np.ndarray]]:
        """(place, pixels that `fit` wants) of each image that it decodes: uint8 of shape (height, width, 3).

        Images that are not of a kind for this are left out, and those that the device cannot decode or has no room for
        now. Raises DeviceError where the device is broken.
        """
        for group in _groups(samples):
            try:
                made = self._made(group, fit)
            except DeviceFullError:
                continue
            yield from made

    def _made(self, group: Sequence[Suited], fit: Fit) -> list[tuple[int, np.ndarray]]:
        sources = [_source(data, frame.scan_at) for _, data, frame in group]
        with self._stream():
            decoded = self._decoded(sources)
            rows = torch.empty((len(group), fit.height, fit.width, 3), dtype=torch.uint8, device=self._device)
            made = []
            for at, (pixels, (place, _, frame)) in enumerate(zip(decoded, group, strict=True)):
                if pixels is not None and pixels.shape == (3, frame.height, frame.width):
                    placed(_resized(pixels, fit), fit, rows[at])
                    made.append((place, at))
            # Waits for the copy, so nothing of these images is on the device when the stream takes the next ones. It
            # raises where the device is broken, which torchcodec reports as it reports a damaged image.
            on_host = rows.cpu().numpy()
        return [(place, on_host[at]) for place, at in made]

    def _decoded(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Decode each image to uint8 of shape (3, height, width) on the device; None where it cannot be decoded.

        An image that fails, fails the whole call. Then each is decoded by itself, so that what is made of an image does
        not depend on those beside it.
        """
        try:
            return list(self._call(sources))
        except RuntimeError:
            return [None] if len(sources) == 1 else [self._decoded([source])[0] for source in sources]

    def _call(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        made: list[torch.Tensor] = self._decode_jpeg(list(sources), mode="RGB", device=self._device)
        return made

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """Use the device, on one of its idle streams; errors as in `using`."""
        stream = self._idle.get()
        try:
            with using(self._device), torch.cuda.stream(stream):
                yield
        finally:
            self._idle.put(stream)


def gpu_decoder(device: torch.device) -> GpuDecoder:
    """The decoder of a worker on this device; ModelError where that is not a CUDA device."""
    if device.type != "cuda":
        raise ModelError(f"--decode gpu needs a CUDA device, not {device}", next_step="use --decode cpu-exact")
    return _shared(device)


@cache
def _shared(device: torch.device) -> GpuDecoder:
    """One for all models of a process, so that `AT_ONCE` holds for them together."""
    return GpuDecoder(device)


def suits(data: bytes, frame: Frame) -> bool:
    """Whether an image is decoded by the device: a whole, plain JPEG of one scan that is not too large."""
    return (
        frame.is_plain
        and frame.has_one_scan
        and frame.height * frame.width <= MAX_PIXELS
        and data.endswith(END)
        and FRAME.search(data, frame.scan_at) is None
        and STORED_RGB.search(data, 0, frame.scan_at) is None
    )


def _groups(samples: Sequence[Sample]) -> Iterator[list[Suited]]:
    """The images that suit the device, in order, at most `MAX_PIXELS` together."""
    group: list[Suited] = []
    total = 0
    for place, sample in enumerate(samples):
        if sample.image is None or sample.error is not None:
            continue
        data = bytes(sample.image)
        try:
            frame = check_file(data)
        except SampleError:  # raised again where Pillow is asked
            continue
        if frame is None or not suits(data, frame):
            continue
        size = frame.height * frame.width
        if group and total + size > MAX_PIXELS:
            yield group
            group, total = [], 0
        group.append((place, data, frame))
        total += size
    if group:
        yield group


def _source(data: bytes, scan_at: int) -> torch.Tensor:
    """A JPEG for torchcodec: a copy, which torch can write to, without its orientation."""
    copy = bytearray(data)
    copy[:scan_at] = EXIF.sub(COMMENT, copy[:scan_at])
    return torch.frombuffer(copy, dtype=torch.uint8)


def _resized(pixels: torch.Tensor, fit: Fit) -> torch.Tensor:
    """`pixels` of shape (3, height, width) as large as before the cut: uint8 of shape (height, width, 3).

    Computed in float32, because torch resizes bytes on CPUs only. Rounded and kept within bytes after each of the two
    steps, as kernels for bytes do it: a bicubic filter goes beyond both ends at an edge, and where only the end result
    is kept within, up to 9 of 255 are left of that.
    """
    height, width = pixels.shape[1:]
    wanted = fit.resized(height, width)
    middle = (wanted[0], width) if fit.columns_first(height, width) else (height, wanted[1])
    numbers = pixels[None].float()
    for size in (middle, wanted):
        if numbers.shape[2:] != size:
            numbers = interpolate(numbers, size=size, mode=fit.interpolation, antialias=True).round_().clamp_(0, 255)
    return numbers[0].permute(1, 2, 0).to(torch.uint8)


def _torchcodec() -> Any:
    """Its function that decodes JPEGs, many in one call."""
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:  # the latter two of a library that does not fit torch
        raise ModelError(
            f"--decode gpu needs torchcodec: {error}",
            next_step="pip install 'embq[gpu-decode]', or use another --decode",
        ) from error
    return decode_jpeg
