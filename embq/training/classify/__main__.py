"""`python -m embq.training.classify FLAGS`: one process of a training, however it was started."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from embq.app.cli.shared_options import json_option
from embq.core.errors import Exit, UsageError
from embq.training.classify.config import Config, classify_options
from embq.training.run.options import options_of


@click.command("embq.training.classify")
@classify_options
@options_of(Config, only="device")
@json_option
def _flags(**flags: Any) -> dict[str, Any]:
    """One process of a training of a classifier; see `embq train classify`."""
    return flags


def main(arguments: Sequence[str]) -> int:
    """Train; returns 0, or 3 if samples could not be read. Raises as `embq.training.classify.loop.train` does."""
    from embq.training.classify.loop import Stopped, train

    try:
        flags = _flags.main(list(arguments), standalone_mode=False)
    except click.ClickException as error:
        raise UsageError(error.format_message()) from error
    if not isinstance(flags, dict):  # --help
        return Exit.DONE
    as_json = flags.pop("as_json")
    try:
        report = train(Config(**flags))
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            click.echo(f"stopped {stopped.moment}; the same command goes on there", err=True)
        raise
    if report is None:
        return Exit.DONE
    click.echo(json.dumps(asdict(report)) if as_json else report.text())
    return Exit.SOME_FAILED if report.failed else Exit.DONE


if __name__ == "__main__":
    from embq.training.launch.member import run_module

    run_module("embq.training.classify")
