"""Options that several verbs share, and the settings that they make."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from embq.app.cli.precision import AUTO
from embq.app.cli.sections import GENERAL, option, section
from embq.core.errors import ConfigError, UsageError
from embq.core.models import DECODES, FAMILIES, PRECISIONS
from embq.core.networks import Address
from embq.core.redaction import masked
from embq.core.run.run_info import MOST_BATCH_SIZE, MOST_PREPARE_THREADS
from embq.core.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])


def option_group(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options as one decorator, in the order of the help."""

    def decorate(function: F) -> F:
        for add_option in reversed(options):
            function = add_option(function)
        return function

    return decorate


def without_password(_context: click.Context, option: click.Parameter, url: str | None) -> str | None:
    """Callback of an option with the URL of a broker; UsageError if it has a password."""
    if url and masked(url) != url:
        raise UsageError(
            f"--{option.name} {masked(url)}: a password on a command line is shown to everybody by `ps`",
            next_step="set EMBQ_BROKER_URL to the URL, or name the file of the password in EMBQ_BROKER_PASSWORD_FILE",
        )
    return url


def _broker(default: str) -> Callable[[F], F]:
    return option(
        "--broker",
        default="",
        metavar="URL",
        callback=without_password,
        help=f"Broker: redis://, rediss:// or unix://, without a password.  [{default}]",
    )


broker_option = _broker("EMBQ_BROKER_URL")
"""--broker, for verbs that talk to a server."""

local_broker_option = _broker("this machine, even if EMBQ_BROKER_URL is set")
"""--broker, for verbs that use one only when it is named."""

named_broker_option = _broker("none, even if EMBQ_BROKER_URL is set")
"""--broker, for a verb that needs none."""


def _address(_context: click.Context, _option: click.Parameter, text: str | None) -> Address | None:
    try:
        return Address.parse(text) if text else None
    except ValueError as error:
        raise click.BadParameter(f"{error}; for example 9101, or 0.0.0.0:9101 for all who reach this machine") from None


metrics_option = option(
    "--metrics",
    callback=_address,
    metavar="[HOST:]PORT",
    help="Serve /metrics and /healthz at this address; HOST defaults to 127.0.0.1.  [EMBQ_METRICS, else off]",
)
"""--metrics, for resident services; None if it is not given."""

json_option = option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
"""--json, for verbs that report."""

quiet_option = option("--quiet", "-q", is_flag=True, help="Show no progress, only the summary at the end.")
"""--quiet, for verbs that show progress."""

verbose_option = option(
    "--verbose", "-v", is_flag=True, help="Show units, tokens, stages and all columns of the workers as well."
)
"""--verbose, for verbs that show runs."""

vector_name_option = option(
    "--vector-name",
    metavar="NAME",
    help="Which of a run's vectors: image, text or a model's name.  [image, or the only one]",
)
"""--vector-name, for verbs that read one of a run's vectors."""


def _log_targets(_context: click.Context, _option: click.Parameter, targets: tuple[str, ...]) -> tuple[str, ...]:
    for target in targets:
        if target.partition(":")[0] not in ("wandb", "tensorboard"):
            raise click.BadParameter(f"{target!r} is neither wandb[:PROJECT] nor tensorboard[:FOLDER]")
    return targets


log_option = option(
    "--log",
    multiple=True,
    callback=_log_targets,
    metavar="TARGET",
    help="Send the figures of `embq status` to wandb[:PROJECT] or tensorboard[:FOLDER]; repeatable.  "
    "[off; project embq, folder OUT/_logs/tensorboard]",
)
"""--log, for verbs that follow a run; () if it is not given."""

precision_option = option(
    "--precision",
    type=click.Choice((AUTO, *PRECISIONS)),
    default=AUTO,
    help="Compute precision. auto: that of the run in OUT, or else the first of bf16, fp16 and fp32 "
    "that is fast on every device.",
)
"""--precision, for verbs that embed; "auto" is resolved by `embq.app.cli.precision`."""

decode_option = option(
    "--decode",
    type=click.Choice(DECODES),
    default=DECODES[0],
    help="Image decoding: fast decoders (cpu-exact), also downscaling large JPEGs while decoding (cpu-fast), the "
    "model's own library (reference), or the GPU for JPEGs (gpu).",
)
"""--decode, for verbs that embed images."""

devices_option = option(
    "--devices",
    default="auto",
    metavar="LIST",
    help="Devices: auto (every CUDA device, else the CPU), cuda (every CUDA device), or a list such as "
    "cuda:0,cuda:2,cpu; sim:SPEED simulates one for stub models.",
)
"""--devices, for verbs that start workers."""

batch_size_option = option(
    "--batch-size",
    type=click.IntRange(min=0, max=MOST_BATCH_SIZE),
    default=0,
    help="Samples per batch.  [by model and device]",
)
"""--batch-size, for verbs that embed; 0 if it is not given."""

threads_option = option(
    "--threads",
    type=click.IntRange(min=0, max=MOST_PREPARE_THREADS),
    default=0,
    help="Decoding and tokenising threads per worker.  [by cores]",
)
"""--threads, for verbs that embed; 0 if it is not given."""


def priority_option(function: F) -> F:
    """--priority, for verbs that make a run; None if it is not given."""
    from embq.core.run.control import LEAST_PRIORITY, MOST_PRIORITY, PRIORITY

    return option(
        "--priority",
        type=click.IntRange(LEAST_PRIORITY, MOST_PRIORITY),
        help=f"Weight among runs that share the devices: 20 gets twice the share of 10.  [{PRIORITY}, or unchanged]",
    )(function)


FOLDERS = {"st": "modules.json", "hf": "config.json"}
"""Model family -> the file by which a folder is known as one of its models."""


def complete_model(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Model families, and the folders of models, for shells."""
    name, equals, spec = incomplete.partition("=")
    if not equals or ":" in name:  # no NAME=SPEC
        name, equals, spec = "", "", incomplete
    family, colon, typed = spec.partition(":")
    lines = (family.help.split("  ", 1) for family in FAMILIES.values())
    families = {usage.partition(":")[0] + (":" if ":" in usage else ""): what.strip() for usage, what in lines}
    by_spec = {} if colon else families
    for folder_family in (family,) if colon else FOLDERS:
        by_spec |= _model_folders(folder_family, typed, all_folders=bool(colon))
    return [CompletionItem(name + equals + item, help=line) for item, line in by_spec.items() if item.startswith(spec)]


def _model_folders(family: str, typed: str, *, all_folders: bool) -> dict[str, str]:
    """Spec -> line of help, of the folders beside the path that is being typed; `all_folders`: with a slash behind,
    also those that are no model of the family, because a model may be below them."""
    above, begun = typed[: typed.rfind("/") + 1], typed[typed.rfind("/") + 1 :]
    above = above or ("./" if not begun.strip(".") else "")
    help_by_spec: dict[str, str] = {}
    with suppress(OSError, RuntimeError):  # it cannot be read, or ~ has no meaning here
        for folder in sorted(Path(above).expanduser().iterdir()) if family in FOLDERS else ():
            if folder.name.startswith(".") or not folder.name.startswith(begun.strip(".")):
                continue
            if (folder / FOLDERS[family]).is_file():
                help_by_spec[f"{family}:{above}{folder.name}"] = "a folder"
            elif all_folders and folder.is_dir():
                help_by_spec[f"{family}:{above}{folder.name}/"] = "a folder"
    return help_by_spec


def model_option(text: str, **settings: Any) -> Callable[[F], F]:
    """--model, for verbs that embed.

    Args:
        text: its help, from the word "Model" on.
        settings: further ones of the option.
    """
    return option("--model", "-m", shell_complete=complete_model, help=text, **{"metavar": "SPEC", **settings})


def machine_workers_option(suffix: str = ".  [one per core, up to 8]", default: int | None = None) -> Callable[[F], F]:
    """--workers, for verbs whose work is shared out over this machine; None if it is not given.

    Args:
        suffix: end of its help.
    """
    text = f"Worker processes on this machine{suffix}"
    return option("--workers", type=click.IntRange(min=1), default=default, help=text)


worker_options = option_group(
    section("Workers"),
    devices_option,
    option(
        "--workers",
        type=click.IntRange(min=1, max=64),
        default=1,
        help="Worker processes per device, each with its own model.",
    ),
    batch_size_option,
    threads_option,
    option("--prefetch", type=click.IntRange(min=1, max=64), default=2, help="Remote shards fetched in advance."),
    option(
        "--transport",
        type=click.Choice(["auto", "payload", "staging"]),
        default="auto",
        help="Path of results to the writer: through the broker (payload), or as files on shared storage (staging).",
    ),
    option(
        "--drain-timeout",
        type=click.FloatRange(min=0),
        default=150.0,
        metavar="SECONDS",
        help="Seconds to finish in-flight units on shutdown.",
    ),
    section(GENERAL),
)
"""Options of the worker processes of this machine; no part of a run."""


def settings_with(broker: str, metrics: Address | None = None) -> Settings:
    """The environment's settings, with --broker and --metrics above them."""
    settings = Settings.from_environment()
    return replace(settings, broker_url=broker or settings.broker_url, metrics=metrics or settings.metrics)


def required_url(settings: Settings) -> str:
    """The broker's URL; ConfigError if none is configured."""
    if not settings.broker_url:
        raise ConfigError(
            "no broker is configured",
            next_step="give --broker redis://HOST:6379 or set EMBQ_BROKER_URL; "
            "`embq run` brings its own broker for work on one machine",
        )
    return settings.broker_url
