"""`embq bench mmoclip`: run the MMoCLIP benchmark, or judge logs of trainings."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embq.app.cli.sections import GENERAL, SectionedCommand, option, section
from embq.app.cli.shared_options import json_option
from embq.core.errors import Exit, UsageError
from embq.training.mmoclip.launch_plan import BenchmarkRequest, new_place, plan, processes_here
from embq.training.run.options import options_of

if TYPE_CHECKING:
    from embq.training.mmoclip.judgement import Judgement
    from embq.training.mmoclip.launch_plan import LaunchPlan


OUT = "embq-mmoclip"


@click.command(
    "mmoclip",
    cls=SectionedCommand,
    epilog="Examples: embq bench mmoclip --grad-checkpointing | embq bench mmoclip logs/test --nodes 8 --gpu A100",
)
@click.argument("logs", nargs=-1, metavar="[LOG]...", type=click.Path(path_type=Path))
@option("--nodes", type=click.IntRange(min=1), help="Machines.  [1; of a log: as noted]")
@section("Training")
@options_of(BenchmarkRequest, unset=True)  # none of them applies to existing logs
@option("--scaling", is_flag=True, default=None, help="Train with 1, 2, 4, ... processes up to --num-devices, in turn.")
@option("--dry-run", is_flag=True, default=None, help="Print the environment and the command; start nothing.")
@section(GENERAL)
@option("--gpu", default="", metavar="NAME", help="GPU name for a log without a note of it, such as A100.")
@option(
    "--output",
    "-o",
    "out",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"Folder for result.json and the picture; a training gets a new folder there.  [{OUT}; with LOG none]",
)
@json_option
def command(
    logs: tuple[Path, ...], nodes: int | None, gpu: str, out: Path | None, as_json: bool, **options: Any
) -> int:
    """The MMoCLIP benchmark: OpenCLIP's ViT-L-14 on 3.2 million made-up pairs, with the flags that it requires.

    Without LOG it trains in a new folder below --output. With LOG, an out.log or a folder that holds one, it judges
    that training. The metric, total_time_secs, is the sum of the iterations from the second on; the baseline is 1260 s
    on 32 A100. Several LOGs are compared in a scaling table.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if logs:
        if given:
            option = next(param.opts[0] for param in click.get_current_context().command.params if param.name in given)
            raise UsageError(f"{option} is for a training, and LOG names one that is over", next_step="leave one out")
        if nodes and len(logs) > 1:
            raise UsageError("--nodes is for one LOG, and several are named", next_step="leave it out, or name one")
        return _judge(logs, nodes, gpu, out, as_json)
    scaling, dry_run = given.pop("scaling", False), given.pop("dry_run", False)
    request, place = BenchmarkRequest(nodes=nodes or 1, **given), out or Path(OUT)
    # The commands for another machine can be had without its GPUs.
    most = request.processes if dry_run and request.processes else processes_here(request)
    counts = _doubling(request, most) if scaling else [most]
    plans = [plan(request, count, new_place(place)) for count in counts]  # raises before the first training
    if dry_run:
        for planned in plans:
            _show(planned)
        return Exit.DONE
    return _train(request, counts, place, as_json)


def _doubling(request: BenchmarkRequest, most: int) -> list[int]:
    """1, 2, 4, ... processes, and the maximum. UsageError if a launcher is given."""
    if request.nodes > 1 or request.launcher is not None:
        raise UsageError(
            "--scaling is for the GPUs of one machine, by python and torchrun",
            next_step="leave out --nodes and --launcher; for nodes: jube run bench/mmoclip/default.yaml --tag scaling",
        )
    return sorted({most, *(2**i for i in range(most.bit_length()))})


def _train(request: BenchmarkRequest, counts: list[int], out: Path, as_json: bool) -> int:
    from embq.training.mmoclip.run import run

    judgements = []
    for count in counts:
        planned = plan(request, count, new_place(out))
        _show(planned, err=True)
        try:
            judged = run(planned)
        except KeyboardInterrupt:
            click.echo(f"stopped; what it did until then is in {planned.place}", err=True)
            raise
        if judged is None:
            click.echo("the training ended well; its table is on the node of its first process", err=True)
            return Exit.DONE
        judgements.append(judged)
    status = _print_judgements(judgements, as_json, out if len(judgements) > 1 else None)
    click.echo(f"figures, picture and log: {out if len(judgements) > 1 else planned.place}", err=True)
    return status


def _judge(logs: tuple[Path, ...], nodes: int | None, gpu: str, out: Path | None, as_json: bool) -> int:
    from embq.training.mmoclip import folder
    from embq.training.mmoclip.judgement import judge
    from embq.training.mmoclip.run import keep

    judgements = [judge(folder.find(log), nodes=nodes, gpu=gpu) for log in logs]
    if out is not None:
        from embq.core.benchmark_record import make_folder

        make_folder(out)
        if len(judgements) == 1:
            keep(judgements[0], out)
    return _print_judgements(judgements, as_json, out if len(judgements) > 1 else None)


def _print_judgements(judgements: list[Judgement], as_json: bool, out: Path | None) -> int:
    """Print one judgement, or a comparison of several, which is written to `out` too."""
    from embq.training.mmoclip import table

    if len(judgements) == 1:
        click.echo(json.dumps(judgements[0].describe()) if as_json else "\n".join(table.lines(judgements[0])))
        return judgements[0].exit
    from embq.training.mmoclip import scaling

    series = scaling.compare(judgements)
    if out is not None:
        scaling.keep(series, out)
    click.echo(json.dumps(series.describe()) if as_json else "\n".join(series.lines()))
    return series.exit


def _show(planned: LaunchPlan, *, err: bool = False) -> None:
    """Print environment and command of a training, as a shell takes them."""
    changes = [f"{name}={shlex.quote(value)}" for name, value in planned.environment.items()]
    click.echo(" ".join([*changes, shlex.join(planned.command)]), err=err)
