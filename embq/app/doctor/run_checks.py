"""Checks of the runs that a broker knows: whether this machine has their model, inputs and output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import redis
from redis.exceptions import RedisError

from embq.app.doctor.check import Check, guarded
from embq.app.doctor.probes import MODEL_TIMEOUT_S, PROBE, child
from embq.core.errors import EmbqError
from embq.core.models import ModelConfig
from embq.core.queue.hints import hint_queue, peek
from embq.core.queue.keys import run_key
from embq.core.queue.runs import RunRecord, registered
from embq.core.redaction import printable
from embq.core.run.control import OVER
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.storage.paths import place
from embq.core.units import Unit
from embq.worker.supervisor.devices import alone

MOST_RUNS = 20
"""Most runs that are checked; each takes seconds."""
MOST_HINTS = 200
INPUT_S, LOOKUP_S = 60.0, 60.0


def runs(client: redis.Redis, device: str, cuda_visible: str | None, *, load: bool) -> Iterator[Check]:
    """Model, an input and the output of each run that is not over.

    Args:
        device: on which models are loaded.
        cuda_visible: CUDA_VISIBLE_DEVICES, or None where it is not set.
        load: load each model, and compare its fingerprint with that of the run.
    """
    try:
        found = [
            (record, meta) for record in registered(client).values() if (meta := _meta(client, record)) is not None
        ]
    except RedisError as error:
        yield Check("runs", "fail", f"the broker refuses to say what runs there are: {error}", "allow it to this user")
        return
    if not found:
        yield Check("runs", "ok", "the broker knows no run that is not over, so no model and no input was tried")
    seen: set[ModelConfig] = set()
    for record, meta in found[:MOST_RUNS]:
        if record.model not in seen:
            seen.add(record.model)
            yield _model(record, meta, device, cuda_visible) if load else _files(record.model)
        yield from guarded("input", partial(_input, client, record, meta))
        yield _output(record, meta)
    if len(found) > MOST_RUNS:
        yield Check("runs", "ok", f"{len(found) - MOST_RUNS} more runs were not looked at")


def _meta(client: redis.Redis, record: RunRecord) -> dict[str, str] | None:
    """State, fingerprint and nonce of a run; None for one that is over."""
    names = ("state", "fingerprint", "nonce", "total")
    values = cast("list[bytes | None]", client.hmget(run_key(record.run, "meta"), names))
    meta = {name: (value or b"").decode("utf-8", "replace") for name, value in zip(names, values, strict=True)}
    return None if meta["state"] in OVER else meta


def _files(model: ModelConfig) -> Check:
    specs = [member.spec for member in model.members] or [model.spec]
    found = child(*PROBE, "files", *specs, timeout_s=LOOKUP_S)
    if "error" in found:
        return _failed("model", found, "embq doctor --model SPEC loads it")
    return Check("model", "ok", printable(f"{model.spec}: {'; '.join(found['where'])}"))


def _model(record: RunRecord, meta: dict[str, str], device: str, cuda_visible: str | None) -> Check:
    in_torch, environment = alone(device, cuda_visible)
    found = child(*PROBE, "run_model", record.to_json(), in_torch, timeout_s=MODEL_TIMEOUT_S, **environment)
    if "error" in found:
        return _failed("model", found, "check the files of the model")
    if meta["fingerprint"] and found["fingerprint"] != meta["fingerprint"]:
        detail = f"{record.model.spec} is another model here than the one that run {record.run} was begun with"
        fix = "install the files of the model and the versions of the libraries that the other workers have"
        return Check("model", "fail", printable(detail), fix)
    same = ", the one that the run was begun with" if meta["fingerprint"] else ""
    return Check("model", "ok", printable(f"{record.model.spec} embeds a sample on {device}{same}"))


def _input(client: redis.Redis, record: RunRecord, meta: dict[str, str]) -> list[Check]:
    unit = _a_unit(client, record)
    if unit is None:
        detail = f"run {record.run}: no unit of it can be seen from here now, so no input was tried"
        return [Check("input", "ok" if meta["state"] else "warn", detail)]
    found = child(*PROBE, "sample", json.dumps(unit.describe()), timeout_s=INPUT_S)
    if "error" in found:
        fix = "mount it under the same path as where the run was planned, or give this machine credentials for it"
        return [_failed("input", found, fix)]
    return [Check("input", "ok", printable(f"run {record.run}: {unit.source} is read, as it was planned"))]


def _a_unit(client: redis.Redis, record: RunRecord) -> Unit | None:
    """Any unit of a run: from its queue, or from its manifest where that is readable here."""
    hint = peek(hint_queue(client, record.model.queue_key), record.run, MOST_HINTS)
    if hint is not None:
        return hint.unit
    try:
        manifest = Manifest(Layout(place(record.output)))
        return manifest.unit(0) if len(manifest) else None
    except (EmbqError, OSError):
        return None


def _output(record: RunRecord, meta: dict[str, str]) -> Check:
    # Imports numpy and pyarrow.
    from embq.worker.stages.publish import shares_storage

    output = f"run {record.run}: {record.output}"
    if shares_storage(Layout(place(record.output)).staged_parts, meta["nonce"]):
        return Check("output", "ok", printable(f"{output} is shared with the writer: large results are left there"))
    return Check(
        "output", "ok", printable(f"{output} is not shared with the writer: all results travel through the broker")
    )


def _failed(name: str, found: dict[str, Any], fix: str) -> Check:
    return Check(name, "fail", printable(str(found["error"])), printable(str(found["fix"] or fix)))
