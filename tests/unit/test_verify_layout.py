"""`embq verify --layout clip-retrieval` names what would shift rows for readers that see nothing but file names."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.app.cli.entry_point import run
from embq.core.errors import Exit, InputError
from tests.support.outputs.build import build, write_jsonl
from tests.support.second_reader.checks import verify


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A finished npy run of three parts."""
    lines = [{"id": f"k{n:02d}", "text": f"text {n}"} for n in range(18)]
    return build(tmp_path / "out", [write_jsonl(tmp_path / "texts.jsonl", lines)], format="npy")


def layout_says(out: Path) -> list[str]:
    """Places where the layout is not the one that readers expect."""
    report = verify(out, mode="quick", readers="clip-retrieval")
    return [violation.where for violation in report.violations if violation.invariant == "layout"]


def parts(out: Path, folder: str) -> list[Path]:
    """The files of a folder, in order."""
    return sorted((out / folder).iterdir())


def test_what_embq_writes_is_read_as_it_is_meant(out: Path) -> None:
    assert verify(out, readers="clip-retrieval").violations == ()
    assert run(["verify", str(out), "--quick", "--layout", "clip-retrieval"]) == Exit.DONE

    matrix = np.concatenate([np.load(path) for path in parts(out, "text_emb")])
    table = pa.concat_tables([pq.read_table(path) for path in parts(out, "metadata")])
    assert table["id"].to_pylist() == list(range(18)) == list(range(len(matrix)))


def _lose_metadata(out: Path) -> None:
    parts(out, "metadata")[1].unlink()


def _lose_vectors(out: Path) -> None:
    parts(out, "text_emb")[0].unlink()


def _add_an_orphan(out: Path) -> None:
    np.save(out / "text_emb" / "text_emb_00000099.npy", np.zeros((2, 8), np.float16))


def _add_a_file_in_a_subfolder(out: Path) -> None:
    first = parts(out, "text_emb")[0]
    (out / "text_emb" / "old").mkdir()
    shutil.copy(first, out / "text_emb" / "old" / "text_emb_00000002.npy")


def _count_in_other_digits(out: Path) -> None:
    shutil.copy(parts(out, "text_emb")[0], out / "text_emb" / "text_emb_2.npy")


def _empty(out: Path) -> None:
    np.save(parts(out, "text_emb")[1], np.zeros((0, 8), np.float16))


def _store_float32(out: Path) -> None:
    path = parts(out, "text_emb")[1]
    np.save(path, np.load(path).astype(np.float32))


def _store_in_fortran_order(out: Path) -> None:
    path = parts(out, "text_emb")[1]
    np.save(path, np.asfortranarray(np.load(path)))


def _cut(out: Path) -> None:
    path = parts(out, "text_emb")[1]
    path.write_bytes(path.read_bytes()[:-4])


def _write_npy_2(out: Path) -> None:
    path = parts(out, "text_emb")[1]
    vectors = np.load(path)
    with open(path, "wb") as file:
        np.lib.format.write_array(file, vectors, version=(2, 0))


def _break_the_header(out: Path) -> None:
    path = parts(out, "text_emb")[1]
    path.write_bytes(b"X" + path.read_bytes()[1:])


def _change_the_schema(out: Path) -> None:
    path = parts(out, "metadata")[1]
    pq.write_table(pq.read_table(path).append_column("mood", pa.nulls(6)), path)


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (_lose_metadata, "metadata"),
        (_lose_vectors, "text_emb"),
        (_add_an_orphan, "text_emb"),
        (_add_a_file_in_a_subfolder, "text_emb"),
        (_count_in_other_digits, "text_emb"),
        (_empty, "text_emb/"),
        (_store_float32, "text_emb"),
        (_store_in_fortran_order, "text_emb/"),
        (_cut, "text_emb/"),
        (_write_npy_2, "text_emb/"),
        (_break_the_header, "text_emb/"),
        (_change_the_schema, "metadata"),
    ],
)
def test_what_shifts_rows_is_named(out: Path, damage: Callable[[Path], None], where: str) -> None:
    assert layout_says(out) == []

    damage(out)

    assert any(said.startswith(where) for said in layout_says(out))


def test_an_output_of_another_format_is_refused(tmp_path: Path) -> None:
    out = build(tmp_path / "out", [write_jsonl(tmp_path / "texts.jsonl", [{"id": "a", "text": "b"}])])

    with pytest.raises(InputError, match="parquet") as caught:
        verify(out, readers="clip-retrieval")

    assert "embq export" in caught.value.next_step
