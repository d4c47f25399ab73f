"""Users of a shared broker, with the least rights that each role needs, and the probe of the rights of a connection.

A user is named after its role, or `role-NAME` (`worker-gpu2`), with the same rights. Rights are commands, each on some
keys, as the ACLs of Redis 7 and Valkey have them (https://redis.io/docs/latest/operate/oss_and_stack/management/security/acl/).
Each command that a script runs is checked as if its caller had sent it; the keys that a script is given need read
and write rights, whatever it does with them. So no script extends a right, and every user may run all of them.

`PERMISSIONS` describes the same rights in words, for documents and tests; `refusals` asks a server for them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import NoPermissionError, ResponseError

from embq.core.queue.keys import (
    ACTIVE,
    GROUP,
    INDEXING,
    RATES,
    RUNS,
    SERVICES,
    TURNS,
    UPLOADS,
    WORKERS,
    run_key,
    service_key,
    speeds_key,
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
        """The form in users.acl."""
        return f"({' '.join([*_allowed(self.commands), *(f'%{self.access}~{key}' for key in self.keys)])})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Rights of one kind of user.

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
        """The form in users.acl."""
        if self.everything:
            return "~* &* +@all"
        selectors = (grant.selector() for grant in self.grants)
        return " ".join([_ANYBODY, *_allowed(self.keyless), *selectors])


def _allowed(commands: str) -> list[str]:
    return [command if command.startswith("-") else f"+{command}" for command in commands.split()]


_ANYBODY = " ".join(
    (
        # Not the whole of @connection: no limit counts the memory of a client's names and of the keys that it tracks.
        # AUTH, HELLO, QUIT and RESET need no right.
        "resetchannels -@all",
        *_allowed("ping select client|id info time multi exec discard acl|whoami"),
    )
)
"""Rights of every user, on no keys."""

_WAITAOF = "@connection -asking -client -command -echo -readonly -readwrite -wait client|id"
"""WAITAOF, by which `enqueue --inline` sees that the broker has all on disk. Redis 7.0 does not know it and refuses a
file that names it, so it is what is left of its category."""


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
        keys=[*_RUNS, RUNS, *_OF_WORKERS, *_SERVICES, RATES, TURNS, INDEXING, speeds_key("*")],
        access="R",
    ),
    Grant(commands="llen", keys=_QUEUES, access="R"),
    Grant(commands="smembers", keys=[ACTIVE], access="R"),
    # What is under way, and not the pieces themselves.
    Grant(commands="hget hgetall hkeys hexists hlen", keys=[UPLOADS, upload_key("*", "state")], access="R"),
)

ROLES = {
    "laptop": Role(
        purpose="people: `enqueue`, `status`, `pause`, `resume`, `cancel`, `retry`",
        keyless=_WAITAOF,
        grants=(
            *_LOOK,
            Grant(commands="hset", keys=[RUNS], access="W"),
            Grant(commands="sadd", keys=[ACTIVE], access="W"),
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
            Grant(commands="hexists zscore getbit hscan", keys=_RUNS, access="R"),
            Grant(
                commands="hset hsetnx hdel hincrby",
                keys=_of_runs("meta", "owner", "spare", "busy", "att", "poison"),
                access="RW",
            ),
            # A published result stays: only the writer changes or removes it.
            Grant(commands="hsetnx", keys=_of_runs("pub"), access="W"),
            Grant(commands="zadd zrem", keys=_of_runs("hinted", "due"), access="RW"),
            Grant(commands="xadd", keys=_of_runs("res"), access="W"),
            # Its reports and measurements.
            Grant(commands="zadd zrem", keys=[WORKERS, SERVICES], access="W"),
            Grant(commands="set del", keys=[worker_key("*"), service_key("*")], access="W"),
            Grant(commands="hset hdel hexists", keys=[RATES], access="RW"),
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
        keyless=f"{_WAITAOF} script|load script|exists client|no-evict",
        grants=(
            Grant(
                commands="exists get mget set del unlink expire evalsha "
                "hget hmget hgetall hlen hexists hkeys hvals hrandfield hset hsetnx hdel hincrby "
                "zrange zrangebyscore zcard zscore zadd zrem setbit getbit bitcount bitpos "
                "smembers sadd srem xadd xlen xrange xack xdel xreadgroup xgroup|create xpending memory|usage",
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
"""Roles that may load scripts into the server; without scripts all others can only read."""


def role_of(user: str) -> str:
    """The role of a user by its name; "" if that is none of ours."""
    match = _NAME.fullmatch(user)
    return match[1] if match is not None and match[1] in ROLES else ""


def acl_line(user: str, digests: Sequence[str]) -> str:
    """The line of a user in users.acl.

    Args:
        user: a role or role-NAME.
        digests: SHA-256 of each password that is taken, 64 hex digits.
    """
    return " ".join(["user", user, "on", *(f"#{digest}" for digest in digests), ROLES[role_of(user)].rules()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Permission:
    """An action that some roles may do and others may not.

    Attributes:
        what: completes "may": "lease units".
        commands: commands that it takes, on keys that do not exist.
        roles: roles that may do it.
    """

    what: str
    commands: tuple[str, ...]
    roles: frozenset[str]


def _may(what: str, roles: str, *commands: str) -> Permission:
    return Permission(what=what, commands=commands, roles=frozenset(roles.split()))


_ALL = "laptop worker writer admin monitor"
_RUN, _NONE = "none", "0" * 40
_META, _RES, _DONE = (run_key(_RUN, part) for part in ("meta", "res", "done"))
_QUEUE = "rq:queue:embq.none"

PERMISSIONS = {
    "look": _may(
        "see runs, workers and how far they are",
        _ALL,
        f"HGETALL {RUNS}",
        f"SMEMBERS {ACTIVE}",
        f"HGETALL {_META}",
        f"XLEN {_RES}",
        f"HKEYS {UPLOADS}",
    ),
    "hand_over": _may(
        "hand runs over (`enqueue`, `retry`, `resume`)", "laptop writer admin", f"HSET {RUNS} r x", f"SADD {ACTIVE} r"
    ),
    "send": _may(
        "send runs and inputs (`--upload`, `--inline`)",
        "laptop writer admin",
        f"HSET {UPLOADS} u x",
        f"HSET {upload_key(_RUN, 'pieces')} 0 x",
        "WAITAOF 0 0 0",
    ),
    "ask": _may(
        "pause, resume, cancel and weigh runs",
        "laptop writer admin",
        f"EVALSHA {_NONE} 1 {_META}",
        f"HSET {run_key(_RUN, 'asked')} state x",
        f"DEL {run_key(_RUN, 'hinted')}",
    ),
    "report": _may("say what a worker does", "worker writer admin", f"ZADD {WORKERS} 1 w", "SET embq:worker:w x"),
    "lease": _may(
        "take hints and lease units",
        "worker admin",
        f"BLMOVE {_QUEUE} {_QUEUE}:intermediate LEFT RIGHT 1",
        "HGETALL rq:job:j",
        "HSET rq:worker:w name x",
        f"HSET {run_key(_RUN, 'owner')} 0 t",
    ),
    "publish": _may(
        "publish results", "worker writer admin", f"XADD {_RES} * u 0", f"HSETNX {run_key(_RUN, 'pub')} 0 t"
    ),
    "hint": _may("push hints", "writer admin", "HSET rq:job:j data x", f"RPUSH {_QUEUE} j"),
    "read": _may(
        "read results and what was sent",
        "writer admin",
        f"XREADGROUP GROUP {GROUP} c STREAMS {_RES} >",
        f"XRANGE {_RES} - +",
        f"MEMORY USAGE {_RES}",
        f"HGET {upload_key(_RUN, 'pieces')} 0",
    ),
    "commit": _may("commit units (set done bits)", "writer admin", f"SETBIT {_DONE} 0 1"),
    "acknowledge": _may(
        "take results off their stream", "writer admin", f"XACK {_RES} {GROUP} 0-1", f"XDEL {_RES} 0-1"
    ),
    "rebuild": _may("build a queue anew", "writer admin", f"DEL {_META} {_DONE} {_RES}", f"SET {_DONE} x"),
    "conduct": _may("conduct the build of an index (`index --broker`)", "writer admin", f"HSET {INDEXING} q x"),
    "load": _may("load Lua scripts", "writer admin", "SCRIPT LOAD x", f"SCRIPT EXISTS {_NONE}"),
    "eval": _may("send Lua of their own", "admin", f"EVAL x 1 {_META}", f"EVAL_RO x 1 {_META}", "FUNCTION LIST"),
    "sweep": _may("remove what runs have left (`gc`)", "admin", "SCAN 0"),
    "forget": _may("`FLUSHALL`, `FLUSHDB`, `SCRIPT FLUSH`", "admin", "FLUSHALL", "FLUSHDB", "SCRIPT FLUSH"),
    "rule": _may(
        "`ACL SETUSER`, `CONFIG`, `MODULE`, `DEBUG`, `SHUTDOWN`, `REPLICAOF`, `CLIENT KILL`",
        "admin",
        "ACL SETUSER x on",
        "ACL LIST",
        "CONFIG GET dir",
        "MODULE LIST",
        "DEBUG SLEEP 0",
        "SHUTDOWN NOSAVE",
        "REPLICAOF NO ONE",
        "CLIENT KILL ID 0",
    ),
    "spy": _may(
        "`KEYS`, `MONITOR`, `CLIENT LIST`, `SUBSCRIBE`", "admin", "KEYS *", "MONITOR", "CLIENT LIST", "SUBSCRIBE c"
    ),
    "stray": _may("use keys that are not embq's", "admin", "GET other", "SET other x", "DEL other"),
}
"""Name -> permission, in the order of the data path."""


def refusals(client: redis.Redis, needed: Sequence[Permission]) -> list[Permission]:
    """The permissions that the broker refuses to this connection's user. No command is executed."""
    return [rule for rule in needed if not all(_is_allowed(client, command.split()) for command in rule.commands)]


def _is_allowed(client: redis.Redis, command: Sequence[str]) -> bool:
    pool = client.connection_pool
    connection: Any = pool.get_connection()
    try:
        # redis-py retries the commands of a client, not those of a connection. A broken one drops its transaction.
        answer = connection.retry.call_with_retry(lambda: _tried(connection, command), connection.disconnect)
    finally:
        pool.release(connection)
    return not isinstance(answer, NoPermissionError)


def _tried(connection: Any, command: Sequence[str]) -> object:
    """The answer to `command` in a transaction that is dropped; errors of the server are answers, too."""
    connection.send_packed_command(connection.pack_commands([("MULTI",), command, ("DISCARD",)]))
    connection.read_response()
    answer: object
    try:
        answer = connection.read_response()
    except ResponseError as error:
        answer = error  # all but NoPermissionError: this server does not know the command, or not in this form
    connection.read_response()
    return answer
