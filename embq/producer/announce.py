"""Registers a run with the broker, from where the resident services take it up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import redis

from embq.core.broker.embedded import in_use, kept_off
from embq.core.errors import UsageError
from embq.core.queue.ledger import Ledger
from embq.core.queue.runs import RunRecord, register
from embq.core.redaction import masked
from embq.core.run.layout import Layout
from embq.core.run.run_info import RunInfo
from embq.core.storage.paths import Place, place


def announce(client: redis.Redis, info: RunInfo, output: Place) -> None:
    """Register the run; idempotent."""
    register(client, record_of(info, output))


def hand_over(client: redis.Redis, info: RunInfo, output: Place, wishes: Mapping[str, str] | None = None) -> None:
    """Register the run for resident services; TryLaterError while an `embq run` works on it.

    Args:
        wishes: changes of its control record, see `embq.core.run.control`.

    Raises UsageError if its inputs, which would travel through the broker, hold a secret.
    """
    refuse_secrets(info.inputs)
    broker = Layout(output).broker
    with kept_off(broker) as exclusive:
        if not exclusive:
            raise in_use(broker)
        announce(client, info, output)
        if wishes:
            Ledger(client, info.run).request(wishes)


def record_of(info: RunInfo, output: Place) -> RunRecord:
    """The run as the broker holds it."""
    return RunRecord(
        run=info.run,
        output=str(place(output)),
        model=info.model,
        rows=info.rows,
        units=info.units,
        retries=info.retries,
        workers=info.workers,
    )


def refuse_secrets(inputs: Iterable[str]) -> None:
    """UsageError for the first input that holds a secret, which the message does not repeat."""
    for text in inputs:
        scheme, is_url, rest = text.partition("://")
        if not is_url:
            continue
        place, _, query = rest.partition("?")
        netloc, slash, path = place.partition("/")
        user, _, host = netloc.rpartition("@")
        if ":" in user:
            what = "a password"
        elif masked(f"?{query}") != f"?{query}":
            what = "a signature or a token"
        else:
            continue
        raise UsageError(
            f"the input {scheme}://{host}{slash}{path} has {what} in its URL, which would travel through the broker "
            "and stand in the run's files",
            next_step="name it without, and give each worker credentials of its own, as the storage's tools take them "
            "(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS); or embed it on this machine alone: embq run",
            code="secret_in_url",
        )
