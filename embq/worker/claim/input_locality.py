"""Leaves units whose input is not on this machine to the machines that may have it.

Machines without shared storage may lack a file, such as an upload, which only the writer's machine has. A missing file
is a failure of its unit only if no other machine may have it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import redis

from embq.core.queue import keys
from embq.core.queue.heartbeats import live_workers, services
from embq.core.service.log import Events
from embq.core.units import Unit
from embq.sources.unit_reader import is_here

FIRST_REST_S, LONGEST_REST_S = 0.5, 15.0
"""Pause of a process after it has left a unit to others; doubled with each further one."""
ASIDE_S = 30.0
"""Time for which a run with such a unit is reported as unseen. Longer than the longest pause, so that other workers
learn of it, but limited: storage may be mounted later, and the other machines may leave."""

_log = Events("worker")


class InputLocality:
    """Knowledge of one worker process about the location of inputs. For one thread.

    Args:
        client: a patient client.
        host: name of this machine.
        roots: folders and URLs that inputs may lie in or below; empty allows all.
        run: the one run that is served, of which nothing is ever left to others; "" for all.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        host: str,
        roots: Sequence[str],
        run: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._host = host
        self._roots = roots
        self._run = run
        self._clock = clock
        self._local_places: set[tuple[str, str]] = set()
        self._aside: dict[str, tuple[float, str]] = {}
        self._rest_s = 0.0
        self._rests_until = float("-inf")

    def leaves(self, run: str, unit: Unit, model: str) -> bool:
        """Whether a unit is to be given back, because its input is not here and another machine may have it.

        One input of a folder that was here once stands for the others: what is missing of them is missing everywhere.
        """
        place = (run, os.path.dirname(unit.source))
        if self._run or place in self._local_places:
            return False
        if is_here(unit, self._roots):
            self._local_places.add(place)
            self._rest_s = 0.0
            return False
        hosts = self._other_hosts(run, model)
        if not hosts:
            return False
        now = self._clock()
        if run not in self._aside:
            _log.warning("inputs_not_here", run=run, source=unit.source, left_to=",".join(hosts))
        self._aside[run] = (now + ASIDE_S, unit.source)
        self._rest_s = min(LONGEST_REST_S, max(FIRST_REST_S, 2 * self._rest_s))
        self._rests_until = now + self._rest_s
        return True

    @property
    def rests(self) -> bool:
        """Whether nothing is to be taken for a moment, so that others come first."""
        return self._clock() < self._rests_until

    def is_aside(self, run: str) -> bool:
        """Whether units of a run were left to others of late."""
        return run in self._aside and self._clock() < self._aside[run][0]

    def unseen(self) -> dict[str, str]:
        """The runs of which units were left to others of late -> an input that is not here; for the worker's report."""
        return {run: source for run, (_, source) in list(self._aside.items()) if self.is_aside(run)}

    def _other_hosts(self, run: str, model: str) -> list[str]:
        """Machines with workers that may serve a run, and have not reported that its inputs are missing."""
        blind = {worker.get("host") for worker in live_workers(self._client) if run in worker.get("unseen", ())}
        hosts = {
            service.host
            for service in (report.service for report in services(self._client))
            if service.role == "worker"
            and service.state == "running"
            and service.protocol == keys.VERSION
            and service.run in ("", run)
            and model not in service.refused
            and any(device.state not in ("given_up", "over") for device in service.devices)
        }
        return sorted(hosts - blind - {self._host})
