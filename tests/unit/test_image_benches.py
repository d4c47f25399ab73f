"""What the benchmarks of images make of what they measured."""

from __future__ import annotations

import pytest

from bench import image_feeding
from bench.image_cpu import Look, kind_of, spent
from bench.image_decoding import Chunks
from bench.image_readers import compared
from core.units import Sample

THEIRS = {"samples": 1000.0, "seconds": 10.0, "steady_samples": 800.0, "steady_seconds": 4.0, "cpu_s": 20.0}
OURS = {"samples": 1000.0, "seconds": 2.0, "cpu_s": 4.0}


def test_readers_are_compared_round_by_round_and_without_the_start_of_the_peer() -> None:
    slow = {"samples": 1000.0, "seconds": 4.0, "cpu_s": 4.0}
    made = [{"embq": OURS, "clip-retrieval": THEIRS}] * 2 + [{"embq": slow, "clip-retrieval": THEIRS}]
    row = compared(made)
    assert (row["embq_per_s"], row["theirs_per_s"], row["theirs_with_start_per_s"]) == (500, 200, 100)
    assert (row["times"], row["times_spread"]) == (2.5, [1.25, 2.5])
    assert (row["embq_cpu_us"], row["theirs_cpu_us"]) == (4000, 20000)


def test_readers_that_did_not_read_the_same_samples_are_not_compared() -> None:
    with pytest.raises(AssertionError, match=r"999.*1000"):
        compared([{"embq": {**OURS, "samples": 999.0}, "clip-retrieval": THEIRS}])


def test_threads_that_share_chunks_prepare_as_many_samples_as_were_asked_for_and_count_them() -> None:
    chunks = Chunks([[Sample(ordinal=0, key="a"), Sample(ordinal=1, key="b")], [Sample(ordinal=2, key="c")]], 7)
    first, second = iter(chunks), iter(chunks)
    had = sum(len(next(turn)) for turn in (first, second, first))
    had += sum(len(chunk) for chunk in first)
    assert (had, chunks.samples, list(second)) == (8, 8, [])


def test_a_share_is_that_of_each_round() -> None:
    run = {"samples": 100, "seconds": 1.0, "cpu": {"decode": 0.1, "writer": 0.01}}
    alone = [{"samples": 100.0, "seconds": seconds, "cpu_s": 0.2} for seconds in (0.5, 1.0, 2.0)]
    row = image_feeding.compared([(one, run) for one in alone])
    assert (row["share"], row["lowest"], row["highest"]) == (1.0, 0.5, 2.0)
    assert (row["decoding_per_s"], row["run_per_s"], row["decoding_cpu_us"]) == (100, 100, 2000)
    assert (row["cpu_us"]["decode"], row["cpu_us"]["writer"], row["cpu_us"]["broker"]) == (1000, 100, 0)


def test_cpu_time_is_that_between_two_moments_and_of_the_worker_its_busiest_threads_decode() -> None:
    def look(at: float, *seconds: float) -> Look:
        keys = [(7, "worker", 71), (7, "worker", 72), (7, "worker", 73), (8, "writer", 81)]
        return Look(at, dict(zip(keys, seconds, strict=False)))

    looks = [look(0.0, 3.0), look(5.0, 4.0, 0.5, 0.1, 1.0), look(10.0, 4.25, 4.5, 5.1, 3.0)]
    looks.append(Look(11.0, {(8, "writer", 81): 3.5}))
    looks.append(look(12.0, 99.0, 99.0, 99.0, 99.0))
    between = spent(looks, began=5.0, ended=11.0, decoders=2)
    assert between == pytest.approx({"decode": 9.0, "worker": 0.25, "writer": 2.5})


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["python", "-m", "worker.process", "--name", "writer"], "worker"),
        (["python", "-m", "embq", "worker", "--run", "r"], "supervisor"),
        (["python", "-m", "embq", "writer", "--run", "r"], "writer"),
        (["python", "-m", "embq", "producer", "--run", "r"], "producer"),
        (["python", "-m", "embq", "run", "worker/a.tar"], "run"),
        (["/x/valkey-server", "/run/server.conf"], "broker"),
        ([], ""),
    ],
)
def test_processes_are_known_by_their_command(command: list[str], kind: str) -> None:
    assert kind_of(command) == kind
