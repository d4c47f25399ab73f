"""Takes uploads: runs, and inputs sent by value, from laptops that cannot reach the output folder."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import redis

from core import uploads
from core.durable import drop, file_sha256, fsync_file, fsync_folder, output_error
from core.errors import InputError, OutputError
from core.layout import Layout, load_run, refuse_foreign_files
from core.log import Events
from core.registry import RunRecord, register
from core.uploads import PIECE_BYTES, Pieces, Upload, UploadFile

RETRY_S = 10.0
"""An upload whose folder cannot be written is tried again after this long."""

BATCH_PIECES = 16
"""Taken at once: results of other runs wait meanwhile."""


@dataclass(slots=True)
class _Arrival:
    """One upload on its way into its folder.

    Attributes:
        taken: pieces that are durable here; -1 until that was looked at.
    """

    upload: Upload
    record: RunRecord
    layout: Layout
    folder: Path
    pieces: Pieces
    taken: int = -1

    @classmethod
    def of(cls, name: str, upload: Upload) -> _Arrival:
        """The upload that was announced as `name`; InputError where it is none."""
        record = RunRecord.from_json(upload.record)
        if record is None or (record.run, record.output) != (upload.run, upload.output):
            raise InputError("the run that was uploaded is not the one that was announced", code="bad_upload")
        layout = Layout(Path(upload.output))
        if not layout.root.is_absolute():
            raise InputError(f"{upload.output} is not an absolute path", code="bad_upload")
        return cls(upload, record, layout, layout.temporary / f"upload-{name}", Pieces(upload.files))


class Receiver:
    """Makes what was uploaded durable, piece by piece, and announces the runs that are complete."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.log = Events("writer")
        self._known: dict[str, _Arrival | None] = {}
        self._retry_at: dict[str, float] = {}

    def step(self) -> int:
        """Take what has come; gives the number of pieces and ends."""
        names = uploads.names(self.client)
        self._known = {name: arrival for name, arrival in self._known.items() if name in names}
        moved = 0
        for name in names:
            if self._retry_at.get(name, 0.0) > time.monotonic():
                continue
            try:
                if name not in self._known:
                    upload = Upload.from_json(uploads.announced(self.client, name))
                    self._known[name] = None if upload is None else _Arrival.of(name, upload)
                arrival = self._known[name]
                moved += 0 if arrival is None else self._attend(name, arrival)
            except (OutputError, OSError) as error:
                self._wait(name, error)
            except InputError as error:
                self._refuse(name, error.code, error.message)
            except (ValueError, KeyError, TypeError) as error:
                self._refuse(name, "bad_upload", f"this is no upload: {type(error).__name__}: {error}")
        return moved

    def _attend(self, name: str, arrival: _Arrival) -> int:
        layout, upload = arrival.layout, arrival.upload
        if layout.run_json.exists():
            there = load_run(layout.root)
            if there.run != upload.run:
                raise InputError(f"{upload.output} holds another run, {there.run}", code="other_run")
            return self._accept(name, arrival)
        said = uploads.state(self.client, name)["taken"]
        if arrival.taken != said:
            refuse_foreign_files(layout)
            layout.make()
            arrival.folder.mkdir(exist_ok=True)
            arrival.taken = _durable(arrival, said)
        before = arrival.taken
        count = self._take(name, arrival)
        if count or before < said:
            uploads.say_taken(self.client, name, arrival.taken)
        if arrival.taken == arrival.pieces.count:
            _complete(arrival)
            return count + self._accept(name, arrival)
        return count

    def _take(self, name: str, arrival: _Arrival) -> int:
        """Write the next pieces that have come, durably; gives their number."""
        touched: set[Path] = set()
        taken = arrival.taken
        while taken < min(arrival.pieces.count, arrival.taken + BATCH_PIECES):
            data = uploads.piece(self.client, name, taken)
            if data is None:
                break
            index, offset = arrival.pieces.place(taken)
            path = arrival.folder / str(index)
            with open(path, "r+b" if path.exists() else "wb") as file:
                file.seek(offset)
                file.write(data)
            touched.add(path)
            taken += 1
        for path in touched:
            fsync_file(path)
        if touched:
            fsync_folder(arrival.folder)
        count, arrival.taken = taken - arrival.taken, taken
        return count

    def _accept(self, name: str, arrival: _Arrival) -> int:
        register(self.client, arrival.record)
        uploads.say_end(self.client, name, "accepted")
        _remove(arrival.folder)
        upload = arrival.upload
        self.log.info("upload_accepted", run=upload.run, output=upload.output, files=len(upload.files))
        return 1

    def _wait(self, name: str, error: OutputError | OSError) -> None:
        """The folder cannot be written now; what has arrived stays."""
        if isinstance(error, OSError):
            error = output_error(error, Path(error.filename or "the output folder"))
        self._retry_at[name] = time.monotonic() + RETRY_S
        uploads.say_why(self.client, name, error.message)
        self.log.error("upload_waits", upload=name, why=error.message, next=error.next_step, retry_s=RETRY_S)

    def _refuse(self, name: str, code: str, why: str) -> None:
        uploads.say_end(self.client, name, "refused", code=code, why=why)
        self.log.error("upload_refused", upload=name, code=code, why=why)


def _complete(arrival: _Arrival) -> None:
    """Check each file and give it its name; run.json comes last, and with it the run is real."""
    layout, files = arrival.layout, arrival.upload.files
    for index, file in enumerate(files):
        path = _arrived(arrival, index)
        if not file.bytes:
            path.touch()
        if path.stat().st_size != file.bytes or file_sha256(path) != file.sha256:
            raise InputError(f"{file.path} did not arrive as it was sent", code="bad_upload")
    with open(layout.writer / "plan.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not layout.run_json.exists():
            for index, file in enumerate(files):
                _place(_arrived(arrival, index), file, layout.root)


def _arrived(arrival: _Arrival, index: int) -> Path:
    """Where a file stands: still under its number, or under its name where a writer died in between."""
    path, target = arrival.folder / str(index), arrival.layout.root / arrival.upload.files[index].path
    return path if path.exists() or not target.exists() else target


def _durable(arrival: _Arrival, said: int) -> int:
    """How many pieces there really are, of `said`: the folder may have lost some."""
    for index, (file, start) in enumerate(zip(arrival.upload.files, arrival.pieces.starts, strict=True)):
        needed = min(file.bytes, max(0, said - start) * PIECE_BYTES)
        path = _arrived(arrival, index)
        if needed and (not path.exists() or path.stat().st_size < needed):
            return start
    return said


def _place(path: Path, file: UploadFile, root: Path) -> None:
    """Give an arrived file its name, durably, folders included."""
    target = root / file.path
    made = [folder for folder in [target.parent, *target.parent.parents] if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.mtime_ns:
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
    if path != target:
        os.rename(path, target)
    fsync_folder(target.parent)
    for folder in made:
        fsync_folder(folder.parent)


def _remove(folder: Path) -> None:
    with suppress(OSError):
        for path in folder.iterdir():
            drop(path)
        folder.rmdir()
