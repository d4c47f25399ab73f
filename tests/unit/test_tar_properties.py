"""Properties of the strict tar reader, for archives of all shapes: all that was written, or what is wrong."""

from __future__ import annotations

import tarfile

from hypothesis import given, settings
from hypothesis import strategies as st

from embq.sources.formats.tar_headers import BLOCK, DAMAGE_CODES, parse_members
from tests.support.archives import outcome_of, tar_of

EXACT = settings(max_examples=60, derandomize=True, database=None)

NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=300).filter(
    lambda name: not name.endswith("/") and name.strip("/")
)
MEMBERS = st.lists(st.tuples(NAMES, st.binary(max_size=1500)), max_size=8)
FORMATS = st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


@EXACT
@given(MEMBERS, FORMATS)
def test_it_gives_the_names_and_contents_that_were_written(members: list[tuple[str, bytes]], form: int) -> None:
    data = tar_of(members, form)
    assert [(found.name, data[found.start : found.stop]) for found in parse_members(data, "s.tar")] == members


@EXACT
@given(MEMBERS, FORMATS, st.data())
def test_cut_anywhere_it_gives_all_members_or_an_error(
    members: list[tuple[str, bytes]], form: int, draw: st.DataObject
) -> None:
    data = tar_of(members, form)
    length = draw.draw(st.integers(0, len(data) - 1))
    found = outcome_of(data[:length])
    assert found in DAMAGE_CODES or found == parse_members(data, "s.tar")


@EXACT
@given(MEMBERS, FORMATS, st.data())
def test_whatever_stands_in_it_members_lie_inside_and_errors_have_a_code(
    members: list[tuple[str, bytes]], form: int, draw: st.DataObject
) -> None:
    data = bytearray(tar_of(members, form))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    found = outcome_of(bytes(data))
    if isinstance(found, str):
        assert found in DAMAGE_CODES
        return
    assert len(found) == len(members), "a member more or less, and nothing said"
    end = 0
    for member in found:
        assert end <= member.at < member.start <= member.stop <= len(data)
        end = member.stop


@EXACT
@given(st.binary(max_size=4 * BLOCK))
def test_noise_is_an_error_with_a_code(data: bytes) -> None:
    found = outcome_of(data)
    assert found in DAMAGE_CODES or (found == [] and not any(data))
