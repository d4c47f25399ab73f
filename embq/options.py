"""Options that several verbs share, and what they turn into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from core.errors import ConfigError
from core.listening import Address
from core.masking import masked
from core.models import DECODES, PRECISIONS
from core.settings import Settings

if TYPE_CHECKING:
    import redis

    from core.fleet import Service
    from core.reporting import Reporter

INPUT_FORMATS = {
    "webdataset": "tar",
    "files": "files",
    "parquet": "parquet",
    "arrow": "arrow",
    "hdf5": "hdf5",
    "csv": "csv",
    "jsonl": "jsonl",
    "text": "lines",
}
"""--input-format, with clip-retrieval's words where it has one -> kind of input."""

F = TypeVar("F", bound=Callable[..., Any])


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


def precision_option(function: F) -> F:
    """--precision, for verbs that embed."""
    return click.option(
        "--precision",
        type=click.Choice(PRECISIONS),
        default="fp32",
        show_default=True,
        help="What is computed in.",
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


def run_options(function: F) -> F:
    """What decides the content of a run: frozen in its run.json."""
    for decorate in reversed(
        (
            click.option(
                "--output",
                "-o",
                required=True,
                type=click.Path(file_okay=False),
                help="Folder for the result, or s3://BUCKET/PREFIX.",
            ),
            click.option(
                "--model",
                "-m",
                required=True,
                multiple=True,
                metavar="[NAME=]SPEC",
                help="For example minilm or open_clip:ARCH/TAG; several embed each sample, which is decoded once.",
            ),
            click.option(
                "--modality",
                default="",
                metavar="LIST",
                help="image, text or image,text.  [what the inputs hold]",
            ),
            click.option(
                "--prompt",
                default=None,
                metavar="NAME",
                help="Prompt of an st: model before each text: query, document, or another name that the model has.  "
                "[the model's default]",
            ),
            click.option(
                "--prompt-text",
                default=None,
                metavar="TEXT",
                help="The prompt itself, for st: and hf: models, with the space at its end; '' for none.",
            ),
            precision_option,
            decode_option,
            click.option(
                "--dtype",
                type=click.Choice(["float16", "float32", "int8", "binary"]),
                default="float16",
                show_default=True,
                help="What is stored of a vector; binary is the signs of its numbers, eight in a byte.",
            ),
            click.option(
                "--truncate-dim",
                type=click.IntRange(min=1),
                default=None,
                metavar="N",
                help="Store the first N numbers of a vector, brought to length 1 again (matryoshka models).  [all]",
            ),
            click.option(
                "--normalize/--no-normalize",
                "normalize",
                default=None,
                help="Store vectors of length 1, or of the length that they have before the model changes it.  "
                "[as the model gives them; length 1 with int8 and --truncate-dim]",
            ),
            click.option(
                "--int8-range",
                type=float,
                default=None,
                metavar="X",
                help="int8 stores numbers from -X to X in equal steps, and those beyond as if they were X.  [1]",
            ),
            click.option(
                "--similarity",
                is_flag=True,
                help="A column image_text_similarity: the cosine of a row's image and text.",
            ),
            click.option(
                "--output-format",
                type=click.Choice(["parquet", "hdf5", "npy", "arrow"]),
                default="parquet",
                show_default=True,
                help="Format of the parts.",
            ),
            click.option(
                "--write-batch-size",
                type=click.IntRange(min=1),
                default=1_000_000,
                show_default=True,
                metavar="N",
                help="Most rows of one part.",
            ),
            click.option(
                "--unit-size",
                type=click.IntRange(min=1, max=100_000),
                default=1000,
                show_default=True,
                metavar="N",
                help="Samples per unit where the input is not sharded.",
            ),
            click.option(
                "--input-format",
                type=click.Choice(sorted(INPUT_FORMATS)),
                help="What the inputs are.  [what their names say]",
            ),
            click.option(
                "--image-key",
                default="",
                metavar="LIST",
                help="Extensions of images in shards and folders, the best first: 'jpg;png'.  [all that are known]",
            ),
            click.option(
                "--caption-key",
                default="",
                metavar="LIST",
                help="Extensions of captions in shards and folders.  [txt]",
            ),
            click.option(
                "--chunk-tokens",
                type=click.IntRange(min=16),
                default=None,
                metavar="N",
                help="Cut long texts into chunks of at most N tokens of the model, special ones included: a row for "
                "each.  [a text is one row, cut off at what the model reads]",
            ),
            click.option(
                "--chunk-overlap",
                type=click.IntRange(min=0),
                default=0,
                show_default=True,
                metavar="M",
                help="At most M tokens of a chunk are repeated in the next one; M is at most half of N.",
            ),
            click.option("--text-column", default="", metavar="NAME", help="Column or field that holds the text."),
            click.option("--id-column", default="", metavar="NAME", help="Column or field that holds the key."),
            click.option(
                "--image-column", default="", metavar="NAME", help="Column of images, or of their paths in the folder."
            ),
            click.option(
                "--metadata-columns",
                default="",
                metavar="LIST",
                help="Columns kept as metadata: a,b, or * for all others.  [.jsonl and .csv: *]",
            ),
            click.option(
                "--include",
                multiple=True,
                metavar="PATTERN",
                help="Take only files whose path, or its end after a slash, matches; repeatable.",
            ),
            click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out such files; repeatable."),
            click.option(
                "--sample",
                type=click.FloatRange(min=0, max=1, min_open=True),
                default=1.0,
                metavar="FRACTION",
                help="Take this part of the images of a folder, else of the units; always the same ones.",
            ),
            click.option(
                "--limit",
                type=click.IntRange(min=0),
                default=0,
                metavar="N",
                help="Take N images of a folder, units of texts until they hold N, or N shards, from the first one on.",
            ),
        )
    ):
        function = decorate(function)
    return function


def priority_option(function: F) -> F:
    """--priority, for verbs that make a run; None where it is not given."""
    from core.control import LEAST_PRIORITY, MOST_PRIORITY, PRIORITY

    return click.option(
        "--priority",
        type=click.IntRange(LEAST_PRIORITY, MOST_PRIORITY),
        default=None,
        metavar="N",
        help=f"Weight among runs that share the devices: 20 gets twice as much done as 10.  [{PRIORITY}, or as it was]",
    )(function)


def worker_options(function: F) -> F:
    """What decides how this machine works: never part of a run."""
    for decorate in reversed(
        (
            devices_option,
            click.option(
                "--workers-per-device",
                type=click.IntRange(min=1, max=64),
                default=1,
                metavar="N",
                show_default=True,
                help="Processes on each device, each with a model of its own.",
            ),
            click.option(
                "--batch-size",
                type=click.IntRange(min=0),
                default=0,
                metavar="N",
                help="Samples per batch.  [by model and device]",
            ),
            click.option(
                "--prepare-threads",
                type=click.IntRange(min=0),
                default=0,
                metavar="N",
                help="Threads that decode and tokenise, per process.  [by cores]",
            ),
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
    ):
        function = decorate(function)
    return function


def settings_with(broker: str, metrics: Address | None = None) -> Settings:
    """The environment's settings, with --broker and --metrics above them.

    A --broker that is EMBQ_BROKER_URL with its password masked is what `embq.arguments` has left of it.
    """
    settings = Settings.from_environment()
    url = settings.broker_url if broker in ("", masked(settings.broker_url)) else broker
    return replace(settings, broker_url=url, metrics=metrics or settings.metrics)


def service_client(settings: Settings, verb: str, *, give_up: Callable[[], bool], instead: str = "") -> redis.Redis:
    """A patient client for a resident service, after checking that the broker can be used, and by our user.

    Args:
        verb: the service.
        give_up: whether it is to stop; then it does not wait for a broker that is away.
        instead: what else a user can do whom the broker does not let do this.
    """
    from core.broker import check, connect
    from embq.rights import require

    url = required_url(settings)
    with connect(url, password=settings.broker_password) as client:
        check(client, url)
        require(client, verb, instead=instead)
    return connect(url, password=settings.broker_password, patient=True, give_up=give_up)


def reporter(
    settings: Settings,
    role: str,
    *,
    only: str,
    metrics: str = "",
    look: Callable[[Service], Service] = lambda service: service,
) -> Reporter:
    """Reports this process to the broker as a service, by a client of its own.

    Args:
        role: see `core.fleet.ROLES`.
        only: the one run that it serves; "" for all.
        metrics: HOST:PORT of its metrics; "" for none.
        look: see `core.reporting.Reporter`.
    """
    import embq
    from core.broker import connect
    from core.reporting import Reporter, this_service

    def client(give_up: Callable[[], bool]) -> redis.Redis:
        return connect(settings.broker_url, password=settings.broker_password, give_up=give_up)

    return Reporter(client, this_service(role, version=embq.__version__, run=only, metrics=metrics), look=look)


def required_url(settings: Settings) -> str:
    """The broker's URL; ConfigError where none is configured."""
    if not settings.broker_url:
        raise ConfigError(
            "no broker is configured",
            next_step="give --broker redis://HOST:6379 or set EMBQ_BROKER_URL; "
            "`embq run` brings its own broker for work on one machine",
        )
    return settings.broker_url
