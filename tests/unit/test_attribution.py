"""The bottleneck of a worker: the stages' clock, the verdict that follows, and what a person is told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embq.app.status.bottleneck import MEANING, bottleneck_now, bottleneck_so_far
from embq.worker.meter.bottleneck import MARGIN, MOST_WAIT, WINDOW_S, Bottleneck, cores_needed, verdict
from embq.worker.meter.meter import Meter
from embq.worker.meter.stage_times import CAUSES, STAGES, StageTimes, cause_of
from tests.support.fakes.clock import FakeClock

OTHERS = [cause for cause in CAUSES if cause != "device"]
parts = st.lists(st.floats(0, 1), min_size=len(OTHERS), max_size=len(OTHERS)).filter(lambda some: sum(some) > 0.01)


def shares(device: float, rest: list[float]) -> dict[str, float]:
    """Shares that add up to 1, of which the device has `device`."""
    scale = (1 - device) / sum(rest)
    return {"device": device, **{cause: part * scale for cause, part in zip(OTHERS, rest, strict=True)}}


@given(device=st.floats(0, 1), rest=parts, before=st.sampled_from(["", *CAUSES]))
def test_the_device_is_the_limit_exactly_where_it_hardly_waits(device: float, rest: list[float], before: str) -> None:
    said = verdict(shares(device, rest), before)
    if 1 - device < MOST_WAIT - MARGIN - 1e-9:
        assert said == "device"
    if 1 - device > MOST_WAIT + MARGIN + 1e-9:
        assert said != "device"
        assert shares(device, rest)[said] > 0, "what took no time limits nothing"


@given(device=st.floats(0, 0.85), rest=parts, winner=st.sampled_from(OTHERS))
def test_what_the_device_waits_for_most_is_the_limit_whatever_was_before(
    device: float, rest: list[float], winner: str
) -> None:
    most = [2 * sum(rest) + 1 if cause == winner else part for cause, part in zip(OTHERS, rest, strict=True)]
    for before in ("", *CAUSES):
        assert verdict(shares(device, most), before) == winner


@given(
    device=st.floats(0, 1),
    wobbles=st.lists(st.floats(-0.015, 0.015), min_size=5, max_size=30),
    halves=st.lists(st.floats(0.46, 0.54), min_size=30, max_size=30),
)
def test_a_verdict_does_not_come_and_go_with_small_changes(
    device: float, wobbles: list[float], halves: list[float]
) -> None:
    said, changes = "", 0
    for wobble, half in zip(wobbles, halves, strict=False):
        now = min(1.0, max(0.0, device + wobble))
        causes = {"device": now, "preparing": (1 - now) * half, "reading": (1 - now) * (1 - half)}
        if (after := verdict(causes, said)) != said:
            said, changes = after, changes + 1
    assert changes <= 2, "the first, and one where the first looks were on the other side of the line"


@pytest.mark.parametrize(
    ("now", "cause"),
    [
        ({"publish": "blocked", "embed": "busy"}, "writer"),
        ({"publish": "busy", "embed": "blocked"}, "publishing"),
        ({"embed": "busy", "queued": True}, "device"),
        ({"embed": "between"}, "device"),
        ({"queued": True, "read": "busy"}, "preparing"),
        ({"read": "blocked"}, "preparing"),
        ({"read": "busy", "all_preparing": True}, "reading"),
        ({"read": "between"}, "reading"),
        ({"all_preparing": True}, "preparing"),
        ({}, "work"),
    ],
)
def test_a_moment_has_one_cause(now: dict[str, Any], cause: str) -> None:
    starved = {"read": "starved", "embed": "starved", "publish": "starved", "queued": False, "all_preparing": False}
    assert cause_of(**{**starved, **now}) == cause


def test_every_moment_of_every_stage_is_counted_once(clock: FakeClock) -> None:
    stages = StageTimes(2, clock)
    with stages.at("embed", "busy"):
        clock.advance(100)
    assert stages.spent().seconds == 0, "nothing counts before the first unit"
    stages.begin()
    with stages.at("read", "busy"), stages.at("embed", "starved"):
        clock.advance(1)
        stages.submitted()
    with stages.at("read", "blocked"), stages.at("embed", "starved"), stages.preparing():
        clock.advance(2)
        with stages.at("embed", "busy"):
            clock.advance(4)
        clock.advance(8)
    stages.begin()
    spent = stages.spent()
    assert spent.seconds == 15
    assert spent.causes == {"writer": 0, "publishing": 0, "device": 4, "preparing": 10, "reading": 1, "work": 0}
    assert spent.stages["embed"] == {"busy": 4, "starved": 11, "blocked": 0}
    assert spent.stages["read"] == {"busy": 1, "starved": 0, "blocked": 14}
    assert spent.stages["prepare"] == {"busy": 7, "starved": 1, "blocked": 7}, "one of two threads is at work"


def test_a_reader_without_a_unit_is_blocked_where_the_worker_has_enough_in_hand(clock: FakeClock) -> None:
    stages = StageTimes(1, clock)
    stages.begin()
    with stages.at("read", "starved"), stages.at("embed", "busy"):
        clock.advance(1)
        stages.enough(True)
        clock.advance(2)
        with stages.at("embed", "starved"):
            clock.advance(4)
    spent = stages.spent()
    assert spent.stages["read"] == spent.stages["prepare"] == {"busy": 0, "starved": 1, "blocked": 6}
    assert (spent.causes["device"], spent.causes["work"]) == (3, 4), "a device without anything waits for units"


@given(st.lists(st.tuples(st.sampled_from(STAGES), st.sampled_from(["busy", "starved", "blocked"]), st.floats(0, 5))))
def test_causes_add_up_to_the_time_and_no_stage_has_more_than_that(steps: list[tuple[Any, Any, float]]) -> None:
    clock = FakeClock()
    stages = StageTimes(3, clock)
    stages.begin()
    for stage, state, seconds in steps:
        if stage == "prepare":
            stages.submitted()
            with stages.preparing():
                clock.advance(seconds)
        else:
            with stages.at(stage, state):
                clock.advance(seconds)
    spent = stages.spent()
    assert sum(spent.causes.values()) == pytest.approx(spent.seconds)
    assert spent.seconds == pytest.approx(sum(seconds for *_, seconds in steps))
    for stage in STAGES:
        assert sum(spent.stages[stage].values()) <= spent.seconds + 1e-6


class Worker:
    """A made-up worker: a clock, the stages that it drives, and what it would report."""

    def __init__(self, clock: FakeClock, *, threads: int = 2, cores: int = 2, modality: str = "image") -> None:
        self.clock = clock
        self.stats = Meter(threads)
        self.stats.times = StageTimes(threads, clock)
        self.stats.times.begin()
        self.attribution = Bottleneck(self.stats, modalities=(modality,), cores=cores, clock=clock)

    def work(self, seconds: int, *, device: float, rows: int = 0, reading: bool = False, full: bool = True) -> None:
        """The device works for `device` of each second, and waits for decoding (or reading) else."""
        stages = self.stats.times
        for _ in range(seconds):
            with stages.at("read", "busy" if reading else "blocked"):
                with stages.at("embed", "busy"):
                    self.clock.advance(device)
                if rows:
                    self.stats.batch_done(rows, {"r": rows}, processed=rows, took_s=device, full=full)
                with stages.at("embed", "starved"):
                    self.clock.advance(1 - device)
            self.said = self.attribution.report()

    @contextmanager
    def preparing(self, threads: int) -> Iterator[None]:
        """This many threads work all the time."""
        with ExitStack() as stack:
            for _ in range(threads):
                self.stats.times.submitted()
                stack.enter_context(self.stats.times.preparing())
            yield

    def report(self, **fields: Any) -> dict[str, Any]:
        return {"held": 1, "rows_per_s": 1.0, **self.said, **fields}


def test_a_worker_says_what_limits_it_now_and_what_did_over_its_whole_time(clock: FakeClock) -> None:
    worker = Worker(clock)
    worker.work(60, device=0.2)
    assert worker.said["limit"] == worker.said["attribution"]["whole"]["limit"] == "decoding"
    worker.work(int(WINDOW_S) + 1, device=1.0)
    assert worker.said["limit"] == "device"
    assert worker.said["attribution"]["whole"]["limit"] == "decoding", "most of its time"
    worker.work(int(WINDOW_S) + 1, device=0.5, reading=True)
    assert worker.said["limit"] == "reading"
    texts = Worker(clock, modality="text")
    texts.work(3, device=0.2)
    assert texts.said["limit"] == "tokenising"


@given(threads=st.integers(1, 64), device=st.floats(0.02, 0.85), rate=st.integers(10, 100_000))
def test_so_many_cores_would_keep_the_device_busy_and_one_less_would_not(
    threads: int, device: float, rate: int
) -> None:
    cores = cores_needed(cores_used=threads, device_per_s=rate, comes_per_s=rate * device)
    assert cores * device / threads >= 0.99
    assert (cores - 1) * device / threads < 1


@pytest.mark.parametrize(("full", "said"), [(True, "; 7 cores would"), (False, "; at least 7 cores would")])
def test_the_verdict_says_how_many_cores_would_end_it(clock: FakeClock, full: bool, said: str) -> None:
    worker = Worker(clock)
    with worker.preparing(2):
        worker.work(20, device=0.29, rows=290, full=full)
    limit = bottleneck_now([worker.report()])
    assert (limit.name, limit.threads, limit.cores_needed, limit.cores_exact) == ("decoding", 2, 7, full)
    assert limit.sentence().startswith("decoding: 2 threads, the device waits 71% of the time" + said)
    assert "--threads" not in limit.sentence(), "all cores that are here are used"
    assert "--decode cpu-fast" in limit.sentence()
    for path in ("cpu-fast", "gpu"):
        other = worker.report()
        other["attribution"]["decode"] = path
        assert "--decode" not in bottleneck_now([other]).sentence()


def test_threads_that_share_a_core_do_not_count_as_cores(clock: FakeClock) -> None:
    worker = Worker(clock, threads=8, cores=2)
    with worker.preparing(8):
        worker.work(20, device=0.25, rows=100)
    assert bottleneck_now([worker.report()]).cores_needed == 8


def test_who_uses_fewer_threads_than_there_are_cores_is_told_so(clock: FakeClock) -> None:
    worker = Worker(clock, threads=1, cores=16)
    with worker.preparing(1):
        worker.work(20, device=0.2, rows=100)
    assert "--threads 5: here are 16 cores" in bottleneck_now([worker.report()]).sentence()


def test_the_limit_of_a_run_is_that_of_the_workers_that_do_most_of_it(clock: FakeClock) -> None:
    fast, slow = Worker(clock), Worker(clock)
    fast.work(12, device=0.3)
    slow.work(12, device=1.0)
    said = [fast.report(rows_per_s=900.0), *(slow.report(rows_per_s=90.0) for _ in range(4))]
    assert bottleneck_now(said).name == bottleneck_so_far(said).name == "decoding"
    assert bottleneck_now(said[1:]).name == "device"
    assert bottleneck_now([slow.report(held=0)]).name == "work"
    assert bottleneck_now([]).name == ""
    assert bottleneck_now([{"name": "of an older version", "held": 1}]).name == ""


def test_every_verdict_has_a_sentence() -> None:
    words = {*CAUSES, "decoding", "tokenising", "turn", ""} - {"preparing"}
    assert words == set(MEANING)


def test_what_a_device_does_is_told_by_full_passes_where_there_are_any() -> None:
    stats = Meter()
    assert stats.device_per_s() is None
    stats.batch_done(2, {"r": 2}, processed=2, took_s=1.0, full=False)
    assert stats.device_per_s() == (2.0, False)
    for _ in itertools.repeat(None, 3):
        stats.batch_done(64, {"r": 64}, processed=64, took_s=1.0)
        stats.batch_done(2, {"r": 2}, processed=2, took_s=1.0, full=False)
    per_s, full = stats.device_per_s() or (0.0, False)
    assert (round(per_s, 6), full) == (64.0, True)
