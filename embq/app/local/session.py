"""`embq run` on this machine: server, producer, writer and workers, started and stopped together."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import redis

from embq.app.cli.authorization import require
from embq.app.cli.entry_point import STARTED_AT_S
from embq.app.cli.shared_options import settings_with
from embq.app.local import worker_choices
from embq.app.local.service_process import ServiceProcess
from embq.app.status import measured_speeds
from embq.app.status.display import Display, stages_line
from embq.app.status.failure_causes import cause_lines, described, grouped, only_cause
from embq.app.status.run_log import RunLog
from embq.app.status.run_monitor import RunMonitor
from embq.app.status.run_progress import RunProgress
from embq.core.broker.client import check, connect
from embq.core.broker.embedded import EmbeddedServer, keep_to_ourselves
from embq.core.errors import AwayError, EmbqError, command_line
from embq.core.process.limits import check_open_files
from embq.core.queue.heartbeats import Device
from embq.core.queue.ledger import Ledger
from embq.core.run import checkpoint
from embq.core.run.control import RunState
from embq.core.run.layout import Layout
from embq.core.run.run_info import RunInfo, load_run
from embq.core.service.progress_line import duration, folded
from embq.core.service.stopping import REPEAT_S, StopFlag
from embq.core.settings import Settings
from embq.core.storage.paths import Place
from embq.producer.announce import announce
from embq.sources.access.allowed_hosts import hosts_named
from embq.worker.embedders.lookup import cached_bytes

LOOK_S = 0.25
LOOK_FAR_S = 2.0
"""Between two looks at an object store, each of which takes a few requests."""
LOADED_S = 0.05
"""A model that loaded faster is not worth a word."""
CAUSES_SHOWN = 3
"""Most frequent causes of failures that the end of a run shows."""
HURRY_S = 1.5 * REPEAT_S
"""Two requests to stop that are closer together count as one."""


@dataclass(frozen=True, slots=True)
class SessionOutcome:
    """End of a session: the last progress of the run, and whether it was stopped before its end.

    Attributes:
        all_failed: the code with which all samples of the first unit failed, if that stopped it; else "".
        loaded_s: seconds in which the slowest worker of this session has loaded the model.
    """

    progress: RunProgress
    interrupted: bool
    all_failed: str = ""
    loaded_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Session:
    """Executes one planned run until it is closed or stopped.

    Attributes:
        info: the run.
        layout: of its output folder.
        wishes: state and priority at the start, see `embq.core.run.control`.
        worker_arguments: options for `embq worker`.
        choices: those of them that `embq resume` takes up again.
        settings: with a `broker_url`, or without one to start a server beside the output.
        drain_s: seconds in which workers may finish begun units after a request to stop.
        stops: returns the number of requests to stop so far.
        keep_going: whether to go on if the first unit has failures of one code only.
        server: the embedded server, if there is one.
        all_failed: that code, if it stopped the run.
    """

    info: RunInfo
    layout: Layout
    wishes: Mapping[str, str]
    worker_arguments: list[str]
    choices: dict[str, str]
    settings: Settings
    drain_s: float
    stops: Callable[[], int]
    display: Display
    log: RunLog
    keep_going: bool
    server: EmbeddedServer | None = field(default=None, init=False)
    all_failed: str = field(default="", init=False)
    _last: RunProgress | None = field(default=None, init=False)
    _loading_on: list[str] = field(default_factory=list, init=False)
    _cached: int = field(default_factory=cached_bytes, init=False)

    def run(self) -> SessionOutcome:
        """Work until the run is closed or a stop is requested. Raises the error of a service that gives up."""
        check_open_files()
        with ExitStack() as stack:
            url = self.settings.broker_url or self._start_server(stack)
            if self.server is None:
                # Of two sessions on one output the second is refused, whatever the broker.
                stack.callback(keep_to_ourselves(self.layout.broker).close)
            # Not a patient client: this process restarts a server that died, and must not wait for it.
            client = connect(url, password=self.settings.broker_password)
            check(client, url)
            require(client, "run")
            announce(client, self.info, self.layout.root)
            worker_choices.remember(self.layout, self.choices)
            Ledger(client, self.info.run).request(self.wishes)
            self.layout.logs.mkdir(exist_ok=True)
            children = self._children(url)
            monitor = RunMonitor(self.layout.root, client)
            try:
                for child in children:
                    child.start()
                interrupted = self._until_closed(children, monitor)
            finally:
                self._stop(children, monitor)
            ended = RunMonitor(self.layout.root, None).poll().ended_after(self._last)
            self.display.show(ended)
            if self.server is not None:
                measured_speeds.keep(client, self.info, self.layout.root, workers=int(self.choices.get("workers", 1)))
            if self.server is not None and ended.state == RunState.DONE:
                self.server.stop(discard=True)  # the commit log holds all that a finished run needs
            return SessionOutcome(ended, interrupted, self.all_failed, children[-1].loaded_s())

    def _start_server(self, stack: ExitStack) -> str:
        server = EmbeddedServer(self.layout.broker)
        # On the stack first: locks that `start` takes are released even if it fails.
        stack.callback(server.stop)
        server.start()
        self.server = server
        return server.url

    def _children(self, url: str) -> list[ServiceProcess]:
        # Of an embedded server, which is ours alone, old leases and locks are void, and the queue is rebuilt.
        takeover, rebuild = (["--takeover"], ["--rebuild"]) if self.server is not None else ([], [])

        def child(verb: str, arguments: Sequence[str] = (), first: Sequence[str] = ()) -> ServiceProcess:
            return ServiceProcess(
                verb,
                ["--run", self.info.run, *arguments],
                first=first,
                log=self.layout.logs / f"{verb}.log",
                broker_url=url,
                environment={"EMBQ_PRIVATE_HOSTS": ",".join(self.settings.private_hosts)},
            )

        return [child("writer", takeover, rebuild), child("producer"), child("worker", self.worker_arguments)]

    def _until_closed(self, children: list[ServiceProcess], monitor: RunMonitor) -> bool:
        """Wait for the end of the run; True if the user stopped it."""
        while True:
            if self.stops():
                self.display.say("stopping: units in flight are finished and committed (Ctrl-C again: at once)")
                return True
            if self.server is not None and not self.server.running():
                self.display.say("the embedded server died; starting it again")
                self.server.start()
            for child in children:
                child.supervise()
            # Without an answer the server is restarting, or a child is about to report the error.
            with suppress(redis.exceptions.RedisError, AwayError):
                progress = monitor.poll()
                progress = self._ready_or_not(progress)
                self.display.show(progress)
                self.log.show(progress)
                self._last = progress if progress.limits.so_far.name else self._last
                if progress.state == RunState.CANCELLED:
                    self.display.say("the run was cancelled: what is published is committed, the rest is left")
                    return True
                if not self.keep_going and progress.done:
                    self.keep_going = True
                    self.all_failed = only_cause(self.layout.root) if not progress.rows else ""
                    if self.all_failed:
                        return True
            with suppress(AwayError):  # the writer waits for it as well
                if monitor.log_state().closed:
                    return False
            time.sleep(self._look_s)

    def _ready_or_not(self, progress: RunProgress) -> RunProgress:
        """The progress, if no worker is at work yet: its services are not heard, or are started again."""
        if progress.state == RunState.LOADING:
            self._loading_on = progress.loading_on
            progress = replace(progress, downloaded=cached_bytes() - self._cached)
        elif progress.state not in (RunState.STOPPED, RunState.STARTING):
            self._loading_on = []
        elif self._loading_on:  # loaded, and no first report yet
            return replace(progress, state=RunState.LOADING, loading_on=self._loading_on)
        elif progress.state == RunState.STOPPED:
            return replace(progress, state=RunState.STARTING)
        return progress

    @property
    def _look_s(self) -> float:
        return LOOK_S if isinstance(self.layout.root, Path) else LOOK_FAR_S

    def _show_finish(self, monitor: RunMonitor, left_s: float) -> None:
        """Show what is still in hand while workers drain, and for how long; never fails, because services are left."""
        with suppress(redis.exceptions.RedisError, EmbqError):
            progress = monitor.poll()
            if progress.state != RunState.DONE:
                bound = max(0.0, left_s if progress.finish_s is None else min(progress.finish_s, left_s))
                progress = replace(progress, state=RunState.FINISHING, eta_s=round(bound, 1))
            self.display.show(progress)

    def _stop(self, children: list[ServiceProcess], monitor: RunMonitor) -> None:
        """Stop workers first, so that the writer commits all that they publish; then producer and writer."""
        writer, producer, worker = children
        stops_before = self.stops()
        if worker.process is not None and worker.process.poll() is None:
            worker.process.terminate()
            began, looked_at = time.monotonic(), 0.0
            deadline = began + self.drain_s + 20
            # Without a writer, finished results are not taken, and may fill the broker: release units soon.
            hurry_at = time.monotonic() + HURRY_S if writer.ended() else deadline
            while worker.process.poll() is None and time.monotonic() < deadline:
                if self.server is not None and not self.server.running():
                    self.server.start()
                if self.stops() > max(1, stops_before) or time.monotonic() > hurry_at:
                    worker.hurry()
                    stops_before, hurry_at = self.stops(), deadline
                if not self.display.quiet and time.monotonic() - looked_at >= self._look_s:
                    looked_at = time.monotonic()
                    self._show_finish(monitor, began + self.drain_s - looked_at)
                time.sleep(0.05)
            worker.stop(1.0)
        producer.stop(10.0)
        writer.stop(120.0)


def run_locally(
    info: RunInfo,
    root: Place,
    options: dict[str, Any],
    *,
    broker: str,
    quiet: bool,
    inputs: Sequence[str] = (),
    resumed: bool = False,
) -> SessionOutcome:
    """Execute a planned run on this machine; returns at once if nothing is left to do.

    Args:
        inputs: as the user names them; their hosts may be private ones.
        resumed: whether options of workers that are not given are those of the session before.
    """
    initial = RunMonitor(root, None).poll()
    if initial.state == RunState.DONE:
        if not quiet:
            click.echo(folded(f"nothing is left to do: {root} holds the finished run {info.run}", err=True), err=True)
        return SessionOutcome(initial, False)
    context = click.get_current_context(silent=True)
    if resumed and context is not None:
        worker_choices.recall(Layout(root), context, options)
    # Starting a paused or cancelled run resumes it.
    wishes: dict[str, str] = {"state": RunState.RUNNING}
    if options.get("priority") is not None:
        wishes["priority"] = str(options["priority"])
    if not quiet:
        units = f"{info.units - initial.done - initial.quarantined:,} of {info.units:,} units to do"
        what = f"run {info.run}: {units} with {info.model.spec} in {info.model.precision} -> {root}"
        click.echo(folded(what, err=True), err=True)
        if resumed and (again := worker_choices.given(context, options)):
            click.echo(folded(f"workers: {worker_choices.described(again)}", err=True), err=True)
    settings = settings_with(broker)
    settings = replace(settings, private_hosts=(*settings.private_hosts, *hosts_named(inputs)))
    stopped = StopFlag()
    stopped.install()
    facts = {"model": info.model.spec, "precision": info.model.precision, "version": info.version}
    with (
        RunLog(options.get("log", ()), root, run=info.run, facts=facts, quiet=quiet) as log,
        Display(quiet=quiet, verbose=options.get("verbose", False)) as display,
    ):
        outcome = Session(
            info=info,
            layout=Layout(root),
            wishes=wishes,
            worker_arguments=_worker_arguments(options),
            choices=worker_choices.given(context, options),
            settings=settings,
            drain_s=options["drain_timeout"],
            stops=lambda: stopped.count,
            display=display,
            log=log,
            # Of a run that goes on, its user has seen the first units.
            keep_going=options.get("keep_going", True) or initial.done + initial.quarantined > 0,
        ).run()
        log.show(outcome.progress, last=True)
        return outcome


def _worker_arguments(options: dict[str, Any]) -> list[str]:
    return [part for name in worker_choices.NAMES for part in (f"--{name.replace('_', '-')}", str(options[name]))]


def own_devices(selection: str) -> list[Device]:
    """The devices of this machine that `--devices` names, found without torch."""
    from embq.worker.supervisor.devices import find_devices
    from embq.worker.supervisor.machine import described

    visible = Settings.from_environment().cuda_visible
    return list(described(find_devices(selection, visible), visible).values())


def print_summary(outcome: SessionOutcome, root: Place, *, as_json: bool) -> int:
    """Print the summary of a run; returns the exit status."""
    progress = outcome.progress
    if as_json:
        click.echo(json.dumps(progress.to_json()))
    else:
        for line in summary_lines(progress, root, outcome.loaded_s):
            click.echo(folded(line))
    if progress.state != RunState.DONE and outcome.interrupted and not outcome.all_failed:
        click.echo(f"stopped; go on with: {command_line('resume', root)}", err=True)
        if again := worker_choices.remembered(Layout(root)):
            words = f"it uses {worker_choices.described(again)} again; give it others to change them"
            click.echo(folded(words, err=True), err=True)
    return progress.exit_status


def summary_lines(progress: RunProgress, root: Place, loaded_s: float = 0.0) -> list[str]:
    """Summary of a run: in = rows + failures, duration, bottleneck, and where the files are.

    Args:
        loaded_s: seconds of this command that loading the model took.
    """
    from embq.core.formats.folders import row_folders

    total = progress.rows + progress.failures
    lines = [f"in {total:,} = rows {progress.rows:,} + failures {progress.failures:,}"]
    if progress.state != RunState.DONE:
        remaining = progress.units_total - progress.done - progress.quarantined
        lines[0] += f" so far; {remaining:,} of {progress.units_total:,} units are left"
    elif progress.quarantined:
        lines[0] += f" ({progress.quarantined:,} units failed as a whole; what they hold is not counted)"
    elif not total:
        lines[0] += ": the inputs hold no sample"
    if progress.truncated:
        lines.append(
            f"{progress.truncated:,} texts are longer than the model reads, so only their beginnings were embedded; to "
            "embed them whole, run with --chunk-tokens and another --output"
        )
    with suppress(EmbqError):
        if unread := checkpoint.current(Layout(root), progress.units_total).unread:
            lines.append(
                f"{unread:,} rows lack metadata, or a caption that is not embedded, because it cannot be read; the "
                f"first of each unit is in the logs as metadata_unread: {command_line('logs', root)}"
            )
    timing = progress.timing
    if progress.state == RunState.DONE and timing.get("wall_s"):
        lines.append(
            f"{progress.rows_per_s:,.1f} rows/s from the first unit to the last commit; this command took "
            f"{duration(time.monotonic() - STARTED_AT_S)}"
            f"{f', {loaded_s:.1f} s of them loading the model' if loaded_s >= LOADED_S else ''}"
        )
    if progress.limits.so_far.name:
        lines.append(f"limited by {progress.limits.so_far.sentence()}")
        lines.append(f"stages: {stages_line(progress.limits.so_far)}")
    if progress.rows:
        lines.append(f"rows in {', '.join(map(str, row_folders(Layout(root), load_run(root))))}")
    if progress.failures:
        lines.append(f"failures in {root / 'failures'}; list them with: {command_line('failures', root)}")
        with suppress(EmbqError):  # the list is asked for anew by that command
            groups = described(root, grouped(root)[:CAUSES_SHOWN])
            width = max((len(group["code"]) for group in groups), default=0)
            lines += [line for group in groups for line in cause_lines(group, width)]
    return lines
