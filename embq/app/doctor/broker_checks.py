"""Checks of the broker: reachability, configuration, clock, memory and security."""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Iterator
from pathlib import Path

import redis

from embq.app.doctor.broker_security import security
from embq.app.doctor.check import Check, guarded
from embq.core.broker.client import ServerInfo, connect, mask, problems, reach
from embq.core.broker.embedded import EmbeddedServer, server_binary
from embq.core.errors import ConfigError
from embq.core.queue.reporting import CLOCK_NEXT, CLOCK_OFFSET_S, clock_ahead_s
from embq.core.service.progress_line import duration, size_text
from embq.core.settings import Settings

MEMORY_HIGH = 0.8
"""Share of the memory limit above which workers may soon have to wait."""


def broker(settings: Settings) -> Iterator[Check]:
    """The configured broker, or else the embedded server of `embq run`."""
    if settings.broker_url:
        yield from guarded("broker", lambda: _examine(settings.broker_url, settings.broker_password))
        return
    try:
        server_binary()
    except ConfigError as error:
        yield Check("broker", "warn", error.message, error.next_step)
        return
    with tempfile.TemporaryDirectory(prefix="embq-doctor-") as folder:
        yield from guarded("broker", lambda: _examine_embedded(Path(folder) / "b"))


def _examine_embedded(folder: Path) -> list[Check]:
    server = EmbeddedServer(folder, maxmemory_mb=64)
    try:
        url = server.start()
        with connect(url) as client:
            checks = _essentials(client, reach(client, url), url)
    finally:
        server.stop()
    where = "none is configured; the embedded server starts"
    return [Check(c.name, c.state, f"{where}: {c.detail}" if c.name == "broker" else c.detail, c.fix) for c in checks]


def _examine(url: str, password: str) -> list[Check]:
    with connect(url, password=password) as client:
        server = reach(client, url)
        return [*_essentials(client, server, url), _memory(client), *security(client, url)]


def _essentials(client: redis.Redis, server: ServerInfo, url: str) -> list[Check]:
    wrong = problems(client, server)
    checks = [Check("broker", "fail", what, mend) for what, mend in wrong]
    if not wrong:
        place = "" if url.startswith("unix:") else f" at {mask(url)}"
        checks.append(Check("broker", "ok", f"{server}{place}, up {server.uptime_s:,} s"))
    return [*checks, _queue(client), _clock(client)]


def _queue(client: redis.Redis) -> Check:
    """RQ's queue with embq's job class; only read."""
    from embq.core.queue.hints import hint_queue

    queue = hint_queue(client, "doctor")
    rq = importlib.metadata.version("rq")
    return Check("queue", "ok", f"RQ {rq} reads it, {queue.count} hints wait in a queue of no run")


def _clock(client: redis.Redis) -> Check:
    ahead_s = clock_ahead_s(client)
    if abs(ahead_s) > CLOCK_OFFSET_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        return Check("clock", "warn", f"this machine's is {duration(abs(ahead_s))} {side} the broker's", CLOCK_NEXT)
    return Check("clock", "ok", f"{ahead_s:+.3f} s from the broker's")


def _memory(client: redis.Redis) -> Check:
    info = client.info("memory")
    used, limit = int(info["used_memory"]), int(info.get("maxmemory", 0))
    bound = limit or int(info.get("total_system_memory", 0))
    whose = "its limit" if limit else "its machine, for it has no limit"
    detail = f"{size_text(used)} in use, of {size_text(bound)} of {whose}"
    if bound and used > MEMORY_HIGH * bound:
        fix = "raise maxmemory; results wait in it until the writer has taken them, so look whether one is at work"
        return Check("memory", "warn", detail, fix)
    return Check("memory", "ok", detail)
