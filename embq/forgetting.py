"""What a run has in the broker: whose results are on their way, and how the rest goes once it is finished."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import redis
from rq.utils import as_text

from core.queue.hints import HintJob, hint_queue
from core.queue.keys import RUN_PARTS, RUNS, run_key
from core.queue.registry import registered
from core.run.run_info import RunInfo


def live_tokens(client: redis.Redis, run: str) -> set[str]:
    """The tokens of leases and of results that wait for the writer, as they stand in names of staging files."""
    values = [value for part in ("owner", "spare", "pub") for value in client.hvals(run_key(run, part))]
    # A published result stands as its token and, behind a blank, its place in the stream.
    texts = (cast("bytes", value).decode(errors="replace") for value in values)
    return {text.partition(" ")[0].replace(":", "_") for text in texts}


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What a run had in the broker: keys of its ledger and its entry in the list of runs; and hints."""

    keys: int
    hints: int


def forget(client: redis.Redis, info: RunInfo, *, dry_run: bool) -> Forgotten:
    """Remove what a finished run left in the broker; workers and other runs stay as they are.

    The run is taken off the list first, so that no service takes it up again while its keys go.
    """
    queue = hint_queue(client, info.model.queue_key)
    lists = (queue.key, queue.intermediate_queue.key)
    keys = [run_key(info.run, part) for part in (*RUN_PARTS, "writer", "asked")]
    there = int(client.hexists(RUNS, info.run)) + int(client.exists(*keys))
    prefix = f"{info.run}-"
    hints = {as_text(raw) for key in lists for raw in client.lrange(key, 0, -1) if as_text(raw).startswith(prefix)}
    # A popped hint that its worker did not live to drop is in no list once RQ has cleaned up.
    jobs = client.scan_iter(match=HintJob.key_for(f"{prefix}*"), count=5000)
    hints |= {as_text(raw).removeprefix(HintJob.redis_job_namespace_prefix) for raw in jobs}
    if not dry_run:
        client.hdel(RUNS, info.run)
        with client.pipeline() as pipe:
            pipe.delete(*keys, *(HintJob.key_for(job_id) for job_id in hints))
            for job_id in hints:
                for key in lists:
                    pipe.lrem(key, 0, job_id)
            pipe.execute()
        if not client.llen(queue.key) and all(record.model != info.model for record in registered(client).values()):
            queue.delete(delete_jobs=False)  # or `rq info` would list it for ever
    return Forgotten(there, len(hints))
