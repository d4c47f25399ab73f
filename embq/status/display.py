"""Display of a run: a live panel on a terminal, one line every 30 seconds in a log."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from core.redaction import printable
from core.service.progress_line import ProgressLine, duration
from embq.status.bottleneck import MEANING, Bottleneck
from embq.status.run_progress import RunProgress

STAGE_NAMES = {"read": "read", "prepare": "prepare", "embed": "device", "publish": "publish"}
"""Stage of a worker -> its name for people."""


def count(rows: int | None, exact: bool = True) -> str:
    """A number of rows; estimates with "about"."""
    if rows is None:
        return "?"
    return f"{rows:,}" if exact else f"about {rows:,}"


def cell(value: object) -> Text:
    """Text that may come from the broker: control characters escaped, and no markup."""
    return Text(printable(str(value)))


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


def panel(progress: RunProgress) -> Group:
    """A panel with the progress of a run, for a terminal."""
    fraction = (progress.done + progress.quarantined) / progress.units_total if progress.units_total else 0.0
    if progress.tokens_total:
        fraction = progress.tokens / progress.tokens_total
    head = Text.assemble(
        (f"run {progress.run}", "bold"),
        f"  {printable(progress.model)}  ",
        (progress.state, "green" if progress.workers else "yellow"),
    )
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=1.0, completed=fraction, width=40),
        f"{fraction:6.1%}",
        Text(_left(progress), style="cyan"),
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "rows",
        f"{progress.rows:,} of {count(progress.rows_total, progress.rows_total_exact)} committed, "
        f"{progress.failures:,} failures, {_speed(progress):,.1f} rows/s",
    )
    if progress.tokens:
        total = count(progress.tokens_total, progress.state == "done")
        speed = f", {progress.tokens_per_s:,.0f} tokens/s" if progress.tokens_per_s else ""
        facts.add_row("tokens", f"{progress.tokens:,} of {total} committed{speed}")
    if progress.truncated:
        facts.add_row("truncated", f"{progress.truncated:,} texts are longer than the model reads (see --chunk-tokens)")
    facts.add_row(
        "units",
        f"{progress.done:,} done, {progress.received:,} received, {progress.in_flight:,} in flight, "
        f"{progress.queued:,} queued, {progress.quarantined:,} quarantined",
    )
    if progress.state != "done":
        facts.add_row("limit", cell(limit_line(progress)))
        if stages := stages_line(progress.limits.now):
            facts.add_row("stages", stages)
    oldest = max(progress.workers, key=lambda worker: float(worker.get("age_s") or 0), default=None)
    if oldest is not None and oldest.get("unit"):
        age = duration(oldest.get("age_s", 0.0))
        facts.add_row("oldest", cell(f"unit {oldest['unit'][:8]}  {age}  {oldest.get('stage', '-')}  {oldest['name']}"))
    return Group(head, bar, facts, *([_workers(progress.workers)] if progress.workers else []))


def _speed(progress: RunProgress) -> float:
    """Rows per second: embedded now; committed on average, for a run that is over."""
    return progress.rows_per_s if progress.state == "done" else progress.embedding_per_s


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


def _left(progress: RunProgress) -> str:
    if progress.state == "done":
        return "done"
    if progress.eta_s is None:
        return "estimating" if progress.state == "running" else ""
    return f"about {duration(progress.eta_s)} left, by {progress.eta_basis}"


def _workers(workers: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("worker", "device", "rows/s", "device busy", "limit", "unit", "stage"):
        table.add_column(name, justify="right" if name in ("rows/s", "device busy") else "left")
    for worker in workers[:16]:
        cells = (
            worker["name"],
            worker.get("device", "-"),
            f"{worker.get('rows_per_s', 0.0):,.1f}",
            _device_busy(worker),
            worker.get("limit") or "-",
            f"{worker['unit'][:8]} {worker.get('age_s', 0.0):.0f} s" if worker.get("unit") else "-",
            worker.get("stage", "-"),
        )
        table.add_row(*map(cell, cells))
    if len(workers) > 16:
        table.add_row(f"and {len(workers) - 16} more", "", "", "", "", "", "")
    return table


def _device_busy(worker: dict[str, Any]) -> str:
    attribution = worker.get("attribution")
    busy = attribution["late"]["stages"].get("embed", {}).get("busy") if attribution else None
    return "-" if busy is None else f"{busy:.0%}"


class Display:
    """Shows the progress of a run on stderr.

    Args:
        quiet: show nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.quiet = quiet
        self._live: Live | None = None
        self._line = ProgressLine(quiet=quiet)

    def __enter__(self) -> Display:
        if self.console.is_terminal and not self.quiet:
            self._live = Live(console=self.console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def show(self, progress: RunProgress) -> None:
        """Show a progress."""
        if self._live is not None:
            self._live.update(panel(progress))
        elif self._line.due:
            self._line.show(plain_line(progress))

    def say(self, message: str) -> None:
        """Print a line above the live panel."""
        if not self.quiet:
            self.console.print(message, markup=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
