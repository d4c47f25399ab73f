"""Unit and key -> the encoded image, from the run's own input, in the version that was planned.

A file of a folder and a member of a plain local shard are read alone, by path and by offset. A row of a table, and
what is behind a URL, is read by a reader process. A shard that can only be read whole (compressed, or behind a URL) is
read once, and its images are kept in an unnamed file for those that are asked for next.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from embq.core.errors import EmbqError, OutsideError, SampleError, SourceError
from embq.core.process.limits import decoded_bytes
from embq.core.rows.results import clean_text
from embq.core.settings import cache_folder, input_limits
from embq.core.storage import beneath
from embq.core.storage.paths import is_url
from embq.core.units import Sample, Unit
from embq.sources.access.allowed_hosts import Reach
from embq.sources.access.files import check_inside, etag, require_same, source_errors
from embq.sources.extensions import Extensions, extensions_of
from embq.sources.formats.compressed import HEAD_BYTES, compression_of
from embq.sources.formats.tar import TarSample, group
from embq.sources.formats.tar_headers import walk
from embq.sources.interface import SAMPLE_MAX_BYTES, Memory
from embq.sources.reader_process.client import READ_IDLE_S, SERVER, Process
from embq.sources.unit_reader import require_allowed
from embq.worker.embedders.sample_fields import image_of

READ_S = 30.0
"""Time limit for reading one image, or one shard whole."""

READERS = 2
READER_BYTES = 4 << 30
"""Reader processes, and memory that each may take for one request."""

SHARD_MAX_BYTES = 1 << 30
"""Largest shard that is read whole, as it is stored; 8 s at 1 Gbit/s."""

KEPT_SHARDS, KEPT_BYTES, SHARD_KEPT_BYTES = 4, 4 << 30, 2 << 30
"""Shards whose images are kept in unnamed files, and their bytes together and each."""

TABLE_MEMBERS, SHARD_MEMBERS = 10_000_000, 2_000_000
"""Images whose offsets are kept for all shards together (240 MB), and most members of one shard."""

FAILED_S, SLOW_S, FAILED_SHARDS = 60.0, 1.0, 64
"""A shard that failed after more than the second time is not read again for the first; this many are remembered."""

TEXT_KINDS = ("jsonl", "lines")


class Images:
    """Reads encoded images, within the roots and hosts of the settings. Thread-safe.

    Attributes:
        folder: of thumbnails and of unnamed files.

    Args:
        exposed: whether others than the users of this machine may ask. A manifest may name any file, so they get
            inputs within EMBQ_ROOTS only, and none if that is empty.

    Raises ConfigError for a setting that cannot be used.
    """

    def __init__(self, *, exposed: bool = False) -> None:
        self._roots, private_hosts = input_limits()
        self._refuse_all = exposed and not self._roots
        self._reach = Reach.of(self._roots, private_hosts)
        self.folder = cache_folder() / "thumbnails"
        self._shards = _Shards(self._read_whole, self.folder)
        memory = min(READER_BYTES, decoded_bytes())
        self._readers: queue.LifoQueue[Process] = queue.LifoQueue()
        self._all = [Process(*SERVER, str(READ_IDLE_S), memory_bytes=memory) for _ in range(READERS)]
        for reader in self._all:
            self._readers.put(reader)

    def require_allowed(self, unit: Unit) -> None:
        """Raise SourceError for a unit whose source may not be read by this server, or not any more."""
        if self._refuse_all:
            raise SourceError(
                "other machines may ask this server, and EMBQ_ROOTS does not say which inputs they may see",
                code="inputs_not_named",
                next_step="start it with the folders of the inputs in EMBQ_ROOTS, such as EMBQ_ROOTS=/data:/photos",
            )
        require_allowed(unit.source, self._roots)

    def image(self, unit: Unit, key: str, ordinal: Callable[[], int]) -> bytes:
        """The encoded image of a sample, at most SAMPLE_MAX_BYTES.

        Args:
            key: as rows have it.
            ordinal: of the sample in the unit; asked for if the key does not find it.

        Raises SourceError and SampleError as reading the unit does (`source_changed` and `shard_changed` if it is
        not the planned version), `missing_member` if the sample has no image, a transient SourceError after READ_S.
        """
        if unit.kind in TEXT_KINDS:
            self.require_allowed(unit)
            raise _no_image(key)
        sample = self.sample(unit, key, ordinal)
        if sample.error is not None:
            raise SampleError(*sample.error)
        return image_of(sample)

    def sample(self, unit: Unit, key: str, ordinal: Callable[[], int]) -> Sample:
        """A sample by itself; of folders and shards with its image alone. Arguments and errors as of `image`."""
        self.require_allowed(unit)
        with _without_details():
            if unit.kind == "files":
                return self._of_folder(unit, key)
            if unit.kind == "tar":
                return Sample(ordinal=0, key=key, image=self._shards.image(unit, key))
            return self._only(unit, key, ordinal())

    def look_ahead(self, unit: Unit) -> None:
        """Find the images of a plain local shard, so that the first of them need not wait for that. Raises as `image`
        does. Other units are left alone.
        """
        self.require_allowed(unit)
        if unit.kind == "tar" and not is_url(unit.source):
            self._shards.look_ahead(unit)

    def close(self) -> None:
        """End the reader processes."""
        for reader in self._all:
            reader.kill()

    def _of_folder(self, unit: Unit, key: str) -> Sample:
        item = next((item for item in unit.items if clean_text(item[0]) == key), None)
        if item is None:
            raise SourceError(f"{unit.source}: the unit names no file {key!r}", code="source_missing")
        if is_url(unit.source):
            return self._only(replace(unit, items=(item,), samples=1, retry=None), key, None)
        return Sample(ordinal=0, key=key, image=file_inside(unit.source, *item))

    def _only(self, unit: Unit, key: str, ordinal: int | None) -> Sample:
        match = None
        with self._read(unit, ordinal) as samples:
            for sample in samples:  # to their end: a process that is left halfway is replaced
                match = sample if match is None and clean_text(sample.key) == key else match
        if match is not None:
            return match
        raise SourceError(f"{unit.source}: holds no sample {key!r} where it was", code="source_changed")

    def _read_whole(self, unit: Unit, keep: Callable[[Sample], None]) -> None:
        with self._read(replace(unit, retry=None), None) as samples:
            for sample in samples:
                keep(sample)

    @contextmanager
    def _read(self, unit: Unit, only: int | None) -> Iterator[Iterator[Sample]]:
        """The samples of a unit from a reader process, which is ended after READ_S and if they are left halfway."""
        try:
            reader = self._readers.get(timeout=READ_S)
        except queue.Empty:
            raise _late(unit.source) from None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            reader.stop()

        timer = threading.Timer(READ_S, give_up)
        timer.daemon = True
        try:
            reader.start_for(unit)
            timer.start()
            with closing(reader.read(unit, self._roots, lambda: None, only=only, reach=self._reach)) as samples:
                yield samples
        except EmbqError as error:
            if late.is_set():
                raise _late(unit.source) from error
            raise
        finally:
            timer.cancel()
            self._readers.put(reader)


WHY = {
    **dict.fromkeys(("source_changed", "shard_changed"), "its input is not the one that was planned"),
    "source_missing": "its input is not there any more",
    "source_denied": "this server may not read its input",
    "outside_root": "its input is a link that leads out of the folder",
    "missing_member": "its input has no image for it",
    "too_large": "its input is too large to be read for a picture",
}
"""Code of an error of reading -> why there is no sample."""


@contextmanager
def _without_details() -> Iterator[None]:
    """Replace messages of readers, which tell sizes, times and links of files: a manifest may name any file."""
    try:
        yield
    except SampleError as error:
        raise SampleError(error.code, WHY.get(error.code, f"its input cannot be read: {error.code}")) from error
    except SourceError as error:
        if error.transient:  # of the storage, not of a file
            raise
        raise SourceError(WHY.get(error.code, f"its input cannot be read: {error.code}"), code=error.code) from error


def file_inside(folder: str, relative: str, size: int) -> bytes:
    """A file of an image folder, which had `size` bytes. A link to it is followed if it stays inside the folder.

    Raises SourceError for the folder, and as `check_inside` does; `source_changed` if the file changes meanwhile.
    """
    with source_errors(folder):
        os.stat(folder)
    root = os.path.realpath(folder)
    path = os.path.join(root, relative)
    real, _ = check_inside(root, relative, size)
    with _opened(root, os.path.relpath(real, root), path) as descriptor:
        data = _pread(descriptor, 0, size + 1)
    if len(data) != size:
        raise SourceError(f"{path} changed while it was read", code="source_changed")
    return data


@contextmanager
def planned_file(unit: Unit) -> Iterator[int]:
    """A descriptor of the unit's local file, which must be the planned version before and after the block.

    Links on the way to it are resolved first, as `require_allowed` does, and may not change meanwhile.
    """
    real = os.path.realpath(unit.source)
    with _opened(os.path.dirname(real), os.path.basename(real), unit.source) as descriptor:
        require_same(unit, etag(os.fstat(descriptor)), "source_changed")
        yield descriptor
        require_same(unit, etag(os.fstat(descriptor)), "source_changed")


@contextmanager
def _opened(root: str, name: str, path: str) -> Iterator[int]:
    """A descriptor of the file `root / name`, both without links: if a folder became one, SourceError."""
    with source_errors(path):
        try:
            descriptor = beneath.open_file(Path(root), name)
        except OutsideError as error:
            raise SourceError(f"{path}: {error.message}", code="outside_root") from error
        try:
            expected, link = os.path.join(root, name), f"/proc/self/fd/{descriptor}"
            if os.path.lexists(link) and os.readlink(link) != expected:  # only Linux tells
                raise SourceError(f"{path} does not lead to {expected} any more", code="outside_root")
            yield descriptor
        finally:
            os.close(descriptor)


def _pread(descriptor: int, start: int, stop: int) -> bytes:
    """The bytes between two offsets; fewer if the file ends before."""
    pieces = []
    while start < stop and (piece := os.pread(descriptor, stop - start, start)):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


# --- shards ---


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class _Shard:
    """Offsets of the images of a shard: 24 bytes for each, so that those of millions are kept.

    Attributes:
        keys: int64 (n,), ascending: hashes of the keys of this process, of which nobody can make two alike on purpose.
        places: int64 (n, 2): first byte, and byte after the last.
        descriptor: of the unnamed file that the places are in; None for the shard itself.
        bytes: of that file.
    """

    keys: np.ndarray
    places: np.ndarray
    descriptor: int | None = None
    bytes: int = 0

    def find(self, key: str) -> tuple[int, int] | None:
        """The place of an image, by the key as rows have it; None if there is none, or two samples have that key."""
        at = int(np.searchsorted(self.keys, key_hash := hash(key)))
        if at == len(self.keys) or self.keys[at] != key_hash:
            return None
        return int(self.places[at, 0]), int(self.places[at, 1])


class _Places:
    """Collects the places of the images of a shard."""

    def __init__(self) -> None:
        self._keys, self._places = array("q"), array("q")

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: str, start: int, stop: int) -> None:
        """The image of one more sample."""
        self._keys.append(hash(key if key.isascii() else clean_text(key)))
        self._places.extend((start, stop))

    def shard(self, **spool: int) -> _Shard:
        """The shard, without keys that two samples have once they are escaped."""
        keys, places = np.array(self._keys, np.int64), np.array(self._places, np.int64).reshape(-1, 2)
        unique, first, count = np.unique(keys, return_index=True, return_counts=True)
        return _Shard(keys=unique[count == 1], places=places[first[count == 1]], **spool)


class _Shards:
    """The shards that were looked into last."""

    def __init__(self, read_whole: Callable[[Unit, Callable[[Sample], None]], None], folder: Path) -> None:
        self._read_whole, self._folder = read_whole, folder
        self._lock = threading.Lock()
        self._shards: OrderedDict[tuple[object, ...], _Shard] = OrderedDict()
        self._building: dict[tuple[object, ...], threading.Lock] = {}
        self._failed: OrderedDict[tuple[object, ...], tuple[float, EmbqError]] = OrderedDict()

    def image(self, unit: Unit, key: str) -> bytes:
        shard = self._shard(unit)
        if (place := shard.find(key)) is None:
            raise _no_image(key)
        if shard.descriptor is not None:
            data = _pread(shard.descriptor, *place)
        else:
            with planned_file(unit) as descriptor:
                data = _pread(descriptor, *place)
        if len(data) != place[1] - place[0]:
            raise SourceError(f"{unit.source} changed while it was read", code="source_changed")
        return data

    def look_ahead(self, unit: Unit) -> None:
        """See `Images.look_ahead`."""
        with planned_file(unit) as descriptor:
            if compression_of(_pread(descriptor, 0, HEAD_BYTES), unit.source):
                return
        self._shard(unit)

    def _shard(self, unit: Unit) -> _Shard:
        name = (unit.source, unit.etag, unit.options)
        with self._lock:
            if name in self._shards:
                self._shards.move_to_end(name)
                return self._shards[name]
            building = self._building.setdefault(name, threading.Lock())
        with building:
            with self._lock:
                if name in self._shards:
                    return self._shards[name]
                until, error = self._failed.get(name, (0.0, None))
                if error is not None and time.monotonic() < until:
                    raise copy(error)
            began = time.monotonic()
            try:
                shard = self._built(unit)
                with self._lock:
                    self._shards[name] = shard
                    self._forget_oldest()
                return shard
            except EmbqError as error:
                if time.monotonic() - began > SLOW_S:
                    with self._lock:
                        # A copy: the error holds the frames that it passed.
                        self._failed[name] = (time.monotonic() + FAILED_S, copy(error))
                        while len(self._failed) > FAILED_SHARDS:
                            self._failed.popitem(last=False)
                raise
            finally:
                with self._lock:
                    self._building.pop(name, None)

    def _forget_oldest(self) -> None:
        """Keep the bounds; the shard that was used last stays."""
        members = files = size = 0
        is_full = False
        for number, (name, shard) in enumerate(reversed([*self._shards.items()])):
            members, size, files = members + len(shard.keys), size + shard.bytes, files + (shard.descriptor is not None)
            is_full = is_full or members > TABLE_MEMBERS or size > KEPT_BYTES or files > KEPT_SHARDS
            if is_full and number:
                del self._shards[name]  # its file is closed when the last thread has read from it

    def _built(self, unit: Unit) -> _Shard:
        if is_url(unit.source):
            return self._spooled(unit)
        with planned_file(unit) as descriptor:
            if not compression_of(_pread(descriptor, 0, HEAD_BYTES), unit.source):
                return offsets_of(descriptor, unit)
        return self._spooled(unit)

    def _spooled(self, unit: Unit) -> _Shard:
        """A shard that is read whole, with its images in an unnamed file."""
        if unit.stop > SHARD_MAX_BYTES:
            raise SourceError(
                f"{unit.source}: is read whole for an image, and has more than {SHARD_MAX_BYTES:,} bytes",
                code="too_large",
            )
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            places, size = _Places(), 0

            def keep(sample: Sample) -> None:
                nonlocal size
                if sample.error is not None or sample.image is None:
                    return
                if size + len(sample.image) > SHARD_KEPT_BYTES or len(places) >= SHARD_MEMBERS:
                    raise SourceError(
                        f"{unit.source}: its images take more than {SHARD_KEPT_BYTES:,} bytes", code="too_large"
                    )
                file.write(sample.image)
                places.add(sample.key, size, size + len(sample.image))
                size += len(sample.image)

            self._read_whole(unit, keep)
            file.flush()
            shard = places.shard(descriptor=os.dup(file.fileno()), bytes=size)
            weakref.finalize(shard, os.close, cast(int, shard.descriptor))
            return shard


def offsets_of(descriptor: int, unit: Unit) -> _Shard:
    """The images of a plain shard by their offsets, by the headers of its members alone.

    Of a damaged shard those before the damage are there: rows exist of whole samples only.
    """
    size = os.fstat(descriptor).st_size
    data = cast(Memory, _Headers(descriptor, size, unit.source))
    archive = walk(data, unit.source, SHARD_MEMBERS)
    places, extensions = _Places(), extensions_of(unit.options)
    for entry in group(archive.members, extensions):
        if entry.again is None and (place := _image_in(entry, extensions)) is not None:
            places.add(entry.key, *place)
    return places.shard()


def _image_in(entry: TarSample, extensions: Extensions) -> tuple[int, int] | None:
    member = next((entry.parts[name] for name in extensions.images if name in entry.parts), None)
    if member is None or not member.regular or member.stop - member.start > SAMPLE_MAX_BYTES:
        return None
    return member.start, member.stop


class _Headers:
    """An open file as the bytes that `tar_headers.walk` asks for. A mapped file that is cut would end the server."""

    def __init__(self, descriptor: int, size: int, path: str) -> None:
        self._descriptor, self._size, self._path = descriptor, size, path
        self._deadline = time.monotonic() + READ_S

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: slice | int) -> bytes | int:
        if time.monotonic() > self._deadline:
            raise _late(self._path)
        if isinstance(index, int):
            return (_pread(self._descriptor, index, index + 1) or b"\0")[0]  # cut meanwhile, which is found later
        start, stop, _ = index.indices(self._size)
        return _pread(self._descriptor, start, stop)


def _no_image(key: str) -> SampleError:
    return SampleError("missing_member", f"the sample {key!r} has no image")


def _late(source: str) -> SourceError:
    return SourceError(f"{source}: reading it takes longer than {READ_S:g} s", code="source_unreadable", transient=True)
