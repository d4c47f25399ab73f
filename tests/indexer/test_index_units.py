"""Index units: done once, whoever does them and however often."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from embq.core.errors import InputError, OutputError
from embq.index.index_files.files import disk_error, to_json
from embq.index.stages.build_dir import BuildDir
from embq.index.stages.task import StageResult, Task, perform
from embq.index.stages.units import IndexUnit, Sidecar, find, read_inputs, write_inputs


@pytest.fixture
def unit(tmp_path: Path) -> IndexUnit:
    """A unit of a build whose spec is a few words."""
    build_dir = BuildDir(tmp_path / "index", "b1")
    build_dir.make()
    build_dir.write_once(build_dir.spec, {"word": "spec"})
    return IndexUnit(
        index=str(build_dir.index), build="b1", stage="sample", number=3, inputs=write_inputs(build_dir, {})
    )


def stage_that_writes(text: str):
    """A stage function whose payload is `text`."""

    def stage(task: Task) -> StageResult:
        path, kept = task.temporary("txt"), task.temporary("kept.txt")
        path.write_text(text + str(task.spec["word"]))
        kept.write_text("kept")
        return StageResult(work={"text": path}, index_files={"kept": kept}, stats={"length": len(text)})

    return stage


def do(unit: IndexUnit, text: str = "a ") -> str:
    """Perform the unit; gives what its payload says."""
    sidecar = perform(unit, stage_that_writes(text), threads=1, memory_bytes=1, worker="w")
    return sidecar.files["text"].check(Path(unit.index)).read_text()


def done(unit: IndexUnit) -> Sidecar:
    sidecar = find(unit)
    assert sidecar is not None
    return sidecar


def test_a_unit_that_is_done_is_not_done_again(unit: IndexUnit) -> None:
    """Given a sidecar, when the unit is performed again, then the first payload stands and nothing is written."""
    assert do(unit, "first ") == "first spec"
    before = sorted(unit.build_dir.index.rglob("*"))
    assert do(unit, "second ") == "first spec"
    assert sorted(unit.build_dir.index.rglob("*")) == before


def test_of_two_attempts_at_once_the_first_sidecar_stands_and_the_other_payload_goes(unit: IndexUnit) -> None:
    """Given an attempt that finishes while another one is at it, then both answer with the payload of the first."""

    def overtaken(task: Task) -> StageResult:
        assert do(unit, "first ") == "first spec"
        return stage_that_writes("second ")(task)

    sidecar = perform(unit, overtaken, threads=1, memory_bytes=1, worker="slow")
    assert sidecar.files["text"].check(Path(unit.index)).read_text() == "first spec"
    assert len(list((unit.build_dir.index / "files").iterdir())) == 1


def test_a_payload_that_is_gone_or_cut_makes_its_unit_undone(unit: IndexUnit) -> None:
    """Given a sidecar whose payload has lost bytes, then the unit is done anew."""
    do(unit, "first ")
    sidecar = find(unit)
    assert sidecar is not None
    (Path(unit.index) / sidecar.files["text"].path).write_text("x")
    assert find(unit) is None
    assert do(unit, "second ") == "second spec"


def test_a_unit_that_cannot_be_done_leaves_no_sidecar(unit: IndexUnit) -> None:
    """Given a stage that refuses, then its error comes through and the unit stays undone."""

    def refuse(task: Task) -> StageResult:
        raise InputError("not this", code="bad_vectors")

    with pytest.raises(InputError, match="not this"):
        perform(unit, refuse, threads=1, memory_bytes=1, worker="w")
    assert find(unit) is None


def test_what_units_before_have_made_decides_the_digest(unit: IndexUnit) -> None:
    """Given another payload of the stage before, then the units after it are others."""
    build_dir = unit.build_dir
    do(unit, "first ")
    one = write_inputs(build_dir, {"sample": [done(unit)]})
    assert [sidecar.digest for sidecar in read_inputs(build_dir, one)["sample"]] == [unit.digest]
    other = IndexUnit(index=unit.index, build="b1", stage="sample", number=4, inputs=unit.inputs)
    do(other, "other ")
    assert write_inputs(build_dir, {"sample": [done(other)]}) != one
    assert write_inputs(build_dir, {"sample": [done(unit)]}) == one


def test_a_unit_of_an_earlier_build_with_this_id_is_none_of_the_later_one(unit: IndexUnit) -> None:
    """Given a build that is removed and begun anew with another spec, then a late sidecar of the first counts not."""
    do(unit, "late ")
    unit.build_dir.spec.write_text('{"word": "other"}')
    assert write_inputs(unit.build_dir, {}) != unit.inputs


def test_a_payload_that_was_made_again_is_found_by_the_units_after_it(unit: IndexUnit) -> None:
    """Given a payload that was lost and made again with equal bytes, then inputs name the new file."""
    do(unit)
    first = done(unit)
    digest = write_inputs(unit.build_dir, {"sample": [first]})
    (Path(unit.index) / first.files["text"].path).unlink()
    do(unit)
    assert write_inputs(unit.build_dir, {"sample": [done(unit)]}) == digest
    (named,) = read_inputs(unit.build_dir, digest)["sample"]
    assert named.files["text"].check(Path(unit.index)).read_text() == "a spec"


def test_a_description_that_leads_elsewhere_is_no_unit(unit: IndexUnit) -> None:
    """Given a build or a digest that would leave the folder, then it is refused."""
    for name, value in (("build", "../x"), ("inputs", "a/b"), ("stage", "rm"), ("number", "x")):
        with pytest.raises((ValueError, TypeError)):
            msgspec.convert({**to_json(unit), name: value}, IndexUnit)
    assert msgspec.convert(to_json(unit), IndexUnit) == unit


def test_a_damaged_spec_is_an_error_with_a_name(unit: IndexUnit) -> None:
    """Given build.json that is no JSON, then performing says which file cannot be read."""
    unit.build_dir.spec.write_text("{")
    with pytest.raises(OutputError, match=r"build\.json"):
        do(unit)


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(errno.ENOSPC, "no_space", "same command again"), (errno.EROFS, "not_writable", "--output")],
)
def test_a_write_that_is_refused_is_told_in_the_words_of_an_index(
    tmp_path: Path, number: int, code: str, said: str
) -> None:
    told = disk_error(OSError(number, os.strerror(number)), tmp_path / "lists")
    assert (told.code, said in told.next_step) == (code, True)
