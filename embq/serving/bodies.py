"""Bodies of requests and responses."""

from __future__ import annotations

import asyncio
import json

from starlette.requests import Request
from starlette.responses import Response

from embq.serving.http_errors import HttpError

MOST_BODY = 14 * 2**20
"""Bytes: an image of 10 MB in base64, and the JSON around it."""

BODY_S = 30.0
"""Time limit for a body to arrive; a slower one keeps others from being answered."""

SMALLER_IMAGE = "make the image smaller: models look at a few hundred pixels of it"


async def read_body(request: Request, most: int = MOST_BODY, next_step: str = SMALLER_IMAGE) -> bytes:
    """The bytes of a body. Raises HttpError `too_large` above `most` of them, `too_slow` after BODY_S."""
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                found += chunk
                if len(found) > most:
                    raise HttpError(
                        f"the body has more than {most:,} bytes",
                        code="too_large",
                        next_step=next_step,
                        status=413,
                    )
    except TimeoutError as error:
        raise HttpError(
            f"the body did not arrive within {BODY_S:g} s", code="too_slow", next_step="send it again", status=408
        ) from error
    return bytes(found)


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON in UTF-8, which no cache keeps."""
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(body, status, {"Cache-Control": "no-store", **(headers or {})}, media_type="application/json")
