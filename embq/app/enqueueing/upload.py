"""`embq enqueue --upload` and `--inline`: plans a run on this machine and sends it to the writer's."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path, PurePosixPath

import click
import redis

from embq.core.errors import UsageError, command_line
from embq.core.queue.heartbeats import services
from embq.core.run.layout import INPUTS
from embq.core.service.progress_line import ProgressLine, duration, size_text
from embq.core.storage.objects import ObjectPath
from embq.producer.enqueue import Request, prepare
from embq.producer.upload import PlannedUpload, UploadedInputs, UploadResult, deliver, plan_upload

PLAIN_EVERY_S = 10.0


def send_run(
    client: redis.Redis, request: Request, *, inline: bool, as_json: bool, priority: int | None = None
) -> None:
    """Plan a run in a temporary folder, send it, and print whether this machine may leave."""
    output = str(request.output)
    if isinstance(request.output, ObjectPath):
        raise UsageError(
            f"--output {output}: --upload and --inline go into a folder of the writer's machine",
            next_step="leave them out: this machine writes the plan to the object store itself",
        )
    if not PurePosixPath(output).is_absolute():
        raise UsageError(
            f"--output {output}: with --upload this is a folder of the writer's machine",
            next_step="give its absolute path there, for example --output /data/out",
        )
    inputs = UploadedInputs(output) if inline else None
    with tempfile.TemporaryDirectory(prefix="embq-enqueue-") as folder:
        planned = prepare(
            replace(request, output=Path(folder) / "run"), relocate=inputs.relocate if inputs is not None else None
        )
        if planned.listing and not as_json:
            click.echo(planned.listing, err=True)
        for warning in [*planned.warnings, *(_left_out(client, inputs) if inputs is not None else ())]:
            click.echo(f"warning: {warning}", err=True)
        parcel = plan_upload(Path(folder) / "run", output, inputs, priority)
        began = time.monotonic()
        with ProgressLine(every_s=PLAIN_EVERY_S) as line:

            def report(done: int, total: int, why: str) -> None:
                line.show(_progress(done, total, why, time.monotonic() - began))

            delivered = deliver(client, parcel, report)
    _print_summary(parcel, delivered, as_json=as_json)


def _left_out(client: redis.Redis, inputs: UploadedInputs) -> list[str]:
    """At most one sentence: machines with workers that see inputs on the writer's machine only in a shared folder."""
    registered = [report.service for report in services(client)]
    keepers = {service.host for service in registered if service.role == "writer"}
    remote = sorted({service.host for service in registered if service.role == "worker" and not service.run} - keepers)
    if not keepers or not remote:
        return []
    return [
        f"--inline sends the inputs to {inputs.output}/{INPUTS} on {', '.join(sorted(keepers))}, and workers on "
        f"{', '.join(remote)} leave them to others unless they see that folder; for every machine to take part, put "
        "the inputs in a bucket or behind http and give the URLs with --upload"
    ]


def _progress(done: int, total: int, why: str, seconds: float) -> str:
    """A line on an upload: bytes that the writer has, of all, and what it waits for."""
    text = f"sending: {size_text(done)} of {size_text(total)} are on the writer's disk"
    if why:
        return f"{text}; waits: {why}"
    if not done:
        return f"{text}; no writer has taken anything yet"
    return f"{text}, about {duration((total - done) * seconds / done)} left"


def _print_summary(parcel: PlannedUpload, delivered: UploadResult, *, as_json: bool) -> None:
    info, end = parcel.info, delivered.end
    # Until a writer has taken it, only it knows whether the folder holds a run to which this is added.
    run = end.run if end is not None else info.run
    units = end.units if end is not None else info.units
    added = end.added if end is not None else None
    if as_json:
        answer = {"schema": 1, "run": run, "units": units, "accepted": end is not None}
        answer["precision"] = info.model.precision
        if end is not None:
            answer |= {"new": added is None, "added": added or 0}
        click.echo(json.dumps(answer))
    elif end is not None and added == 0:
        click.echo(f"run {run} is already enqueued: {units:,} units; nothing was added")
    else:
        count, total = (added, end.samples) if end is not None and added else (units, info.samples)
        samples = f", {total:,} samples" if total is not None else ""
        verb = f"added to {units - count:,}" if added else "enqueued"
        click.echo(f"run {run}: {count:,} units{samples} {verb} for {info.model.spec}")
    if end is not None:
        click.echo("the writer has it on its disk; this machine may leave", err=True)
    else:
        click.echo(
            "the broker has it on its disk, and no writer has taken it yet: one will as soon as it runs; "
            "this machine may leave",
            err=True,
        )
    click.echo(f"watch it with: {command_line('status', run, '--watch')}", err=True)
