"""`embq train openclip`: train an OpenCLIP model on shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from embq.app.cli.sections import SectionedCommand, section
from embq.app.cli.shared_options import json_option
from embq.core.errors import Exit, command_line
from embq.training.launch.launch_options import launch_options
from embq.training.openclip.request import TrainingRequest
from embq.training.run.options import options_of

if TYPE_CHECKING:
    from embq.training.launch.launch_options import Where
    from embq.training.openclip.folder import TrainingResult
    from embq.training.openclip.training_plan import TrainingPlan


NAMED, LISTED = 5, 1000
"""Unreadable samples that are printed, and that --json lists."""


@click.command(
    "openclip",
    cls=SectionedCommand,
    epilog="Example: embq train openclip 'shards/train-*.tar' --model ViT-B-32 --output ./clip -- --local-loss",
)
@click.argument("shards", type=click.Path())
@click.argument("further", nargs=-1, metavar="[-- FLAGS]")
@section("Training")
@options_of(TrainingRequest)
@launch_options
@json_option
def command(where: Where, as_json: bool, **options: Any) -> int:
    """Train an OpenCLIP model on the captioned images of SHARDS, for example 'shards/train-{000000..000099}.tar'.

    Runs open_clip's own training; flags behind -- go to it. Settings and samples that open_clip would fail on, or would
    silently ignore, are checked first. The same command resumes a training after its last finished epoch.

    Exit status: 0 done, 3 unreadable samples or an inexact epoch, 65 unsuitable shards, 78 no GPU.
    """
    from embq.training.launch.launcher import launch
    from embq.training.openclip.folder import begin, result_of
    from embq.training.openclip.training_plan import plan

    planned = plan(TrainingRequest(**options), where)
    for note in planned.notes:
        click.echo(f"note: {note}", err=True)
    if where.dry_run:
        return launch("embq.training.openclip", planned.arguments(), where)
    with begin(planned) as begun:
        if begun.epochs_done < planned.settings.epochs:
            _announce(planned, goes_on=begun.latest.exists())
            if status := launch("embq.training.openclip", planned.arguments(), where, inputs=planned.inputs()):
                return status
        result = result_of(planned, begun)
    (_print_json if as_json else _print)(planned, result)
    return Exit.SOME_FAILED if result.inexact or result.unreadable else Exit.DONE


def _announce(plan: TrainingPlan, *, goes_on: bool) -> None:
    processes = "processes of several hosts" if plan.processes is None else f"{plan.processes} on {plan.device}"
    begins = ", going on from its epoch_latest.pt" if goes_on else ""
    click.echo(
        f"{plan.samples:,} samples in {len(plan.shards.urls):,} shards, {_epochs(plan.settings.epochs)}{begins}, "
        f"batch {plan.settings.batch_size} x {processes}, log {plan.request.out / 'out.log'}",
        err=True,
    )


def _epochs(number: int) -> str:
    return "1 epoch" if number == 1 else f"{number:,} epochs"


def _print(plan: TrainingPlan, result: TrainingResult) -> None:
    from embq.training.openclip.training_plan import UNREADABLE

    rate = "" if result.samples_per_s is None else f", {result.samples_per_s:,.1f} samples/s"
    click.echo(f"trained       {_epochs(result.epochs)} of {plan.samples:,} samples{rate}")
    click.echo(f"checkpoints   {plan.request.out / 'checkpoints'}")
    if plan.request.exact and not result.inexact:
        click.echo("exact         each sample once in every epoch, by the keys that were trained on")
    for reason in result.inexact:
        click.echo(f"not exact     {reason}")
    if result.unreadable:
        click.echo(
            f"unreadable    {len(result.unreadable):,} samples or shards: {', '.join(result.unreadable[:NAMED])}"
        )
    if len(result.unreadable) > NAMED:
        click.echo(f"              and more; all are named in {plan.request.out / UNREADABLE}")
    if result.unheard:
        click.echo(
            f"unreadable    not known of {result.unheard:,} processes, whose hosts have another {plan.request.out}"
        )
    click.echo(f"next:  {command_line('train', 'export', plan.request.out, f'{plan.request.out}-model')}")


def _print_json(plan: TrainingPlan, result: TrainingResult) -> None:
    import json

    report = {
        "schema": 1,
        "out": str(plan.request.out),
        "epochs": result.epochs,
        "samples_per_epoch": plan.samples,
        "samples_per_s": result.samples_per_s,
        "exact": not result.inexact if plan.request.exact else None,
        "inexact": list(result.inexact),
        "unreadable": len(result.unreadable),
        "unreadable_names": result.unreadable[:LISTED],
        "unreadable_not_known_of": result.unheard,
        "notes": list(plan.notes),
    }
    click.echo(json.dumps(report))
