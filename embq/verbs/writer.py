"""`embq writer`: the single writer."""

from __future__ import annotations

import click

import embq
from embq.options import broker_option, service_client, settings_with


@click.command("writer", epilog="Example: embq writer --broker redis://localhost:6379")
@broker_option
@click.option("--run", "only", default="", metavar="RUN", help="Write only this run.")
@click.option("--takeover", is_flag=True, help="Fence out a writer that still holds the run.")
@click.option("--rebuild", is_flag=True, help="Make the queue anew from the output folder before starting.")
def command(broker: str, only: str, takeover: bool, rebuild: bool) -> None:
    """Commit the results of all runs to their output folders. Runs until stopped; only one per output."""
    from core.log import configure
    from core.stopping import StopFlag
    from producer.enqueue import add_uploaded
    from writer.daemon import Writer

    configure()
    stopped = StopFlag()
    stopped.install()
    client = service_client(settings_with(broker), give_up=stopped)
    Writer(client, version=embq.__version__, add=add_uploaded, only=only, takeover=takeover, rebuild=rebuild).serve(
        stopped
    )
