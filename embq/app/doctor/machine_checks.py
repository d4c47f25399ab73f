"""Checks of `embq doctor`: packages, broker, devices, models, storage and limits of this machine.

Nothing heavy is imported here: torch and models are tried in processes of their own.
"""

from __future__ import annotations

import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import embq
from embq.app.doctor.broker_checks import broker
from embq.app.doctor.check import Check, guarded
from embq.app.doctor.fleet_checks import fleet
from embq.app.doctor.probes import devices, models
from embq.core.broker.client import connect
from embq.core.errors import UsageError
from embq.core.process.libraries import version_of
from embq.core.process.limits import container_bytes, cores, machine_bytes
from embq.core.service.progress_line import size_text
from embq.core.settings import Settings
from embq.core.storage.durable import output_error, publish, write_new
from embq.core.storage.objects import ObjectPath, probe
from embq.core.storage.paths import is_url, place, refuse_unnameable

BROKEN_TORCH = "2.13.0"
"""The release that pyproject.toml excludes."""
FREE_LOW_BYTES = 10 * 1024**3
"""About ten parts of a million rows of 512 float16."""
SHM_LOW_BYTES = 64 * 1024**2
"""Docker's default. embq needs none; NCCL and data loaders of other programs do."""
FILES_LOW = 1024
"""File descriptors of a process with many shards, connections and logs."""


def check_machine(settings: Settings, *, output: str = "", model_specs: Sequence[str] = ()) -> Iterator[Check]:
    """All checks, in the order in which a run needs them.

    Args:
        settings: with the broker; without one the embedded server is checked.
        output: folder whose storage is checked; "" for the folder of temporary files.
        model_specs: models to load, one after the other, each with one sample.
    """
    yield from packages()
    yield from _broker_and_fleet(settings)
    yield from devices(settings.cuda_visible)
    yield from models(*model_specs)
    yield from storage(output)
    yield from machine()


def _broker_and_fleet(settings: Settings) -> Iterator[Check]:
    """The broker, and the services that report to a configured one."""
    rows = list(broker(settings))
    yield from rows
    if settings.broker_url and not any(row.name == "broker" and row.state == "fail" for row in rows):
        with connect(settings.broker_url, password=settings.broker_password) as client:
            yield from guarded("services", lambda: list(fleet(client, embq.__version__)))


def packages() -> Iterator[Check]:
    """Python, the packages that every role needs, and a release of torch that is known to be broken."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    found = {name: version_of(name) for name in ("embq", "click", "pyarrow", "redis", "rq", "numpy", "torch")}
    missing = [name for name in ("click", "pyarrow", "redis", "rq") if not found[name]]
    detail = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    if missing:
        yield Check("packages", "fail", f"missing: {', '.join(missing)}", "pip install embq")
    elif found["torch"].partition("+")[0] == BROKEN_TORCH:
        yield Check("packages", "fail", f"torch {BROKEN_TORCH} is broken", "pip install 'torch!=2.13.0'")
    elif not found["numpy"]:
        yield Check("packages", "warn", f"{detail}; no numpy, so no worker and no writer", "pip install 'embq[writer]'")
    else:
        yield Check("packages", "ok", detail)


def storage(output: str) -> Iterator[Check]:
    """The file operations of a commit, in `output` or the nearest existing folder above it."""
    if is_url(output):
        yield from guarded("storage", lambda: _examine_store(output))
        return
    asked = Path(output or tempfile.gettempdir()).absolute()
    try:
        refuse_unnameable(str(asked))
    except UsageError as error:
        yield Check("storage", "fail", error.message, error.next_step)
        return
    place = next(path for path in (asked, *asked.parents) if path.exists())
    fix = "give write permission, or put --output on a disk with hard links and rename"
    try:
        with tempfile.TemporaryDirectory(prefix=".embq-doctor-", dir=place) as folder:
            took_ms, wrong = _commit_like(Path(folder))
    except OSError as error:
        yield Check("storage", "fail", f"{place}: {error.strerror or error}", fix)
        return
    if wrong:
        yield Check("storage", "fail", f"{place} {wrong}", fix)
        return
    free = shutil.disk_usage(place).free
    detail = f"{place}: a durable write takes {took_ms:.1f} ms, {size_text(free)} free"
    if free < FREE_LOW_BYTES:
        yield Check("storage", "warn", detail, "make room, or put --output on a larger disk")
    else:
        yield Check("storage", "ok", detail)


def _examine_store(url: str) -> list[Check]:
    """An object store: writing, and conditional creation."""
    root = place(url)
    assert isinstance(root, ObjectPath)
    began = time.monotonic()
    try:
        probe(root / "_writer")
    except OSError as error:
        raise output_error(error, root) from error
    took_ms = (time.monotonic() - began) * 1000
    return [Check("storage", "ok", f"{root}: creates a name only once; finding that out took {took_ms:.0f} ms")]


def _commit_like(folder: Path) -> tuple[float, str]:
    """(milliseconds of one durable write, what fails or "")."""
    began = time.monotonic()
    write_new(folder / "record", b"x" * 4096, temporary=folder / "temporary")
    took_ms = (time.monotonic() - began) * 1000
    try:
        write_new(folder / "record", b"y", temporary=folder / "temporary")
        return took_ms, "lets a name be created twice"
    except FileExistsError:
        pass
    (folder / "temporary").write_bytes(b"x")
    publish(folder / "temporary", folder / "part")
    kept = (folder / "record").read_bytes() == b"x" * 4096 and (folder / "part").read_bytes() == b"x"
    return took_ms, "" if kept else "does not keep what is written"


def machine() -> Iterator[Check]:
    """Cores, memory, shared memory and the limit of open files."""
    memory, limit = machine_bytes(), container_bytes()
    bound = f", of which this container may use {size_text(limit)}" if limit else ""
    yield Check("machine", "ok", f"{cores()} CPU cores, {size_text(memory)} memory{bound}")
    shm = Path("/dev/shm")
    if shm.is_dir():
        size = shutil.disk_usage(shm).total
        low = size < SHM_LOW_BYTES
        fix = "start the container with --shm-size=1g" if low else ""
        yield Check("shm", "warn" if low else "ok", f"/dev/shm has {size_text(size)}", fix)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < FILES_LOW
    fix = f"ulimit -n {min(65536, hard) if hard > 0 else 65536}" if few else ""
    yield Check("open files", "warn" if few else "ok", f"at most {soft:,}" if soft >= 0 else "unlimited", fix)
