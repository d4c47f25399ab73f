"""Execution of a unit, which any process may repeat any number of times and which counts once.

A unit's payload is written under a temporary name, made durable and renamed; then its sidecar is created, which names
the payload. The sidecar is the commit: the first one stands, and a later attempt drops its own payload.
"""

from __future__ import annotations

import os
import platform
import resource
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embq.core.errors import OutputError
from embq.core.storage.beneath import below
from embq.core.storage.durable import drop, file_sha256
from embq.index.index_files.files import FILES, WORK, File, T, disk_error, from_json, to_json
from embq.index.index_files.lists import ListsBytes
from embq.index.stages.units import IndexUnit, Sidecar, find, read_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """Payloads and statistics that a stage function returns.

    Attributes:
        index_files: role -> finished temporary file of the index itself; its suffix is kept.
        work: the same for what only later stages need.
    """

    index_files: Mapping[str, Path] = field(default_factory=dict)
    work: Mapping[str, Path] = field(default_factory=dict)
    stats: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A unit at work: what its stage function may use.

    Attributes:
        spec: content of build.json.
        inputs: stage -> sidecars of its units, in order.
        threads: that it may use.
        memory_bytes: that the process may take.
        on_gpu: whether it may use the GPU that this process sees.
    """

    unit: IndexUnit
    spec: Mapping[str, Any]
    inputs: Mapping[str, Sequence[Sidecar]]
    threads: int
    memory_bytes: int
    on_gpu: bool = False

    @property
    def index(self) -> Path:
        """Folder of this machine with the files of the index, as far as `file` and `fetch` were asked for them."""
        return self.unit.build_dir.local

    def temporary(self, suffix: str) -> Path:
        """A path for an unfinished file."""
        return self.unit.build_dir.temporary(f"{self.unit.stage}-{self.unit.number:06d}.{suffix}")

    def spec_as(self, form: type[T]) -> T:
        """`spec` as the record of a build or a change; OutputError if it is none."""
        return from_json(form, self.spec, "build.json")

    def file(self, stage: str, number: int, role: str) -> Path:
        """A payload of an earlier stage, fetched if it is in a bucket; OutputError if it is gone."""
        return self.unit.build_dir.file(self.inputs[stage][number].files[role])

    def fetch(self, files: Iterable[File]) -> None:
        """Have these payloads in `index`; OutputError if one is gone, or there is no room for them."""
        for file in files:
            self.unit.build_dir.file(file)

    @contextmanager
    def lists(self, stage: str, number: int, count: int, span: range) -> Iterator[tuple[Path, range]]:
        """A file with lists of an earlier stage, and the numbers of those in it; it may be gone after the block.

        Args:
            count: lists of the payload.
            span: numbers of the lists that are needed; of a bucket no others are read.
        """
        build_dir, file = self.unit.build_dir, self.inputs[stage][number].files["lists"]
        copy = below(build_dir.local, file.path)
        if isinstance(build_dir.index, Path) or copy.exists():
            yield build_dir.file(file), range(count)
            return
        part = self.temporary("part.lists")
        try:
            with ListsBytes(below(build_dir.index, file.path), count) as lists:
                lists.write_part(span, part)
            yield part, span
        finally:
            drop(part)


StageFunction = Callable[[Task], StageResult]


def perform(
    unit: IndexUnit, stage: StageFunction, *, threads: int, memory_bytes: int, worker: str, on_gpu: bool = False
) -> Sidecar:
    """Do a unit, unless it is done; returns its sidecar, which may be that of another attempt.

    Raises the EmbqError of a unit that cannot be done.
    """
    if (done := find(unit)) is not None:
        return done
    build_dir = unit.build_dir
    with build_dir.in_use():
        task = Task(
            unit=unit,
            spec=build_dir.read_spec(),
            inputs=read_inputs(build_dir, unit.inputs),
            threads=threads,
            memory_bytes=memory_bytes,
            on_gpu=on_gpu,
        )
        return _commit(task, stage, worker)


def _commit(task: Task, stage: StageFunction, worker: str) -> Sidecar:
    unit, build_dir = task.unit, task.unit.build_dir
    _forget_peak()
    began, cpu = time.monotonic(), time.process_time()
    try:
        result = stage(task)
        sidecar = Sidecar(
            digest=unit.digest,
            files={
                **{role: _keep(unit, path, FILES) for role, path in result.index_files.items()},
                **{role: _keep(unit, path, f"{WORK}/{unit.build}") for role, path in result.work.items()},
            },
            stats=result.stats,
            seconds=round(time.monotonic() - began, 3),
            cpu_seconds=round(time.process_time() - cpu, 3),
            peak_rss_bytes=_peak(),
            versions=versions(),
            worker=worker,
        )
        if unit.sidecar.exists() and find(unit) is None:
            drop(unit.sidecar)  # its payload is gone or damaged: it commits nothing any more
        if build_dir.write_once(unit.sidecar, to_json(sidecar)):
            return sidecar
    except OSError as error:
        raise disk_error(error, build_dir.folder) from error
    # Another attempt was first: its payload stands, ours is litter.
    for file in sidecar.files.values():
        drop(below(build_dir.index, file.path))
    theirs = find(unit)
    if theirs is None:
        raise OutputError(f"{unit.sidecar} names files that are not there", code="index_damaged")
    return theirs


def versions() -> dict[str, str]:
    """Versions of libraries and the host, which results may depend on."""
    import numpy as np

    from embq.index.faiss_module import faiss

    return {
        "faiss": str(faiss().__version__),
        "numpy": str(np.__version__),
        "python": platform.python_version(),
        "host": socket.gethostname(),
    }


def _keep(unit: IndexUnit, temporary: Path, folder: str) -> File:
    suffix = temporary.name.split(".", 1)[1]
    name = f"{unit.stage}-{unit.number:06d}-{unit.digest[:12]}-{secrets.token_hex(3)}.{suffix}"
    file = File(path=f"{folder}/{name}", bytes=temporary.stat().st_size, sha256=file_sha256(temporary))
    unit.build_dir.publish(temporary, file)
    return file


def _forget_peak() -> None:
    """Start the kernel's high-water mark of this process anew (proc(5), clear_refs)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _peak() -> int:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if os.uname().sysname == "Darwin" else 1024)
