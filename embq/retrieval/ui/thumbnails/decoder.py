"""Parent side of the decoder: a few warm processes that make thumbnails, replaced if an image ends one."""

from __future__ import annotations

import queue
import subprocess
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager

from embq.core.errors import SampleError
from embq.core.process.children import ChildEndedError, JsonChild, ending
from embq.retrieval.serving.http_errors import HttpError

IMAGE_S = 5.0
"""Time limit for one image; 64 MP take 1 s on a slow core."""

WAIT_S = 30.0
"""Longest wait for a free process."""

IMAGES = 1_000
"""Images after which a process is replaced, so that what a library leaks stays small."""

IDLE_S = 300.0
"""A process without requests ends by itself."""


class _Child(JsonChild):
    def __init__(self) -> None:
        super().__init__(
            "-m",
            "embq.retrieval.ui.thumbnails.decoder_process",
            str(IDLE_S),
            stderr=subprocess.DEVNULL,  # what a library prints when it aborts is not for users
            MALLOC_ARENA_MAX="1",
            OMP_NUM_THREADS="1",
        )
        self.images = 0

    def _started(self) -> subprocess.Popen[bytes]:
        self.images = 0
        return super()._started()

    def thumbnail(self, data: bytes, side: int) -> dict[str, str]:
        """Return the answer to one request.

        Raises ChildEndedError, TimeoutError after killing a process that takes too long, and HttpError if none starts.
        """
        if self.images >= IMAGES:
            self.close()
        try:
            self.start()
        except TimeoutError as error:
            raise _overloaded(f"the process that makes thumbnails {error}") from error
        except OSError as error:
            raise _overloaded(f"the process that makes thumbnails cannot be started: {error.strerror}") from error
        self.send({"image": b64encode(data).decode(), "side": side})
        self.images += 1
        try:
            answer = self.answer(IMAGE_S)
        except ValueError as error:  # no JSON
            self.kill()
            raise ChildEndedError(0) from error
        if answer is None:
            self.kill()
            raise TimeoutError
        return answer


class Decoders:
    """Processes that make thumbnails. Thread-safe.

    Args:
        count: processes, which the first images start.
    """

    def __init__(self, count: int = 2) -> None:
        self._children = [_Child() for _ in range(count)]
        self._free: queue.LifoQueue[_Child] = queue.LifoQueue()  # the last one used is warm
        for child in self._children:
            self._free.put(child)

    @property
    def pids(self) -> list[int]:
        """Process ids of those that run."""
        return [child.pid for child in self._children if child.pid]

    def thumbnail(self, data: bytes, side: int) -> bytes:
        """A JPEG of an encoded image, see `decoder_process.thumbnail`.

        Raises SampleError for an image of which none can be made: the codes of `open_image`, and `killed` for one that
        ends its process or takes longer than `IMAGE_S`. HttpError if no process is free or can be started.
        """
        with self._child() as child:
            for is_last in (False, True):
                try:
                    answer = child.thumbnail(data, side)
                    break
                except TimeoutError as error:
                    raise SampleError("killed", f"the image takes longer than {IMAGE_S:g} s to decode") from error
                except ChildEndedError as error:
                    # It may have ended for want of requests, or been killed by somebody: a fresh one tells.
                    if is_last:
                        raise _ended(error) from error
        if "jpeg" not in answer:
            raise SampleError(str(answer.get("code", "")), str(answer.get("message", "")))
        return b64decode(answer["jpeg"])

    def try_decoding(self, data: bytes) -> None:
        """Decode an image and keep nothing of it; raises as `thumbnail`."""
        self.thumbnail(data, 1)

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.kill()

    @contextmanager
    def _child(self) -> Iterator[_Child]:
        try:
            child = self._free.get(timeout=WAIT_S)
        except queue.Empty as error:
            raise _overloaded("too many thumbnails are being made") from error
        try:
            yield child
        finally:
            self._free.put(child)


def _overloaded(why: str) -> HttpError:
    return HttpError(why, code="overloaded", next_step="ask again", status=503)


def _ended(error: ChildEndedError) -> SampleError | HttpError:
    if error.status > 0:
        return HttpError(
            f"the process that makes thumbnails ends with {ending(error.status)}",
            code="no_thumbnail",
            next_step="pip install 'embq[worker]' where the server runs: images are decoded with it",
            status=404,
        )
    return SampleError("killed", f"the image ended the process that decodes it ({ending(error.status)})")
