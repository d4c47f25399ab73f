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
from embq.core.plugins import missing_packages
from embq.core.process.libraries import version_of
from embq.core.process.limits import container_bytes, cores, machine_bytes
from embq.core.service.progress_line import size_text
from embq.core.settings import Settings, unknown_settings
from embq.core.storage.durable import publish, write_new, writing
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
    yield from unknown_names()
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
            yield from guarded("services", fleet(client, embq.__version__))


def packages() -> Iterator[Check]:
    """Python, the packages that every role needs, and a release of torch that is known to be broken."""
    yield Check.passed("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    versions = {name: version_of(name) for name in ("embq", "click", "pyarrow", "redis", "rq", "numpy", "torch")}
    missing = [name for name in ("click", "pyarrow", "redis", "rq") if not versions[name]]
    detail = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing:
        yield Check("packages", "fail", f"missing: {', '.join(missing)}", "pip install embq")
    elif versions["torch"].partition("+")[0] == BROKEN_TORCH:
        yield Check("packages", "fail", f"torch {BROKEN_TORCH} is broken", "pip install 'torch!=2.13.0'")
    elif not versions["numpy"]:
        detail += "; no numpy, so no worker and no writer"
        yield Check.passed("packages", detail, "pip install 'embq[writer]'")
    else:
        yield Check.passed("packages", detail)


def unknown_names() -> Iterator[Check]:
    """EMBQ_* variables that are no settings, and plug-ins that are not installed; nothing if there are none."""
    for name, meant in unknown_settings().items():
        yield Check("settings", "warn", f"{name} is not a setting", f"unset it{f'; or set {meant}' if meant else ''}")
    for package in missing_packages():
        why = f"EMBQ_PLUGINS names {package}, which is not installed here or has no plug-in of embq"
        yield Check("settings", "warn", why, f"install {package} here, or leave it out of EMBQ_PLUGINS")


def storage(output: str) -> Iterator[Check]:
    """The file operations of a commit, in `output` or the nearest existing folder above it."""
    yield from guarded("storage", _examine_store(output) if is_url(output) else _examine_folder(output))


def _examine_folder(output: str) -> Iterator[Check]:
    folder = Path(output or tempfile.gettempdir()).absolute()
    refuse_unnameable(str(folder))
    folder = next(path for path in (folder, *folder.parents) if path.exists())
    problem = ""
    try:
        with tempfile.TemporaryDirectory(prefix=".embq-doctor-", dir=folder) as inside:
            took_ms, problem = _commit_like(Path(inside))
    except OSError as error:
        problem = f": {error.strerror or error}"
    if problem:
        fix = "give write permission, or put --output on a disk with hard links and rename"
        yield Check("storage", "fail", f"{folder}{problem}", fix)
        return
    free = shutil.disk_usage(folder).free
    detail = f"{folder}: a durable write takes {took_ms:.1f} ms, {size_text(free)} free"
    fix = "make room, or put --output on a larger disk" if free < FREE_LOW_BYTES else ""
    yield Check.passed("storage", detail, fix)


def _examine_store(url: str) -> Iterator[Check]:
    """An object store: writing, and conditional creation."""
    root = place(url)
    assert isinstance(root, ObjectPath)
    began = time.monotonic()
    with writing(root):
        probe(root / "_writer")
    took_ms = (time.monotonic() - began) * 1000
    yield Check.passed("storage", f"{root}: creates a name only once; finding that out took {took_ms:.0f} ms")


def _commit_like(folder: Path) -> tuple[float, str]:
    """(milliseconds of one durable write, what fails or "")."""
    began = time.monotonic()
    write_new(folder / "record", b"x" * 4096, temporary=folder / "temporary")
    took_ms = (time.monotonic() - began) * 1000
    try:
        write_new(folder / "record", b"y", temporary=folder / "temporary")
        return took_ms, " lets a name be created twice"
    except FileExistsError:
        pass
    (folder / "temporary").write_bytes(b"x")
    publish(folder / "temporary", folder / "part")
    intact = (folder / "record").read_bytes() == b"x" * 4096 and (folder / "part").read_bytes() == b"x"
    return took_ms, "" if intact else " does not keep what is written"


def machine() -> Iterator[Check]:
    """Cores, memory, shared memory and the limit of open files."""
    memory, limit = machine_bytes(), container_bytes()
    bound = f", of which this container may use {size_text(limit)}" if limit else ""
    yield Check.passed("machine", f"{cores()} CPU cores, {size_text(memory)} memory{bound}")
    shm = Path("/dev/shm")
    if shm.is_dir():
        size = shutil.disk_usage(shm).total
        fix = "start the container with --shm-size=1g" if size < SHM_LOW_BYTES else ""
        yield Check.passed("shm", f"/dev/shm has {size_text(size)}", fix)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = f"ulimit -n {min(65536, hard) if hard > 0 else 65536}" if 0 <= soft < FILES_LOW else ""
    yield Check.passed("open files", f"at most {soft:,}" if soft >= 0 else "unlimited", fix)
