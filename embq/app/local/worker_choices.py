"""Options of this machine's workers that a run remembers: `embq resume` uses them again, unless others are given."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import click
from click.core import ParameterSource

from embq.core import wire
from embq.core.errors import MalformedError
from embq.core.run.layout import Layout
from embq.core.storage import beneath
from embq.core.storage.durable import overwrite

NAMES = ("devices", "workers", "batch_size", "threads", "prefetch", "transport", "drain_timeout")
"""Options of `worker_options`; no part of a run's identity."""
FILE = "_writer/worker-options.json"
MOST_BYTES = 4_096


def given(context: click.Context | None, options: dict[str, Any]) -> dict[str, str]:
    """The options of workers that a command line gave, or that were recalled."""
    return {name: str(options[name]) for name in NAMES if context is not None and _is_given(context, name)}


def remember(layout: Layout, choices: dict[str, str]) -> None:
    """Keep them in place of those of the session before; a full disk, which the run tells of, is ignored here."""
    path = layout.home / FILE
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        overwrite(path, (json.dumps(choices) + "\n").encode())


def recall(layout: Layout, context: click.Context, options: dict[str, Any]) -> None:
    """Set the remembered value of each option that the command line does not give.

    Raises:
        click.BadParameter: for a value that the option does not take.
    """
    values = remembered(layout)
    for parameter in context.command.params:
        if (name := parameter.name) in values and not _is_given(context, str(name)):
            options[str(name)] = parameter.type_cast_value(context, values[str(name)])
            context.set_parameter_source(str(name), ParameterSource.DEFAULT_MAP)


def described(choices: dict[str, str]) -> str:
    """Options as on a command line."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in choices.items())


def remembered(layout: Layout) -> dict[str, str]:
    """The remembered options; none if the file is missing or damaged."""
    with suppress(OSError, MalformedError):
        data = beneath.read_bytes(layout.home, FILE, most_bytes=MOST_BYTES)
        values = wire.read(dict[str, str], data, what=FILE, most_bytes=MOST_BYTES)
        return {name: values[name] for name in NAMES if name in values}
    return {}


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)
