"""The manifest: a list of units in segments."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.core.errors import OutputError
from embq.core.run import manifest as module
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest, ManifestSummary, first_segment_writer
from embq.core.run.unit_sizes import UnitSize
from embq.core.units import Unit

RAW = b"/data/\xff\x80 raw".decode("utf-8", "surrogateescape")


def unit(number: int) -> Unit:
    return Unit(
        kind="files",
        source=f"{RAW}{number}",
        samples=2,
        items=((f"\udcfe{number}.jpg", 3), ("ä.jpg", 4)),
        options=(("a", "b"),),
    )


def test_units_survive_the_manifest_with_names_that_are_not_utf8(layout: Layout) -> None:
    units = [unit(number) for number in range(5)]
    summary = first_segment_writer(layout).write(iter(units))
    there = Manifest(layout)
    assert list(there) == units
    assert [there.unit_id(u) for u in range(5)] == [one.unit_id for one in units]
    assert (summary.units, summary.samples, len(there)) == (5, 10, 5)
    assert list(layout.temporary.iterdir()) == []


def test_a_manifest_of_several_segments_is_read_at_random(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_UNITS", 4)
    units = [unit(number) for number in range(11)]
    first_segment_writer(layout).write(units)
    assert [path.name for path in sorted(layout.manifest.iterdir())] == [f"0000{n}.parquet" for n in range(3)]
    there = Manifest(layout)
    for u in random.Random(0).choices(range(11), k=40):
        assert there.unit(u) == units[u]
        assert there.unit_id(u) == units[u].unit_id


def test_what_units_hold_is_summed_over_segments_by_kind_without_those_that_are_done(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEGMENT_UNITS", 4)
    lines = [Unit(kind="jsonl", source="/a", start=100 * n, stop=100 * n + 90, samples=n + 1) for n in range(9)]
    rest = [Unit(kind="parquet", source="/b", samples=7, size=70), Unit(kind="tar", source="/c", stop=5000)]
    first_segment_writer(layout).write([*lines, *rest])
    there = Manifest(layout)
    done = bytes([0b10000000, 0b00100000])  # units 0 and 10
    left = {extent.kind: extent for extent in there.sizes_left(done).values() if extent.samples}
    assert left == {"jsonl": UnitSize("jsonl", 44, 720), "parquet": UnitSize("parquet", 7, 70)}
    assert [there.unit_size(u) for u in (0, 9, 10)] == [
        UnitSize("jsonl", 1, 90),
        UnitSize("parquet", 7, 70),
        UnitSize("tar", 1, 5000),
    ]


def test_the_manifest_of_a_version_that_kept_no_sizes_of_tables_is_read(layout: Layout) -> None:
    first_segment_writer(layout).write([Unit(kind="parquet", source="/b", samples=7, size=70)])
    (path,) = layout.manifest.iterdir()
    pq.write_table(pq.read_table(path).drop_columns(["size"]), path)
    there = Manifest(layout)
    assert there.unit_size(0) == UnitSize("parquet", 7, 0)
    assert there.sizes_left(b"\0") == {"parquet": UnitSize("parquet", 7, 0)}


def test_a_segment_ends_at_its_size_too(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 1)
    first_segment_writer(layout).write([unit(number) for number in range(3)])
    assert len(list(layout.manifest.iterdir())) == 3
    assert len(Manifest(layout)) == 3


def test_the_digest_tells_lists_apart_and_not_how_they_were_cut(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = [unit(number) for number in range(3)]
    whole = first_segment_writer(layout).write(units)
    monkeypatch.setattr(module, "SEGMENT_UNITS", 1)
    assert first_segment_writer(layout).write(units) == whole
    assert first_segment_writer(layout).write(units[::-1]).digest != whole.digest
    assert first_segment_writer(layout).write(units[:2]).digest != whole.digest


def test_leftovers_of_a_plan_that_was_killed_do_not_join_the_list(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "SEGMENT_UNITS", 1)
        first_segment_writer(layout).write([unit(number) for number in range(4)])
    first_segment_writer(layout).write([unit(9)])
    assert list(Manifest(layout)) == [unit(9)]


def test_the_number_of_samples_is_unknown_where_one_unit_does_not_say(layout: Layout) -> None:
    summary = first_segment_writer(layout).write([unit(0), Unit(kind="tar", source="/a.tar")])
    assert (summary.units, summary.samples) == (2, None)
    assert isinstance(summary, ManifestSummary)


def test_people_can_read_the_columns(layout: Layout) -> None:
    first_segment_writer(layout).write([unit(7)])
    (row,) = pq.read_table(layout.manifest / "00000.parquet").drop_columns(["description"]).to_pylist()
    assert row["source"] == "/data/\\udcff\\udc80 raw7"
    assert (row["unit_id"], row["kind"], row["samples"]) == (unit(7).unit_id, "files", 2)


@pytest.mark.parametrize("u", [-1, 3])
def test_a_unit_beyond_the_list_is_an_index_error(layout: Layout, u: int) -> None:
    first_segment_writer(layout).write([unit(number) for number in range(3)])
    with pytest.raises(IndexError):
        Manifest(layout).unit(u)


def test_a_damaged_segment_is_named(layout: Layout) -> None:
    first_segment_writer(layout).write([unit(0)])
    (layout.manifest / "00000.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(OutputError, match=r"00000\.parquet cannot be read"):
        Manifest(layout)


def test_an_empty_list_is_an_empty_manifest(layout: Layout) -> None:
    assert first_segment_writer(layout).write([]).units == 0
    assert list(Manifest(layout)) == []


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(segment, last column) of each read of a segment's table."""
    reads: list[tuple[str, str]] = []
    real = module._read_table

    def counted(path: Path, columns: Sequence[str]) -> pa.Table:
        reads.append((path.name, columns[-1]))
        return real(path, columns)

    monkeypatch.setattr(module, "_read_table", counted)
    return reads


def test_units_that_alternate_over_a_boundary_of_segments_read_each_segment_once(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, reads: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(module, "SEGMENT_UNITS", 4)
    monkeypatch.setattr(module, "CACHED_BYTES", 0)  # two segments are held whatever their size
    units = [unit(number) for number in range(12)]
    first_segment_writer(layout).write(units)
    manifest = Manifest(layout)
    for u in [3, 4, 2, 5, 1, 6, 0, 7]:
        assert manifest.unit(u) == units[u]
        assert manifest.unit_id(u) == units[u].unit_id
        assert manifest.unit_size(u).samples == 2
    assert manifest.find(units[6].unit_id) == units[6]
    assert manifest.find(units[0].unit_id) == units[0]
    assert sorted(reads) == [(f"0000{n}.parquet", column) for n in (0, 1) for column in ("description", "size")]


def test_a_manifest_drops_the_segments_used_least_recently_beyond_its_bytes(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, reads: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(module, "SEGMENT_UNITS", 4)
    units = [unit(number) for number in range(40)]
    first_segment_writer(layout).write(units)
    manifest = Manifest(layout)
    manifest.unit(0)
    monkeypatch.setattr(module, "CACHED_BYTES", 9 * manifest._units.bytes // 2)
    for u in range(0, 40, 4):
        assert manifest.unit(u) == units[u]
        assert manifest.unit_id(8) == units[8].unit_id  # in use, so it stays
        assert manifest._units.bytes <= module.CACHED_BYTES
    assert len(list(manifest._units)) == 4
    assert list(manifest._units)[:2] == [2, 9]
    assert [name for name, _ in reads].count("00002.parquet") == 1
    manifest.unit(0)
    assert [name for name, _ in reads].count("00000.parquet") == 2
