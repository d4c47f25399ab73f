"""Options that several verbs share, and what they turn into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import click

from core.errors import ConfigError
from core.models import DECODES, PRECISIONS
from core.networks import Address
from core.redaction import masked
from core.settings import Settings
from embq.cli.precision import AUTO

F = TypeVar("F", bound=Callable[..., Any])


def option_group(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options as one decorator; help lists them in this order."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def broker_option(function: F) -> F:
    """--broker, for verbs that talk to a server."""
    return click.option(
        "--broker", "broker", default="", metavar="URL", help="redis://, rediss:// or unix://.  [EMBQ_BROKER_URL]"
    )(function)


def metrics_option(function: F) -> F:
    """--metrics, for resident services; None where it is not given."""
    return click.option(
        "--metrics",
        callback=_address,
        metavar="[HOST:]PORT",
        help="Answer /metrics and /healthz there; 127.0.0.1 unless HOST is given.  [EMBQ_METRICS, else nowhere]",
    )(function)


def _address(_context: click.Context, _option: click.Parameter, text: str | None) -> Address | None:
    try:
        return Address.parse(text) if text else None
    except ValueError as error:
        raise click.BadParameter(f"{error}; for example 9101, or 0.0.0.0:9101 for all who reach this machine") from None


def json_option(function: F) -> F:
    """--json, for verbs that report."""
    return click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")(function)


def quiet_option(function: F) -> F:
    """--quiet, for verbs that show progress."""
    return click.option("--quiet", "-q", is_flag=True, help="No progress, only the summary at the end.")(function)


def precision_option(function: F) -> F:
    """--precision, for verbs that embed; "auto" is settled by `embq.cli.precision`."""
    return click.option(
        "--precision",
        type=click.Choice((AUTO, *PRECISIONS)),
        default=AUTO,
        show_default=True,
        help="Compute precision. auto takes the first of bf16, fp16 and fp32 that is fast on every device when the run "
        "is made, and that of the run where OUT holds one.",
    )(function)


def decode_option(function: F) -> F:
    """--decode, for verbs that embed images."""
    return click.option(
        "--decode",
        type=click.Choice(DECODES),
        default=DECODES[0],
        show_default=True,
        help="How images become pixels: by fast decoders, also making large JPEGs smaller while they are decoded, "
        "by the model's own library, or JPEGs by the GPU.",
    )(function)


def devices_option(function: F) -> F:
    """--devices, for verbs that start workers."""
    return click.option(
        "--devices",
        default="auto",
        show_default=True,
        metavar="LIST",
        help="auto (every CUDA device, else the CPU), cuda (every CUDA device), or such as cuda:0,cuda:2,cpu; "
        "sim:SPEED for stub models.",
    )(function)


def batch_size_option(function: F) -> F:
    """--batch-size, for verbs that embed; 0 where it is not given."""
    return click.option(
        "--batch-size",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Samples per batch.  [by model and device]",
    )(function)


def prepare_threads_option(function: F) -> F:
    """--prepare-threads, for verbs that embed; 0 where it is not given."""
    return click.option(
        "--prepare-threads",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Threads that decode and tokenise, per process.  [by cores]",
    )(function)


def priority_option(function: F) -> F:
    """--priority, for verbs that make a run; None where it is not given."""
    from core.run.control import LEAST_PRIORITY, MOST_PRIORITY, PRIORITY

    return click.option(
        "--priority",
        type=click.IntRange(LEAST_PRIORITY, MOST_PRIORITY),
        default=None,
        metavar="N",
        help=f"Weight among runs that share the devices: 20 gets twice as much done as 10.  [{PRIORITY}, or as it was]",
    )(function)


worker_options = option_group(
    devices_option,
    click.option(
        "--workers-per-device",
        type=click.IntRange(min=0, max=64),
        default=0,
        metavar="N",
        help="Processes on each device, each with a model of its own.  [on a GPU by cores and memory, else 1]",
    ),
    batch_size_option,
    prepare_threads_option,
    click.option(
        "--prefetch",
        type=click.IntRange(min=1, max=64),
        default=2,
        metavar="N",
        show_default=True,
        help="Remote shards fetched before their turn.",
    ),
    click.option(
        "--transport",
        type=click.Choice(["auto", "payload", "staging"]),
        default="auto",
        show_default=True,
        help="How results reach the writer: through the broker, or as files where storage is shared.",
    ),
    click.option(
        "--drain-timeout",
        type=click.FloatRange(min=0),
        default=150.0,
        metavar="SECONDS",
        show_default=True,
        help="To finish begun units in, after a stop was asked for.",
    ),
)
"""What decides how this machine works: never part of a run."""


def settings_with(broker: str, metrics: Address | None = None) -> Settings:
    """The environment's settings, with --broker and --metrics above them.

    A --broker that is EMBQ_BROKER_URL with its password masked is what `embq.cli.entry_point` has left of it.
    """
    settings = Settings.from_environment()
    url = settings.broker_url if broker in ("", masked(settings.broker_url)) else broker
    return replace(settings, broker_url=url, metrics=metrics or settings.metrics)


def required_url(settings: Settings) -> str:
    """The broker's URL; ConfigError where none is configured."""
    if not settings.broker_url:
        raise ConfigError(
            "no broker is configured",
            next_step="give --broker redis://HOST:6379 or set EMBQ_BROKER_URL; "
            "`embq run` brings its own broker for work on one machine",
        )
    return settings.broker_url
