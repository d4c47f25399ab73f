"""`embq run` and `embq enqueue`: verbs that make a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from embq.app.cli.run_options import run_options
from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import (
    batch_size_option,
    broker_option,
    json_option,
    log_option,
    priority_option,
    quiet_option,
    settings_with,
    threads_option,
    verbose_option,
    worker_options,
)
from embq.core.errors import EmbqError, InputError, UsageError, command_line
from embq.core.service.progress_line import folded

NAMED = 3
"""Inputs that an error names."""
OTHER_RUN = ("other_run", "other_inputs", "input_changed")
"""Codes of errors by which the output holds another run than the command asks for."""

FIRST_OPTIONS = (
    *("--output", "--output-format", "--model", "--modality", "--text-column", "--image-column", "--metadata-columns"),
    *("--chunk-tokens", "--limit", "--devices", "--add", "--dry-run", "--quiet"),
)
"""Options of a first run, which its --help shows."""

if TYPE_CHECKING:
    import redis

    from embq.core.models import ModelSpec
    from embq.core.queue.heartbeats import Device
    from embq.core.settings import Settings
    from embq.core.storage.paths import Place
    from embq.producer.enqueue import Planned, Request


@click.command(
    "run",
    cls=SectionedCommand,
    first=FIRST_OPTIONS,
    epilog="Examples: embq run photos -o out -m open_clip:ViT-B-32/laion2b_s34b_b79k | "
    "embq run texts.jsonl -o out -m minilm",
)
@click.argument("inputs", type=click.Path(readable=False), nargs=-1, required=True, metavar="INPUT...")
@run_options
@option("--add", is_flag=True, help="Add INPUT to the run of other inputs that OUT holds.")
@option("--keep-going", is_flag=True, help="Go on if all samples of the first unit fail with one code.")
@option("--dry-run", is_flag=True, help="Print units, sizes and device hours, and do nothing.")
@priority_option
@worker_options
@broker_option
@log_option
@json_option
@quiet_option
@verbose_option
def run(
    inputs: tuple[str, ...], broker: str, add: bool, dry_run: bool, as_json: bool, quiet: bool, **options: Any
) -> int:
    """Embed INPUT on all devices of this machine, and write the rows to a folder.

    INPUT is a webdataset .tar, a folder of images, or a .parquet, .arrow, .csv, .jsonl or .txt file; globs and
    {000000..000099} are expanded. After Ctrl-C, `embq resume` or the same command continues the run; further inputs are
    added to it with --add. A run without rows is replaced by a corrected command.
    """
    from embq.app.cli.authorization import configured_broker
    from embq.app.cli.precision import precision_of_output, resolve_precision
    from embq.app.cli.run_options import request_from
    from embq.app.local.packages import refuse_lacking
    from embq.app.local.session import own_devices, print_summary, run_locally
    from embq.app.local.unused_runs import is_new, undone_on_error
    from embq.app.status.run_log import check_targets
    from embq.core.storage.paths import place
    from embq.producer.model_args import asked_models

    request = request_from(inputs, options)
    if not dry_run:
        refuse_lacking(request, own_broker=not settings_with(broker).broker_url, logs=options["log"])
    check_targets(options["log"])
    request, reason = resolve_precision(
        request, precision_at=precision_of_output, devices=lambda: own_devices(options["devices"])
    )
    root = place(options["output"])
    _refuse_outside(inputs, root, settings_with(broker))
    client = configured_broker(settings_with(broker))  # before anything is written
    fresh = is_new(root)
    if fresh:  # a run that is there may need its model no more
        for model in asked_models(request.models):
            _look_for(model.spec)
    if dry_run:
        if not add:
            _refuse_to_add(inputs, root)
        here = None if client is not None else own_devices(options["devices"])
        _print_estimate(request, reason, client, here=here, as_json=as_json)
        return 0
    planned = _planned(request, root, add=add)
    for line in (planned.listing, reason):
        if line and not (quiet or as_json):
            click.echo(folded(line, err=True), err=True)
    for warning in planned.warnings:
        click.echo(folded(f"warning: {warning}", err=True), err=True)
    with undone_on_error(root, planned.info if fresh and planned.new else None, broker=broker):
        outcome = run_locally(planned.info, root, options, broker=broker, quiet=quiet or as_json, inputs=inputs)
    status = print_summary(outcome, root, as_json=as_json)
    if outcome.all_failed:
        raise InputError(
            f"all {outcome.progress.failures:,} samples so far failed with {outcome.all_failed}, so the run is stopped",
            next_step="correct the command or the inputs and start it again: it replaces this run, which has no rows; "
            "or go on in spite of the failures with --keep-going",
            code="all_failed",
        )
    return status


def _refuse_outside(inputs: Sequence[str], root: Place, settings: Settings) -> None:
    """Raise InputError for an output or an input that the services of this run may not use: each unit would fail."""
    from embq.core.storage.paths import Outputs
    from embq.sources.unit_reader import is_allowed

    Outputs(settings.outputs).check(str(root))
    # Braces may stand for several folders.
    if denied := [it for it in inputs if "{" not in it and not is_allowed(it, settings.roots)]:
        raise InputError(
            f"{denied[0]} is outside of what workers here may read ({', '.join(settings.roots)})",
            next_step="add its folder to EMBQ_ROOTS, or unset it",
            code="source_denied",
        )


def _look_for(spec: ModelSpec) -> None:
    """Find a model before anything is written; a download is announced."""
    from embq.worker.embedders.lookup import locate

    # Where a package is missing, the worker names the extra that has it.
    with suppress(ImportError):
        location = locate(spec)
        if not location.here:
            click.echo(f"{spec} is {location.where}", err=True)


def _planned(request: Request, root: Place, *, add: bool) -> Planned:
    """The run in the output folder, which replaces one without rows that this command corrects."""
    from embq.app.local.unused_runs import remove_without_rows
    from embq.producer.enqueue import prepare

    try:
        if not add:
            _refuse_to_add(request.inputs, root)
        return prepare(request)
    except EmbqError as error:
        if error.code not in OTHER_RUN or not remove_without_rows(root):
            raise
        click.echo(f"the run in {root} has no rows; this command replaces it", err=True)
        return prepare(request)


def _refuse_to_add(inputs: tuple[str, ...], root: Place) -> None:
    """Raise UsageError if the output holds a run of other inputs, to which these would be added."""
    from embq.core.run.layout import Layout
    from embq.core.run.run_info import load_run
    from embq.producer.additions import uncovered

    if not Layout(root).run_json.exists():
        return
    info = load_run(root)
    old_inputs = list(dict.fromkeys([*info.inputs, *(source for added in info.added for source in added.inputs)]))
    new_inputs = uncovered(inputs, old_inputs, Layout(root))
    if new_inputs:
        raise UsageError(
            f"{root} holds a run of {', '.join(old_inputs[:NAMED])}{', ...' if len(old_inputs) > NAMED else ''}, and "
            f"{', '.join(new_inputs[:NAMED])}{', ...' if len(new_inputs) > NAMED else ''} would be added to it",
            next_step="choose another --output, or give --add to this command to add what is new",
            code="other_inputs",
        )


@click.command(
    "enqueue",
    cls=SectionedCommand,
    epilog="Example: embq enqueue 'shards/{00..99}.tar' -o out -m open_clip:ViT-B-32/openai",
)
@click.argument("inputs", type=click.Path(readable=False), nargs=-1, required=True, metavar="INPUT...")
@run_options
@batch_size_option
@threads_option
@priority_option
@option(
    "--upload",
    is_flag=True,
    help="Send the run through the broker to OUT, a folder of the writer's machine. Workers read the inputs.",
)
@option(
    "--inline", is_flag=True, help="As --upload, and send the inputs as well: texts or small images of this machine."
)
@broker_option
@json_option
@option(
    "--dry-run",
    is_flag=True,
    help="Print units, sizes and device hours, and do nothing; speeds come from the broker, if there is one.",
)
def enqueue(
    inputs: tuple[str, ...], broker: str, as_json: bool, dry_run: bool, upload: bool, inline: bool, **options: Any
) -> None:
    """Plan a run and hand it to resident workers. The same command again adds new samples of the inputs.

    Further inputs for the same output are added to its run. Inputs that have changed since are refused. --batch-size
    and --threads are for workers that were started without them.

    INPUT is a webdataset .tar, a folder of images, or a .parquet, .arrow, .csv, .jsonl or .txt file; globs and
    {000000..000099} are expanded.
    """
    from embq.app.cli.authorization import authorized_client
    from embq.app.cli.run_options import request_from
    from embq.core.run.run_info import WorkerDefaults
    from embq.producer.announce import refuse_secrets

    refuse_secrets(inputs)
    settings = settings_with(broker)
    workers = WorkerDefaults(batch_size=options["batch_size"], prepare_threads=options["threads"])
    request = replace(request_from(inputs, options), workers=workers)
    if dry_run:
        _say_what_it_would_do(request, settings, sent=upload or inline, as_json=as_json)
        return
    client = authorized_client(settings, "enqueue --upload" if upload or inline else "enqueue")
    request, reason = _settled(request, client, sent=upload or inline)
    priority = options["priority"]
    if reason and not as_json:
        click.echo(folded(reason, err=True), err=True)
    if upload or inline:
        from embq.app.enqueueing.upload import send_run
        from embq.core.broker.client import RESULT_S, connect

        patient = connect(settings.broker_url, password=settings.broker_password, patient=True, answer_s=RESULT_S)
        send_run(patient, request, inline=inline, as_json=as_json, priority=priority)
    else:
        _plan_and_hand_over(client, request, priority, as_json=as_json)


def _settled(request: Request, client: redis.Redis | None, *, sent: bool) -> tuple[Request, str]:
    """The request with its precision, and the reason for that; see `embq.app.cli.precision.resolve_precision`.

    Args:
        client: the broker; None for none, if no device is known.
        sent: whether the output is a folder of the writer's machine.
    """
    from embq.app.cli.precision import precision_of_output, precision_of_upload, resolve_precision
    from embq.producer.model_args import registered_devices

    return resolve_precision(
        request,
        precision_at=partial(precision_of_upload, client) if sent and client is not None else precision_of_output,
        devices=lambda: registered_devices(client) if client is not None else (),
    )


def _plan_and_hand_over(client: redis.Redis, request: Request, priority: int | None, *, as_json: bool) -> None:
    """Write the run, or its new units, to its folder; announce it; print a summary."""
    from embq.core.errors import TryLaterError
    from embq.core.storage.paths import place
    from embq.producer.announce import hand_over
    from embq.producer.enqueue import prepare

    planned, output = prepare(request), place(request.output)
    # A new run has its priority in its folder; of one that is there it is changed.
    again = {} if planned.new or priority is None else {"priority": str(priority)}
    if planned.listing and not as_json:
        click.echo(folded(planned.listing, err=True), err=True)
    for warning in planned.warnings:
        click.echo(folded(f"warning: {warning}", err=True), err=True)
    try:
        hand_over(client, planned.info, output, again)
    except TryLaterError as error:
        if not planned.added:
            raise
        click.echo(
            f"warning: {error.message}; it takes the new units up, and if it ends before: "
            f"{command_line('resume', output)}",
            err=True,
        )
    _print_planned(planned, output, as_json=as_json)


def _print_planned(planned: Planned, output: Place, *, as_json: bool) -> None:
    """Print how many units were handed over, and how many are done."""
    from embq.core.run import checkpoint
    from embq.core.run.control import RunState, load_control
    from embq.core.run.layout import Layout

    info = planned.info
    done = 0 if planned.new else checkpoint.current(Layout(output), info.units).count
    if as_json:
        answer = {"run": info.run, "new": planned.new, "added": planned.added, "units": info.units, "done": done}
        click.echo(json.dumps({"schema": 1, **answer, "precision": info.model.precision}))
    elif planned.new or planned.added:
        count, total = (info.units, info.samples) if planned.new else (planned.added, planned.samples)
        samples = f", {total:,} samples" if total is not None else ""
        action = "enqueued" if planned.new else f"added to {info.units - count:,}"
        click.echo(f"run {info.run}: {count:,} units{samples} {action} for {info.model.spec}")
        click.echo(folded(f"watch it with: {command_line('status', output, '--watch')}", err=True), err=True)
    else:
        click.echo(f"run {info.run} is already enqueued: {done:,} of {info.units:,} units are done; nothing was added")
    if not planned.new and done < info.units and (state := load_control(Layout(output)).state) != RunState.RUNNING:
        click.echo(f"it is {state}; go on with: {command_line('resume', output)}", err=True)


def _say_what_it_would_do(request: Request, settings: Settings, *, sent: bool, as_json: bool) -> None:
    from embq.app.cli.authorization import configured_broker

    client = configured_broker(settings)
    request, reason = _settled(request, client, sent=sent)
    _print_estimate(request, reason, client, as_json=as_json)


def _print_estimate(
    request: Request, reason: str, client: redis.Redis | None, *, here: list[Device] | None = None, as_json: bool
) -> None:
    """Print what the run would have to do, and how long by the speeds that a broker or this machine knows.

    Args:
        here: devices of this machine that would compute it; None if they are a broker's.
    """
    from embq.app.enqueueing.dry_run import cost_of, lines, to_json
    from embq.producer.estimate import estimate

    estimated = estimate(request)
    cost = cost_of(estimated, client) if client is not None else None
    if here is not None:
        from embq.app.status.measured_speeds import cost_here

        cost = cost_here(estimated.config, here)
    for warning in estimated.warnings:
        click.echo(folded(f"warning: {warning}", err=True), err=True)
    if as_json:
        click.echo(json.dumps(to_json(estimated, cost)))
    else:
        if reason:
            click.echo(reason)
        click.echo("\n".join(lines(estimated, cost)))
        click.echo("nothing was written or sent", err=True)
