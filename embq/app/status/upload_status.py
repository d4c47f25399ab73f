"""Uploads in progress, as `embq status` shows them."""

from __future__ import annotations

from typing import Any

import redis

from embq.core.errors import InputError, MalformedError
from embq.core.queue.runs import RunRecord
from embq.core.queue.uploads import UploadProgress, in_progress, outcome_of
from embq.core.redaction import printable
from embq.core.service.progress_line import size_text


def arriving(client: redis.Redis, run: str, output: str = "") -> list[UploadProgress]:
    """Uploads in progress: all, or those of a run by its id, their own name, or its output folder."""
    return [
        one
        for one in in_progress(client)
        if not run or run in (one.upload.run, one.name) or one.upload.output == output
    ]


def became_of(client: redis.Redis, run: str) -> str:
    """The run that an upload of the last day became; "" where none is known.

    Raises InputError where it was refused, with the writer's code and reason.
    """
    end = outcome_of(client, run)
    if end is not None and end.end == "refused":
        raise InputError(
            f"what was sent as run {run} was refused: {end.why}",
            code=end.code,
            next_step="send it again once that is mended; the log of `embq writer` tells more",
        )
    return "" if end is None else end.run


def to_json(one: UploadProgress) -> dict[str, Any]:
    """The shape that `embq status --json` promises."""
    return {
        "upload": one.name,
        "run": one.upload.run,
        "output": one.upload.output,
        "model": _model(one),
        "bytes": one.bytes,
        "bytes_total": one.bytes_total,
        "sent": one.sent,
        "waits": one.why,
    }


def line(one: UploadProgress) -> str:
    """One line for people."""
    how = "all of it is in the broker" if one.sent else "its sender has not sent all of it"
    waits = f"; waits: {one.why}" if one.why else ""
    return printable(
        f"arriving: run {one.upload.run} for {one.upload.output} ({_model(one)}): {size_text(one.bytes)} of "
        f"{size_text(one.bytes_total)} are on the writer's disk, {how}{waits}"
    )


def _model(one: UploadProgress) -> str:
    try:
        record = RunRecord.from_json(one.upload.record)
    except MalformedError:
        return "?"
    return "?" if record is None else record.model.spec
