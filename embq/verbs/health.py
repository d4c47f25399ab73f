"""`embq health`: is the service on this machine, or in this container, well?"""

from __future__ import annotations

import click


@click.command("health", epilog="Examples: embq health | embq health --url http://127.0.0.1:1234/health")
@click.option(
    "--url", default="", metavar="URL", help="What to ask: of `embq serve`, its /health.  [/healthz at EMBQ_METRICS]"
)
def command(url: str) -> None:
    """Ask the service of this machine or container how it is; for health checks of containers.

    Without --url that is the producer, the writer or the worker that has the same EMBQ_METRICS.

    Exit status: 0, or 69 where it is not well or does not answer within 5 s.
    """
    from core.settings import Settings
    from embq.wellness import ask_health, health_url

    click.echo(ask_health(url or health_url(Settings.from_environment())))
