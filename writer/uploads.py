"""Takes uploads: runs, and inputs sent by value, from laptops that cannot reach the output folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import redis

from core import uploads
from core.control import PRIORITY, Control, load_control, save_control
from core.durable import file_sha256, fsync_file, fsync_folder, output_error
from core.embedded import kept_off
from core.errors import InputError, OutputError
from core.layout import INPUTS, Layout, refuse_foreign_files
from core.ledger import Ledger
from core.log import Events
from core.outputs import ANYWHERE, Outputs
from core.registry import RunRecord, register
from core.run_info import load_run
from core.uploads import PIECE_BYTES, End, Grown, Pieces, Upload, UploadFile

RETRY_S = 10.0
"""An upload whose folder cannot be written is tried again after this long."""

BUSY_S = 1.0
"""One that waits for another plan to be made looks again after this long."""

BATCH_PIECES = 16
"""Taken at once: results of other runs wait meanwhile."""


@dataclass(slots=True)
class _Arrival:
    """One upload on its way into its folder.

    Attributes:
        root: the output folder.
        folder: what has arrived of it.
        taken: pieces that are durable here; -1 until that was looked at.
        there: indexes of the files that the output folder has already.
    """

    upload: Upload
    record: RunRecord
    layout: Layout
    root: Path
    folder: Path
    pieces: Pieces
    taken: int = -1
    there: frozenset[int] = frozenset()

    def skip(self, number: int) -> int:
        """The number of the next piece from `number` on of a file that is not there yet."""
        while number < self.pieces.count:
            index, _ = self.pieces.place(number)
            if index not in self.there:
                break
            number = self.pieces.starts[index] + self.upload.files[index].pieces
        return number

    @classmethod
    def of(cls, name: str, upload: Upload) -> _Arrival:
        """The upload that was announced as `name`; InputError where it is none."""
        record = RunRecord.from_json(upload.record)
        if record is None or (record.run, record.output) != (upload.run, upload.output):
            raise InputError("the run that was uploaded is not the one that was announced", code="bad_upload")
        root = Path(upload.output)
        layout = Layout(root)
        if not root.is_absolute():
            raise InputError(f"{upload.output} is not an absolute path", code="bad_upload")
        return cls(upload, record, layout, root, layout.temporary / f"upload-{name}", Pieces(upload.files))


Add = Callable[[Path, Path, Callable[[], None], Callable[[], None]], Grown]
"""Adds what the run in the first folder lacks of the one in the second; calls the third when it is about to, and the
fourth as it goes on. Only the producer knows how to compare plans, so whoever starts a writer brings it along."""


class Receiver:
    """Makes what was uploaded durable, piece by piece, and announces the runs that are complete.

    Args:
        add: adds to a run that is there.
        moved: called as steps get done.
        outputs: where uploads may go.
    """

    def __init__(self, client: redis.Redis, add: Add, moved: Callable[[], None], outputs: Outputs = ANYWHERE) -> None:
        self.client = client
        self._outputs = outputs
        self._add = add
        self._moved = moved
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
                    self._known[name] = self._arrival(name, upload)
                arrival = self._known[name]
                moved += 0 if arrival is None else self._attend(name, arrival)
            except (OutputError, OSError) as error:
                self._wait(name, error)
            except InputError as error:
                self._refuse(name, error.code, error.message)
            except (ValueError, KeyError, TypeError) as error:
                self._refuse(name, "bad_upload", f"this is no upload: {type(error).__name__}: {error}")
        return moved

    def _arrival(self, name: str, upload: Upload | None) -> _Arrival | None:
        """The upload that was announced under a name; None for one of another version."""
        if upload is None:
            return None
        self._outputs.check(upload.output)
        return _Arrival.of(name, upload)

    def _attend(self, name: str, arrival: _Arrival) -> int:
        layout = arrival.layout
        if layout.run_json.exists():
            there = load_run(layout.root)
            if there.run == arrival.upload.run:
                return self._accept(name, arrival, Grown(units=there.units, samples=0, added=0))
            record = arrival.record
            if (record.model, record.rows.identity()) != (there.model, there.rows.identity()):
                raise InputError(f"{layout.root} holds another run, {there.run}, of another model", code="other_run")
        said = uploads.state(self.client, name)["taken"]
        if arrival.taken != said or not uploads.is_attended(self.client, name):
            if not layout.run_json.exists():
                refuse_foreign_files(layout)
            layout.make()
            arrival.folder.mkdir(exist_ok=True)
            arrival.there = self._already_there(arrival)
            arrival.taken = _durable(arrival, said)
            uploads.say_taken(self.client, name, arrival.taken)
        before = arrival.taken
        count = self._take(name, arrival)
        if arrival.taken != before:
            uploads.say_taken(self.client, name, arrival.taken)
        if arrival.taken == arrival.pieces.count:
            return count + self._finish(name, arrival)
        return count

    def _already_there(self, arrival: _Arrival) -> frozenset[int]:
        """The files that the folder has as they were sent, also those that a writer had named when it died.

        Raises InputError where an input of the run that is there is another one now.
        """
        grows = arrival.layout.run_json.exists()
        found, changed = set(), []
        for index, file in enumerate(arrival.upload.files):
            path = arrival.root / file.path
            by_value = file.path.startswith(f"{INPUTS}/")
            if (grows and not by_value) or not path.exists():
                continue
            self._moved()
            status = path.stat()
            same = status.st_size == file.bytes
            if same and status.st_mtime_ns != file.mtime_ns:
                same = file_sha256(path) == file.sha256
            if same:
                found.add(index)
            elif grows:
                changed.append(str(path))
        if changed:
            more = f" and {len(changed) - 3:,} more" if len(changed) > 3 else ""
            raise InputError(
                f"inputs are not what was sent first: {', '.join(changed[:3])}{more}; nothing was added",
                code="input_changed",
            )
        return frozenset(found)

    def _finish(self, name: str, arrival: _Arrival) -> int:
        """All pieces are here: make the run, or add to the one that is there."""
        with open(arrival.layout.plan_lock, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._retry_at[name] = time.monotonic() + BUSY_S
                uploads.say_why(self.client, name, "another plan is being made for this output")
                return 0
            arrival.there = self._already_there(arrival)
            _check(arrival, self._moved)
            grown = self._grow(arrival) if arrival.layout.run_json.exists() else self._make(name, arrival)
        return self._accept(name, arrival, grown)

    def _make(self, name: str, arrival: _Arrival) -> Grown:
        """Give each file its name; run.json comes last, and with it the run is real."""
        save_control(arrival.layout, Control(priority=self._priority(name) or PRIORITY))
        _place(arrival, range(len(arrival.upload.files)), self._moved)
        info = load_run(arrival.layout.root)
        return Grown(units=info.units, samples=info.samples, added=None)

    def _grow(self, arrival: _Arrival) -> Grown:
        """Add the units that the run lacks. Their inputs get their names before, and the others' stay as they are."""
        files = arrival.upload.files
        plan = arrival.folder / "plan"
        (plan / "manifest").mkdir(parents=True, exist_ok=True)
        for index, file in enumerate(files):
            if not file.path.startswith(f"{INPUTS}/") and not (plan / file.path).exists():
                os.link(arrival.folder / str(index), plan / file.path)
        inputs = [index for index, file in enumerate(files) if file.path.startswith(f"{INPUTS}/")]
        return self._add(arrival.root, plan, lambda: _place(arrival, inputs, self._moved), self._moved)

    def _priority(self, name: str) -> int | None:
        """What was asked for last: it may be changed as long as the upload is under way."""
        upload = Upload.from_json(uploads.announced(self.client, name))
        return None if upload is None else upload.priority

    def _take(self, name: str, arrival: _Arrival) -> int:
        """Write the next pieces that have come, durably; gives their number."""
        touched: set[Path] = set()
        taken = arrival.taken
        while taken < min(arrival.pieces.count, arrival.taken + BATCH_PIECES):
            if (skipped := arrival.skip(taken)) != taken:
                arrival.taken += skipped - taken  # what need not be written does not count
                taken = skipped
                continue
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

    def _accept(self, name: str, arrival: _Arrival, grown: Grown) -> int:
        upload, layout = arrival.upload, arrival.layout
        info = load_run(layout.root)
        priority = self._priority(name)
        with kept_off(layout.broker) as alone:
            # An `embq run` that is at work on it takes the new units up itself.
            if alone:
                if priority is not None and grown.added is not None:
                    self._ask(info.run, layout, {"priority": str(priority)})
                register(self.client, replace(arrival.record, run=info.run, rows=info.rows, units=info.units))
        end = End(end="accepted", run=info.run, added=grown.added, units=info.units, samples=grown.samples)
        uploads.say_end(self.client, name, upload.run, end)
        shutil.rmtree(arrival.folder, ignore_errors=True)
        self.log.info("upload_accepted", run=info.run, output=upload.output, files=len(upload.files), units=info.units)
        return 1

    def _ask(self, run: str, layout: Layout, wishes: dict[str, str]) -> None:
        """Ask something of a run that is there. Of one that is finished no writer would note it, until it goes on."""
        ledger = Ledger(self.client, run)
        if ledger.meta().get("state") == "done":
            save_control(layout, load_control(layout).with_wishes(wishes))
        else:
            ledger.ask(wishes)

    def _wait(self, name: str, error: OutputError | OSError) -> None:
        """The folder cannot be written now; what has arrived stays."""
        if isinstance(error, OSError):
            error = output_error(error, Path(error.filename or "the output folder"))
        self._retry_at[name] = time.monotonic() + RETRY_S
        uploads.say_why(self.client, name, error.message)
        self.log.error("upload_waits", upload=name, why=error.message, next=error.next_step, retry_s=RETRY_S)

    def _refuse(self, name: str, code: str, why: str) -> None:
        arrival = self._known.get(name)
        run = arrival.upload.run if arrival is not None else name
        uploads.say_end(self.client, name, run, End(end="refused", code=code, why=why))
        if arrival is not None:
            shutil.rmtree(arrival.folder, ignore_errors=True)
        self.log.error("upload_refused", upload=name, code=code, why=why)


def _check(arrival: _Arrival, moved: Callable[[], None]) -> None:
    """Each file arrived as it was sent; InputError where one did not."""
    for index, file in enumerate(arrival.upload.files):
        moved()
        if index in arrival.there:
            continue
        path = _arrived(arrival, index)
        if not file.bytes and not path.exists():
            path.touch()
        if path.stat().st_size != file.bytes or file_sha256(path) != file.sha256:
            raise InputError(f"{file.path} did not arrive as it was sent", code="bad_upload")


def _place(arrival: _Arrival, indexes: Iterable[int], moved: Callable[[], None]) -> None:
    """Give arrived files their names, in order; those that have them already are left alone."""
    for index in indexes:
        moved()
        _name(_arrived(arrival, index), arrival.upload.files[index], arrival.root)


def _arrived(arrival: _Arrival, index: int) -> Path:
    """Where a file stands: under its number, or under its name where it is there already."""
    path = arrival.folder / str(index)
    return arrival.root / arrival.upload.files[index].path if index in arrival.there else path


def _durable(arrival: _Arrival, said: int) -> int:
    """How many pieces there really are, of `said`: the folder may have lost some."""
    for index, (file, start) in enumerate(zip(arrival.upload.files, arrival.pieces.starts, strict=True)):
        needed = min(file.bytes, max(0, said - start) * PIECE_BYTES)
        path = _arrived(arrival, index)
        if needed and (not path.exists() or path.stat().st_size < needed):
            return start
    return said


def _name(path: Path, file: UploadFile, root: Path) -> None:
    """Give an arrived file its name, durably, folders included."""
    target = root / file.path
    made = [folder for folder in [target.parent, *target.parent.parents] if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.mtime_ns and path != target:
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
    if path != target:
        os.rename(path, target)
    fsync_folder(target.parent)
    for folder in made:
        fsync_folder(folder.parent)
