"""Errors of requests: the HTTP status of each, and the answer with code, message and next step: JSON, or a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from embq.core.errors import (
    BrokerError,
    DeviceError,
    DeviceFullError,
    EmbqError,
    InputError,
    MissingPackageError,
    ModelError,
    TryLaterError,
    UsageError,
)

STATUS_OF_CODE = {"count_changed": 409, "no_such_id": 404, "other_modality": 400, "too_long": 413, "too_many": 413}
"""Codes that decide the status before the class of the error does."""


class HttpError(InputError):
    """A request that is answered with an HTTP error.

    Args:
        status: 4xx if the client has to act, 503 if waiting helps.
        retry_after_s: for 503: when to try again.
        param: the field of the request that is at fault, for errors in OpenAI's form.
    """

    default_code = "bad_request"

    def __init__(
        self,
        message: str,
        *,
        next_step: str = "",
        code: str = "",
        status: int = 400,
        retry_after_s: int = 0,
        param: str | None = None,
    ) -> None:
        super().__init__(message, next_step=next_step, code=code)
        self.status = status
        self.retry_after_s = retry_after_s
        self.param = param


def status_of(error: EmbqError) -> int:
    """The HTTP status of an error: 400 for the query, 409 for the state of a run, 503 for the device or the model."""
    if isinstance(error, HttpError):
        return error.status
    if error.code in STATUS_OF_CODE:
        return STATUS_OF_CODE[error.code]
    if isinstance(error, DeviceError | DeviceFullError | ModelError | BrokerError | MissingPackageError):
        return 503
    if isinstance(error, TryLaterError):
        return 409
    return 400 if isinstance(error, InputError | UsageError) else 500


OPENAI, TEI = "/v1/", ("/embed", "/", "/info")
"""Beginning of OpenAI's paths, and text-embeddings-inference's paths: their errors have forms of their own."""


def response_of(error: EmbqError, path: str = "") -> tuple[dict[str, Any], int, dict[str, str]]:
    """Body, status and headers of the response to an error, in the form of the API to which the path belongs."""
    retry_after_s = error.retry_after_s if isinstance(error, HttpError) else 0
    status, headers = status_of(error), {"Retry-After": str(retry_after_s)} if retry_after_s else {}
    sentence = f"{error.message}; {error.next_step}" if error.next_step else error.message
    if path.startswith(OPENAI):
        kind = "invalid_request_error" if status < 500 else "server_error"
        param = error.param if isinstance(error, HttpError) else None
        return {"error": {"message": sentence, "type": kind, "param": param, "code": error.code}}, status, headers
    if path in TEI:
        kind = "Validation" if status < 500 else "Overloaded" if error.code == "overloaded" else "Backend"
        return {"error": sentence, "error_type": kind}, status, headers
    return {"code": error.code, "message": error.message, "next": error.next_step}, status, headers


ErrorPage = Callable[[Request, EmbqError, int, Mapping[str, str]], Response]
"""Makes the page of an error, with its status and headers; the state of an application has it as `error_page`."""


def error_response(request: Request, error: EmbqError, headers: Mapping[str, str] | None = None) -> Response:
    """The answer to an error: a page, or a part of one, for a browser that asks for it; JSON for all others."""
    body, status, extra_headers = response_of(error, request.url.path)
    page: ErrorPage | None = getattr(request.app.state, "error_page", None)
    accept = request.headers.get("accept", "")
    browser = "hx-request" in request.headers or ("text/html" in accept and "application/json" not in accept)
    if page is not None and browser:
        return page(request, error, status, {**(headers or {}), **extra_headers})
    return json_response(body, status, {**(headers or {}), **extra_headers})


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response of JSON, which nobody keeps."""
    body = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    return Response(body, status, {"Cache-Control": "no-store", **(headers or {})}, media_type="application/json")
