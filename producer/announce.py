"""Tell the broker that a run exists; until then only its output folder knows."""

from __future__ import annotations

from collections.abc import Mapping

import redis

from core.broker.embedded import in_use, kept_off
from core.queue.ledger import Ledger
from core.queue.registry import RunRecord, register
from core.run.layout import Layout
from core.run.run_info import RunInfo
from core.storage.paths import Place, place
from sources.credentials import refuse_secrets


def announce(client: redis.Redis, info: RunInfo, output: Place) -> None:
    """Make the run known to the resident producer, writer and workers; repeating it changes nothing."""
    register(client, record_of(info, output))


def hand_over(client: redis.Redis, info: RunInfo, output: Place, wishes: Mapping[str, str] | None = None) -> None:
    """Make the run known to resident services; TryLaterError where an `embq run` is at work on it.

    Args:
        wishes: what is asked of it besides, see `core.run.control`.

    Raises UsageError where its inputs, which would travel through the broker, hold a secret.
    """
    refuse_secrets(info.inputs)
    broker = Layout(output).broker
    with kept_off(broker) as alone:
        if not alone:
            raise in_use(broker)
        announce(client, info, output)
        if wishes:
            Ledger(client, info.run).ask(wishes)


def record_of(info: RunInfo, output: Place) -> RunRecord:
    """The run as the services know it."""
    return RunRecord(
        run=info.run,
        output=str(place(output)),
        model=info.model,
        rows=info.rows,
        units=info.units,
        retries=info.retries,
    )
