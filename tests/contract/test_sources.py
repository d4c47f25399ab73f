"""Promises of every kind of input, checked against every kind; they are in `embq.testing.sources`."""

from __future__ import annotations

import pytest

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
