"""Layout of an output folder: the paths of its entries, and their creation."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from embq.core.errors import InputError
from embq.core.settings import spool_folder, staging_folder, state_folder
from embq.core.storage import beneath
from embq.core.storage.durable import drop_in, output_error, writing
from embq.core.storage.objects import ObjectPath, probe
from embq.core.storage.paths import Place
from embq.core.units import content_hash

INPUTS = "_inputs"
"""Folder below the output folder for uploaded inputs."""

ENTRIES = frozenset(
    {
        "control.json",
        "manifest",
        "commits",
        "parts",
        "failures",
        "_staging",
        "_tmp",
        "_writer",
        "_broker",
        "_logs",
        "index",
        INPUTS,
    }
)
"""Entries that an output folder may have before a run is made in it."""
RUN_ENTRIES = frozenset({"run.json", "metadata"})
"""Entries that it has later, besides the folders of vectors of an npy run, whose names end in `_emb`."""

MARKS = frozenset({"run.json", "manifest"})
"""Entries by which the output folder of a run is known where folders are listed."""

PLANNED = ("manifest-", "run-")
"""Prefixes of unfinished files of planning, which belong to the holder of `_writer/plan.lock`."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of one output: a folder, or a prefix on an object store.

    `_staging`, `_tmp`, `_writer` and `_broker` are private to embq. An object store has no locks and no rename, so the
    files that need them are in a folder of this machine, `home`; readers and other machines need nothing of it. Parts
    of workers are staged in the store.
    """

    root: Place

    @property
    def home(self) -> Path:
        """Folder for files of this machine: the output folder, or one named after the object store's URL."""
        if isinstance(self.root, Path):
            return self.root
        return state_folder() / _hashed(self.root)

    @property
    def run_json(self) -> Place:
        """Written last when a run is made, after the first generation of the manifest."""
        return self.root / "run.json"

    @property
    def control(self) -> Place:
        """State and priority of the run, see `embq.core.run.control`."""
        return self.root / "control.json"

    @property
    def manifest(self) -> Place:
        """Folder of the manifest's segments, and of the records `gen-0001.json` ... of later generations."""
        return self.root / "manifest"

    @property
    def commits(self) -> Place:
        """Folder of the commit records, the truth."""
        return self.root / "commits"

    @property
    def parts(self) -> Place:
        """Folder of the committed rows, where `embq.core.formats.folders` knows no other for the run's format."""
        return self.root / "parts"

    @property
    def failures(self) -> Place:
        """Folder of the committed failures."""
        return self.root / "failures"

    @property
    def writer(self) -> Place:
        """Epochs that writers took, and a checkpoint of the log."""
        return self.root / "_writer"

    @property
    def plan_lock(self) -> Path:
        """Lock file of the process that plans or adds units."""
        return self.home / "_writer" / "plan.lock"

    @property
    def staging(self) -> Path:
        """Results on their way from workers to the writer, where these share a folder.

        With EMBQ_STAGING it is apart from the output, to which workers then need no right to write.
        """
        apart = staging_folder()
        return self.home / "_staging" if apart is None else apart / f"embq-{_hashed(self.root)}"

    @property
    def staged_parts(self) -> Place:
        """Parts that workers have written, without their final names: `staging`, or the same in an object store."""
        return self.staging if isinstance(self.root, Path) else self.root / "_staging"

    @property
    def takes_parts(self) -> bool:
        """Whether workers may write parts: with EMBQ_STAGING they need no right to write to the output."""
        return staging_folder() is None

    @property
    def temporary(self) -> Path:
        """Folder of unfinished files; for an object store those that are sent later."""
        spool = None if isinstance(self.root, Path) else spool_folder()
        return self.home / "_tmp" if spool is None else spool / f"embq-{_hashed(self.root)}"

    @property
    def broker(self) -> Path:
        """State of the embedded server."""
        return self.home / "_broker"

    @property
    def logs(self) -> Path:
        """Logs of the processes that `embq run` started."""
        return self.home / "_logs"

    def relative(self, path: Place) -> str:
        """Name of a file of the output in records."""
        return str(path).removeprefix(f"{self.root}/")

    def make(self, *rows: Place) -> None:
        """Create the folders that every run has, and those for its `rows`.

        Raises OutputError if that is not possible, ConfigError for an object store without conditional creates.
        """
        if isinstance(self.root, ObjectPath):
            with writing(self.root):
                probe(self.root / "_writer")
        self.refuse_links()
        _make(self.root, self.manifest, self.commits, self.failures, *rows)
        self.make_own()

    def make_own(self) -> None:
        """Create the folders of this machine, as `make` does too.

        Links in the folder of unfinished files are removed: files in it are written by their names.
        """
        _make(self.staging, self.temporary, self.plan_lock.parent)
        for name, status in beneath.listing(self.temporary.parent, self.temporary.name):
            if stat.S_ISLNK(status.st_mode):
                drop_in(self.temporary, name)

    def refuse_links(self) -> None:
        """Raise OutsideError if one of embq's entries of the output folder is a symbolic link.

        Otherwise files would be read, written and deleted where the link leads to.
        """
        if not isinstance(self.root, Path):
            return
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.root) as entries:
            for entry in entries:
                ours = entry.name in ENTRIES or entry.name in RUN_ENTRIES or entry.name.endswith("_emb")
                if ours and entry.is_symlink():
                    beneath.below(self.root, entry.name)

    def open_plan_lock(self) -> IO[str]:
        """The file `plan_lock`, created if it is missing; OutputError if that is not possible."""
        flags = os.O_RDWR | os.O_CREAT
        with writing(self.plan_lock):
            return open(
                beneath.open_file(self.home, f"{self.plan_lock.parent.name}/{self.plan_lock.name}", flags, 0o666), "r+"
            )


_NUMBERED = re.compile(r"(?:(?:part|failures|commit|checkpoint)-|(?:metadata|.*_emb)_)(\d+)(?:\.|$)")


def _make(*folders: Place) -> None:
    for folder in folders:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)


def _hashed(root: Place) -> str:
    """Name of a folder for an output."""
    return content_hash([str(root)])[:16]


def run_above(folder: Place) -> Path | None:
    """The output folder that a folder of this machine is a part of, such as its `parts` or `index`; None for others."""
    if isinstance(folder, Path):
        inner = Path(os.path.abspath(folder))
        for above in inner.parents:
            with suppress(OSError):
                if inner.relative_to(above).parts[0] in ENTRIES and all((above / name).exists() for name in MARKS):
                    return above
    return None


def part_of_run(folder: Place, run: Path) -> InputError:
    """The error for a folder that was given in place of the output folder `run` that it is a part of."""
    return InputError(
        f"{folder} belongs to the output of the run {run}", next_step=f"give {run} instead", code="part_of_run"
    )


def record_number(name: str) -> int:
    """The number of the commit record that a file was written for, by its name; 0 for files of no record."""
    match = _NUMBERED.match(name)
    return int(match[1]) if match else 0


def refuse_foreign_files(layout: Layout) -> None:
    """Raise InputError if a folder that is to become a run's holds files that are not embq's."""
    try:
        names = sorted(entry.name for entry in layout.root.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise output_error(error, layout.root) from error
    if foreign := [name for name in names if name not in ENTRIES]:
        raise InputError(
            f"{layout.root} is not empty and holds no embq run (it has {', '.join(foreign[:3])})",
            next_step="choose an empty or a new folder",
            code="foreign_output",
        )
