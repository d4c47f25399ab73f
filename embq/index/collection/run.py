"""Collection of the rows of an embq run, in any format: its parts are those that commit records name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embq.core.errors import InputError, OutputError
from embq.core.formats.base import READ_ROWS, vectors
from embq.core.formats.part import Part, opened
from embq.core.models import VectorOutput, has_unit_length
from embq.core.rows.metadata import column_in_file, column_in_index
from embq.core.rows.results import embedding_columns, metadata_fields
from embq.core.rows.spec import RowSpec
from embq.core.rows.vectors import restored
from embq.core.run.checkpoint import committed
from embq.core.run.commit_log import committed_parts
from embq.core.run.commits import CommittedFile
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import RunInfo
from embq.core.storage.beneath import below
from embq.core.storage.paths import Place, place
from embq.index.collection.parts import IDENTITY, FileRef, PartRef, Piece, damaged, no_embeddings

GAP_ROWS = {".npy": 256, ".h5": 1_024, ".parquet": 65_536}
"""Rows that are so close are read in one go, by the suffix of the file: a whole group of rows if it has such."""


def describe_run(root: Place, *, output: str | None, column: str | None) -> dict[str, Any]:
    """The fields of the collection that a run's rows are, see `Collection`.

    Args:
        output: name of the output whose vectors are indexed, where a row has several.
        column: the same by the name of its column.

    Raises InputError if the run has no rows, or has several outputs and none is named; OutputError if a record is
    damaged.
    """
    info, state = committed(root)
    columns = dict(zip(info.model.output_names, embedding_columns(info.model.output_names), strict=True))
    chosen = _choose_output(info, columns, output, column)
    parts = tuple(_part(files) for files in committed_parts(root))
    expected = 0
    for part in parts:
        if part.first_id != expected:
            raise OutputError(f"{root}: ids go on with {part.first_id} after {expected - 1}", code="commit_damaged")
        expected += part.rows
    if not parts:
        raise no_embeddings(
            f"{root} holds no rows: {state.count:,} of its {info.units:,} units are done, with {state.failures:,} "
            "failures",
            next_step="wait for the run, or see what failed with `embq failures`",
        )
    width = state.widths[columns[chosen.name]]
    return {
        "kind": "run",
        "column": columns[chosen.name],
        "output": chosen.name,
        "dim": width * 8 if info.rows.dtype == "binary" else width,
        "rows_spec": info.rows.describe(),
        "model": {
            **info.model.describe(),
            "output": {"name": chosen.name, "spec": chosen.spec, "modality": chosen.modality},
        },
        "fingerprint": state.fingerprint or None,
        "run": info.run,
        "unit_length": _unit_length(info.rows, chosen),
        "id_columns": _metadata(info),
        "query_columns": {other: columns[name] for other, name in _partners(info, chosen).items()},
        "parts": parts,
        "complete": state.closed,
    }


def describe_runs(folders: Mapping[str, Place], *, output: str | None, column: str | None) -> dict[str, Any]:
    """The fields of the collection that the rows of several runs are: those of the first, then those of the next.

    Args:
        folders: path below the root of the collection -> output folder.

    Raises InputError `mixed_embeddings` if the rows of two runs are not alike, and as `describe_run` does.
    """
    runs = {folder: describe_run(root, output=output, column=column) for folder, root in folders.items()}
    (first, expected), *rest = runs.items()
    for folder, other in rest:
        for name in ("fingerprint", "column", "dim", "rows_spec", "id_columns"):
            if other[name] != expected[name]:
                if name == "fingerprint":
                    specs = [run["model"]["output"]["spec"] or run["model"]["spec"] for run in (expected, other)]
                    if specs[0] != specs[1]:
                        raise InputError(
                            f"{folders[first]} and {folders[folder]} cannot be one index: the one has vectors of "
                            f"{specs[0]}, the other of {specs[1]}",
                            next_step="index them apart; `embq serve` answers from several indexes",
                            code="mixed_embeddings",
                        )
                raise InputError(
                    f"{folders[first]} and {folders[folder]} cannot be one index: {name} is {expected[name]!r} in the "
                    f"one and {other[name]!r} in the other",
                    next_step="index them apart; `embq serve` answers from several indexes",
                    code="mixed_embeddings",
                )
    parts: list[PartRef] = []
    for folder, run in runs.items():
        for part in run["parts"]:
            files = tuple(replace(file, path=f"{folder}/{file.path}") for file in part.files)
            rows = parts[-1].first_id + parts[-1].rows if parts else 0
            parts.append(PartRef(files=files, rows=part.rows, first_id=rows))
    return {**expected, "run": None, "parts": tuple(parts), "complete": all(run["complete"] for run in runs.values())}


def _choose_output(info: RunInfo, columns: dict[str, str], output: str | None, column: str | None) -> VectorOutput:
    by_name = {spec.name: spec for spec in info.model.outputs}
    by_column = {columns[name]: spec for name, spec in by_name.items()}
    for what, given, available in (("output", output, by_name), ("column of vectors", column, by_column)):
        if given is not None and given not in available:
            raise InputError(
                f"the run has no {what} {given!r}: it has {', '.join(available)}",
                next_step="name one of these",
                code="which_output",
            )
    if output is not None:
        if column is not None and columns[output] != column:
            raise InputError(
                f"output {output!r} is in column {columns[output]!r}, not in {column!r}",
                next_step="name one of the two",
                code="which_output",
            )
        return by_name[output]
    if column is not None:
        return by_column[column]
    if len(by_name) == 1:
        return next(iter(by_name.values()))
    if not info.model.members and set(by_name) == {"image", "text"}:
        return by_name["image"]
    raise InputError(
        f"each row has {len(by_name)} vectors, and an index holds one of them: {', '.join(by_name)}",
        next_step="choose one with --vector-name NAME",
        code="which_output",
    )


def _part(files: Sequence[CommittedFile]) -> PartRef:
    refs = tuple(
        FileRef(path=file.path, bytes=file.bytes, sha256=file.sha256, kind=file.kind, column=file.column)
        for file in files
    )
    (rows,) = [file for file in files if file.kind == "rows"]
    return PartRef(files=refs, rows=rows.rows, first_id=rows.first_id)


def _partners(info: RunInfo, chosen: VectorOutput) -> dict[str, str]:
    """Modality -> name of the other output of the same joint model, whose vectors can be queries."""
    for image, text in info.model.compared.values():
        if chosen.name == image:
            return {"text": text}
        if chosen.name == text:
            return {"image": image}
    return {}


def _unit_length(rows: RowSpec, output: VectorOutput) -> bool | None:
    """True or False by the options of the run and its model; None if only the vectors show it."""
    if rows.dtype == "binary":  # as many numbers of 1 and -1 as there are
        return False
    if rows.unit_length:
        return True
    return True if rows.normalize is None and has_unit_length(output.spec) else None


def _metadata(info: RunInfo) -> tuple[str, ...]:
    compared = tuple(info.model.compared) if info.rows.similarity else ()
    passages = () if info.model.chunking is None else ("document", "chunk", "chunks", "char_start", "char_end")
    names = (*compared, *passages, *(field.name for field in metadata_fields(info.rows)))
    return tuple(map(column_in_index, names))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReader:
    """See `embq.index.collection.parts.PartReader`.

    Args:
        root: output folder of the run, or what the folders of several are in.
        folders: of several runs, below `root`; else ().
        rows_spec: `RowSpec.describe()` of the run.
        id_columns: columns of metadata, as they are called in the identity.
    """

    root: str
    folders: Sequence[str]
    rows_spec: dict[str, Any]
    id_columns: Sequence[str]

    def vectors(self, part: PartRef, column: str, start: int, stop: int) -> Iterator[np.ndarray]:
        """See `PartReader`; stored numbers are restored to floats."""
        rows = RowSpec.from_description(self.rows_spec)
        for table in self._tables(part, [column], start, stop):
            yield restored(vectors(table, column), rows)

    def gap_rows(self, part: PartRef, column: str) -> int:
        """See `PartReader`."""
        file = next((file for file in part.files if file.column == column), part.files[0])
        return GAP_ROWS.get(PurePath(file.path).suffix, READ_ROWS)

    def identity(self, pieces: Sequence[Piece]) -> Iterator[pa.Table]:
        """See `PartReader`. Reads the ids of units first, for the sources of all of them."""
        units: dict[str, set[str]] = {}
        for part, start, stop in pieces:
            for table in self._tables(part, ["unit_id"], start, stop):
                units.setdefault(self._folder(part), set()).update(pc.unique(table["unit_id"]).to_pylist())
        root = place(self.root)
        sources = {run: Manifest(Layout(below(root, run) if run else root)).sources(ids) for run, ids in units.items()}
        for part, start, stop in pieces:
            columns = ["key", "caption", "unit_id", *map(column_in_file, self.id_columns)]
            for table in self._tables(part, columns, start, stop):
                yield self._identity(table, sources[self._folder(part)])

    def run_of(self, part: PartRef) -> Place:
        """Output folder of the run that a part is of."""
        folder = self._folder(part)
        return below(place(self.root), folder) if folder else place(self.root)

    def ordinal(self, part: PartRef, row: int) -> int:
        """The ordinal of a row; raises InputError as `vectors` does."""
        (scalar,) = (value for table in self._tables(part, ["ordinal"], row, row + 1) for value in table["ordinal"])
        return int(scalar.as_py())

    def _folder(self, part: PartRef) -> str:
        """The folder of the run that a part is of; "" for the root."""
        return next((folder for folder in self.folders if part.files[0].path.startswith(f"{folder}/")), "")

    def _identity(self, table: pa.Table, sources: Mapping[str, str]) -> pa.Table:
        units = table["unit_id"].cast(pa.string()).combine_chunks().dictionary_encode()
        units = units.combine_chunks() if isinstance(units, pa.ChunkedArray) else units
        names = pa.array([sources.get(unit) for unit in units.dictionary.to_pylist()], pa.string())
        names, indices = names.dictionary_encode(), units.indices.cast(pa.int32())
        by_name = {
            "key": table["key"].cast(pa.string()),
            "caption": table["caption"].cast(pa.string()),
            "source": pa.DictionaryArray.from_arrays(names.indices.cast(pa.int32()).take(indices), names.dictionary),
            "unit_id": pa.DictionaryArray.from_arrays(indices, units.dictionary),
        }
        fields = list(IDENTITY[1:])
        for name in self.id_columns:
            by_name[name] = table[column_in_file(name)]
            fields.append(table.schema.field(column_in_file(name)).with_name(name))
        return pa.Table.from_arrays([by_name[field.name] for field in fields], schema=pa.schema(fields))

    def _tables(self, part: PartRef, columns: Sequence[str], start: int, stop: int) -> Iterator[pa.Table]:
        root = place(self.root)
        files = [
            CommittedFile(
                path=file.path,
                kind=file.kind,
                rows=part.rows,
                bytes=file.bytes,
                sha256=file.sha256 or "",
                column=file.column,
            )
            for file in part.files
        ]
        try:
            with opened(root, files) as stored:
                _check(stored, part, columns)
                yield from stored.tables(columns, start, stop)
        except OutputError as error:
            if error.code not in ("part_missing", "part_damaged"):
                raise
            raise InputError(error.message, next_step=error.next_step, code=error.code) from error


def _check(stored: Part, part: PartRef, columns: Sequence[str]) -> None:
    if set(stored.rows) != {part.rows}:
        raise damaged(part.files[0].path, f"it has {stored.rows[0]:,} rows, its record says {part.rows:,}")
    if absent := [name for name in columns if name not in stored.schema.names]:
        raise damaged(part.files[0].path, f"it has no column {', '.join(absent)}")
