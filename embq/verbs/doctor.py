"""`embq doctor` and `embq health`: checks of a machine and of a service."""

from __future__ import annotations

import http.client
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import click

from core.errors import ConfigError, UnwellError
from core.settings import Settings
from embq.cli.shared_options import broker_option, json_option, settings_with


@click.command("doctor", epilog="Example: embq doctor --model minilm --output ./out")
@broker_option
@click.option(
    "--output",
    "-o",
    default="",
    type=click.Path(),
    help="Folder or URL to test storage in.  [the folder for temporary files]",
)
@click.option("--model", "-m", multiple=True, metavar="[NAME=]SPEC", help="Load this model and embed one sample.")
@json_option
def doctor(broker: str, output: str, model: tuple[str, ...], as_json: bool) -> int:
    """Check packages, broker, devices, models, storage and limits of this machine.

    Prints a line per check, with a fix where one is needed. Without --broker and EMBQ_BROKER_URL, the embedded server
    of `embq run` is started and stopped.

    Exit status: 0, or 69 where a check fails; warnings do not count.
    """
    from embq.doctor.check import print_checks
    from embq.doctor.machine_checks import check_machine

    return print_checks(check_machine(settings_with(broker), output=output, model_specs=model), as_json=as_json)


ANSWER_S = 5.0
SHOWN = 300
"""Characters of an answer that are shown."""


def health_url(settings: Settings) -> str:
    """URL of the health endpoint of a service with these settings; ConfigError where it has none."""
    if settings.metrics is None or not settings.metrics.port:
        raise ConfigError(
            "nothing says which service is meant",
            next_step="set EMBQ_METRICS=PORT as for the service, or give --url http://HOST:PORT/healthz",
        )
    return settings.metrics.url("/healthz")


def ask_health(url: str) -> str:
    """The status line of a healthy service at `url`; UnwellError for any other.

    Proxies of the environment are not used: a health check is of this machine.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"{url!r} is no URL of a service", next_step="for example http://127.0.0.1:9101/healthz")
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=ANSWER_S) as answer:
            return _line(answer.read(64 * 1024))
    except HTTPError as error:
        said = _line(error.read(64 * 1024))
        raise UnwellError(f"the service at {url} says: {said}", next_step="its own log says more") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UnwellError(
            f"no service answers at {url} ({getattr(error, 'reason', error)})",
            next_step="see that it runs, with the same EMBQ_METRICS",
        ) from error


def _line(body: bytes) -> str:
    return " ".join(body.decode("utf-8", "replace").split())[:SHOWN]


@click.command("health", epilog="Examples: embq health | embq health --url http://127.0.0.1:1234/health")
@click.option(
    "--url", default="", metavar="URL", help="URL to query; of `embq serve`, its /health.  [/healthz at EMBQ_METRICS]"
)
def health(url: str) -> None:
    """Query the health of a service on this machine or in this container; for health checks of containers.

    Without --url, of the producer, writer or worker with the same EMBQ_METRICS.

    Exit status: 0, or 69 if it is unhealthy or does not answer within 5 s.
    """
    click.echo(ask_health(url or health_url(Settings.from_environment())))
