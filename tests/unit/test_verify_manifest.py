"""What `embq verify` says of units that do not cover their sources, with the place and the numbers of each gap."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from embq.app.verify.findings import Findings
from embq.app.verify.manifest import Coverage, check_digests, check_manifest
from embq.core.run.layout import Layout
from embq.core.run.run_info import RunInfo, load_run
from embq.core.units import Retry, Unit
from tests.support.outputs.run_case import unit_of, write_run
from tests.support.planning import units_of

SIZE = 40
RETRY = Retry(unit=0, failed=0, record=2, attempts=1, replaces=1)


def part(start: int, stop: int, first: int, samples: int | None = 2, source: str = "/a", kind: str = "lines") -> Unit:
    """A slice of a file of `SIZE` bytes."""
    return Unit(kind=kind, source=source, start=start, stop=stop, first=first, samples=samples, etag=f"1-{SIZE}")


WHOLE = (part(0, 20, 0), part(20, 40, 2))
AGAIN = None
"""The next generation begins."""


@dataclass(frozen=True)
class Case:
    """Units in order, and the finding of them as (place, numbers in the message); None if they are sound."""

    units: Sequence[Unit | None]
    finding: tuple[str, str] | None = None
    selected: bool = False
    mended: frozenset[str] = frozenset()


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
    "long": Case([part(0, 41, 0)], ("/a", "byte 41 had 40 bytes")),
    "short before another": Case([part(0, 39, 0), *(replace(it, source="/b") for it in WHOLE)], ("/a", "39 40")),
    "short before more": Case([part(0, 39, 0), AGAIN, *(replace(it, source="/b") for it in WHOLE)], ("/a", "39 40")),
    "two files": Case([*WHOLE, *(replace(it, source="/b") for it in WHOLE)]),
    "a file as another kind": Case([*WHOLE, *(replace(it, kind="tar") for it in WHOLE)]),
    "no size in its version": Case([replace(part(0, 39, 0), etag="of a bucket")]),
    "a selection": Case([part(1, 20, 1), part(21, 39, 4)], selected=True),
    "bytes of a selection twice": Case([WHOLE[0], part(19, 40, 2)], ("unit 1", "byte 19 not 20"), selected=True),
    "samples of a selection twice": Case([WHOLE[0], part(20, 40, 1)], ("unit 1", "number 1 not 2"), selected=True),
    "a shard": Case([part(0, 40, 0, None, kind="tar")]),
    "a short shard": Case([part(0, 39, 0, None, kind="tar")], ("/a", "39 40")),
    "one that could not be planned": Case([part(0, 0, 0, None)]),
    "compressed": Case(COMPRESSED),
    "a gap of compressed samples": Case([COMPRESSED[0], replace(COMPRESSED[1], first=3)], ("unit 1", "number 3 not 2")),
    "rows of a table": Case([part(0, 0, 0, kind="parquet"), part(0, 0, 2, kind="parquet")]),
    "a gap of rows": Case([part(0, 0, 0, kind="parquet"), part(0, 0, 3, kind="parquet")], ("unit 1", "3 not 2")),
    "a table behind its header": Case([part(9, 40, 0, kind="csv")]),
    "a file twice in two generations": Case([*WHOLE, AGAIN, *WHOLE]),
    "a retry": Case([*WHOLE, replace(part(3, 7, 9), retry=replace(RETRY, only="9"))]),
    "more behind a repaired one": Case(
        [
            *(part(0, 0, 0, None, kind="parquet"), AGAIN),
            *(replace(part(0, 0, 0, 5, kind="parquet"), retry=RETRY), AGAIN, part(0, 0, 5, kind="parquet")),
        ],
        mended=frozenset(["/a"]),
    ),
    "a gap behind a repaired one": Case(
        [replace(part(0, 0, 0, 5, kind="parquet"), retry=RETRY), AGAIN, part(0, 0, 6, kind="parquet")],
        ("unit 1", "number 6 not 5"),
        mended=frozenset(["/a"]),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_gap_is_named_with_its_place_and_its_numbers(case: Case) -> None:
    findings = Findings()
    cover = Coverage(findings, case.mended, is_complete=not case.selected)
    u = 0
    for unit in case.units:
        if unit is None:
            cover.next_generation()
        else:
            cover.check_unit(u, unit)
            u += 1
    cover.end()
    assert [(it.invariant, it.where) for it in findings.violations] == (
        [("coverage", case.finding[0])] if case.finding else []
    )
    for found in findings.violations:
        assert case.finding is not None
        words = found.message.replace(",", "").split()
        assert [it for it in case.finding[1].split() if it not in words] == [], found.message


@pytest.mark.parametrize("rest", ["", "\n\n", " \n", "x\n"])
def test_blank_lines_behind_the_rows_of_a_table_belong_to_no_unit(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,text\n1,a\n2,b\n" + rest)
    *_, last = units_of(path, unit_samples=1)
    findings = Findings()
    for shorter in range(2):
        cover = Coverage(findings, frozenset(), is_complete=True)
        cover.check_unit(0, replace(last, stop=16, first=0))
        cover.end()
        path.write_text("id,text\n1,a\n2,b\n"[: 16 - shorter])
    size = 16 + len(rest)
    assert [it.message.split()[5::5] for it in findings.violations] == ([["16,", str(size)]] if "x" in rest else [])


def test_images_of_a_folder_are_counted_over_all_generations(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(b"\xff\xd8")
    (unit,) = units_of(tmp_path)
    findings = Findings()
    cover = Coverage(findings, frozenset(), is_complete=True)
    cover.check_unit(0, replace(unit, items=unit.items[:2], samples=2))
    cover.next_generation()
    cover.check_unit(1, replace(unit, items=unit.items[2:], samples=1, first=2))
    cover.end()
    assert (findings.violations, findings.notes) == ([], [])
    (tmp_path / "0.jpg").unlink()
    cover.end()
    (note,) = findings.notes
    assert (str(tmp_path) in note, "2 images" in note, "3 are planned" in note) == (True, True, True)
    elsewhere = Coverage(findings, frozenset(), is_complete=False)
    elsewhere.check_unit(0, replace(unit, items=unit.items[:1], samples=1))
    elsewhere.end()
    assert len(findings.notes) == 1, "of a selection nothing can be said"


def found(layout: Layout, info: RunInfo, *, quick: bool) -> list[tuple[str, str, str]]:
    findings = Findings()
    manifest = (check_digests if quick else check_manifest)(layout, info, findings)
    assert (manifest is None) == any("cannot be read" in it.message for it in findings.violations)
    return [(it.invariant, it.where, it.message) for it in findings.violations if it.invariant != "coverage"]


@pytest.mark.parametrize("quick", [True, False])
def test_a_manifest_is_compared_with_run_json(tmp_path: Path, quick: bool) -> None:
    root = tmp_path / "out"
    info, layout = write_run(root, [unit_of(number) for number in range(4)]), Layout(root)
    assert found(layout, info, quick=quick) == []
    assert load_run(root) == info
    other = found(layout, replace(info, manifest_digest="0" * 32), quick=quick)
    assert [(*it[:2], "run.json" in it[2]) for it in other] == [("manifest", "manifest", True)]
    path = root / "manifest" / info.segments[0]
    content = path.read_bytes()
    for damaged in (content[:-9], b"", json.dumps({}).encode()):
        path.write_bytes(damaged)
        assert [it[:2] for it in found(layout, info, quick=quick)] == [("manifest", "manifest")]


def test_a_unit_that_is_there_twice_is_named(tmp_path: Path) -> None:
    root = tmp_path / "out"
    info = write_run(root, [unit_of(1), unit_of(2), unit_of(1)])
    assert [it[2] for it in found(Layout(root), info, quick=False)] == ["two of its units are the same"]
