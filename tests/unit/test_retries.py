"""The record of a retry: ranges of ordinals, a digest of keys, and what its record does to the account."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embq.core.errors import MalformedError
from embq.core.run.commit_log import LogState
from embq.core.run.commits import Commit, CommittedUnit
from embq.core.units import Retry, Unit, from_ranges, key_digest, to_ranges

RETRY = Retry(unit=3, failed=7, record=5, attempts=2, replaces=4, only="0-2,9", keys="ab", samples=10)


@given(st.sets(st.integers(0, 400)))
def test_ordinals_survive_their_ranges(ordinals: set[int]) -> None:
    assert from_ranges(to_ranges(sorted(ordinals))) == sorted(ordinals)


@pytest.mark.parametrize("text", ["3-1", "1,1", "2,1", "1-3,2", "-1", "a", "1,", ",", "1--2", "0-10000000"])
def test_text_that_is_no_ascending_ranges_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_ranges(text)


def test_runs_of_ordinals_are_short() -> None:
    assert to_ranges([*range(4), 7]) == "0-3,7"
    assert to_ranges([]) == ""


def test_the_digest_depends_on_order_and_borders_of_keys_as_they_are_stored() -> None:
    assert len({key_digest(keys) for keys in (["a", "b"], ["b", "a"], ["ab"], ["a", "b", ""], [])}) == 5
    assert key_digest(["x\udcff"]) == key_digest(["x\\udcff"])


def test_a_retry_survives_its_description_and_a_unit_of_the_inputs_says_nothing_of_it() -> None:
    unit = Unit(kind="tar", source="s.tar", stop=9, etag="1-9", retry=RETRY)
    described = json.loads(json.dumps(unit.describe()))
    assert Unit.from_description(described) == unit
    assert (unit.selected, unit.expected) == ([0, 1, 2, 9], 4)
    plain = replace(unit, retry=None)
    assert "retry" not in plain.describe()
    assert plain.unit_id == "b29f8d4e0243342b1d70bc18f7cab4bb"
    assert plain.unit_id != unit.unit_id


@pytest.mark.parametrize(
    "change", [{"only": "2-1"}, {"unit": "x"}, {"more": 1}, {"samples": "many"}, {"attempts": None}]
)
def test_a_description_of_another_shape_is_refused(change: dict[str, object]) -> None:
    described = Unit(kind="tar", source="s", retry=RETRY).describe()
    described["retry"] |= change
    with pytest.raises(MalformedError, match="unit is malformed"):
        Unit.from_description(described)


def committed(u: int, **counts: int | str) -> CommittedUnit:
    return CommittedUnit(**{"u": u, "unit_id": "x", "token": "t", "first_row": 0, "rows": 0, "failures": 0, **counts})  # type: ignore[arg-type]


def replayed(*units: CommittedUnit) -> LogState:
    state = LogState(units=len(units))
    for n, unit in enumerate(units, start=1):
        totals = state.totals([unit])
        record = Commit(n=n, run="r", kind="data", prev=state.prev, epoch=1, writer="w", version="0", units=(unit,))
        data, digest = replace(record, totals=totals).seal()
        state.apply(Commit.parse(data, "record"))
        assert (state.totals(), state.prev) == (totals, digest)
    return state


def test_a_retry_takes_the_place_of_failures_in_the_totals() -> None:
    state = replayed(
        committed(0, rows=6, failures=4),
        committed(1, failures=1, quarantined="shard_truncated"),
        committed(2, rows=3, failures=1, supersedes=4),
        committed(3, rows=9, failures=1, supersedes=1, lifts=1),
        committed(4, rows=2, supersedes=2),
    )
    assert (state.rows, state.failures, state.quarantined, state.retries) == (20, 0, 0, 3)


def test_a_whole_unit_that_fails_again_stays_one_quarantined_unit() -> None:
    whole = {"failures": 1, "quarantined": "shard_truncated"}
    state = replayed(committed(0, **whole), committed(1, supersedes=1, lifts=1, **whole))
    assert (state.failures, state.quarantined) == (1, 1)
