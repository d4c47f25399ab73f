"""Every Redis key of embq, with type, content and lifetime, and the rules between them. Nothing else names a key.

The scripts that keep the rules are in `embq.core.queue.lua`.

All of it can be rebuilt from the output folder. `{R}` is the run id; "run" means: as long as the server
keeps its data; a finished run leaves a few hundred bytes and its bitmap.

========================  ======  ====================================================  ==========================
key                       type    content                                               lifetime, bound
========================  ======  ====================================================  ==========================
embq:runs                 hash    run id -> run record (JSON)                           run
embq:active               set     ids of the runs that are not over, and of some that   run, until its writer
                                  have ended just now                                   has written the end
embq:workers              zset    worker name -> ms of its last report, for people      until found silent
embq:worker:<name>        string  last report of one worker (JSON)                      three leases
embq:services             zset    name of a producer, writer or supervisor -> ms of its until a producer or a
                                  last report                                           writer finds it silent
embq:service:<name>       string  last report of one of them (JSON)                     20 s
embq:rates                hash    model config and device -> measured speed (JSON)      256 fields
embq:speeds:<key>         string  the workers of a model by speed (JSON), summed up     3 s
                                  by a producer each 0.2 to 1 s
embq:turns                string  virtual times of the models that share workers (JSON) models with recent work
embq:indexing             hash    queue of an index build -> its stage in progress      30 s, renewed; then removed
                                  (JSON): index folder, stage, the stage's run id       with what it names
embq:uploads              hash    upload name -> record of the upload (JSON)            until it is in the folder
embq:up:{U}:pieces        hash    number -> compressed piece of an upload               64 pieces
embq:up:{U}:state         hash    taken, sent, why, end; the end also under the run's   a day after its end
                                  id in place of U
embq:{R}:meta             hash    gen, state, priority, total, cursor, done, bytes ...  run
                                  and the ms at which a worker found the disk full
embq:{R}:hinted           zset    u -> server ms of its last hint; 0 = hint at once     units waiting in RQ
embq:{R}:due              zset    u -> server ms when its lease, its delay or its       units leased, delayed or
                                  published result must be checked again                published
embq:{R}:owner            hash    u -> token of the lease                               leased units
embq:{R}:spare            hash    u -> token of a second lease, at the tail of a run    leased units
embq:{R}:busy             hash    token -> server ms since when its samples are read;   leases begun
                                  then, once its holder says so, ms of its expected end
                                  and its size in percent of a usual unit
embq:{R}:att              hash    u -> attempts charged so far                          units charged, not committed
embq:{R}:poison           hash    u -> ordinals of samples that ended their worker      units charged, not committed
embq:{R}:pub              hash    u -> "<token> <stream id>" of the published result    published units
embq:{R}:res              stream  results; group "w"                                    limit_bytes, limit_entries
embq:{R}:done             bitmap  committed units                                       run; N/8 bytes
embq:{R}:writer           string  id of the active writer: an early warning only        5 s, renewed
embq:{R}:asked            hash    state and priority that a user requested              until the writer has them
                                                                                        in the output folder
rq:queue:embq.<v>.<key>   list    RQ's own: hints                                       high-water mark
========================  ======  ====================================================  ==========================

A stage of an index build is a run of its own, with the keys of every run. It is in `embq:indexing` and not in
`embq:runs`, so producers and writers never see it; its conductor is both to it, and removes it at its end.

Every unit below the cursor is done, or in `hinted`, or in `due`. One rule repairs lost hints, lost leases and lost
results alike: what is overdue is hinted again (`next`). The writer makes what was published overdue where it meets a
stream without its group (`recheck`). Losing or doubling a hint is harmless, because only the holder
of a token may publish and the writer accepts a unit once.

At the tail of a run, when nothing is left to hint, an idle worker may take over a unit that its holder has not begun,
or get a second lease on one that it is expected to end sooner than its holder. The first to publish wins.

A token is "<gen>:<worker name>:<random>"; it is compared for equality only. `gen` changes whenever the queue is
rebuilt, so nothing from before a loss of the broker can publish after it. Times are the server's; no decision depends
on clients' clocks.

Where `meta` is lost, the queue is lost: every lease is void, and no script writes to `meta` until the writer has
rebuilt the queue.

Every script may be sent twice (after a lost reply): the second call changes nothing more, and `claim`, `start` and
`publish` repeat their answer.
"""

from __future__ import annotations

VERSION = 4
"""Version of keys, hints and results. It is in the name of the RQ queue, so that workers of two versions never see each
other's hints; records, queues and results of another version are not read."""

RUNS = "embq:runs"
ACTIVE = "embq:active"
WORKERS = "embq:workers"
SERVICES = "embq:services"
RATES = "embq:rates"
TURNS = "embq:turns"
INDEXING = "embq:indexing"
INDEXING_MS = 30_000
"""Time after which a build that was not renewed has lost its conductor."""

UPLOADS = "embq:uploads"
GROUP = "w"
CONSUMER = "w0"
HINT_FUNCTION = "embq.unit"
INDEX_HINT_FUNCTION = "embq.index"
"""The only job names that a worker accepts. They are never imported or called by name."""

HINT_MAX_BYTES = 64_000
MAX_ATTEMPTS = 3
"""The last attempt at a unit goes sample by sample. If it ends badly as well, the sample that was in hand becomes a
failure and the rest is tried again; where no sample can be named, the unit is quarantined."""


def worker_key(name: str) -> str:
    """Key of one worker's report."""
    return f"embq:worker:{name}"


def service_key(name: str) -> str:
    """Key of one service's report."""
    return f"embq:service:{name}"


def speeds_key(queue_key: str) -> str:
    """Key of the sum of the speeds of the workers that a queue of hints is for."""
    return f"embq:speeds:{queue_key}"


def upload_key(name: str, part: str) -> str:
    """Key of one part of an upload."""
    return f"embq:up:{{{name}}}:{part}"


def run_key(run: str, part: str) -> str:
    """Key of one part of a run's ledger."""
    return f"embq:{{{run}}}:{part}"


def queue_name(queue_key: str) -> str:
    """RQ queue of all runs that can share a loaded model."""
    return f"embq.{VERSION}.{queue_key}"


RUN_PARTS = ("meta", "hinted", "due", "owner", "spare", "busy", "att", "poison", "pub", "res", "done")
"""The keys that every script about a run gets, in this order. A rebuild replaces all of them."""
