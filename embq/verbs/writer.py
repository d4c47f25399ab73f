"""`embq writer`: the single writer."""

from __future__ import annotations

import click

import embq
from core.networks import Address
from embq.cli.options import broker_option, metrics_option, settings_with
from embq.services.startup import reporter, service_client


@click.command("writer", epilog="Example: embq writer --broker redis://localhost:6379")
@broker_option
@click.option("--run", "only", default="", metavar="RUN", help="Write only this run.")
@click.option("--takeover", is_flag=True, help="Fence out a writer that still holds the run.")
@click.option("--rebuild", is_flag=True, help="Make the queue anew from the output folder before starting.")
@metrics_option
def command(broker: str, only: str, takeover: bool, rebuild: bool, metrics: Address | None) -> None:
    """Commit the results of all runs to their output folders. Runs until stopped; only one per output."""
    from core.service.log import configure
    from core.service.stopping import StopFlag
    from core.storage.paths import Outputs
    from embq.services.monitoring import monitored
    from embq.services.writer_metrics import WriterMetrics
    from producer.enqueue import add_uploaded
    from writer.lock import WEDGED_S
    from writer.service import WriterService

    configure()
    stopped = StopFlag()
    stopped.install()
    settings = settings_with(broker, metrics)
    with monitored(settings, "writer", stands_s=WEDGED_S) as service:
        client = service_client(settings, "writer", give_up=stopped)
        writer = WriterService(
            client,
            version=embq.__version__,
            add=add_uploaded,
            only=only,
            takeover=takeover,
            rebuild=rebuild,
            beat=service.health.beat,
            outputs=Outputs(settings.outputs),
        )
        service.watch(client, WriterMetrics(writer))
        with reporter(settings, "writer", only=only, metrics=service.address):
            writer.serve(stopped)
