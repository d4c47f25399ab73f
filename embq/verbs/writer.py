"""`embq writer`."""

from __future__ import annotations

import click

import embq
from core.networks import Address
from embq.cli.shared_options import broker_option, metrics_option, settings_with


@click.command("writer", epilog="Example: embq writer --broker redis://localhost:6379")
@broker_option
@click.option("--run", "only", default="", metavar="RUN", help="Write only this run.")
@click.option("--takeover", is_flag=True, help="Fence off a writer that still holds the run.")
@click.option("--rebuild", is_flag=True, help="Rebuild the queue from the output folder before starting.")
@metrics_option
def command(broker: str, only: str, takeover: bool, rebuild: bool, metrics: Address | None) -> None:
    """Commit the results of all runs to their output folders. Runs until stopped; one per output."""
    from core.storage.paths import Outputs
    from embq.services.service import resident_service
    from embq.services.writer_metrics import WriterMetrics
    from producer.enqueue import add_uploaded
    from writer.lock import WEDGED_S
    from writer.service import WriterService

    settings = settings_with(broker, metrics)
    with resident_service(settings, "writer", only=only, stands_s=WEDGED_S) as service:
        writer = WriterService(
            service.client,
            version=embq.__version__,
            add=add_uploaded,
            only=only,
            takeover=takeover,
            rebuild=rebuild,
            beat=service.health.beat,
            outputs=Outputs(settings.outputs),
        )
        with service.reported(WriterMetrics(writer)):
            writer.serve(service.stopped)
