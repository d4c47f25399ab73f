"""The users of a broker that several people or machines reach, and what each may do: the least that its part needs.

A user is called after its role, or `role-NAME` (`worker-gpu2`), with the same rights. Rights are commands, each on some
keys, as the ACLs of Redis 7 and Valkey have them (https://redis.io/docs/latest/operate/oss_and_stack/management/security/acl/).
Each command that a script runs is checked as if its caller had sent it; the keys that a script is given need both
rights, whatever it does with them. So a script gives nobody a right, and anybody may run any.

`core.broker.permissions` says in words who may do what, and is tried out on the servers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from core.queue.keys import (
    INDEXING,
    RATES,
    RUNS,
    SERVICES,
    TURNS,
    UPLOADS,
    WORKERS,
    run_key,
    service_key,
    upload_key,
    worker_key,
)

_NAME = re.compile(r"([a-z]+)(-[A-Za-z0-9][A-Za-z0-9_.-]{0,60})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Commands that may be used on some keys.

    Attributes:
        commands: names as the server has them, subcommands as `xgroup|create`.
        keys: patterns.
        access: "R" to read the keys, "W" to write them, "RW" for both.
    """

    commands: str
    keys: Sequence[str]
    access: str

    def selector(self) -> str:
        """As users.acl has it."""
        return f"({' '.join([*_allowed(self.commands), *(f'%{self.access}~{key}' for key in self.keys)])})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What one kind of user may do.

    Attributes:
        purpose: who uses it.
        grants: commands on keys, besides those that each user has.
        keyless: commands that name no key, besides those that each user has.
        everything: whether no right is lacking.
    """

    purpose: str
    grants: tuple[Grant, ...] = ()
    keyless: str = ""
    everything: bool = False

    def rules(self) -> str:
        """As users.acl has them."""
        if self.everything:
            return "~* &* +@all"
        selectors = (grant.selector() for grant in self.grants)
        return " ".join([_ANYBODY, *_allowed(self.keyless), *selectors])


def _allowed(commands: str) -> list[str]:
    return [f"+{command}" for command in commands.split()]


_ANYBODY = " ".join(
    (
        # WAITAOF is among those of connections: Redis 7.0 does not know it, and refuses a file that names it.
        "resetchannels -@all +@connection -@admin -@dangerous",
        *_allowed("info time multi exec discard acl|whoami"),
    )
)
"""What every user may do without naming a key."""


def _of_runs(*parts: str) -> list[str]:
    return [run_key("*", part) for part in parts]


_RUNS = _of_runs("*")
_QUEUES, _JOBS = ["rq:queue:embq.*"], ["rq:job:*"]
_SERVICES = [SERVICES, service_key("*")]
_OF_WORKERS = [WORKERS, worker_key("*")]

_LOOK = (
    # No command that reads results: their number is enough.
    Grant(
        commands="get mget hget hmget hgetall hvals hlen zrange zcard xlen",
        keys=[*_RUNS, RUNS, *_OF_WORKERS, *_SERVICES, RATES, TURNS, INDEXING],
        access="R",
    ),
    Grant(commands="llen", keys=_QUEUES, access="R"),
    # What is under way, and not the pieces themselves.
    Grant(commands="hget hgetall hkeys hexists hlen", keys=[UPLOADS, upload_key("*", "state")], access="R"),
)

ROLES = {
    "laptop": Role(
        purpose="people: `enqueue`, `status`, `pause`, `resume`, `cancel`, `retry`",
        grants=(
            *_LOOK,
            Grant(commands="hset", keys=[RUNS], access="W"),
            Grant(commands="hset hexists", keys=[UPLOADS, upload_key("*", "pieces")], access="RW"),
            Grant(commands="unlink", keys=[upload_key("*", "pieces")], access="W"),
            Grant(commands="hset del", keys=[upload_key("*", "state")], access="W"),
            # What pausing and cancelling do: the script `control`, and the removal of hints that wait.
            Grant(commands="evalsha", keys=_RUNS, access="RW"),
            Grant(commands="hset", keys=_of_runs("meta", "asked"), access="W"),
            Grant(commands="hincrby", keys=_of_runs("att"), access="RW"),
            Grant(commands="del", keys=_of_runs("hinted", "due", "owner", "spare", "busy"), access="W"),
            Grant(commands="hexists", keys=_of_runs("busy"), access="R"),
            Grant(commands="lrange lrem", keys=_QUEUES, access="RW"),
            Grant(commands="del", keys=_JOBS, access="W"),
        ),
    ),
    "worker": Role(
        purpose="`embq worker` on any machine",
        grants=(
            *_LOOK,
            Grant(commands="evalsha", keys=[*_RUNS, *_OF_WORKERS, *_SERVICES, RATES, TURNS], access="RW"),
            # What the scripts from `claim` to `publish` and `abandon` do.
            Grant(commands="hexists zscore getbit", keys=_RUNS, access="R"),
            Grant(
                commands="hset hsetnx hdel hincrby",
                keys=_of_runs("meta", "owner", "spare", "busy", "att", "poison"),
                access="RW",
            ),
            # A result that is published stays: nobody but the writer changes it or takes it away.
            Grant(commands="hsetnx", keys=_of_runs("pub"), access="W"),
            Grant(commands="zadd zrem", keys=_of_runs("hinted", "due"), access="RW"),
            Grant(commands="xadd", keys=_of_runs("res"), access="W"),
            # What it says of itself, and what it measures.
            Grant(commands="zadd zrem", keys=[WORKERS, SERVICES], access="W"),
            Grant(commands="set del", keys=[worker_key("*"), service_key("*")], access="W"),
            Grant(commands="hset hdel hexists hrandfield", keys=[RATES], access="RW"),
            Grant(commands="set", keys=[TURNS], access="W"),
            # Hints are taken, put back and dropped; the data of one is never written.
            # `worker --check` looks at one that waits.
            Grant(commands="blmove lmove lrem lpush lrange", keys=_QUEUES, access="RW"),
            Grant(commands="hgetall del", keys=_JOBS, access="RW"),
            Grant(commands="exists hget hgetall hexists hset hdel expire del", keys=["rq:worker:*"], access="RW"),
            Grant(commands="sadd srem", keys=["rq:workers", "rq:workers:embq.*"], access="W"),
        ),
    ),
    "writer": Role(
        purpose="`embq producer`, `embq writer`, and `embq index --broker`",
        keyless="script|load script|exists",
        grants=(
            Grant(
                commands="exists get mget set del unlink expire evalsha "
                "hget hmget hgetall hlen hexists hkeys hvals hset hsetnx hdel hincrby "
                "zrange zrangebyscore zcard zscore zadd zrem setbit getbit bitcount bitpos "
                "xadd xlen xrange xack xdel xreadgroup xgroup|create xpending memory|usage",
                keys=["embq:*"],
                access="RW",
            ),
            Grant(commands="llen lrange lrem lpush rpush del", keys=_QUEUES, access="RW"),
            Grant(commands="hset expire del", keys=_JOBS, access="W"),
            Grant(commands="sadd srem", keys=["rq:queues"], access="W"),
        ),
    ),
    "admin": Role(purpose="who looks after the broker: `embq broker reload`, `embq gc`", everything=True),
    "monitor": Role(purpose="health checks and dashboards", grants=_LOOK),
}
"""Name -> rights, in the order in which messages and documents name them."""

LOADING = ("writer", "admin")
"""Who may load scripts into the server: without them nobody can do more than look."""


def role_of(user: str) -> str:
    """The role of a user by its name; "" where that is none of ours."""
    found = _NAME.fullmatch(user)
    return found[1] if found is not None and found[1] in ROLES else ""


def acl_line(user: str, digests: Sequence[str]) -> str:
    """The line of a user in users.acl.

    Args:
        user: a role or role-NAME.
        digests: SHA-256 of each password that is taken, 64 hex digits.
    """
    return " ".join(["user", user, "on", *(f"#{digest}" for digest in digests), ROLES[role_of(user)].rules()])
