"""`--precision auto`, resolved when a run is made, so that a run always has a precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import redis

    from embq.core.queue.heartbeats import Device
    from embq.core.storage.paths import Place
    from embq.producer.enqueue import Request

AUTO = "auto"


def resolve_precision(
    request: Request, *, precision_at: Callable[[Place], str], devices: Callable[[], Sequence[Device]]
) -> tuple[Request, str]:
    """The request with a precision in place of "auto", and the reason for it; "" if none was chosen.

    Args:
        precision_at: returns the precision of the run in a folder; "" if it holds none.
        devices: returns the devices that will compute a new run.
    """
    from embq.producer.model_args import choose_precision

    if request.precision != AUTO:
        return request, ""
    if precision := precision_at(request.output):
        return replace(request, precision=precision), ""
    choice = choose_precision(devices())
    return replace(request, precision=choice.precision), choice.reason


def precision_of_output(output: Place) -> str:
    """The precision of the run in a folder; "" if there is none."""
    from embq.core.run.layout import Layout
    from embq.core.run.run_info import load_run
    from embq.core.storage.paths import place

    layout = Layout(place(output))
    return load_run(layout.root).model.precision if layout.run_json.exists() else ""


def precision_of_upload(client: redis.Redis, output: Place) -> str:
    """The precision of the run in a folder of the writer's machine; "" if the broker knows none there.

    A run that is still being uploaded to that folder counts: with another precision it would be another run.
    """
    from embq.core.queue.runs import records_of, registered
    from embq.core.queue.uploads import in_progress

    sent = records_of({upload.upload.run.encode(): upload.upload.record.encode() for upload in in_progress(client)})
    records = [*registered(client).values(), *sent.values()]
    return next((record.model.precision for record in records if record.output == str(output)), "")
