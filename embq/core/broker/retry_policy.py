"""Retry policy of broker clients: how long a command is retried, and the warning in the log meanwhile."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.retry import Retry

from embq.core.errors import BrokerError
from embq.core.service.log import Events

PATIENCE_S = 5.0
"""No warning before: a broker that is restarted is back by then."""
AGAIN_S = 60.0
"""Time between two warnings."""


class WaitLog:
    """Rate-limited warning while the broker is unreachable, one for all connections of this process.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._warned_at = float("-inf")
        self._log = Events("broker")

    def failed(self, away_s: float, why: BaseException | None) -> None:
        """An attempt has failed, as all have for `away_s`."""
        now = self._clock()
        # A command that a person runs has no log; it reports the error when it gives up.
        if away_s < PATIENCE_S or now - self._warned_at < AGAIN_S or not logging.getLogger().hasHandlers():
            return
        self._warned_at = now
        lines = str(why).splitlines()
        self._log.warning(
            "broker_awaited",
            away_s=round(away_s),
            why=lines[0] if lines else type(why).__name__,
            next="it is tried again and again; `embq doctor` with the same environment says what is wrong",
        )


WAIT_LOG = WaitLog()
"""The one of this process."""


T = TypeVar("T")

WAIT_FOR_EVER = -1
FEW_TRIES = 5
"""Retries of a client with a limit: about two seconds."""

STOPPING_S = 3.0
"""Time for which a service that was asked to stop still retries; a broker that restarts is back by then."""

_NOTHING_LOST = "nothing that was committed is lost; what was in hand is done again once the broker is back"

_IN_SCRIPT = ("The user executing the script can't", "ACL failure in script")
"""Beginning of the error for a command that a script may not send, in Redis and in Valkey; it has no error code."""


_THREAD = threading.local()


@contextmanager
def not_retried(*errors: type[RedisError]) -> Iterator[None]:
    """Raise these errors of commands of this thread at once, also where the client is patient."""
    _THREAD.not_retried = errors
    try:
        yield
    finally:
        _THREAD.not_retried = ()


class NotAllowedError(NoPermissionError):
    """The broker refused a command to its user `user`."""

    def __init__(self, message: str, user: str) -> None:
        super().__init__(message)
        self.user = user


class Backoff(ExponentialWithJitterBackoff):
    """Pauses of at most a second between attempts; after a request to stop, attempts for a few seconds only.

    Args:
        give_up: whether a stop was requested.
        answer_s: time-out of one attempt.
    """

    def __init__(self, give_up: Callable[[], bool], answer_s: float) -> None:
        super().__init__(base=0.05, cap=1.0)
        self._give_up = give_up
        self._answer_s = answer_s
        self._away_since = self._failed = float("-inf")

    def __deepcopy__(self, memo: dict[int, Any]) -> Backoff:
        # redis-py copies it for every connection; `give_up` must stay the same object.
        return Backoff(self._give_up, self._answer_s)

    @property
    def given_up(self) -> bool:
        """True if a stop was requested."""
        return self._give_up()

    def compute(self, failures: int) -> float:
        """The pause before the next attempt; BrokerError if a stop was requested and the time for it is over."""
        now = time.monotonic()
        # `failures` counts from each new connection on, and a server that hangs accepts one again and again.
        if now - self._failed > self._answer_s + STOPPING_S:
            self._away_since = now
        self._failed = now
        # redis-py calls this in its except clause.
        WAIT_LOG.failed(now - self._away_since, sys.exception())
        if self._give_up() and now - self._away_since > STOPPING_S:
            raise BrokerError(
                "the broker was away when the stop was asked for",
                next_step=_NOTHING_LOST,
            )
        return super().compute(failures)


class BrokerRetry(Retry):
    """Retries errors that may be temporary, which a rejected password is not; a missing right is NotAllowedError.

    Attributes:
        backoff: the pauses, and their end.
        user: name of the broker's user, for errors.
    """

    def __init__(self, backoff: Backoff, retries: int, user: str) -> None:
        super().__init__(backoff, retries)
        self.backoff = backoff
        self.user = user

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[[Exception], Any] | Callable[[Exception, int], Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """See `redis.retry.Retry`."""

        def is_temporary(error: Exception) -> bool:
            raised = (AuthenticationError, *getattr(_THREAD, "not_retried", ()))
            return not isinstance(error, raised) and (is_retryable is None or is_retryable(error))

        try:
            return super().call_with_retry(do, fail, is_temporary, with_failure_count)
        except ResponseError as error:
            if isinstance(error, NoPermissionError) or str(error).startswith(_IN_SCRIPT):
                raise NotAllowedError(str(error), self.user) from error
            raise


def attempts(client: redis.Redis, seconds: float) -> Iterator[None]:
    """Yields before each attempt at something that another process is about to make possible.

    A patient client gets attempts until a stop is requested, which is a BrokerError; others get them for `seconds`.
    """
    tries = client.get_retry()
    ours = tries if isinstance(tries, BrokerRetry) else None
    patient = ours is not None and ours.get_retries() == WAIT_FOR_EVER
    end = time.monotonic() + (float("inf") if patient else seconds)
    pause_s = 0.05
    while True:
        yield
        if ours is not None and ours.backoff.given_up:
            raise BrokerError("the broker was not ready when the stop was asked for", next_step=_NOTHING_LOST)
        if time.monotonic() > end:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
