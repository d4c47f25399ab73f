"""Parts of the fleet page as HTML, each made once of a sample for all viewers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from redis.exceptions import RedisError

from embq.app.status.bottleneck import Bottleneck
from embq.app.status.display import STAGE_NAMES, count, limit_line, state_text
from embq.app.status.eta import SILENT_S
from embq.app.status.run_monitor import WINDOW_S
from embq.app.status.run_progress import RunProgress
from embq.app.status.service_logs import logs_of
from embq.core.errors import EmbqError
from embq.core.run.control import RunState
from embq.core.run.layout import Layout
from embq.core.service.progress_line import duration, moment, size_text
from embq.index.commands.progress import STAGE_WORDS
from embq.retrieval.ui.fleet.history import Histories, cells_of
from embq.retrieval.ui.fleet.machines import CARDS, DeviceView
from embq.retrieval.ui.fleet.run_list import ALL_RUNS, MOST_RUNS, RunQuery, titles_of
from embq.retrieval.ui.fleet.snapshot import FleetSnapshot
from embq.retrieval.ui.fleet.sources import RunView
from embq.retrieval.ui.fleet.unit_map import STATE_WORDS, STATES, paths
from embq.retrieval.ui.rendering import fragment

MOST_DEVICES, MOST_WORKERS = 2_000, 64
"""Shown on one page."""
APART = 600
"""Cells of a map of units up to which each is drawn alone."""
MAP_SHAPE, MAP_WIDTH = 8, 1_340
"""Width of a map of units over its height, and in pixels."""
SPARK_HEIGHT = 20.0

Parts = dict[str, str]
"""Name of a part -> HTML."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of the top line.

    Attributes:
        kind: "", "warn" or "bad".
    """

    label: str
    value: str
    note: str = ""
    kind: str = ""


class Fragments:
    """Makes the parts of both pages. `may_act` is whether a viewer may act on runs, and so has buttons.

    Args:
        histories: of runs.
    """

    def __init__(self, histories: Histories) -> None:
        self._histories = histories

    def fleet(self, snapshot: FleetSnapshot, query: RunQuery = ALL_RUNS, *, may_act: bool) -> Parts:
        """The parts of `/fleet`, with the runs that a query names."""
        devices = [device for machine in snapshot.machines for device in machine.devices]
        machines = {
            "machines": snapshot.machines,
            "compact": len(devices) > CARDS,
            "left_out": max(0, len(devices) - MOST_DEVICES),
            "most": MOST_DEVICES,
            "at_work": sum(not device.grey for device in devices),
            "gone": sum(device.grey for device in devices),
            "cell": _cell,
            "spark": _spark,
        }
        builds = sorted(snapshot.builds, key=lambda build: build.state not in ("running", "waiting"))[:MOST_RUNS]
        return {
            "banner": _html("banner", {"snapshot": snapshot}),
            "top": _html("top", {"figures_": top_line(snapshot), "limit": limit_sentence(snapshot)}),
            "stages": _html("stages", {"stages": _stages(snapshot.limit)}),
            "runs": _runs(snapshot, query, may_act=may_act),
            "builds": _html("builds", {"builds": builds, "words": STAGE_WORDS}),
            "machines": _html("machines", machines),
        }

    def run(self, snapshot: FleetSnapshot, run: str, *, may_act: bool) -> Parts | None:
        """The parts of `/fleet/{run}`; None if there is no such run."""
        if (view := snapshot.run(run)) is None:
            return None
        progress = view.progress
        limit = "" if view.command or progress.state.ended else _sentence(limit_line(progress), progress.limits.now)
        head = {**_shown(view, snapshot), "figures_": top_line(replace(snapshot, runs=(view,)))[:3], "limit": limit}
        return {
            "banner": _html("banner", {"snapshot": snapshot}),
            "head": _html("run_head", head),
            "verbs": _html("verbs", {"run": run, "verbs": _verbs(view, may_act)}),
            "stages": _html("stages", {"stages": _stages(progress.limits.now)}),
            "units": self._units(view),
            "workers": _html("workers", {"workers": progress.workers[:MOST_WORKERS], "progress": progress}),
            "failed": str(progress.failures),
            "logs": _written(view),
        }

    def _units(self, view: RunView) -> str:
        progress = view.progress
        try:
            cells = cells_of(view, self._histories)
        except (RedisError, EmbqError) as error:
            why = error.message if isinstance(error, EmbqError) else "the broker does not answer"
            return _html("units", {"why": why, "progress": progress})
        total = len(cells.states)
        columns = max(1, total if total <= 40 else math.ceil(math.sqrt(total * MAP_SHAPE)))
        size = max(4, min(16, MAP_WIDTH // columns))
        present = {STATES[int(state)] for state in set(cells.states.tolist())}
        values = {
            "why": "",
            "progress": progress,
            "cells": cells,
            "columns": columns,
            "lines": -(-total // columns) if total else 0,
            "size": size,
            "paths": paths(cells.states, columns, apart=total <= APART),
            "legend": [(state, STATE_WORDS[state]) for state in STATES if state in present],
        }
        return _html("units", values)


def _html(name: str, values: Mapping[str, Any]) -> str:
    shared = {"size": size_text, "per_s": _per_s, "rows_of": rows_of}
    return fragment(f"fleet/{name}.html", {**shared, **values})


# --- top line ---


def top_line(snapshot: FleetSnapshot) -> list[Figure]:
    """When it ends, the rate over ten minutes, failures, and the disk forecast."""
    return [_end(snapshot), _rate_figure(snapshot), _failures(snapshot), _disk(snapshot)]


def _end(snapshot: FleetSnapshot) -> Figure:
    active = [view.progress for view in snapshot.runs if view.active]
    etas_s = [progress.eta_s for progress in active if progress.eta_s is not None]
    if not active:
        paused = sum(view.progress.state == RunState.PAUSED for view in snapshot.runs)
        note = f"{paused:,} paused" if paused else "no run is at work"
        return Figure(label="Ends", value="–", note=note)
    if not etas_s:
        stopped = all(view.state == "stopped" for view in snapshot.runs if view.active)
        return Figure(label="Ends", value="–" if stopped else "estimating", note="no worker" if stopped else "")
    longest_s = max(etas_s)
    without_eta = len(active) - len(etas_s)
    note = f"in {duration(longest_s)}" + (f"; {without_eta:,} more without an estimate" if without_eta else "")
    return Figure(label="Ends", value=moment(snapshot.at_s + longest_s), note=note)


def _rate_figure(snapshot: FleetSnapshot) -> Figure:
    # Runs that ended a moment ago are part of the ten minutes.
    recent = [view.recent for view in snapshot.runs if view.recent is not None]
    seconds = max((seconds for _, seconds in recent), default=0.0)
    workers = {str(beat.get("name")): beat for beat in _workers(snapshot) if beat.get("silent_s", 0.0) <= SILENT_S}
    now = sum(float(beat.get("rows_per_s") or 0.0) for beat in workers.values())
    note = f"{_per_s(now)} embedded now" if workers else ""
    rate = _per_s(sum(rows for rows, _ in recent) / seconds) if recent else "–"
    return Figure(label=f"Rows/s over {duration(seconds or WINDOW_S)}", value=rate, note=note)


def _workers(snapshot: FleetSnapshot) -> list[dict[str, Any]]:
    """Reports of the workers of runs that are at work; of each, as many as it has runs."""
    return [worker for view in snapshot.runs if view.active for worker in view.progress.workers]


def _failures(snapshot: FleetSnapshot) -> Figure:
    failures = sum(view.progress.failures for view in snapshot.runs)
    samples = failures + sum(view.progress.rows for view in snapshot.runs)
    share = f"{failures / samples:.2%} of {samples:,} samples" if samples else ""
    return Figure(label="Failures", value=f"{failures:,}", note=share, kind="warn" if failures else "")


def _disk(snapshot: FleetSnapshot) -> Figure:
    if not snapshot.disks:
        active = any(view.active for view in snapshot.runs)
        return Figure(label="Disk", value="–", note="outputs are not on this machine" if active else "nothing to write")
    disk = snapshot.disks[0]
    free = f"{size_text(disk.free_bytes)} free"
    if disk.needed_bytes is None:
        return Figure(label="Disk", value=free, note="need is known after the first commit")
    needed = f"{size_text(disk.needed_bytes)} more to write"
    short = disk.needed_bytes - disk.free_bytes
    if short > 0:
        return Figure(label="Disk", value=f"{size_text(short)} short", note=f"{needed}, {free}", kind="bad")
    return Figure(label="Disk", value=free, note=needed)


def _per_s(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}"


# --- what limits ---


def limit_sentence(snapshot: FleetSnapshot) -> str:
    """The bottleneck of the fleet, with the number that would end it."""
    active = [view.progress for view in snapshot.runs if view.active]
    if not active:
        if not snapshot.runs:
            return "There is no run."
        states = Counter(view.state for view in snapshot.runs)
        return f"Nothing is at work: {', '.join(f'{states[state]:,} {state}' for state in sorted(states))}."
    if snapshot.limit.name == "work":
        queued = sum(progress.queued for progress in active)
        if queued:
            return f"The workers wait for units, and {queued:,} are queued: does the producer run?"
        last = sum(progress.in_flight + progress.received for progress in active)
        return f"Nothing is queued: the last {last:,} units are on their way."
    if snapshot.limit.name:
        return _sentence(snapshot.limit.sentence(), snapshot.limit)
    loading = sorted({device for progress in active for device in progress.loading_on})
    if loading:
        return f"A model is being loaded on {', '.join(loading[:4])}{' and others' if len(loading) > 4 else ''}."
    silent_s = min((float(worker.get("silent_s", 0.0)) for worker in _workers(snapshot)), default=0.0)
    if silent_s > SILENT_S:
        return f"No worker has reported for {duration(silent_s)}."
    if all(view.state == "stopped" for view in snapshot.runs if view.active):
        return "No worker serves these runs; `embq worker` starts one."
    return "What limits the rate is not known yet."


def _sentence(text: str, limit: Bottleneck) -> str:
    busy = limit.stages.get("embed", {}).get("busy", 0.0)
    parts = [text, f"busy {busy:.0%} of the time" if limit.name == "device" and busy else "", limit.remedy()]
    sentence = "; ".join(part for part in parts if part)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def _stages(limit: Bottleneck) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "limits": stage == LIMITED.get(limit.name),
            **{state: min(1.0, states.get(state, 0.0)) for state in ("busy", "starved", "blocked")},
        }
        for stage, name in STAGE_NAMES.items()
        if (states := limit.stages.get(stage))
    ]


LIMITED = {
    "device": "embed",
    "decoding": "prepare",
    "tokenising": "prepare",
    "reading": "read",
    "publishing": "publish",
    "writer": "publish",
}
"""Bottleneck -> the stage that it is in."""


# --- runs and devices ---


def _runs(snapshot: FleetSnapshot, query: RunQuery, *, may_act: bool) -> str:
    titles = titles_of(snapshot.runs)
    matching = query.of_runs(snapshot.runs, titles)
    shown = matching[query.start : query.start + MOST_RUNS]
    values = {
        "runs": [_shown(view, snapshot, titles) | {"verbs": _verbs(view, may_act)} for view in shown],
        "all": len(snapshot.runs),
        "found": len(matching),
        "most": MOST_RUNS,
        "query": query,
        "may_act": may_act,
        "uploads": snapshot.uploads,
    }
    return _html("runs", values)


def _shown(view: RunView, snapshot: FleetSnapshot, titles: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What both pages show of a run."""
    progress = view.progress
    return {
        "view": view,
        "progress": progress,
        "title": (titles or titles_of(snapshot.runs))[progress.output],
        "state": state_text(progress) if view.state == progress.state else view.state,
        "age": "" if progress.created_s is None else _age(snapshot.at_s - progress.created_s),
        "rate": _rate(view),
        "left": _time_left(progress),
    }


def _written(view: RunView) -> str:
    """Bytes of the logs of a run: another text if there are new lines; "" without logs."""
    with suppress(EmbqError, OSError):
        return "" if view.root is None else str([log.size() for log in logs_of(Layout(view.root).home)])
    return ""


def _rate(view: RunView) -> str:
    """Committed rows per second of the last ten minutes."""
    rows, seconds = view.recent or (0, 1.0)
    return _per_s(rows / seconds) if rows else "–"


def _age(seconds: float) -> str:
    """Time since something, to its largest unit."""
    return f"{' '.join(duration(max(0.0, seconds)).split()[:2])} ago"


def _time_left(progress: RunProgress) -> str:
    if progress.state.ended or progress.eta_s is None:
        return "estimating" if progress.state == RunState.RUNNING and progress.eta_basis else "–"
    return duration(progress.eta_s)


def _verbs(view: RunView, may_act: bool) -> Sequence[str]:
    """Actions that a viewer may take on a run."""
    state = view.progress.state
    if not may_act or view.client is None or state == RunState.DONE:
        return ()
    return {RunState.PAUSED: ("resume", "cancel"), RunState.CANCELLED: ("resume",)}.get(state, ("pause", "cancel"))


def _cell(device: DeviceView) -> Mapping[str, str]:
    """Text, class and title of a device among many."""
    busy = "" if device.busy is None else f"{device.busy:.0%} busy"
    facts = [device.device, device.state, busy, f"unit {duration(device.age_s)}" if device.unit else ""]
    level = "" if device.grey or device.busy is None else f" b{min(4, int(device.busy * 5))}"
    rate = device.rows_per_s
    return {
        "text": "" if rate is None else f"{rate:,.0f}" if rate < 10_000 else f"{rate / 1000:,.0f}k",
        "state": f"{device.state}{level}",
        "title": ", ".join(fact for fact in facts if fact),
    }


def _spark(device: DeviceView) -> str:
    """Points of a line, 1 wide per value and `SPARK_HEIGHT` high; "" if there are less than two."""
    points = [(at, rate) for at, rate in enumerate(device.rates) if rate is not None]
    top = max((rate for _, rate in points), default=0.0)
    if len(points) < 2 or not top:
        return ""
    return " ".join(f"{at},{SPARK_HEIGHT * (1 - rate / top):.1f}" for at, rate in points)


def rows_of(progress: RunProgress) -> str:
    """Committed rows of all, for people."""
    return f"{progress.rows:,} of {count(progress.rows_total, progress.rows_total_exact)}"
