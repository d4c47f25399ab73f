"""`embq producer`, `embq worker` and `embq writer`: resident services, and `embq health` of one of them."""

from __future__ import annotations

import http.client
from functools import partial
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler

import click

import embq
from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import (
    broker_option,
    json_option,
    metrics_option,
    required_url,
    settings_with,
    worker_options,
)
from embq.core.answers import opener
from embq.core.errors import ConfigError, Exit, UnwellError
from embq.core.networks import Address
from embq.core.settings import Settings

if TYPE_CHECKING:
    from embq.worker.supervisor.slot import Fleet


@click.command("producer", cls=SectionedCommand, epilog="Example: embq producer --broker redis://localhost:6379")
@broker_option
@option("--run", "only", default="", metavar="RUN", help="Feed only this run.")
@metrics_option
def producer(broker: str, only: str, metrics: Address | None) -> None:
    """Fill the queues with hints from the manifests of all runs. Runs until stopped."""
    from embq.app.services.broker_metrics import BrokerMetrics
    from embq.app.services.service import resident_service
    from embq.core.storage.paths import Outputs
    from embq.producer.feeder import serve

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


@click.command(
    "worker", cls=SectionedCommand, epilog="Example: embq worker --broker redis://box:6379 --devices cuda:0,cuda:1"
)
@broker_option
@option("--run", "only", default="", metavar="RUN", help="Serve only this run, and exit when it is over.")
@option(
    "--idle-exit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Exit after so long without a unit in hand, for batch systems.  [never]",
)
@metrics_option
@worker_options
@option("--check", is_flag=True, help="Do no work: check this machine for the runs that the broker knows.")
@option("--load", is_flag=True, help="With --check: also load each run's model, and compare its fingerprint.")
@json_option
def worker(
    broker: str,
    only: str,
    idle_exit: float | None,
    metrics: Address | None,
    devices: str,
    workers: int,
    batch_size: int,
    threads: int,
    prefetch: int,
    transport: str,
    drain_timeout: float,
    check: bool,
    load: bool,
    as_json: bool,
) -> int:
    """Embed units of the queue, with persistent processes on each device. Runs until stopped.

    With --check, checks this machine instead and prints a row per check, as `embq doctor` does. Exit status then: 0,
    or 69 if a check fails.
    """
    if (load or as_json) and not check:
        raise click.UsageError("--load and --json belong to --check")
    if check:
        from embq.app.doctor.check import print_checks
        from embq.app.doctor.worker_checks import check_worker

        settings = settings_with(broker, metrics)
        required_url(settings)
        return print_checks(check_worker(settings, devices, load=load), as_json=as_json)
    from embq.core.process.limits import cores
    from embq.core.service.log import configure
    from embq.worker.supervisor.devices import find_devices, find_gpus
    from embq.worker.supervisor.protocol import WorkerOptions
    from embq.worker.supervisor.slot import Fleet

    configure()
    settings = settings_with(broker, metrics)
    gpus = find_gpus(settings.cuda_visible) if devices != "cpu" else ()
    names = tuple(name for name in find_devices(devices, settings.cuda_visible) for _ in range(workers))
    # A thread for each core of a process, but for the core of what hands samples to a GPU.
    usual = cores() // len(names) - any(name.startswith("cuda") for name in names)
    fleet = Fleet(
        devices=names,
        options=WorkerOptions(
            run=only,
            prefetch=prefetch,
            threads=threads or max(1, usual),
            threads_chosen=threads > 0,
            batch_size=batch_size,
            transport=transport,
            drain_s=drain_timeout,
            version=embq.__version__,
        ),
        settings=settings,
        gpus=gpus if any(name.startswith("cuda") for name in names) else (),
    )
    _supervise(fleet, devices_option=devices, idle_exit_s=idle_exit or float("inf"))
    return Exit.DONE


def _supervise(fleet: Fleet, *, devices_option: str, idle_exit_s: float) -> None:
    """Run the worker processes of this machine until stopped, or idle for so long.

    Args:
        devices_option: what was given as --devices.
    """
    from embq.app.services.service import resident_service
    from embq.app.services.worker_metrics import GpuMetrics, WorkerMetrics
    from embq.core.service.log import Events
    from embq.worker.supervisor.devices import why_no_gpu
    from embq.worker.supervisor.machine import Machine
    from embq.worker.supervisor.supervisor import Supervisor

    settings = fleet.settings
    with resident_service(settings, "worker", only=fleet.options.run) as service:
        log = Events("supervisor")
        if devices_option == "auto" and fleet.devices[0] == "cpu":
            why, remedy = why_no_gpu(settings.cuda_visible)
            log.warning("devices", devices="cpu", why=f"no CUDA device: {why}; the CPU computes", next=remedy)
        else:
            log.info("devices", devices=",".join(fleet.devices))
        supervisor = Supervisor(service.client, fleet, service.health.beat, idle_exit_s=idle_exit_s)
        service.health.also = supervisor.complaint
        metrics = (WorkerMetrics(supervisor, service.client), GpuMetrics())
        with service.reported(*metrics, refresh=Machine(supervisor, settings.cuda_visible).refreshed):
            supervisor.serve(service.stopped)


@click.command("writer", cls=SectionedCommand, epilog="Example: embq writer --broker redis://localhost:6379")
@broker_option
@option("--run", "only", default="", metavar="RUN", help="Write only this run.")
@option("--takeover", is_flag=True, help="Fence off a writer that still holds the run.")
@option("--rebuild", is_flag=True, help="Rebuild the queue from the output folder before starting.")
@metrics_option
def writer(broker: str, only: str, takeover: bool, rebuild: bool, metrics: Address | None) -> None:
    """Commit the results of all runs to their output folders. Runs until stopped; one per output."""
    from embq.app.services.service import resident_service
    from embq.app.services.writer_metrics import put_writer
    from embq.core.storage.paths import Outputs
    from embq.producer.enqueue import add_uploaded
    from embq.writer.lock import WEDGED_S
    from embq.writer.service import WriterService

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
        with service.reported(partial(put_writer, writer)):
            writer.serve(service.stopped)


ANSWER_S = 5.0
SHOWN = 300
"""Characters of an answer that are shown."""


def health_url(settings: Settings) -> str:
    """URL of the health endpoint of a service with these settings; ConfigError if it has none."""
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
        with opener(ANSWER_S, ProxyHandler({})).open(url) as answer:
            return _line(answer.read(64 * 1024))
    except HTTPError as error:
        status_line = _line(error.read(64 * 1024))
        raise UnwellError(f"the service at {url} says: {status_line}", next_step="its own log says more") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UnwellError(
            f"no service answers at {url} ({getattr(error, 'reason', error)})",
            next_step="see that it runs, with the same EMBQ_METRICS",
        ) from error


def _line(body: bytes) -> str:
    return " ".join(body.decode("utf-8", "replace").split())[:SHOWN]


@click.command(
    "health", cls=SectionedCommand, epilog="Examples: embq health | embq health --url http://127.0.0.1:1234/health"
)
@option(
    "--url", default="", metavar="URL", help="URL to query; of `embq serve`, its /health.  [/healthz at EMBQ_METRICS]"
)
def health(url: str) -> None:
    """Query the health of a service on this machine or in this container; for health checks of containers.

    Without --url, of the producer, writer or worker with the same EMBQ_METRICS.

    Exit status: 0, or 69 if it is unhealthy or does not answer within 5 s.
    """
    click.echo(ask_health(url or health_url(Settings.from_environment())))
