"""Options of this machine's workers that a run remembers: `embq resume` uses them again, unless others are given."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import click
from click.core import ParameterSource

from embq.core import wire
from embq.core.errors import MalformedError, UsageError, command_line
from embq.core.process.limits import cores, memory_bytes
from embq.core.redaction import printable
from embq.core.run.layout import Layout
from embq.core.run.run_info import USUAL_BATCH_SIZE, USUAL_THREADS_PER_CORE
from embq.core.storage import beneath
from embq.core.storage.durable import overwrite

NAMES = ("devices", "workers", "batch_size", "threads", "prefetch", "transport", "drain_timeout")
"""Options of `worker_options`; no part of a run's identity."""
FILE = "_writer/worker-options.json"
MOST_BYTES = 4_096

WORKER_BYTES = 2 << 30
"""Memory that a worker process usually takes, with its model."""


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

    The folder may come from somebody else, so what would load this machine more than a usual run is only done if the
    user asks for it.

    Raises:
        click.BadParameter: for a value that the option does not take.
        UsageError: for one that the command line has to give again.
    """
    values = remembered(layout)
    for parameter in context.command.params:
        if (name := parameter.name) in values and not _is_given(context, str(name)):
            options[str(name)] = parameter.type_cast_value(context, values[str(name)])
            context.set_parameter_source(str(name), ParameterSource.DEFAULT_MAP)
    recalled = [name for name in values if context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP]
    for name in recalled:
        most = _usual(name, options)
        value = len(options[name].split(",")) if name == "devices" else options[name]
        if most is not None and not value <= most:  # neither is NaN
            option, shown = f"--{name.replace('_', '-')}", printable(str(options[name]))[:100]
            raise UsageError(
                f"the run was last worked on with {option} {shown}, more than {most:g} are not taken from its folder",
                next_step=f"give the option yourself: {command_line('resume', layout.root, option, shown)}",
            )


def _usual(name: str, options: dict[str, Any]) -> float | None:
    """The largest value of an option that is recalled on this machine; None if any is harmless."""
    processes = max(2, min(cores(), memory_bytes() // WORKER_BYTES))
    return {
        "devices": processes,
        "workers": max(1, processes // len(options["devices"].split(","))),
        "batch_size": USUAL_BATCH_SIZE,
        "threads": USUAL_THREADS_PER_CORE * cores(),
        "prefetch": 8,
        "drain_timeout": 3_600.0,
    }.get(name)


def described(choices: dict[str, str]) -> str:
    """Options as on a command line."""
    return " ".join(f"--{name.replace('_', '-')} {printable(value)}" for name, value in choices.items())


def remembered(layout: Layout) -> dict[str, str]:
    """The remembered options; none if the file is missing or damaged."""
    with suppress(OSError, MalformedError):
        data = beneath.read_bytes(layout.home, FILE, most_bytes=MOST_BYTES)
        values = wire.read(dict[str, str], data, what=FILE, most_bytes=MOST_BYTES)
        return {name: values[name] for name in NAMES if name in values}
    return {}


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)
