"""Promises of `embq.sources.interface.Source` as tests, for a kind of input of a plug-in.

A test file of the plug-in takes them over and gives an input::

    from embq.testing.sources import *


    @pytest.fixture
    def case() -> Case:
        return Case(kind="hdf5", write=write_hdf5, change=touch, listing=LISTING)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from embq.core.errors import InputError, SourceError
from embq.core.units import Unit
from embq.sources.access.files import WatchedFile
from embq.sources.kinds import source_for
from embq.sources.reader_options import ReadOptions
from embq.sources.unit_reader import read

OPTIONS = ReadOptions(unit_samples=7)
ROWS = {f"{number:03d}": f"the text of {number}" for number in range(40)}
"""Key -> text of every sample: the listing that is independent of any reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind with an input of it.

    Attributes:
        kind: the kind's name.
        form: which of several forms of that kind, such as its compression.
        write: writes `ROWS` as this kind below a folder, and returns the input's path.
        change: alters a written input.
        listing: (key, image, text) of each sample that must come out, in order.
    """

    kind: str
    form: str = ""
    write: Callable[[Path], Path]
    change: Callable[[Path], object]
    listing: Sequence[tuple[str, bytes | None, str | None]]

    def __str__(self) -> str:
        return f"{self.kind}.{self.form}" if self.form else self.kind

    def split(self, path: Path) -> list[Unit]:
        """The units of a written input."""
        return list(source_for(self.kind).split(str(path), OPTIONS))


def test_splitting_twice_gives_the_same_units(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    assert case.split(path) == case.split(path)


def test_unit_ids_are_unique_and_survive_json(case: Case, tmp_path: Path) -> None:
    units = case.split(case.write(tmp_path))
    assert len({unit.unit_id for unit in units}) == len(units)
    for unit in units:
        again = Unit.from_description(json.loads(json.dumps(unit.describe())))
        assert again == unit
        assert again.unit_id == unit.unit_id


def test_the_units_together_give_exactly_the_listing(case: Case, tmp_path: Path) -> None:
    units = case.split(case.write(tmp_path))
    samples = [sample for unit in units for sample in source_for(case.kind).read(unit)]
    assert [(s.key, s.image, s.text) for s in samples] == case.listing
    assert all(sample.error is None for sample in samples)


def test_ordinals_and_counts_are_as_planned(case: Case, tmp_path: Path) -> None:
    first = 0
    for unit in case.split(case.write(tmp_path)):
        ordinals = [sample.ordinal for sample in source_for(case.kind).read(unit)]
        assert ordinals == list(range(len(ordinals)))
        assert unit.samples in (None, len(ordinals))
        assert unit.first == first
        if unit.samples is not None:
            assert unit.samples <= OPTIONS.unit_samples
            first += unit.samples


def test_a_unit_can_be_read_again(case: Case, tmp_path: Path) -> None:
    unit = case.split(case.write(tmp_path))[0]
    assert list(source_for(case.kind).read(unit)) == list(source_for(case.kind).read(unit))


def test_a_source_that_changed_after_planning_is_never_read_as_if_it_had_not(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    unit = case.split(path)[0]
    case.change(path)
    try:
        codes = {sample.error[0] for sample in source_for(case.kind).read(unit) if sample.error}
    except SourceError as error:
        codes = {error.code}
    assert codes <= {"source_changed", "shard_changed"}
    assert codes


def test_a_source_that_vanished_is_named(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    unit = case.split(path)[0]
    path.rename(tmp_path / "moved")
    with pytest.raises(SourceError, match=str(path)) as caught:
        list(source_for(case.kind).read(unit))
    assert caught.value.code == "source_missing"
    assert not caught.value.transient
    with pytest.raises(InputError) as planned:
        case.split(path)
    assert planned.value.code == "source_missing"


def test_a_path_of_another_type_is_refused_without_waiting(case: Case, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError):
        case.split(pipe)
    with pytest.raises(SourceError):
        list(source_for(case.kind).read(Unit(kind=case.kind, source=str(pipe) + "/x", samples=0)))


def test_storage_that_fails_is_worth_another_try(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = case.split(case.write(tmp_path))[0]

    def stale(*_: object, **__: object) -> object:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("embq.sources.access.files.WatchedFile.__init__", stale)
    with pytest.raises(SourceError) as caught:
        list(source_for(case.kind).read(unit))
    assert (caught.value.code, caught.value.transient) == ("source_unreadable", True)


@pytest.mark.parametrize("good", [0, 1, 2])
def test_storage_that_fails_while_it_is_read_is_worth_another_try(
    case: Case, good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = case.split(case.write(tmp_path))[-1]
    readinto = WatchedFile.readinto
    reads = 0

    def stale(file: WatchedFile, buffer: object) -> int:
        nonlocal reads
        reads += 1
        if reads > good:
            raise OSError(116, "Stale file handle")
        return readinto(file, buffer)

    monkeypatch.setattr(WatchedFile, "readinto", stale)
    try:
        samples = list(source_for(case.kind).read(unit))
    except SourceError as error:
        assert (error.code, error.transient) == ("source_unreadable", True)  # noqa: PT017
    else:  # it needed no more than that
        assert reads <= good
        assert samples


def test_who_watches_is_told_of_what_comes_in(case: Case, tmp_path: Path) -> None:
    (unit, *_) = case.split(case.write(tmp_path))
    calls = 0

    def on_progress() -> None:
        nonlocal calls
        calls += 1

    list(read(unit, (), on_progress=on_progress))
    assert calls > 0
