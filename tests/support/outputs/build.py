"""Output folders built without a broker: planned, read, embedded and committed by embq's own code, then damaged."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embq.core.errors import SampleError, SourceError
from embq.core.models import ModelConfig
from embq.core.queue.keys import VERSION
from embq.core.queue.result_stream import Entry
from embq.core.rows.results import ResultDecoder, embedding_columns, encode_result, row_schema
from embq.core.rows.spec import RowSpec
from embq.core.rows.vectors import similarities, stored
from embq.core.run.commit_log import CommitLog
from embq.core.run.commits import Commit
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import RunInfo, load_run
from embq.core.storage.paths import Place
from embq.core.units import Failure, Sample, Unit
from embq.producer.enqueue import Request, prepare
from embq.sources.reader_options import ReadOptions
from embq.sources.unit_reader import read
from embq.worker.embedders.base import Embedder
from embq.worker.embedders.registry import load
from embq.writer.accept import Accepted, Acceptor
from embq.writer.commit import Committer

# --- inputs ---


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], format_: int = tarfile.PAX_FORMAT) -> Path:
    """A shard of regular members, whose names may be anything in the PAX format."""
    with tarfile.open(path, "w", format=format_) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def write_folder(path: Path, files: dict[str, bytes]) -> Path:
    """A folder of files, with the folders they need."""
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def write_log(root: Path, service: str, *lines: str) -> None:
    """Lines at the end of the log of a service of a run."""
    (root / "_logs").mkdir(exist_ok=True)
    with open(root / "_logs" / f"{service}.log", "a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


def write_jsonl(path: Path, lines: Sequence[object]) -> Path:
    """A file of lines: bytes as they are, anything else as JSON."""
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return path


# --- outputs ---


def request_of(root: Place, *inputs: Path | str, **changes: Any) -> Request:
    """A request for units of 3 samples through the stub model in fp32, with what `changes` asks for otherwise."""
    usual: dict[str, Any] = {
        "models": ("stub:8",),
        "modalities": (),
        "precision": "fp32",
        "part_rows": 1000,
        "options": ReadOptions(unit_samples=3),
        "version": "0",
    }
    return Request(inputs=tuple(map(str, inputs)), output=root, **usual | changes)


def build(
    root: Path,
    inputs: Sequence[Path | str],
    *,
    model: str | tuple[str, ...] = "stub:8",
    modalities: tuple[str, ...] = (),
    rows: RowSpec = RowSpec(),  # noqa: B008 - it is frozen
    format: str = "parquet",
    unit_samples: int = 3,
    units_per_commit: int = 2,
    only: int | None = None,
    loaded: Callable[[ModelConfig, str], Embedder] = load,
    metadata_columns: tuple[str, ...] = (),
    image_column: str = "",
    damaged: str = "",
) -> Path:
    """An output folder as a run leaves it: a fence, the data, and, unless `only` that many units are done, a close.

    Args:
        loaded: gives the model on a device.
    """
    request = request_of(
        root,
        *inputs,
        models=(model,) if isinstance(model, str) else model,
        modalities=modalities,
        rows=rows,
        format=format,
        options=ReadOptions(
            unit_samples=unit_samples, metadata_columns=metadata_columns, image_column=image_column, damaged=damaged
        ),
    )
    info = prepare(request).info
    layout, manifest = Layout(root), Manifest(Layout(root))
    embedder = loaded(info.model, "cpu")
    log = CommitLog(layout)
    committer = Committer(layout, info, log, log.replay(info.units), writer="w1", version="0")
    committer.take_epoch()
    committer.fingerprint = embedder.fingerprint
    wanted = range(info.units if only is None else only)
    for at in wanted[::units_per_commit]:
        numbers = wanted[at : at + units_per_commit]
        committer.commit([accepted(u, manifest.unit(u), info, embedder) for u in numbers])
    if only is None:
        committer.close({})
    return root


def go_on(root: Place) -> None:
    """Do what is left of a run: read, embed, through the writer's own checks, commit each unit by itself, close."""
    info, manifest = load_run(root), Manifest(Layout(root))
    log = CommitLog(Layout(root))
    state = log.replay(info.units)
    embedder = load(info.model, "cpu")
    committer = Committer(Layout(root), info, log, state, writer=f"w{state.epoch + 1}", version="0")
    committer.take_epoch()
    committer.fingerprint = embedder.fingerprint
    acceptor = Acceptor(Layout(root), manifest, info, fingerprint=embedder.fingerprint, widths=state.widths)
    for u in (u for u in range(info.units) if not state.is_done(u)):
        committer.commit([acceptor.accept(published(u, manifest.unit(u), info, embedder))])
    committer.close({})


def published(u: int, unit: Unit, info: RunInfo, embedder: Embedder) -> Entry:
    """A unit's result, as a worker publishes it."""
    samples, failures, data, _ = embedded(unit, info, embedder)
    fields: dict[str, object] = {
        "u": u,
        "token": "1-0:worker:0",
        "v": VERSION,
        "unit_id": unit.unit_id,
        "rows": samples,
        "failures": failures,
        "fingerprint": embedder.fingerprint,
        "bytes": len(data),
    }
    return Entry("0-1", {**{name: str(value).encode() for name, value in fields.items()}, "data": data})


def accepted(u: int, unit: Unit, info: RunInfo, embedder: Embedder) -> Accepted:
    """A unit's result, as a worker would publish it and the writer would accept it."""
    _, _, data, schema = embedded(unit, info, embedder)
    result = ResultDecoder(schema).decode(data)
    whole = result.failures["ordinal"].null_count > 0
    return Accepted(
        entry="0-1",
        u=u,
        unit_id=unit.unit_id,
        token="1",
        rows=result.rows,
        failures=result.failures,
        quarantined=str(result.failures["code"][0]) if whole else "",
        staged="",
        bytes=len(data),
    )


def embedded(unit: Unit, info: RunInfo, embedder: Embedder) -> tuple[int, int, bytes, pa.Schema]:
    """Rows and failures of a unit's result, the result, and the schema of its rows."""
    attempt = 1 if unit.retry is None else unit.retry.attempts + 1
    samples: list[Sample] = []
    failures: list[Failure] = []
    prepared = []
    try:
        for sample in read(unit, (), texts="text" in info.model.modalities):
            answer = SampleError(*sample.error) if sample.error else embedder.prepare([sample])[0]
            if isinstance(answer, SampleError):
                problem = Failure(
                    ordinal=sample.ordinal, key=sample.key, code=answer.code, message=str(answer), attempt=attempt
                )
                failures.append(problem)
            else:
                samples.append(sample)
                prepared.append(answer)
    except SourceError as error:
        samples, prepared = [], []
        failures = [Failure(ordinal=None, key="", code=error.code, message=error.message, attempt=attempt)]
    made = embedder.embed(prepared) if prepared else {m: np.empty((0, d)) for m, d in embedder.dims.items()}
    outputs = info.model.output_names
    columns = zip(embedding_columns(outputs), outputs, strict=True)
    vectors = {name: stored(made[output], info.rows)[0] for name, output in columns}
    compared = info.model.compared if info.rows.similarity else {}
    vectors |= {name: similarities(made[image], made[text])[0] for name, (image, text) in compared.items()}
    schema = row_schema(outputs, embedder.dims, info.rows, compared=tuple(compared))
    data = encode_result(samples, vectors, failures, schema, info.rows.columns)
    return len(samples), len(failures), data, schema


# --- damage ---


def records(root: Path) -> list[Commit]:
    """The commit records."""
    return list(CommitLog(Layout(root)).read())


def record_path(root: Path, n: int) -> Path:
    """The file of record `n`."""
    return Layout(root).commits / f"{n:08d}.json"


def reseal(root: Path, change: Callable[[Commit], Commit], *, chain: bool = True, totals: bool = True) -> None:
    """Change records, and make everything that depends on the change right again.

    Args:
        chain: mend the hashes of the records before.
        totals: add the totals up anew.
    """
    previous = ""
    sums = {"units": 0, "rows": 0, "failures": 0, "quarantined": 0}
    for commit in records(root):
        changed = change(commit)
        sums["units"] += len(changed.units)
        sums["rows"] += sum(unit.rows for unit in changed.units)
        sums["failures"] += sum(unit.failures for unit in changed.units)
        sums["quarantined"] += sum(bool(unit.quarantined) for unit in changed.units)
        if chain:
            changed = replace(changed, prev=previous)
        if totals:
            changed = replace(changed, totals=dict(sums))
        data, previous = changed.seal()
        record_path(root, commit.n).write_bytes(data)


def data_record(root: Path, kind: str = "rows") -> Commit:
    """The first record that names a file of `kind`."""
    return next(commit for commit in records(root) if any(file.kind == kind for file in commit.files))


def file_path(root: Path, kind: str = "rows") -> Path:
    """The first committed file of `kind`."""
    return root / next(file.path for file in data_record(root, kind).files if file.kind == kind)


def rewrite(root: Path, change: Callable[[pa.Table], pa.Table], kind: str = "rows") -> None:
    """Change the first committed file of `kind`, and give its record the new size, hash and number of rows."""
    path = file_path(root, kind)
    table = change(pq.read_table(path))
    pq.write_table(table, path)
    content = path.read_bytes()
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "rows": table.num_rows}

    def with_new_hash(commit: Commit) -> Commit:
        files = [replace(f, **facts) if (root / f.path) == path else f for f in commit.files]
        return replace(commit, files=tuple(files))

    reseal(root, with_new_hash)


def set_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    """`table` with another content of one column, everything else as it was."""
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(name), values)
