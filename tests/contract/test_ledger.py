"""The ledger: every script with each of its answers, on a real server, and a machine that mixes them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from embq.core.broker.client import connect, now_ms
from embq.core.broker.embedded import EmbeddedServer
from embq.core.queue.heartbeats import WORKER_REPORTS, live_workers
from embq.core.queue.keys import GROUP, MAX_ATTEMPTS, RUN_PARTS, VERSION, WORKERS, worker_key
from embq.core.queue.ledger import BULK_BYTES, Ledger, new_token
from embq.core.queue.lua import FREEING, SCRIPTS
from embq.core.queue.result_stream import LIMIT_BYTES, Entry, PublishVerdict
from embq.core.queue.scripts import load_scripts
from embq.core.run.commit_log import LogState
from embq.core.run.commits import Commit, CommittedUnit
from tests.faults.kit.proxy import Proxy
from tests.support.outputs.run_case import FINGERPRINT, LEASE_S, MakeRun, RunCase, make_case


@pytest.fixture
def run(make_run: MakeRun) -> RunCase:
    """A run of 8 units with an empty queue of generation 1-0."""
    run = make_run(8)
    run.build()
    return run


def scores(run: RunCase, part: str) -> dict[int, float]:
    return {int(u): score for u, score in run.client.zrange(run.key(part), 0, -1, withscores=True)}


def table(run: RunCase, part: str) -> dict[int, str]:
    return {int(u): value.decode() for u, value in run.client.hgetall(run.key(part)).items()}


def begun(run: RunCase) -> set[str]:
    """The tokens whose units are being read."""
    return {token.decode() for token in run.client.hkeys(run.key("busy"))}


def state(run: RunCase) -> dict[str, object]:
    """Everything that the server keeps for the run, times rounded away."""
    meta = {name: value for name, value in run.ledger.meta().items() if not name.endswith("_ms")}
    return {
        "meta": meta,
        **{part: sorted(scores(run, part)) for part in ("hinted", "due")},
        **{part: table(run, part) for part in ("owner", "spare", "att", "poison", "pub")},
        "busy": begun(run),
        "res": run.client.xrange(run.key("res")),
        "done": run.client.get(run.key("done")),
    }


def entries(run: RunCase) -> list[Entry]:
    return run.ledger.results.read(">", count=100, block_ms=None)


def commit(run: RunCase, *pairs: tuple[str, int | None]) -> int:
    return run.ledger.commit(pairs, rows=1, failures=2, quarantined=3, number=4)


def feed(
    run: RunCase,
    room: int = 100,
    *,
    queue_empty: bool = False,
    reap: bool = False,
    idle: int = 0,
    unit_s: float = 0.0,
) -> tuple[list[int], list[int]]:
    reap_at = now_ms(run.client) if reap else 0
    return run.ledger.next_units(run.gen, room, queue_empty=queue_empty, reap_at=reap_at, idle=idle, unit_s=unit_s)


def overdue(run: RunCase, u: int) -> None:
    """The time at which unit `u` must be looked at has come."""
    assert run.client.zadd(run.key("due"), {str(u): 1}, xx=True, ch=True) == 1


def claim(
    run: RunCase, u: int, token: str, fingerprint: str = FINGERPRINT, *, idle: bool = False, unit_s: float = 0.0
) -> str:
    return run.ledger.claim(u, token, lease_s=LEASE_S, fingerprint=fingerprint, idle=idle, unit_s=unit_s).word


def crash(run: RunCase, u: int) -> None:
    """An attempt that begins and ends badly."""
    run.claim(u, "dies")
    assert run.die("dies") == 1


# --- claim ---


def test_a_claim_gives_the_lease_once_and_repeats_its_answer(run: RunCase) -> None:
    feed(run)
    token = new_token(run.gen, "a")
    assert claim(run, 0, token) == "ok"
    before = state(run)
    assert claim(run, 0, token) == "ok"
    assert state(run) == before
    assert claim(run, 0, new_token(run.gen, "a")) == "leased"
    assert table(run, "owner") == {0: token}
    assert 0 in scores(run, "due")
    assert 0 not in scores(run, "hinted")


def test_a_claim_tells_how_many_attempts_ended_badly(run: RunCase) -> None:
    crash(run, 0)
    answer = run.ledger.claim(0, new_token(run.gen, "a"), lease_s=LEASE_S, fingerprint=FINGERPRINT)
    assert (answer.granted, answer.attempts) == (True, 1)


@pytest.mark.parametrize("word", ["paused", "done", "archived"])
def test_a_claim_is_refused_unless_the_run_is_running(run: RunCase, word: str) -> None:
    run.client.hset(run.key("meta"), "state", word)
    answer = run.ledger.claim(0, new_token(run.gen, "a"), lease_s=LEASE_S, fingerprint=FINGERPRINT)
    assert (answer.word, answer.detail) == ("state", word)


def test_the_first_claim_fixes_the_fingerprint_and_another_is_told_it(run: RunCase) -> None:
    run.claim(0)
    feed(run)
    answer = run.ledger.claim(1, new_token(run.gen, "b"), lease_s=LEASE_S, fingerprint="other")
    assert (answer.word, answer.detail) == ("fingerprint", FINGERPRINT)
    assert scores(run, "hinted")[1] == 0, "the hint was used up, so the unit is hinted again at once"
    assert run.ledger.meta()["fingerprint"] == FINGERPRINT


@pytest.mark.parametrize("published", [True, False], ids=["published", "committed"])
def test_a_claim_of_a_unit_that_has_its_result_is_a_duplicate(run: RunCase, published: bool) -> None:
    run.work_one(0)
    if not published:
        commit(run, (entries(run)[0].receipt, 0))
    assert claim(run, 0, new_token(run.gen, "b")) == "dup"


def test_a_claim_of_a_delayed_unit_comes_too_early(run: RunCase) -> None:
    crash(run, 0)
    crash(run, 0)
    assert claim(run, 0, new_token(run.gen, "b")) == "later"
    overdue(run, 0)
    assert claim(run, 0, new_token(run.gen, "b")) == "ok"


# --- start ---


def test_a_start_charges_one_attempt_however_often_it_is_sent(run: RunCase) -> None:
    token = run.claim(0, started=False)
    for _ in range(2):
        assert run.ledger.start([(0, token), (1, "1-0:a:lost")]) == {"1-0:a:lost"}
        assert table(run, "att") == {0: "1"}
    assert begun(run) == {token}


def test_starting_nothing_is_nothing(run: RunCase) -> None:
    assert run.ledger.start([]) == set()


# --- beat ---


def test_a_beat_extends_only_leases_that_are_held(run: RunCase) -> None:
    token = run.claim(0)
    overdue(run, 0)
    for _ in range(2):
        assert run.ledger.beat(run.gen, [(0, token), (1, "1-0:a:x")], lease_s=LEASE_S) == ("running", {"1-0:a:x"})
    assert scores(run, "due")[0] > 1
    assert 1 not in scores(run, "due")


def test_a_beat_tells_the_state_of_the_run(run: RunCase) -> None:
    run.client.hset(run.key("meta"), "state", "paused")
    assert run.ledger.beat(run.gen, [], lease_s=LEASE_S) == ("paused", set())


# --- publish ---


def test_a_result_is_taken_once_and_the_answer_is_repeated(run: RunCase) -> None:
    token = run.claim(0)
    assert run.publish(0, token) is PublishVerdict.ACCEPTED
    before = state(run)
    assert run.publish(0, token) is PublishVerdict.ACCEPTED
    assert state(run) == before
    (entry,) = entries(run)
    assert (entry.fields["u"], entry.fields["token"], entry.fields["bytes"]) == (b"0", token.encode(), b"100")
    assert entry.fields["unit_id"] == run.units[0].unit_id.encode()
    assert entry.fields["data"] == run.data(0)
    assert run.ledger.meta()["bytes"] == "100"


def test_a_zombie_cannot_publish_after_another_took_its_unit(run: RunCase) -> None:
    zombie = run.claim(0, "zombie")
    overdue(run, 0)
    feed(run, reap=True)
    second = run.claim(0, "second")
    assert run.publish(0, zombie) is PublishVerdict.LOST
    assert run.ledger.start([(0, zombie)]) == {zombie}
    assert not run.ledger.release(0, zombie)
    assert run.publish(0, second) is PublishVerdict.ACCEPTED
    assert run.publish(0, zombie) is PublishVerdict.SUPERSEDED
    (entry,) = entries(run)
    assert commit(run, (entry.receipt, 0)) == 1
    assert run.publish(0, zombie) is PublishVerdict.SUPERSEDED
    assert run.publish(0, second) is PublishVerdict.SUPERSEDED


def test_a_token_that_begins_like_the_publishers_is_another(run: RunCase) -> None:
    token = run.claim(0)
    run.publish(0, token)
    assert run.publish(0, token[:-1]) is PublishVerdict.SUPERSEDED
    assert run.publish(0, token + "x") is PublishVerdict.SUPERSEDED


def test_a_result_waits_where_the_bytes_have_no_room(run: RunCase) -> None:
    run.client.hset(run.key("meta"), "limit_bytes", 150)
    tokens = [run.claim(u) for u in range(2)]
    assert run.publish(0, tokens[0]) is PublishVerdict.ACCEPTED
    before = state(run)
    assert run.publish(1, tokens[1]) is PublishVerdict.NO_ROOM
    assert state(run) == before
    commit(run, (entries(run)[0].receipt, 0))
    assert run.publish(1, tokens[1]) is PublishVerdict.ACCEPTED


def test_a_result_larger_than_the_bound_goes_alone(run: RunCase) -> None:
    run.client.hset(run.key("meta"), "limit_bytes", 50)
    assert run.ledger.results.has_room()
    run.work_one(0)
    assert not run.ledger.results.has_room()


def test_a_result_waits_where_the_stream_is_full(run: RunCase) -> None:
    run.client.hset(run.key("meta"), "limit_entries", 1)
    run.work_one(0)
    assert run.publish(1, run.claim(1)) is PublishVerdict.NO_ROOM


def test_there_is_room_where_the_broker_knows_no_run(run: RunCase) -> None:
    run.client.delete(*run.ledger.keys)
    assert run.ledger.results.has_room()


def test_only_a_large_result_goes_through_the_client_that_waits_long(run: RunCase, server: EmbeddedServer) -> None:
    with Proxy(server.url) as proxy, connect(proxy.url) as bulk:
        run.ledger = Ledger(run.client, run.info.run, bulk=bulk)
        for u, size in enumerate((BULK_BYTES, BULK_BYTES + 1)):
            assert run.ledger.publish(u, run.claim(u), run.fields(u), size=size) is PublishVerdict.ACCEPTED
            assert (proxy.commands > 0) == (size > BULK_BYTES)
    assert set(table(run, "pub")) == {0, 1}


def test_a_large_result_travels_in_pieces_and_arrives_whole(run: RunCase) -> None:
    data = bytes(range(256)) * (20 << 12)  # 20 MB, more than the server takes in one value
    assert run.publish(0, run.claim(0, "alive"), data=data) is PublishVerdict.ACCEPTED
    run.ledger.results.make_group()
    (entry,) = run.ledger.results.read(">", count=1, block_ms=None)
    assert entry.is_whole
    assert entry.fields["data"] == data


# --- release, abandon ---


@pytest.mark.parametrize("started", [True, False])
def test_an_undone_lease_costs_no_attempt(run: RunCase, started: bool) -> None:
    token = run.claim(0, started=started)
    assert run.ledger.release(0, token)
    assert table(run, "att") in ({}, {0: "0"})
    assert scores(run, "hinted") == {0: 0}, "to be hinted at once"
    before = state(run)
    assert not run.ledger.release(0, token)
    assert state(run) == before
    assert (table(run, "owner"), begun(run), scores(run, "due")) == ({}, set(), {})


@pytest.mark.parametrize("started", [True, False])
def test_a_failed_lease_costs_one_attempt(run: RunCase, started: bool) -> None:
    token = run.claim(0, started=started)
    assert run.ledger.release(0, token, failed=("storage", "disk away"))
    assert not run.ledger.release(0, token, failed=("storage", "disk away"))
    assert table(run, "att") == {0: "1"}


def test_a_first_crash_is_tried_at_once_and_a_second_one_later(run: RunCase) -> None:
    crash(run, 0)
    assert (scores(run, "hinted"), scores(run, "due")) == ({0: 0}, {})
    before = now_ms(run.client)
    crash(run, 0)
    (due,) = scores(run, "due").values()
    assert before + 10_000 <= due <= now_ms(run.client) + 10_000
    assert scores(run, "hinted") == {}
    assert feed(run, reap=True)[0] == []
    overdue(run, 0)
    assert feed(run)[0] == [0]


def test_the_third_crash_quarantines_the_unit_by_name(run: RunCase) -> None:
    for attempt in range(MAX_ATTEMPTS):
        if attempt == 2:
            overdue(run, 0)
        crash(run, 0)
    (entry,) = entries(run)
    assert entry.fields == {
        "u": b"0",
        "token": b"quarantine",
        "bytes": b"0",
        "v": str(VERSION).encode(),
        "code": b"crash",
        "message": b"killed by signal 9",
        "attempts": b"3",
    }
    assert claim(run, 0, new_token(run.gen, "b")) == "dup"
    commit(run, (entry.receipt, 0))
    assert (table(run, "att"), table(run, "pub"), scores(run, "due")) == ({}, {}, {})


def test_three_failures_of_a_source_keep_their_own_code(run: RunCase) -> None:
    for attempt in range(MAX_ATTEMPTS):
        if attempt == 2:
            overdue(run, 0)
        assert run.ledger.release(0, run.claim(0), failed=("storage", "m" * 3000))
    (entry,) = entries(run)
    assert (entry.fields["code"], len(entry.fields["message"])) == (b"storage", 1000)


def test_abandoning_frees_one_workers_leases_and_charges_what_was_busy(run: RunCase) -> None:
    busy, idle = run.claim(0, "w1"), run.claim(1, "w1", started=False)
    others = {2: run.claim(2, "w10"), 3: run.claim(3, "1")}
    assert run.die("w1") == 2
    assert run.die("w1") == 0
    assert table(run, "owner") == others
    assert table(run, "att") == {0: "1", 2: "1", 3: "1"}
    assert scores(run, "hinted") == {0: 0, 1: 0}
    assert (run.publish(0, busy), run.publish(1, idle)) == (PublishVerdict.LOST, PublishVerdict.LOST)


def test_only_what_a_dead_worker_had_in_hand_is_charged(run: RunCase) -> None:
    in_hand, queued = run.claim(0, "w"), run.claim(1, "w")
    assert run.ledger.abandon("w", "gone", blame={in_hand: None}) == 2
    assert table(run, "att") == {0: "1", 1: "0"}
    assert queued not in begun(run)


def test_a_third_crash_in_one_sample_leaves_it_out_and_tries_the_rest_again(run: RunCase) -> None:
    for _ in range(MAX_ATTEMPTS - 1):
        crash(run, 0)
    overdue(run, 0)
    run.claim(0, "dies")
    run.die("dies", ordinal=2)
    assert entries(run) == []
    answer = run.ledger.claim(0, new_token(run.gen, "dies"), lease_s=LEASE_S, fingerprint=FINGERPRINT)
    assert (answer.attempts, answer.poison) == (MAX_ATTEMPTS - 1, {2})
    run.ledger.start([(0, run.client.hget(run.key("owner"), "0").decode())])
    run.die("dies", ordinal=0)
    answer = run.ledger.claim(0, new_token(run.gen, "a"), lease_s=LEASE_S, fingerprint=FINGERPRINT)
    assert answer.poison == {0, 2}


def test_samples_that_end_their_worker_are_left_out_up_to_eight(run: RunCase) -> None:
    for _ in range(MAX_ATTEMPTS - 1):
        crash(run, 0)
    for ordinal in range(9):
        assert entries(run) == []
        run.age()
        run.claim(0, "dies")
        run.die("dies", ordinal=ordinal)
    (entry,) = entries(run)
    assert entry.fields["code"] == b"crash"
    commit(run, (entry.receipt, 0))
    assert table(run, "poison") == {}


# --- the tail: nothing is left to hint ---


@pytest.fixture
def tail(run: RunCase) -> RunCase:
    """Every unit but 0 is done; `slow` holds 0, and a unit takes 100 s, so that nothing here seems to take long."""
    feed(run)
    for u in range(1, 8):
        run.work_one(u)
        commit(run, (entries(run)[0].receipt, u))
    run.client.hset(run.key("meta"), "unit_ms", 100_000)
    return run


def began_long_ago(run: RunCase, token: str) -> None:
    assert run.client.hset(run.key("busy"), token, now_ms(run.client) - 302_000) == 0


def test_an_idle_worker_takes_over_what_its_holder_has_not_begun(tail: RunCase) -> None:
    slow = tail.claim(0, "slow", started=False)
    assert feed(tail, queue_empty=True, idle=1) == ([], [0])
    assert claim(tail, 0, new_token(tail.gen, "busy")) == "leased"
    fast = new_token(tail.gen, "fast")
    assert claim(tail, 0, fast, idle=True) == "ok"
    assert tail.ledger.start([(0, slow)]) == {slow}
    assert tail.ledger.beat(tail.gen, [(0, slow), (0, fast)], lease_s=LEASE_S)[1] == {slow}


def test_a_unit_that_takes_long_is_run_a_second_time_and_the_first_result_stands(tail: RunCase) -> None:
    slow = tail.claim(0, "slow")
    assert feed(tail, queue_empty=True, idle=1) == ([], []), "it has only just begun"
    began_long_ago(tail, slow)
    tail.client.hdel(tail.key("meta"), "helped_ms")
    assert feed(tail, queue_empty=True, idle=1) == ([], [0])
    assert now_ms(tail.client) - int(tail.ledger.meta()["helped_ms"]) < 60_000
    for ago_ms, told in ((-60_000, []), (1_001, [0])):
        tail.client.hset(tail.key("meta"), "helped_ms", now_ms(tail.client) - ago_ms)
        assert feed(tail, queue_empty=True, idle=1) == ([], told), "once a second"
    fast, third = new_token(tail.gen, "fast"), new_token(tail.gen, "third")
    assert claim(tail, 0, new_token(tail.gen, "slow"), idle=True) == "leased"
    assert [claim(tail, 0, token, idle=True) for token in (fast, fast, third)] == ["ok", "ok", "leased"]
    assert tail.ledger.start([(0, fast), (0, slow)]) == set()
    assert tail.ledger.beat(tail.gen, [(0, slow), (0, fast)], lease_s=LEASE_S)[1] == set()
    assert [tail.publish(0, token) for token in (fast, fast, slow)] == [
        PublishVerdict.ACCEPTED,
        PublishVerdict.ACCEPTED,
        PublishVerdict.SUPERSEDED,
    ]
    assert (table(tail, "owner"), table(tail, "spare"), begun(tail)) == ({}, {}, set())


def test_a_worker_helps_with_a_unit_that_has_taken_longer_than_it_would_itself_need(tail: RunCase) -> None:
    slow = tail.claim(0, "slow")
    assert tail.client.hset(tail.key("busy"), slow, now_ms(tail.client) - 5_000) == 0
    assert feed(tail, queue_empty=True, idle=1, unit_s=10.0) == ([], [])
    assert claim(tail, 0, new_token(tail.gen, "slower"), idle=True, unit_s=10.0) == "leased"
    tail.client.hdel(tail.key("meta"), "helped_ms")
    assert feed(tail, queue_empty=True, idle=1, unit_s=1.0) == ([], [0])
    fast = new_token(tail.gen, "fast")
    assert [claim(tail, 0, fast, idle=True, unit_s=1.0) for _ in range(2)] == ["ok", "ok"]
    assert tail.ledger.start([(0, fast)]) == set()
    assert [tail.publish(0, token) for token in (fast, slow)] == [PublishVerdict.ACCEPTED, PublishVerdict.SUPERSEDED]


def hinted_to_idle(tail: RunCase, *, unit_s: float = 0.0) -> list[int]:
    """Units that an idle worker is told of, to which a usual unit takes so long."""
    tail.client.hdel(tail.key("meta"), "helped_ms")
    return feed(tail, queue_empty=True, idle=1, unit_s=unit_s)[1]


@pytest.mark.parametrize("told", [False, True])
def test_a_unit_ten_times_as_large_as_others_is_not_run_a_second_time_by_an_equal_worker(
    tail: RunCase, told: bool
) -> None:
    """It takes either worker 600 s, other units 60 s, and its holder is at it for 190 s."""
    tail.client.hset(tail.key("meta"), "unit_ms", 60_000)
    token = tail.claim(0, "holder")
    tail.client.hset(tail.key("busy"), token, now_ms(tail.client) - 190_000)
    if told:
        tail.ledger.beat(tail.gen, [(0, token)], lease_s=LEASE_S, outlook={token: (410.0, 10.0)})
        assert hinted_to_idle(tail, unit_s=60.0) == []
        assert hinted_to_idle(tail) == [], "nor by one that does not know its own speed"
        assert claim(tail, 0, new_token(tail.gen, "new"), idle=True) == "leased"
        assert hinted_to_idle(tail, unit_s=40.0) == [0], "but by one that ends it in 400 s"
    assert claim(tail, 0, new_token(tail.gen, "equal"), idle=True, unit_s=600.0) == "leased"
    if told:
        assert claim(tail, 0, new_token(tail.gen, "faster"), idle=True, unit_s=400.0) == "ok"


@pytest.mark.parametrize(
    ("left_s", "helps"),
    [(55.0, False), (65.0, True), (5.0, False), (-5.0, False), (-55.0, False), (-65.0, True)],
)
def test_a_worker_helps_where_the_holder_needs_longer_or_is_late_by_more_than_it_would_need(
    tail: RunCase, left_s: float, helps: bool
) -> None:
    token = tail.claim(0, "slow")
    began_long_ago(tail, token)
    for _ in range(2):
        tail.ledger.beat(tail.gen, [(0, token)], lease_s=LEASE_S, outlook={token: (left_s, 1.0)})
    assert hinted_to_idle(tail, unit_s=60.0) == ([0] if helps else [])
    fast = new_token(tail.gen, "fast")
    assert claim(tail, 0, fast, idle=True, unit_s=60.0) == ("ok" if helps else "leased")
    assert tail.publish(0, token) is PublishVerdict.ACCEPTED
    assert int(tail.ledger.meta()["unit_ms"]) == pytest.approx(100_000 + 202_000 / 8, abs=1_000), "it took 302 s"


def test_a_worker_helps_the_holder_that_needs_longest(make_run: MakeRun) -> None:
    run = make_run(3)
    run.build()
    feed(run)
    for u, left_s in ((0, 30.0), (1, 90.0), (2, 60.0)):
        token = run.claim(u, "slow")
        run.ledger.beat(run.gen, [(u, token)], lease_s=LEASE_S, outlook={token: (left_s, 1.0)})
    assert feed(run, queue_empty=True, idle=2, unit_s=1.0) == ([], [1, 2])


def test_what_a_holder_expects_of_a_unit_that_it_has_not_begun_is_not_kept(tail: RunCase) -> None:
    token = tail.claim(0, "slow", started=False)
    tail.ledger.beat(tail.gen, [(0, token)], lease_s=LEASE_S, outlook={token: (5.0, 1.0)})
    assert begun(tail) == set()


def test_idle_workers_are_told_of_units_not_begun_and_then_of_those_that_have_taken_longest(make_run: MakeRun) -> None:
    run = make_run(4)
    run.build()
    feed(run)
    for u, ago_s in ((0, 30), (1, 50), (2, 40)):
        run.client.hset(run.key("busy"), run.claim(u, "slow"), now_ms(run.client) - ago_s * 1000)
    run.claim(3, "slow", started=False)
    for idle, told in ((1, [3]), (3, [3, 1, 2]), (9, [3, 1, 2, 0])):
        assert feed(run, queue_empty=True, idle=idle, unit_s=1.0) == ([], told)
        run.client.hdel(run.key("meta"), "helped_ms")


@pytest.mark.parametrize("dies", ["slow", "fast"])
@pytest.mark.parametrize("how", ["killed", "gives back", "fails"])
def test_of_two_leases_on_a_unit_the_other_goes_on_where_one_ends(tail: RunCase, dies: str, how: str) -> None:
    tokens = {"slow": tail.claim(0, "slow")}
    began_long_ago(tail, tokens["slow"])
    tokens["fast"] = new_token(tail.gen, "fast")
    assert claim(tail, 0, tokens["fast"], idle=True) == "ok"
    tail.ledger.start([(0, tokens["fast"])])
    if how == "killed":
        assert tail.die(dies) == 1
    else:
        assert tail.ledger.release(0, tokens[dies], failed=("storage", "away") if how == "fails" else None)
    assert scores(tail, "hinted") == {}
    lives = next(name for name in tokens if name != dies)
    assert table(tail, "owner") == {0: tokens[lives]}
    assert table(tail, "spare") == {}
    assert tail.publish(0, tokens[dies]) is PublishVerdict.LOST
    assert tail.publish(0, tokens[lives]) is PublishVerdict.ACCEPTED


def test_a_unit_that_ended_a_worker_runs_once_at_a_time(tail: RunCase) -> None:
    crash(tail, 0)
    feed(tail)
    began_long_ago(tail, tail.claim(0, "slow"))
    assert feed(tail, queue_empty=True, idle=1) == ([], [])
    assert claim(tail, 0, new_token(tail.gen, "fast"), idle=True) == "leased"


def test_nobody_helps_while_something_is_left_to_hint(run: RunCase) -> None:
    feed(run, 3)
    run.claim(0, "slow", started=False)
    assert claim(run, 0, new_token(run.gen, "fast"), idle=True) == "leased"


def test_a_queue_of_another_protocol_version_is_none(run: RunCase) -> None:
    assert run.gen == "1-0"
    run.client.hset(run.key("meta"), "v", VERSION - 1)
    assert run.gen == ""


# --- next ---


def test_feeding_goes_through_the_units_in_order_up_to_the_room(run: RunCase) -> None:
    assert feed(run, 3) == ([], [0, 1, 2])
    assert feed(run, 0) == ([], [])
    assert feed(run, 100) == ([], [3, 4, 5, 6, 7])
    assert feed(run, 100) == ([], [])


def test_feeding_skips_what_is_done(make_run: MakeRun) -> None:
    run = make_run(20)
    run.build(done=b"\xff\xf7\x00")
    assert feed(run)[1] == [12, 16, 17, 18, 19]


def test_feeding_passes_a_long_run_of_done_units_in_one_step(make_run: MakeRun) -> None:
    run = make_run(2)
    run.build(done=b"\xff" * 2_500_000 + b"\xfe")
    run.client.hset(run.key("meta"), "total", 20_000_008)

    def calls() -> int:
        return int(run.client.info("commandstats").get("cmdstat_getbit", {"calls": 0})["calls"])

    before = calls()
    assert feed(run)[1] == [20_000_007]
    assert calls() - before < 100_000, "a server is deaf while it runs a script"


@pytest.mark.parametrize(("room", "others"), [(0, []), (1, []), (2, []), (4, [0, 1])])
def test_urgent_units_come_first_also_where_there_is_no_room(run: RunCase, room: int, others: list[int]) -> None:
    run.claim(5, "w")
    run.claim(6, "w")
    run.die("w")
    assert feed(run, room) == ([5, 6], others)


def test_hints_that_nobody_answered_are_given_again(run: RunCase) -> None:
    feed(run)
    now = now_ms(run.client)
    run.client.zadd(run.key("hinted"), {str(u): now + 60_000 for u in range(8)})  # however slow this machine is
    run.client.zadd(run.key("hinted"), {"3": now - 6_000, "4": now - 601_000})
    assert feed(run) == ([], [4])
    assert feed(run, queue_empty=True) == ([], [3])
    assert feed(run, queue_empty=True) == ([], [])


def test_leases_lapse_only_when_the_feeder_may_reap(run: RunCase) -> None:
    busy, idle = run.claim(0), run.claim(1, started=False)
    overdue(run, 0)
    overdue(run, 1)
    assert feed(run, 0, reap=False) == ([], [])
    assert table(run, "owner") == {0: busy, 1: idle}
    assert sorted(feed(run, 2, reap=True)[0]) == [0, 1]
    assert table(run, "owner") == {}
    assert table(run, "att") == {0: "1"}


@pytest.mark.parametrize("ms", [-3000, 60_000])
def test_what_was_decided_before_an_outage_takes_no_lease_away_after_it(run: RunCase, ms: int) -> None:
    token = run.claim(0)
    overdue(run, 0)
    run.ledger.next_units(run.gen, 0, queue_empty=False, reap_at=now_ms(run.client) + ms)
    assert table(run, "owner") == {0: token}


def test_a_clock_that_was_set_back_holds_nothing_up(run: RunCase) -> None:
    hour = 3_600_000
    feed(run, 3)
    run.claim(0)
    run.work_one(1)
    before = {key: scores(run, key) for key in ("due", "hinted")}
    assert (set(before["due"]), set(before["hinted"])) == ({0, 1}, {2})
    for key, there in before.items():
        for u, score in there.items():
            run.client.zadd(run.key(key), {str(u): score + hour})
    run.client.hincrby(run.key("meta"), "fed_ms", hour)
    for _ in range(2):
        feed(run, 0)
        for key, there in before.items():
            assert scores(run, key) == pytest.approx(there, abs=10_000)


def test_a_lease_that_lapses_a_third_time_is_quarantined_as_a_crash(run: RunCase) -> None:
    for _ in range(MAX_ATTEMPTS):
        run.claim(0)
        overdue(run, 0)
        feed(run, reap=True)
        run.age()
    (entry,) = entries(run)
    assert entry.fields["code"] == b"crash"
    assert b"not heard of" in entry.fields["message"]


def test_a_published_result_is_looked_for_and_left_alone_where_it_is(run: RunCase) -> None:
    run.work_one(0)
    overdue(run, 0)
    assert feed(run, 0, reap=True) == ([], [])
    assert 0 in table(run, "pub")
    assert scores(run, "due")[0] > 1


def test_a_published_result_that_vanished_is_made_again(run: RunCase) -> None:
    run.work_one(0)
    run.client.xtrim(run.key("res"), 0)
    overdue(run, 0)
    assert feed(run)[0] == [0]
    run.work_one(0)
    assert len(entries(run)) == 1


def test_a_feeder_of_another_generation_or_state_gets_nothing(run: RunCase) -> None:
    assert run.ledger.next_units("0-9", 10, queue_empty=True, reap_at=now_ms(run.client)) == ([], [])
    run.client.hset(run.key("meta"), "state", "paused")
    assert feed(run) == ([], [])


# --- commit, reject ---


def test_a_commit_acknowledges_counts_and_clears_once(run: RunCase) -> None:
    for u in range(2):
        run.work_one(u)
    first, second = entries(run)
    for _ in range(2):
        assert commit(run, (first.receipt, 0)) == 1
        assert run.ledger.meta()["bytes"] == "100", "the bytes are given back exactly once"
    assert run.client.xlen(run.key("res")) == 1
    assert run.client.xpending(run.key("res"), GROUP)["pending"] == 1
    meta = run.ledger.meta()
    assert [meta[name] for name in ("done", "rows", "failures", "quarantined", "n")] == ["1", "1", "2", "3", "4"]
    assert commit(run, (second.receipt, None)) == 1, "an entry may be acknowledged without its unit"
    assert commit(run, ("", 5)) == 2, "and a unit marked without an entry"
    assert run.ledger.meta()["bytes"] == "0"
    assert run.ledger.done_bits() == b"\x84"


def test_what_is_taken_off_the_stream_is_not_read_for_that(run: RunCase) -> None:
    for u in range(2):
        run.work_one(u)
    first, second = entries(run)
    run.client.config_resetstat()
    commit(run, (first.receipt, 0))
    run.ledger.reject(second.receipt, 1, second.fields["token"].decode(), "lost_result", "gone")
    assert "cmdstat_xrange" not in run.client.info("commandstats")
    assert run.ledger.meta()["bytes"] == "0"


def test_the_last_commit_completes_the_run(run: RunCase) -> None:
    assert commit(run, *(("", u) for u in range(7))) == 7
    assert run.ledger.meta()["state"] == "running"
    for _ in range(2):
        assert commit(run, ("", 7)) == 8
        assert run.ledger.meta()["state"] == "done"
    assert claim(run, 0, new_token(run.gen, "a")) == "state"


def test_a_commit_of_many_units_is_sent_in_pieces(make_run: MakeRun) -> None:
    run = make_run(1)
    run.build()
    run.client.hset(run.key("meta"), "total", 1200)
    assert commit(run, *(("", u) for u in range(1200))) == 1200
    assert run.ledger.meta()["state"] == "done"
    assert commit(run) == 1200


def test_a_rejected_result_is_made_again(run: RunCase) -> None:
    token = run.claim(0)
    run.publish(0, token)
    (entry,) = entries(run)
    run.ledger.reject(entry.receipt, 0, token, "lost_result", "gone")
    before = state(run)
    run.ledger.reject(entry.receipt, 0, token, "lost_result", "gone")
    assert state(run) == before
    assert run.ledger.meta()["bytes"] == "0"
    assert run.client.xpending(run.key("res"), GROUP)["pending"] == 0
    assert feed(run, 1)[0] == [0]
    assert table(run, "att") == {0: "1"}


def test_a_rejection_does_not_touch_the_result_of_another_attempt(run: RunCase) -> None:
    token = run.claim(0)
    run.publish(0, token)
    (entry,) = entries(run)
    run.client.hdel(run.key("pub"), "0")
    overdue(run, 0)
    feed(run)
    other = run.claim(0)
    assert run.publish(0, other) is PublishVerdict.ACCEPTED
    run.ledger.reject(entry.receipt, 0, token, "lost_result", "gone")
    assert table(run, "pub")[0].startswith(other)
    assert run.ledger.meta()["bytes"] == "100"


def test_three_rejections_quarantine_with_the_writers_reason(run: RunCase) -> None:
    for _ in range(MAX_ATTEMPTS):
        token = run.claim(0)
        run.publish(0, token)
        (entry,) = entries(run)
        run.ledger.reject(entry.receipt, 0, token, "wrong_count", "3 rows")
        run.age()
        feed(run)
    (entry,) = entries(run)
    assert (entry.fields["token"], entry.fields["code"]) == (b"quarantine", b"wrong_count")


# --- rebuild, the lock, the rest ---


def test_after_a_rebuild_everything_old_is_worthless(run: RunCase) -> None:
    feed(run)
    held, published = run.claim(0), run.claim(1)
    run.publish(1, published)
    old = run.gen
    run.ledger.rebuild(gen="1-1", total=8, done=b"\x01", counters={"rows": 3, "fingerprint": FINGERPRINT})
    assert run.publish(0, held) is PublishVerdict.LOST
    assert run.publish(1, published) is PublishVerdict.LOST
    assert claim(run, 2, new_token(old, "a")) == "gen"
    assert run.ledger.beat(old, [(0, held)], lease_s=LEASE_S) == ("gen", {held})
    assert run.ledger.next_units(old, 10, queue_empty=True, reap_at=now_ms(run.client)) == ([], [])
    assert entries(run) == []
    assert feed(run)[1] == [0, 1, 2, 3, 4, 5, 6]
    meta = run.ledger.meta()
    assert [meta[name] for name in ("gen", "done", "rows", "bytes", "state")] == ["1-1", "1", "3", "0", "running"]


def test_a_rebuild_of_a_finished_run_is_done(run: RunCase) -> None:
    run.build(done=b"\xff")
    assert run.ledger.meta()["state"] == "done"
    assert feed(run) == ([], [])


def test_results_delivered_before_a_restart_are_read_again(run: RunCase) -> None:
    for u in range(3):
        run.work_one(u)
    before = entries(run)
    assert entries(run) == []
    assert run.ledger.results.read("0", count=100, block_ms=None) == before
    assert run.ledger.results.read(before[0].id, count=1, block_ms=None) == before[1:2]
    commit(run, (before[1].receipt, 1))
    assert [e.id for e in run.ledger.results.read("0", count=100, block_ms=None)] == [before[0].id, before[2].id]


def test_an_entry_that_was_deleted_while_pending_is_shown_empty(run: RunCase) -> None:
    run.work_one(0)
    (entry,) = entries(run)
    run.client.xdel(run.key("res"), entry.id)
    assert run.ledger.results.read("0", count=100, block_ms=None) == [Entry(entry.id, {})]


def test_a_stream_that_was_lost_gets_its_group_again(run: RunCase) -> None:
    run.work_one(0)
    run.client.delete(run.key("res"))
    assert entries(run) == []
    run.work_one(1)
    assert [entry.fields["u"] for entry in entries(run)] == [b"1"]


@pytest.mark.parametrize("by", ["reading", "a new writer"])
def test_results_that_were_lost_with_the_stream_are_missed_at_once(run: RunCase, by: str) -> None:
    """They were looked for a minute after they were published."""
    for u in range(3):
        run.work_one(u)
    (committed, *_) = entries(run)
    commit(run, (committed.receipt, 0))
    run.client.delete(run.key("res"))
    run.work_one(3)
    if by == "reading":
        assert entries(run) == []
    else:
        run.ledger.results.make_group()
    assert feed(run)[0] == [1, 2], "not what is committed, and not what was published since"
    assert [entry.fields["u"] for entry in entries(run)] == [b"3"]


def test_a_result_that_was_lost_is_missed_though_a_later_one_has_the_id_of_its_entry(run: RunCase) -> None:
    """A stream that is made anew within the same millisecond begins with the same id."""
    run.work_one(2)
    (lost,) = entries(run)
    run.work_one(3)
    (kept,) = run.client.xrange(run.key("res"), f"({lost.id}")
    run.client.delete(run.key("res"))
    run.client.xadd(run.key("res"), kept[1], id=lost.id)
    run.client.hset(run.key("pub"), "3", run.client.hget(run.key("pub"), "3").replace(kept[0], lost.id.encode()))
    run.ledger.results.make_group()
    assert feed(run, 1)[0] == [2]
    assert [entry.fields["u"] for entry in entries(run)] == [b"3"]


def test_the_writers_lock_is_held_renewed_taken_over_and_given_up(run: RunCase) -> None:
    assert run.ledger.lock_writer("a", ttl_s=10) == ""
    assert run.ledger.lock_writer("a", ttl_s=10) == ""
    assert run.ledger.lock_writer("b", ttl_s=10) == "a"
    run.ledger.unlock_writer("b")
    assert run.ledger.lock_writer("b", ttl_s=10) == "a"
    assert run.ledger.lock_writer("b", ttl_s=10, takeover=True) == ""
    assert run.ledger.lock_writer("a", ttl_s=10) == "b"
    assert 0 < run.client.pttl(f"embq:{{{run.info.run}}}:writer") <= 10_000
    run.ledger.unlock_writer("b")
    assert run.ledger.lock_writer("a", ttl_s=10) == ""


def test_workers_that_are_no_longer_heard_of_are_forgotten(own_client: redis.Redis) -> None:
    own_client.zadd(WORKERS, {"a": 1, "b": 2})
    own_client.set(worker_key("b"), json.dumps({"name": "b"}))
    (alive,) = live_workers(own_client)
    assert alive["name"] == "b"
    WORKER_REPORTS.forget_silent(own_client)
    assert own_client.zrange(WORKERS, 0, -1) == [b"b"]


def test_scripts_survive_a_server_that_forgets_them_at_every_moment(
    own_client: redis.Redis, own_server: EmbeddedServer, tmp_path: Path
) -> None:
    run = make_case(own_client, tmp_path / "out", 200, samples=1)
    run.build()
    over = threading.Event()

    def forget() -> None:
        with connect(own_server.url) as client:
            while not over.is_set():
                client.script_flush()

    forgetting = threading.Thread(target=forget)
    forgetting.start()
    try:
        for u in range(200):
            run.work_one(u)
    finally:
        over.set()
        forgetting.join()
    assert own_client.hlen(run.key("pub")) == 200


def test_a_full_server_takes_commits_though_it_takes_no_results(own_client: redis.Redis, tmp_path: Path) -> None:
    run = make_case(own_client, tmp_path / "out")
    run.build()
    run.work_one(0)
    run.work_one(1)
    begun, idle = run.claim(2), run.claim(3, started=False)
    first, second = entries(run)
    own_client.config_set("maxmemory", "1")
    assert run.publish(2, begun) is PublishVerdict.NO_MEMORY
    assert run.ledger.beat(run.gen, [(2, begun)], lease_s=LEASE_S) == ("running", set())
    assert commit(run, (first.receipt, 0)) == 1
    run.ledger.reject(second.receipt, 1, second.fields["token"].decode(), "x", "x")
    assert run.ledger.release(3, idle)
    assert run.die("alive") == 1
    own_client.config_set("maxmemory", "0")
    assert feed(run)[0] == [1, 2, 3]
    assert set(SCRIPTS) > FREEING


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_raises_an_error_of_the_server_as_it_came(name: str) -> None:
    """A text would get the place in front of its code, by which clients know it: Lua adds that to texts alone."""
    assert re.findall(r"error\((?!id\))", SCRIPTS[name]) == []


@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_a_full_server_says_so_whatever_a_script_would_write_first(
    own_client: redis.Redis, tmp_path: Path, is_empty: bool, started: bool
) -> None:
    run = make_case(own_client, tmp_path / "out")
    run.build()
    if not is_empty:
        run.work_one(0)
    token = run.claim(1, started=started)
    own_client.config_set("maxmemory", "1")
    try:
        assert run.publish(1, token) is PublishVerdict.NO_MEMORY
    finally:
        own_client.config_set("maxmemory", "0")
    assert run.publish(1, token) is PublishVerdict.ACCEPTED


# --- the loss of one key ---


def test_where_the_run_is_forgotten_every_lease_is_void_and_nothing_of_it_is_written(run: RunCase) -> None:
    run.work_one(1)
    (entry,) = entries(run)
    token = run.claim(0)
    run.client.delete(run.key("meta"))
    assert run.ledger.start([(0, token)]) == {token}
    assert run.ledger.beat("1-0", [(0, token)], lease_s=LEASE_S) == ("gen", {token})
    assert run.publish(0, token) is PublishVerdict.LOST
    assert not run.ledger.release(0, token)
    assert run.die("alive") == 0
    run.ledger.reject(entry.receipt, 1, entry.fields["token"].decode(), "x", "x")
    commit(run, (entry.receipt, 1))
    assert run.ledger.meta() == {}


@pytest.mark.parametrize("part", [part for part in RUN_PARTS if part != "meta"])
@pytest.mark.parametrize("after_commits", [False, True], ids=["at first", "later"])
def test_a_run_outlives_the_loss_of_any_one_key(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, part: str, after_commits: bool
) -> None:
    run = make_run(12)
    writer = run.writer()
    run.feeder().tick()
    for u in (0, 1):
        assert run.pop() is not None
        run.work_one(u)
    if after_commits:
        writer.step()
        writer.flush()
    while run.pop():  # every other hint was popped by workers that died before they claimed
        pass
    run.work_one(2)
    assert len(writer.inbox.read()) >= 1  # delivered to the writer, which has done nothing with it yet
    writer.inbox.read_again()
    run.work_one(3)
    run.claim(4, "dead")
    run.claim(5, "dead", started=False)
    slow = run.claim(6)
    crash(run, 7)
    crash(run, 8)
    crash(run, 8)
    monkeypatch.setattr("embq.writer.queue.LIMIT_BYTES", 450)
    run.client.hset(run.key("meta"), "limit_bytes", 450)
    run.client.delete(run.key(part))
    run.finish(writer)
    assert run.publish(6, slow) in (PublishVerdict.LOST, PublishVerdict.SUPERSEDED)
    run.assert_exact()
    assert run.ledger.meta()["state"] == "done"
    assert run.ledger.meta()["bytes"] == "0"


def test_a_run_outlives_the_loss_of_every_hint(run: RunCase) -> None:
    writer = run.writer()
    run.feeder().tick()
    run.queue.delete(delete_jobs=True)
    run.finish(writer)
    run.assert_exact()


# --- everything at once ---

UNITS = 8


class LedgerMachine(RuleBasedStateMachine):
    """Two workers, a supervisor, a feeder and a writer do whatever they may do, in any order, and lose what they may
    lose. The log is a real `LogState`, which refuses a unit that is committed twice."""

    make: Callable[[], RunCase]

    def __init__(self) -> None:
        super().__init__()
        self.run = self.make()
        self.ledger: Ledger = self.run.ledger
        self.generation = 0
        self.hints: list[tuple[str, int]] = []
        self.held: dict[str, list[tuple[int, str]]] = {"w1": [], "w2": []}
        self.zombies: list[tuple[int, str]] = []
        self.buffer: dict[int, tuple[str, str]] = {}
        self.read_from = ">"
        self.log = LogState(units=UNITS)
        self.key_lost = False
        self.rebuild()

    # the broker

    @precondition(lambda self: self.generation < 2)
    @rule()
    def rebuild(self) -> None:
        self.generation += 1
        self.ledger.rebuild(
            gen=f"1-{self.generation}", total=UNITS, done=bytes(self.log.done), counters={"fingerprint": ""}
        )
        self.buffer.clear()
        self.read_from = ">"
        self.key_lost = False

    @rule()
    def time_passes(self) -> None:
        self.run.age()

    @rule(part=st.sampled_from([part for part in RUN_PARTS if part != "meta"]))
    def a_key_is_lost(self, part: str) -> None:
        self.run.client.delete(self.run.key(part))
        self.key_lost = True

    # the feeder

    @rule(room=st.integers(0, 5), queue_empty=st.booleans(), reap=st.booleans(), idle=st.integers(0, 2))
    def feed(self, room: int, queue_empty: bool, reap: bool, idle: int = 0) -> None:
        gen = self.ledger.gen()
        reap_at = now_ms(self.ledger.client) if reap else 0
        urgent, normal = self.ledger.next_units(gen, room, queue_empty=queue_empty, reap_at=reap_at, idle=idle)
        # Urgent units do not wait for room; they use it up.
        assert not normal or len(urgent) + len(normal) <= max(room, idle)
        self.hints = [(gen, u) for u in urgent] + self.hints + [(gen, u) for u in normal]

    @precondition(lambda self: self.hints)
    @rule(at=st.integers(0, 7))
    def a_hint_is_lost(self, at: int) -> None:
        self.hints.pop(at % len(self.hints))

    @precondition(lambda self: self.hints)
    @rule(at=st.integers(0, 7))
    def a_hint_is_doubled(self, at: int) -> None:
        self.hints.append(self.hints[at % len(self.hints)])

    # the workers

    @precondition(lambda self: self.hints)
    @rule(worker=st.sampled_from(["w1", "w2"]), again=st.booleans(), idle=st.booleans())
    def take(self, worker: str, again: bool, idle: bool = False) -> None:
        gen, u = self.hints.pop(0)
        token = new_token(gen, worker)
        for _ in range(1 + again):
            answer = self.ledger.claim(u, token, lease_s=LEASE_S, fingerprint=FINGERPRINT, idle=idle)
        assert not (answer.granted and gen != self.ledger.gen())
        if answer.granted:
            self.held[worker].append((u, token))

    @rule(worker=st.sampled_from(["w1", "w2"]), again=st.booleans())
    def start(self, worker: str, again: bool) -> None:
        for _ in range(1 + again):
            lost = self.ledger.start(self.held[worker])
        self.held[worker] = [pair for pair in self.held[worker] if pair[1] not in lost]

    @rule(worker=st.sampled_from(["w1", "w2"]), left_s=st.sampled_from([None, -1e3, 0.0, 1e3]))
    def beat(self, worker: str, left_s: float | None) -> None:
        outlook = None if left_s is None else {token: (left_s, 1.0) for _, token in self.held[worker]}
        _, lost = self.ledger.beat(self.ledger.gen(), self.held[worker], lease_s=LEASE_S, outlook=outlook)
        self.held[worker] = [pair for pair in self.held[worker] if pair[1] not in lost]

    @precondition(lambda self: self.held["w1"] or self.held["w2"])
    @rule(worker=st.sampled_from(["w1", "w2"]), again=st.booleans())
    def publish(self, worker: str, again: bool) -> None:
        if self.held[worker]:
            u, token = self.held[worker].pop(0)
            answers = {self.ledger.publish(u, token, {"n": u}, size=10) for _ in range(1 + again)}
            assert len(answers) == 1

    @precondition(lambda self: self.held["w1"] or self.held["w2"])
    @rule(worker=st.sampled_from(["w1", "w2"]), failed=st.booleans(), again=st.booleans())
    def give_back(self, worker: str, failed: bool, again: bool) -> None:
        if self.held[worker]:
            u, token = self.held[worker].pop()
            for _ in range(1 + again):
                self.ledger.release(u, token, failed=("storage", "away") if failed else None)

    @rule(worker=st.sampled_from(["w1", "w2"]), seen=st.booleans(), ordinal=st.sampled_from([None, 0, 1]))
    def crash(self, worker: str, seen: bool, ordinal: int | None) -> None:
        """The worker dies, or is only believed to be dead: what it held may be published long after."""
        self.zombies += self.held[worker]
        self.held[worker] = []
        if seen:
            self.run.die(worker, ordinal)

    @precondition(lambda self: self.zombies)
    @rule(at=st.integers(0, 20))
    def a_zombie_publishes(self, at: int) -> None:
        u, token = self.zombies[at % len(self.zombies)]
        self.ledger.publish(u, token, {"n": u}, size=10)

    # the writer

    @rule(count=st.integers(1, 4))
    def read(self, count: int) -> None:
        found = self.ledger.results.read(self.read_from, count=count, block_ms=None)
        self.read_from = found[-1].id if found and self.read_from != ">" else ">"
        for entry in found:
            if not entry.fields:
                commit(self.run, (entry.receipt, None))
                continue
            u, token = int(entry.fields["u"]), entry.fields["token"].decode()
            if self.log.is_done(u):
                commit(self.run, (entry.receipt, u))
            elif u in self.buffer:
                if self.buffer[u][0] != entry.receipt:
                    commit(self.run, (entry.receipt, None))
            else:
                self.buffer[u] = (entry.receipt, token)

    @precondition(lambda self: self.buffer)
    @rule()
    def reject(self) -> None:
        u, (receipt, token) = self.buffer.popitem()
        if token == "quarantine":
            self.buffer[u] = (receipt, token)
        else:
            self.ledger.reject(receipt, u, token, "lost_result", "gone")

    @precondition(lambda self: self.buffer)
    @rule(killed=st.booleans(), again=st.booleans())
    def commit_buffer(self, killed: bool, again: bool) -> None:
        made = [
            CommittedUnit(u=u, unit_id="", token=token, first_row=0, rows=1, failures=0)
            for u, (_, token) in self.buffer.items()
        ]
        n = self.log.n + 1
        self.log.apply(
            Commit(n=n, run="r", kind="data", prev=self.log.prev, epoch=1, writer="w", version="", units=tuple(made))
        )
        if killed:
            self.writer_restarts()
            return
        for _ in range(1 + again):
            commit(self.run, *((receipt, u) for u, (receipt, _) in self.buffer.items()))
        self.buffer.clear()

    @rule()
    def writer_restarts(self) -> None:
        """As `RunWriter` does: forget what was read, mark what the log has, read again what was delivered."""
        self.buffer.clear()
        there = self.ledger.done_bits().ljust(1, b"\0")
        commit(self.run, *(("", u) for u in range(UNITS) if self.log.is_done(u) and not there[0] & (0x80 >> u)))
        self.ledger.results.make_group()
        self.read_from = "0"

    # what always holds

    @invariant()
    def nothing_is_forgotten_and_the_bytes_add_up(self) -> None:
        if self.key_lost:
            return
        meta = self.ledger.meta()
        hinted, due, done = scores(self.run, "hinted"), scores(self.run, "due"), self.ledger.done_bits()
        for u in range(int(meta["cursor"])):
            is_done = bool(done) and bool(done[0] & (0x80 >> u))
            assert is_done or u in hinted or u in due, f"unit {u} waits nowhere"
        waiting = self.run.client.xrange(self.run.key("res"))
        tokens = {fields[b"token"].decode() for _, fields in waiting} - {"quarantine"}
        assert all(token.startswith(f"{meta['gen']}:") for token in tokens), "a result from before the rebuild"
        assert int(meta["bytes"]) == sum(int(fields[b"bytes"]) for _, fields in waiting)
        owner, spare = table(self.run, "owner"), table(self.run, "spare")
        assert set(spare) <= set(owner) <= set(due)
        assert begun(self.run) <= {*owner.values(), *spare.values()}, "a lease that is gone counts as begun"
        assert all(int(attempts) >= 0 for attempts in table(self.run, "att").values())

    def teardown(self) -> None:
        """The run goes to its end, whatever happened, and every unit is done once."""
        self.held = {"w1": [], "w2": []}
        self.hints.clear()
        for _ in range(60):
            if self.log.count == UNITS and self.ledger.meta()["state"] == "done":
                break
            self.run.age()
            self.feed(5, True, True)
            while self.hints:
                self.take("w1", False)
            self.start("w1", False)
            while self.held["w1"]:
                self.publish("w1", False)
            self.read(100)
            self.read(100)
            if self.buffer:
                self.commit_buffer(False, False)
            elif self.key_lost:
                self.writer_restarts()
        assert self.log.count == UNITS
        assert self.ledger.meta()["state"] == "done"
        assert self.ledger.meta()["bytes"] == "0"


def test_whatever_happens_no_unit_is_committed_twice_and_all_are_in_the_end(
    client: redis.Redis, tmp_path: Path
) -> None:
    made: list[RunCase] = []

    def make() -> RunCase:
        made.append(make_case(client, tmp_path / f"m{len(made)}", UNITS))
        return made[-1]

    class Machine(LedgerMachine):
        pass

    Machine.make = staticmethod(make)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=30, stateful_step_count=40, derandomize=True, suppress_health_check=list(HealthCheck)
        ),
    )
    for run in made:
        client.delete(*run.ledger.keys)


def test_the_bound_of_waiting_results_is_the_documented_one(run: RunCase) -> None:
    assert int(run.ledger.meta()["limit_bytes"]) == LIMIT_BYTES
    assert set(load_scripts(run.client)) == set(SCRIPTS)


def test_of_nine_published_units_those_are_left_that_were_not_committed(make_run: MakeRun) -> None:
    run = make_run(9)
    run.build()
    tokens = {u: run.claim(u) for u in range(9)}
    assert (sorted(run.ledger.leased()), run.ledger.published()) == (list(range(9)), [])
    for u in (8, 1, 3, 5, 0, 7):
        assert run.publish(u, tokens[u]) is PublishVerdict.ACCEPTED
    assert sorted(run.ledger.leased()) == [2, 4, 6]
    assert sorted(run.ledger.published()) == [0, 1, 3, 5, 7, 8]
    receipts = {int(fields[b"u"]): receipt.decode() for receipt, fields in run.client.xrange(run.key("res"))}
    assert run.ledger.commit([(receipts[u], u) for u in (1, 7, 8)], rows=9, failures=0, quarantined=0, number=1) == 3
    assert sorted(run.ledger.leased()) == [2, 4, 6]
    assert sorted(run.ledger.published()) == [0, 3, 5]
    run.ledger.reject(receipts[3], 3, tokens[3], "bad_result", "no rows")
    assert sorted(run.ledger.published()) == [0, 5]
    left = {int(fields[b"u"]) for _, fields in run.client.xrange(run.key("res"))}
    assert left == {0, 5}
    assert run.ledger.done_bits() == bytes([0b01000001, 0b10000000])
