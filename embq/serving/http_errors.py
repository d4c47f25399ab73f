"""Why a request gets no answer, as JSON: a stable code, what is wrong, what to do next."""

from __future__ import annotations

from core.errors import BrokerError, DeviceError, DeviceFullError, EmbqError, InputError, ModelError, UsageError


class Refusal(InputError):
    """A request that cannot be answered.

    Args:
        status: the HTTP status that says who has to act: 4xx who asks, 503 nobody but time.
        retry_after_s: for 503: when it may be otherwise.
    """

    default_code = "bad_request"

    def __init__(
        self, message: str, *, next_step: str = "", code: str = "", status: int = 400, retry_after_s: int = 0
    ) -> None:
        super().__init__(message, next_step=next_step, code=code)
        self.status = status
        self.retry_after_s = retry_after_s


def status_of(error: EmbqError) -> int:
    """The HTTP status of an error: 400 where the query is to blame, 503 where the device or the model is."""
    if isinstance(error, Refusal):
        return error.status
    if error.code == "other_modality":
        return 400
    if isinstance(error, DeviceError | DeviceFullError | ModelError | BrokerError):
        return 503
    return 400 if isinstance(error, InputError | UsageError) else 500


def told(error: EmbqError) -> dict[str, str]:
    """The body of the answer."""
    return {"code": error.code, "message": error.message, "next": error.next_step}
