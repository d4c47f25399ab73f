"""What nobody will use any more: files that no record names, and what a finished run left in the broker."""

from __future__ import annotations

from dataclasses import dataclass

import redis

from core.broker.client import connect, reach
from core.broker.embedded import EmbeddedServer, kept_off
from core.errors import BrokerError, ConfigError
from core.queue.keys import run_key
from core.run.commit_log import CommitLog
from core.run.layout import Layout
from core.run.run_info import load_run
from core.settings import Settings
from core.storage.paths import Place
from embq.forgetting import Forgotten, forget, live_tokens
from embq.litter import Found, find, remove
from embq.rights import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What was removed, or would be.

    Attributes:
        broker: what the run had in the broker; None where it stays there, or no broker was asked.
        notes: what a user should know, one sentence each.
    """

    run: str
    found: Found
    broker: Forgotten | None
    notes: tuple[str, ...]


def collect(root: Place, settings: Settings, *, asked: bool, older_than_s: float, dry_run: bool) -> Collected:
    """Remove the litter of an output folder and, once its run is finished, what the broker keeps of it.

    Safe while others work on the run.

    Args:
        settings: with the broker that may know the run.
        asked: the user named that broker, so it must answer.
    """
    layout = Layout(root)
    info = load_run(root)
    notes: list[str] = []
    with kept_off(layout.broker) as alone:
        client = _resident(settings, notes, asked=asked) if alone else _embedded(layout)
        state = CommitLog(layout).replay(info.units)

        def live() -> set[str] | None:
            if client is not None:
                return live_tokens(client, info.run)
            # The leases of `embq run` end with its server; of others nothing is known.
            return set() if alone and layout.broker.exists() else None

        found = find(layout, info, state, live=live, older_than_s=older_than_s)
        if not dry_run:
            remove(layout, found)
        if found.uploads:
            notes.append(f"{len(found.uploads):,} uploads that were begun and never completed are among what goes")
        if found.in_use and live() is None:
            notes.append("no broker was asked whose they are, so staged results stay until the run is finished")
        forgotten = None
        if client is not None and alone and state.closed:
            if client.exists(run_key(info.run, "writer")):
                notes.append("a writer holds the run, so the broker keeps it: stop that writer, and repeat this")
            else:
                forgotten = forget(client, info, dry_run=dry_run)
    return Collected(run=info.run, found=found, broker=forgotten, notes=tuple(notes))


def _embedded(layout: Layout) -> redis.Redis | None:
    """A client of the server of the `embq run` that is at work on the folder."""
    url = EmbeddedServer.find(layout.broker)
    return connect(url) if url else None


def _resident(settings: Settings, notes: list[str], *, asked: bool) -> redis.Redis | None:
    if not settings.broker_url:
        return None
    client = connect(settings.broker_url, password=settings.broker_password)
    try:
        reach(client, settings.broker_url)
        require(client, "gc")
    except (BrokerError, ConfigError) as error:
        if asked or (isinstance(error, ConfigError) and error.code != "role"):
            raise
        notes.append(error.message)
        return None
    return client
