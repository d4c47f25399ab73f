"""Promises of every kind of input, checked against every kind; they are in `embq.testing.sources`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from embq.app.verify.findings import Findings
from embq.app.verify.manifest import Coverage
from embq.app.verify.source_lines import SLICED
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.producer.enqueue import Request, prepare
from embq.producer.plan import plan
from embq.producer.selection import Selection
from embq.retrieval.ui.thumbnails.images import TEXT_KINDS
from embq.sources.kinds import SOURCES
from embq.sources.reader_options import KINDS
from embq.sources.unit_reader import read_here
from embq.testing.sources import *  # noqa: F403
from embq.testing.sources import Case
from tests.contract.inputs import CASES, write_lines, write_shard


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    case = request.param
    assert isinstance(case, Case)
    return case


def test_every_kind_has_a_case() -> None:
    assert {case.kind for case in CASES} == set(SOURCES)
    assert all(source.kind == kind for kind, source in SOURCES.items())
    assert set(SOURCES) == KINDS
    assert {kind for kind, source in SOURCES.items() if source.modalities == ("text",)} == set(TEXT_KINDS)


def test_verify_names_a_lost_unit_of_every_kind_that_is_cut_by_bytes(case: Case, tmp_path: Path) -> None:
    units = case.split(case.write(tmp_path))
    if len(units) == 1 or not units[-1].stop or units[-1].items:
        return  # a shard, or cut by rows or names
    assert case.kind in SLICED, "verify must find the slices of a mended file"
    if case.form:
        return  # bytes of a compressed file are not counted
    for lost in (units[1:], units[:-1]):
        cover = Coverage(findings := Findings(), set(), is_complete=True)
        for u, unit in enumerate(lost):
            cover.check_unit(u, unit)
        cover.end()
        assert {found.invariant for found in findings.violations} == {"coverage"}


@pytest.mark.parametrize("limit", [1, 7, 10, 39, 40, 50])
def test_a_limit_takes_exactly_that_many_samples_of_every_kind(case: Case, limit: int, tmp_path: Path) -> None:
    planned = plan([str(case.write(tmp_path))], OPTIONS, selection=Selection(limit=limit))  # noqa: F405
    samples = [sample for unit in planned.units for sample in read_here(unit, ())]
    assert [(s.key, s.image, s.text) for s in samples] == case.listing[:limit]


def test_a_limit_that_grows_adds_what_is_missing_of_every_kind(case: Case, tmp_path: Path) -> None:
    request = Request(
        inputs=(str(case.write(tmp_path)),),
        output=tmp_path / "out",
        models=("stub:8",),
        modalities=(),
        precision="fp32",
        part_rows=1000,
        options=OPTIONS,  # noqa: F405
        version="0",
    )
    for limit, expected in ((3, 3), (10, 10), (12, 12), (5, 12), (0, 40), (9, 40)):
        prepare(replace(request, selection=Selection(limit=limit)))
        units = list(Manifest(Layout(tmp_path / "out")))
        samples = [sample for unit in units for sample in read_here(unit, ())]
        assert [(s.key, s.image, s.text) for s in samples] == case.listing[:expected]


def test_a_limit_counts_the_samples_of_damaged_shards(tmp_path: Path) -> None:
    shard = write_shard(tmp_path)
    shard.write_bytes(shard.read_bytes()[: 20 * 2048])
    inputs = [str(shard), str(write_lines(tmp_path))]
    for damaged, of_shard in (("", 1), ("keep", 20)):
        options = replace(OPTIONS, damaged=damaged)  # noqa: F405
        units = list(plan(inputs, options, ["text"], selection=Selection(limit=25)).units)
        assert sum(unit.samples or 0 for unit in units[1:]) == 25 - of_shard
        (part,) = plan(inputs[:1], replace(options, damaged="keep"), selection=Selection(limit=6)).units
        assert [sample.key for sample in read_here(part, ())] == list(ROWS)[:6]  # noqa: F405
