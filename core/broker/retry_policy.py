"""How long a client waits for a broker that is away, and for what somebody else is about to mend there."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError
from redis.retry import Retry

from core.errors import BrokerError
from core.service.log import Events

PATIENCE_S = 5.0
"""A broker that is restarted is back by then."""
AGAIN_S = 60.0
"""Between two words on the same absence."""


class WaitLog:
    """Tells of a broker that has been away for a while, once a minute for all connections of this process.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told = float("-inf")
        self._log = Events("broker")

    def lasts(self, away_s: float, why: BaseException | None) -> None:
        """A try has failed, and it has been so for `away_s`."""
        now = self._clock()
        # A command for people has no log, and says what is wrong when it gives up.
        if away_s < PATIENCE_S or now - self._told < AGAIN_S or not logging.getLogger().hasHandlers():
            return
        self._told = now
        said = str(why).splitlines()
        self._log.warning(
            "broker_awaited",
            away_s=round(away_s),
            why=said[0] if said else type(why).__name__,
            next="it is tried again and again; `embq doctor` with the same environment says what is wrong",
        )


WAIT_LOG = WaitLog()
"""Of this process."""


T = TypeVar("T")

WAIT_FOR_EVER = -1
FEW_TRIES = 5
"""As often does a client try again that does not wait for ever: about two seconds."""

STOPPING_S = 3.0
"""So long does a service that is to stop wait for a broker that is away; one that restarts is back by then."""

_NOTHING_LOST = "nothing that was committed is lost; what was in hand is done again once the broker is back"

_IN_SCRIPT = ("The user executing the script can't", "ACL failure in script")
"""So begins the refusal of a command that a script sends, in Redis and in Valkey; its error is of no kind."""


class NotAllowedError(NoPermissionError):
    """The broker does not let its user `user` send a command."""

    def __init__(self, message: str, user: str) -> None:
        super().__init__(message)
        self.user = user


class Backoff(ExponentialWithJitterBackoff):
    """Pauses of at most a second between tries; once a stop was asked for, tries for a few seconds only.

    Args:
        give_up: whether a stop was asked for.
        answer_s: how long one try may take.
    """

    def __init__(self, give_up: Callable[[], bool], answer_s: float) -> None:
        super().__init__(base=0.05, cap=1.0)
        self._give_up = give_up
        self._answer_s = answer_s
        self._away_since = self._failed = float("-inf")

    def __deepcopy__(self, memo: dict[int, Any]) -> Backoff:
        # redis-py copies it for every connection; what is asked must stay the one that was given.
        return Backoff(self._give_up, self._answer_s)

    @property
    def given_up(self) -> bool:
        """Whether a stop was asked for."""
        return self._give_up()

    def compute(self, failures: int) -> float:
        """The pause before the next try; BrokerError instead of it where nobody wants to wait any longer."""
        now = time.monotonic()
        # `failures` counts from each new connection on, which a server that stands still accepts again and again.
        if now - self._failed > self._answer_s + STOPPING_S:
            self._away_since = now
        self._failed = now
        # Called where redis-py has caught what the try came to.
        WAIT_LOG.lasts(now - self._away_since, sys.exception())
        if self._give_up() and now - self._away_since > STOPPING_S:
            raise BrokerError(
                "the broker was away when the stop was asked for",
                next_step=_NOTHING_LOST,
            )
        return super().compute(failures)


class BrokerRetry(Retry):
    """Tries again what time may mend; a password that the broker does not take is not among that.

    Attributes:
        patience: the pauses, and what ends them.
        user: whom a refusal names.
    """

    def __init__(self, patience: Backoff, retries: int, user: str) -> None:
        super().__init__(patience, retries)
        self.patience = patience
        self.user = user

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[[Exception], Any] | Callable[[Exception, int], Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """As redis-py does it."""

        def may_mend(error: Exception) -> bool:
            return not isinstance(error, AuthenticationError) and (is_retryable is None or is_retryable(error))

        try:
            return super().call_with_retry(do, fail, may_mend, with_failure_count)
        except ResponseError as error:
            if isinstance(error, NoPermissionError) or str(error).startswith(_IN_SCRIPT):
                raise NotAllowedError(str(error), self.user) from error
            raise


def attempts(client: redis.Redis, seconds: float) -> Iterator[None]:
    """Gives a turn, and then one after each pause, to try what somebody else is about to mend.

    A patient client gets turns until a stop is asked for, and then raises BrokerError; another one gets them for so
    many seconds.
    """
    tries = client.get_retry()
    ours = tries if isinstance(tries, BrokerRetry) else None
    patient = ours is not None and ours.get_retries() == WAIT_FOR_EVER
    end = time.monotonic() + (float("inf") if patient else seconds)
    pause_s = 0.05
    while True:
        yield
        if ours is not None and ours.patience.given_up:
            raise BrokerError("the broker was not ready when the stop was asked for", next_step=_NOTHING_LOST)
        if time.monotonic() > end:
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1.0)
