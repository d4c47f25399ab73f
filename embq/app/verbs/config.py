"""`embq config`: settings of this process."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from embq.app.cli.sections import SectionedCommand
from embq.app.cli.shared_options import json_option


@click.command("config", cls=SectionedCommand, epilog="Example: embq config --json")
@json_option
def command(as_json: bool) -> None:
    """Show every setting, its value, whether that is the default or from the environment, and what it means.

    Secrets are masked. Settings in a .env file of a compose stack are the environment of its containers: docker compose
    run --rm writer config.

    Exit status: 0, or 78 if a value cannot be used.
    """
    from embq.core.redaction import masked, printable
    from embq.core.settings import effective_settings

    settings = effective_settings()
    if as_json:
        rows = [{**asdict(entry), "value": masked(entry.value)} for entry in settings]
        click.echo(json.dumps({"schema": 1, "settings": rows}))
        return
    names, values = max(len(entry.name) for entry in settings), max(len(masked(entry.value)) for entry in settings)
    for setting in settings:
        value = f"{printable(masked(setting.value)) or '-':<{min(values, 40)}}"
        click.echo(f"{setting.name:<{names}}  {value}  {setting.source:<11}  {setting.meaning}")
