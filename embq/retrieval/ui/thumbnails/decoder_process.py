"""Child side of the decoder: makes thumbnails of encoded images, each under limits of memory and processor time.

A request is {"image": base64, "side": pixels}, its answer {"jpeg": base64} or {"code": ..., "message": ...}.
"""

from __future__ import annotations

import io
import json
import os
import resource
import select
import signal
import sys
from base64 import b64decode, b64encode
from contextlib import suppress
from typing import Any

from PIL import Image, ImageOps

from embq.core.errors import SampleError
from embq.core.process.children import STARTED, die_with_parent
from embq.core.process.limits import limit_memory
from embq.worker.embedders.image import headers
from embq.worker.embedders.image.decoding import open_image, quiet_pillow

MEMORY_BYTES = 1 << 30
"""For one image: 64 MP of a progressive JPEG take 384 MB of coefficients, 32 MP of RGBA 128 MB for each copy."""

CPU_S = 10
"""Processor time of one image; the parent waits for less."""

QUALITY = 80


def thumbnail(data: bytes, side: int) -> bytes:
    """A JPEG of the first frame, upright, on white if it is transparent, with at most `side` pixels on a side.

    Nothing but pixels is taken over: no EXIF, no profile, no comment. Raises SampleError as `open_image` does.
    """
    image = open_image(data, least=2 * side)
    try:
        small = _simple(image)
        small.thumbnail((side, side), Image.Resampling.LANCZOS, reducing_gap=2.0)
        with suppress(*headers.DECODER_ERRORS):  # damaged EXIF: as it lies
            ImageOps.exif_transpose(small, in_place=True)
        shown = Image.new("RGB", small.size, "white")
        shown.paste(small.convert("RGB"), mask=small.getchannel("A") if small.mode == "RGBA" else None)
        out = io.BytesIO()
        shown.save(out, "JPEG", quality=QUALITY)
    except MemoryError as error:
        raise SampleError("too_large", "there is not enough memory for a thumbnail of the image") from error
    except headers.DECODER_ERRORS as error:
        raise SampleError("unsupported_mode", f"mode {image.mode}: {error}") from error
    return out.getvalue()


def _simple(image: Image.Image) -> Image.Image:
    """The image in a mode that can be resized, with its transparency if it has any."""
    if "transparency" in image.info or image.mode in ("LA", "PA", "La", "RGBa"):
        return image.convert("RGBA")
    if image.mode.startswith("I"):  # 16 bits
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    return image if image.mode in ("RGB", "RGBA", "L", "CMYK") else image.convert("RGB")


def _answer(request: dict[str, Any]) -> bytes:
    limit_memory(MEMORY_BYTES, CPU_S)
    try:
        answer = {"jpeg": b64encode(thumbnail(b64decode(request["image"]), request["side"])).decode()}
    except SampleError as error:
        answer = {"code": error.code, "message": error.message}
    return json.dumps(answer).encode() + b"\n"


def serve(idle_s: float) -> None:
    """Answer requests on stdin, one line each, until there are none for `idle_s` seconds."""
    die_with_parent()
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (0, 0))
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the group: the parent ends this process by its pipe
        signal.signal(number, signal.SIG_IGN)
    quiet_pillow()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    while select.select([sys.stdin], [], [], idle_s)[0] and (line := sys.stdin.buffer.readline()):
        request = json.loads(line)
        try:
            answers.write(STARTED if "start" in request else _answer(request))
            answers.flush()
        except BrokenPipeError:  # the parent is gone
            return


if __name__ == "__main__":
    serve(float(sys.argv[1]))
