"""`embq export`: every committed row once, in the order that was asked for, in a folder that is whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.app.cli.entry_point import run
from embq.app.export import export as exporting
from embq.app.export.export import ExportOptions, ExportResult, export
from embq.core.errors import EmbqError, Exit, InputError, OutputError
from embq.core.formats.base import vectors
from embq.core.rows.spec import FORMATS, RowSpec
from embq.core.run.commit_log import CommitLog
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.reader import row_tables
from embq.core.run.run_info import load_run
from embq.producer.retry import FailureFilter, retry
from embq.worker.embedders.registry import load
from embq.writer.commit import Committer
from tests.faults.kit.disk import SmallDisk
from tests.support.outputs.build import accepted, build, file_path, go_on, write_jsonl

LINES = [*({"id": f"k{n:03d}", "text": f"text {n}"} for n in range(40)), b"not json\n"]
PER_FILE = 12


def committed_in(root: Path, source: Path, order: Sequence[int], units_per_commit: int) -> Path:
    """An output whose units of three samples were committed in this order."""
    build(root, [source], only=0)
    info, layout, manifest = load_run(root), Layout(root), Manifest(Layout(root))
    log, embedder = CommitLog(layout), load(info.model, "cpu")
    committer = Committer(layout, info, log, log.replay(info.units), writer="w2", version="0")
    committer.take_epoch()
    committer.fingerprint = embedder.fingerprint
    for at in range(0, len(order), units_per_commit):
        committer.commit([accepted(u, manifest.unit(u), info, embedder) for u in order[at : at + units_per_commit]])
    if len(order) == info.units:
        committer.close({})
    return root


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Forty texts and a line that is none: fourteen units."""
    return write_jsonl(tmp_path / "texts.jsonl", LINES)


@pytest.fixture
def out(tmp_path: Path, source: Path) -> Path:
    """A finished run whose units were committed in no order, two or three of them in a part."""
    order = list(range(14))
    random.Random(5).shuffle(order)
    return committed_in(tmp_path / "out", source, order, 3)


def read_plainly(folder: Path, format: str) -> tuple[list[str], list[int], np.ndarray]:
    """Keys, ids and vectors in the order of the file names, by the plain library alone."""
    if format == "npy":
        tables = [pq.read_table(path) for path in sorted((folder / "metadata").iterdir())]
        matrix = np.concatenate([np.load(path) for path in sorted((folder / "text_emb").iterdir())])
        table = pa.concat_tables(tables)
        return table["key"].to_pylist(), table["id"].to_pylist(), matrix
    keys: list[str] = []
    ids: list[int] = []
    blocks: list[np.ndarray] = []
    for path in sorted((folder / "parts").iterdir()):
        if format == "hdf5":
            with h5py.File(path) as file:
                keys += file["key"].asstr()[:].tolist()
                ids += file["id"][:].tolist()
                blocks.append(file["embedding"][:])
            continue
        table = pq.read_table(path) if format == "parquet" else pa.ipc.open_file(path).read_all()
        keys += table["key"].to_pylist()
        ids += table["id"].to_pylist()
        blocks.append(np.array(table["embedding"].to_pylist()))
    return keys, ids, np.concatenate(blocks)


# --- what is in an export ---


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_holds_every_row_under_its_id_and_is_read_by_the_plain_library(
    out: Path, tmp_path: Path, format: str
) -> None:
    table = pa.concat_tables(row_tables(out))

    done = export(out, tmp_path / "plain", ExportOptions(format=format, rows_per_file=PER_FILE))

    keys, ids, matrix = read_plainly(tmp_path / "plain", format)
    assert (keys, ids) == (table["key"].to_pylist(), list(range(40)))
    assert np.array_equal(matrix, vectors(table))
    if format == "hdf5":
        with h5py.File(tmp_path / "plain" / "dataset.h5") as joined:
            assert joined["key"].asstr()[:].tolist() == keys
    assert (done.rows, done.state, done.order, done.dtype) == (40, "complete", "committed", "float16")
    assert {file["rows"] for file in done.files} == {PER_FILE, 40 % PER_FILE}
    names = {path.stem[-8:] for path in below(tmp_path / "plain") if path.parent != tmp_path / "plain"}
    assert names == {"00000000", "00000001", "00000002", "00000003"}


def below(folder: Path) -> list[Path]:
    """All files below a folder."""
    return [Path(parent) / name for parent, _, names in os.walk(folder) for name in names]


def test_the_account_names_every_file_with_its_hash(out: Path, tmp_path: Path) -> None:
    done = export(out, tmp_path / "plain", ExportOptions(format="npy"))

    account = json.loads((tmp_path / "plain" / "export.json").read_text())
    assert account["run"] == done.run == load_run(out).run
    assert {file["path"] for file in account["files"]} | {"export.json"} == {
        str(path.relative_to(tmp_path / "plain")) for path in below(tmp_path / "plain")
    }
    for file in account["files"]:
        path = tmp_path / "plain" / file["path"]
        assert path.stat().st_size == file["bytes"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file["sha256"]


@pytest.mark.parametrize("format", ["parquet", "npy"])
def test_sorted_exports_of_runs_that_committed_in_other_orders_are_equal_but_for_the_ids(
    out: Path, source: Path, tmp_path: Path, format: str
) -> None:
    other = committed_in(tmp_path / "other", source, range(14), 14)
    wish = ExportOptions(format=format, order="manifest", rows_per_file=PER_FILE)

    export(out, tmp_path / "a", wish)
    export(other, tmp_path / "b", wish)

    keys, ids, matrix = read_plainly(tmp_path / "a", format)
    assert keys == [f"k{n:03d}" for n in range(40)]
    assert ids != sorted(ids)
    assert sorted(ids) == list(range(40))
    again = read_plainly(tmp_path / "b", format)
    assert again[0] == keys
    assert np.array_equal(again[2], matrix)
    by_id = dict(zip(*[column.to_pylist() for column in pa.concat_tables(row_tables(out)).columns[:3:2]], strict=True))
    assert [by_id[id_] for id_ in ids] == keys, "a row keeps the id that it was committed with"


@pytest.mark.parametrize("window_rows", [1, 5, 7, 1000])
def test_rows_are_put_in_order_in_windows_of_any_size(
    out: Path, tmp_path: Path, window_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "FILE_BYTES", window_rows * 8 * 2)

    done = export(out, tmp_path / "plain", ExportOptions(format="parquet", order="manifest"))

    assert read_plainly(tmp_path / "plain", "parquet")[0] == [f"k{n:03d}" for n in range(40)]
    assert max(file["rows"] for file in done.files) == min(window_rows, 40)


@pytest.mark.parametrize("order", ["committed", "manifest"])
def test_rows_are_chosen_by_their_ids_in_either_order(
    out: Path, tmp_path: Path, order: Literal["committed", "manifest"]
) -> None:
    table = pa.concat_tables(row_tables(out))
    ids = np.array([3, 4, 21, 38])

    export(out, tmp_path / "plain", ExportOptions(format="parquet", order=order, ids=ids, without=np.array([4])))

    expected = table.take([3, 21, 38]).select(["key", "id"])
    expected = expected if order == "committed" else expected.sort_by("key")
    keys, exported_ids, _ = read_plainly(tmp_path / "plain", "parquet")
    assert (keys, exported_ids) == (expected["key"].to_pylist(), expected["id"].to_pylist())


def test_columns_can_be_left_out(out: Path, tmp_path: Path) -> None:
    done = export(out, tmp_path / "plain", ExportOptions(format="parquet", columns=["caption"]))

    assert done.columns == ("id", "key", "embedding", "caption")
    assert tuple(pq.read_schema(tmp_path / "plain" / "parts" / "part-00000000.parquet").names) == done.columns


def test_an_unfinished_run_is_exported_as_far_as_it_got(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = committed_in(tmp_path / "out", source, [3, 1], 1)

    assert (
        run(["export", str(out), str(tmp_path / "plain"), "--output-format", "parquet", "--sorted", "--json"])
        == Exit.DONE
    )

    said = json.loads(capsys.readouterr().out)
    assert (said["state"], said["rows"]) == ("incomplete", 6)
    assert read_plainly(tmp_path / "plain", "parquet")[0] == ["k003", "k004", "k005", "k009", "k010", "k011"]


# --- what is stored of vectors ---


def exported(tmp_path: Path, source: Path, have: str, want: str) -> np.ndarray:
    """Vectors of a run that stores `have`, as they are exported as `want`."""
    out = build(tmp_path / "out", [source], rows=RowSpec(dtype=have))
    export(out, tmp_path / "plain", ExportOptions(format="hdf5", dtype=want))
    return read_plainly(tmp_path / "plain", "hdf5")[2]


def test_float32_becomes_float16(tmp_path: Path, source: Path) -> None:
    matrix = exported(tmp_path, source, "float32", "float16")

    assert matrix.dtype == np.float16
    assert np.array_equal(matrix, vectors(pa.concat_tables(row_tables(tmp_path / "out"))).astype(np.float16))


def test_floats_become_int8_of_length_1_and_binary(tmp_path: Path, source: Path) -> None:
    matrix = exported(tmp_path, source, "float16", "int8")

    floats = vectors(pa.concat_tables(row_tables(tmp_path / "out"))).astype(np.float64)
    floats /= np.linalg.norm(floats, axis=1, keepdims=True)
    assert matrix.dtype == np.int8
    assert np.abs(matrix / 127 - floats).max() <= 0.5 / 127 + 1e-6
    export(tmp_path / "out", tmp_path / "signs", ExportOptions(format="hdf5", dtype="binary"))
    assert np.array_equal(read_plainly(tmp_path / "signs", "hdf5")[2], np.packbits(floats > 0, axis=1))


@pytest.mark.parametrize(
    ("have", "want", "format", "code"),
    [
        (RowSpec(dtype="float16"), "float32", "parquet", "dtype_lost"),
        (RowSpec(dtype="binary"), "float16", "parquet", "dtype_lost"),
        (RowSpec(dtype="binary"), "int8", "parquet", "dtype_lost"),
        (RowSpec(dtype="int8"), "", "npy", "format_dtype"),
        (RowSpec(dtype="float32"), "binary", "npy", "format_dtype"),
        (RowSpec(dtype="float32", truncate_dim=5), "binary", "parquet", "wrong_dimension"),
        (RowSpec(dtype="float32", normalize=False), "int8", "parquet", "usage"),
    ],
)
def test_what_cannot_be_made_of_what_is_stored_is_refused(
    tmp_path: Path, source: Path, have: RowSpec, want: str, format: str, code: str
) -> None:
    out = build(tmp_path / "out", [source], rows=have)

    with pytest.raises(EmbqError) as caught:
        export(out, tmp_path / "plain", ExportOptions(format=format, dtype=want))

    assert caught.value.code == code
    assert caught.value.next_step
    assert not (tmp_path / "plain").exists()


def test_int8_becomes_the_floats_that_it_stands_for(tmp_path: Path, source: Path) -> None:
    matrix = exported(tmp_path, source, "int8", "float32")

    numbers = vectors(pa.concat_tables(row_tables(tmp_path / "out"))).astype(np.float64)
    assert matrix.dtype == np.float32
    assert np.allclose(matrix, numbers / 127, atol=1e-7)


# --- the folder ---


def test_an_empty_folder_may_be_there(out: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()

    assert export(out, tmp_path / "plain", ExportOptions(format="parquet")).rows == 40


@pytest.mark.parametrize("where", ["used", "file", "out/inside"])
def test_a_folder_that_is_in_use_is_refused_and_nothing_changes(out: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.doc").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = sorted(below(tmp_path))

    with pytest.raises(InputError) as caught:
        export(out, tmp_path / where, ExportOptions(format="parquet"))

    assert caught.value.next_step
    assert sorted(below(tmp_path)) == before


def test_a_column_that_is_not_there_is_named(out: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no column mood"):
        export(out, tmp_path / "plain", ExportOptions(format="parquet", columns=["caption", "mood"]))


def test_a_run_without_rows_is_refused(source: Path, tmp_path: Path) -> None:
    out = build(tmp_path / "out", [source], only=0)

    with pytest.raises(InputError, match="no committed rows"):
        export(out, tmp_path / "plain", ExportOptions(format="parquet"))


@pytest.mark.parametrize("order", ["committed", "manifest"])
def test_a_part_that_is_gone_is_one_error_and_leaves_nothing(out: Path, tmp_path: Path, order: str) -> None:
    parts = sorted((out / "parts").iterdir())
    parts[-1].unlink()

    with pytest.raises(OutputError) as caught:
        export(out, tmp_path / "plain", ExportOptions(format="parquet", order=order, rows_per_file=5))  # type: ignore[arg-type]

    assert caught.value.code == "part_missing"
    assert {path.name for path in tmp_path.iterdir()} == {"texts.jsonl", "out"}


def test_a_disk_that_fills_up_is_one_error_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    out = build(tmp_path / "out", [source], model="stub:16384")
    with closing(SmallDisk(1)) as disk:
        with pytest.raises(EmbqError) as caught:
            export(out, disk.path / "plain", ExportOptions(format="parquet", rows_per_file=10))
        assert caught.value.code == "no_space"
        assert caught.value.next_step == "make room, then export again"
        assert list(disk.path.iterdir()) == []


def test_an_export_that_is_killed_leaves_no_folder_that_looks_finished(out: Path, tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from embq.app.export.export import ExportOptions, export
def die(rows, total):
    if rows > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
export(Path(sys.argv[1]), Path(sys.argv[2]), ExportOptions(format="npy", rows_per_file=5), on_rows=die)
"""
    killed = subprocess.run([sys.executable, "-c", script, str(out), str(tmp_path / "plain")], check=False)

    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "plain").exists()
    (left,) = tmp_path.glob("plain.unfinished-*")
    assert not (left / "export.json").exists()
    done: ExportResult = export(out, tmp_path / "plain", ExportOptions(format="npy", rows_per_file=5))
    assert read_plainly(tmp_path / "plain", "npy")[1] == list(range(done.rows))


def test_the_verb_prints_an_account(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(out), str(tmp_path / "plain"), "--output-format", "arrow"]) == Exit.DONE
    assert capsys.readouterr().out.startswith("40 rows in 1 files (")

    assert run(["export", str(out), str(tmp_path / "plain"), "--output-format", "arrow"]) == Exit.BAD_INPUT
    assert "error[foreign_output]" in capsys.readouterr().err
    assert file_path(out).exists()


def test_the_row_of_a_retried_sample_stands_where_its_sample_does(tmp_path: Path) -> None:
    source, out = tmp_path / "texts.jsonl", tmp_path / "out"
    lines = [json.dumps({"id": f"k{n:02d}", "text": f"text {n}"}) for n in range(40)]
    broken = [line if n not in (3, 4, 25) else "#" * len(line) for n, line in enumerate(lines)]
    source.write_text("\n".join(broken) + "\n")
    build(out, [source], unit_samples=10)

    source.write_text("\n".join(lines) + "\n")
    retry(out, FailureFilter(), version="0")
    go_on(out)
    assert run(["export", str(out), str(tmp_path / "plain"), "--output-format", "parquet", "--sorted"]) == Exit.DONE

    table = pq.read_table(tmp_path / "plain" / "parts" / "part-00000000.parquet")
    assert table["key"].to_pylist() == [f"k{n:02d}" for n in range(40)]
    assert sorted(table["id"].to_pylist()[position] for position in (3, 4, 25)) == [37, 38, 39]
