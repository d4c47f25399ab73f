"""`embq verify --quick` sees what the log, sizes and footers can tell, and reads neither rows nor inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from embq.app.cli.entry_point import run
from embq.app.verify.verification import Stopwatch
from embq.core.errors import Exit, OutputError
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest, first_segment_writer
from tests.support.outputs.build import (
    build,
    data_record,
    file_path,
    record_path,
    records,
    reseal,
    rewrite,
    set_column,
    write_jsonl,
)
from tests.support.second_reader.checks import verify


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A finished run over texts: four units, two parts, one of them with a failure."""
    lines = [{"id": f"k{n}", "text": f"text {n}"} for n in range(11)]
    return build(tmp_path / "out", [write_jsonl(tmp_path / "texts.jsonl", [*lines, b"not json\n"])])


def broken(out: Path) -> set[str]:
    """The invariants that a quick look names."""
    return {violation.invariant for violation in verify(out, mode="quick").violations}


def test_a_sound_output_is_ok_although_its_inputs_are_gone(out: Path) -> None:
    (out.parent / "texts.jsonl").unlink()

    report = verify(out, mode="quick")

    assert report.ok
    assert (report.mode, report.state) == ("quick", "complete")
    assert (report.rows, report.failures, report.units, report.files) == (11, 1, 4, 3)
    assert report.samples_checked == report.vectors_recomputed == 0
    assert not verify(out).ok


def test_a_flipped_byte_is_left_to_the_full_mode(out: Path) -> None:
    path = file_path(out)
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)

    assert broken(out) == set()
    assert {violation.invariant for violation in verify(out).violations} == {"file_hash"}


def _remove(out: Path) -> None:
    file_path(out, "failures").unlink()


def _cut(out: Path) -> None:
    path = file_path(out)
    path.write_bytes(path.read_bytes()[:-1])


def _overwrite(out: Path) -> None:
    path = file_path(out)
    path.write_bytes(b"x" * path.stat().st_size)


def _shift_ids(out: Path) -> None:
    rewrite(out, lambda table: set_column(table, "id", pc.add(table["id"], 1)))


def _lose_a_row(out: Path) -> None:
    rewrite(out, lambda table: table.slice(0, table.num_rows - 1))


def _add_a_column(out: Path) -> None:
    rewrite(out, lambda table: table.append_column("extra", pa.nulls(table.num_rows)))


def _forget_the_model(out: Path) -> None:
    n = data_record(out).n
    reseal(out, lambda commit: replace(commit, fingerprint="0" * 32) if commit.n == n else commit)


def _miscount_a_unit(out: Path) -> None:
    first = data_record(out)
    units = (replace(first.units[0], rows=first.units[0].rows + 1), *first.units[1:])
    reseal(out, lambda commit: replace(commit, units=units) if commit.n == first.n else commit)


def _swap_units(out: Path) -> None:
    units = list(Manifest(Layout(out)))
    first_segment_writer(Layout(out)).write([units[1], units[0], *units[2:]])


def _drop_a_record(out: Path) -> None:
    record_path(out, 2).unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_remove, {"file_there"}),
        (_cut, {"file_bytes"}),
        (_overwrite, {"file_readable"}),
        (_shift_ids, {"ids"}),
        (_lose_a_row, {"counts", "ids"}),
        (_add_a_column, {"schema"}),
        (_forget_the_model, {"fingerprint"}),
        (_miscount_a_unit, {"counts"}),
        (_swap_units, {"manifest", "unit_known"}),
        (_drop_a_record, {"log_numbers"}),
    ],
)
def test_damage_that_shows_without_reading_rows_is_named(
    out: Path, damage: Callable[[Path], None], named: set[str]
) -> None:
    damage(out)

    assert broken(out) >= named


def test_a_damaged_record_stops_it(out: Path) -> None:
    path = record_path(out, 2)
    path.write_bytes(path.read_bytes()[:-20])

    with pytest.raises(OutputError, match="is damaged"):
        verify(out, mode="quick")


def test_litter_is_counted(out: Path) -> None:
    (out / "parts" / f"part-{len(records(out)) + 1:08d}.parquet").write_bytes(b"orphan")

    report = verify(out, mode="quick")

    assert report.ok
    assert report.litter == 1


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
