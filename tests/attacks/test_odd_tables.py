"""Tables and metadata that users really have: each is read, or refused with its name; none is dropped unsaid."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import math
import os
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import ipc

from embq.core.errors import Exit, InputError, SourceError
from embq.producer.enqueue import prepare
from embq.producer.plan import plan
from embq.producer.upload import UploadedInputs, plan_upload
from embq.sources.reader_options import ReadOptions
from embq.sources.unit_reader import read
from tests.e2e.session import ended
from tests.support.outputs.build import build, request_of, write_folder, write_tar
from tests.support.planning import samples_of, units_of
from tests.support.second_reader.checks import verify

POLARS = Path(__file__).parent / "polars.arrow"
"""Ten rows in batches of four, as polars 2.1 writes them: views of strings, a categorical, a schema without prefix."""

UUIDS = [uuid.UUID(int=number) for number in range(3)]


def table_of(names: list[str], *columns: Any) -> pa.Table:
    return pa.table([column if isinstance(column, pa.Array) else pa.array(column) for column in columns], names=names)


def write(path: Path, table: pa.Table) -> Path:
    """A table as the kind of file that the name says; .arrows is a stream."""
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        new = ipc.new_stream if path.suffix == ".arrows" else ipc.new_file
        with new(path, table.schema) as writer:
            writer.write_table(table)
    return path


def metadata_of(path: Path, *columns: str) -> list[dict[str, Any]]:
    return [json.loads(sample.metadata or "") for sample in samples_of(path, metadata_columns=columns)]


def refusal(path: Path, **options: Any) -> InputError:
    """Refusal of a plan of this file alone; every unit of it, in a larger plan, fails with the same code."""
    with pytest.raises(InputError) as refused:
        plan([str(path)], ReadOptions(**options))
    for unit in units_of(path, **options):
        with pytest.raises(SourceError) as failed:
            list(read(unit, ()))
        assert failed.value.code == refused.value.code
    assert str(path) in refused.value.message
    assert refused.value.next_step
    return refused.value


def checked(output: Path) -> int:
    """Number of rows and failures of an output that `embq verify` has compared with the inputs and found right."""
    report = verify(output)
    assert report.violations == ()
    return report.samples_checked


TABLES = pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows"])


# --- two columns of one name ---


@TABLES
@pytest.mark.parametrize("doubled", ["text", "id"])
def test_two_columns_of_one_name_are_refused_where_one_of_them_is_needed(
    tmp_path: Path, suffix: str, doubled: str
) -> None:
    names = ["id", "text", doubled]
    path = write(tmp_path / f"t.{suffix}", table_of(names, ["a"], ["x"], ["y"]))
    error = refusal(path)
    assert error.code == "ambiguous_column"
    assert f"{names.index(doubled) + 1} and 3" in error.message


@TABLES
def test_a_doubled_name_of_two_types_does_not_send_another_column_into_the_model(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"t.{suffix}", table_of(["text", "text", "title"], ["x"], [1], ["y"]))
    assert refusal(path).code == "ambiguous_column"


@TABLES
def test_doubled_columns_that_nothing_needs_change_nothing(tmp_path: Path, suffix: str) -> None:
    """The run exited with 0, and `embq verify` with 65."""
    path = write(tmp_path / f"t.{suffix}", table_of(["text", "n", "n", "m"], ["x", "y"], [1, 2], ["p", "q"], [5, 6]))
    assert [(s.text, s.metadata) for s in samples_of(path, metadata_columns=("m",))] == [
        ("x", '{"m":5}'),
        ("y", '{"m":6}'),
    ]
    assert checked(build(tmp_path / "out", [path])) == 2


@TABLES
@pytest.mark.parametrize("columns", ["*", "n"])
def test_doubled_columns_of_metadata_are_refused(tmp_path: Path, suffix: str, columns: str) -> None:
    path = write(tmp_path / f"t.{suffix}", table_of(["text", "n", "n"], ["x"], [1], [2]))
    assert refusal(path, metadata_columns=(columns,)).code == "ambiguous_column"


def test_a_csv_with_doubled_names_is_refused_only_where_one_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("text,n,n,m\nx,1,2,3\n")
    assert refusal(path).code == "ambiguous_column"
    assert metadata_of(path, "m") == [{"m": "3"}]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "arrows", "csv"])
def test_a_column_without_a_name_is_metadata_like_any_other(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.{suffix}"
    if suffix == "csv":
        path.write_text(",text\n1,x\n")
    else:
        write(path, table_of(["text", ""], ["x"], ["1"]))
    assert metadata_of(path, "*") == [{"": "1"}]
    assert checked(build(tmp_path / "out", [path], metadata_columns=("*",))) == 1


# --- Arrow files of polars ---


def test_an_arrow_file_of_polars_is_read_by_its_footer(tmp_path: Path) -> None:
    samples = samples_of(POLARS, unit_samples=3, metadata_columns=("*",))
    assert [(s.key, s.text) for s in samples] == [
        (f"k{n}", f"the text of {n}, which is longer than twelve bytes") for n in range(10)
    ]
    assert [json.loads(s.metadata or "") for s in samples] == [
        {"kind": ("even", "odd")[n % 2], "at": f"2024-01-01 00:00:{n:02d}.000000"} for n in range(10)
    ]
    assert {s.text for s in samples_of(POLARS, text_column="kind")} == {"even", "odd"}
    assert checked(build(tmp_path / "out", [POLARS], metadata_columns=("*",))) == 10


def test_a_batch_that_the_footer_leaves_out_is_missed(tmp_path: Path) -> None:
    """A reader that believes the footer alone would lose the rows of this batch."""
    for source in (POLARS, write(tmp_path / "p.arrow", table_of(["text"], ["x", "y"]))):
        data = source.read_bytes()
        at = data.rindex(b"ARROW1") - 4
        footer = at - int.from_bytes(data[at : at + 4], "little")
        with ipc.open_file(pa.BufferReader(data)) as file:
            batches = file.num_record_batches
        # The footer's list of batches: their number, in front of 24 bytes for each.
        where = next(
            place
            for place in range(footer, at - 4)
            if int.from_bytes(data[place : place + 4], "little") == batches
            and all(
                data.startswith(b"\xff\xff\xff\xff", int.from_bytes(data[block : block + 8], "little"))
                for block in range(place + 4, place + 4 + 24 * batches, 24)
            )
        )
        path = tmp_path / "t.arrow"
        path.write_bytes(data[:where] + (batches - 1).to_bytes(4, "little") + data[where + 4 :])
        assert refusal(path).code == "table_damaged"


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_type_that_pyarrow_lacks_is_no_damage(tmp_path: Path, suffix: str) -> None:
    polars = pytest.importorskip("polars")
    path = tmp_path / f"t.{suffix}"
    table = polars.DataFrame({"text": ["x"], "n": polars.Series([1], dtype=polars.Int128)})
    table.write_parquet(path) if suffix == "parquet" else table.write_ipc(path)
    error = refusal(path)
    assert "does not read it: Integers with more than 64 bits" in error.message
    assert "cast or drop the column" in error.next_step


# --- values that JSON lacks, and keys ---


def odd_values(suffix: str) -> pa.Table:
    """Three rows; parquet has no intervals."""
    when = datetime.datetime(2024, 1, 2, 3, 4, 5, 678901)
    later = when + datetime.timedelta(days=1)
    table = pa.table(
        {
            "text": ["x", "y", "z"],
            "uuid": pa.array([one.bytes for one in UUIDS], pa.uuid()),
            "price": [decimal.Decimal("1.50"), None, decimal.Decimal("-0.25")],
            "at": pa.array([when, None, later], pa.timestamp("us", "UTC")),
            "nano": pa.array([1, 2, None], pa.timestamp("ns")),
            "day": [when.date(), None, later.date()],
            "clock": pa.array([1, 2, 3], pa.time64("ns")),
            "took": pa.array([1500, -1500, None], pa.duration("ms")),
            "span": pa.array([(1, 2, 3), None, (0, 0, -1_500_000_000)], pa.month_day_nano_interval()),
            "deep": pa.array(
                [[{"at": 1, "took": 2}], None, []],
                pa.list_(pa.struct({"at": pa.timestamp("ns"), "took": pa.duration("s")})),
            ),
            "ids": pa.ListArray.from_arrays(
                pa.array([0, None, 1, 1]), pa.array([UUIDS[1].bytes], pa.uuid()), pa.list_(pa.uuid())
            ),
        }
    )
    return table.drop_columns("span") if suffix == "parquet" else table


@TABLES
def test_types_that_json_lacks_become_text_and_none_is_dropped(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"t.{suffix}", odd_values(suffix))
    first, second, third = metadata_of(path, "*")
    if suffix != "parquet":
        spans = [row.pop("span") for row in (first, second, third)]
        assert spans == ["P1M2DT0.000000003S", None, "P0M0DT-1.500000000S"]
    assert first == {
        "uuid": "00000000-0000-0000-0000-000000000000",
        "price": "1.50",
        "at": "2024-01-02 03:04:05.678901Z",
        "nano": "1970-01-01 00:00:00.000000001",
        "day": "2024-01-02",
        "clock": "00:00:00.000000001",
        "took": "PT1.500S",
        "deep": [{"at": "1970-01-01 00:00:00.000000001", "took": "PT2S"}],
        "ids": ["00000000-0000-0000-0000-000000000001"],
    }
    assert second["took"] == "PT-1.500S"
    assert {name for name, value in second.items() if value is None} == {"price", "at", "day", "deep", "ids"}
    assert (third["deep"], third["ids"]) == ([], [])
    assert metadata_of(path, "uuid", "took")[0] == {"uuid": str(UUIDS[0]), "took": "PT1.500S"}
    assert checked(build(tmp_path / "out", [path], metadata_columns=("*",))) == 3


@TABLES
def test_a_time_zone_that_this_machine_does_not_know_costs_nothing(tmp_path: Path, suffix: str) -> None:
    there = pa.timestamp("ms", "Mars/Olympus")
    columns = {
        "id": pa.array([0, 1], there),
        "at": pa.array([1, None], there),
        "list": pa.array([[1], None], pa.list_(there)),
        "object": pa.array([{"at": 1}, None], pa.struct({"at": there})),
        "map": pa.array([[("at", 1)], None], pa.map_(pa.string(), there)),
    }
    path = write(tmp_path / f"t.{suffix}", pa.table({"text": ["a", "b"], **columns}))
    time = "1970-01-01 00:00:00.001Z"
    assert metadata_of(path, "*") == [
        {"at": time, "list": [time], "object": {"at": time}, "map": [["at", time]]},
        {"at": None, "list": None, "object": None, "map": None},
    ]


def test_columns_that_cannot_become_metadata_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """'*' left columns of bytes out without a word."""
    table = pa.table({"text": ["x"], "binary_flag": [{"binary": True}], "raw": [b"x"], "parts": [[b"x"]]})
    path = write(tmp_path / "t.parquet", table)
    plan([str(path)], ReadOptions(metadata_columns=("*",)))
    assert "columns_left_out" in caplog.text
    assert "raw (binary), parts (list<element: binary>)" in caplog.text
    assert metadata_of(path, "*") == [{"binary_flag": {"binary": True}}]


@TABLES
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("column", "keys"),
    [
        ("uuid", [str(one) for one in UUIDS]),
        ("at", ["2024-01-02 03:04:05.678901Z", "", "2024-01-03 03:04:05.678901Z"]),
        ("day", ["2024-01-02", "", "2024-01-03"]),
        ("price", ["1.50", "", "-0.25"]),
        ("took", ["PT1.500S", "PT-1.500S", ""]),
    ],
)
def test_keys_are_made_of_types_that_text_says_exactly(
    tmp_path: Path, suffix: str, column: str, keys: list[str], named: bool
) -> None:
    path = write(tmp_path / f"t.{suffix}", pa.table({"text": ["x", "y", "z"], "id": odd_values(suffix)[column]}))
    samples = samples_of(path, id_column="id" if named else "")
    assert [sample.key for sample in samples] == [key or f"t.{suffix}:{row}" for row, key in enumerate(keys, start=1)]
    codes = [sample.error[0] if sample.error else "" for sample in samples]
    assert codes == ["missing_id" if named and not key else "" for key in keys]
    assert checked(build(tmp_path / "out", [path])) == 3


@TABLES
@pytest.mark.parametrize(
    "values",
    [[1.5, 2.5], [True, False], [b"a", b"b"], [["a"], ["b"]]],
    ids=["float", "bool", "bytes", "list"],
)
def test_an_id_column_that_cannot_hold_keys_is_refused_by_its_name(
    tmp_path: Path, suffix: str, values: list[Any]
) -> None:
    path = write(tmp_path / f"t.{suffix}", pa.table({"text": ["x", "y"], "id": values}))
    error = refusal(path)
    assert error.code == "wrong_column_type"
    assert "'id'" in error.message
    assert refusal(path, id_column="id").code == "wrong_column_type"
    if not isinstance(values[0], bytes):
        counted = [sample.key for sample in samples_of(path, metadata_columns=("id",))]
        assert counted == [f"t.{suffix}:1", f"t.{suffix}:2"]


def test_another_id_column_or_an_empty_one_stands_for_none(tmp_path: Path) -> None:
    other = write(tmp_path / "a.parquet", pa.table({"text": ["x"], "id": [1.5], "key": ["k"]}))
    empty = write(tmp_path / "b.parquet", pa.table({"text": ["x"], "id": pa.nulls(1)}))
    assert [sample.key for path in (other, empty) for sample in samples_of(path)] == ["k", "b.parquet:1"]


# --- numbers that JSON lacks ---


def test_numbers_that_float64_does_not_hold_are_null_in_every_kind_of_metadata(tmp_path: Path) -> None:
    numbers = '{"a": NaN, "b": [Infinity, -1e400], "c": {"d": 1e400}, "e": 1.5}'
    wanted = {"a": None, "b": [None, None], "c": {"d": None}, "e": 1.5}
    lines = tmp_path / "t.jsonl"
    lines.write_text(f'{{"text": "x", {numbers[1:]}\n')
    folder = write_folder(tmp_path / "images", {"k.jpg": b"i", "k.json": numbers.encode()})
    shard = write_tar(tmp_path / "s.tar", [("k.jpg", b"i"), ("k.json", numbers.encode())])
    row = {"a": math.nan, "b": [math.inf, -math.inf], "c": {"d": math.inf}, "e": 1.5}
    table = write(tmp_path / "t.parquet", pa.Table.from_pylist([{"text": "x", **row}]))
    for path in (lines, folder, shard, table):
        assert metadata_of(path, "*") == [wanted]
        assert checked(build(tmp_path / f"of {path.name}", [path], metadata_columns=("*",))) == 1


# --- files that cannot be read, and files without rows ---


@pytest.mark.parametrize("name", ["nothing.parquet", "nothing.arrow", "nothing.csv", "nothing.csv.gz"])
def test_a_table_of_zero_bytes_is_a_failure_and_the_rest_goes_on(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert refusal(tmp_path / name).code == "table_damaged"
    (tmp_path / "good.jsonl").write_text('{"text": "x"}\n')
    planned = plan([str(tmp_path / name), str(tmp_path / "good.jsonl")], ReadOptions())
    assert planned.warnings == ()
    bad, good = planned.units
    with pytest.raises(SourceError) as failed:
        list(read(bad, ()))
    assert failed.value.code == "table_damaged"
    assert [sample.text for sample in read(good, ())] == ["x"]


def rowless(folder: Path, name: str) -> Path:
    path = folder / name
    if name.endswith(".csv"):
        path.write_text("id,text\n")
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(b""))
    else:
        write(path, pa.table({"text": pa.array([], pa.string())}))
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.txt.gz", "t.parquet", "t.arrow"])
def test_a_file_without_rows_is_left_out_by_its_name_and_the_rest_goes_on(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = rowless(tmp_path, name)
    good = tmp_path / "good.jsonl"
    good.write_text('{"text": "x"}\n')
    planned = plan([str(path), str(good)], ReadOptions())
    assert [unit.source for unit in planned.units] == [str(good)]
    assert "input_empty" in caplog.text
    assert str(path) in caplog.text
    with pytest.raises(InputError) as refused:
        list(plan([str(path)], ReadOptions()).units)
    assert refused.value.code == "empty_input"


@pytest.mark.parametrize("name", ["x.tar", "x.parquet", "x.arrow", "x.csv", "x.jsonl", "x.txt"])
def test_a_file_that_cannot_be_read_is_one_failure_unless_it_is_all_there_is(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for one in (name, name.replace("x.", "z.")):
        os.mkfifo(folder / one)
    with pytest.raises(InputError) as refused:
        list(plan([str(folder)], ReadOptions()).units)
    assert refused.value.code == "not_a_file"
    good = tmp_path / "good.jsonl"
    good.write_text('{"text": "x"}\n')
    *bad, last = plan([str(folder), str(good)], ReadOptions(), ["text"]).units
    assert len(bad) == 2
    assert last.source == str(good)
    for unit in bad:
        with pytest.raises(SourceError) as failed:
            list(read(unit, ()))
        assert failed.value.code == "not_a_file"
    assert "table_unusable" in caplog.text


def test_a_file_that_cannot_be_read_cannot_be_sent(tmp_path: Path) -> None:
    """Where the plan goes on without such a file, `embq enqueue --inline` must not end with a traceback."""
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "in" / "x.jsonl")
    (tmp_path / "in" / "z.jsonl").write_text('{"text": "x"}\n')
    inputs = UploadedInputs("/out")
    request = request_of(tmp_path / "run", tmp_path / "in", modalities=("text",), options=ReadOptions())
    assert prepare(request, relocate=inputs.relocate).info.units == 2
    with pytest.raises(SourceError, match=r"x\.jsonl: is not a regular file"):
        plan_upload(tmp_path / "run", "/out", inputs)


# --- from the command to the check ---


def without_the_rights_of_root() -> list[str]:
    """Prefix of a command that may not read every file."""
    rights = "-dac_override,-dac_read_search"
    prefix = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"] if os.getuid() == 0 else []
    if prefix and (not shutil.which("setpriv") or subprocess.run([*prefix, "true"], check=False).returncode):
        pytest.skip("root may read everything here, and cannot give up that right")
    return prefix


def test_odd_files_beside_good_ones_are_failures_with_codes_and_are_mended_by_retry(short_tmp: Path) -> None:
    prefix = without_the_rights_of_root()
    tables, out = short_tmp / "in", short_tmp / "out"
    tables.mkdir()
    shutil.copy(POLARS, tables)
    write(tables / "doubled.parquet", table_of(["text", "text"], ["x"], ["y"]))
    (tables / "nothing.parquet").touch()
    denied = [write(tables / "denied.parquet", odd_values("parquet")), short_tmp / "denied.jsonl"]
    denied[1].write_text('{"text": "x", "n": 1e400}\n{"text": "y"}\n')
    for path in denied:
        path.chmod(0)
    arguments = ("run", tables / "*", denied[1], "-o", out, "-m", "stub:8", "--metadata-columns", "*")
    status, _, said = ended(*arguments, prefix=prefix)
    assert status == Exit.SOME_FAILED, said
    assert failures_of(out) == {"ambiguous_column": 1, "table_damaged": 1, "source_denied": 2}
    assert checked(out) == 10
    for path in denied:
        path.chmod(0o644)
    status, _, said = ended("retry", out, "--code", "source_denied", prefix=prefix)
    assert status == Exit.SOME_FAILED, said
    assert failures_of(out) == {"ambiguous_column": 1, "table_damaged": 1}
    assert checked(out) == 10 + 3 + 2


def failures_of(output: Path) -> dict[str, int]:
    """Code -> failures that stand."""
    _, said, _ = ended("failures", output, "--json")
    return {group["code"]: group["count"] for group in json.loads(said)["groups"]}
