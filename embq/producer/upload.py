"""Uploads a planned run, and its inputs with --inline, through the broker to the writer's output folder."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import redis

from embq.core.errors import BrokerError, InputError, UsageError
from embq.core.queue import uploads
from embq.core.queue.uploads import PIECE_BYTES, WINDOW, Pieces, Upload, UploadFile, UploadOutcome
from embq.core.run.layout import INPUTS, Layout
from embq.core.run.run_info import RunInfo, load_run, run_id
from embq.core.storage.durable import file_sha256
from embq.core.units import Unit
from embq.producer.announce import record_of
from embq.sources.access.files import require_regular, source_errors
from embq.sources.extensions import extensions_of
from embq.sources.formats.metadata_files import metadata_files_of

LOOK_S = 0.05
LISTEN_S = 2.5
"""Wait for a writer to report what it has already, before anything is sent."""
FEW_PIECES = 4
"""Most pieces of an upload that is sent without that wait."""
ACCEPT_S = 10.0
"""Wait for a writer to accept an upload that the broker holds as a whole."""
FSYNC_MS = 3_000
"""Wait for the broker's report of what it has on disk, before asking again; less than a client's time-out."""


class UploadedInputs:
    """Files of units that are uploaded, with their paths below the output folder.

    Args:
        output: absolute path of the output folder on the writer's machine.
    """

    def __init__(self, output: str) -> None:
        self.output = output
        self._names: dict[str, str] = {}
        self.files: dict[str, str] = {}

    def relocate(self, unit: Unit) -> Unit:
        """The unit as workers will find it; notes its files."""
        if "://" in unit.source:
            raise UsageError(
                f"{unit.source}: --inline sends files of this machine, and this is none",
                next_step="leave --inline out: the workers read URLs themselves",
            )
        name = self._names.get(unit.source)
        if name is None:
            # By where it stands here: the same file finds its place again when more is sent later.
            place = hashlib.sha256(os.fsencode(unit.source)).hexdigest()[:16]
            name = self._names[unit.source] = f"{INPUTS}/{place}/{_plain(unit.source)}"
        if unit.kind == "files":
            for relative, _ in unit.items:
                for path in _with_beside(unit, relative):
                    self.files[f"{name}/{os.path.relpath(path, unit.source)}"] = path
        else:
            self.files[name] = unit.source
        return replace(unit, source=f"{self.output}/{name}")


def _plain(source: str) -> str:
    name = os.path.basename(source.rstrip("/")) or "input"
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{source!r}: a name that is not UTF-8 cannot be sent", code="bad_name") from error
    return name


def _with_beside(unit: Unit, relative: str) -> Iterator[str]:
    extensions = extensions_of(unit.options)
    stem = extensions.stem(relative)
    for name in (relative, *(f"{stem}{extension}" for extension in extensions.beside), *metadata_files_of(relative)):
        path = os.path.join(unit.source, name)
        if os.path.isfile(path):
            yield path


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedUpload:
    """An upload, and its files on this machine by their path below the output folder."""

    upload: Upload
    info: RunInfo
    paths: dict[str, Path]


def plan_upload(
    planned: Path, output: str, inputs: UploadedInputs | None, priority: int | None = None
) -> PlannedUpload:
    """The upload of a run that was planned into the folder `planned` of this machine.

    Its id follows from its destination, so another plan returns the same upload. The oldest inputs come first: where
    more is sent to a run, the writer has those already.

    Raises SourceError if one of the files cannot be read: it cannot be sent.
    """
    layout = Layout(planned)
    info = load_run(planned)
    info = replace(info, run=run_id(info.identity(), Path(output)), created="")
    layout.run_json.unlink()
    info.publish(layout)
    by_value = {path: Path(source) for path, source in (inputs.files if inputs else {}).items()}
    paths = dict(sorted(by_value.items(), key=lambda pair: (pair[1].stat().st_mtime_ns, pair[0])))
    paths |= {f"manifest/{path.name}": path for path in sorted((planned / "manifest").glob("*.parquet"))}
    paths["run.json"] = planned / "run.json"
    files = []
    for name, path in paths.items():
        with source_errors(str(path)):
            status = path.stat()
            require_regular(str(path), status)
            digest = file_sha256(path)
        files.append(
            UploadFile(
                path=name,
                bytes=status.st_size,
                mtime_ns=status.st_mtime_ns if name in by_value else 0,
                sha256=digest,
            )
        )
    record = record_of(info, Path(output)).to_json()
    upload = Upload(run=info.run, output=output, record=record, files=tuple(files), priority=priority)
    return PlannedUpload(upload=upload, info=info, paths=paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadResult:
    """Result of an upload.

    Attributes:
        end: the writer's verdict; None if it has not taken all of it yet.
        on_disk: whether the broker has the rest on its disk; None if it cannot tell.
    """

    end: UploadOutcome | None
    on_disk: bool | None


def deliver(client: redis.Redis, parcel: PlannedUpload, report: Callable[[int, int, str], None]) -> UploadResult:
    """Send the missing pieces, and wait until the writer, or at least the broker's disk, has all of them.

    Args:
        client: a patient client, which waits for a broker that is away.
        report: called with (bytes taken, bytes in all, what it waits for) as progress.

    Raises InputError if the writer refuses it, with the writer's code. With a server that cannot tell
    what it has on disk, only the writer's verdict ends this.
    """
    upload = parcel.upload
    uploads.announce(client, upload)
    pieces = Pieces(upload.files)
    sent = 0
    on_disk: bool | None = False
    kept_since = 0.0
    began, attended = time.monotonic(), False
    while True:
        state = uploads.state(client, upload.name)
        if state.end:
            uploads.drop_pieces(client, upload.name)
            if state.end == "refused":
                raise _refusal(state, parcel)
            return UploadResult(end=state, on_disk=on_disk)
        if pieces.count > FEW_PIECES and not attended and time.monotonic() - began < LISTEN_S:
            attended = uploads.has_writer(client, upload.name)
            time.sleep(LOOK_S)
            continue
        taken = state.taken
        sent = max(sent, taken)
        if _forgotten(client, upload):
            uploads.announce(client, upload)
            sent = taken = 0
        elif taken < sent and _lost(client, upload.name, taken):
            sent = taken
        if sent < pieces.count:
            on_disk = False
        while sent < min(pieces.count, taken + WINDOW):
            uploads.send(client, upload.name, sent, _read(parcel, pieces, sent))
            sent += 1
        report(pieces.bytes_before(taken), pieces.bytes_before(pieces.count), state.why)
        if sent == pieces.count and on_disk is False:
            on_disk, kept_since = _on_disk(client, upload.name), time.monotonic()
        elif on_disk and time.monotonic() - kept_since > ACCEPT_S:
            return UploadResult(end=None, on_disk=on_disk)
        time.sleep(LOOK_S)


def _refusal(end: UploadOutcome, parcel: PlannedUpload) -> InputError:
    """The writer's refusal, with files by their names on this machine."""
    why = end.why
    for name, path in parcel.paths.items():
        place = f"{parcel.upload.output}/{name}"
        if name.startswith(INPUTS) and place in why:
            why = why.replace(place, str(path))
    return InputError(why, code=end.code, next_step=_NEXT.get(end.code, "the log of `embq writer` tells more"))


_NEXT = {
    "input_changed": "put the files back as they were sent first or leave the changed ones out, or choose another "
    "--output; rows of the old and the new content are never mixed",
    "other_run": "choose another --output",
    "outside_outputs": "choose an --output in or below one of these; they are EMBQ_OUTPUTS of the writer",
    "foreign_output": "choose an empty or a new folder of that machine",
}


def _lost(client: redis.Redis, name: str, taken: int) -> bool:
    """True if the piece that the writer takes next, which was sent, is neither in the broker nor taken by now."""
    return not uploads.has_piece(client, name, taken) and uploads.state(client, name).taken == taken


def _forgotten(client: redis.Redis, upload: Upload) -> bool:
    """True if the broker has lost the announcement (and with it all else), and the writer has not ended it."""
    return not uploads.is_announced(client, upload.name) and not uploads.state(client, upload.name).end


def _on_disk(client: redis.Redis, name: str) -> bool | None:
    """True if the broker's append-only file holds all that was written so far; None if the server cannot tell."""
    # The server speaks for the writes of this connection, and of all before them. Where an answer is lost, both are
    # sent again: on a new connection without a write of its own it would vouch for nothing.
    with client.pipeline(transaction=False) as pipe:
        try:
            uploads.mark_sent(pipe, name)
            pipe.execute_command("WAITAOF", 1, 0, FSYNC_MS)  # type: ignore[no-untyped-call]
            _, (local, _) = pipe.execute()
        except redis.ResponseError:
            return None
        except redis.RedisError as error:
            raise BrokerError(f"the broker went away: {error}", next_step="repeat the command") from error
    return bool(local)


def _read(parcel: PlannedUpload, pieces: Pieces, number: int) -> bytes:
    """One piece, read from its file; InputError if that has changed."""
    index, offset = pieces.place(number)
    file = parcel.upload.files[index]
    with open(parcel.paths[file.path], "rb") as source:
        source.seek(offset)
        data = source.read(PIECE_BYTES)
    if len(data) != min(PIECE_BYTES, file.bytes - offset):
        raise InputError(f"{parcel.paths[file.path]}: changed while it was being sent", code="source_changed")
    return data
