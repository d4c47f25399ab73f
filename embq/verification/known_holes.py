"""Holes of servers that others on a network could use, by the releases that closed them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from core.broker.client import ServerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Hole:
    """One that matters to brokers.

    Attributes:
        name: its CVE number.
        what: what somebody could do.
        server: "Redis" or "Valkey".
        closed: (major, minor) -> first patch release of that line without it. Lines that are newer never had it, others
            have it for good.
        tls: whether only a server that speaks TLS has it.
    """

    name: str
    what: str
    server: str
    closed: Mapping[tuple[int, int], int]
    tls: bool = False

    def is_in(self, version: tuple[int, ...]) -> bool:
        """Whether a release has it, by its number: packagers may have closed it without another one."""
        line, patch = (version[0], version[1] if len(version) > 1 else 0), version[2] if len(version) > 2 else 0
        return patch < self.closed[line] if line in self.closed else line < max(self.closed)


HOLES = (
    Hole(
        name="CVE-2025-49844",
        what="a user who may run scripts takes the machine over",
        server="Redis",
        closed={(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    ),
    Hole(
        name="CVE-2026-81934",
        what="anybody who reaches the TLS port does, before a password is asked for",
        server="Redis",
        closed={(8, 2): 9, (8, 4): 6, (8, 6): 6, (8, 8): 2, (8, 10): 1},
        tls=True,
    ),
    Hole(
        name="CVE-2026-23479",
        what="a user who may wait for queues takes the machine over",
        server="Valkey",
        closed={(7, 2): 13, (8, 0): 9, (8, 1): 7, (9, 0): 4},
    ),
    Hole(
        name="CVE-2026-56684",
        what="a user who may close connections takes the machine over",
        server="Valkey",
        closed={(7, 2): 14, (8, 0): 10, (8, 1): 9, (9, 0): 5, (9, 1): 1},
        tls=True,
    ),
)
"""From the release notes of both: https://github.com/redis/redis/releases and https://github.com/valkey-io/valkey/releases."""


def holes(server: ServerInfo, *, tls: bool) -> list[Hole]:
    """The holes that a server has by its version."""
    return [
        hole for hole in HOLES if hole.server == server.name and (tls or not hole.tls) and hole.is_in(server.version)
    ]


def closing_release(found: list[Hole], version: tuple[int, ...]) -> str:
    """The oldest release that closes all of them: of the same line where there is one, else of the next."""
    lines = set.intersection(*(set(hole.closed) for hole in found))
    line = min((line for line in lines if line >= version[:2]), default=max(lines))
    return f"{line[0]}.{line[1]}.{max(hole.closed[line] for hole in found)}"
