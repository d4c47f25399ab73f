"""Promises of every kind of input, checked against every kind; they are in `embq.testing.sources`."""

from __future__ import annotations

from pathlib import Path

import pytest

from embq.app.ui.thumbnails.images import TEXT_KINDS
from embq.app.verify.findings import Findings
from embq.app.verify.manifest import Coverage
from embq.app.verify.source_lines import SLICED
from embq.sources.kinds import SOURCES
from embq.sources.reader_options import KINDS
from embq.testing.sources import *  # noqa: F403
from embq.testing.sources import Case
from tests.contract.inputs import CASES


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
