"""Plain JPEGs decoded and resized by a GPU: by nvImageCodec, that is nvJPEG and the JPEG engines that some GPUs have.

To the threads that prepare it is a decoder like the others: encoded bytes in, the pixels that the model reads out, in
host memory. The way back costs 150 kB of the bus for an image of 224x224, and keeps all else as it is: a damaged image
fails before it has company, an image of another kind beside it takes the other way, and passes stay recorded. Nothing
of the device is held between two images.

A CPU takes the GPU's place where a test asks for it: by the same calls, with libjpeg-turbo behind them.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate
from torch.utils.dlpack import from_dlpack

from core.errors import DeviceFullError, ModelError
from worker.embedders.device import foreign_faults
from worker.embedders.jpeg import Frame
from worker.embedders.preprocess import Fit, placed

PACKAGE = "nvidia.nvimgcodec"
"""Of the distribution nvidia-nvimgcodec-cu13, or -cu12 for a torch with CUDA 12."""

EXTENSIONS = ("libjpeg_turbo_ext", "libnvjpeg_ext")
"""Modules of nvImageCodec that are needed. The others print errors where the libraries for their formats are absent."""

AT_ONCE = 8
"""Images on the device at the same time, whatever the number of threads: it bounds the memory. Not measured."""

MAX_PIXELS = 12_500_000
"""Larger images are decoded by the CPU. While it is resized, an image takes about 20 bytes per pixel (3 decoded, 3 in
the decoder, 12 as float32, 2 with one side made smaller): with `AT_ONCE` 2.0 GB where all are this large, 197 MB where
they have 1.2 megapixels."""

END = b"\xff\xd9"
"""Last bytes of a whole JPEG. A GPU's decoder may fill up what is cut off and say nothing, so what ends otherwise is
for the CPU."""

OPTIONS = ":fancy_upsampling=1"
"""Chroma as libjpeg makes it, by weighted means; else it is repeated, which costs 10 dB."""


class Lane:
    """What decodes one image at a time: a decoder of nvImageCodec, and on a GPU a stream."""

    def __init__(self, codec: Any, device: torch.device) -> None:
        kinds, number = [codec.BackendKind.CPU_ONLY], codec.NVIMGCODEC_DEVICE_CPU_ONLY
        self.stream: Any = None
        if device.type == "cuda":
            kinds = [codec.BackendKind.HW_GPU_ONLY, codec.BackendKind.GPU_ONLY, codec.BackendKind.HYBRID_CPU_GPU]
            number = torch.cuda.current_device() if device.index is None else device.index
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._codec = codec
        self._decoder = codec.Decoder(
            device_id=number, max_num_cpu_threads=1, backends=[codec.Backend(kind) for kind in kinds], options=OPTIONS
        )
        self._params = codec.DecodeParams(apply_exif_orientation=False, color_spec=codec.ColorSpec.SRGB)

    def decoded(self, data: bytes) -> torch.Tensor | None:
        """uint8 of shape (height, width, 3), on the device; None where the image cannot be decoded so."""
        try:
            number = 0 if self.stream is None else self.stream.cuda_stream
            image = self._decoder.decode(self._codec.CodeStream(data), params=self._params, cuda_stream=number)
        except RuntimeError:  # a device that is broken says so to torch as well
            return None
        if image is None:
            return None
        # Sharing by DLPack asks for a driver even where the pixels are on the host.
        return torch.from_numpy(np.asarray(image)) if self.stream is None else from_dlpack(image)


class GpuDecoder:
    """Decodes and resizes plain JPEGs on one device. Safe to use from any thread.

    Attributes:
        device: that one.

    Raises ModelError where nvImageCodec is not installed or does not work here.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        codec = _codec()
        self._idle: queue.LifoQueue[Lane] = queue.LifoQueue()
        try:
            for _ in range(AT_ONCE):
                self._idle.put(Lane(codec, device))
        except RuntimeError as error:
            raise ModelError(
                f"nvImageCodec does not work on {device}: {error}",
                next_step="check that its CUDA version is that of torch, or use another --decode",
            ) from error

    def into(self, data: bytes, frame: Frame, fit: Fit, row: np.ndarray) -> bool:
        """Write the pixels of a JPEG to `row`, uint8 of shape (height, width, 3) of `fit`.

        False where it is not of a kind for this, or the device cannot decode it or has no room for it now; what is in
        `row` is then undefined. Raises DeviceError where the device is broken.
        """
        if not suits(data, frame):
            return False
        with self._lane() as lane, ExitStack() as on:
            if lane.stream is not None:
                on.enter_context(torch.cuda.device(self.device))
                on.enter_context(torch.cuda.stream(lane.stream))
            try:
                with foreign_faults():
                    pixels = lane.decoded(data)
                    if pixels is None or pixels.shape != (frame.height, frame.width, 3):
                        return False
                    # Waits for the copy, so nothing of this image is on the device when the lane goes to the next.
                    placed(_resized(pixels, fit), fit, torch.from_numpy(row))
            except DeviceFullError:
                return False
        return True

    @contextmanager
    def _lane(self) -> Iterator[Lane]:
        lane = self._idle.get()
        try:
            yield lane
        finally:
            self._idle.put(lane)


def gpu_decoder(device: torch.device) -> GpuDecoder:
    """What decodes for a worker on this device; ModelError where that is not a CUDA device."""
    if device.type != "cuda":
        raise ModelError(f"--decode gpu needs a CUDA device, not {device}", next_step="use --decode cpu-exact")
    return _shared(device)


@cache
def _shared(device: torch.device) -> GpuDecoder:
    """One for all models of a process, so that `AT_ONCE` holds for them together."""
    return GpuDecoder(device)


def suits(data: bytes, frame: Frame) -> bool:
    """Whether an image is decoded by the device: a whole, plain JPEG of one scan that is not too large."""
    return frame.is_plain and frame.has_one_scan and frame.height * frame.width <= MAX_PIXELS and data.endswith(END)


def _resized(pixels: torch.Tensor, fit: Fit) -> torch.Tensor:
    """`pixels` as large as before the cut, uint8: in float32, because torch resizes bytes on CPUs only.

    Rounded and kept within bytes after each of the two steps, as kernels for bytes do it: a bicubic filter goes beyond
    both ends at an edge, and where only the end result is kept within, up to 9 of 255 are left of that.
    """
    height, width = pixels.shape[:2]
    wanted = fit.resized(height, width)
    middle = (wanted[0], width) if fit.columns_first(height, width) else (height, wanted[1])
    numbers = pixels.permute(2, 0, 1)[None].float()
    for size in (middle, wanted):
        if numbers.shape[2:] != size:
            numbers = interpolate(numbers, size=size, mode=fit.interpolation, antialias=True).round_().clamp_(0, 255)
    return numbers[0].permute(1, 2, 0).to(torch.uint8)


_importing = threading.Lock()


def _codec() -> Any:
    """The package, of which only the modules that are needed are loaded, and which prints nothing."""
    try:
        with _importing, _quietly():
            return importlib.import_module(PACKAGE)
    except ImportError as error:
        raise ModelError(
            f"--decode gpu needs the package {PACKAGE}: {error}",
            next_step="pip install 'embq[gpu-decode]', or use another --decode",
        ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """What nvImageCodec reads of the environment when it is imported, for this while: no messages, and which modules.

    It takes all that are in a folder, and those look for their libraries beside it. So they get a folder of links.
    """
    with ExitStack() as undo:
        asked = {"PYNVIMGCODEC_VERBOSITY": "0"}
        spec = importlib.util.find_spec(PACKAGE)
        for place in (spec.submodule_search_locations or ())[:1] if spec is not None else ():
            root = Path(undo.enter_context(tempfile.TemporaryDirectory()))
            folder = root / "nvimgcodec" / "extensions"
            folder.mkdir(parents=True)
            for module in Path(place, "extensions").iterdir():
                if module.name.startswith(EXTENSIONS):
                    (folder / module.name).symlink_to(module)
            for other in Path(place).parent.iterdir():
                if other.is_dir() and other.name != Path(place).name:
                    (root / other.name).symlink_to(other)
            asked["NVIMGCODEC_EXTENSIONS_PATH"] = str(folder)
        for name in asked.keys() - os.environ.keys():
            os.environ[name] = asked[name]
            undo.callback(os.environ.pop, name, None)
        yield
