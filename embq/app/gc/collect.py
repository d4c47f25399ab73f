"""Garbage collection of one run: orphaned files, and a finished run's keys in the broker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import redis
from rq.utils import as_text

from embq.app.cli.authorization import require
from embq.app.gc.orphans import Orphans, find_orphans, remove_orphans
from embq.core.broker.client import connect, reach
from embq.core.broker.embedded import EmbeddedServer, kept_off
from embq.core.errors import BrokerError, ConfigError
from embq.core.queue.hints import HintJob, hint_queue
from embq.core.queue.keys import ACTIVE, RUN_PARTS, RUNS, run_key
from embq.core.queue.runs import registered
from embq.core.run import checkpoint
from embq.core.run.layout import Layout
from embq.core.run.run_info import RunInfo, load_run
from embq.core.settings import Settings
from embq.core.storage.paths import Place


def live_tokens(client: redis.Redis, run: str) -> set[str]:
    """Tokens of leases and of results that wait for the writer, as in the names of staging files."""
    values = [value for part in ("owner", "spare", "pub") for value in client.hvals(run_key(run, part))]
    # A published result is its token, a blank, and its place in the stream.
    texts = (cast("bytes", value).decode(errors="replace") for value in values)
    return {text.partition(" ")[0].replace(":", "_") for text in texts}


@dataclass(frozen=True, slots=True)
class RemovedKeys:
    """Numbers of a run's keys in the broker, its entry in the list of runs included, and of its hints."""

    keys: int
    hints: int


def remove_run_keys(client: redis.Redis, info: RunInfo, *, dry_run: bool) -> RemovedKeys:
    """Delete a finished run's keys and hints in the broker.

    The list of runs comes first, so that no service takes the run up again while its keys are deleted.
    """
    queue = hint_queue(client, info.model.queue_key)
    lists = (queue.key, queue.intermediate_queue.key)
    keys = [run_key(info.run, part) for part in (*RUN_PARTS, "writer", "asked")]
    count = int(client.hexists(RUNS, info.run)) + int(client.exists(*keys))
    prefix = f"{info.run}-"
    hints = {as_text(raw) for key in lists for raw in client.lrange(key, 0, -1) if as_text(raw).startswith(prefix)}
    # A hint that was popped by a worker which died is in no list once RQ has cleaned up.
    jobs = client.scan_iter(match=HintJob.key_for(f"{prefix}*"), count=5000)
    hints |= {as_text(raw).removeprefix(HintJob.redis_job_namespace_prefix) for raw in jobs}
    if not dry_run:
        client.hdel(RUNS, info.run)
        client.srem(ACTIVE, info.run)
        with client.pipeline() as pipe:
            pipe.delete(*keys, *(HintJob.key_for(job_id) for job_id in hints))
            for job_id in hints:
                for key in lists:
                    pipe.lrem(key, 0, job_id)
            pipe.execute()
        if not client.llen(queue.key) and all(record.model != info.model for record in registered(client).values()):
            queue.delete(delete_jobs=False)  # or `rq info` would always list it
    return RemovedKeys(count, len(hints))


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Result of a collection, or of a dry run.

    Attributes:
        broker: deleted keys; None if they stay, or no broker answered.
        notes: for the user, one sentence each.
    """

    run: str
    orphans: Orphans
    broker: RemovedKeys | None
    notes: tuple[str, ...]


def collect(root: Place, settings: Settings, *, must_answer: bool, older_than_s: float, dry_run: bool) -> Collected:
    """Delete the orphaned files of an output folder and, for a finished run, its keys in the broker.

    Safe while services work on the run.

    Args:
        settings: with the broker that may know the run.
        must_answer: whether a broker that does not answer is an error, because the user named it.
    """
    layout = Layout(root)
    info = load_run(root)
    notes: list[str] = []
    with kept_off(layout.broker) as is_exclusive:
        # Another process on this folder is an `embq run`, perhaps with its embedded server.
        url = "" if is_exclusive else EmbeddedServer.find(layout.broker)
        client = _resident(settings, notes, must_answer=must_answer) if is_exclusive else connect(url) if url else None
        state = checkpoint.current(layout, info.units)

        def live() -> set[str] | None:
            if client is not None:
                return live_tokens(client, info.run)
            # Leases of an `embq run` end with its server; others are unknown.
            return set() if is_exclusive and layout.broker.exists() else None

        orphans = find_orphans(layout, info, state, live=live, older_than_s=older_than_s)
        if not dry_run:
            remove_orphans(layout, orphans)
        if orphans.uploads:
            notes.append(f"{len(orphans.uploads):,} uploads that were begun and never completed are among what goes")
        if orphans.in_use and live() is None:
            notes.append("no broker was asked whose they are, so staged results stay until the run is finished")
        removed = None
        if client is not None and is_exclusive and state.closed:
            if client.exists(run_key(info.run, "writer")):
                notes.append("a writer holds the run, so the broker keeps it: stop that writer, and repeat this")
            else:
                removed = remove_run_keys(client, info, dry_run=dry_run)
    return Collected(run=info.run, orphans=orphans, broker=removed, notes=tuple(notes))


def _resident(settings: Settings, notes: list[str], *, must_answer: bool) -> redis.Redis | None:
    if not settings.broker_url:
        return None
    client = connect(settings.broker_url, password=settings.broker_password)
    try:
        reach(client, settings.broker_url)
        require(client, "gc")
    except (BrokerError, ConfigError) as error:
        if must_answer or (isinstance(error, ConfigError) and error.code != "role"):
            raise
        notes.append(error.message)
        return None
    return client
