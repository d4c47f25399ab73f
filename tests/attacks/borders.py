"""Readers of what comes from outside, each as a function of bytes, with bytes that it accepts.

`python -m tests.attacks.fuzz` looks for bytes that one of them does not survive; `test_borders.py` tries some.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
from PIL import Image
from rq.exceptions import NoSuchJobError
from starlette.datastructures import QueryParams

from embq.app.export.targets import target_of
from embq.core import wire
from embq.core.errors import EmbqError, SampleError
from embq.core.filter.condition import Condition
from embq.core.formats.base import FORMAT_ERRORS
from embq.core.formats.part import UNIT_FORMATS, read_unit, write_unit
from embq.core.models import ModelSpec
from embq.core.queue import uploads
from embq.core.queue.heartbeats import Rate, Service
from embq.core.queue.hints import Hint, HintJob
from embq.core.queue.keys import HINT_FUNCTION, INDEX_HINT_FUNCTION, VERSION
from embq.core.queue.result_stream import Entry
from embq.core.queue.runs import Backlog, RunRecord
from embq.core.queue.uploads import Upload, UploadFile
from embq.core.rows.results import row_schema
from embq.core.rows.spec import RowSpec
from embq.core.run import checkpoint, commits
from embq.core.run.commit_log import CommitLog
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import load_run
from embq.core.storage.hashing import HashingFile
from embq.core.units import canonical_json
from embq.index.index_files.files import File, from_json, to_json
from embq.index.index_files.version import RECORD, read_current
from embq.index.stages.units import Sidecar
from embq.index.workers.builds import IndexBuild, IndexStage
from embq.index.workers.hint import IndexHint
from embq.retrieval.searching.query import Query, json_object
from embq.retrieval.serving.embeddings.api import EmbeddingApi
from embq.retrieval.serving.requests import KnnRequest, RowsRequest
from embq.retrieval.ui.search_state import SearchState
from embq.sources.formats.tar_headers import walk
from embq.worker.embedders.image.decoding import open_image
from embq.worker.embedders.image.native import native
from embq.worker.embedders.image.preprocess import Fit
from embq.worker.embedders.registry import load
from embq.writer.accept import Acceptor, Rejected, Sender, read_fields
from tests.support.outputs.build import build, published, write_jsonl
from tests.support.outputs.index import build_index
from tests.support.picture_files import encoded

REFUSALS = (EmbqError, SampleError, Rejected, NoSuchJobError)
"""Exceptions that a reader may raise, whatever it is given."""
RUN = "0123456789abcdef"


@dataclass(frozen=True, slots=True)
class Border:
    """One reader.

    Attributes:
        read: raises one of `REFUSALS` for what it does not take.
        seeds: what it takes.
    """

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


def survives(border: Border, data: bytes) -> bool:
    """True if the reader takes the data; any exception but a refusal is an error of the reader."""
    try:
        border.read(data)
    except REFUSALS:
        return False
    return True


@cache
def borders() -> dict[str, Border]:
    """All of them, by name."""
    return {**_of_the_broker(), **_of_folders(), **_of_the_network(), **_of_samples()}


@cache
def small_output() -> Path:
    """An output folder of two units of three texts, with an index; removed by `forget`."""
    folder = Path(tempfile.mkdtemp(prefix="embq-borders-"))
    source = write_jsonl(folder / "in.jsonl", [{"id": str(n), "text": f"text {n}"} for n in range(6)])
    build(folder / "out", [source])
    build_index(folder / "out", output="text")
    return folder / "out"


def forget() -> None:
    """Remove what `borders` wrote."""
    if small_output.cache_info().currsize:
        shutil.rmtree(small_output().parent, ignore_errors=True)


# --- the broker ---


def _of_the_broker() -> dict[str, Border]:
    info, manifest = load_run(small_output()), Manifest(Layout(small_output()))
    unit = manifest.unit(0)
    record = RunRecord(run=RUN, output="/out/a", model=info.model, units=2, rows=info.rows)
    file = UploadFile(path="run.json", bytes=3, sha256="ab" * 32, mtime_ns=1)
    upload = Upload(run=RUN, output="/out/a", record=record.to_json(), files=(file,))
    entry = published(0, unit, info, load(info.model, "cpu"))
    body = {"v": VERSION, "run": RUN, "gen": "1-0", "u": 0}
    step = {**body, "run": 2 * RUN, "unit": {"kind": "sample", "n": 1}}
    service = Service(name="worker.a.1", role="worker", host="a", pid=1, version="0")
    rate = {"device": "cpu", "rows_per_s": 1.5, "dims": 8}
    build = IndexBuild(index="/index", build="ab", folder="/index/_work", nonce="cd", memory_bytes=1)
    stage = IndexStage(build=build, stage="add", run=2 * RUN)
    acceptor = partial(Acceptor, Layout(small_output()), manifest, info, fingerprint="", widths={})
    fields = {name: value.decode() for name, value in entry.fields.items() if name != "data"}

    def hint(form: Any, data: bytes) -> object:
        job = HintJob.__new__(HintJob)
        job._id = "x"
        job.plain = data
        return form.from_job(job)

    def fields_of(data: bytes) -> object:
        told = {name.decode("utf-8", "replace"): value for name, value in _hash(data).items()}
        found = Entry("0-1", {**told, "data": entry.fields["data"]})
        if read_fields(Sender, found).u >= len(manifest):
            raise Rejected("bad_result", "no such unit")  # the writer looks at this first
        return acceptor().accept(found)

    return {
        "job": Border(partial(hint, Hint), (_json([HINT_FUNCTION, None, [{**body, "unit": unit.describe()}], {}]),)),
        "job of an index": Border(partial(hint, IndexHint), (_json([INDEX_HINT_FUNCTION, None, [step], {}]),)),
        "job, packed": Border(_restored, (zlib.compress(_json([HINT_FUNCTION, None, [{}], {}])),)),
        "run record": Border(RunRecord.from_json, (record.to_json().encode(),)),
        "stage of an index": Border(IndexStage.from_json, (stage.to_json().encode(),)),
        "report of a service": Border(
            partial(wire.read, Service, what="service report"), (wire.write(service).encode(),)
        ),
        "rate": Border(lambda data: wire.read(Rate, data, what="rate"), (_json(rate),)),
        "upload": Border(Upload.from_json, (upload.to_json().encode(),)),
        "piece of an upload": Border(_piece, (zlib.compress(b"text" * 100),)),
        "state of an upload": Border(
            lambda data: uploads.state(SimpleNamespace(hgetall=lambda _: _hash(data)), RUN),  # type: ignore[arg-type]
            (_json({"taken": "3", "sent": "1", "why": "", "end": "accepted", "units": "2"}),),
        ),
        "queue of a run": Border(
            lambda data: wire.read_hash(Backlog, _hash(data), what="queue of a run"),
            (_json({"state": "running", "priority": "10", "cursor": "1", "total": "2", "bytes": "0"}),),
        ),
        "fields of a result": Border(fields_of, (_json(fields),)),
        "result": Border(
            lambda data: acceptor().accept(Entry("0-1", {**entry.fields, "data": data})), (entry.fields["data"],)
        ),
    }


def _restored(data: bytes) -> object:
    job = HintJob.__new__(HintJob)
    job._id = "x"
    return job.restore({b"data": data})


def _piece(data: bytes) -> object:
    return uploads.piece(SimpleNamespace(hget=lambda *_: data), RUN, 0)  # type: ignore[arg-type]


def _hash(data: bytes) -> dict[bytes, bytes]:
    """A hash of the broker out of an object of JSON; of anything else one with a single field."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return {b"state": data}
    return {
        name.encode("utf-8", "surrogatepass"): str(value).encode("utf-8", "surrogatepass")
        for name, value in found.items()
    }


# --- output folders and indices ---


def _of_folders() -> dict[str, Border]:
    root = small_output()
    layout = Layout(root)
    record = sorted(layout.commits.glob("*.json"))[1]
    checkpoint.save(layout, CommitLog(layout).replay(2))
    (kept,) = layout.writer.glob("checkpoint*.json")
    (index,) = (root / "index").iterdir()
    payload = File(path="files/a", bytes=1, sha256="ab" * 32)
    sidecar = Sidecar(
        digest="ab",
        files={"lists": payload},
        stats={},
        seconds=1.0,
        cpu_seconds=1.0,
        peak_rss_bytes=1,
        versions={},
        worker="",
    )
    version = index / (index / "CURRENT").read_text().strip() / RECORD
    return {
        "run.json": _file(layout.run_json, lambda: load_run(root)),
        "manifest": _file(next(layout.manifest.glob("*.parquet")), lambda: _units(Manifest(layout))),
        "commit record": Border(lambda data: commits.Commit.parse(data, record.name), (record.read_bytes(),)),
        "commit record, resealed": Border(
            lambda data: commits.Commit.parse(_resealed(data), record.name), (record.read_bytes(),)
        ),
        "commit log": _file(record, lambda: CommitLog(layout).replay(2), _resealed),
        "checkpoint, resealed": _file(kept, lambda: checkpoint.load(layout, 2), _resealed),
        "version of an index": _file(version, lambda: read_current(index)),
        "current version of an index": _file(index / "CURRENT", lambda: read_current(index)),
        "sidecar of an index": Border(
            lambda data: from_json(Sidecar, wire.read(dict[str, Any], data, what="sidecar"), "sidecar"),
            (_json(to_json(sidecar)),),
        ),
        **{f"part of a worker, {name}": _part_of_a_worker(name) for name in UNIT_FORMATS},
    }


def _part_of_a_worker(format: str) -> Border:
    schema = row_schema(("text",), {"text": 4}, RowSpec()).append(pa.field("unit_id", pa.string()))
    values = {"ordinal": range(3), "key": ["a", "b", "c"], "embedding": [[0.0] * 4] * 3}
    arrays = [pa.array(values.get(field.name, ["x"] * 3), field.type) for field in schema]
    into = io.BytesIO()
    write_unit(format, pa.Table.from_arrays(arrays, schema=schema), HashingFile(into), {})

    def reads(data: bytes) -> object:
        try:
            return read_unit(format, io.BytesIO(data), schema, most_rows=3)
        except FORMAT_ERRORS as error:
            raise Rejected("bad_result", str(error)) from error

    return Border(reads, (into.getvalue(),))


def _units(manifest: Manifest) -> object:
    return [*manifest], [*manifest.ids()], manifest.sizes_left(b"\0")


def _file(path: Path, read_it: Callable[[], object], seal: Callable[[bytes], bytes] = bytes) -> Border:
    """A reader of a file; the file is afterwards what it was."""
    before = path.read_bytes()

    def reads(data: bytes) -> object:
        path.write_bytes(seal(data))
        try:
            return read_it()
        finally:
            path.write_bytes(before)

    return Border(reads, (before,))


def _resealed(data: bytes) -> bytes:
    """An object of JSON under the hash that its content has; anything else as it is."""
    try:
        body = json.loads(data)
        body.pop("sha256", None)
        digest = hashlib.sha256(canonical_json(body).encode()).hexdigest()
        return canonical_json({**body, "sha256": digest}).encode()
    except (ValueError, AttributeError, TypeError, RecursionError):
        return data


# --- the network ---


def _of_the_network() -> dict[str, Border]:
    image = base64.b64encode(_encoded("PNG")).decode()
    asked = (
        {"text": "a red car", "num_images": 3, "indice_name": "a", "modality": "image", "num_result_ids": 9},
        {"image": image},
        {"embedding_input": [0.5, -1.0], "deduplicate": True, "use_safety_model": False},
    )
    return {
        "body of a search": Border(lambda data: KnnRequest.from_json(_body(data)), tuple(map(_json, asked))),
        "body of a query": Border(
            lambda data: Query.from_json(_body(data)),
            tuple(
                map(
                    _json,
                    (
                        {"text": "x", "k": 3, "index": "a"},
                        {"vector": [0.5, -1.0], "refine": False},
                        {"id": 7, "where": [["year", ">=", 2020], ["label", "in", ["a", "b"]]], "offset": 50},
                        {"like": [3, 5], "unlike": [8], "where": [["score", "<", 0.5], ["flag", "=", True]]},
                    ),
                )
            ),
        ),
        "body of a look-up": Border(
            lambda data: RowsRequest.from_json(_body(data)), (_json({"ids": [1, 2], "indice_name": "a"}),)
        ),
        "body of embeddings": Border(
            lambda data: _embedding_api()._openai(json_object(_body(data))),
            (_json({"input": ["a", "b"], "model": "m", "dimensions": 4, "encoding_format": "base64"}),),
        ),
        "body of texts to embed": Border(
            lambda data: _embedding_api()._tei(json_object(_body(data))),
            (_json({"inputs": "a", "normalize": False, "truncate": True}),),
        ),
        "condition": Border(
            lambda data: Condition.parse(data.decode("utf-8", "replace")), (b"year >= 2020", b'label in ["a", "b"]')
        ),
        "address of a page": Border(
            lambda data: SearchState.from_address(QueryParams(data.decode("latin1"))).href,
            (b"q=a+red+car&index=a:image&where=year+%3E+3&offset=50", b"id=7&like=3,5&unlike=8"),
        ),
        "model": Border(
            lambda data: ModelSpec.parse(data.decode("utf-8", "replace")),
            (b"st:a/b?prompt_name=query&tokens=64", b"stub:8"),
        ),
        "target of an export": Border(_target, (b"tsv out", b"hf out")),
    }


@cache
def _embedding_api() -> EmbeddingApi:
    api = EmbeddingApi(())
    api._models["m"] = cast("Any", SimpleNamespace(name="m", dim=8, spec=ModelSpec.parse("stub:8")))
    return api


def _target(data: bytes) -> object:
    kind, _, destination = data.decode("utf-8", "replace").partition(" ")
    return target_of(kind, destination, "t")


def _body(data: bytes) -> object:
    """As `embq.retrieval.serving.app` parses it."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EmbqError("no JSON") from error


# --- samples ---


def _of_samples() -> dict[str, Border]:
    formats = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "AVIF")
    found = {"image": Border(_image, tuple(map(_encoded, formats)))}
    if native() is not None:
        found["image, by embq-native"] = Border(
            _in_a_thread(_prepared), tuple(_encoded("JPEG", size) for size in ((24, 16), (300, 200)))
        )
        found["archive, by embq-native"] = Border(
            _walked, tuple(map(_archive, (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)))
        )
    return found


def _in_a_thread(read: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """The same in a new thread: the memory that the library keeps for one could hide that it reads too far."""

    def read_in_a_thread(data: bytes) -> object:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(read, data).result()

    return read_in_a_thread


def _walked(data: bytes) -> object:
    made = bytearray(data)
    for at in range(0, len(made) - 511, 512):
        if made[at + 257 : at + 262] == b"ustar":  # with the right checksum, or nothing behind that would be reached
            made[at + 148 : at + 156] = b" " * 8
            made[at + 148 : at + 156] = b"%06o\0 " % sum(made[at : at + 512])
    found = walk(bytes(made), "a.tar", 100)
    if found.damage is not None:
        raise found.damage
    return found


def _archive(form: int) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=form) as tar:
        for number, size in enumerate((3, 0, 512, 700)):
            member = tarfile.TarInfo(f"folder/{number}.jpg")
            member.size, member.mtime = size, 1_700_000_000 + number / 4
            tar.addfile(member, io.BytesIO(bytes(size)))
    return made.getvalue()


def _prepared(data: bytes) -> object:
    library = native()
    assert library is not None
    library.sides(*library.buffers([data]))
    sides = (("shortest", "bicubic", 16), ("squash", "bilinear", 8))
    fits = [Fit(height=side, width=side, mode=mode, interpolation=kind) for mode, kind, side in sides]
    rows = [np.empty((1, fit.height, fit.width, 3), np.uint8) for fit in fits]
    if any(library.prepare([data], fits, rows, fast=True)):
        raise SampleError("unidentified", "no plain JPEG")
    return rows


def _image(data: bytes) -> object:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # as `quiet_pillow` has it in a worker
        return open_image(data)


def _encoded(format: str, size: tuple[int, int] = (24, 16)) -> bytes:
    return encoded(Image.radial_gradient("L").resize(size).convert("RGB"), format)


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
