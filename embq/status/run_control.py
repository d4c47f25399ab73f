"""What `embq pause`, `embq cancel` and `embq resume` share: finding a run, and asking something of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.errors import ConfigError, EmbqError, InputError
from core.storage.paths import is_folder, place
from embq.cli.options import settings_with

if TYPE_CHECKING:
    import redis

    from core.queue.runs import RunRecord

CONFIRM_S = 10.0
"""A writer looks for wishes twice a second; one that is committing a large part takes a few seconds."""
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of it.

    Attributes:
        state: of the run in the broker; "" where its queue is not built yet.
        noted: whether the run's writer has it in the output folder, where it outlives the broker.
    """

    record: RunRecord
    state: str
    noted: bool
    done: int

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "schema": 1,
            "run": self.record.run,
            "state": self.state,
            "noted": self.noted,
            "units": {"done": self.done, "total": self.record.units},
        }

    @property
    def how_far(self) -> str:
        """How much of the run is done, for people."""
        return f"{self.done:,} of {self.record.units:,} units are done"


def find(run: str, broker: str) -> tuple[RunRecord, redis.Redis]:
    """The run with that id or output folder, and the broker that knows it.

    Raises:
        ConfigError: no broker is configured, and no `embq run` is at work on the folder.
        InputError: the broker does not know the run, or the folder holds none.
    """
    from core.broker.client import connect, reach
    from core.broker.embedded import EmbeddedServer
    from core.queue.runs import registered
    from core.run.layout import Layout
    from core.run.run_info import load_run

    settings = settings_with(broker)
    url = settings.broker_url
    name = run
    if is_folder(run):
        root = place(run)
        name = load_run(root).run
        url = url if broker else EmbeddedServer.find(Layout(root).broker) or url
    if not url:
        raise ConfigError(
            f"nobody is at work on {run} on this machine, and no broker is configured",
            next_step="give --broker redis://HOST:6379 or set EMBQ_BROKER_URL",
        )
    client = connect(url, password=settings.broker_password)
    reach(client, url)
    record = registered(client).get(name)
    if record is None:
        raise InputError(
            f"the broker knows no run {name}",
            next_step="`embq status` lists the runs that it knows; `embq resume OUT` hands one to it again",
        )
    return record, client


def ask(
    record: RunRecord,
    client: redis.Redis,
    wishes: Mapping[str, str],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Asked:
    """Ask something of a run, and wait until its writer has noted it in the output folder, for at most `CONFIRM_S`."""
    from redis.exceptions import RedisError

    from core.queue.hints import hint_queue, withdraw
    from core.queue.ledger import Ledger
    from embq.cli.authorization import require

    require(client, {"paused": "pause", "cancelled": "cancel"}.get(wishes.get("state", ""), "resume"))
    ledger = Ledger(client, record.run)
    ledger.ask(wishes)
    end = clock() + CONFIRM_S
    try:
        if wishes.get("state", "running") != "running":
            withdraw(client, hint_queue(client, record.model.queue_key), record.run)
        while not (noted := not ledger.asked()) and clock() < end:
            time.sleep(LOOK_S)
        meta = ledger.meta()
    except RedisError:
        if (told := _as_noted(record, wishes)) is None:
            raise
        return told
    return Asked(record, meta.get("state", ""), noted, int(meta.get("done", 0)))


def _as_noted(record: RunRecord, wishes: Mapping[str, str]) -> Asked | None:
    """The same from the output folder alone: an `embq run` that is cancelled ends, and its broker with it. None where
    the wishes do not stand there, or the folder cannot be read here."""
    from core.run.commit_log import CommitLog
    from core.run.control import load_control
    from core.run.layout import Layout
    from core.run.run_info import load_run

    layout = Layout(place(record.output))
    try:
        control = load_control(layout)
        if control != control.with_wishes(wishes):
            return None
        done = CommitLog(layout).replay(load_run(layout.root).units).count
    except EmbqError:
        return None
    return Asked(record, control.state, True, done)


def warn_unless_noted(asked: Asked) -> None:
    """Tell the user that only the broker knows it so far."""
    import click

    if not asked.noted:
        click.echo(
            "warning: no writer has noted it in the output folder yet; until one does, only the broker knows it",
            err=True,
        )
