"""Finds the run that a user names by its output folder, its id, or the id of an upload."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import redis

from embq.app.cli.shared_options import settings_with
from embq.app.status.run_monitor import RemoteRunMonitor, RunMonitor, open_monitor
from embq.core.broker.client import connect, reach
from embq.core.broker.embedded import EmbeddedServer
from embq.core.errors import ConfigError, InputError, command_line
from embq.core.queue.reporting import FOREIGN_NEXT
from embq.core.queue.runs import RunRecord, foreign_runs, registered
from embq.core.queue.uploads import UploadProgress, in_progress, outcome_of
from embq.core.run.checkpoint import committed
from embq.core.run.layout import Layout
from embq.core.run.run_info import load_run
from embq.core.storage.paths import Place, is_folder, place, refuse_missing


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """A run that a user named.

    Attributes:
        run: its id.
        root: its output folder, if the user named it.
        client: the broker; None if none is configured.
        record: the run as the broker knows it, if the user named its id.
        uploads: what is on its way to the writer.
    """

    run: str
    root: Place | None
    client: redis.Redis | None
    record: RunRecord | None
    uploads: list[UploadProgress]

    def monitor(self) -> RunMonitor | RemoteRunMonitor | None:
        """Monitors the run; None as long as all of it is on its way to the writer. InputError if nothing is."""
        if self.root is not None:
            return RunMonitor(self.root, self.client)
        if self.client is None:
            raise InputError(
                f"{self.run} is not a folder, and no broker is configured",
                next_step="name an output folder, or give --broker / EMBQ_BROKER_URL",
            )
        return open_monitor(self.record, self.client) if self.record is not None else None

    def registered(self) -> tuple[RunRecord, redis.Redis]:
        """The run as the broker knows it, and the broker; InputError if it knows none, ConfigError without one."""
        if self.client is None:
            if self.root is None and not re.fullmatch(r"[0-9a-f]{16}", self.run):
                refuse_missing(Path(self.run))
            self._refuse_done()
            resume = f"; a run that was stopped goes on with {command_line('resume', self.root)}" if self.root else ""
            raise ConfigError(
                f"no `embq run` is at work on {self.root or self.run} on this machine, and no broker is configured",
                next_step=f"give --broker redis://HOST:6379 or set EMBQ_BROKER_URL{resume}",
            )
        record = self.record or registered(self.client).get(self.run)
        if record is None:
            raise InputError(
                f"the broker knows no run {self.run}",
                next_step="`embq status` lists the runs that it knows; `embq resume OUT` hands one to it again",
            )
        return record, self.client

    def _refuse_done(self) -> None:
        """Raise InputError `not_running` for a run that is done; one that is not may be at work through any broker."""
        if self.root is None:
            return
        info, state = committed(self.root)
        if state.closed:
            raise InputError(
                f"the run in {self.root} is done: {state.count:,} of {info.units:,} units",
                next_step="there is nothing to stop",
                code="not_running",
            )


def resolve_run(named: str, broker: str) -> ResolvedRun:
    """The run with that output folder or id, or with the id of an upload that became one.

    Args:
        broker: what was given as --broker; "" for the one of the folder's `embq run`, or of the environment.

    Raises:
        InputError: the broker knows no such run; the folder holds none; or what was sent as this run was refused.
        BrokerError: the broker does not answer.
    """
    settings = settings_with(broker)
    root = place(named) if is_folder(named) else None
    run = load_run(root).run if root is not None else named
    url = settings.broker_url
    if root is not None and not broker:
        url = EmbeddedServer.find(Layout(root).broker) or url
    if not url:
        return ResolvedRun(run=run, root=root, client=None, record=None, uploads=[])
    client = connect(url, password=settings.broker_password)
    reach(client, url)
    if root is not None:
        return ResolvedRun(run=run, root=root, client=client, record=None, uploads=arriving(client, run, str(root)))
    records = registered(client)
    if run not in records:
        if uploads := arriving(client, run):
            return ResolvedRun(run=run, root=None, client=client, record=None, uploads=uploads)
        run = _became_of(client, run)
        if run not in records:
            raise _unknown(named, client)
    record = records[run]
    return ResolvedRun(run=run, root=None, client=client, record=record, uploads=arriving(client, run, record.output))


def _unknown(run: str, client: redis.Redis) -> InputError:
    for foreign in foreign_runs(client):
        if foreign.run == run:
            return InputError(
                f"the run {run} was announced under protocol version {foreign.protocol}, which this embq does not read",
                next_step=FOREIGN_NEXT,
            )
    return InputError(f"the broker knows no run {run}", next_step="`embq status` lists the runs that it knows")


def arriving(client: redis.Redis, run: str, output: str = "") -> list[UploadProgress]:
    """Uploads in progress: all, or those of a run by its id, their own name, or its output folder."""
    return [
        upload
        for upload in in_progress(client)
        if not run or run in (upload.upload.run, upload.name) or upload.upload.output == output
    ]


def _became_of(client: redis.Redis, run: str) -> str:
    """The run that an upload of the last day became; "" if none is known.

    Raises InputError if it was refused, with the writer's code and reason.
    """
    outcome = outcome_of(client, run)
    if outcome is not None and outcome.end == "refused":
        raise InputError(
            f"what was sent as run {run} was refused: {outcome.why}",
            code=outcome.code,
            next_step="send it again once that is mended; the log of `embq writer` tells more",
        )
    return "" if outcome is None else outcome.run
