"""`embq verify` passes what embq writes, and names each invariant that is broken, and no other."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from embq.app.cli.entry_point import run
from embq.app.verify.findings import KEPT, Findings
from embq.app.verify.verification import Stopwatch, VerificationReport
from embq.core.errors import Exit, OutputError
from embq.core.formats.base import vectors
from embq.core.redaction import printable
from embq.core.rows.spec import RowSpec
from embq.core.run.checkpoint import committed
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest, first_segment_writer
from embq.core.run.reader import row_tables
from embq.core.run.standing_failures import standing_failures
from embq.core.units import Unit
from embq.sources.unit_reader import read
from embq.worker.embedders.stub import stub_vector
from tests.support.outputs.build import (
    build,
    data_record,
    file_path,
    record_path,
    records,
    reseal,
    rewrite,
    set_column,
    write_folder,
    write_jsonl,
    write_tar,
)
from tests.support.second_reader.checks import verify
from tests.support.second_reader.samples import reread

LINES = [
    b"\xef\xbb\xbf" + b'{"id": "a", "text": "first"}\n',
    {"id": "b", "text": "second \u00e4\U0001f600"},
    {"id": 7, "text": "third"},
    {"id": "a", "text": "the id again, in another unit"},
    {"text": "without id", "n": 1},
    b"\n",
    b"not json\n",
    b'{"id": "late", "text": 5}\n',
    b'{"id": "q\\ud800", "text": "half a pair in the key"}\n',
    b'{"id": true, "text": "an id that is none"}\r\n',
    b'{"id": "bom", "text": "\xef\xbb\xbf\xc3\xa9"}\n',
    b'{"id": "last", "text": "no line end"}',
]
MEMBERS = [
    ("b.jpg", b"image of b"),
    ("b.txt", b"caption of b"),
    ("a.JPG", b"image of a"),
    ("x/c.d/e.f.png", b"image with dots"),
    ("only.txt", b"a caption without image"),
    ("b.jpg", b"a second image of b"),
    ("b.txt", b"a second caption of b"),
    ("only.txt", b"a second caption without image"),
    ("a.txt", b"\xff not utf-8"),
    ("README", b"no key"),
    ("__index__.json", b"{}"),
    ("__meta__/shard.json", b"{}"),
    ("._first.jpg", b"of macOS"),
    ("z.webp", b"webp"),
    ("z.jpg", b"jpg comes before webp"),
    ("\u00fc.png", b"umlaut"),
    ("folder/.jpg", b"named like its folder"),
    ("\u00fc/.jpg/", b"a plain file whose name ends in a slash"),
]
FILES = {
    "b/2.png": b"two",
    "b/2.txt": b"caf\xe9",
    "b/10.jpg": b"ten",
    "a.jpg": b"a",
    "a.txt": b"caption of a",
    "c.webp": b"c",
    "c.json": b"[]",
    "d.gif": b"",
    "notes.md": b"no image",
}


def texts(folder: Path) -> Path:
    """Twelve lines, four units of three."""
    return write_jsonl(folder / "texts.jsonl", LINES)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A finished run over texts: four units, two parts, rows and failures."""
    return build(tmp_path / "out", [texts(tmp_path)])


def broken(report: VerificationReport) -> set[str]:
    """The invariants that a report names."""
    return {violation.invariant for violation in report.violations}


# --- what embq writes passes ---


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_finished_run_over_jsonl_is_ok_and_every_vector_is_recomputed(tmp_path: Path, dtype: str) -> None:
    report = verify(build(tmp_path / "out", [texts(tmp_path)], rows=RowSpec(dtype=dtype)))

    assert report.violations == ()
    assert report.ok
    assert (report.state, report.units, report.units_total) == ("complete", 4, 4)
    assert report.rows + report.failures == len(LINES) == report.samples_checked
    assert report.failures == 3
    assert report.vectors_recomputed == report.rows


def test_a_finished_run_over_lines_is_ok(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(b"one\r\ntwo\n\n\xff\xfe\n  \nsix")
    report = verify(build(tmp_path / "out", [path], unit_samples=2))

    assert report.violations == ()
    assert (report.rows, report.failures, report.units) == (3, 3, 3)


@pytest.mark.parametrize("modalities", [("image",), ("text",), ("image", "text")])
def test_a_finished_run_over_tar_is_ok(tmp_path: Path, modalities: tuple[str, ...]) -> None:
    shard = write_tar(tmp_path / "shard.tar", MEMBERS)
    report = verify(build(tmp_path / "out", [shard], modalities=modalities))

    assert report.violations == ()
    assert report.rows > 0
    assert report.failures > 0
    assert report.rows + report.failures == len(list(read(Manifest(Layout(tmp_path / "out")).unit(0), ())))
    assert report.vectors_recomputed == report.rows


def test_the_columns_of_each_stub_among_several_models_are_recomputed(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "shard.tar", MEMBERS)
    models = ("small=stub:4", "large=stub:9")
    out = build(tmp_path / "out", [shard], model=models, modalities=("image", "text"))
    report = verify(out)
    assert report.violations == ()
    assert report.vectors_recomputed == report.rows > 0

    def swap(table: pa.Table) -> pa.Table:
        return set_column(table, "large_text_embedding", table["large_image_embedding"].combine_chunks())

    rewrite(out, swap)
    assert broken(verify(out)) == {"vectors"}

    rewrite(out, lambda table: table.drop_columns(["large_text_embedding"]))
    assert "schema" in broken(verify(out))


def test_a_finished_run_over_a_folder_is_ok(tmp_path: Path) -> None:
    report = verify(build(tmp_path / "out", [write_folder(tmp_path / "in", FILES)], unit_samples=2))

    assert report.violations == ()
    assert (report.rows, report.failures, report.units) == (5, 0, 3), "unread metadata and captions cost no image"
    assert report.vectors_recomputed == 5


def test_a_shard_that_failed_whole_stands_for_all_its_samples(tmp_path: Path) -> None:
    good = write_tar(tmp_path / "a.tar", MEMBERS)
    cut = tmp_path / "b.tar"
    cut.write_bytes(good.read_bytes()[:1024])
    report = verify(build(tmp_path / "out", [good, cut]))

    assert report.violations == ()
    assert report.quarantined == 1


def test_an_unfinished_run_is_ok_as_far_as_it_got_and_says_so(tmp_path: Path) -> None:
    report = verify(build(tmp_path / "out", [texts(tmp_path)], only=2))

    assert report.ok
    assert (report.state, report.units, report.units_total) == ("incomplete", 2, 4)


def test_a_run_of_which_nothing_is_committed_is_ok(tmp_path: Path) -> None:
    report = verify(build(tmp_path / "out", [texts(tmp_path)], only=0))

    assert report.ok
    assert (report.rows, report.records, report.state) == (0, 1, "incomplete")


def test_keys_that_stand_for_several_rows_are_only_a_note(out: Path) -> None:
    assert [note for note in verify(out).notes if "more than one row" in note] == ["1 keys stand for more than one row"]


def test_files_that_no_record_names_are_only_a_note(out: Path) -> None:
    (out / "parts" / "part-00000099.parquet").write_bytes(b"left by a crash")

    report = verify(out)

    assert report.ok
    assert report.litter == verify(out, mode="quick").litter == 1
    assert any("part-00000099.parquet" in note and "`embq gc` deletes them" in note for note in report.notes)


def test_shards_without_a_sample_are_only_a_note(tmp_path: Path) -> None:
    shards = [write_tar(tmp_path / f"{n}.tar", MEMBERS if n == 1 else []) for n in range(3)]

    report = verify(build(tmp_path / "out", shards, modalities=("image",)))

    assert report.ok
    assert [note for note in report.notes if "2 units hold no sample" in note and "0.tar" in note]


@pytest.mark.parametrize("name", ["failures/failures-99.parquet", "_tmp/part-99.1.parquet", "_staging/x.arrow"])
def test_litter_is_looked_for_wherever_a_process_that_died_can_leave_it(out: Path, name: str) -> None:
    (out / "_staging" / ".shared").write_text("not litter: workers know the writer's storage by it")
    assert verify(out).litter == 0
    (out / name).write_bytes(b"left by a crash")

    report = verify(out)

    assert report.ok
    assert report.litter == 1
    assert any(name in note for note in report.notes)


def test_what_a_run_at_work_has_not_finished_yet_is_not_called_litter_to_be_deleted(tmp_path: Path) -> None:
    out = build(tmp_path / "out", [texts(tmp_path)], only=2)
    (out / "_staging" / "of-a-live-worker.arrow").write_bytes(b"a result")

    (note,) = [note for note in verify(out).notes if "of-a-live-worker" in note]

    assert "deletes them" not in note


# --- the second reading ---


def test_the_second_reading_finds_what_the_product_reads(tmp_path: Path) -> None:
    inputs = [write_tar(tmp_path / "s.tar", MEMBERS), write_folder(tmp_path / "f", FILES), texts(tmp_path)]
    for number, path in enumerate(inputs):
        root = build(tmp_path / f"out{number}", [path], only=0)
        for unit in Manifest(Layout(root)):
            again = list(reread(unit, images=True))
            first = list(read(unit, ()))
            assert [found.key for found in again] == [s.key.encode("utf-8", "backslashreplace").decode() for s in first]
            usable = [i for i, sample in enumerate(first) if sample.error is None]
            assert [(again[i].image, again[i].text) for i in usable] == [
                (first[i].image, first[i].text) for i in usable
            ]


# --- damage that is named ---


def change(out: Path, n: int, *, reseals: bool = True, **changes: object) -> None:
    """Change fields of record `n`, counted from the end where it is negative, and what follows from it."""
    commit = records(out)[n if n < 0 else n - 1]
    changed = replace(commit, **changes)  # type: ignore[arg-type]
    reseal(out, lambda c: changed if c.n == commit.n else c, chain=reseals, totals=reseals)


def change_files(out: Path, **changes: object) -> None:
    """Change what the last record of data says of its file of rows."""
    commit = records(out)[-2]
    change(out, -2, files=[replace(file, **changes) if file.kind == "rows" else file for file in commit.files])  # type: ignore[arg-type]


def change_unit(out: Path, kind: str = "rows", **changes: object) -> None:
    """Change what the first record with a file of `kind` says of its first unit."""
    commit = data_record(out, kind)
    change(out, commit.n, units=(replace(commit.units[0], **changes), *commit.units[1:]))  # type: ignore[arg-type]


def name_a_file_again(out: Path) -> None:
    first, second = [c for c in records(out) if c.kind == "data"]
    change(out, second.n, files=(*second.files, next(f for f in first.files if f.kind == "failures")))


def name_a_file_of_another_kind(out: Path) -> None:
    commit = data_record(out)
    change(out, commit.n, files=(*commit.files, replace(commit.files[0], kind="other")))


def cut_a_file(out: Path) -> None:
    path = file_path(out, "failures")
    path.write_bytes(path.read_bytes()[:-1])


def write_no_parquet(out: Path) -> None:
    path = file_path(out)
    content = b"x" * path.stat().st_size
    path.write_bytes(content)
    digest, commit = hashlib.sha256(content).hexdigest(), data_record(out)
    change(out, commit.n, files=[replace(f, sha256=digest) if f.kind == "rows" else f for f in commit.files])


def set_first(name: str, value: object) -> Callable[[pa.Table], pa.Table]:
    """Another value in the first row of a column."""

    def changed(table: pa.Table) -> pa.Table:
        values = pa.array([value, *table[name].to_pylist()[1:]], table.schema.field(name).type)
        return set_column(table, name, values)

    return changed


def double_first(table: pa.Table) -> pa.Table:
    table = pa.concat_tables([table.slice(0, 1), table.slice(0, 1), table.slice(2)])
    return set_column(table, "id", pa.array(range(table.num_rows), pa.int64()))


def set_values(values: Callable[[np.ndarray], object]) -> Callable[[pa.Table], pa.Table]:
    """Change the matrix of vectors in place."""

    def changed(table: pa.Table) -> pa.Table:
        matrix = vectors(table).copy()
        values(matrix)
        type_ = table.schema.field("embedding").type
        return set_column(table, "embedding", pa.FixedSizeListArray.from_arrays(pa.array(matrix.ravel()), type=type_))

    return changed


def flip_a_bit(matrix: np.ndarray) -> None:
    matrix.view(np.uint16)[0, 0] ^= 1


def swap_units_of_the_manifest(out: Path) -> None:
    units = list(Manifest(Layout(out)))
    first_segment_writer(Layout(out)).write([units[1], units[0], *units[2:]])


def lose_the_fingerprint(out: Path) -> None:
    rewrite(out, lambda table: table.replace_schema_metadata({}))
    change(out, data_record(out).n, fingerprint="")


def raise_a_total(out: Path, what: str) -> None:
    totals = records(out)[-1].totals
    change(out, -1, totals={**totals, what: totals[what] + 1}, reseals=False)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    # The log.
    "the hash of the record before": (lambda out: change(out, 2, created_at="", reseals=False), "log_chain"),
    "an epoch that goes back": (lambda out: change(out, 3, epoch=0), "log_epoch"),
    "two writers of one epoch": (lambda out: change(out, 3, writer="w2"), "log_writer"),
    "no fence": (lambda out: change(out, -1, epoch=records(out)[-1].epoch + 1, writer="w2"), "log_fence"),
    "another run": (lambda out: change(out, 3, run="0" * 16), "log_run"),
    "total of rows": (lambda out: raise_a_total(out, "rows"), "log_totals"),
    "total of tokens": (lambda out: raise_a_total(out, "tokens"), "log_totals"),
    "data after the close": (lambda out: change(out, 1, kind="close"), "log_close (log_fence)"),
    # Files.
    "no rows": (lambda out: file_path(out).unlink(), "file_there"),
    "no failures": (lambda out: file_path(out, "failures").unlink(), "file_there"),
    "a cut file": (cut_a_file, "file_bytes"),
    "no Parquet": (write_no_parquet, "file_readable"),
    "miscounted rows": (lambda out: change_files(out, rows=99), "file_rows"),
    "two records of one file": (name_a_file_again, "file_once (counts)"),
    "no known kind": (name_a_file_of_another_kind, "file_kind"),
    "another type of a column": (
        lambda out: rewrite(out, lambda t: t.set_column(1, "ordinal", t["ordinal"].cast(pa.int64()))),
        "schema",
    ),
    "one more column": (
        lambda out: rewrite(out, lambda t: t.append_column("extra", pa.nulls(t.num_rows))),
        "schema",
    ),
    "no length of vectors": (lambda out: change(out, -2, widths={}), "schema"),
    "another length of vectors": (lambda out: change(out, -2, widths={"embedding": 9}), "schema"),
    "another model": (lambda out: change(out, -2, fingerprint="0" * 32), "fingerprint"),
    "no fingerprint": (lose_the_fingerprint, "fingerprint"),
    "ids that do not count up": (
        lambda out: rewrite(out, lambda t: set_column(t, "id", pc.add(t["id"], 1))),
        "ids",
    ),
    # Units.
    "a unit of no manifest": (lambda out: change_unit(out, unit_id="0" * 32), "unit_known unit_rows"),
    "a row of another unit": (
        lambda out: rewrite(out, set_first("unit_id", Manifest(Layout(out)).unit_id(3))),
        "unit_rows",
    ),
    "a wrong first row": (lambda out: change_unit(out, first_row=1), "unit_rows"),
    "a lost row": (lambda out: rewrite(out, lambda t: t.slice(0, t.num_rows - 1)), "counts (ids)"),
    "rows of no unit": (lambda out: change(out, -2, units=records(out)[-2].units[:1]), "counts (complete)"),
    "another manifest": (swap_units_of_the_manifest, "manifest unit_known (coverage)"),
    # Rows and failures.
    "two rows of one sample": (lambda out: rewrite(out, double_first), "ordinals keys"),
    "a flipped bit in a vector": (lambda out: rewrite(out, set_values(flip_a_bit)), "vectors"),
    "no vector": (lambda out: rewrite(out, set_first("embedding", None)), "vectors"),
    "the caption of another row": (
        lambda out: rewrite(out, lambda t: set_column(t, "caption", pa.array(t["caption"].to_pylist()[::-1]))),
        "captions",
    ),
    "no code of a failure": (lambda out: rewrite(out, set_first("code", ""), kind="failures"), "failure_code"),
}

SHOWN_BY_ROWS = frozenset(("a row of another unit", "a wrong first row", *list(DAMAGES)[-5:]))
"""What the log, sizes and footers do not tell."""


@pytest.mark.parametrize(("damage", "named"), DAMAGES.values(), ids=DAMAGES.keys())
def test_each_damage_is_named(out: Path, damage: Callable[[Path], object], named: str) -> None:
    """And no other, but for what follows from it, which stands in brackets."""
    damage(out)

    alone, _, following = named.partition(" (")
    assert broken(verify(out)) == {*alone.split(), *following.removesuffix(")").split()}


@pytest.mark.parametrize("case", [case for case in DAMAGES if case not in SHOWN_BY_ROWS])
def test_damage_that_shows_without_reading_rows_is_named_by_a_quick_look(out: Path, case: str) -> None:
    damage, named = DAMAGES[case]
    damage(out)

    assert broken(verify(out, mode="quick")) & {*named.split()}


# --- the log ---


def test_a_record_with_a_flipped_byte_stops_verify_as_an_output_error(out: Path) -> None:
    path = record_path(out, 2)
    path.write_bytes(path.read_bytes().replace(b'"rows":', b'"rowz":', 1))

    for mode in ("quick", "full"):
        with pytest.raises(OutputError, match="damaged"):
            verify(out, mode=mode)
    assert run(["verify", str(out)]) == Exit.OUTPUT


def test_a_dropped_record_is_a_gap(out: Path) -> None:
    record_path(out, 2).unlink()

    report = verify(out)

    assert broken(report) == {"log_numbers"}
    assert report.violations[0].where == "00000002.json"


def test_a_closed_log_that_lacks_a_unit_is_not_complete(tmp_path: Path) -> None:
    out = build(tmp_path / "out", [texts(tmp_path)], only=2)
    change(out, 2, kind="close")

    assert broken(verify(out)) == {"complete"}


# --- files ---


def test_a_flipped_byte_in_a_part_is_named(out: Path) -> None:
    path = file_path(out)
    content = bytearray(path.read_bytes())
    content[8] ^= 1  # in the first page; in a file this small the middle may be in the footer
    path.write_bytes(content)

    report = verify(out)

    assert broken(report) == {"file_hash"}
    assert report.violations[0].where == f"parts/{path.name}"
    assert verify(out, mode="quick").ok, "a quick look reads no content"


def test_a_gap_in_the_ids_between_two_parts_is_named(tmp_path: Path) -> None:
    out = build(tmp_path / "out", [texts(tmp_path)])
    first = next(file.first_id for file in records(out)[-2].files if file.kind == "rows")
    change_files(out, first_id=first + 5)

    report = verify(out)

    assert broken(report) == {"ids"}
    assert "the next one is" in report.violations[0].message


# --- units ---


def test_a_unit_that_is_committed_twice_is_named(tmp_path: Path) -> None:
    out = build(tmp_path / "out", [texts(tmp_path)], units_per_commit=1)
    first, second = [c for c in records(out) if c.kind == "data"][:2]
    change(out, second.n, units=first.units, files=())

    assert "unit_once" in broken(verify(out))


def test_a_failure_that_was_removed_leaves_a_sample_without_row_and_failure(tmp_path: Path) -> None:
    out = build(tmp_path / "out", [write_jsonl(tmp_path / "t.jsonl", [*LINES[:2], b"\n"])])
    commit = data_record(out)
    files = tuple(file for file in commit.files if file.kind == "rows")
    change(out, commit.n, files=files, units=(replace(commit.units[0], failures=0),))

    report = verify(out)

    assert broken(report) == {"keys"}
    assert "without row and failure: 't.jsonl:3' (sample 2)" in report.violations[0].message


def test_a_row_under_the_wrong_key_is_named(out: Path) -> None:
    rewrite(out, set_first("key", "wrong"))

    report = verify(out)

    assert broken(report) == {"keys"}
    assert "'wrong' (sample 0)" in report.violations[0].message


@pytest.mark.parametrize("modalities", [("image",), ("image", "text")])
def test_two_swapped_vectors_are_named(tmp_path: Path, modalities: tuple[str, ...]) -> None:
    members = [(f"{n}.{extension}", f"{extension} {n}".encode()) for n in range(5) for extension in ("jpg", "txt")]
    out = build(tmp_path / "out", [write_tar(tmp_path / "s.tar", members)], modalities=modalities)
    column = "embedding" if len(modalities) == 1 else "text_embedding"
    rewrite(out, lambda t: set_column(t, column, pc.take(t[column].combine_chunks(), pa.array([1, 0, 2, 3, 4]))))

    report = verify(out)

    assert broken(report) == {"vectors"}
    assert "'0' (sample 0), '1' (sample 1)" in report.violations[0].message


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_is_named_for_any_model(out: Path, value: float) -> None:
    rewrite(out, set_values(lambda matrix: matrix[1].fill(value)))
    description = json.loads((out / "run.json").read_text())
    description["model"]["spec"] = "hf:nowhere"
    (out / "run.json").write_text(json.dumps(description))

    report = verify(out)

    assert broken(report) == {"finite"}
    assert report.vectors_recomputed == 0


@pytest.mark.parametrize(("says", "finding"), [("", "whole_unit"), ("crash", "failure_code")], ids=["none", "another"])
def test_a_unit_that_failed_whole_under_no_code_or_another_in_its_record_is_named(
    tmp_path: Path, says: str, finding: str
) -> None:
    cut = tmp_path / "a.tar"
    cut.write_bytes(write_tar(tmp_path / "b.tar", MEMBERS).read_bytes()[:1024])
    out = build(tmp_path / "out", [cut])
    change_unit(out, "failures", quarantined=says)

    assert broken(verify(out)) == {finding}


# --- inputs and manifest ---


def test_a_source_that_was_written_to_since_cannot_be_checked(tmp_path: Path) -> None:
    path = texts(tmp_path)
    out = build(tmp_path / "out", [path])
    os.utime(path, ns=(1, 1))

    report = verify(out)

    assert broken(report) == {"source_changed"}
    assert report.violations_total == 4
    assert "cannot be checked: changed" in report.violations[0].message


def test_a_shortfall_is_seen_although_the_source_has_changed(tmp_path: Path) -> None:
    path = texts(tmp_path)
    out = build(tmp_path / "out", [path])
    rewrite(out, lambda failures: failures.slice(1), kind="failures")
    commit = data_record(out, "failures")
    at = next(i for i, unit in enumerate(commit.units) if unit.failures)
    units = list(commit.units)
    units[at] = replace(units[at], failures=units[at].failures - 1)
    change(out, commit.n, units=tuple(units))
    os.utime(path, ns=(1, 1))

    assert broken(verify(out)) == {"source_changed", "keys"}


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_bytes(b"longer than before")])
def test_a_file_of_a_folder_that_changed_since_cannot_be_checked(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    out = build(tmp_path / "out", [write_folder(tmp_path / "in", FILES)])
    change(tmp_path / "in" / "a.jpg")

    assert broken(verify(out)) == {"source_changed"}


def test_units_that_leave_a_part_of_their_file_out_are_named(tmp_path: Path) -> None:
    # Given a plan that lost its second unit, with a manifest and a run.json that agree on it
    out = build(tmp_path / "out", [texts(tmp_path)], only=0)
    layout = Layout(out)
    units = list(Manifest(layout))
    summary = first_segment_writer(layout).write([units[0], *units[2:]])
    description = json.loads((out / "run.json").read_text())
    description |= {"units": summary.units, "manifest_digest": summary.digest}
    (out / "run.json").write_text(json.dumps(description))

    assert broken(verify(out)) == {"coverage"}


def test_images_that_were_added_to_a_folder_are_only_a_note(tmp_path: Path) -> None:
    out = build(tmp_path / "out", [write_folder(tmp_path / "in", FILES)])
    (tmp_path / "in" / "new.jpg").write_bytes(b"new")

    report = verify(out)

    assert report.ok
    assert any("6 images now, 5 are planned" in note for note in report.notes)


def test_a_second_reading_that_fails_is_not_taken_for_agreement(tmp_path: Path) -> None:
    # Given rows of a shard, and a shard that now cannot be read although its version is the planned one
    path = write_tar(tmp_path / "s.tar", MEMBERS)
    out = build(tmp_path / "out", [path])
    status = path.stat()
    path.write_bytes(b"x" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert broken(verify(out)) == {"keys"}


# --- the verb ---


def test_the_verb_prints_an_account_that_ends_with_ok(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(out)]) == Exit.DONE

    text = capsys.readouterr().out
    assert "4 of 4 committed" in text
    assert "12 in = 9 rows + 3 failures" in text
    assert text.endswith("ok\n")


def test_the_verb_says_that_a_run_is_incomplete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = build(tmp_path / "out", [texts(tmp_path)], only=2)

    assert run(["verify", str(out)]) == Exit.DONE
    assert capsys.readouterr().out.endswith("ok so far: incomplete, 2 of 4 units\n")


def test_the_verb_gives_json_and_status_65_for_violations(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file_path(out).unlink()

    assert run(["verify", str(out), "--json"]) == Exit.BAD_INPUT

    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1
    assert report["ok"] is False
    assert (report["rows"], report["failures"], report["units"]) == (9, 3, 4)
    assert [set(violation) for violation in report["violations"]] == [{"invariant", "where", "message"}]


def test_the_verb_prints_twenty_violations_and_counts_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"id": n, "text": "x"} for n in range(25)])
    out = build(tmp_path / "out", [path], unit_samples=1, units_per_commit=25)
    path.unlink()

    assert run(["verify", str(out)]) == Exit.BAD_INPUT

    text = capsys.readouterr().out
    assert text.count("source_changed") == 20
    assert "... and 5 more violations" in text
    assert "not ok: 25 violations" in text


def test_findings_keep_a_bounded_number_and_count_all() -> None:
    findings = Findings()
    for _ in range(KEPT + 5):
        findings.add("keys", "here", "x")

    assert (len(findings.violations), findings.count) == (KEPT, KEPT + 5)


def test_text_from_data_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2J\n\udcff\u00e4") == "a\\x1b[2J\\n\\udcff\u00e4"


# --- a quick look ---


def test_a_sound_output_is_ok_although_its_inputs_are_gone_by_a_quick_look(out: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").unlink()

    report = verify(out, mode="quick")

    assert report.ok
    assert (report.mode, report.state) == ("quick", "complete")
    assert (report.rows, report.failures, report.units, report.files) == (9, 3, 4, 4)
    assert report.samples_checked == report.vectors_recomputed == 0
    assert not verify(out).ok


def test_the_report_says_what_was_checked_and_how_long_each_check_took(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(out), "--quick", "--json"]) == Exit.DONE
    quick = json.loads(capsys.readouterr().out)
    assert run(["verify", str(out), "--json"]) == Exit.DONE
    full = json.loads(capsys.readouterr().out)

    assert (quick["mode"], list(quick["seconds"])) == ("quick", ["manifest", "log", "files"])
    assert (full["mode"], list(full["seconds"])) == ("full", ["manifest", "log", "files", "rows", "inputs"])
    assert run(["verify", str(out), "--quick"]) == Exit.DONE
    assert "not compared with the inputs" in capsys.readouterr().out


def test_seconds_of_a_check_within_another_are_counted_once() -> None:
    times = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    watch = Stopwatch(clock=lambda: next(times))

    with watch.on("rows"), watch.on("inputs"):
        pass

    assert watch.seconds == {"rows": 2.0 + 4.0, "inputs": 3.0}


# --- reading an output ---


def test_the_reader_gives_committed_rows_in_the_order_of_their_ids(out: Path) -> None:
    (out / "parts" / "part-00000099.parquet").write_bytes(b"named by no record")

    table = pa.concat_tables(row_tables(out))

    assert table["id"].to_pylist() == list(range(9))
    assert committed(out)[1].rows == 9
    assert sum(t.num_rows for t in standing_failures(out)) == 3
    by_key = dict(zip(table["key"].to_pylist(), vectors(table), strict=True))
    assert np.array_equal(by_key["b"], stub_vector("second \u00e4\U0001f600".encode(), 8).astype(np.float16))


def test_the_reader_reads_only_the_columns_that_are_asked_for(out: Path) -> None:
    assert {tuple(table.column_names) for table in row_tables(out, ["id", "key"])} == {("id", "key")}


def test_the_reader_names_a_part_that_is_gone(out: Path) -> None:
    file_path(out).unlink()

    with pytest.raises(OutputError, match="named by a commit record"):
        list(row_tables(out))


def test_units_of_a_kind_that_cannot_be_read_again_are_not_taken_for_empty() -> None:
    with pytest.raises(Exception, match="cannot be read a second time"):
        list(reread(Unit(kind="unheard-of", source="x"), images=False))
