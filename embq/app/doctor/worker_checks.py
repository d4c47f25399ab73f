"""Checks of `embq worker --check`: whether this machine can work for a broker and its runs."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import redis

import embq
from embq.app.cli.authorization import require
from embq.app.doctor import probes
from embq.app.doctor.broker_checks import broker
from embq.app.doctor.check import Check, guarded
from embq.app.doctor.fleet_checks import fleet, libraries
from embq.app.doctor.run_checks import runs
from embq.core.broker.client import connect, user_of
from embq.core.errors import EmbqError
from embq.core.settings import Settings, model_cache
from embq.worker.embedders.device.hardware import simulated_speed
from embq.worker.supervisor.devices import find_devices, why_no_gpu
from embq.worker.supervisor.machine import room

CACHE_LOW_BYTES = 10 * 1024**3
"""A large model takes some gigabytes."""
SCRATCH_LOW_BYTES = 1024**3
"""Compilers and libraries write some hundred megabytes."""


def check_worker(settings: Settings, wanted: str, *, load: bool) -> Iterator[Check]:
    """All checks, in the order in which a worker needs them.

    Args:
        settings: with the broker.
        wanted: as `--devices`.
        load: load the model of each run.
    """
    checked = list(broker(settings))
    yield from checked
    first, rows = _devices(settings, wanted)
    yield from rows
    yield _folder("cache", model_cache(), CACHE_LOW_BYTES, "models are kept there: set HF_HOME to a folder")
    yield _folder("scratch", Path(tempfile.gettempdir()), SCRATCH_LOW_BYTES, "set TMPDIR to a folder")
    if any(check.name == "broker" and check.state == "fail" for check in checked):
        return
    with connect(settings.broker_url, password=settings.broker_password) as client:
        yield from guarded("rights", lambda: [_rights(client)])
        yield from guarded("services", lambda: list(fleet(client, embq.__version__)))
        yield from guarded("libraries", lambda: list(libraries(client)))
        yield from runs(client, first, settings.cuda_visible, load=load)


def _rights(client: redis.Redis) -> Check:
    """Permissions of the broker's user; nothing is executed."""
    require(client, "worker")
    return Check("rights", "ok", f"the user {user_of(client) or 'default'} may do what a worker does")


def _devices(settings: Settings, wanted: str) -> tuple[str, list[Check]]:
    """(first device of a worker, rows on all devices)."""
    try:
        names = find_devices(wanted, settings.cuda_visible)
    except EmbqError as error:
        return "cpu", [Check("devices", "fail", error.message, error.next_step)]
    if all(simulated_speed(name) for name in names):
        return names[0], [Check("devices", "ok", f"{', '.join(names)}: simulated, for stub models")]
    if importlib.util.find_spec("torch") is None:
        return names[0], [Check("devices", "fail", "torch is not installed", "pip install 'embq[worker]'")]
    rows = [row for row in probes.devices(settings.cuda_visible) if row.name == "devices" or row.name in names]
    if wanted == "auto" and names == ("cpu",):
        why, mend = why_no_gpu(settings.cuda_visible)
        rows = [replace(row, state="warn", detail=f"{row.detail}: {why}", fix=mend) for row in rows]
    return names[0], rows


def _folder(name: str, folder: Path, low_bytes: int, fix: str) -> Check:
    """Free space and writability of a folder, which need not exist yet."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x" * 4096)
    except OSError as error:
        return Check(name, "fail", f"{folder} cannot be written: {error.strerror}", f"{fix} that can be written")
    free = room(folder)
    detail = f"{folder}: {free / 1024**3:,.0f} GiB free"
    return (
        Check(name, "warn", detail, f"make room; {fix} on a larger disk")
        if free < low_bytes
        else Check(name, "ok", detail)
    )
