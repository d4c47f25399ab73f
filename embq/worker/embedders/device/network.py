"""Forward passes of a model on its device, repeated in fp32 where half precision overflows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, TypeVar

import numpy as np
import torch

from embq.core.errors import DeviceError, DeviceFullError
from embq.worker.embedders.base import PendingVectors
from embq.worker.embedders.device.errors import using


class ParallelPasses:
    """Computes passes of a CPU in threads, one for each core, each pass in one thread. For one caller.

    A pass that is split over the cores waits at the end of each step for the slowest core. Separate passes do not. On
    two idle Zen 4 cores all-MiniLM-L6-v2 is 4 to 13 % faster in this way.

    Args:
        count: passes that are computed at the same time.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(
            count, thread_name_prefix="lane", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._begun: list[Future[Mapping[str, np.ndarray]]] = []

    def begin(self, names: Iterable[str], run: Callable[[], Mapping[str, np.ndarray]]) -> PendingVectors:
        """Have a pass computed; one more than there are lanes may be begun, so that none waits for its next."""
        self._begun = [future for future in self._begun if not future.done()]
        future = self._pool.submit(run)
        self._begun.append(future)
        return PendingVectors(names, future.result, ahead=self.count, is_over=future.done)

    def settle(self) -> None:
        """Wait until nothing is computed any more."""
        wait(self._begun)
        self._begun.clear()


T = TypeVar("T")


class Network(Generic[T]):
    """The weights of a model on a device, in the type in which it computes.

    Args:
        module: the weights in fp32; they are moved and cast here.
        run: one forward pass of prepared samples: output -> tensor of shape (len(batch), dim) on the device.
        example: one prepared sample, which shows how long vectors are.

    Raises DeviceFullError if the device has no room for the model, and DeviceError if it fails.

    Attributes:
        dims: output -> length of its vectors.
        dtype: in which the model computes now.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        run: Callable[[Sequence[T]], Mapping[str, torch.Tensor]],
        *,
        device: torch.device,
        dtype: torch.dtype,
        example: T,
    ) -> None:
        self._module = module
        self._run = run
        self._device = device
        self._cast_to = self.dtype = dtype
        # As many as this process has been given of the cores.
        cores = torch.get_num_threads() if device.type == "cpu" else 1
        self._lanes = ParallelPasses(cores) if cores > 1 else None
        # What would be infinite after the cast, and could not be cast back.
        self._beyond = {
            name: weights.detach().clone()
            for name, weights in module.named_parameters()
            if dtype != torch.float32 and bool((weights.isfinite() & ~weights.to(dtype).isfinite()).any())
        }
        with using(device):
            module.to(device=device, dtype=dtype).eval()
            with torch.inference_mode():
                self.dims = {output: int(vectors.shape[1]) for output, vectors in run([example]).items()}

    @property
    def is_in_own_type(self) -> bool:
        """Whether the model computes as it was asked to: not while it recomputes in fp32 what overflowed."""
        return self.dtype == self._cast_to

    def embed(self, batch: Sequence[T]) -> Mapping[str, np.ndarray]:
        """See `Embedder.embed`.

        Raises DeviceFullError if the device's memory is too small, and DeviceError for any other error of the
        device: after one, a CUDA context stays broken.
        """
        if not batch:
            return {output: np.empty((0, dim), dtype=np.float32) for output, dim in self.dims.items()}
        if self._lanes is not None:
            return self._lanes.begin(self.dims, lambda: self._pass(batch))
        return self._pass(batch)

    def embed_in_fp32(self, batch: Sequence[T]) -> dict[str, np.ndarray]:
        """See `Embedder.embed_in_fp32`. The cast back restores the weights of before, bit by bit."""
        if self._lanes is not None:
            self._lanes.settle()  # or other passes would find half of the weights cast
        with self._in_fp32():
            return dict(self._pass(batch))

    def _pass(self, batch: Sequence[T]) -> Mapping[str, np.ndarray]:
        try:
            with using(self._device), torch.inference_mode():
                return on_host(self._run(batch), self._device)
        except DeviceFullError as error:
            message = error.message
        # Outside of the except block, because the traceback keeps the failed batch's tensors alive.
        if self._device.type == "cuda":
            with using(self._device):  # or this makes a context on cuda:0
                torch.cuda.empty_cache()
        raise DeviceFullError(message)

    @contextmanager
    def _in_fp32(self) -> Iterator[None]:
        if self._cast_to == torch.float32:
            yield
            return
        try:
            self._cast(torch.float32)
            with using(self._device):
                for name, weights in self._beyond.items():
                    self._module.get_parameter(name).data.copy_(weights)
            yield
        finally:
            try:
                self._cast(self._cast_to)
            except DeviceFullError as error:
                raise DeviceError(f"the weights cannot be cast back: {error}") from error

    def _cast(self, dtype: torch.dtype) -> None:
        with using(self._device):
            self._module.to(dtype=dtype)
        self.dtype = dtype


def on_host(vectors: Mapping[str, torch.Tensor], device: torch.device) -> Mapping[str, np.ndarray]:
    """The same in float32 on the host; from a CUDA device while that goes on."""
    if device.type != "cuda":
        return {name: tensor.to(device="cpu", dtype=torch.float32).numpy() for name, tensor in vectors.items()}
    with torch.cuda.device(device):  # the event is for the stream that copies, which is one of the vectors' device
        copies = {name: tensor.float().to("cpu", non_blocking=True) for name, tensor in vectors.items()}
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

    def arrive() -> dict[str, np.ndarray]:
        try:
            copied.synchronize()
        except RuntimeError as error:  # whatever it is: the pass was begun long ago, and cannot be done in halves
            raise DeviceError(f"the device failed: {str(error).splitlines()[0]}") from error
        return {name: copy.numpy() for name, copy in copies.items()}

    def is_over() -> bool:
        try:
            return bool(copied.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # which `arrive` will raise as well
            return True

    return PendingVectors(copies, arrive, is_over=is_over)
