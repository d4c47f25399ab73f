"""Every part format must give back each value as it was, and leave nothing half-written behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from embq.core.errors import OutputError
from embq.core.formats.part import opened
from embq.core.rows.results import COLUMN_ARROW, row_schema
from embq.core.rows.spec import FORMATS, Column, RowSpec
from embq.core.run.commit_log import CommitLog, committed_parts
from embq.core.run.reader import row_tables
from tests.contract.storing import Output, float32_schema, rows_table
from tests.faults.kit.disk import SmallDisk
from tests.support.second_reader.checks import verify


@pytest.fixture(params=FORMATS)
def format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def output(tmp_path: Path, format: str) -> Output:
    return Output(tmp_path / "out", format)


@pytest.fixture(scope="module", params=FORMATS)
def long_output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Output:
    """A part with several groups of rows, and one with one row."""
    output = Output(tmp_path_factory.mktemp("long") / "out", request.param, columns=())
    output.commit(70_001, table=rows_table(output.schema, 70_001))
    output.commit(1)
    return output


# --- round trips ---


def test_every_value_and_null_comes_back_in_order(output: Output) -> None:
    output.commit(10, 1, 3)
    output.commit(7)
    output.assert_exact()


def test_one_row_is_a_part(output: Output) -> None:
    output.commit(1)
    output.assert_exact()


def test_many_rows_are_read_a_bounded_number_at_a_time(long_output: Output) -> None:
    output = long_output
    sizes = [table.num_rows for table in row_tables(output.root, ["id"])]
    assert max(sizes) <= 65_536
    assert sum(sizes) == 70_002
    output.assert_exact()


def test_a_range_of_rows_is_read_as_it_stands_among_all(long_output: Output) -> None:
    files, _ = committed_parts(long_output.root)
    with opened(long_output.root, files) as part:
        whole = pa.concat_tables(part.tables(["key", "embedding"]))
        for start, stop in ((0, 3), (65_530, 65_540), (69_999, None), (16_384, 16_384), (7, 99_999)):
            pieces = list(part.tables(["key", "embedding"], start, stop))
            assert all(0 < piece.num_rows <= 65_536 for piece in pieces)
            found = pa.concat_tables(pieces) if pieces else whole.slice(0, 0)
            assert found.equals(whole.slice(start, None if stop is None else stop - start))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_two_vectors_of_a_row_stay_together(tmp_path: Path, format: str, dtype: str) -> None:
    output = Output(tmp_path / "out", format, modalities=("image", "text"), dtype=dtype)
    output.commit(5, 4)
    output.assert_exact()
    found = pa.concat_tables(row_tables(output.root, ["text_embedding", "key"]))
    assert found.column_names == ["text_embedding", "key"]
    assert found["text_embedding"].to_pylist() == output.wanted()["text_embedding"].to_pylist()


@pytest.mark.parametrize("type_", [pa.int8(), pa.uint8()], ids=str)
def test_quantised_vectors_are_kept(tmp_path: Path, type_: pa.DataType, format: str) -> None:
    if format == "npy":
        pytest.skip("its readers know floats only, and such a run is refused")
    plain = row_schema(("text",), {"text": 5}, RowSpec())
    at = plain.get_field_index("embedding")
    schema = plain.set(at, pa.field("embedding", pa.list_(type_, 5)))
    output = Output(tmp_path / "out", format, schema=schema, columns=())
    output.commit(9)
    output.assert_exact()


def test_chunks_of_texts_say_where_they_stand(tmp_path: Path, format: str) -> None:
    schema = row_schema(("text",), {"text": 5}, RowSpec(), chunked=True)
    output = Output(tmp_path / "out", format, schema=schema, columns=())
    output.commit(6, 2)
    output.assert_exact()


@pytest.mark.parametrize("name", COLUMN_ARROW)
def test_a_column_without_a_value_is_null_in_every_row(tmp_path: Path, format: str, name: str) -> None:
    column = Column(name="empty", type=name, path=("empty",))
    output = Output(tmp_path / "out", format, columns=(column,))
    table = rows_table(output.schema.remove(output.schema.get_field_index("empty")), 3)
    at = output.schema.get_field_index("empty")
    table = table.add_column(at, output.schema.field("empty"), pa.nulls(3, COLUMN_ARROW[name]))
    output.commit(3, table=table)
    output.assert_exact()


# --- failures of the disk, and of people ---


def test_a_full_disk_leaves_nothing_behind_and_the_part_is_written_once_there_is_room(format: str) -> None:
    with closing(SmallDisk(8)) as disk:
        output = Output(disk.path / "out", format, schema=float32_schema(4096), columns=())
        output.commit(3)
        with pytest.raises(OutputError, match="no space left") as caught:
            output.commit(1000)
        assert caught.value.code == "no_space"
        output.assert_exact()
        output.commit(2)
        output.assert_exact()


MEETS_A_FULL_DISK = """
import sys
from pathlib import Path
from tests.contract.storing import Output, float32_schema
from embq.core.errors import OutputError
output = Output(Path(sys.argv[1]), sys.argv[2], schema=float32_schema(4096), columns=())
for _ in range(2):
    try:
        output.commit(1000)
    except OutputError as error:
        print(error.code)
"""


def test_a_process_that_meets_a_full_disk_lives_to_its_end(format: str) -> None:
    """HDF5 ends its process at exit, if not before, where it could not write all of a file."""
    with closing(SmallDisk(8)) as disk:
        given = [sys.executable, "-c", MEETS_A_FULL_DISK, str(disk.path / "out"), format]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(given, capture_output=True, text=True, timeout=120, env=environment)
        assert (done.returncode, done.stdout) == (0, "no_space\nno_space\n"), done.stderr


def test_offsets_that_lead_out_of_a_file_are_one_error(tmp_path: Path) -> None:
    output = Output(tmp_path / "out", "arrow", columns=())
    output.commit(40)
    (path,) = victims(output)
    ends = np.cumsum([len(key.encode()) for key in output.wanted()["key"].to_pylist()]).astype(np.int32)
    offsets = ends.tobytes()
    content = path.read_bytes()
    assert content.count(offsets) == 1
    ends[20] += 1_000_000
    path.write_bytes(content.replace(offsets, ends.tobytes()))
    with pytest.raises(OutputError) as caught:
        list(row_tables(output.root))
    assert caught.value.code == "part_damaged"


def test_an_orphan_of_the_same_name_is_replaced(output: Output) -> None:
    output.commit(2)
    number = output.committer.state.n + 1
    for path in output.named():
        before = output.root / path
        orphan = before.with_name(before.name.replace(f"{number - 1:08d}", f"{number:08d}"))
        orphan.write_bytes(b"half")
    output.commit(3)
    output.assert_exact()


def test_orphans_and_unfinished_files_go_with_the_next_fence(output: Output) -> None:
    output.commit(2)
    number = output.committer.state.n + 1
    for path in output.named():
        before = output.root / path
        before.with_name(before.name.replace(f"{number - 1:08d}", f"{number:08d}")).write_bytes(b"half")
    (output.layout.temporary / f"part-{number:08d}.1.rows.unfinished").write_bytes(b"half")
    output.committer = output.begin("second")
    output.assert_exact()


def victims(output: Output) -> Iterator[Path]:
    for commit in CommitLog(output.layout).read():
        yield from (output.root / file.path for file in commit.files)


@pytest.mark.parametrize("harm", ["deleted", "cut", "emptied", "longer"])
def test_a_part_that_was_changed_behind_our_back_is_one_error_and_a_violation(output: Output, harm: str) -> None:
    output.commit(5)
    for path in list(victims(output)):
        content = path.read_bytes()
        if harm == "deleted":
            path.unlink()
        else:
            path.write_bytes({"cut": content[: len(content) // 2], "emptied": b"", "longer": content + b"\0"}[harm])
        with pytest.raises(OutputError) as caught:
            list(row_tables(output.root))
        assert caught.value.code == ("part_missing" if harm == "deleted" else "part_damaged")
        assert str(path) in caught.value.message
        for mode in ("quick", "full"):
            assert {violation.where for violation in verify(output.root, mode=mode).violations} >= {
                str(path.relative_to(output.root))
            }
        path.write_bytes(content)
    output.assert_exact()


def test_an_edit_that_keeps_the_size_is_a_violation(output: Output) -> None:
    output.commit(5)
    for path in list(victims(output)):
        content = path.read_bytes()
        path.write_bytes(content[:-30] + bytes(byte ^ 1 for byte in content[-30:]))
        assert "file_hash" in {violation.invariant for violation in verify(output.root).violations}
        path.write_bytes(content)


def test_damage_anywhere_ends_no_process(output: Output) -> None:
    """A reader that does not look at hashes meets an error or other values, and no crash."""
    output.commit(40)
    random = np.random.default_rng(1)
    for path in list(victims(output)):
        content = path.read_bytes()
        damage = [(int(at), random.bytes(8)) for at in random.integers(0, len(content), 10)]
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for at, noise in damage:
                    os.write(tell, b"%d " % at)
                    path.write_bytes((content[:at] + noise + content[at + 8 :])[: len(content)])
                    with suppress(OutputError, UnicodeDecodeError):
                        for table in row_tables(output.root):
                            table.to_pydict()
                status = 0
            finally:
                os._exit(status)
        os.close(tell)
        _, status = os.waitpid(child, 0)
        at = os.read(told, 10_000).split()[-1].decode()
        os.close(told)
        assert not os.WIFSIGNALED(status), f"{path.name} at {at}: {signal.Signals(os.WTERMSIG(status)).name}"
        assert os.WEXITSTATUS(status) == 0, f"{path.name} at {at}"
        path.write_bytes(content)
