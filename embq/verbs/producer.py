"""`embq producer`: the resident feeder."""

from __future__ import annotations

import click

from core.networks import Address
from embq.cli.options import broker_option, metrics_option, settings_with
from embq.services.startup import reporter, service_client


@click.command("producer", epilog="Example: embq producer --broker redis://localhost:6379")
@broker_option
@click.option("--run", "only", default="", metavar="RUN", help="Feed only this run.")
@metrics_option
def command(broker: str, only: str, metrics: Address | None) -> None:
    """Keep the queues filled with hints from the manifests of all runs. Runs until stopped."""
    from core.service.log import configure
    from core.service.stopping import StopFlag
    from core.storage.paths import Outputs
    from embq.services.broker_metrics import BrokerMetrics
    from embq.services.monitoring import monitored
    from producer.feeder import serve

    configure()
    stopped = StopFlag()
    stopped.install()
    settings = settings_with(broker, metrics)
    with monitored(settings, "producer") as service:
        client = service_client(settings, "producer", give_up=stopped)
        service.watch(client, BrokerMetrics(client))
        with reporter(settings, "producer", only=only, metrics=service.address):
            serve(
                client,
                lease_s=settings.lease_s,
                only=only,
                stopped=stopped,
                beat=service.health.beat,
                outputs=Outputs(settings.outputs),
            )
