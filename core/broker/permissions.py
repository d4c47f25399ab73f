"""What the users of a broker may do and what not, in words: for documents, for tests, and for a service that starts.

They are tried without doing anything: the server checks the rights of a command when it is put into a transaction, and
the transaction is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.exceptions import NoPermissionError, ResponseError

from core.queue.keys import GROUP, INDEXING, RUNS, UPLOADS, WORKERS, run_key, upload_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Permission:
    """Something that some users do and others must not be able to.

    Attributes:
        what: after "may": "lease units".
        commands: that it takes, each as words; their keys are those of nothing that exists.
        roles: who may do it.
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
        f"HGETALL {_META}",
        f"XLEN {_RES}",
        f"HKEYS {UPLOADS}",
    ),
    "hand_over": _may("hand runs over (`enqueue`, `retry`, `resume`)", "laptop writer admin", f"HSET {RUNS} r x"),
    "send": _may(
        "send runs and inputs (`--upload`, `--inline`)",
        "laptop writer admin",
        f"HSET {UPLOADS} u x",
        f"HSET {upload_key(_RUN, 'pieces')} 0 x",
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

NEEDS: Mapping[str, tuple[str, ...]] = {
    "status": ("look",),
    "enqueue": ("look", "hand_over"),
    "enqueue --upload": ("look", "send"),
    "retry": ("look", "hand_over"),
    "pause": ("look", "ask"),
    "resume": ("look", "hand_over", "ask"),
    "cancel": ("look", "ask"),
    "gc": ("look", "sweep"),
    "worker": ("look", "lease", "publish", "report"),
    "producer": ("look", "hint"),
    "writer": ("look", "read", "commit", "acknowledge", "rebuild"),
    "run": ("hand_over", "ask", "hint", "lease", "publish", "read", "commit", "acknowledge", "rebuild"),
    "index": ("look", "conduct", "hint", "read", "commit", "acknowledge", "rebuild"),
}
"""Verb -> the permissions without which it cannot do its work. Loading scripts is not among them: on a server that has
users of others they may be sent instead."""


def refusals(client: redis.Redis, asked: Sequence[Permission]) -> list[Permission]:
    """Those that the broker does not give our user. Nothing is done, and no key is touched."""
    return [one for one in asked if not all(_is_allowed(client, command.split()) for command in one.commands)]


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
