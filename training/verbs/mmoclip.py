"""`embq bench mmoclip`: run the MMoCLIP benchmark, or judge the logs of trainings."""

from __future__ import annotations

import json
from pathlib import Path

import click

from embq.options import json_option


@click.command(
    "mmoclip",
    epilog="Examples: embq bench mmoclip logs/test --nodes 8 --gpu A100",
)
@click.argument("logs", nargs=-1, required=True, metavar="LOG...", type=click.Path(path_type=Path))
@click.option("--nodes", type=click.IntRange(min=1), default=None, metavar="N", help="Machines.  [as was noted]")
@click.option("--gpu", default="", metavar="NAME", help="GPUs of a log whose folder does not tell: A100.")
@click.option(
    "--picture", type=click.Path(path_type=Path, dir_okay=False), default=None, metavar="FILE.png", help="Draw."
)
@json_option
def command(logs: tuple[Path, ...], nodes: int | None, gpu: str, picture: Path | None, as_json: bool) -> int:
    """The MMoCLIP benchmark: ViT-L-14 on 3.2 million made-up pairs, by the sum of its iterations from the second on."""
    from training.mmoclip import folder, table
    from training.mmoclip.judgement import Given, judge

    one = judge(folder.find(logs[0]), Given(nodes=nodes, gpu=gpu))
    click.echo(json.dumps(one.describe()) if as_json else "\n".join(table.lines(one)))
    if picture is not None and one.training.log.iterations:
        from training.mmoclip.picture import draw

        draw(one, picture)
    return one.exit
