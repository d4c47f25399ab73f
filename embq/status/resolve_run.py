"""Where a run that a user names can be looked at: in its folder, at a broker, or on its way to one."""

from __future__ import annotations

from dataclasses import dataclass

import redis

from core.broker.client import connect, reach
from core.broker.embedded import EmbeddedServer
from core.errors import InputError
from core.queue.reporting import FOREIGN_NEXT
from core.queue.runs import foreign_runs, registered
from core.queue.uploads import UnderWay
from core.run.layout import Layout
from core.storage.paths import is_folder, place
from embq.cli.options import settings_with
from embq.status.run_monitor import RemoteRunMonitor, RunMonitor, open_monitor
from embq.status.upload_status import arriving, became_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """What is found of one run.

    Attributes:
        watch: looks at it; None as long as all of it is on its way to the writer.
        client: the broker; None where a folder was named and no broker is configured.
        uploads: what is on its way to the writer; never empty where there is no `watch`.
    """

    watch: RunMonitor | RemoteRunMonitor | None
    client: redis.Redis | None
    uploads: list[UnderWay]


def find(run: str, broker: str) -> Whereabouts:
    """The run with that output folder or id, or with the id of an upload that became one.

    Args:
        broker: what was given as --broker; "" for the one of the folder's `embq run`, or of the environment.

    Raises:
        InputError: the broker knows no such run, or there is no broker to ask; the folder holds none; or what was
            sent as this run was refused.
    """
    settings = settings_with(broker)
    folder = place(run) if is_folder(run) else None
    url = settings.broker_url
    if folder is not None and not broker:
        url = EmbeddedServer.find(Layout(folder).broker) or url
    client = connect(url, password=settings.broker_password) if url else None
    if client is not None:
        reach(client, url)
    if folder is not None:
        uploads = arriving(client, run, str(folder)) if client is not None else []
        return Whereabouts(watch=RunMonitor(folder, client), client=client, uploads=uploads)
    if client is None:
        raise InputError(
            f"{run} is not a folder, and no broker is configured",
            next_step="name an output folder, or give --broker / EMBQ_BROKER_URL",
        )
    return _at_broker(run, client)


def _at_broker(run: str, client: redis.Redis) -> Whereabouts:
    records, asked = registered(client), run
    if run not in records:
        if uploads := arriving(client, run):
            return Whereabouts(watch=None, client=client, uploads=uploads)
        run = became_of(client, run)
        if run not in records:
            raise _unknown(asked, client)
    record = records[run]
    uploads = arriving(client, run, record.output)
    return Whereabouts(watch=open_monitor(record, client), client=client, uploads=uploads)


def _unknown(run: str, client: redis.Redis) -> InputError:
    for foreign in foreign_runs(client):
        if foreign.run == run:
            return InputError(
                f"the run {run} was announced under protocol version {foreign.protocol}, which this embq does not read",
                next_step=FOREIGN_NEXT,
            )
    return InputError(f"the broker knows no run {run}", next_step="`embq status` lists the runs that it knows")
