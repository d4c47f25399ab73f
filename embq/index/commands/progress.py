"""Progress of a build on stderr, on a terminal or in a log."""

from __future__ import annotations

import time

import click

from embq.core.service.progress_line import ProgressLine, duration
from embq.index.change.growth import GrowthSpec
from embq.index.plan.index_plan import describe_plan
from embq.index.stages.spec import BuildSpec

STAGE_WORDS = {
    "sample": "reading, and drawing rows to train on",
    "train": "training",
    "queries": "choosing queries",
    "truth": "finding their true neighbours",
    "add": "adding rows",
    "merge": "merging lists",
    "tune": "tuning",
    "grow": "adding new rows",
    "new_queries": "choosing new rows as queries",
    "retune": "measuring searches for new rows",
    "compact": "merging what was added",
    "vectors": "reading vectors",
    "dedup": "finding near duplicates",
    "groups": "grouping them",
}
"""Stage -> description."""

SAY_S = 10.0
"""Least time between two lines on a stage in a log."""


class ConsoleProgress:
    """Shows the progress of a build, a growth or a compaction.

    Args:
        quiet: print warnings only.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._line = ProgressLine(quiet=quiet, every_s=SAY_S)
        self._planned: dict[str, float] = {}
        self._stage = ""
        self._began = self._stage_began = time.monotonic()

    def planned(self, spec: BuildSpec, *, resumed: bool) -> None:
        """See `embq.index.stages.build.BuildProgress`."""
        self._planned = {cost.stage: cost.seconds for cost in spec.plan.stages}
        if self._quiet:
            return
        click.echo(describe_plan(spec.plan), err=True)
        if resumed:
            click.echo("continuing an interrupted build of this index", err=True)

    def growing(self, spec: GrowthSpec, *, resumed: bool) -> None:
        """See `embq.index.change.growth.GrowthProgress`."""
        if self._quiet:
            return
        click.echo(
            f"adding {spec.new_rows:,} new rows to the {spec.growth.first_id:,} of the index, without training again",
            err=True,
        )
        if resumed:
            click.echo("continuing an interrupted attempt to add them", err=True)

    def stage(self, name: str, done: int, units: int) -> None:
        """See `embq.index.stages.build.BuildProgress`."""
        now = time.monotonic()
        if name != self._stage:
            self._stage, self._stage_began = name, now
        title = f"{name:<8} {STAGE_WORDS.get(name, name)}"
        if done == units:
            self._line.say(f"{title}: {duration(now - self._stage_began)}")
        elif self._line.due:
            self._line.show(f"{title}: {done:,} of {units:,} units{self._remaining(done, units)}")

    def _remaining(self, done: int, units: int) -> str:
        """The estimated time left: the planned time of what is left, scaled by the speed so far."""
        stages = list(self._planned)
        if self._stage not in stages:
            return ""
        at = stages.index(self._stage)
        done_s = self._planned[self._stage] * done / max(1, units)
        planned_before = sum(self._planned[stage] for stage in stages[:at]) + done_s
        after = sum(self._planned[stage] for stage in stages[at:]) - done_s
        so_far = time.monotonic() - self._began
        pace = min(10.0, max(0.1, so_far / planned_before)) if planned_before > 1.0 else 1.0
        return f", about {duration(after * pace)} left"
