"""What a service says while it waits for its broker, so that its log tells why nothing happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from core.service.log import Events

PATIENCE_S = 5.0
"""A broker that is restarted is back by then."""
AGAIN_S = 60.0
"""Between two words on the same absence."""


class Absence:
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


ABSENCE = Absence()
"""Of this process."""
