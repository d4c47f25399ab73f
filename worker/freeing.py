"""Gives the leases of dead workers back, and signs off for them, in a thread: the broker may be away, and the
supervisor must not wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import redis

from core.queue.index_builds import announced
from core.queue.ledger import Ledger
from core.queue.registry import registered, sign_off
from core.queue.scripts import load_scripts
from core.service.log import Events


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """What is known of a worker process that ended.

    Attributes:
        worker: its name.
        message: how it ended, for the account of a unit that is given up because of it.
        blame: token of each unit that it had in hand -> ordinal of the sample, where it was one.
    """

    worker: str
    message: str
    blame: Mapping[str, int | None]


class LeaseFreer(threading.Thread):
    """Frees the leases of workers that died, one after the other.

    Args:
        client: a patient client used by nobody else.

    Attributes:
        error: what the broker refused, which waiting does not mend.
    """

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(name="lease-freer", daemon=True)
        self.client = client
        self.log = Events("supervisor")
        self.error: Exception | None = None
        self._deaths: queue.SimpleQueue[Death | None] = queue.SimpleQueue()

    def submit(self, death: Death) -> None:
        """Free the leases of a worker as soon as the broker answers."""
        self._deaths.put(death)

    def run(self) -> None:
        """Work until `close`."""
        try:
            while (death := self._deaths.get()) is not None:
                scripts = load_scripts(self.client)
                freed = sum(
                    Ledger(self.client, run, scripts=scripts).abandon(death.worker, death.message, blame=death.blame)
                    for run in (*registered(self.client), *_stages(self.client))
                )
                sign_off(self.client, death.worker)
                self.log.info("leases_freed", worker=death.worker, units=freed)
        except Exception as error:  # noqa: BLE001 - thread boundary: the supervisor ends with it
            self.error = error

    def close(self, timeout_s: float) -> None:
        """Finish what was submitted; what the broker does not take in time lapses by itself."""
        self._deaths.put(None)
        self.join(timeout_s)


def _stages(client: redis.Redis) -> list[str]:
    """The runs that are stages of builds of an index."""
    return [stage.run for stage in announced(client)]
