"""Forward pass of a vision tower: the plain one, or a faster variant that a trial has chosen.

On CUDA these are tried, each on top of what was faster before it: weights laid out by channels last, as batches of
decoded images are; the tower compiled, where `EMBQ_COMPILE_S` gives it the time; and the pass recorded as a CUDA graph,
which the host begins in one call. The last two are for batches of one size. All others take the plain way: the last of
a run, and every one while decoding is slower than the device, which is not what limits then.

A CPU takes the plain way always. Channels last gained nothing there: ViT-B-32, RN50 and convnext_base_w on Zen 4 in
fp32 were all within 4 % of their usual layout.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch

from embq.core.errors import DeviceError, DeviceFullError
from embq.core.service.log import Events
from embq.worker.embedders.device.errors import using
from embq.worker.embedders.device.trial import PROBES, Encode, Variant, fastest, places
from embq.worker.embedders.image.upload import ImageBatcher

WARM_PASSES = 3
"""Before a pass is recorded: libraries choose their kernels and make their workspaces in the first ones (the notes on
CUDA graphs in torch's documentation)."""

log = Events("worker")


class ImageForward:
    """Vectors of batches of images.

    Args:
        tower: the module whose weights `encode` uses.
        encode: the plain pass: (rows, 3, height, width) in the tower's type -> (rows, dim).
    """

    def __init__(self, tower: torch.nn.Module, encode: Encode) -> None:
        self._tower = tower
        self._encode = encode
        self._layout = torch.contiguous_format
        self._fast: Encode | None = None
        self._suits: tuple[int, torch.dtype] | None = None

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """Vectors of a batch: (rows, dim), in memory of their own."""
        if self._fast is not None and (len(batch), batch.dtype) == self._suits:
            return self._fast(batch)
        return self._plain(batch)

    def choose_variant(self, batch: torch.Tensor, *, compile_s: float, model: str) -> None:
        """Find the fastest way for batches like this one on a CUDA device; the log says which it is.

        Args:
            batch: of the size that passes will have.
            compile_s: seconds that compiling may take; 0 spares it.
            model: the spec, for the log.

        Raises DeviceError if the device turns out to be broken, DeviceFullError if it has no room for the batch.
        """
        self._fast = self._suits = None
        ways = [Variant("channels_last", self._channels_last, self._contiguous)]
        if compile_s > 0:
            ways.append(Variant("compiled", lambda encode: compiled(encode, batch, compile_s), is_bounded=False))
        # Its gain is the time of the thread that begins passes, which has nothing else to do during the trial.
        ways.append(Variant("graph", lambda encode: Graph(encode, batch, self._tower), takes_tie=True))
        with torch.cuda.device(batch.device):
            exact = self._in_fp32(batch[places(len(batch))])
            choice = fastest(self._plain, ways, batch, exact=exact, wait=torch.cuda.synchronize)
        if choice.encode != self._plain:
            self._fast, self._suits = choice.encode, (len(batch), batch.dtype)
        tried = " ".join(f"{name}:{round(speed)}" for name, speed in choice.rows_per_s.items())
        refused = {"refused": "; ".join(f"{name}: {why}" for name, why in choice.refused.items())}
        log.info(
            "image_path", model=model, path=choice.path, rows=len(batch), rows_per_s=tried,
            **(refused if choice.refused else {}),
        )  # fmt: skip

    def try_with(self, images: ImageBatcher, dtype: torch.dtype, *, rows: int, compile_s: float, model: str) -> None:
        """Call `choose_variant` for `rows` images; a no-op on other devices, or without room for them."""
        if images.device.type != "cuda":
            return
        try:
            with using(images.device), torch.inference_mode():
                noise = [images.noise() for _ in range(min(rows, PROBES))]
                batch = images.batch([noise[place % len(noise)] for place in range(rows)], dtype)
                self.choose_variant(batch, compile_s=compile_s, model=model)
        except DeviceFullError as error:
            # Perhaps for now only: passes are made smaller while it works (`embq.worker.stages.batching`).
            log.warning("image_path", model=model, path="eager", failed=error.message)

    def _plain(self, batch: torch.Tensor) -> torch.Tensor:
        return self._encode(batch.contiguous(memory_format=self._layout))

    def _in_fp32(self, batch: torch.Tensor) -> torch.Tensor | None:
        """Vectors of a batch with the weights in fp32; None if the device has no room for these.

        The cast back restores the weights of before, bit by bit.
        """
        if batch.dtype == torch.float32:
            return None  # the usual way is the exact one
        tf32 = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = False
        try:
            with using(batch.device):
                self._cast(torch.float32)
                return self._plain(batch.float())
        except DeviceFullError as error:
            log.warning("image_path", failed=f"no room for weights in fp32 to compare with: {error.message}")
            return None
        finally:
            torch.backends.cudnn.allow_tf32 = tf32
            try:
                with using(batch.device):
                    self._cast(batch.dtype)
            except DeviceFullError as error:
                raise DeviceError(f"the weights cannot be cast back: {error}") from error

    def _cast(self, dtype: torch.dtype) -> None:
        # Weights that were made in inference mode could not be cast outside of it.
        with torch.inference_mode(False):
            self._tower.to(dtype=dtype)

    def _channels_last(self, encode: Encode) -> Encode:
        self._lay_out(torch.channels_last)
        return encode

    def _contiguous(self) -> None:
        self._lay_out(torch.contiguous_format)

    def _lay_out(self, layout: torch.memory_format) -> None:
        # Weights that were made in inference mode could not be cast outside of it.
        with torch.inference_mode(False):
            self._tower.to(memory_format=layout)
        self._layout = layout


class Graph:
    """A pass on a CUDA device as it was recorded once, for batches of one shape.

    It holds the weights that it was recorded with. When the model is cast to fp32 and back for a row that was not
    finite, it gets new ones with the same bits, and those of the graph stay where the graph reads them.
    """

    def __init__(self, encode: Encode, batch: torch.Tensor, tower: torch.nn.Module) -> None:
        self._weights = [weights.detach() for weights in itertools.chain(tower.parameters(), tower.buffers())]
        self._batch = batch.clone()
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_PASSES):
                encode(self._batch)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may take memory while this one records.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._vectors = encode(self._batch)

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """The vectors of a batch, in memory of their own."""
        self._batch.copy_(batch)
        self._graph.replay()
        return self._vectors.clone()


def compiled(encode: Encode, batch: torch.Tensor, limit_s: float) -> Encode:
    """The pass compiled by torch for batches of this shape, and run once; TimeoutError if that takes longer.

    What takes too long cannot be stopped, and goes on in a thread that nobody waits for.
    """
    encoder: Encode = torch.compile(encode, dynamic=False)
    failed: list[Exception] = []

    def first() -> None:
        try:
            with using(batch.device), torch.inference_mode():
                encoder(batch)
        except Exception as error:  # noqa: BLE001 - thread boundary: raised again in the waiting thread
            failed.append(error)

    thread = threading.Thread(target=first, name="compile", daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed:
        raise failed[0]
    if thread.is_alive():
        raise TimeoutError(f"longer than {limit_s:g} s")
    return encoder
