"""Progress on a terminal, in a log and in `embq status`."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from embq.app.local.session import summary_lines
from embq.app.status.broker_snapshot import BrokerSnapshot, Reports
from embq.app.status.display import panel
from embq.app.status.fleet import FleetStatus
from embq.app.status.overview import Overview
from embq.app.status.run_progress import RunCounts, RunProgress, derive_progress
from embq.core.models import ModelConfig
from embq.core.queue.heartbeats import Device, Heard, Service
from embq.core.run.control import Control, RunState
from embq.core.service.progress_line import ProgressLine, duration, folded, moment, size_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_replaced() -> None:
    stream = Terminal()
    with ProgressLine(stream=stream) as line:
        line.show("1 of 2")
        assert not line.due
        line.say("a warning")
    assert stream.getvalue() == "\r\x1b[K1 of 2\r\x1b[Ka warning\n"


def test_a_log_has_a_line_only_when_one_is_due() -> None:
    stream = io.StringIO()
    with ProgressLine(stream=stream) as line:
        line.show("too early")
        line.say("a warning")
    assert stream.getvalue() == "a warning\n"


def test_a_quiet_line_writes_nothing() -> None:
    stream = Terminal()
    with ProgressLine(stream=stream, quiet=True) as line:
        line.show("1 of 2")
        line.say("a warning")
    assert not stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45.2, "45 s"), (720, "12 min"), (12_000, "3 h 20 min"), (17_999.97, "5 h 0 min"), (216_000, "2.5 days")],
)
def test_a_duration_is_told_in_the_unit_that_people_use(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (999.7, "1.0 kB"), (1_300, "1.3 kB"), (999_960, "1.0 MB")),
        *((25_600_000, "25.6 MB"), (5.6e9, "5.6 GB"), (1.5e15, "1,500.0 TB")),
    ],
)
def test_bytes_are_told_in_powers_of_a_thousand(count: float, text: str) -> None:
    assert size_text(count) == text


def test_a_time_has_one_form_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    assert moment(1_773_480_399) == "2026-03-14 09:26 UTC"
    monkeypatch.undo()
    time.tzset()


# --- what `embq status` shows ---


def test_texts_that_are_cut_have_another_word_than_the_code_of_a_cut_image() -> None:
    progress = replace(RUNNING, state=RunState.DONE, truncated=20)
    for shown in (drawn(progress), "\n".join(summary_lines(replace(progress, rows=0), Path("/out")))):
        assert "20" in shown
        assert "the model reads" in shown
        assert "truncated" not in shown
        assert "parts" not in shown, "no row is anywhere"


@pytest.mark.parametrize(("state", "shown"), [(RunState.RUNNING, "33.0 rows/s"), (RunState.DONE, "812.5 rows/s")])
def test_the_speed_is_that_of_the_workers_and_in_the_end_that_of_the_commits(state: RunState, shown: str) -> None:
    progress = RunProgress(
        run="r",
        output="/out",
        model="minilm",
        state=state,
        priority=10,
        rows=5,
        rows_total=5,
        rows_total_exact=True,
        failures=0,
        units_total=1,
        done=1,
        received=0,
        in_flight=0,
        queued=0,
        quarantined=0,
        rows_per_s=812.5,
        embedding_per_s=33.0,
        eta_s=0.0,
        limit="",
        workers=[],
    )
    assert shown in drawn(progress)


def drawn(progress: RunProgress, columns: int = 120, *, verbose: bool = False, since_s: float | None = None) -> str:
    console = Console(width=columns)
    with console.capture() as captured:
        console.print(panel(progress, verbose=verbose, since_s=since_s))
    return captured.get()


@pytest.mark.parametrize(
    ("rows", "failures", "crosses", "state"), [(10, 0, 0, "done"), (1, 19, 38, "done, 95.0% failed")]
)
def test_failures_have_their_share_of_the_bar_and_of_the_state(
    rows: int, failures: int, crosses: int, state: str
) -> None:
    ended = replace(
        RUNNING, state=RunState.DONE, rows=rows, failures=failures, done=10, in_flight=0, received=0, embedded=0
    )
    shown = drawn(ended)
    assert shown.count("×") == crosses
    assert shown.count("━") == 40 - crosses
    assert f"minilm  {state}" in shown


RUNNING = RunProgress(
    run="0123456789abcdef",
    output="/out",
    model="minilm",
    state=RunState.RUNNING,
    priority=10,
    rows=200,
    rows_total=1000,
    rows_total_exact=True,
    failures=0,
    units_total=10,
    done=2,
    received=1,
    in_flight=2,
    queued=5,
    quarantined=0,
    rows_per_s=0.0,
    embedding_per_s=33.0,
    eta_s=24.0,
    eta_basis="samples",
    limit="device",
    embedded=400,
    workers=[
        {
            "name": "a-very-long-host-name.cuda1.0123ab",
            "device": "cuda:1",
            "rows_per_s": 33.0,
            "unit": "ffffc95c00",
            "run": "0123456789abcdef",
            "stage": "embed",
            "age_s": 3.0,
        }
    ],
)


def test_the_bar_has_a_tone_for_what_is_committed_and_one_for_what_is_embedded() -> None:
    assert f"{'━' * 8}{'╍' * 8}{'─' * 24}  20.0%" in drawn(RUNNING)
    assert "400 embedded" in drawn(RUNNING)


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"state": "starting"}, "minilm  starting the workers, which import their libraries (4 s)"),
        ({"state": "loading", "loading_on": ["cuda:0", "cpu"]}, "loading the model on cuda:0, cpu (4 s)"),
        (
            {"state": "loading", "loading_on": ["cpu"], "downloaded": 34_200_000},
            "loading the model on cpu (4 s), 34.2 MB downloaded",
        ),
        ({"state": "finishing", "eta_s": 6.0}, "finishing 3 units, <= 6 s"),
        ({"state": "finishing", "eta_s": 0.0}, "finishing 3 units, <= 1 s"),
    ],
)
def test_a_run_tells_what_it_waits_for(changes: dict[str, object], shown: str) -> None:
    assert shown in drawn(replace(RUNNING, workers=[], **changes), since_s=4.0)  # type: ignore[arg-type]


def looked_at(*devices: str, service: str = "running", workers: list[dict[str, object]] | None = None) -> RunProgress:
    """A run of 10 units of 100 samples, 2 committed and 1 published, with a supervisor of devices in these states."""
    slots = tuple(Device(device="cpu", name="", state=state, worker="") for state in devices)
    supervisor = Service(name="s", role="worker", host="h", pid=1, version="1", state=service, devices=slots)
    seen = BrokerSnapshot(
        received=1,
        in_flight=2,
        workers=Reports(workers or []),
        services=[Heard(service=supervisor, last_ms=0, silent_s=0.5)],
    )
    counts = RunCounts(
        rows=200, failures=0, rows_total=1000, rows_total_exact=True, units_total=10, done=2, quarantined=0
    )
    return derive_progress(
        "r", "/out", ModelConfig(spec="minilm", modalities=("text",), precision="fp32"), counts, Control(), seen
    )


@pytest.mark.parametrize(
    ("devices", "service", "state"),
    [
        (["starting"], "running", "starting"),
        (["idle"], "running", "starting"),
        (["idle", "loading"], "running", "loading"),
        (["loading"], "draining", "stopped"),
        (["serving", "given_up", "over"], "running", "stopped"),
        ([], "running", "stopped"),
    ],
)
def test_the_state_of_a_run_without_workers_is_that_of_its_devices(
    devices: list[str], service: str, state: str
) -> None:
    found = looked_at(*devices, service=service)
    assert (found.state, found.loading_on) == (state, ["cpu"] if state == "loading" else [])


def test_embedded_are_rows_committed_published_and_in_hand() -> None:
    share = {"tokens_per_s": 1.0, "units": 2, "size": 200, "begun": [], "in_batch": 0, "samples": 200, "handled": 80}
    at_work = {"name": "w", "model": "minilm", "rows_per_s": 40.0, "silent_s": 0.0, "runs": {"r": share}}
    found = looked_at("serving", workers=[at_work])
    assert (found.state, found.embedded, found.finish_s) == ("running", 200 + 100 + 80, 3.0)
    late = looked_at(
        "serving", workers=[{**at_work, "runs": {"r": {**share, "units": 3, "samples": 300, "handled": 180}}}]
    )
    assert late.embedded == 200 + 100 + 80, "the report still counts the unit that is published"
    older = {**at_work, "runs": {"r": {name: share[name] for name in share if name not in ("samples", "handled")}}}
    assert (looked_at(workers=[older]).embedded, looked_at(workers=[older]).finish_s) == (300, 0.0)


def test_narrow_terminals_get_fewer_columns_and_none_is_broken() -> None:
    name, narrow, wide = "a-very-long-host-name.cuda1.0123ab", drawn(RUNNING, 60, verbose=True), drawn(RUNNING, 120)
    (line,) = [line for line in narrow.splitlines() if line.startswith("cuda:1")]
    assert name not in line
    assert f"worker {name}" in narrow, "it follows on a line of its own"
    assert name not in wide
    assert name in drawn(RUNNING, 120, verbose=True).splitlines()[-1]


def test_the_oldest_unit_is_one_of_this_run() -> None:
    assert "unit ffffc95c" in drawn(RUNNING, verbose=True)
    of_another = [{**RUNNING.workers[0], "run": "fedcba9876543210"}]
    assert "oldest" not in drawn(replace(RUNNING, workers=of_another), verbose=True)


def overview(columns: int, *, verbose: bool, of_broker: bool = True) -> list[str]:
    slots = tuple(Device(device=f"cuda:{n}", name="NVIDIA H100 80GB HBM3", state="idle", worker="") for n in range(2))
    service = Service(name="s", role="worker", host="box", pid=1, version="1", state="running", devices=slots)
    look = Overview(
        runs=[
            RUNNING,
            replace(RUNNING, state=RunState.DONE, model="open_clip:ViT-B-32/laion2b_s34b_b79k", output="/data/two"),
        ],
        uploads=[],
        fleet=FleetStatus(reports=[Heard(service=service, last_ms=0, silent_s=0.0)] if of_broker else []),
        of_broker=of_broker,
    )
    console = Console(width=columns)
    with console.capture() as captured:
        console.print(look.renderable(verbose=verbose))
    return [line.rstrip() for line in captured.get().splitlines()]


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_the_overview_has_a_line_for_each_run_and_device_and_breaks_no_word(columns: int) -> None:
    shown, whole = overview(columns, verbose=False), set(" ".join(overview(1000, verbose=False)).split())
    assert len(shown) == 7, "two headers, two runs, a blank line, two devices"
    assert set(" ".join(shown).split()) <= whole, "a word of no wider display was broken"
    assert all(len(line) <= columns for line in shown)
    assert sum("0123456789abcdef" in line for line in shown) == sum("cuda:" in line for line in shown) == 2


def test_a_narrow_list_of_folders_keeps_their_names_with_state_age_and_rows() -> None:
    shown = overview(60, verbose=False, of_broker=False)
    assert {"output", "state", "age", "rows"} <= set(shown[0].split())
    assert shown[2].startswith("/data/two  done   ")


def test_verbose_shows_the_columns_that_a_narrow_terminal_lacks() -> None:
    assert not any("NVIDIA" in line or "/data/two" in line for line in overview(60, verbose=False))
    shown = " ".join(overview(60, verbose=True))
    assert shown.count("NVIDIA H100") == 2
    assert "/data/two" in shown


def test_prose_is_folded_at_words_on_a_terminal_alone_and_its_commands_stay_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    told = "  next:  wait, or watch it with `embq status '/a long/folder'`; go on with: embq resume '/a long/folder'"
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert folded(told, err=True) == told
    monkeypatch.setattr("sys.stderr", Terminal())
    lines = folded(told, err=True).splitlines()
    assert " ".join(line.strip() for line in lines) == told.strip()
    assert any("`embq status '/a long/folder'`" in line for line in lines)
    assert lines[-1] == "    embq resume '/a long/folder'"
    assert all(len(line) <= 40 for line in lines)


def test_downloads_are_counted_while_they_are_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from embq.worker.embedders.lookup import cached_bytes

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert cached_bytes() == 0
    blobs = tmp_path / "models--org--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "1f.incomplete").write_bytes(b"x" * 1000)
    (blobs / "2e").write_bytes(b"x" * 500)
    assert cached_bytes() == 1500
