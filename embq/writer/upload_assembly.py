"""Assembly of one upload in its output folder: pieces, checks, and the final names of files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from embq.core.errors import InputError, OutputError
from embq.core.queue.runs import RunRecord
from embq.core.queue.uploads import PIECE_BYTES, Pieces, Upload, UploadFile
from embq.core.run.layout import INPUTS, Layout
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import load_run
from embq.core.storage.beneath import below, remove
from embq.core.storage.durable import file_sha256, fsync_file, fsync_folder
from embq.core.storage.paths import place

BATCH_PIECES = 16
"""Taken at once: results of other runs wait meanwhile."""


@dataclass(slots=True)
class UploadAssembly:
    """One upload on its way into its folder.

    Attributes:
        root: the output folder.
        folder: what has arrived of it.
        taken: pieces that are durable here; -1 until that was looked at.
        present: indexes of the files that the output folder has already.
    """

    upload: Upload
    record: RunRecord
    layout: Layout
    root: Path
    folder: Path
    pieces: Pieces
    taken: int = -1
    present: frozenset[int] = frozenset()

    @classmethod
    def of(cls, name: str, upload: Upload) -> UploadAssembly:
        """The upload that was announced as `name`; InputError if it is none."""
        record = RunRecord.from_json(upload.record)
        if record is None or (record.run, record.output) != (upload.run, upload.output):
            raise InputError("the run that was uploaded is not the one that was announced", code="bad_upload")
        root = place(upload.output)
        if not isinstance(root, Path):
            raise InputError(f"{upload.output} is no folder of the writer's machine", code="bad_upload")
        layout = Layout(root)
        return cls(upload, record, layout, root, layout.temporary / f"upload-{name}", Pieces(upload.files))

    @property
    def grows(self) -> bool:
        """True if the folder has a run already, to which this one adds."""
        return self.layout.run_json.exists()

    @property
    def inputs(self) -> list[int]:
        """Indexes of the inputs that were sent by value."""
        return [index for index, file in enumerate(self.upload.files) if _is_input(file)]

    def scan(self, taken: int, on_progress: Callable[[], None]) -> None:
        """Find out which pieces and files exist, where `taken` pieces were taken before; raises as `compare` does."""
        self.folder.mkdir(exist_ok=True)
        self.compare(on_progress)
        self.taken = self._durable(taken)

    def compare(self, on_progress: Callable[[], None]) -> None:
        """Find the files that the folder has as they were sent, also those that a writer had named when it died.

        Raises InputError if an input of the run that is there is another one now.
        """
        grows = self.grows
        present, changed = set(), []
        for index, file in enumerate(self.upload.files):
            path = below(self.root, file.path)
            if (grows and not _is_input(file)) or not path.exists():
                continue
            on_progress()
            status = path.stat()
            same = status.st_size == file.bytes
            if same and status.st_mtime_ns != file.mtime_ns:
                same = file_sha256(path) == file.sha256
            if same:
                present.add(index)
            elif grows:
                changed.append(str(path))
        if changed:
            rest = f" and {len(changed) - 3:,} more" if len(changed) > 3 else ""
            raise InputError(
                f"inputs are not what was sent first: {', '.join(changed[:3])}{rest}; nothing was added",
                code="input_changed",
            )
        self.present = frozenset(present)

    def write_pieces(self, piece: Callable[[int], bytes | None]) -> int:
        """Write the next pieces that have come, durably; returns their number.

        Args:
            piece: returns the piece of a number; None if it has not come.
        """
        touched: set[Path] = set()
        taken = self.taken
        while taken < min(self.pieces.count, self.taken + BATCH_PIECES):
            if (skipped := self._skip(taken)) != taken:
                self.taken += skipped - taken  # what need not be written does not count
                taken = skipped
                continue
            data = piece(taken)
            if data is None:
                break
            index, offset = self.pieces.place(taken)
            path = self.folder / str(index)
            with open(path, "r+b" if path.exists() else "wb") as file:
                file.seek(offset)
                file.write(data)
            touched.add(path)
            taken += 1
        for path in touched:
            fsync_file(path)
        if touched:
            fsync_folder(self.folder)
        count, self.taken = taken - self.taken, taken
        return count

    def check(self, on_progress: Callable[[], None]) -> None:
        """Each file arrived as it was sent; InputError if one did not."""
        for index, file in enumerate(self.upload.files):
            on_progress()
            if index in self.present:
                continue
            path = self._arrived(index)
            if not file.bytes and not path.exists():
                path.touch()
            if path.stat().st_size != file.bytes or file_sha256(path) != file.sha256:
                raise InputError(f"{file.path} did not arrive as it was sent", code="bad_upload")

    def place(self, indexes: Iterable[int], on_progress: Callable[[], None]) -> None:
        """Give arrived files their names, in order; those that have them already are left alone."""
        for index in indexes:
            on_progress()
            _name(self._arrived(index), self.upload.files[index], self.root)

    def linked_plan(self) -> Path:
        """A folder that holds the plan under its names, while the output folder does not.

        Raises InputError if it is not the plan of the run that was announced.
        """
        plan = self.folder / "plan"
        (plan / "manifest").mkdir(parents=True, exist_ok=True)
        for index, file in enumerate(self.upload.files):
            if not _is_input(file) and not (plan / file.path).exists():
                os.link(self._arrived(index), plan / file.path)
        try:
            info, units = load_run(plan), len(Manifest(Layout(plan)))
        except OutputError as error:
            raise InputError(f"the plan that came cannot be read: {error.message}", code="bad_upload") from error
        announced, planned = self.record, (info.run, info.model, info.rows, info.units, units)
        if planned != (announced.run, announced.model, announced.rows, announced.units, announced.units):
            raise InputError("the plan that was uploaded is not that of the run that was announced", code="bad_upload")
        return plan

    def drop(self) -> None:
        """Remove what has arrived and got no name."""
        with suppress(OSError):
            remove(self.root, self.folder.relative_to(self.root))

    def _skip(self, number: int) -> int:
        """The number of the next piece from `number` on of a file that is not there yet."""
        while number < self.pieces.count:
            index, _ = self.pieces.place(number)
            if index not in self.present:
                break
            number = self.pieces.starts[index] + self.upload.files[index].pieces
        return number

    def _arrived(self, index: int) -> Path:
        """Path of an arrived file: its number, or its name if it exists already."""
        return below(self.root, self.upload.files[index].path) if index in self.present else self.folder / str(index)

    def _durable(self, taken: int) -> int:
        """Number of pieces that are durable, of `taken`: the folder may have lost some."""
        for index, (file, start) in enumerate(zip(self.upload.files, self.pieces.starts, strict=True)):
            needed = min(file.bytes, max(0, taken - start) * PIECE_BYTES)
            path = self._arrived(index)
            if needed and (not path.exists() or path.stat().st_size < needed):
                return start
        return taken


def _is_input(file: UploadFile) -> bool:
    return file.path.startswith(f"{INPUTS}/")


def _name(path: Path, file: UploadFile, root: Path) -> None:
    """Give an arrived file its name, durably, folders included."""
    target = below(root, file.path)
    new_folders = [folder for folder in [target.parent, *target.parent.parents] if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    if file.mtime_ns and path != target:
        os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
    if path != target:
        os.rename(path, target)
    fsync_folder(target.parent)
    for folder in new_folders:
        fsync_folder(folder.parent)
