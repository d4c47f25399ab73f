"""An index is built by workers of a broker, and workers, the broker or the conductor go away."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.session import Command, await_in
from tests.faults.kit.cluster import QUICK_LEASES, Cluster, Service, let_go
from tests.faults.kit.indexes import PATIENCE_S, STAGES, Building, MakeBuilding, counted, crash
from tests.faults.test_cards import H100, Cards

ENDED = (0, 3)


def begun_with(
    cluster: Cluster, make_building: MakeBuilding, *sabotage: Mapping[str, Any], count: int = 1
) -> tuple[Building, Service]:
    """A building by the broker of a cluster, and a machine with workers for it."""
    building = make_building(broker_url=cluster.broker.url)
    all_of_it = [*counted(building.folder), *sabotage]
    return building, cluster.workers(environment=QUICK_LEASES, count=count, sabotage=all_of_it)


def refusals(machine: Service) -> str:
    """Report of a machine on indexes that it has no part in."""
    return " ".join(re.findall(r"index_refused .*", machine.log))


def assert_built(command: Command, cluster: Cluster, building: Building, undisturbed: Building) -> None:
    """The command ends, and the index is the one that it would have been."""
    assert command.wait(PATIENCE_S) in ENDED, command.said + cluster.logs()
    building.assert_published()
    building.assert_same_as(undisturbed)


@pytest.mark.fault("X4", "workers of a broker build an index: a worker and two unit processes are killed")
def test_two_workers_build_the_same_files_though_they_are_killed(
    cluster: Cluster, make_building: MakeBuilding, undisturbed: Building, tmp_path: Path
) -> None:
    stranger = cluster.workers(environment={**QUICK_LEASES, "EMBQ_ROOTS": "/nowhere"})
    building, machine = begun_with(
        cluster,
        make_building,
        crash("embq.index.stages.task:_keep", tmp_path / "0", when="after", match="stage='add', number=1,"),
        crash("embq.index.stages.task:perform", tmp_path / "1", when="after", match="stage='merge', number=0,"),
        crash("embq.index.workers.service:IndexService._claim", tmp_path / "2", when="after", match="'stage': 'truth'"),
        count=2,
    )
    command = building.begin(environment=QUICK_LEASES)
    assert command.wait(PATIENCE_S) in ENDED, command.said + cluster.logs()
    assert all((tmp_path / str(number)).exists() for number in range(3))
    cluster.recovery.injected(3)
    building.assert_published()
    building.assert_same_as(undisturbed)
    assert machine.said_times("index_unit_failed") == 2
    assert machine.said_times("worker_died") == 1
    assert "outside of EMBQ_ROOTS" in refusals(stranger)
    assert stranger.said_times("index_turn") == 0
    client = cluster.broker.client()
    cluster.until(lambda: not client.keys("embq:{*") and not client.exists("embq:indexing"))


@pytest.mark.fault("X4", "faiss ends the processes that use a GPU for an index: the CPU does their units")
def test_a_gpu_that_faiss_cannot_use_is_left_under_the_same_lease(
    cluster: Cluster, make_building: MakeBuilding, undisturbed: Building, tmp_path: Path
) -> None:
    building = make_building(broker_url=cluster.broker.url)
    ended = {"at": "embq.index.stages.task:perform", "do": "abort", "match": "'on_gpu': True", "every": True}
    ended |= {"tally": str(tmp_path / "ended")}
    machine = Cards(tmp_path / "cards", H100).machine(cluster, sabotage=[*counted(building.folder), ended])
    command = building.begin()
    assert command.wait(PATIENCE_S) in ENDED, command.said + cluster.logs()
    turns = machine.said_times("index_turn")
    assert (tmp_path / "ended").stat().st_size == machine.said_times("index_on_cpu") == turns > 0
    cluster.recovery.injected(turns)
    assert machine.said_times("index_unit_failed") == 0
    building.assert_published()
    building.assert_same_as(undisturbed)
    assert building.begun() == STAGES


@pytest.mark.fault("X5", "the broker forgets everything while an index is built")
def test_a_broker_that_forgets_everything_is_filled_again_from_the_folder(
    cluster: Cluster, make_building: MakeBuilding, undisturbed: Building, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    held = {
        "at": "embq.index.stages.task:perform",
        "match": "stage='add', number=1,",
        "do": "gate",
        "gate": str(gate),
    }
    building, _ = begun_with(cluster, make_building, held)
    command = building.begin(environment=QUICK_LEASES)
    await_in(command, Path(f"{gate}.reached").exists)
    cluster.broker.restart(after_s=1.0, wiped=True)
    let_go(gate)
    assert_built(command, cluster, building, undisturbed)
    begun = building.begun()
    # The unit that was in hand may have been begun a second time: its lease was lost with all others.
    assert STAGES["add"] <= begun.pop("add") <= STAGES["add"] + 1
    assert begun == {stage: units for stage, units in STAGES.items() if stage != "add"}


@pytest.mark.fault("X1", "`embq index --broker` is killed while its workers go on")
def test_a_conductor_that_is_killed_finds_what_the_workers_have_done(
    cluster: Cluster, make_building: MakeBuilding, undisturbed: Building, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    held = {
        "at": "embq.index.stages.task:perform",
        "match": "stage='add', number=2,",
        "do": "gate",
        "gate": str(gate),
    }
    building, machine = begun_with(cluster, make_building, held)
    first = building.begin(environment=QUICK_LEASES)
    await_in(first, Path(f"{gate}.reached").exists)
    first.kill_all()
    cluster.recovery.injected()
    second = building.begin(environment=QUICK_LEASES)
    let_go(gate)
    assert_built(second, cluster, building, undisturbed)
    assert machine.said_times("worker_died") == 0


@pytest.mark.fault("X4", "a process that does index units stands still")
def test_a_unit_process_that_stands_still_is_replaced(
    cluster: Cluster, make_building: MakeBuilding, undisturbed: Building, tmp_path: Path
) -> None:
    stopped = crash("embq.index.stages.task:perform", tmp_path / "stopped", match="stage='merge', number=0,", do="stop")
    building = make_building(broker_url=cluster.broker.url)
    machine = cluster.workers(environment={**QUICK_LEASES, "EMBQ_STALL_S": "4"}, sabotage=stopped)
    command = building.begin(environment=QUICK_LEASES)
    await_in(command, (tmp_path / "stopped").exists)
    cluster.recovery.injected()
    assert_built(command, cluster, building, undisturbed)
    assert machine.said_times("stuck") == 1


@pytest.mark.fault("X7", "an index is asked of workers, and there is none")
def test_without_workers_the_build_says_so_and_waits(
    cluster: Cluster, make_building: MakeBuilding, undisturbed: Building, tmp_path: Path
) -> None:
    building = make_building(broker_url=cluster.broker.url)
    command = building.begin(environment=QUICK_LEASES)
    await_in(command, lambda: "no worker has taken a unit" in command.stderr)
    cluster.recovery.injected()
    cluster.workers(environment=QUICK_LEASES)
    assert_built(command, cluster, building, undisturbed)
