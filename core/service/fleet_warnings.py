"""What a service tells of the others in its log, each thing once."""

from __future__ import annotations

from core.queue.service_registry import ForeignRun, Heard, Service, two_of_a_kind, whereabouts
from core.service.log import Events

CLOCK_OFFSET_S = 5.0
"""Clocks that differ by more are told of. Leases and ages are judged by the broker's alone, but logs are compared by
eye, and certificates are valid by the clock of each machine."""
CLOCK_NEXT = (
    "set both machines' clocks by NTP (chrony, systemd-timesyncd); leases and rows do not depend on it, "
    "certificates and times in logs do"
)
FOREIGN_NEXT = (
    "it is served by services of that version only; upgrade all machines, then run embq resume on its output folder"
)
TWO_NEXT = {
    "producer": "harmless, but of no use: stop one of them, or give each stack a broker of its own",
    "writer": "each run is written by one of them at a time; stop one, or give each stack a broker of its own, "
    "because a writer that does not see a run's folder cannot write it",
}
"""Role -> what it means that two services of it serve the same runs, and what to do."""


def versions_next(own: Service, other: Service) -> str:
    """What it means that two services have different versions, and what to do."""
    if own.protocol != other.protocol:
        return "they do not see each other's runs: upgrade all machines to one version"
    return "they work together; upgrade the older one when it is convenient"


class Notices:
    """Tells of each thing once: another version, a second service of the same kind, runs of another version, a clock.

    Args:
        log: of the service.
    """

    def __init__(self, log: Events) -> None:
        self._log = log
        self._told: set[tuple[str, ...]] = set()

    def clock(self, ahead_s: float) -> None:
        """The clock of this machine is ahead of the broker's by so much."""
        if abs(ahead_s) > CLOCK_OFFSET_S and self._first("clock"):
            self._log.warning("clock_differs", ahead_s=round(ahead_s, 1), next=CLOCK_NEXT)

    def others(self, own: Service, heard: list[Heard]) -> None:
        """These services are heard of, this one among them."""
        mine = next((one for one in heard if one.service.name == own.name), None)
        for other in [one.service for one in heard if mine is not None and one is not mine and one.is_beside(mine)]:
            same = (other.version, other.protocol) == (own.version, own.protocol)
            if not same and self._first("versions", other.role, other.host, other.speaks):
                self._log.warning(
                    "versions_differ",
                    other=f"{other.role} on {other.host}",
                    theirs=other.speaks,
                    ours=own.speaks,
                    next=versions_next(own, other),
                )
        for pair in two_of_a_kind(heard):
            hosts = whereabouts(pair)
            if own.name in [service.name for service in pair] and self._first("two", hosts):
                self._log.warning("two_of_a_kind", role=own.role, hosts=hosts, next=TWO_NEXT[own.role])

    def runs(self, foreign: list[ForeignRun]) -> None:
        """These runs are of another protocol version."""
        for run in foreign:
            if self._first("run", run.run):
                self._log.warning("run_of_another_version", run=run.run, protocol=run.protocol, next=FOREIGN_NEXT)

    def _first(self, *what: str) -> bool:
        new = what not in self._told
        self._told.add(what)
        return new
