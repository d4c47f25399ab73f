"""The fleet page of real runs on a real broker: samples, history, live parts, permissions, and hostile data."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from html import unescape
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

import numpy as np
import pytest
import redis
from starlette.requests import Request

from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import Exit, OutputError
from embq.core.queue.heartbeats import SERVICE_REPORTS, WORKER_REPORTS, Device
from embq.core.queue.keys import INDEXING, SERVICES, service_key
from embq.core.queue.ledger import Ledger, new_token
from embq.core.queue.reporting import this_service
from embq.core.queue.runs import register
from embq.core.queue.scripts import load_scripts
from embq.core.rows.results import encode_result, row_schema
from embq.core.run.run_info import load_run
from embq.core.storage.durable import try_lock
from embq.core.units import Failure
from embq.index.index_files.files import index_lock, note
from embq.index.workers.builds import IndexBuild, IndexStage, announce
from embq.retrieval.serving.http_errors import HttpError
from embq.retrieval.ui.fleet import live as live_module
from embq.retrieval.ui.fleet.fragments import Fragments, limit_sentence, top_line
from embq.retrieval.ui.fleet.history import Histories, charts
from embq.retrieval.ui.fleet.live import MOST_STREAMS, Live
from embq.retrieval.ui.fleet.pages import FleetPages
from embq.retrieval.ui.fleet.run_list import RunQuery
from embq.retrieval.ui.fleet.snapshot import FleetSnapshot, Sampler
from embq.retrieval.ui.fleet.sources import BrokerSource, FolderSource, SeenBuild
from examples.demo.collect import photographs
from tests.e2e.served import Server, served
from tests.e2e.session import run_of, started
from tests.support.fakes.clock import FakeClock
from tests.support.outputs.build import build, write_jsonl, write_log, write_tar
from tests.support.outputs.run_case import DIM, RunCase, make_case
from tests.support.waiting import wait_until

T = TypeVar("T")

HOSTILE = '"><script>window.pwned=1</script><img src=x onerror=pwned=2>\u202egpj'


@pytest.fixture
def case(own_client: redis.Redis, tmp_path: Path) -> RunCase:
    case = make_case(own_client, tmp_path / "notes")
    register(own_client, case.record)
    return case


@pytest.fixture
def sampler(own_server: EmbeddedServer) -> Iterator[Sampler]:
    sampler = Sampler([BrokerSource(own_server.url)])
    yield sampler
    sampler.stop()


def commit(case: RunCase, *units: int, failed: int = 0) -> None:
    """Commit units, of which the first `failed` have a failure."""
    writer = case.writer()
    for number, u in enumerate(units):
        case.work_one(u, failed=[2] if number < failed else [])
    writer.step()
    case.clock.advance(31)
    writer.step()


def report_machine(client: redis.Redis, case: RunCase, host: str = "box", **device: object) -> str:
    """A machine with one device at work reports; gives the name of its service."""
    worker = f"{host}.cuda0.abc"
    late = {"causes": {"device": 0.9}, "stages": {"embed": {"busy": 0.9, "starved": 0.1}, "prepare": {"busy": 0.3}}}
    fields = {
        "name": worker,
        "host": host,
        "rows_per_s": 40.0,
        "held": 1,
        "unit": "d" * 32,
        "stage": "embed",
        "age_s": 4.0,
        "model": case.record.model.spec,
        "limit": "device",
        "attribution": {"threads": 1, "cores": 2, "decode": "", "late": late, "whole": {"limit": "device", **late}},
    }
    scripts = load_scripts(client)
    WORKER_REPORTS.report(client, fields, life_s=60, scripts=scripts)
    shown = {"device": "cuda:0", "name": "NVIDIA H100", "state": "serving", "worker": worker, **device}
    service = this_service("worker", version="0.1.0")
    service = type(service)(
        name=f"{host}.worker.abc",
        role="worker",
        host=host,
        pid=1,
        version="0.1.0",
        devices=(Device(**shown),),  # type: ignore[arg-type]
        cores=8,
    )
    SERVICE_REPORTS.report(client, service, life_s=60, scripts=scripts)
    return service.name


def seen_ago(client: redis.Redis, service: str, seconds: float) -> None:
    """A service has not reported for some time."""
    now_s, _ = client.time()
    client.zadd(SERVICES, {service: (int(now_s) - seconds) * 1000})


# --- samples ---


def test_a_sample_has_the_runs_the_machines_and_what_limits_them(
    case: RunCase, sampler: Sampler, own_client: redis.Redis
) -> None:
    commit(case, 0, 1, failed=1)
    report_machine(own_client, case, memory_used_bytes=30, memory_bytes=80)
    snapshot = sampler.sample()
    (run,) = snapshot.runs
    assert (run.progress.run, run.progress.rows, run.progress.failures) == (case.info.run, 5, 1)
    assert run.root == case.layout.root
    ((device,),) = (machine.devices for machine in snapshot.machines)
    assert (device.state, device.rows_per_s, device.busy, device.age_s) == ("serving", 40.0, 0.9, 4.0)
    assert (device.memory_used_bytes, device.memory_bytes) == (30, 80)
    figures = {one.label: one for one in top_line(snapshot)}
    assert figures["Failures"].value == "1"
    assert figures["Failures"].note.endswith("of 6 samples")
    assert "more to write" in figures["Disk"].note
    assert "with more than 3 such devices, preparing samples would be the limit" in limit_sentence(snapshot)


def test_a_machine_that_falls_silent_turns_grey_and_stays_when_it_is_gone(
    case: RunCase, sampler: Sampler, own_client: redis.Redis
) -> None:
    service = report_machine(own_client, case)
    fragments = Fragments(Histories())

    def card() -> str:
        return fragments.fleet(sampler.sample(), may_act=False)["machines"]

    assert 'data-state="serving"' in card()
    seen_ago(own_client, service, 12)
    assert 'card s-silent grey" data-device="cuda:0"' in card()
    own_client.delete(service_key(service))
    assert 'card s-lost grey" data-device="cuda:0"' in card()
    report_machine(own_client, case)
    assert 'data-state="serving"' in card()


def test_a_machine_that_ended_stays_for_a_minute_and_one_that_vanished_for_a_day(
    case: RunCase, own_server: EmbeddedServer, own_client: redis.Redis
) -> None:
    later = FakeClock()
    sampler = Sampler([BrokerSource(own_server.url)], clock=later)
    ended, vanished = (report_machine(own_client, case, host=host) for host in ("laptop", "server"))
    seen_ago(own_client, vanished, 12)
    sampler.sample()
    own_client.delete(service_key(ended), service_key(vanished))

    def gone(after_s: float) -> list[tuple[str, str]]:
        later.advance(after_s)
        return [(one.host, one.devices[0].state) for one in sampler.sample().machines]

    assert gone(5) == [("laptop", "ended"), ("server", "lost")]
    assert gone(60) == [("server", "lost")]
    assert gone(86_400) == []
    sampler.stop()


def test_the_rate_of_all_runs_is_over_the_time_that_is_named(case: RunCase, sampler: Sampler) -> None:
    commit(case, 0, 1)
    (run,) = sampler.sample().runs
    # One after the other: 50 rows/s for a minute, then 100 for another, is 75 over both, and not 50 / 2 + 100.
    runs = (replace(run, recent=(3_000, 120.0)), replace(run, recent=(6_000, 60.0)))
    figure = next(one for one in top_line(replace(sampler.sample(), runs=runs)) if one.label.startswith("Rows/s"))
    assert (figure.label, figure.value) == ("Rows/s over 2 min", "75.0")


def test_a_run_without_workers_says_which_command_goes_on_with_it(case: RunCase, sampler: Sampler) -> None:
    def shown(snapshot: FleetSnapshot) -> tuple[str, str]:
        parts = Fragments(Histories()).run(snapshot, case.info.run, may_act=False)
        assert parts is not None
        return limit_sentence(snapshot), parts["head"]

    sentence, head = shown(sampler.sample())
    assert sentence == "No worker serves these runs; `embq worker` starts one."
    assert "<code>embq worker</code>" in head
    alone = Sampler([FolderSource(case.layout.root)])
    sentence, head = shown(alone.sample())
    assert sentence == "Nothing is at work: 1 interrupted."
    assert f"<code>embq resume {case.layout.root}</code>" in head
    assert 'class="state s-interrupted"' in head
    alone.stop()


def test_a_broker_that_is_away_is_told_and_the_page_goes_on_by_itself(
    case: RunCase, own_server: EmbeddedServer, own_client: redis.Redis, sampler: Sampler
) -> None:
    commit(case, 0)
    report_machine(own_client, case)
    assert not sampler.sample().troubles
    own_server.stop()
    snapshot = sampler.sample()
    assert "does not answer since" in snapshot.troubles[0]
    assert [one.progress.rows for one in snapshot.runs] == [3]
    assert [device.state for machine in snapshot.machines for device in machine.devices] == ["serving"]
    assert "does not answer" in Fragments(Histories()).fleet(snapshot, may_act=False)["banner"]
    own_server.start()
    register(own_client, case.record)
    assert not sampler.sample().troubles


def test_a_folder_shows_its_runs_without_a_broker(tmp_path: Path) -> None:
    root = build(tmp_path / "deep" / "texts", [write_jsonl(tmp_path / "t.jsonl", [{"text": "a"}, {"text": ""}])])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{}")
    sampler = Sampler([FolderSource(tmp_path)])
    (run,) = sampler.sample().runs
    assert (run.root, run.progress.state, run.progress.rows, run.progress.failures) == (root, "done", 1, 1)
    sampler.stop()


def test_runs_are_found_by_text_state_age_and_the_part_of_their_path_that_differs(
    own_client: redis.Redis, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", [{"text": "a"}])
    roots = [build(tmp_path / name, [source]) for name in ("a/out", "b/out", "last")]
    for root, created in zip(roots, ("2026-03-01T10:00:00+00:00", "2026-03-02T10:00:00+00:00", "?"), strict=True):
        path = Path(str(root)) / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"created": created}))
    make_case(own_client, tmp_path / "c" / "begun")
    sampler = Sampler([FolderSource(tmp_path)], clock=lambda: datetime(2026, 3, 2, 13, 20, tzinfo=UTC).timestamp())
    snapshot = sampler.sample()

    def shown(**query: str) -> list[str]:
        runs = Fragments(Histories()).fleet(snapshot, RunQuery.of(query), may_act=False)["runs"]
        return re.findall(r'class="name".*?<b><bdi>(.*?)</bdi>', runs)

    begun = ["begun"]
    assert shown() == shown(sort="age") == ["b/out", "a/out", *begun, "last"]
    assert shown(sort="name") == ["a/out", "b/out", "begun", "last"]
    assert shown(sort="state") == [*begun, "b/out", "a/out", "last"]
    assert shown(state="interrupted") == begun
    assert shown(text="B/OUT") == ["b/out"]
    assert shown(text="nowhere") == []
    assert shown(state="<script>", sort="-", start="x") == shown()
    runs = Fragments(Histories()).fleet(snapshot, may_act=False)["runs"]
    assert '<span title="2026-03-02 10:00 UTC">3 h ago</span>' in runs
    sampler.stop()


def test_every_one_of_many_runs_is_on_one_of_the_pages(case: RunCase, sampler: Sampler) -> None:
    (run,) = sampler.sample().runs
    many = [replace(run, progress=replace(run.progress, run=f"{n:016x}", output=f"/r/{n:03}")) for n in range(120)]
    snapshot = replace(sampler.sample(), runs=tuple(many))
    seen, address = [], "?sort=name"
    while address:
        query = RunQuery.of(dict(parse_qsl(address[1:])))
        runs = Fragments(Histories()).fleet(snapshot, query, may_act=False)["runs"]
        seen += re.findall(r'id="run-(\w+)"', runs)
        following = re.search(r'href="/fleet([^"]*)">Next', runs)
        address = unescape(following[1]) if following else ""
    assert seen == [one.progress.run for one in many]


@pytest.mark.slow
def test_a_run_with_a_private_broker_is_live_while_it_is_at_work(tmp_path: Path, short_tmp: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", [{"id": str(n), "text": f"text {n}"} for n in range(2_000)])
    root = short_tmp / "out"
    arguments = ("run", source, "-o", root, "-m", "stub:4?ms_per_sample=8", "--unit-size", "20", "--devices", "cpu")
    sampler = Sampler([FolderSource(short_tmp)])

    def at_work() -> bool:
        snapshot = sampler.sample()
        devices = [device for machine in snapshot.machines for device in machine.devices]
        return any(device.rows_per_s for device in devices) and snapshot.runs[0].progress.in_flight > 0

    with started(*arguments) as command:
        wait_until(at_work)
        assert sampler.registered(run_of(root)) is not None
        command.signal(signal.SIGINT)
        command.wait()
    (run,) = sampler.sample().runs
    assert (run.client, run.progress.in_flight) == (None, 0)
    assert (run.state, run.command) == ("interrupted", f"embq resume {root}")
    assert sampler.registered(run_of(root)) is None
    sampler.stop()


def test_the_history_and_the_map_are_drawn_from_the_log_again_after_a_restart(case: RunCase, sampler: Sampler) -> None:
    for u in range(4):
        commit(case, u, failed=1 if u == 2 else 0)
    (view,) = sampler.sample().runs
    before, after = (charts(view, Histories(), []) for _ in range(2))
    assert before == after
    assert before["complete"]
    assert (before["commits"]["rows"][-1], before["commits"]["failures"][-1]) == (11, 1)
    assert before["commits"]["rows"] == sorted(before["commits"]["rows"])
    assert before["commits"]["at"][-1] == pytest.approx(time.time(), abs=60)
    parts = Fragments(Histories()).run(sampler.sample(), case.info.run, may_act=False)
    assert parts is not None
    assert '<path class="failures" d="M2 0h' in parts["units"]
    assert '<path class="done"' in parts["units"]


# --- over HTTP ---


@pytest.fixture
def server(case: RunCase, own_server: EmbeddedServer, tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "served"
    folder.mkdir()
    arguments = (folder, "--no-model", "--allow-actions")
    with served(*arguments, verb="ui", EMBQ_BROKER_URL=own_server.url) as server:
        yield server


def token_of(server: Server) -> str:
    wait_until(lambda: "?token=" in server.command.stderr)
    return server.command.stderr.split("?token=")[1].split()[0]


def permitted(server: Server) -> dict[str, str]:
    """Headers of a browser that has come with the token, on a page of this server."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request("GET", f"/fleet?token={token_of(server)}")
    answer = connection.getresponse()
    assert (answer.status, answer.headers["location"]) == (303, "/fleet")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    connection.close()
    return {"Cookie": cookie.partition(";")[0], "Origin": server.url}


def test_actions_need_the_token_and_a_page_of_this_server(
    server: Server, case: RunCase, own_client: redis.Redis
) -> None:
    case.build()
    good, path = permitted(server), f"/ui/runs/{case.info.run}/pause"
    assert server.ask("/fleet?token=wrong").status == 403
    for headers in (
        {},
        {"Origin": good["Origin"]},
        {"Cookie": good["Cookie"]},
        {**good, "Origin": "http://evil.example"},
        {**good, "Origin": "null"},
        {**good, "Cookie": good["Cookie"][:-1] + ("y" if good["Cookie"].endswith("x") else "x")},
    ):
        assert server.ask(path, data=b"x=1", **headers).status == 403
    assert case.ledger.meta()["state"] == "running"
    assert server.ask("/ui/runs/ffffffffffffffff/pause", data=b"x=1", **good).status == 404
    assert server.ask(f"/ui/runs/{case.info.run}/explode", data=b"x=1", **good).status == 404
    assert server.ask(path, data=b"x" * 5_000, **good).status == 413
    assert b"hx-post" not in server.ask("/fleet").data
    assert b"hx-post" in server.ask("/fleet", Cookie=good["Cookie"]).data


def test_a_server_without_actions_has_no_buttons_and_refuses_all(
    case: RunCase, own_server: EmbeddedServer, tmp_path: Path
) -> None:
    case.build()
    with served(tmp_path, "--no-model", verb="ui", EMBQ_BROKER_URL=own_server.url) as server:
        assert "token" not in server.command.said
        assert server.ask("/fleet?token=x").status == 403
        assert b"hx-post" not in server.ask("/fleet").data
        answer = server.ask(f"/ui/runs/{case.info.run}/cancel", data=b"x=1", Origin=server.url)
        assert answer.status == 403
        assert b"--allow-actions" in answer.data
    assert case.ledger.meta()["state"] == "running"


def test_a_retry_needs_the_count_that_was_shown(tmp_path: Path) -> None:
    lines = [{"id": str(number), "text": f"text {number}" if number % 4 else ""} for number in range(12)]
    source = write_jsonl(tmp_path / "t.jsonl", lines)
    root = build(tmp_path / "texts", [source])
    run = load_run(root).run
    with served(root, "--no-model", "--allow-actions", verb="ui") as server:
        good = permitted(server)
        assert b"Retry" in server.ask(f"/ui/fleet/failures/{run}", Cookie=good["Cookie"]).data
        assert b"Retry" not in server.ask(f"/ui/fleet/failures/{run}").data
        write_jsonl(source, [{**one, "text": one["text"] or "mended"} for one in lines])
        path = f"/ui/runs/{run}/retry"
        shown = server.ask(path, data=urlencode({"code": "empty_text"}).encode(), **good)
        assert shown.status == 200
        assert b"3 failures would be done again" in shown.data
        assert load_run(root).added == ()
        for count in ("2", "-3", "x"):
            refused = server.ask(path, data=urlencode({"expected_count": count}).encode(), **good)
            assert refused.status == 409, refused.data
        assert load_run(root).added == ()
        done = server.ask(path, data=urlencode({"code": "empty_text", "expected_count": "3"}).encode(), **good)
        assert done.status == 200
        assert b"embq resume" in done.data
    (added,) = load_run(root).added
    assert added.is_retry


def test_each_failure_group_shows_the_picture_the_text_or_the_first_bytes_of_a_sample(tmp_path: Path) -> None:
    (_, photograph), (_, other) = photographs(2, seed=3)
    page = b"<html><script>alert(1)</script></html>"
    members = [("a.jpg", photograph), ("a.txt", b"a"), ("b.jpg", other), ("b.txt", b" "), ("c.jpg", page)]
    shard = write_tar(tmp_path / "s.tar", [*members, ("a.jpg", other), ("a.txt", b"again")])
    texts = write_jsonl(tmp_path / "t.jsonl", [{"id": "x", "text": "<b>half \ud83d a pair</b>"}])
    pairs = build(tmp_path / "out" / "pairs", [shard], modalities=("image", "text"))
    notes = build(tmp_path / "out" / "texts", [texts])
    with served(tmp_path / "out", "--no-model", verb="ui") as server:

        def shown(root: Path) -> dict[str, bytes]:
            groups = server.ask(f"/ui/fleet/failures/{load_run(root).run}").data.decode()
            found = re.findall(r'<code>(\w+)</code>.*?hx-get="(/ui/fleet/sample/[^"]+)"', groups, re.DOTALL)
            return {code: server.ask(path).data for code, path in found}

        of_pairs, of_texts = shown(pairs), shown(notes)
        assert server.ask(f"/ui/fleet/sample/{load_run(notes).run}/{'0' * 32}/0").data.count(b"no failure group") == 1
    assert b'src="data:image/jpeg;base64,' in of_pairs["empty_text"]
    assert b"38 bytes" in of_pairs["missing_member"]
    assert b"of type text: 3c 68 74 6d 6c 3e" in of_pairs["missing_member"]
    assert b"&lt;html&gt;" in of_pairs["missing_member"]
    assert b"&#39;" not in of_pairs["missing_member"], "a text of Python"
    assert b"data:" not in of_pairs["duplicate_key"], "its key has the picture of another sample"
    assert b"&lt;b&gt;half \\ud83d a pair&lt;/b&gt;" in of_texts["text_not_utf8"]


def test_hostile_names_and_messages_are_texts_and_short(
    server: Server, case: RunCase, own_client: redis.Redis, tmp_path: Path
) -> None:
    odd = make_case(own_client, tmp_path / HOSTILE.replace("/", "_"), 1)
    register(own_client, odd.record)
    writer = odd.writer()
    failure = Failure(ordinal=0, key=HOSTILE * 9, code="decode", message=HOSTILE + "y" * 10_000_000)
    others = [Failure(ordinal=ordinal, key="k", code="decode", message="m") for ordinal in (1, 2)]
    schema = row_schema(("text",), {"text": DIM}, odd.record.rows)
    data = encode_result([], {}, [failure, *others], schema, odd.record.rows.columns)
    odd.work_one(0, failed=[0, 1, 2], data=data)
    writer.step()
    odd.clock.advance(31)
    writer.step()
    report_machine(own_client, case, host=HOSTILE, name=HOSTILE, why=HOSTILE * 20)
    pages = [
        server.ask(path).data.decode()
        for path in ("/fleet", f"/fleet/{odd.info.run}", f"/ui/fleet/failures/{odd.info.run}")
    ]
    wait_until(lambda: "pwned" in server.ask("/fleet").data.decode())
    for page in [*pages, server.ask("/fleet").data.decode()]:
        assert "<script>window" not in page
        assert "<img src=x" not in page
        assert "\u202e" not in page
        assert len(page) < 60_000
    assert "window.pwned=1" in pages[2]
    assert "y" * 1_000 not in pages[2]


def test_a_run_that_nobody_knows_is_a_page_that_says_so(server: Server) -> None:
    answer = server.ask("/fleet/<script>", Accept="text/html")
    assert answer.status == 404
    assert b"there is no run" in answer.data
    assert b"<script>" not in answer.data.replace(b"<script src", b"")
    assert server.ask("/ui/fleet/history/0123456789abcdef").status == 404


# --- the stream ---


def awaited(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, in a thread: the loop of a browser of other tests may run in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def events_of(server: Server, path: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    assert answer.headers["content-type"].startswith("text/event-stream")
    return connection, answer


def names_until(answer: http.client.HTTPResponse, last: str) -> list[str]:
    """Names of the events up to one of a name."""
    found: list[str] = []
    while last not in found:
        line = answer.readline().decode()
        assert line, f"the stream ended before {last}"
        if line.startswith("event: "):
            found.append(line.split()[1])
    return found


def test_the_stream_has_all_parts_first_and_then_those_that_change_until_the_server_stops(
    server: Server, case: RunCase
) -> None:
    connection, answer = events_of(server, "/ui/fleet/events")
    assert answer.readline() == b"retry: 2000\n"
    assert names_until(answer, "machines") == ["banner", "top", "stages", "runs", "builds", "machines"]
    commit(case, 0, 1)
    later = names_until(answer, "runs")
    assert "machines" not in later
    began = time.monotonic()
    server.command.signal(signal.SIGTERM)
    while answer.readline():
        pass
    assert server.command.wait() == 0
    assert time.monotonic() - began < 10
    connection.close()


def test_parts_are_made_once_for_all_viewers(case: RunCase, sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    fragments = Fragments(Histories())
    whole = fragments.fleet
    monkeypatch.setattr(fragments, "fleet", lambda *args, **kw: made.append(1) or whole(*args, **kw))
    live = Live(sampler, fragments)
    sampler.first(10)

    async def viewed() -> list[bytes]:
        streams = [live.stream("", may_act=False) for _ in range(50)]
        await asyncio.gather(*(anext(one) for one in streams))
        first = await asyncio.gather(*(anext(one) for one in streams))
        for one in streams:
            await one.aclose()  # type: ignore[attr-defined]
        return first

    first = awaited(viewed())
    assert len(first) == 50
    assert len(made) <= 3, "a sample may come meanwhile"
    assert live.streams == 0


def test_a_stream_without_changes_has_comments_though_samples_go_on(
    case: RunCase, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "QUIET_S", 0.5)
    fragments = Fragments(Histories())
    monkeypatch.setattr(fragments, "fleet", lambda *_, **__: {"runs": "the same"})
    first = sampler.first(10)
    assert first is not None

    async def viewed() -> list[bytes]:
        stream = Live(sampler, fragments).stream("", may_act=False)
        found = [await anext(stream) for _ in range(4)]
        await stream.aclose()  # type: ignore[attr-defined]
        return found

    resample = threading.Thread(target=lambda: [(sampler.sample(), time.sleep(0.05)) for _ in range(30)])
    resample.start()
    try:
        assert awaited(asyncio.wait_for(viewed(), 20))[2:] == [b":\n\n", b":\n\n"]
        assert resample.is_alive(), "samples came all the time"
    finally:
        resample.join()


def test_streams_above_the_limit_are_refused(case: RunCase, own_server: EmbeddedServer) -> None:
    pages = FleetPages([BrokerSource(own_server.url)])
    pages._live.streams = MOST_STREAMS
    request = Request({"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": []})
    with pytest.raises(HttpError) as refused:
        awaited(pages.events(request))
    assert refused.value.status == 503
    pages.stop()


# --- logs ---


def test_the_page_of_a_run_has_the_last_lines_of_each_service_with_their_levels(tmp_path: Path) -> None:
    root = build(tmp_path / "out", [write_jsonl(tmp_path / "t.jsonl", [{"text": "a"}])])
    info = load_run(root)
    with served(tmp_path, "--no-model", verb="ui") as server:

        def logs() -> str:
            answer = server.ask(f"/ui/fleet/logs/{info.run}")
            assert answer.status == 200
            return answer.data.decode()

        assert "docker compose logs" in logs()
        write_log(root, "worker", *(f"2026-01-01T00:00:00Z info worker line {n}" for n in range(10_000)))
        write_log(root, "worker", "2026-01-01T00:00:01Z error worker bug", "  Traceback", f"error[x]: {HOSTILE}")
        write_log(root, "writer", "2026-01-01T00:00:02Z warning writer redis://user:secret@box")
        shown = logs()
        assert len(re.findall(r"<span class", shown)) == 101
        assert '<span class="info">2026-01-01T00:00:00Z info worker line 9999' in shown
        assert '<span class="error">  Traceback' in shown
        assert "<script" not in shown
        assert "<img" not in shown
        assert "\u202e" not in shown
        assert "secret" not in shown
        assert '<span class="warning">2026-01-01T00:00:02Z warning writer redis://user:****@box' in shown
        assert f"embq logs {root}" in shown
        (root / "_logs" / "producer.log").symlink_to("/etc/passwd")
        assert "root:" not in logs()


def test_new_lines_of_a_log_are_an_event_of_its_run(tmp_path: Path) -> None:
    root = build(tmp_path / "out", [write_jsonl(tmp_path / "t.jsonl", [{"text": "a"}])])
    sampler = Sampler([FolderSource(tmp_path)])

    def stamp() -> str:
        parts = Fragments(Histories()).run(sampler.sample(), load_run(root).run, may_act=False)
        assert parts is not None
        return parts["logs"]

    assert stamp() == ""
    write_log(root, "writer", "first")
    first = stamp()
    write_log(root, "writer", "second")
    assert stamp() not in ("", first)
    sampler.stop()


# --- index builds ---


def is_begun(build: SeenBuild) -> bool:
    """Whether a build runs and has recorded its own beginning, in place of the attempt before it."""
    return build.state == "running" and not build.attempt.error


def builds_of(*sources: BrokerSource | FolderSource) -> tuple[list[SeenBuild], str]:
    """The builds in sources, and what the page says of them."""
    sampler = Sampler(sources)
    snapshot = sampler.sample()
    sampler.stop()
    return list(snapshot.builds), Fragments(Histories()).fleet(snapshot, may_act=False)["builds"]


def test_a_build_that_fails_or_is_killed_says_so_with_the_command_until_one_succeeds(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(2_000, 16)).astype(np.float32)
    vectors[7] = np.nan
    folder = tmp_path / "<b>vectors"
    folder.mkdir()
    np.save(folder / "img_emb.npy", vectors)
    assert builds_of(FolderSource(folder)) == ([], "")
    with started("index", folder, "--quiet") as command:
        assert command.wait() == Exit.BAD_INPUT
    ((build,), shown) = builds_of(FolderSource(folder))
    assert (build.state, build.attempt.stages["sample"]) == ("failed", (1, 1))
    assert list(build.attempt.stages) == ["sample", "train", "queries", "truth", "add", "merge", "tune"]
    assert "1 of 2,000 vectors" in shown
    assert "--drop-invalid" in shown
    assert f"<code>embq index '{folder}' --quiet</code>" in unescape(shown)
    assert "<b>vectors" not in shown

    vectors[7] = 1
    np.save(folder / "img_emb.npy", vectors)
    with started("index", folder, "--quiet") as command:
        wait_until(lambda: is_begun(builds_of(FolderSource(folder))[0][0]))
        command.signal(signal.SIGKILL)
        command.wait()
    ((build,), shown) = builds_of(FolderSource(folder))
    assert (build.state, build.attempt.error) == ("interrupted", "")
    assert "To go on with it: <code>embq index" in shown
    with started("index", "<b>vectors", "--quiet", cwd=tmp_path) as command:
        assert command.wait() == Exit.DONE
    assert builds_of(FolderSource(folder)) == ([], "")


def test_a_look_at_a_build_keeps_nobody_from_the_index(tmp_path: Path) -> None:
    with index_lock(tmp_path):
        pass
    look = open(tmp_path / "_lock", "rb")  # noqa: SIM115 - the timer closes it
    assert try_lock(look, shared=True)
    threading.Timer(0.03, look.close).start()
    with index_lock(tmp_path):
        pass


def test_a_build_on_workers_is_shown_from_the_broker_and_waits_without_them(
    own_server: EmbeddedServer, own_client: redis.Redis, tmp_path: Path
) -> None:
    index = tmp_path / "index"
    record = IndexBuild(index=str(index), build="b", folder=str(index / "_work/b"), nonce="n", memory_bytes=1)
    announce(own_client, IndexStage(build=record, stage="add", run="a" * 32))
    ledger = Ledger(own_client, "a" * 32)
    ledger.rebuild(gen="g", total=12, done=b"\xc0", counters={})
    source = BrokerSource(own_server.url)
    ((build,), shown) = builds_of(source)
    assert (build.state, build.attempt.stages) == ("waiting", {"add": (2, 12)})
    assert "adding rows: 2 of 12" in shown
    assert "<code>embq worker</code>" in shown
    ledger.claim(3, new_token("g", "worker"), lease_s=60, fingerprint="")
    with index_lock(index):
        note(index, stages={"sample": (1, 1), "add": (2, 12)})
        ((build,), shown) = builds_of(source)
        assert (build.state, list(build.attempt.stages)) == ("running", ["sample", "add"])
    with pytest.raises(OutputError), index_lock(index):
        raise OutputError("the disk is full", next_step="make room")
    own_client.delete(INDEXING)
    ((build,), shown) = builds_of(source)
    assert build.state == "failed"
    assert "the disk is full" in shown
    with index_lock(index):
        pass
    assert builds_of(source) == ([], "")
