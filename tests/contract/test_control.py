"""A run is paused, resumed, cancelled and given another weight: broker, output folder, feeder and writer agree."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import redis

from embq.app.status.run_control import request
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import OutputError
from embq.core.queue.keys import RUNS
from embq.core.queue.ledger import new_token
from embq.core.queue.result_stream import PublishVerdict
from embq.core.queue.runs import Backlog, register
from embq.core.run.control import Control, RunState, load_control, save_control
from embq.writer.service import WriterService
from tests.support.outputs.run_case import FINGERPRINT, LEASE_S, RunCase, make_case


def beat(run: RunCase, *held: tuple[int, str]) -> tuple[str, set[str]]:
    return run.ledger.beat(run.gen, held, lease_s=LEASE_S)


def attempts(run: RunCase, u: int) -> int:
    return int(run.client.hget(run.key("att"), u) or 0)


def test_a_paused_run_is_neither_hinted_nor_claimed(run: RunCase) -> None:
    run.build()
    assert run.ledger.request({"state": "paused"}) == {"state": "paused", "priority": "10"}
    assert run.feeder().tick() == 0
    claim = run.ledger.claim(0, new_token(run.gen, "w"), lease_s=LEASE_S, fingerprint=FINGERPRINT)
    assert (claim.word, claim.detail) == ("state", "paused")


def test_begun_units_of_a_paused_run_are_finished_and_others_go_back_uncharged(run: RunCase) -> None:
    run.build()
    begun, by_start, by_beat = run.claim(0), run.claim(1, started=False), run.claim(2, started=False)
    run.ledger.request({"state": "paused"})
    assert run.ledger.start([(0, begun), (1, by_start)]) == {by_start}
    assert run.ledger.start([(0, begun), (1, by_start)]) == {by_start}, "sent twice"
    assert beat(run, (0, begun), (2, by_beat)) == ("paused", {by_beat})
    assert run.publish(0, begun) is PublishVerdict.ACCEPTED
    assert [attempts(run, u) for u in (0, 1, 2)] == [1, 0, 0]
    assert run.client.hlen(run.key("owner")) == 0
    run.ledger.request({"state": "running"})
    assert run.feeder().tick() == 7
    assert sorted({hint.u for _ in range(7) if (hint := run.pop())}) == [1, 2, 3, 4, 5, 6, 7]


def test_a_cancelled_run_holds_nothing_and_its_workers_are_told(run: RunCase) -> None:
    run.build()
    begun, claimed, published = run.claim(0), run.claim(1, started=False), run.claim(2)
    assert run.publish(2, published) is PublishVerdict.ACCEPTED
    run.ledger.request({"state": "cancelled"})
    run.ledger.request({"state": "cancelled"})
    assert beat(run, (0, begun), (1, claimed)) == ("cancelled", {begun, claimed})
    assert run.publish(0, begun) is PublishVerdict.LOST
    assert attempts(run, 0) == 0
    run.ledger.request({"state": "running"})
    run.feeder().tick()
    assert sorted({hint.u for _ in range(8) if (hint := run.pop())}) == [0, 1, 3, 4, 5, 6, 7]


def test_a_run_that_was_charged_before_it_was_cancelled_keeps_its_charges(run: RunCase) -> None:
    run.build()
    run.claim(0, "w")
    run.die("w")
    run.claim(0)
    run.ledger.request({"state": "cancelled"})
    assert attempts(run, 0) == 1


def test_every_change_ends_exact(run: RunCase) -> None:
    writer = run.writer()
    feeder = run.feeder()
    for state in ("paused", "running", "cancelled", "running", "paused", "cancelled", "running"):
        feeder.tick()
        for _ in range(2):
            if (hint := run.pop()) is not None:
                token = new_token(hint.gen, "w")
                if run.ledger.claim(hint.u, token, lease_s=LEASE_S, fingerprint=FINGERPRINT).granted:
                    run.ledger.start([(hint.u, token)])
                    if hint.u % 2:
                        run.publish(hint.u, token)
        run.ledger.request({"state": state})
        run.clock.advance(1)
        writer.step()
        assert load_control(run.layout).state == state
    run.age()
    run.finish(writer)
    run.assert_exact()


def test_what_was_asked_for_is_in_the_folder_before_the_broker_forgets_that_it_was_asked(run: RunCase) -> None:
    writer = run.writer()
    run.ledger.request({"state": "paused", "priority": "70"})
    assert run.ledger.requested() == {"state": "paused", "priority": "70"}
    run.clock.advance(1)
    writer.step()
    assert run.ledger.requested() == {}
    assert load_control(run.layout) == Control(state="paused", priority=70)


def test_a_paused_run_is_paused_after_the_broker_lost_everything(run: RunCase) -> None:
    writer = run.writer()
    feeder = run.feeder()
    feeder.tick()
    run.ledger.request({"state": "paused", "priority": "70"})
    run.clock.advance(1)
    writer.step()
    feeder.tick()
    run.client.delete(*run.ledger.keys)
    run.client.hdel(RUNS, run.info.run)
    feeder.tick()
    assert run.client.hexists(RUNS, run.info.run), "it is announced again"
    run.clock.advance(3)
    writer.step()
    meta = run.ledger.meta()
    assert (meta["state"], meta["priority"]) == ("paused", "70")


def test_a_broker_that_lost_its_last_second_is_put_right(run: RunCase) -> None:
    writer = run.writer()
    save_control(run.layout, Control(state=RunState.PAUSED))
    writer = run.writer()
    run.client.hset(run.key("meta"), "state", "running")
    run.clock.advance(3)
    writer.step()
    assert run.ledger.meta()["state"] == "paused"


def test_a_wish_that_no_writer_saw_is_noted_by_the_next_one_before_anything_is_built(run: RunCase) -> None:
    run.ledger.request({"state": "paused"})
    run.writer()
    assert run.ledger.meta()["state"] == "paused"
    assert load_control(run.layout).state == "paused"
    assert run.ledger.requested() == {}


def test_what_is_asked_while_another_wish_is_being_noted_stands(run: RunCase) -> None:
    run.build()
    run.ledger.request({"state": "paused"})
    run.ledger.request({"state": "running"})
    run.ledger.restore(Control(state="paused"))
    assert run.ledger.meta()["state"] == "running"
    assert run.ledger.requested() == {"state": "running"}


def test_a_run_that_is_done_stays_done(run: RunCase) -> None:
    run.build(done=b"\xff")
    assert run.ledger.request({"state": "paused"})["state"] == "done"
    assert run.ledger.requested() == {}


def test_the_priority_of_a_run_that_is_done_counts_when_units_are_added(run: RunCase) -> None:
    run.build(done=b"\xff")
    run.ledger.request({"state": "paused", "priority": "40"})
    assert run.ledger.requested() == {"priority": "40"}
    run.writer()
    assert load_control(run.layout) == Control(priority=40)


def test_a_run_whose_last_units_end_while_it_is_paused_is_done(run: RunCase) -> None:
    writer = run.writer()
    tokens = [run.claim(u) for u in range(8)]
    run.ledger.request({"state": "paused"})
    for u, token in enumerate(tokens):
        assert run.publish(u, token) is PublishVerdict.ACCEPTED
    writer.drain()
    assert writer.finished
    assert run.ledger.meta()["state"] == "done"
    run.assert_exact()


def test_the_writer_of_all_runs_lets_a_cancelled_one_go_and_takes_it_up_again(run: RunCase) -> None:
    register(run.client, run.record)
    daemon = WriterService(run.client, version="test")
    rounds = iter(range(1000))
    seen: list[bool] = []

    def looked() -> bool:
        number = next(rounds)
        seen.append(run.info.run in daemon.runs)
        if number == 3:
            run.work_one(0)
            run.ledger.request({"state": "cancelled"})
        if len(seen) > 4 and not seen[-1] and "asked" not in state:
            state["asked"] = len(seen)
            assert run.committed_units() == [0], "what was published before is kept"
            run.ledger.request({"state": "running"})
        return "asked" in state and seen[-1] and len(seen) > state["asked"] + 1

    state: dict[str, int] = {}
    daemon.serve(looked)
    assert "asked" in state, "it was never let go"


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel"])
def test_a_request_for_a_run_that_is_done_has_no_effect_and_says_so(
    run: RunCase, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.finish(run.writer())
    result = request(run.record, run.client, verb)
    assert (result.state, result.done) == (RunState.DONE, len(run.units))
    result.print(verb, "goes on", as_json=False)
    assert capsys.readouterr().out == f"run {run.info.run} is done; there is nothing to {verb}\n"


@pytest.mark.parametrize("raw", [None, b"", b"asleep", b"\xff", b"Done"])
def test_a_state_that_embq_does_not_write_is_that_of_a_run_without_a_queue(run: RunCase, raw: bytes | None) -> None:
    assert RunState.read(raw) is RunState.ABSENT
    assert not RunState.read(raw).ended
    run.build()
    run.client.hset(run.key("meta"), "state", raw or "")
    values = run.client.hmget(run.key("meta"), Backlog.FIELDS)
    assert Backlog.of(run.info.run, values).state is RunState.ABSENT
    assert run.feeder().tick() == 0


def test_a_writer_that_is_to_end_notes_what_was_asked_for_a_moment_ago(run: RunCase) -> None:
    writer = run.writer()
    run.ledger.request({"state": "cancelled"})
    writer.drain()
    assert load_control(run.layout).state == "cancelled"


@pytest.mark.parametrize("noted", [True, False])
def test_who_cancels_a_run_whose_broker_ends_with_it_is_told_what_stands_in_the_folder(
    own_server: EmbeddedServer, own_client: redis.Redis, tmp_path: Path, noted: bool
) -> None:
    run = make_case(own_client, tmp_path / "out")
    writer = run.writer()
    run.work_one(0)
    writer.drain()

    def the_session_ends() -> float:
        if run.ledger.requested() and own_server.running():
            if noted:
                writer.drain()
            own_server.stop()
        return 0.0

    looks = iter([lambda: 0.0, the_session_ends])
    with connect(own_server.url) as client:
        if noted:
            asked = request(run.record, client, "cancel", clock=lambda: next(looks)())
            assert (asked.state, asked.noted, asked.done) == ("cancelled", True, 1)
        else:
            with pytest.raises(redis.exceptions.ConnectionError):
                request(run.record, client, "cancel", clock=lambda: next(looks)())


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": 2, "state": "paused", "priority": 10}'])
def test_a_file_that_cannot_be_understood_is_an_error_with_its_name(run: RunCase, text: str) -> None:
    run.layout.control.write_text(text)
    with pytest.raises(OutputError, match=r"control\.json"):
        load_control(run.layout)


def test_a_file_on_a_failing_disk_is_not_to_be_removed(run: RunCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may say that the run is paused, and a run without it goes on."""
    save_control(run.layout, Control(state=RunState.PAUSED))

    def failing(*_: object, **__: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(run.layout.control))

    monkeypatch.setattr("embq.core.run.control.read_bytes", failing)
    with pytest.raises(OutputError, match=r"control\.json cannot be read: Input/output error$") as failed:
        load_control(run.layout)
    assert "remove" not in failed.value.next_step


def test_a_folder_without_the_file_is_a_run_that_goes_on(run: RunCase) -> None:
    assert load_control(run.layout) == Control()


def test_wishes_that_make_no_sense_change_nothing() -> None:
    assert Control().with_changes({"state": "asleep", "priority": "0"}) == Control()
    assert Control().with_changes({"priority": "101"}) == Control()
