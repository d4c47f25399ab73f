"""`embq train export`: export a checkpoint as a model that the workers load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import json_option
from embq.core.errors import UsageError, command_line
from embq.core.service.progress_line import size_text

if TYPE_CHECKING:
    from embq.training.export.model_folder import Exported


@click.command("export", cls=SectionedCommand, epilog="Example: embq train export ./clip ./clip-model")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("target", metavar="DIR", type=click.Path(path_type=Path))
@option(
    "--model",
    "-m",
    default="",
    metavar="NAME|FOLDER",
    help="Model that was trained, as of the training.  [from params.txt beside the checkpoint]",
)
@json_option
def command(checkpoint: Path, target: Path, model: str, as_json: bool) -> None:
    """Write CHECKPOINT to the folder DIR as a model to embed with.

    CHECKPOINT is an epoch_N.pt of open_clip, the folder of its training (for the latest checkpoint), or the folder of a
    training by embq train classify with an architecture of timm. Before DIR gets its name, its outputs are compared
    with those of the trained model. Each checkpoint has its own fingerprint, so rows of two checkpoints never share an
    output.
    """
    from embq.training.export.classifier import export_classifier, is_classifier
    from embq.training.export.openclip import export_openclip

    if not is_classifier(checkpoint):
        result = export_openclip(checkpoint, target, model=model)
    elif model:
        raise UsageError(
            "--model is for trainings by open_clip, and the files of a classifier say what it is",
            next_step="leave it out",
        )
    else:
        result = export_classifier(checkpoint, target)
    if as_json:
        _print_json(result)
    else:
        _print(result)


def _print_json(result: Exported) -> None:
    import json

    report = {
        "schema": 1,
        "folder": str(result.folder),
        "spec": result.spec,
        "needs": result.needs,
        "weights_bytes": result.weights_bytes,
        "provenance": result.provenance,
    }
    click.echo(json.dumps(report))


def _print(result: Exported) -> None:
    source = result.provenance["checkpoint"]
    samples_seen = result.provenance["samples_seen"]
    epoch = "" if source["epoch"] is None else f", epoch {source['epoch']}"
    samples = "" if samples_seen is None else f", {samples_seen:,} samples seen"
    lines = [
        ("from", f"{source['path']}{epoch}{samples}"),
        ("model", f"{result.folder}, {size_text(result.weights_bytes)}, outputs equal to those of the trained model"),
        ("fingerprint", f"{result.fingerprint}, of images in fp32"),
    ]
    if result.needs:
        lines.append(("needs", result.needs))
    for name, text in lines:
        click.echo(f"{name:<12} {text}")
    click.echo(f"next:  {command_line('run', 'SHARDS', '-o', 'OUT', '-m', result.spec)}")
