"""A build of an index is killed: its conductor, its workers, the processes that do its units, at and between stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.session import await_in
from tests.faults.kit.cluster import let_go
from tests.faults.kit.indexes import PATIENCE_S, STAGES, Building, MakeBuilding, crash
from tests.faults.kit.table import Recovery

MOMENTS = {
    "between stages": ("embq.index.stages.build:StageSequence.run", "before", ", '{stage}', "),
    "in a unit": ("embq.index.stages.process:do", "before", "stage='{stage}', number=0,"),
    "a unit's file stands, its sidecar not yet": (
        "embq.index.stages.task:_keep",
        "after",
        "stage='{stage}', number=0,",
    ),
    "a unit's sidecar stands, nobody was told": (
        "embq.index.stages.task:perform",
        "after",
        "stage='{stage}', number=0,",
    ),
}


def crash_at(moment: str, stage: str, marker: Path) -> dict[str, object]:
    at, when, match = MOMENTS[moment]
    return crash(at, marker, when=when, match=match.format(stage=stage))


def _chain(stage: str, moments: Sequence[str], *, gate: bool = False) -> object:
    sentence = f"`embq index` is killed before the stage {stage}, and at three moments of it"
    if gate:
        sentence = f"`embq index` is killed in the stage {stage}"
    return pytest.param(stage, moments, marks=pytest.mark.fault("X1", sentence, gate=gate), id=sentence)


@pytest.mark.parametrize(
    ("stage", "moments"),
    [_chain("merge", ["a unit's file stands, its sidecar not yet"], gate=True)]
    + [_chain(stage, list(MOMENTS)) for stage in STAGES],
)
def test_a_build_that_is_killed_goes_on_with_what_is_not_done(
    make_building: MakeBuilding, undisturbed: Building, tmp_path: Path, stage: str, moments: Sequence[str]
) -> None:
    building = make_building()
    crashes = [crash_at(moment, stage, tmp_path / str(number)) for number, moment in enumerate(moments)]
    for number in range(len(moments)):
        building.run_killed(sabotage=crashes)
        assert [at for at in range(len(moments)) if (tmp_path / str(at)).exists()] == list(range(number + 1))
        assert not (building.index / "CURRENT").exists()

    building.run()

    building.assert_published()
    building.assert_same_as(undisturbed)
    # Twice was done only what had been begun and had no sidecar yet.
    assert building.begun() == {**STAGES, stage: STAGES[stage] + 1}


_PUBLISHING = [
    ("before CURRENT names the new version", "embq.index.index_files.publication:write_current", "before"),
    ("when CURRENT names the new version", "embq.index.index_files.publication:write_current", "after"),
    ("before what nobody needs is swept", "embq.index.stages.build:sweep", "before"),
]


@pytest.mark.parametrize(
    ("at", "when"),
    [
        pytest.param(
            at, when, id=moment, marks=pytest.mark.fault("X1", f"`embq index` is killed: publishing, {moment}")
        )
        for moment, at, when in _PUBLISHING
    ],
)
def test_a_build_that_was_killed_while_it_was_published_is_whole(
    make_building: MakeBuilding, undisturbed: Building, tmp_path: Path, at: str, when: str
) -> None:
    building = make_building()
    building.run_killed(sabotage=[crash(at, tmp_path / "died", when=when)])
    done = building.begun()
    assert done == STAGES

    building.run()

    building.assert_same_as(undisturbed)
    building.assert_published((building.index / "CURRENT").read_text().strip())
    assert building.begun() == done


@pytest.mark.fault("X2", "a process that does index units is killed, once in each stage")
def test_each_stage_outlives_the_death_of_one_of_its_processes(
    make_building: MakeBuilding, undisturbed: Building, tmp_path: Path, recovery: Recovery
) -> None:
    building = make_building()
    moment = "a unit's file stands, its sidecar not yet"
    building.run("--workers", "2", sabotage=[crash_at(moment, stage, tmp_path / stage) for stage in STAGES])
    died = [stage for stage in STAGES if (tmp_path / stage).exists()]
    assert died == list(STAGES)
    recovery.injected(len(died))
    building.assert_published()
    building.assert_same_as(undisturbed)
    assert building.begun() == {stage: units + 1 for stage, units in STAGES.items()}


@pytest.mark.fault("X3", "four processes build what one builds")
def test_four_processes_build_the_files_that_one_builds(make_building: MakeBuilding, undisturbed: Building) -> None:
    building = make_building()
    building.run("--workers", "4")
    building.assert_same_as(undisturbed)


@pytest.mark.fault("X6", "two `embq index` on one folder at once", gate=True)
def test_of_two_builds_in_one_folder_the_second_is_refused(
    make_building: MakeBuilding, undisturbed: Building, tmp_path: Path, recovery: Recovery
) -> None:
    building, gate = make_building(), tmp_path / "gate"
    held = {"at": "embq.index.stages.process:do", "match": "stage='add', number=1,", "do": "gate", "gate": str(gate)}
    first = building.begin(sabotage=[held])
    await_in(first, Path(f"{gate}.reached").exists)
    second = building.begin()
    recovery.injected()
    assert second.wait(PATIENCE_S) == 75, second.said
    assert "another embq process" in second.stderr
    let_go(gate)
    assert first.wait(PATIENCE_S) in (0, 3), first.said
    building.assert_published()
    building.assert_same_as(undisturbed)
