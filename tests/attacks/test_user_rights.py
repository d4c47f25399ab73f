"""Every user tries every command of the server, as large as it may: memory stays bounded, and others go on writing.

The server has the users of `embq broker init` and the limits of deploy/valkey.conf, all of them 32 times as small.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import redis

from embq.app.doctor.broker_checks import broker
from embq.core.broker import embedded
from embq.core.broker.bounded import RESULT_BYTES
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.broker.users import ROLES, Grant
from embq.core.queue.keys import RUNS, WORKERS, run_key
from embq.core.settings import Settings
from tests.support.servers.guarded import SERVERS, GuardedServer, guarded_server
from tests.support.waiting import wait_until
from tests.unit.test_docs import ROOT

MB, SCALE = 1 << 20, 32
META = run_key("0123456789abcdef", "meta")
HOSTILE = [role for role in ROLES if role != "admin"]
LEAST_FIRST = ["monitor", *(pytest.param(user, marks=pytest.mark.slow) for user in HOSTILE if user != "monitor")]

ANYBODY = {"ping", "select", "client|id", "info", "time", "multi", "exec", "discard", "acl|whoami"}
ANYBODY |= {"auth", "hello", "quit", "reset"}  # which no server refuses
"""Commands that every user may send; they read and write no key."""


def limits() -> dict[str, str]:
    """The limits of clients in the shipped configuration, whose memory is that of the stack: 2 GB."""
    lines = (ROOT / "deploy" / "valkey.conf").read_text(encoding="utf-8").splitlines()
    named = (line.split(maxsplit=1) for line in lines if re.match(r"maxmemory-clients|client-", line))
    return dict(named)


def bytes_of(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([mg])b", text).groups()  # type: ignore[union-attr]
    return int(number) << {"m": 20, "g": 30}[unit]


def smaller(value: str) -> str:
    return re.sub(r"\d+[mg]b", lambda size: str(bytes_of(size[0]) // SCALE), value)


CLIENTS = bytes_of(limits()["maxmemory-clients"]) // SCALE
REPLY = bytes_of(limits()["client-output-buffer-limit"].split()[1]) // SCALE
MEMORY = 2048 * MB // SCALE


@pytest.fixture(scope="module", params=SERVERS)
def guarded(request: pytest.FixtureRequest) -> Iterator[GuardedServer]:
    with guarded_server(request.param) as server:
        with server.client("admin") as admin:
            admin.config_set("maxmemory", MEMORY)
            for name, value in limits().items():
                admin.config_set(name, smaller(value))
            if request.param == "valkey":
                admin.config_set("min-string-size-avoid-copy-reply", 2**31 - 1)
        yield server


def packed(*words: str | bytes) -> bytes:
    """A command as the server reads it."""
    sent = [word if isinstance(word, bytes) else word.encode() for word in words]
    return b"*%d\r\n" % len(sent) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in sent)


class Hostile:
    """A connection of a user that reads no answer after its login."""

    def __init__(self, server: GuardedServer, user: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect(server.url(user).partition("@")[2])
        password = server.password_file(user).read_text().strip()
        self.socket.sendall(packed("AUTH", user, password))
        assert self.socket.recv(100) == b"+OK\r\n"

    def send(self, data: bytes) -> None:
        """Send as much as the server takes."""
        self.socket.settimeout(5)
        with suppress(OSError):
            self.socket.sendall(data)


def commands(admin: redis.Redis) -> dict[str, int]:
    """Every command and subcommand -> its arity."""
    found: dict[str, int] = {}

    def add(entries: list[list[object]]) -> None:
        for entry in entries:
            name, arity, subcommands = entry[0], entry[1], entry[9] if len(entry) > 9 else []
            assert isinstance(name, bytes)
            assert isinstance(arity, int)
            if subcommands:
                add(subcommands)  # type: ignore[arg-type]
            else:
                found[name.decode().lower()] = arity

    connection = admin.connection_pool.get_connection()
    try:
        connection.send_command("COMMAND")
        add(connection.read_response())
    finally:
        admin.connection_pool.release(connection)
    return found


def writes(server: GuardedServer) -> None:
    """Honest users write, at once and a large value as well."""
    with server.client("writer") as writer, server.client("worker") as worker, server.client("laptop") as laptop:
        writer.hset(META, "state", "running")
        laptop.hset(RUNS, "r", "x")
        worker.zadd(WORKERS, {"w": 1})
        worker.xadd(run_key("0123456789abcdef", "res"), {"data": b"x" * (2 * MB)})
        writer.delete(run_key("0123456789abcdef", "res"))


def used(server: GuardedServer, name: str = "used_memory") -> int:
    with server.client("admin") as admin:
        return int(admin.info("memory")[name])


KINDS = "hslmzx"
"""Hash, string, list, set of members, sorted set, stream."""


def filled(admin: redis.Redis, pattern: str) -> list[str]:
    """Keys of a pattern, one for each kind of value; values of 1 MB, or many."""
    if "*" not in pattern:
        return [pattern]
    keys = [pattern.replace("*", kind) for kind in KINDS]
    admin.delete(*keys)
    hash_, string, list_, members, zset, stream = keys
    admin.hset(hash_, mapping={"f": b"x" * MB, **{str(number): "v" * 40 for number in range(1_000)}})
    admin.set(string, b"x" * MB)
    admin.rpush(list_, *[b"x" * 1_000] * 500)
    admin.sadd(members, *map(str, range(5_000)))
    admin.zadd(zset, {str(number): number for number in range(5_000)})
    admin.xadd(stream, {"data": b"x" * MB})
    return keys


def forms(name: str, arity: int, keys: list[str]) -> Iterator[bytes]:
    """Forms of a command with large arguments, on each key; most of them are errors, which are replies as well."""
    words = name.upper().split("|")
    for key in keys or [""]:
        given = [*words, key] if key else words
        missing = max(0, abs(arity) - len(given))
        for filler in ("f", "0", b"x" * 65_536):
            yield packed(*given, *[filler] * missing)
        if arity < 0:
            for extra in (0, 1):
                yield packed(*given, *[key if name in ("mget", "exists", "del", "unlink") else "f"] * (1_000 + extra))
            for options in (["0", "-1"], ["-inf", "+inf"], ["0", "COUNT", "1000000"], ["-", "+"]):
                yield packed(*given, *options)


# --- rights ---


@pytest.mark.parametrize("user", HOSTILE)
def test_a_user_may_send_what_its_role_lists_and_no_other_command_of_the_server(
    guarded: GuardedServer, user: str
) -> None:
    role = ROLES[user]
    keyless = {word for word in role.keyless.split() if not word.startswith("-")}
    keyless = {"waitaof" if word == "@connection" else word for word in keyless}
    listed = {word for grant in role.grants for word in grant.commands.split()} | keyless - ANYBODY
    with guarded.client("admin") as admin:
        known = commands(admin)
        assert len(known) > 300
        allowed = {name for name in known if _may_send(admin, user, name, known[name], role.grants)}
    assert allowed - ANYBODY == listed & known.keys()
    assert not {name for name in allowed if name in ("client|tracking", "client|caching", "hrandfield")} - (
        {"hrandfield"} if user == "writer" else set()
    )


def _may_send(admin: redis.Redis, user: str, name: str, arity: int, grants: tuple[Grant, ...]) -> bool:
    """Whether a user may send a command with any key that it has rights on."""
    keys = [pattern.replace("*", "r") for grant in grants for pattern in grant.keys if name in grant.commands.split()]
    for key in keys or ["k"]:
        # Where the keys are differs; with the same word everywhere, one of them is it.
        words = [*name.split("|"), *([key] if name.split("|")[0] != "evalsha" else ["0" * 40, "1", key])]
        if name == "xreadgroup":
            words = [name, "GROUP", "g", "c", "STREAMS", key, ">"]
        elif name == "memory|usage":
            words = ["memory", "usage", key]
        elif name in ("blmove", "lmove"):
            words = [name, key, key, "LEFT", "RIGHT"]
        words = words[:arity] if 0 < arity < len(words) else words + ["1"] * (abs(arity) - len(words))
        said = admin.execute_command("ACL", "DRYRUN", user, *words)
        if said in (b"OK", "OK"):
            return True
    return False


# --- attacks ---


@pytest.mark.parametrize("user", LEAST_FIRST)
def test_no_command_of_a_user_takes_the_memory_of_the_others(guarded: GuardedServer, user: str) -> None:
    """Each command over and over without reading, alone and in a transaction."""
    role = ROLES[user]
    with guarded.client("admin") as admin:
        known = commands(admin)
        named = {word: grant.keys[:1] for grant in reversed(role.grants) for word in grant.commands.split()}
        for name in sorted(known.keys() & (named.keys() | ANYBODY | set(role.keyless.split()))):
            admin.flushdb()
            keys = [key for pattern in named.get(name, ()) for key in filled(admin, pattern)]
            sent = b"".join(forms(name, known[name], keys))
            attackers = [Hostile(guarded, user) for _ in range(3)]
            attackers[0].send(sent * 4)
            attackers[1].send(packed("MULTI") + sent * 4 + packed("EXEC"))
            attackers[2].send(packed("MULTI") + sent)
            memory = admin.info("memory")
            assert memory["mem_clients_normal"] <= CLIENTS + MB, name
            assert memory["used_memory"] < MEMORY, name
            writes(guarded)
            for attacker in attackers:
                attacker.socket.close()


REPEATED = ["f"] * 20_000
"""176 kB of a command."""


def repeated_fields(user: str) -> list[bytes]:
    return [packed("HMGET", META, *REPEATED)]


def queued_commands(user: str) -> list[bytes]:
    return [packed("MULTI") + packed("TIME") * 300_000] * 8


def queued_arguments(user: str) -> list[bytes]:
    return [packed("MULTI") + packed("HGET", META, b"x" * 200_000) * 60] * 3


def many_replies(user: str) -> list[bytes]:
    return [packed("HMGET", META, *["f"] * 2)] * 60


def unfinished_commands(user: str) -> list[bytes]:
    return [b"*9\r\n" + b"$3000000\r\n%b\r\n" % (b"x" * 3_000_000) * 2] * 20


@pytest.mark.parametrize("user", LEAST_FIRST)
@pytest.mark.parametrize(
    "attack",
    [repeated_fields, queued_commands, queued_arguments, many_replies, unfinished_commands],
)
def test_clients_that_do_not_read_or_do_not_finish_are_disconnected(
    guarded: GuardedServer, user: str, attack: Callable[[str], list[bytes]]
) -> None:
    with ExitStack() as stack:
        admin = stack.enter_context(guarded.client("admin"))
        admin.hset(META, "f", b"x" * MB)
        before = used(guarded)
        attackers = [Hostile(guarded, user) for _ in attack(user)]
        for attacker in attackers:
            stack.callback(attacker.socket.close)
        for attacker, data in zip(attackers, attack(user), strict=True):
            attacker.send(data)
        writes(guarded)
        # Servers count two thirds of what a queued command takes.
        assert used(guarded) - before <= CLIENTS * 3 // 2 + 4 * MB
        listed = [client for client in admin.client_list() if client["user"] == user]
        assert len(listed) < len(attackers), "some of them are disconnected"
    wait_until(lambda: used(guarded) - before < 2 * MB, 10)


def test_the_writer_reads_while_others_leave_all_unread_that_they_may(guarded: GuardedServer) -> None:
    """The largest client is disconnected where all have too much together; the writer's reply is larger than theirs."""
    with ExitStack() as stack:
        admin = stack.enter_context(guarded.client("admin"))
        admin.hset(META, mapping={"f": b"x" * MB, **{f"d{part}": b"y" * MB for part in range(20)}})
        for _ in range(2 * CLIENTS // MB):
            attacker = Hostile(guarded, "monitor")
            stack.callback(attacker.socket.close)
            attacker.send(packed("HGET", META, "f"))
        writer = stack.enter_context(guarded.client("writer", answer_bytes=RESULT_BYTES))
        number = writer.client_id()
        assert sum(len(value) for value in writer.hmget(META, [f"d{part}" for part in range(20)])) == 20 * MB
        assert writer.client_id() == number, "it is still the same connection"


def test_results_of_the_largest_size_are_sent_and_read_with_the_shipped_limits() -> None:
    """By their numbers: an entry of 256 MB is sent and read at once, and the reply limit is above that of a command."""
    given = limits()
    clients, reply = bytes_of(given["maxmemory-clients"]), bytes_of(given["client-output-buffer-limit"].split()[1])
    assert 2 * RESULT_BYTES <= clients < reply
    assert bytes_of(given["client-query-buffer-limit"]) >= 16 * 16 * MB


@pytest.mark.parametrize("server", SERVERS)
def test_the_private_server_has_the_limits_that_it_knows(
    server: str, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if server == "redis":
        monkeypatch.setattr(embedded, "server_binary", lambda: Path("/usr/bin/redis-server"))
    with EmbeddedServer(short_tmp / "b") as private, connect(private.url) as client:
        assert client.config_get("maxmemory-clients") == {"maxmemory-clients": "50%"}
        assert client.config_get("client-output-buffer-limit")["client-output-buffer-limit"].startswith(
            f"normal {1280 * MB} {64 * MB} 60"
        )
        assert client.config_get("min-string-size-avoid-copy-reply") in (
            {},
            {"min-string-size-avoid-copy-reply": str(2**31 - 1)},
        )


def test_doctor_tells_whoever_may_see_the_settings_of_a_server_without_limits(guarded: GuardedServer) -> None:
    settings = Settings(
        broker_url=guarded.url("admin"), broker_password=guarded.password_file("admin").read_text().strip()
    )
    assert "clients" not in {check.name for check in broker(settings)}
    with guarded.client("admin") as admin:
        (limit,) = admin.config_get("maxmemory-clients").values()
        admin.config_set("maxmemory-clients", 0)
        found = {check.name: check for check in broker(settings)}["clients"]
        admin.config_set("maxmemory-clients", limit)
    assert found.state == "warn"
    assert "deploy/valkey.conf" in found.fix
