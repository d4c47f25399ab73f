"""`embq doctor`: checks of this machine."""

from __future__ import annotations

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import broker_option, json_option, model_option, settings_with


@click.command("doctor", cls=SectionedCommand, epilog="Example: embq doctor --model minilm --output ./out")
@broker_option
@option(
    "--output",
    "-o",
    default="",
    type=click.Path(),
    help="Folder or URL to test storage in.  [the folder for temporary files]",
)
@model_option("Model to load, and to embed one sample with; repeatable.", multiple=True, metavar="[NAME=]SPEC")
@json_option
def command(broker: str, output: str, model: tuple[str, ...], as_json: bool) -> int:
    """Check packages, broker, devices, models, storage and limits of this machine.

    Prints a line per check, with a fix if one is needed. Without --broker and EMBQ_BROKER_URL, the embedded server
    of `embq run` is started and stopped.

    Exit status: 0, or 69 if a check fails; warnings do not count.
    """
    from embq.app.doctor.check import print_checks
    from embq.app.doctor.machine_checks import check_machine

    return print_checks(check_machine(settings_with(broker), output=output, model_specs=model), as_json=as_json)
