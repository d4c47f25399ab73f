"""Checks of `embq worker --check`: whether this machine can work for a broker and its runs."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import redis
from redis.exceptions import RedisError

import embq
from embq.app.cli.authorization import require
from embq.app.doctor import probes
from embq.app.doctor.broker_checks import broker
from embq.app.doctor.check import Check, guarded
from embq.app.doctor.fleet_checks import fleet, libraries
from embq.app.doctor.probes import MODEL_TIMEOUT_S, PROBE, child
from embq.core.broker.client import connect, user_of
from embq.core.errors import EmbqError
from embq.core.models import ModelConfig
from embq.core.queue.hints import hint_queue, peek
from embq.core.queue.keys import run_key
from embq.core.queue.runs import RunRecord, registered
from embq.core.run.control import RunState
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.service.progress_line import size_text
from embq.core.settings import Settings, model_cache
from embq.core.storage.paths import place
from embq.core.units import Unit
from embq.worker.embedders.device.hardware import simulated_speed
from embq.worker.supervisor.devices import find_devices, isolated_device, why_no_gpu
from embq.worker.supervisor.machine import room

MOST_RUNS = 20
"""Most runs that are checked; each takes seconds."""
MOST_HINTS = 200
INPUT_S, LOOKUP_S = 60.0, 60.0
CACHE_LOW_BYTES = 10 * 1024**3
"""A large model takes some gigabytes."""
SCRATCH_LOW_BYTES = 1024**3
"""Compilers and libraries write some hundred megabytes."""
MODEL_FIX = "check the files of the model"
INPUT_FIX = "mount it under the same path as where the run was planned, or give this machine credentials for it"


def check_worker(settings: Settings, devices: str, *, load: bool) -> Iterator[Check]:
    """All checks, in the order in which a worker needs them.

    Args:
        settings: with the broker.
        devices: as `--devices`.
        load: load the model of each run.
    """
    checked = list(broker(settings))
    yield from checked
    first, rows = _devices(settings, devices)
    yield from rows
    yield _folder("cache", model_cache(), CACHE_LOW_BYTES, "models are kept there: set HF_HOME to a folder")
    yield _folder("scratch", Path(tempfile.gettempdir()), SCRATCH_LOW_BYTES, "set TMPDIR to a folder")
    if any(check.name == "broker" and check.state == "fail" for check in checked):
        return
    with connect(settings.broker_url, password=settings.broker_password) as client:
        yield from guarded("rights", _rights(client))
        yield from guarded("services", fleet(client, embq.__version__))
        yield from guarded("libraries", libraries(client))
        yield from runs(client, first, settings.cuda_visible, load=load)


def _rights(client: redis.Redis) -> Iterator[Check]:
    """Permissions of the broker's user; nothing is executed."""
    require(client, "worker")
    yield Check.passed("rights", f"the user {user_of(client) or 'default'} may do what a worker does")


def _devices(settings: Settings, devices: str) -> tuple[str, list[Check]]:
    """(first device of a worker, rows on all devices)."""
    try:
        names = find_devices(devices, settings.cuda_visible)
    except EmbqError as error:
        return "cpu", [Check.of_error("devices", error)]
    if all(simulated_speed(name) for name in names):
        return names[0], [Check.passed("devices", f"{', '.join(names)}: simulated, for stub models")]
    if importlib.util.find_spec("torch") is None:
        return names[0], [Check("devices", "fail", "torch is not installed", "pip install 'embq[worker]'")]
    rows = [row for row in probes.devices(settings.cuda_visible) if row.name == "devices" or row.name in names]
    if devices == "auto" and names == ("cpu",):
        why, fix = why_no_gpu(settings.cuda_visible)
        rows = [Check.passed(row.name, f"{row.detail}: {why}", fix) for row in rows]
    return names[0], rows


def _folder(name: str, folder: Path, low_bytes: int, fix: str) -> Check:
    """Free space and writability of a folder, which need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return Check(name, "fail", f"{folder} cannot be written: {error.strerror}", f"{fix} that can be written")
    free = room(folder)
    caveat = f"make room; {fix} on a larger disk" if free < low_bytes else ""
    return Check.passed(name, f"{folder}: {size_text(free)} free", caveat)


def runs(client: redis.Redis, device: str, cuda_visible: str | None, *, load: bool) -> Iterator[Check]:
    """Model, an input and the output of each run that is not over.

    Args:
        device: on which models are loaded.
        cuda_visible: CUDA_VISIBLE_DEVICES, or None if it is not set.
        load: load each model, and compare its fingerprint with that of the run.
    """
    try:
        active = [(run, meta) for run in registered(client).values() if (meta := _meta(client, run)) is not None]
    except RedisError as error:
        yield Check("runs", "fail", f"the broker refuses to say what runs there are: {error}", "allow it to this user")
        return
    if not active:
        yield Check.passed("runs", "the broker knows no run that is not over, so no model and no input was tried")
    models: set[ModelConfig] = set()
    for record, meta in active[:MOST_RUNS]:
        if record.model not in models:
            models.add(record.model)
            checks = _model(record, meta, device, cuda_visible) if load else _files(record.model)
            yield from guarded("model", checks, MODEL_FIX if load else "embq doctor --model SPEC loads it")
        yield from guarded("input", _input(client, record, meta), INPUT_FIX)
        yield _output(record, meta)
    if len(active) > MOST_RUNS:
        yield Check.passed("runs", f"{len(active) - MOST_RUNS} more runs were not looked at")


def _meta(client: redis.Redis, record: RunRecord) -> dict[str, str] | None:
    """State, fingerprint and nonce of a run; None for one that is over."""
    names = ("state", "fingerprint", "nonce", "total")
    values = cast("list[bytes | None]", client.hmget(run_key(record.run, "meta"), names))
    meta = {name: (value or b"").decode("utf-8", "replace") for name, value in zip(names, values, strict=True)}
    return None if RunState.read(meta["state"]).ended else meta


def _files(model: ModelConfig) -> Iterator[Check]:
    specs = [member.spec for member in model.members] or [model.spec]
    answer = child(*PROBE, "files", *specs, timeout_s=LOOKUP_S)
    yield Check.passed("model", f"{model.spec}: {'; '.join(answer['where'])}")


def _model(record: RunRecord, meta: dict[str, str], device: str, cuda_visible: str | None) -> Iterator[Check]:
    in_torch, environment = isolated_device(device, cuda_visible)
    answer = child(*PROBE, "run_model", record.to_json(), in_torch, timeout_s=MODEL_TIMEOUT_S, **environment)
    if meta["fingerprint"] and answer["fingerprint"] != meta["fingerprint"]:
        detail = f"{record.model.spec} is another model here than the one that run {record.run} was begun with"
        fix = "install the files of the model and the versions of the libraries that the other workers have"
        yield Check("model", "fail", detail, fix)
        return
    same = ", the one that the run was begun with" if meta["fingerprint"] else ""
    yield Check.passed("model", f"{record.model.spec} embeds a sample on {device}{same}")


def _input(client: redis.Redis, record: RunRecord, meta: dict[str, str]) -> Iterator[Check]:
    unit = _a_unit(client, record)
    if unit is None:
        detail = f"run {record.run}: no unit of it can be seen from here now, so no input was tried"
        yield Check("input", "ok" if meta["state"] else "warn", detail)
        return
    child(*PROBE, "sample", json.dumps(unit.describe()), timeout_s=INPUT_S)
    yield Check.passed("input", f"run {record.run}: {unit.source} is read, as it was planned")


def _a_unit(client: redis.Redis, record: RunRecord) -> Unit | None:
    """Any unit of a run: from its queue, or from its manifest if that is readable here."""
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

    shared = shares_storage(Layout(place(record.output)).staged_parts, meta["nonce"])
    transport = (
        "is shared with the writer: large results are left there"
        if shared
        else "is not shared with the writer: all results travel through the broker"
    )
    return Check.passed("output", f"run {record.run}: {record.output} {transport}")
