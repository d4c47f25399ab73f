"""What `embq verify` says of units that do not cover their sources, with the place and the numbers of each gap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.app.verify.findings import Findings
from embq.app.verify.manifest import Coverage, check_digests, check_manifest
from embq.core.run.layout import Layout
from embq.core.run.run_info import RunInfo
from embq.core.units import Retry, Unit
from embq.producer.enqueue import prepare
from tests.support.outputs.build import request_of, set_column
from tests.support.outputs.run_case import unit_of, write_run

SIZE = 40
RETRY = Retry(unit=0, failed=0, record=2, attempts=1, replaces=1)


def part(start: int, stop: int, first: int, samples: int | None = 2, source: str = "/a", kind: str = "lines") -> Unit:
    """A slice of a file of `SIZE` bytes."""
    return Unit(kind=kind, source=source, start=start, stop=stop, first=first, samples=samples, etag=f"1-{SIZE}")


WHOLE = (part(0, 20, 0), part(20, 40, 2))
AGAIN = None
"""The next generation begins."""


class Case(NamedTuple):
    """Units in order, and the finding of them as (place, numbers in the message); None if they are sound."""

    units: Sequence[Unit | None]
    finding: tuple[str, str] | None = None
    selected: bool = False
    mended: frozenset[str] = frozenset()


def rows(first: int, samples: int | None = 2, retry: Retry | None = None) -> Unit:
    return replace(part(0, 0, first, samples, kind="parquet"), retry=retry)


A, OTHER = frozenset(["/a"]), tuple(replace(unit, source="/b") for unit in WHOLE)
COMPRESSED = [replace(unit, options=(("compression", "gzip"),), stop=7) for unit in WHOLE]
CASES = {
    "whole": Case(WHOLE),
    "not from its beginning": Case([part(1, 40, 0)], ("unit 0", "byte 1 of /a not 0")),
    "not from its first sample": Case([part(0, 40, 1)], ("unit 0", "number 1 not 0")),
    "a gap of bytes": Case([WHOLE[0], part(21, 40, 2)], ("unit 1", "byte 21 of /a not 20")),
    "bytes twice": Case([WHOLE[0], part(19, 40, 2)], ("unit 1", "byte 19 of /a not 20")),
    "a gap of samples": Case([WHOLE[0], part(20, 40, 3)], ("unit 1", "number 3 not 2")),
    "samples twice": Case([WHOLE[0], part(20, 40, 1)], ("unit 1", "number 1 not 2")),
    "short": Case([part(0, 39, 0)], ("/a", "byte 39 had 40 bytes")),
    "short before another": Case([part(0, 39, 0), *OTHER], ("/a", "39 40")),
    "short before more": Case([part(0, 39, 0), AGAIN, *OTHER], ("/a", "39 40")),
    "a file as another kind": Case([*WHOLE, *(replace(it, kind="tar") for it in WHOLE)]),
    "no size in its version": Case([replace(part(0, 39, 0), etag="of a bucket")]),
    "a selection": Case([part(1, 20, 1), part(21, 39, 4)], selected=True),
    "bytes of a selection twice": Case([WHOLE[0], part(19, 40, 2)], ("unit 1", "byte 19 not 20"), selected=True),
    "samples of a selection twice": Case([WHOLE[0], part(20, 40, 1)], ("unit 1", "number 1 not 2"), selected=True),
    "a shard": Case([part(0, 40, 0, None, kind="tar")]),
    "one that could not be planned": Case([part(0, 0, 0, None)]),
    "compressed": Case(COMPRESSED),
    "rows of a table": Case([rows(0), rows(2)]),
    "more rows": Case([rows(0), AGAIN, rows(2)], ("unit 1", "2 not 0")),
    "more rows of a repaired table": Case([rows(0), AGAIN, rows(2)], mended=A),
    "a repaired shard": Case([*[part(0, 40, 0, None, kind="tar"), AGAIN] * 2], mended=A),
    "parts of a shard": Case([part(0, 20, 0, None, kind="tar"), part(20, 40, 0, None, kind="tar")]),
    "a gap of rows": Case([rows(0), rows(3)], ("unit 1", "3 not 2")),
    "a table behind its header": Case([part(9, 40, 0, kind="csv")]),
    "a file twice in two generations": Case([*WHOLE, AGAIN, *WHOLE]),
    "a retry": Case([*WHOLE, replace(part(3, 7, 9), retry=replace(RETRY, only="9"))]),
    "more behind a repaired one": Case([rows(0, None), AGAIN, rows(0, 5, RETRY), AGAIN, rows(5)], mended=A),
    "a gap behind a repaired one": Case([rows(0, 5, RETRY), AGAIN, rows(6)], ("unit 1", "6 not 5"), mended=A),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_gap_is_named_with_its_place_and_its_numbers(case: Case) -> None:
    findings = Findings()
    cover = Coverage(findings, case.mended, is_complete=not case.selected)
    numbers = count()
    for unit in case.units:
        cover.next_generation() if unit is None else cover.check_unit(next(numbers), unit)
    cover.end()
    place, words = case.finding or ("", "")
    assert [(it.invariant, it.where) for it in findings.violations] == [("coverage", place)] * bool(place)
    assert all({*words.split()} <= {*it.message.replace(",", "").split()} for it in findings.violations)


def found(root: Path, info: RunInfo, *, quick: bool = False) -> list[tuple[str, str, str]]:
    findings = Findings()
    manifest = (check_digests if quick else check_manifest)(Layout(root), info, findings)
    assert (manifest is None) == any("cannot be read" in it.message for it in findings.violations)
    return [(it.invariant, it.where, it.message) for it in findings.violations]


@pytest.mark.parametrize("quick", [True, False])
def test_each_generation_of_a_manifest_is_compared_with_its_digest(tmp_path: Path, quick: bool) -> None:
    root, path = tmp_path / "out", tmp_path / "in" / "a.txt"
    path.parent.mkdir()
    for name in "abc":
        path.with_name(f"{name}.txt").write_text("x\n" * 5)
        info = prepare(request_of(root, path.parent)).info
    assert (found(root, info, quick=quick), len(info.added), info.units) == ([], 2, 6)
    first, second = info.added
    for other, name in (
        (replace(info, manifest_digest="0" * 32), "run.json"),
        (replace(info, added=(replace(first, digest="0" * 32), second)), "generation 1"),
        (replace(info, added=(first, replace(second, digest="0" * 32))), "generation 2"),
    ):
        ((*place, message),) = found(root, other, quick=quick)
        assert (place, f" {name} " in message) == (["manifest", "manifest"], True)
    content = (root / "manifest" / info.segments[0]).read_bytes()
    for damaged in (content[:-9], b""):
        (root / "manifest" / info.segments[0]).write_bytes(damaged)
        assert [it[:2] for it in found(root, info, quick=quick)] == [("manifest", "manifest")]


def test_units_of_a_selection_may_have_gaps_and_no_two_are_the_same(tmp_path: Path) -> None:
    gap = [part(0, 0, 0, kind="parquet"), part(0, 0, 5, kind="parquet")]
    info = write_run(tmp_path / "out", gap)
    assert [it[:2] for it in found(tmp_path / "out", info)] == [("coverage", "unit 1")]
    for name in ("exclude", "include", "limit", "sample"):
        assert found(tmp_path / "out", replace(info, options=(("text_column", "t"), (name, "1")))) == []
    (*place, message), _ = found(tmp_path / "out", replace(info, units=3))
    assert (place, "it has 2 units, run.json says 3") == (["manifest", "manifest"], message)
    twice = write_run(tmp_path / "twice", [unit_of(1), unit_of(2), unit_of(1)])
    assert [it[2] for it in found(tmp_path / "twice", twice)] == ["two of its units are the same"]
    path = tmp_path / "twice" / "manifest" / twice.segments[0]
    table = pq.read_table(path)
    ids = ["0" * 32, *table["unit_id"].to_pylist()[1:]]
    pq.write_table(set_column(table, "unit_id", pa.array(ids)), path)
    assert ("manifest", "unit 0") in [it[:2] for it in found(tmp_path / "twice", twice)]
