"""`embq producer`."""

from __future__ import annotations

import click

from core.networks import Address
from embq.cli.shared_options import broker_option, metrics_option, settings_with


@click.command("producer", epilog="Example: embq producer --broker redis://localhost:6379")
@broker_option
@click.option("--run", "only", default="", metavar="RUN", help="Feed only this run.")
@metrics_option
def command(broker: str, only: str, metrics: Address | None) -> None:
    """Fill the queues with hints from the manifests of all runs. Runs until stopped."""
    from core.storage.paths import Outputs
    from embq.services.broker_metrics import BrokerMetrics
    from embq.services.service import resident_service
    from producer.feeder import serve

    settings = settings_with(broker, metrics)
    with (
        resident_service(settings, "producer", only=only) as service,
        service.reported(BrokerMetrics(service.client)),
    ):
        serve(
            service.client,
            lease_s=settings.lease_s,
            only=only,
            stopped=service.stopped,
            beat=service.health.beat,
            outputs=Outputs(settings.outputs),
        )
