"""Objects that others have put into a bucket in which embq builds or reads an index."""

from __future__ import annotations

from pathlib import Path

import pytest

from embq.core.storage.objects import ObjectPath
from embq.core.wire import decimal
from embq.index.index_files import claim

NAMES = (
    "²",
    "٣",
    "9" * 400,
    "9" * 18,
    "-1",
    "0x1",
    "1e3",
    "..",
    ".",
    "a b",
    "\u202e7",
    "probe-x",
    "7/7",
)


@pytest.mark.parametrize("name", ["²", "٣", "9" * 5_000, "-1", "+1", " 1", "1_0", "", "0x1", "1e3"])
def test_only_numbers_of_bounded_length_are_numbers(name: str) -> None:
    """`int` refuses what `str.isdigit` takes, and texts of more than 4,300 digits."""
    assert decimal(name) is None
    assert decimal("000042") == 42


def test_objects_of_any_name_in_its_place_do_not_keep_an_index_from_being_claimed(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A superscript ended the build with a bug, and after a number of 400 digits no claim was possible."""
    monkeypatch.setattr(claim, "STALE_S", 0.0)
    folder = ObjectPath(f"s3://bucket/{tmp_path.name}/_lock")
    for name in NAMES:
        (folder / name).replace(b'{"host": [], "pid": "x"}')
    with claim.claimed(folder.parent, folder.name) as check:
        check()
    with claim.claimed(folder.parent, folder.name) as check:
        check()
