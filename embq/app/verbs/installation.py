"""`embq doctor` and `embq config`: this installation."""

from __future__ import annotations

import json
from dataclasses import asdict

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
def doctor(broker: str, output: str, model: tuple[str, ...], as_json: bool) -> int:
    """Check packages, broker, devices, models, storage and limits of this machine.

    Prints a line per check, with a fix if one is needed. Without --broker and EMBQ_BROKER_URL, the embedded server
    of `embq run` is started and stopped.

    Exit status: 0, or 69 if a check fails; warnings do not count.
    """
    from embq.app.doctor.check import print_checks
    from embq.app.doctor.machine_checks import check_machine

    return print_checks(check_machine(settings_with(broker), output=output, model_specs=model), as_json=as_json)


@click.command("config", cls=SectionedCommand, epilog="Example: embq config --json")
@json_option
def config(as_json: bool) -> None:
    """Show every setting, its value, whether that is the default or from the environment, and what it means.

    Secrets are masked. Settings in a .env file of a compose stack are the environment of its containers: docker compose
    run --rm writer config.

    Exit status: 0, or 78 if a value cannot be used.
    """
    from embq.core.redaction import masked, printable
    from embq.core.settings import effective_settings, unknown_settings

    settings, unknown = effective_settings(), unknown_settings()
    if as_json:
        rows = [{**asdict(entry), "value": masked(entry.value)} for entry in settings]
        click.echo(json.dumps({"schema": 1, "settings": rows, "unknown": [*unknown]}))
        return
    names, values = max(len(entry.name) for entry in settings), max(len(masked(entry.value)) for entry in settings)
    for setting in settings:
        value = f"{printable(masked(setting.value)) or '-':<{min(values, 40)}}"
        click.echo(f"{setting.name:<{names}}  {value}  {setting.source:<11}  {setting.meaning}")
    for name, meant in unknown.items():
        click.echo(
            f"warning: {printable(name)} is not a setting{f'; did you mean {meant}?' if meant else ''}", err=True
        )
