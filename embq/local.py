"""What `embq run` and `embq resume` share: doing the work here, and saying what came of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from core.errors import Exit
from core.queue.service_registry import Device
from core.run.layout import Layout
from core.run.run_info import RunInfo, load_run
from core.service.stopping import StopFlag
from core.settings import Settings
from core.storage.paths import Place
from embq.display import Display, duration, stages_line
from embq.options import settings_with
from embq.progress import Progress
from embq.session import Outcome, Session
from embq.watch import Watch
from sources.reach import hosts_named


def work(
    info: RunInfo, root: Place, options: dict[str, Any], *, broker: str, quiet: bool, inputs: Sequence[str] = ()
) -> Outcome:
    """Bring a planned run to its end on this machine; at once where nothing is left to do.

    Args:
        inputs: as the user names them: their hosts may be private ones.
    """
    before = Watch(root, None).look()  # the run that stands in the folder, with all that was added
    if before.state == "done":
        if not quiet:
            click.echo(f"nothing is left to do: {root} holds the finished run {info.run}", err=True)
        return Outcome(before, False)
    # Whoever starts a run that was paused or cancelled wants it to go on.
    wishes = {"state": "running"}
    if options.get("priority") is not None:
        wishes["priority"] = str(options["priority"])
    if not quiet:
        click.echo(
            f"run {info.run}: {info.units - before.done - before.quarantined:,} of {info.units:,} units to do with "
            f"{info.model.spec} in {info.model.precision} -> {root}",
            err=True,
        )
    settings = settings_with(broker)
    settings = replace(settings, private_hosts=(*settings.private_hosts, *hosts_named(inputs)))
    stopped = StopFlag()
    stopped.install()
    with Display(quiet=quiet) as display:
        return Session(
            info,
            root,
            wishes=wishes,
            worker_arguments=_worker_arguments(options),
            settings=settings,
            drain_s=options["drain_timeout"],
            stops=lambda: stopped.count,
            display=display,
        ).run()


def _worker_arguments(options: dict[str, Any]) -> list[str]:
    names = ("devices", "workers_per_device", "batch_size", "prepare_threads", "prefetch", "transport", "drain_timeout")
    return [part for name in names for part in (f"--{name.replace('_', '-')}", str(options[name]))]


def own_devices(wanted: str) -> list[Device]:
    """The devices of this machine that `--devices` names; torch is not imported in this process."""
    from worker.supervisor.devices import find_devices
    from worker.supervisor.machine import described

    visible = Settings.from_environment().cuda_visible
    return list(described(find_devices(wanted, visible), visible).values())


def account(outcome: Outcome, root: Place, *, as_json: bool) -> int:
    """Print what went in and what came out; gives the exit status."""
    progress = outcome.progress
    if as_json:
        click.echo(json.dumps(progress.to_json()))
    else:
        for line in account_lines(progress, root):
            click.echo(line)
    if progress.state != "done":
        if outcome.interrupted:
            click.echo(f"stopped; go on with: embq resume {root}", err=True)
        return Exit.INTERRUPTED
    return Exit.SOME_FAILED if progress.failures else Exit.DONE


def account_lines(progress: Progress, root: Place) -> list[str]:
    """The account of a run: in = rows + failures, where it is, how long it took."""
    from core.formats.files import row_folders

    total = progress.rows + progress.failures
    lines = [f"in {total:,} = rows {progress.rows:,} + failures {progress.failures:,}"]
    if progress.state != "done":
        left = progress.units_total - progress.done - progress.quarantined
        lines[0] += f" so far; {left:,} of {progress.units_total:,} units are left"
    elif progress.quarantined:
        lines[0] += f" ({progress.quarantined:,} units failed as a whole; what they hold is not counted)"
    elif not total:
        lines[0] += ": the inputs hold no sample"
    if progress.truncated:
        lines.append(
            f"truncated {progress.truncated:,}: longer than the model reads, so only their beginnings were embedded; "
            "to embed whole texts, run with --chunk-tokens and another --output"
        )
    timing = progress.timing
    if progress.state == "done" and timing.get("wall_s"):
        lines.append(
            f"{progress.rows_per_s:,.1f} rows/s from the first unit to the last commit; "
            f"{duration(timing['wall_s'])} in all, {timing.get('load_s', 0):.1f} s of them loading the model"
        )
    if progress.limits.so_far.name:
        lines.append(f"limited by {progress.limits.so_far.sentence()}")
        lines.append(f"stages: {stages_line(progress.limits.so_far)}")
    lines.append(f"rows in {', '.join(map(str, row_folders(Layout(root), load_run(root))))}")
    if progress.failures:
        lines.append(f"failures in {root / 'failures'}; list them with: embq failures {root}")
    return lines
