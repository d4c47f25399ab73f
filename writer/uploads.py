"""Takes uploads: runs, and inputs sent by value, from laptops that cannot reach the output folder."""

from __future__ import annotations

import fcntl
import os
import time
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path

import redis

from core import uploads
from core.durable import drop, file_sha256, fsync_file, fsync_folder, output_error
from core.errors import InputError, OutputError
from core.layout import Layout, load_run
from core.log import Events
from core.registry import RunRecord, register
from core.uploads import PIECE_BYTES, Upload, UploadFile

RETRY_S = 10.0
"""An upload whose folder cannot be written is tried again after this long."""

BATCH_PIECES = 16
"""Taken at once: results of other runs wait meanwhile."""


class Receiver:
    """Makes what was uploaded durable, piece by piece, and announces the runs that are complete."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.log = Events("writer")
        self._known: dict[str, Upload | None] = {}
        self._retry_at: dict[str, float] = {}

    def step(self) -> int:
        """Take what has come; gives the number of pieces and ends."""
        announced = uploads.announced(self.client)
        self._known = {name: upload for name, upload in self._known.items() if name in announced}
        moved = 0
        for name, text in announced.items():
            if self._retry_at.get(name, 0.0) > time.monotonic():
                continue
            try:
                if name not in self._known:
                    self._known[name] = Upload.from_json(text)
                upload = self._known[name]
                moved += 0 if upload is None else self._attend(name, upload)
            except (OutputError, OSError) as error:
                self._wait(name, error)
            except InputError as error:
                self._refuse(name, error.code, error.message)
            except (ValueError, KeyError, TypeError) as error:
                self._refuse(name, "bad_upload", f"this is no upload: {type(error).__name__}: {error}")
        return moved

    def _attend(self, name: str, upload: Upload) -> int:
        layout = Layout(Path(upload.output))
        if not layout.root.is_absolute():
            raise InputError(f"{upload.output} is not an absolute path", code="bad_upload")
        layout.make()
        arriving = layout.temporary / f"upload-{name}"
        arriving.mkdir(exist_ok=True)
        if layout.run_json.exists():
            there = load_run(layout.root)
            if there.run != upload.run:
                raise InputError(
                    f"{upload.output} holds another run, {there.run}", code="other_run", next_step="choose another -o"
                )
            return self._accept(name, upload, arriving)
        said = uploads.state(self.client, name)["taken"]
        taken = _durable(upload, layout.root, arriving, said)
        count = 0
        starts = _starts(upload)
        while taken < upload.pieces and count < BATCH_PIECES:
            data = uploads.piece(self.client, name, taken)
            if data is None:
                break
            index = bisect_right(starts, taken) - 1
            with open(arriving / str(index), "r+b" if (arriving / str(index)).exists() else "wb") as file:
                file.seek((taken - starts[index]) * PIECE_BYTES)
                file.write(data)
            taken, count = taken + 1, count + 1
        if count or taken < said:
            for path in arriving.iterdir():
                fsync_file(path)
            fsync_folder(arriving)
            uploads.say_taken(self.client, name, taken)
        if taken == upload.pieces:
            self._complete(upload, layout, arriving)
            return count + self._accept(name, upload, arriving)
        return count

    def _complete(self, upload: Upload, layout: Layout, arriving: Path) -> None:
        """Check each file and give it its name; run.json comes last, and with it the run is real."""
        for index, file in enumerate(upload.files):
            path = _arrived(layout.root, arriving, index, file)
            if not file.bytes:
                path.touch()
            if path.stat().st_size != file.bytes or file_sha256(path) != file.sha256:
                raise InputError(f"{file.path} did not arrive as it was sent", code="bad_upload")
        with open(layout.writer / "plan.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if layout.run_json.exists():
                return
            for index, file in enumerate(upload.files):
                _place(_arrived(layout.root, arriving, index, file), file, layout.root)

    def _accept(self, name: str, upload: Upload, arriving: Path) -> int:
        record = RunRecord.from_json(upload.record)
        if record is None or (record.run, record.output) != (upload.run, upload.output):
            raise InputError("the run that was uploaded is not the one that was announced", code="bad_upload")
        register(self.client, record)
        uploads.say_end(self.client, name, "accepted")
        _remove(arriving)
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


def _starts(upload: Upload) -> list[int]:
    """The number of the first piece of each file."""
    starts, start = [], 0
    for file in upload.files:
        starts.append(start)
        start += file.pieces
    return starts


def _arrived(root: Path, arriving: Path, index: int, file: UploadFile) -> Path:
    """Where a file stands: still under its number, or under its name where a writer died in between."""
    path = arriving / str(index)
    return path if path.exists() or not (root / file.path).exists() else root / file.path


def _durable(upload: Upload, root: Path, arriving: Path, taken: int) -> int:
    """How many pieces there really are, of those that were taken: the folder may have lost some."""
    for index, (file, start) in enumerate(zip(upload.files, _starts(upload), strict=True)):
        needed = min(file.bytes, max(0, taken - start) * PIECE_BYTES)
        path = _arrived(root, arriving, index, file)
        if needed and (not path.exists() or path.stat().st_size < needed):
            return start
    return taken


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
