"""Errors of requests: the HTTP status of each, and the JSON body with code, message and next step."""

from __future__ import annotations

from core.errors import (
    BrokerError,
    DeviceError,
    DeviceFullError,
    EmbqError,
    InputError,
    ModelError,
    TryLaterError,
    UsageError,
)

STATUS_OF_CODE = {"count_changed": 409, "no_such_id": 404, "other_modality": 400, "too_long": 413, "too_many": 413}
"""Codes that decide the status before the class of the error does."""


class HttpError(InputError):
    """A request that is answered with an HTTP error.

    Args:
        status: 4xx where the client has to act, 503 where waiting helps.
        retry_after_s: for 503: when to try again.
    """

    default_code = "bad_request"

    def __init__(
        self, message: str, *, next_step: str = "", code: str = "", status: int = 400, retry_after_s: int = 0
    ) -> None:
        super().__init__(message, next_step=next_step, code=code)
        self.status = status
        self.retry_after_s = retry_after_s


def status_of(error: EmbqError) -> int:
    """The HTTP status of an error: 400 for the query, 409 for the state of a run, 503 for the device or the model."""
    if isinstance(error, HttpError):
        return error.status
    if error.code in STATUS_OF_CODE:
        return STATUS_OF_CODE[error.code]
    if isinstance(error, DeviceError | DeviceFullError | ModelError | BrokerError):
        return 503
    if isinstance(error, TryLaterError):
        return 409
    return 400 if isinstance(error, InputError | UsageError) else 500


def response_of(error: EmbqError) -> tuple[dict[str, str], int, dict[str, str]]:
    """Body, status and headers of the response to an error."""
    retry_after_s = error.retry_after_s if isinstance(error, HttpError) else 0
    body = {"code": error.code, "message": error.message, "next": error.next_step}
    return body, status_of(error), {"Retry-After": str(retry_after_s)} if retry_after_s else {}
