"""Rights of users at a broker, on both servers; and what becomes of those who may not."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError

import embq.core.queue.scripts
from embq.app.cli.authorization import NEEDS, require
from embq.core.broker.client import connect, refusal
from embq.core.broker.users import PERMISSIONS, ROLES, refusals, role_of
from embq.core.errors import BrokerError, ConfigError, Exit
from embq.core.queue import hints
from embq.core.queue.hints import Hint, hint_queue
from embq.core.queue.keys import run_key
from embq.core.queue.ledger import Ledger, new_token
from embq.core.queue.lua import SCRIPTS
from embq.core.queue.lua.prelude import PRELUDE
from embq.core.queue.result_stream import PublishVerdict
from embq.core.queue.scripts import LOOK_S, Loader, load_scripts
from tests.e2e.session import called
from tests.support.outputs.run_case import FINGERPRINT, LEASE_S, unit_of
from tests.support.servers.guarded import SERVERS, GuardedServer, guarded_server
from tests.unit.test_docs import ROOT, table

RUN, KEY = "0123456789abcdef", "k"


@pytest.fixture(scope="module", params=SERVERS)
def guarded(request: pytest.FixtureRequest) -> Iterator[GuardedServer]:
    with guarded_server(request.param) as server:
        yield server


@pytest.fixture
def as_user(guarded: GuardedServer) -> Iterator[Callable[..., redis.Redis]]:
    """Clients by user; what the server refused in a test is no matter of the next one."""
    clients: list[redis.Redis] = []

    def log_in(user: str, **options: object) -> redis.Redis:
        clients.append(guarded.client(user, **options))
        return clients[-1]

    yield log_in
    for client in clients:
        client.close()
    guarded.refused()


@pytest.fixture
def ready(guarded: GuardedServer, as_user: Callable[..., redis.Redis]) -> Ledger:
    """A run of eight units whose queue was built by the writer, with all scripts loaded."""
    writer = as_user("writer")
    Loader(writer, load_scripts(writer)).load_missing()
    ledger = Ledger(writer, RUN)
    ledger.rebuild(gen="1-0", total=8, done=b"", counters={"fingerprint": FINGERPRINT})
    return ledger


# --- the table ---


@pytest.mark.parametrize("role", [*ROLES, "worker-gpu2"])
def test_each_role_may_do_what_it_is_to_do_and_nothing_else(
    role: str, guarded: GuardedServer, as_user: Callable[..., redis.Redis]
) -> None:
    refused = refusals(as_user(role), list(PERMISSIONS.values()))
    assert {one.what for one in refused} == {one.what for one in PERMISSIONS.values() if role_of(role) not in one.roles}
    with guarded.client("admin") as admin:
        assert admin.dbsize() == 0  # none of it was done


@pytest.mark.parametrize("role", [role for role in ROLES if role != "admin"])
def test_no_part_of_what_only_the_admin_may_do_is_open_to_others(
    role: str, as_user: Callable[..., redis.Redis]
) -> None:
    admin = as_user("admin")
    commands = [command for one in PERMISSIONS.values() if one.roles == {"admin"} for command in one.commands]
    assert len(commands) >= 20
    open_to_it = [command for command in commands if _allows(admin, role, command)]
    assert open_to_it == []
    assert all(_allows(admin, "admin", command) for command in commands)


def _allows(admin: redis.Redis, user: str, command: str) -> bool:
    said = admin.execute_command("ACL", "DRYRUN", user, *command.split())
    return bool(said in (b"OK", "OK"))


@pytest.mark.parametrize(
    ("role", "names"),
    [
        ("worker", "claim start beat publish release abandon report rate swap"),
        ("writer", "next commit reject recheck grow writer_lock report forget"),
    ],
)
def test_a_role_may_do_what_its_scripts_do_in_any_branch(role: str, names: str) -> None:
    """The tail of a run with idle workers ended the producer: HRANDFIELD in `next` was in no role."""
    allowed = {"time", *(word for grant in ROLES[role].grants for word in grant.commands.split())}
    texts = [SCRIPTS[name].removeprefix(PRELUDE if role == "worker" else "") for name in names.split()]
    called_there = {word.lower() for text in texts for word in re.findall(r"redis\.p?call\('([A-Z]+)'", text)}
    assert called_there - allowed == set()


def test_the_documents_have_this_table() -> None:
    told = table((ROOT / "docs" / "how-to" / "deploy" / "broker-users.md").read_text(encoding="utf-8"))
    ours = [[one.what, *("yes" if role in one.roles else "no" for role in ROLES)] for one in PERMISSIONS.values()]
    assert [row for row in told if row[1:2] in (["yes"], ["no"])] == ours
    assert [row for row in told if len(row) == 2] == [[f"`{name}`", role.purpose] for name, role in ROLES.items()]


def test_every_verb_that_needs_rights_has_a_role_that_has_them() -> None:
    for verb, names in NEEDS.items():
        assert [role for role in ROLES if all(role in PERMISSIONS[name].roles for name in names)], verb


# --- really tried ---


def test_a_worker_leases_and_publishes_and_cannot_commit(
    ready: Ledger, guarded: GuardedServer, as_user: Callable[..., redis.Redis]
) -> None:
    ledger = Ledger(as_user("worker-gpu2"), RUN)
    token = new_token("1-0", "w")
    assert ledger.claim(0, token, lease_s=LEASE_S, fingerprint=FINGERPRINT).granted
    assert ledger.start([(0, token)]) == set()
    assert ledger.publish(0, token, {"data": b"x"}, size=1) is PublishVerdict.ACCEPTED
    assert guarded.refused() == []
    (entry,) = ready.results.read(">", count=10, block_ms=None)
    with pytest.raises(NoPermissionError):
        ledger.commit([(entry.receipt, 0)], rows=1, failures=0, quarantined=0, number=1)
    with pytest.raises(NoPermissionError):
        ledger.commit([("", 1)], rows=1, failures=0, quarantined=0, number=1)
    with pytest.raises(NoPermissionError):
        ledger.reject(entry.receipt, 0, token, "bad", "bad")
    with pytest.raises(NoPermissionError):
        ledger.rebuild(gen="2-0", total=8, done=b"", counters={})
    assert ready.done_bits().strip(b"\0") == b""
    assert ready.results.unacknowledged() == 1
    assert ready.gen() == "1-0"


def test_a_laptop_cannot_hint_lease_publish_or_commit(ready: Ledger, as_user: Callable[..., redis.Redis]) -> None:
    client = as_user("laptop")
    ledger = Ledger(client, RUN)
    with pytest.raises(NoPermissionError):
        hints.push(hint_queue(client, KEY), [Hint(run=RUN, gen="1-0", u=0, unit=unit_of(0))], at_front=True)
    with pytest.raises(NoPermissionError):
        ledger.claim(0, new_token("1-0", "w"), lease_s=LEASE_S, fingerprint=FINGERPRINT)
    with pytest.raises(NoPermissionError):
        ledger.commit([("", 1)], rows=1, failures=0, quarantined=0, number=1)
    with pytest.raises(NoPermissionError):
        client.xadd(ready.keys[9], {"u": "0"})
    with pytest.raises(NoPermissionError):
        ledger.next_units("1-0", 8, queue_empty=True, reap_at=0)
    assert as_user("admin").llen(hint_queue(client, KEY).key) == 0
    assert ready.client.hlen(run_key(RUN, "owner")) == 0
    assert ready.done_bits().strip(b"\0") == b""
    assert ready.results.read(">", count=10, block_ms=None) == []


def test_a_worker_cannot_push_a_hint(ready: Ledger, as_user: Callable[..., redis.Redis]) -> None:
    client = as_user("worker")
    with pytest.raises(NoPermissionError):
        hints.push(hint_queue(client, KEY), [Hint(run=RUN, gen="1-0", u=0, unit=unit_of(0))], at_front=True)
    assert as_user("admin").keys("rq:job:*") == []


def test_a_laptop_pauses_and_cancels(
    ready: Ledger, guarded: GuardedServer, as_user: Callable[..., redis.Redis]
) -> None:
    worker = Ledger(as_user("worker"), RUN)
    token = new_token("1-0", "w")
    assert worker.claim(0, token, lease_s=LEASE_S, fingerprint=FINGERPRINT).granted
    assert worker.start([(0, token)]) == set()
    laptop = Ledger(as_user("laptop"), RUN)
    assert laptop.request({"state": "paused"})["state"] == "paused"
    assert laptop.request({"state": "cancelled", "priority": "7"}) == {"state": "cancelled", "priority": "7"}
    assert worker.beat("1-0", [(0, token)], lease_s=LEASE_S) == ("cancelled", {token})
    assert laptop.requested() == {"state": "cancelled", "priority": "7"}
    assert guarded.refused() == []


@pytest.mark.parametrize("user", ["laptop", "worker", "monitor", "writer"])
def test_nobody_but_the_admin_sends_lua(user: str, as_user: Callable[..., redis.Redis]) -> None:
    with pytest.raises(NoPermissionError):
        as_user(user).eval("return 1", 0)


def test_who_gives_no_name_is_not_let_in(guarded: GuardedServer) -> None:
    for url in (guarded.url("").replace("@", ""), guarded.url("default")):
        for password in ("", "x"):
            with connect(url, password=password) as nobody, pytest.raises(redis.AuthenticationError):
                nobody.ping()


def test_a_restart_keeps_what_scripts_and_transactions_have_written(
    ready: Ledger, guarded: GuardedServer, as_user: Callable[..., redis.Redis]
) -> None:
    ledger = Ledger(as_user("worker"), RUN)
    token = new_token("1-0", "w")
    assert ledger.claim(0, token, lease_s=LEASE_S, fingerprint=FINGERPRINT).granted
    ready.commit([("", 1)], rows=1, failures=0, quarantined=0, number=1)
    meta = ready.meta()
    guarded.stop()
    guarded.start()
    with guarded.client("monitor") as monitor:
        after = Ledger(monitor, RUN)
        assert after.meta() == meta
        assert after.client.hget(run_key(RUN, "owner"), "0") == token.encode()
        assert after.done_bits() == b"\x40"
    assert guarded.refused() == []


# --- scripts, where one may not send them ---


def test_who_may_not_load_scripts_waits_for_who_may(
    ready: Ledger, guarded: GuardedServer, as_user: Callable[..., redis.Redis]
) -> None:
    with guarded.client("admin") as admin:
        admin.script_flush()
    gen: list[tuple[str, set[str]]] = []
    patient = Ledger(as_user("worker", patient=True), RUN)
    waiting = threading.Thread(target=lambda: gen.append(patient.beat("1-0", [], lease_s=LEASE_S)))
    waiting.start()
    waiting.join(1.0)
    assert waiting.is_alive()
    writer = as_user("writer")
    assert Loader(writer, load_scripts(writer)).load_missing() == len(load_scripts(writer))
    waiting.join(20)
    assert gen == [("running", set())]
    assert guarded.refused() == []


def test_without_producer_and_writer_a_command_says_so(
    ready: Ledger, as_user: Callable[..., redis.Redis], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_user("admin").script_flush()
    monkeypatch.setattr(embq.core.queue.scripts, "WAIT_S", 0.3)
    with pytest.raises(BrokerError, match="the user laptop may not load them") as caught:
        Ledger(as_user("laptop"), RUN).request({"state": "paused"})
    assert "embq producer" in caught.value.next_step


def test_who_waits_for_scripts_stops_when_asked_to(ready: Ledger, as_user: Callable[..., redis.Redis]) -> None:
    as_user("admin").script_flush()
    stop = threading.Event()
    ledger = Ledger(as_user("worker", patient=True, give_up=stop.is_set), RUN)
    threading.Timer(0.5, stop.set).start()
    with pytest.raises(BrokerError, match="when the stop was asked for"):
        ledger.beat("1-0", [], lease_s=LEASE_S)


@pytest.mark.parametrize("user", ["writer", "admin"])
def test_who_may_load_scripts_needs_nobody(
    user: str, ready: Ledger, guarded: GuardedServer, as_user: Callable[..., redis.Redis]
) -> None:
    as_user("admin").script_flush()
    assert Ledger(as_user(user), RUN).beat("1-0", [], lease_s=LEASE_S) == ("running", set())
    assert guarded.refused() == []


def test_scripts_are_loaded_again_after_a_restart(guarded: GuardedServer, as_user: Callable[..., redis.Redis]) -> None:
    now = [0.0]
    writer = as_user("writer", patient=True)
    scripts = load_scripts(writer)
    loader = Loader(writer, scripts, clock=lambda: now[0])
    loader.load_missing()
    now[0] += LOOK_S
    assert loader.load_missing() == 0
    guarded.stop()
    guarded.start()
    assert loader.load_missing() == 0  # not asked again that soon
    now[0] += LOOK_S
    assert loader.load_missing() == len(scripts)


def test_on_a_server_of_others_that_allows_eval_alone_each_script_is_sent(
    guarded: GuardedServer, as_user: Callable[..., redis.Redis]
) -> None:
    admin = as_user("admin")
    admin.execute_command("ACL", "SETUSER", "someone", "on", ">x", "~*", "+@all", "-script")
    admin.script_flush()
    with connect(guarded.url("someone"), password="x") as client:
        scripts = load_scripts(client)
        assert Loader(client, scripts).load_missing() == 0
        assert Ledger(client, RUN, scripts=scripts).beat("1-0", [], lease_s=LEASE_S)[0] in ("gen", "running")
    admin.acl_deluser("someone")


# --- who may not ---


@pytest.mark.parametrize(
    ("verb", "user", "able"),
    [
        ("worker", "laptop", "worker"),
        ("worker", "writer", "admin"),
        ("producer", "worker", "writer"),
        ("writer", "laptop", "writer"),
        ("enqueue", "worker", "laptop"),
        ("enqueue --upload", "monitor", "laptop"),
        ("pause", "monitor", "laptop"),
        ("index", "laptop", "writer"),
    ],
)
def test_a_verb_is_refused_at_once_with_the_user_that_is_needed(
    verb: str, user: str, able: str, as_user: Callable[..., redis.Redis]
) -> None:
    client = as_user(user)
    with pytest.raises(ConfigError, match=rf"the broker's user {user} may not .*which `embq {verb}` needs") as caught:
        require(client, verb)
    assert caught.value.code == "role"
    if verb != "worker" or able == "worker":
        assert f"log in as {able}:" in caught.value.next_step


@pytest.mark.parametrize("verb", NEEDS)
def test_the_admin_may_use_every_verb(verb: str, as_user: Callable[..., redis.Redis]) -> None:
    require(as_user("admin"), verb)


@pytest.mark.parametrize(
    ("verb", "user"), [("worker", "laptop"), ("producer", "worker"), ("writer", "monitor"), ("worker", "writer")]
)
def test_a_service_of_another_user_ends_at_once(verb: str, user: str, guarded: GuardedServer) -> None:
    status, _, said = called(verb, environment=guarded.environment(user))
    assert status == Exit.CONFIG
    assert f"error[role]: the broker's user {user} may not" in said
    assert "next:  log in as" in said
    assert "Traceback" not in said


def test_a_wrong_password_names_the_user(guarded: GuardedServer, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("guess\n")
    environment = {**guarded.environment("worker"), "EMBQ_BROKER_PASSWORD_FILE": str(tmp_path / "password")}
    status, _, said = called("worker", environment=environment)
    assert status == Exit.CONFIG
    assert "'worker'" in said
    assert "EMBQ_BROKER_PASSWORD_FILE" in said
    assert "guess" not in said


def test_what_is_refused_in_mid_work_names_the_user(as_user: Callable[..., redis.Redis]) -> None:
    with pytest.raises(NoPermissionError) as caught:
        as_user("monitor").set("embq:worker:w", "x")
    told = refusal(caught.value)
    assert told.exit_code == Exit.CONFIG
    assert told.code == "role"
    assert "its user monitor" in told.message


def test_a_refusal_within_a_transaction_names_the_user_as_well(as_user: Callable[..., redis.Redis]) -> None:
    with as_user("monitor").pipeline() as pipe, pytest.raises(NoPermissionError) as caught:
        pipe.set("embq:worker:w", "x").execute()
    assert "its user monitor" in refusal(caught.value).message


def test_a_password_that_was_changed_ends_a_patient_client(
    guarded: GuardedServer, as_user: Callable[..., redis.Redis]
) -> None:
    patient = as_user("worker-gpu2", patient=True)
    patient.ping()
    admin = as_user("admin")
    admin.execute_command("ACL", "SETUSER", "worker-gpu2", "resetpass", ">other")
    admin.execute_command("CLIENT", "KILL", "USER", "worker-gpu2")
    with pytest.raises(redis.AuthenticationError) as caught:
        patient.ping()
    assert refusal(caught.value).exit_code == Exit.CONFIG
    admin.acl_load()


def test_a_broker_without_users_lets_everybody_do_everything(client: redis.Redis) -> None:
    for verb in NEEDS:
        require(client, verb)
