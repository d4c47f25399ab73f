"""A second opinion on an output folder: reads the files as they are, and shares no code with embq.

The vectors of the stub model are computed here anew from its description (two little-endian bytes per dimension of
SHAKE-256 of the sample's bytes; the lowest 11 bits b of each become (2 b - 2047) / 2048), so that one comparison
proves which bytes a row was computed from.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def stub(data: bytes, dim: int) -> list[float]:
    """The vector that the stub gives to `data`; exact in float16 and float32."""
    digest = hashlib.shake_256(data).digest(2 * dim)
    words = [int.from_bytes(digest[2 * i : 2 * i + 2], "little") & 2047 for i in range(dim)]
    return [(2 * word - 2047) / 2048 for word in words]


@dataclass(slots=True)
class Output:
    """Content of an output folder, as read by this checker.

    Attributes:
        records: commit records in order.
        rows: all rows in order of their ids.
        failures: (unit_id, ordinal, key, code) of every failure that no later retry has taken the place of.
        manifest: unit ids of the manifest, in order.
        ends: number of units after each generation of the manifest.
        retries: index -> what a unit does again, for those that do.
    """

    root: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    rows: pa.Table | None = None
    failures: list[tuple[str, int | None, str, str]] = field(default_factory=list)
    manifest: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    retries: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def tokens(self) -> dict[str, str]:
        """Unit id -> token of the attempt that was committed."""
        return {unit["unit_id"]: unit["token"] for record in self.records for unit in record["units"]}

    @property
    def keys(self) -> list[str]:
        """The key of every row."""
        return [] if self.rows is None else self.rows["key"].to_pylist()

    def row_set(self) -> dict[str, tuple[tuple[float, ...], ...]]:
        """Key -> embeddings of its row, for comparing two outputs."""
        assert self.rows is not None
        names = [name for name in self.rows.column_names if name.endswith("embedding")]
        columns = [[tuple(vector) for vector in self.rows[name].to_pylist()] for name in names]
        return dict(zip(self.keys, zip(*columns, strict=True), strict=True))


def read_output(root: Path) -> Output:
    """Read an output folder; asserts what holds at every moment: the chain of records, and the files they name."""
    output = Output(root)
    output.records = _read_records(root)
    output.manifest, output.ends = _read_manifest(root)
    output.retries = _read_retries(root)
    tables = []
    failures: list[tuple[int, str, int | None, str, str]] = []
    for record in output.records:
        _check_record(root, record)
        before = len(tables)
        for file in record["files"]:
            table = pq.read_table(root / file["path"])
            assert table.num_rows == file["rows"], file
            if file["kind"] == "rows":
                first = sum(earlier.num_rows for earlier in tables)
                assert file["first_id"] == first, file
                if "id" not in table.column_names:  # a worker has written it
                    assert file["path"] == f"parts/part-{record['n']:08d}.{first:012d}.parquet"
                    ids = pa.array(range(first, first + table.num_rows), pa.int64())
                    table = table.add_column(0, "id", ids)
                tables.append(table)
            else:
                columns = [table[name].to_pylist() for name in ("u", "unit_id", "ordinal", "key", "code")]
                failures += zip(*columns, strict=True)
        if tables[before:]:
            _check_ranges(record, pa.concat_tables(tables[before:]))
    done = {unit["u"] for record in output.records for unit in record["units"]}
    again = [(u, retry, _ordinals(retry["only"])) for u, retry in output.retries.items() if u in done]
    for u, *failure in failures:
        planned = output.retries[u]["unit"] if u in output.retries else u
        if not any(
            later > u and retry["unit"] == planned and (failure[1] in ordinals or not ordinals)
            for later, retry, ordinals in again
        ):
            output.failures.append(tuple(failure))
    if tables:
        output.rows = pa.concat_tables(tables)
        assert output.rows["id"].to_pylist() == list(range(output.rows.num_rows)), "ids are not 0, 1, 2, ..."
    units = [unit["unit_id"] for record in output.records for unit in record["units"]]
    twice = [unit_id for unit_id, count in Counter(units).items() if count > 1]
    assert not twice, f"units committed twice: {twice}"
    assert set(units) <= set(output.manifest), "units that are not in the manifest"
    return output


def _read_manifest(root: Path) -> tuple[list[str], list[int]]:
    folder = root / "manifest"
    first = json.loads((root / "run.json").read_bytes())["segments"]
    ids = [id_ for name in first for id_ in pq.read_table(folder / name)["unit_id"].to_pylist()]
    ends = [len(ids)]
    for number, path in enumerate(sorted(folder.glob("gen-*.json")), start=1):
        record = json.loads(path.read_bytes())
        digest = record.pop("sha256")
        text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        assert hashlib.sha256(text.encode()).hexdigest() == digest, f"{path.name} is damaged"
        assert (record["number"], record["first"]) == (number, len(ids)), record
        added = [id_ for name in record["segments"] for id_ in pq.read_table(folder / name)["unit_id"].to_pylist()]
        assert len(added) == record["units"] > 0, record
        assert hashlib.sha256("".join(added).encode()).hexdigest()[:32] == record["digest"], record
        ids += added
        ends.append(len(ids))
    assert len(set(ids)) == len(ids), "a unit is in the manifest twice"
    return ids, ends


def _read_retries(root: Path) -> dict[int, dict[str, Any]]:
    folder = root / "manifest"
    paths = [folder / name for name in json.loads((root / "run.json").read_bytes())["segments"]]
    for record in sorted(folder.glob("gen-*.json")):
        paths += [folder / name for name in json.loads(record.read_bytes())["segments"]]
    units = [
        json.loads(text.decode("utf-8", "surrogateescape"))
        for path in paths
        for text in pq.read_table(path)["description"].to_pylist()
    ]
    return {u: unit["retry"] for u, unit in enumerate(units) if "retry" in unit}


def _ordinals(ranges: str) -> set[int]:
    """The numbers in a text such as "0-3,7"; of "12+", the rest of a shard, that of the failure that stands for it."""
    pairs = [piece.split("-") for piece in ranges.removesuffix("+").split(",") if piece]
    return {number for pair in pairs for number in range(int(pair[0]), int(pair[-1]) + 1)}


def _read_records(root: Path) -> list[dict[str, Any]]:
    names = sorted(path.name for path in (root / "commits").iterdir())
    assert names == [f"{n:08d}.json" for n in range(1, len(names) + 1)], names
    records = [json.loads((root / "commits" / name).read_bytes()) for name in names]
    previous, epoch = "", 0
    writers: dict[int, str] = {}
    for n, record in enumerate(records, start=1):
        assert record["n"] == n
        assert record["prev"] == previous, f"record {n} does not follow record {n - 1}"
        assert record["epoch"] >= epoch, f"the epoch of record {n} goes back"
        assert writers.setdefault(record["epoch"], record["writer"]) == record["writer"], "two writers in one epoch"
        previous, epoch = record["sha256"], record["epoch"]
    assert len({record["fingerprint"] for record in records} - {""}) <= 1, "rows of two models"
    return records


def _check_record(root: Path, record: dict[str, Any]) -> None:
    body = {name: value for name, value in record.items() if name != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest() == record["sha256"], f"record {record['n']} is damaged"
    for file in record["files"]:
        data = (root / file["path"]).read_bytes()
        assert len(data) == file["bytes"], file
        assert hashlib.sha256(data).hexdigest() == file["sha256"], file


def _check_ranges(record: dict[str, Any], table: pa.Table) -> None:
    """The rows of each unit follow each other where the record says, each ordinal once."""
    unit_ids, ordinals = table["unit_id"].to_pylist(), table["ordinal"].to_pylist()
    if "chunk" in table.column_names:
        ordinals = list(zip(ordinals, table["chunk"].to_pylist(), strict=True))
    end = 0
    for unit in record["units"]:
        start, stop = unit["first_row"], unit["first_row"] + unit["rows"]
        assert start == end, f"rows of {unit['unit_id']} do not follow those of the unit before"
        assert set(unit_ids[start:stop]) <= {unit["unit_id"]}
        here = ordinals[start:stop]
        assert here == sorted(set(here)), f"ordinals of {unit['unit_id']} are not in order or not unique"
        end = stop
    assert end == table.num_rows


def check_complete(
    root: Path,
    expected: Mapping[str, bytes] | Mapping[str, tuple[bytes, ...]],
    *,
    units: int,
    dim: int,
    failures: Mapping[str, str] | None = None,
    columns: tuple[str, ...] = ("embedding",),
) -> Output:
    """Assert that a finished run holds exactly what its input says, and nothing else.

    Args:
        expected: key -> the bytes that its row was computed from; a tuple where a row has several embeddings.
        units: how many units the input makes.
        dim: of the stub model.
        failures: key -> code of every sample without a row; "" is the key of a unit that failed as a whole.
        columns: the embeddings of a row.
    """
    output = read_output(root)
    assert len(output.manifest) == units
    assert sorted(output.tokens) == sorted(output.manifest), "a unit is missing"
    closed_at = [record["totals"]["units"] for record in output.records if record["kind"] == "close"]
    assert closed_at == sorted(set(closed_at)), "a log was closed twice"
    assert set(closed_at) <= set(output.ends), "a log was closed in the middle of a generation"
    assert closed_at[-1] == units
    assert output.records[-1]["kind"] == "close"

    there, wanted = Counter(output.keys), Counter(list(expected))
    failures = failures or {}
    failing = {key: code for key, code in failures.items() if key in there and key not in wanted}
    assert not failing, f"{len(failing)} have rows where failures are expected: {list(failing.items())[:5]}"
    assert wanted - there == Counter(), f"lost {sum((wanted - there).values())}: {list(wanted - there)[:5]}"
    assert there - wanted == Counter(), f"duplicated {sum((there - wanted).values())}: {list(there - wanted)[:5]}"
    if output.rows is not None:
        for position, column in enumerate(columns):
            vectors = np.array(output.rows[column].to_pylist(), dtype=np.float64)
            data = [expected[key] for key in output.keys]
            sources = [item[position] if isinstance(item, tuple) else item for item in data]
            right = np.array([stub(source, dim) for source in sources])
            misaligned = [key for key, ok in zip(output.keys, (vectors == right).all(axis=1), strict=True) if not ok]
            assert not misaligned, f"misaligned {len(misaligned)} in {column}: {misaligned[:5]}"
    failed, to_fail = Counter((key, code) for _, _, key, code in output.failures), Counter(failures.items())
    assert failed == to_fail, f"not failed: {list(to_fail - failed)[:5]}; failed: {list(failed - to_fail)[:5]}"

    totals = output.records[-1]["totals"]
    assert (totals["units"], totals["rows"]) == (units, len(output.keys))
    assert totals["failures"] == len(output.failures)
    assert totals["quarantined"] == sum(ordinal is None for _, ordinal, _, _ in output.failures)
    named = {file["path"] for record in output.records for file in record["files"]}
    on_disk = {f"{folder}/{path.name}" for folder in ("parts", "failures") for path in (root / folder).iterdir()}
    assert on_disk == named, "files that no record names"
    assert not list((root / "_tmp").iterdir()), "unfinished files are left"
    # With EMBQ_STAGING they are elsewhere.
    assert {path.name for path in root.glob("_staging/*")} <= {".shared"}, "staged results are left"
    return output
