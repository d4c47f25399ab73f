"""Pauses, resumes and cancels runs through the broker."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import click
import redis
from redis.exceptions import RedisError

from embq.app.cli.authorization import require
from embq.app.status.resolve_run import resolve_run
from embq.core.errors import EmbqError
from embq.core.queue.hints import hint_queue, withdraw
from embq.core.queue.ledger import Ledger
from embq.core.queue.runs import RunRecord
from embq.core.run import checkpoint
from embq.core.run.control import VERBS, RunState, load_control
from embq.core.run.layout import Layout
from embq.core.run.run_info import load_run
from embq.core.storage.paths import place

CONFIRM_S = 10.0
"""A writer looks for wishes twice a second; one that is committing a large part takes a few seconds."""
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class ControlResult:
    """A run after a request.

    Attributes:
        state: of the run in the broker; ABSENT if its queue is not built yet.
        noted: whether the run's writer has it in the output folder, where it outlives the broker.
        done: committed units.
    """

    record: RunRecord
    state: RunState
    noted: bool
    done: int

    @property
    def how_far(self) -> str:
        """Committed units of all units, for people."""
        return f"{self.done:,} of {self.record.units:,} units are done"

    def print(self, verb: str, sentence: str, *, as_json: bool, warn: bool = True) -> None:
        """Print the result.

        Args:
            verb: the command.
            sentence: its effect on a run that is not done, without the subject.
            warn: of what only the broker knows so far.
        """
        if as_json:
            units = {"done": self.done, "total": self.record.units}
            shape = {"schema": 1, "run": self.record.run, "state": self.state, "noted": self.noted, "units": units}
            click.echo(json.dumps(shape))
            return
        if self.state == RunState.DONE:
            sentence = f"is done; there is nothing to {verb}"
        click.echo(f"run {self.record.run} {sentence}")
        if warn and not self.noted and self.state != RunState.DONE:
            click.echo(
                "warning: no writer has noted it in the output folder yet; until one does, only the broker knows it",
                err=True,
            )


def control_run(named: str, broker: str, verb: str) -> ControlResult:
    """`request` for the run that a user names, see `resolve_run`."""
    return request(*resolve_run(named, broker).registered(), verb)


def request(
    record: RunRecord,
    client: redis.Redis,
    verb: str,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> ControlResult:
    """Send a request, and wait until the run's writer has noted it in the output folder, for at most `CONFIRM_S`.

    Args:
        verb: one of `embq.core.run.control.VERBS`.
    """
    require(client, verb)
    ledger = Ledger(client, record.run)
    ledger.request({"state": VERBS[verb]})
    end = clock() + CONFIRM_S
    try:
        if VERBS[verb] != RunState.RUNNING:
            withdraw(client, hint_queue(client, record.model.queue_key), record.run)
        while not (noted := not ledger.requested()) and clock() < end:
            time.sleep(LOOK_S)
        meta = ledger.meta()
    except RedisError:
        if (result := _from_folder(record, VERBS[verb])) is None:
            raise
        return result
    return ControlResult(record, RunState.read(meta.get("state")), noted, int(meta.get("done", 0)))


def _from_folder(record: RunRecord, state: RunState) -> ControlResult | None:
    """The result by the output folder alone: an `embq run` that is cancelled ends, and its broker with it.

    None if the folder has another state, or cannot be read here.
    """
    layout = Layout(place(record.output))
    try:
        control = load_control(layout)
        if control.state != state:
            return None
        done = checkpoint.current(layout, load_run(layout.root).units).count
    except EmbqError:
        return None
    return ControlResult(record, control.state, True, done)
