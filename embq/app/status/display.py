"""Display of a run: a live panel on a terminal, one line every 30 seconds in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from embq.app.status.bottleneck import MEANING, Bottleneck
from embq.app.status.run_progress import RunProgress
from embq.core.redaction import printable
from embq.core.run.control import VERBS, RunState
from embq.core.service.progress_line import ProgressLine, duration, size_text

STAGE_NAMES = {"read": "read", "prepare": "prepare", "embed": "device", "publish": "publish"}
"""Stage of a worker -> its name for people."""
STATE_STYLES = {
    RunState.RUNNING: "green",
    RunState.DONE: "bold green",
    RunState.STOPPED: "red",
    RunState.CANCELLED: "red",
}
"""State -> style; yellow for others."""
LOWEST_SHARE = 0.001
"""Share of failures from which the state of a finished run names it."""
BAR_COLUMNS = 40
WORKERS_SHOWN = 16
GAP = "  "
NUMBERS = frozenset({"rows/s", "busy", "done", "rows", "failures", "age"})
"""Columns that are aligned to the right."""
WORKERS_DETAILS = ("worker", "limit", "unit")


def count(rows: int | None, exact: bool = True) -> str:
    """A number of rows; estimates with "about"."""
    if rows is None:
        return "?"
    return f"{rows:,}" if exact else f"about {rows:,}"


def plain_line(progress: RunProgress) -> str:
    """One line for logs."""
    eta = duration(progress.eta_s).replace(" ", "") if progress.eta_s is not None else "-"
    if progress.eta_s is None and progress.eta_basis:
        eta = "estimating"
    return printable(
        f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} run={progress.run} state={progress.state} "
        f"rows={progress.rows}/{count(progress.rows_total, progress.rows_total_exact).replace(' ', '-')} "
        f"failures={progress.failures} truncated={progress.truncated} units={progress.done}/{progress.units_total} "
        f"received={progress.received} "
        f"in_flight={progress.in_flight} quarantined={progress.quarantined} "
        f"rate={progress.embedding_per_s:.1f}/s tokens_per_s={progress.tokens_per_s:.0f} "
        f"limit={progress.limit or '-'} eta={eta}"
    )


@dataclass(frozen=True, slots=True)
class ProgressBar:
    """Progress bar of shares of the whole: committed, of which some failed, and embedded. Its signs need no colour."""

    committed: float
    embedded: float
    failed: float = 0.0

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """At most `BAR_COLUMNS`."""
        return Measurement(4, min(BAR_COLUMNS, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One line."""
        width = min(BAR_COLUMNS, options.max_width)
        committed = min(width, int(self.committed * width))
        embedded = min(width, int(self.embedded * width)) - committed
        failed = min(committed, round(self.failed * width))
        signs = "#=-x" if options.ascii_only else "━╍─×"
        yield Text.assemble(
            (signs[0] * (committed - failed), "green"),
            (signs[3] * failed, "red"),
            (signs[1] * embedded, "cyan"),
            (signs[2] * (width - committed - embedded), "dim"),
        )


def panel(progress: RunProgress, *, verbose: bool = False, since_s: float | None = None) -> Group:
    """A panel with the progress of a run, for a terminal.

    Args:
        verbose: with tokens, units, stages, and all columns of the workers.
        since_s: seconds in the present state.
    """
    style = "red" if progress.failures > progress.rows else STATE_STYLES.get(progress.state, "yellow")
    head = Text.assemble(
        (f"run {progress.run}", "bold"),
        f"  {printable(progress.model)}  ",
        (state_text(progress, since_s), style),
        overflow="fold",
    )
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(progress.share_committed, progress.share_embedded, progress.share_failed),
        Text(f"{progress.share_committed:6.1%}", no_wrap=True),
        Text(_time_left(progress), style="cyan"),
    )
    facts = Table.grid(padding=(0, 2))
    embedded = f", {progress.embedded:,} embedded" if progress.embedded > progress.rows + progress.failures else ""
    facts.add_row(
        "rows",
        f"{progress.rows:,} of {count(progress.rows_total, progress.rows_total_exact)} committed{embedded}, "
        f"{progress.failures:,} failures, {progress.speed:,.1f} rows/s",
    )
    if progress.truncated:
        facts.add_row("long texts", f"{progress.truncated:,}, cut to what the model reads (see --chunk-tokens)")
    if progress.state in VERBS.values():
        facts.add_row("limit", Text(printable(limit_line(progress))))  # no markup in what the broker holds
    parts: list[RenderableType] = [head, bar, facts]
    if verbose:
        _add_details(facts, progress)
    if progress.workers:
        parts.append(_workers_table(progress.workers, verbose))
    return Group(*parts)


def state_text(progress: RunProgress, since_s: float | None = None) -> str:
    """The state for people: "loading minilm on cuda:0 (4 s)", "finishing 2 units, <= 6 s"."""
    waited = f" ({duration(since_s)})" if since_s is not None else ""
    match progress.state:
        case RunState.STARTING:
            return f"starting the workers, which import their libraries{waited}"
        case RunState.LOADING:
            on = ", ".join(printable(device) for device in progress.loading_on)
            fetched = f", {size_text(progress.downloaded)} downloaded" if progress.downloaded else ""
            return f"loading the model on {on}{waited}{fetched}"
        case RunState.FINISHING:
            units = progress.in_flight + progress.received
            bound = f", <= {duration(max(1.0, progress.eta_s))}" if progress.eta_s is not None else ""
            return "finishing" if not units else f"finishing {units:,} unit{'s' if units != 1 else ''}{bound}"
        case RunState.DONE if progress.share_failed >= LOWEST_SHARE:
            return f"done, {progress.share_failed:.1%} failed"
    return progress.state


def _add_details(facts: Table, progress: RunProgress) -> None:
    if progress.tokens:
        total = count(progress.tokens_total, progress.state == RunState.DONE)
        speed = f", {progress.tokens_per_s:,.0f} tokens/s" if progress.tokens_per_s else ""
        facts.add_row("tokens", f"{progress.tokens:,} of {total} committed{speed}")
    facts.add_row(
        "units",
        f"{progress.done:,} done, {progress.received:,} received, {progress.in_flight:,} in flight, "
        f"{progress.queued:,} queued, {progress.quarantined:,} quarantined",
    )
    if progress.state != RunState.DONE and (stages := stages_line(progress.limits.now)):
        facts.add_row("stages", stages)
    # A worker tells its oldest unit of all runs.
    ours = [worker for worker in progress.workers if worker.get("unit") and worker.get("run") == progress.run]
    if ours:
        oldest = max(ours, key=lambda worker: float(worker.get("age_s") or 0))
        age = duration(oldest.get("age_s", 0.0))
        line = f"unit {oldest['unit'][:8]}  {age}  {oldest.get('stage', '-')}  {oldest['name']}"
        facts.add_row("oldest", Text(printable(line)))


def limit_line(progress: RunProgress) -> str:
    """The bottleneck now, as a sentence."""
    if progress.limit == "turn":
        return f"{MEANING['turn']} {' and '.join(progress.waits_for)}"
    return progress.limits.now.sentence()


def stages_line(limit: Bottleneck) -> str:
    """For each stage the shares of its time that it is busy, starved and blocked."""
    return "; ".join(
        f"{name} {states.get('busy', 0.0):.0%} busy{_part(states.get('starved', 0.0), 'waits')}"
        f"{_part(states.get('blocked', 0.0), 'blocked')}"
        for stage, name in STAGE_NAMES.items()
        if (states := limit.stages.get(stage))
    )


def _part(share: float, word: str) -> str:
    return f", {share:.0%} {word}" if share >= 0.005 else ""


def _time_left(progress: RunProgress) -> str:
    if progress.state in (RunState.DONE, RunState.FINISHING):
        return ""
    if progress.eta_s is None:
        return "estimating" if progress.state == RunState.RUNNING else ""
    return f"about {duration(progress.eta_s)} left, by {progress.eta_basis}"


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A line for each row. Columns that do not fit are left out, and no cell is broken.

    Args:
        rows: name of a column -> text, the same names in each.
        drop: columns in the order in which they are left out.
        verbose: columns that are left out follow below each row.
    """

    rows: list[dict[str, str]]
    drop: Sequence[str]
    verbose: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines; a line that is too long without any column of `drop` ends with an ellipsis."""
        rows = [{name: printable(text) for name, text in row.items()} for row in self.rows]
        widths = {name: max(map(cell_len, (name, *(row[name] for row in rows)))) for name in rows[0]}
        columns = dict(widths)
        for name in self.drop:
            if sum(columns.values()) + len(GAP) * (len(columns) - 1) > options.max_width:
                del columns[name]
        # Plain lines: with a `Text` for each cell, a thousand rows would take half a second.
        yield from _line({name: name for name in columns}, columns, options.max_width, console.get_style("dim"))
        for row in rows:
            yield from _line(row, columns, options.max_width)
            rest = [f"{name} {text}" for name, text in row.items() if name not in columns and text != "-"]
            if self.verbose and rest:
                yield Padding(Text(GAP.join(rest), style="dim"), (0, 0, 0, 2 * len(GAP)))


def _line(
    row: dict[str, str], columns: dict[str, int], max_width: int, style: Style | None = None
) -> Iterator[Segment]:
    text = GAP.join(
        " " * (width - cell_len(row[name])) + row[name] if name in NUMBERS else set_cell_size(row[name], width)
        for name, width in columns.items()
    ).rstrip()
    yield Segment(text if cell_len(text) <= max_width else f"{set_cell_size(text, max_width - 1)}…", style)
    yield Segment.line()


def _workers_table(workers: list[dict[str, Any]], verbose: bool) -> RenderableType:
    rows = [_columns(worker) for worker in workers[:WORKERS_SHOWN]]
    if not verbose:
        rows = [{name: text for name, text in row.items() if name not in WORKERS_DETAILS} for row in rows]
    table = FittedTable(rows, WORKERS_DETAILS, verbose)
    hidden = len(workers) - WORKERS_SHOWN
    return Group(table, Text(f"and {hidden:,} more")) if hidden > 0 else table


def _columns(worker: dict[str, Any]) -> dict[str, str]:
    attribution = worker.get("attribution")
    busy = attribution["late"]["stages"].get("embed", {}).get("busy") if attribution else None
    return {
        "worker": worker["name"],
        "device": worker.get("device", "-"),
        "rows/s": f"{worker.get('rows_per_s', 0.0):,.1f}",
        "busy": "-" if busy is None else f"{busy:.0%}",
        "limit": worker.get("limit") or "-",
        "unit": f"{worker['unit'][:8]} {worker.get('age_s', 0.0):.0f} s" if worker.get("unit") else "-",
        "stage": worker.get("stage", "-"),
    }


class Display:
    """Shows the progress of a run on stderr.

    Args:
        quiet: show nothing.
        verbose: see `panel`.
        says_first: print the first progress in a log at once, and not only after the time between two lines.
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False, says_first: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.quiet = quiet
        self._says_first = says_first
        self._verbose = verbose
        self._live: Live | None = None
        self._line = ProgressLine(quiet=quiet)
        self._state, self._since = "", 0.0

    def __enter__(self) -> Display:
        if self.console.is_terminal and not self.quiet:
            self._live = Live(console=self.console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def show(self, progress: RunProgress) -> None:
        """Show a progress."""
        now = time.monotonic()
        if progress.state != self._state:
            self._state, self._since = progress.state, now
            if self._live is None and progress.state in (RunState.STARTING, RunState.LOADING):
                self._line.say(state_text(progress))
        if self._live is not None:
            self._live.update(panel(progress, verbose=self._verbose, since_s=now - self._since))
        else:
            line = plain_line(progress)
            if self._says_first or progress.state.ended:
                self._says_first = False
                self._line.say(line)
            else:
                self._line.show(line)

    def say(self, message: str) -> None:
        """Print a line above the live panel."""
        if not self.quiet:
            self.console.print(message, markup=False)

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
