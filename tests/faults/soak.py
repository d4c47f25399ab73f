"""The chaos soak: random inputs, random faults, machines of unequal speed; each seed ends with the exact check.

    python -m tests.faults.soak --seed 17 --seeds 20 --seconds 600

Everything that is left to chance in a seed is drawn before it starts and printed as its schedule. A fault waits for
progress ("after 12 units"), never for a time, so the same seed gives the same faults again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import redis

from embq.core.queue.keys import RUN_PARTS, RUNS
from tests.e2e.check import read_output
from tests.e2e.session import write_shards
from tests.faults.kit.cluster import DIM, Cluster, Service, server_version
from tests.faults.kit.table import Recovery

QUICK = {"EMBQ_LEASE_S": "2", "EMBQ_BEAT_S": "0.5", "EMBQ_STALL_S": "4"}
"""So that what takes a minute in earnest takes seconds here; nothing else is different."""

GOOD_ENDS = (0, 69, 75, -9, -15)
"""Exit statuses of a service: as asked, no broker at its start, taken over, killed, stopped before it was up."""

LEAST_FAULTS, MOST_FAULTS = 6, 9
ENOUGH_FAULTS, PACES = 5, (1.0, 1.5, 2.5)
"""A seed whose work was over before so many faults is played again with devices that are slower by the next factor."""
QUIET_S, REPLACE_S, RESTART_S = 2.0, 2.0, 0.8
"""Work of a seed's devices together: seconds with nothing going wrong, and more for each fault, so that
the work is not over before the last one."""
DEADLINE_S = 120.0
FORGOTTEN_S = 5.0


# --- what a seed is ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One supervisor: worker processes, how many times slower than the others, and how results travel."""

    processes: int
    slow: float
    transport: str
    prefetch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One fault: injected once `after` units are finished; `number` chooses the target, `seconds` how long it lasts."""

    after: int
    fault: str
    number: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All of a seed."""

    seed: int
    kind: str
    units: int
    samples: int
    empty: tuple[int, ...]
    cut_shards: tuple[int, ...]
    poison: int | None
    poison_stage: str
    machines: tuple[Machine, ...]
    events: tuple[Event, ...]

    def __str__(self) -> str:
        what = f"seed {self.seed}: {self.units} units of {self.samples} ({self.kind}"
        what += f", {len(self.empty)} empty" if self.empty else ""
        what += f", {len(self.cut_shards)} cut" if self.cut_shards else ""
        what += f", poison in {self.poison_stage}" if self.poison is not None else ""
        machines = " + ".join(
            f"{m.processes} process{'es' if m.processes > 1 else ''}{f' {m.slow:g}x slower' if m.slow > 1 else ''}"
            for m in self.machines
        )
        faults = "; ".join(f"after {event.after}: {event.fault}" for event in self.events)
        return f"{what}) on {machines}; {faults}"


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    chance = random.Random(seed)
    kind = chance.choice(["texts", "texts", "shards"])
    units, samples = chance.randint(30, 60), chance.choice([1, 3, 10, 20])
    total = units * samples
    poison = chance.randrange(total) if kind == "texts" and chance.random() < 0.15 else None
    empty = tuple(
        sorted(set(chance.sample(range(total), k=min(total, chance.choice([0, 0, 2, 5]))) if kind == "texts" else []))
    )
    machines = [
        Machine(
            processes=chance.choice([1, 1, 2]),
            slow=chance.choice([1.0, 1.0, 2.0, 4.0]) if number else 1.0,
            transport=chance.choice(["auto", "staging", "payload"]),
            prefetch=chance.choice([1, 2, 4]),
        )
        for number in range(chance.choice([2, 2, 3]))
    ]
    moments = sorted(
        chance.randrange(1, max(2, int(units * 0.45))) for _ in range(chance.randint(LEAST_FAULTS, MOST_FAULTS))
    )
    events = [
        Event(
            after=after,
            fault=chance.choice(sorted(FAULTS)),
            number=chance.randrange(1000),
            seconds=round(chance.uniform(0.1, 1.8), 1),
        )
        for after in moments
    ]
    return Schedule(
        seed=seed,
        kind=kind,
        units=units,
        samples=samples,
        empty=tuple(n for n in empty if n != poison),
        cut_shards=tuple(chance.sample(range(units), k=1)) if kind == "shards" and chance.random() < 0.3 else (),
        poison=poison,
        poison_stage=chance.choice(["prepare", "embed"]),
        machines=tuple(machines),
        events=tuple(events),
    )


def _lasts_s(event: Event) -> float:
    """For how long the work of others goes on while a fault is being injected."""
    if event.fault in (
        "suspend machine",
        "second writer",
        "suspend broker",
        "fill memory",
        "kill broker",
        "empty broker",
    ):
        return event.seconds + RESTART_S
    return REPLACE_S if event.fault.startswith("replace") else RESTART_S


# --- a seed at work ---


class Stage:
    """A cluster under a schedule, with somebody who starts again what ends, as a service manager does."""

    def __init__(self, schedule: Schedule, cluster: Cluster, pace: float) -> None:
        self.schedule = schedule
        self.cluster = cluster
        self.failures: dict[str, str] = {}
        self.resumed = 0
        self._forgotten_since: float | None = None
        self._client = cluster.broker.client()
        self.without: list[str] = []
        self._write_input()
        total = schedule.units * schedule.samples
        processes = sum(machine.processes / machine.slow for machine in schedule.machines)
        device_s = pace * (QUIET_S + sum(_lasts_s(event) for event in schedule.events))
        self._keys = [*cluster.expected] if schedule.kind == "shards" else [f"k{n}" for n in range(total)]
        self.model = f"stub:{DIM}?batch_size=8&ms_per_sample={device_s * 1000 * processes / total:.2f}"
        cluster.enqueue(self.model)
        self.writer = self._start_writer()
        self.producer = self._start_producer()
        self.machines = [self._start_machine(machine) for machine in schedule.machines]

    def _write_input(self) -> None:
        schedule, cluster = self.schedule, self.cluster
        if schedule.kind == "texts":
            cluster.write_texts(schedule.units, schedule.samples)
            lines = [json.loads(line) for line in cluster.input.read_text().splitlines()]
            for n in schedule.empty:
                self.failures[lines[n]["id"]] = "empty_text"
                lines[n]["text"] = " "
                del cluster.expected[lines[n]["id"]]
            self.poison_text = lines[schedule.poison]["text"] if schedule.poison is not None else ""
            if schedule.poison is not None:
                key = lines[schedule.poison]["id"]
                self.failures[key] = "crash"
                del cluster.expected[key]
            cluster.input.write_text("".join(json.dumps(line) + "\n" for line in lines))
            return
        folder = cluster.folder / "shards"
        cluster.expected = write_shards(folder, schedule.units, schedule.samples)
        cluster.units, cluster.input = schedule.units, folder / ("{" + f"00000..{schedule.units - 1:05d}" + "}.tar")
        for shard in schedule.cut_shards:
            path = folder / f"{shard:05d}.tar"
            path.write_bytes(path.read_bytes()[:700])
            gone = [key for key in cluster.expected if key.startswith(f"{shard:03d}-")]
            for key in gone:
                del cluster.expected[key]
            self.failures[""] = "shard_truncated"

    # services

    def _start_writer(self, *arguments: str) -> Service:
        return self.cluster.writer(*arguments, environment=QUICK)

    def _start_producer(self) -> Service:
        return self.cluster.producer(environment=QUICK)

    def _start_machine(self, machine: Machine) -> Service:
        sabotage: list[dict[str, Any]] = [{"slow": machine.slow}] if machine.slow > 1 else []
        if self.schedule.poison is not None:
            sabotage.append({"poison": self.poison_text, "where": self.schedule.poison_stage, "do": "kill"})
        return self.cluster.workers(
            *("--transport", machine.transport, "--prefetch", str(machine.prefetch), "--drain-timeout", "1.5"),
            count=machine.processes,
            environment=QUICK,
            sabotage=sabotage or None,
        )

    def keep_alive(self) -> None:
        """Start again what has ended, whoever ended it; only these exits are in order without a signal."""
        for name in ("writer", "producer"):
            service: Service = getattr(self, name)
            if not service.alive():
                assert service.process.returncode in GOOD_ENDS, f"{service} ended by itself\n{service.log[-3000:]}"
                setattr(self, name, self._start_writer() if name == "writer" else self._start_producer())
        for number, service in enumerate(self.machines):
            if not service.alive():
                assert service.process.returncode in GOOD_ENDS, f"{service} ended by itself\n{service.log[-3000:]}"
                self.machines[number] = self._start_machine(self.schedule.machines[number])

        self._announce_where_nobody_can()

    def _announce_where_nobody_can(self) -> None:
        """Resume, as a user has to, a run that the broker lost while neither writer nor producer knew it."""
        try:
            known = self.cluster.broker.running and self._client.hexists(RUNS, self.cluster.run())
        except redis.exceptions.RedisError:
            return
        if known:
            self._forgotten_since = None
        elif self._forgotten_since is None:
            self._forgotten_since = time.monotonic()
        elif time.monotonic() - self._forgotten_since > FORGOTTEN_S:
            self._forgotten_since = None
            self.resumed += 1
            self.cluster.enqueue(self.model)

    def expect_what_was_given_up(self, kinds: Counter[str]) -> int:
        """Take note of what was in hand at three deaths, by chance; gives the number of units.

        After the first of them a unit runs alone, so each further death charges one unit, and of D deaths no more than
        (D - 1) / 2 units can be hit three times. Such a unit, or its sample, is a failure with a code, as promised.
        The unit with the poison ends its worker twice by itself; where its last worker is silent, it is one of these.
        """
        output = read_output(self.cluster.root)
        size = self.schedule.samples
        found = 0
        for unit_id, ordinal, key, code in output.failures:
            if code == "crash" and self.failures.get(key) != "crash":
                found += 1
                if ordinal is None:
                    first = output.manifest.index(unit_id) * size
                    self.without += self._keys[first : first + size]
                    for key_within in self._keys[first : first + size]:
                        self.failures.pop(key_within, None)
                self.failures[key] = code
        most = max(0, sum(kinds[kind] for kind in CHARGING) - 1) // 2 + (self.schedule.poison is not None)
        assert found <= most, f"{found} units were given up"
        return found

    def machine(self, event: Event) -> Service:
        """The machine that an event is aimed at."""
        return self.machines[event.number % len(self.machines)]


def kill_worker(stage: Stage, event: Event) -> None:
    processes = [(machine, process) for machine in stage.machines for process in machine.processes()]
    if processes:
        machine, process = processes[event.number % len(processes)]
        machine.kill_one(process)


def kill_machine(stage: Stage, event: Event) -> None:
    stage.machine(event).kill()


def suspend_machine(stage: Stage, event: Event) -> None:
    machine = stage.machine(event)
    machine.suspend()
    _last(event.seconds + 1.0)
    machine.resume()


def suspend_worker(stage: Stage, event: Event) -> None:
    processes = [process for machine in stage.machines for process in machine.processes()]
    if processes:
        stage.cluster.recovery.injected()
        processes[event.number % len(processes)].suspend()  # for good: its supervisor has to see to it


def replace_machine(stage: Stage, event: Event) -> None:
    stage.cluster.recovery.injected()
    machine = stage.machine(event)
    machine.terminate()
    assert machine.wait(30) in GOOD_ENDS, machine.log[-3000:]


def kill_writer(stage: Stage, event: Event) -> None:
    stage.writer.kill()


def replace_writer(stage: Stage, event: Event) -> None:
    stage.cluster.recovery.injected()
    stage.writer.terminate()
    assert stage.writer.wait(30) in GOOD_ENDS, stage.writer.log[-3000:]


def second_writer(stage: Stage, event: Event) -> None:
    stage.cluster.recovery.injected()
    first, stage.writer = stage.writer, stage._start_writer("--takeover")
    first.suspend()
    _last(event.seconds)
    first.resume()
    first.may_end = True
    _last(0.5)
    first.process.kill()
    first.process.wait(10)


def kill_producer(stage: Stage, event: Event) -> None:
    stage.producer.kill()


def kill_broker(stage: Stage, event: Event) -> None:
    stage.cluster.broker.restart(after_s=event.seconds)


def empty_broker(stage: Stage, event: Event) -> None:
    stage.cluster.broker.restart(after_s=event.seconds, wiped=True)


def suspend_broker(stage: Stage, event: Event) -> None:
    stage.cluster.broker.suspend()
    _last(event.seconds)
    stage.cluster.broker.resume()


def flush_broker(stage: Stage, event: Event) -> None:
    stage.cluster.recovery.injected()
    stage.cluster.broker.client().flushall()


def lose_a_key(stage: Stage, event: Event) -> None:
    stage.cluster.recovery.injected()
    part = RUN_PARTS[event.number % len(RUN_PARTS)]
    stage.cluster.broker.client().delete(stage.cluster.ledger.key(part))


def fill_memory(stage: Stage, event: Event) -> None:
    stage.cluster.recovery.injected()
    client = stage.cluster.broker.client()
    client.config_set("maxmemory", "1mb")
    _last(event.seconds)
    client.config_set("maxmemory", "512mb")


def lose_a_result(stage: Stage, event: Event) -> None:
    """One that waits for the writer; where none does (they travel through the broker, say) it is lost in the making."""
    staging = stage.cluster.root / "_staging"
    for _ in range(100):
        if waiting := sorted(path for path in staging.glob("*.arrow") if not path.name.startswith(".")):
            stage.cluster.recovery.injected()
            return waiting[event.number % len(waiting)].unlink(missing_ok=True)
        time.sleep(0.01)
    return kill_worker(stage, event)


def enqueue_again(stage: Stage, event: Event) -> None:
    stage.cluster.recovery.injected()
    stage.cluster.enqueue(stage.model)


def _last(seconds: float) -> None:
    time.sleep(seconds)  # the fault itself


FAULTS: dict[str, Callable[[Stage, Event], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        kill_worker,
        kill_machine,
        suspend_machine,
        suspend_worker,
        replace_machine,
        kill_writer,
        replace_writer,
        second_writer,
        kill_producer,
        kill_broker,
        empty_broker,
        suspend_broker,
        flush_broker,
        lose_a_key,
        fill_memory,
        lose_a_result,
        enqueue_again,
    )
}


CHARGING = ("kill worker", "kill machine", "suspend worker", "suspend machine", "lose a result")
"""Faults that look as if a unit had ended its worker."""


@dataclass(slots=True)
class Result:
    """Outcome of a seed."""

    schedule: Schedule
    seconds: float = 0.0
    faults: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    failures: int = 0
    resumed: int = 0
    given_up: int = 0
    error: str = ""


def play(schedule: Schedule, folder: Path, pace: float = 1.0) -> Result:
    """One seed from its input to the exact check, on devices that are slower by a factor."""
    result = Result(schedule)
    recovery = Recovery()
    cluster = Cluster(folder, recovery)
    began = time.monotonic()
    try:
        stage = Stage(schedule, cluster, pace)
        for event in schedule.events:
            _until(stage, lambda event=event: cluster.finished() >= event.after or cluster.closed())
            if cluster.closed():
                break
            before = recovery.faults
            _retry_while_away(lambda event=event: FAULTS[event.fault](stage, event))
            result.kinds[event.fault] += recovery.faults > before
        _until(stage, cluster.closed)
        result.given_up = stage.expect_what_was_given_up(result.kinds)
        output = cluster.assert_exact(stage.failures, without=stage.without)
        result.resumed = stage.resumed
        result.rows, result.failures = len(output.keys), len(output.failures)
    except Exception as error:  # noqa: BLE001 - what went wrong in a seed is its result
        result.error = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=3)}"
        for number, service in enumerate(cluster.services):
            (folder / f"{number:02d}-{service.arguments[0]}.log").write_text(f"{service.said}\n")
    finally:
        result.faults = recovery.faults
        result.seconds = time.monotonic() - began
        cluster.close()
    return result


def _until(stage: Stage, predicate: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while True:
        stage.keep_alive()
        try:
            if predicate():
                return
        except redis.exceptions.RedisError:
            pass
        assert time.monotonic() < end, f"nothing came of it in {DEADLINE_S:g} s\n{stage.cluster.state()}"
        time.sleep(0.02)


def _retry_while_away(action: Callable[[], None]) -> None:
    """A fault that needs the broker waits for one that is being started."""
    for _ in range(50):
        try:
            return action()
        except (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError, redis.exceptions.TimeoutError):
            time.sleep(0.2)
    return action()


# --- many seeds ---


def _one(seed: int, *, keep: Path, end: float) -> Result | None:
    """Play a seed, in a process that plays no other one meanwhile; None where it is past `end`, monotonic seconds.

    Where it fails, its folder stays as `seed-N` in `keep`, with the log of each service.
    """
    if time.monotonic() > end:
        return None
    schedule = draw(seed)
    # A unix socket's path must be short, so the folder is moved only at the end.
    folder = Path(tempfile.mkdtemp(prefix=f"embq-s{seed}-"))
    try:
        for pace in PACES:
            result = play(schedule, folder / f"at-{pace:g}", pace)
            if result.error or result.faults >= ENOUGH_FAULTS:
                break
        if result.error:
            (folder / "failed").write_text(f"{schedule}\n{json.dumps(asdict(schedule))}\n{result.error}\n")
            shutil.rmtree(keep / f"seed-{seed}", ignore_errors=True)
            shutil.copytree(folder, keep / f"seed-{seed}", ignore=shutil.ignore_patterns("*.sock"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    said = "FAILED" if result.error else "exact "
    lines = [f"{said} {result.seconds:5.1f} s {result.faults:2d} faults | {schedule}"]
    if result.error:
        lines += [*result.error.splitlines()[:25], f"kept in {keep / f'seed-{seed}'}"]
    print("\n".join(lines), flush=True)  # noqa: T201
    return result


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=20, help="how many, one after the other")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no seed after this time")
    parser.add_argument("--workers", type=int, default=1, help="seeds at a time")
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path(tempfile.gettempdir()) / "embq-soak",
        help="folder that keeps the data, logs and broker of failed seeds (default: %(default)s)",
    )
    parser.add_argument("--results", type=Path, help="write the counts as JSON")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    began = time.monotonic()
    results: list[Result] = []
    play_one = partial(_one, keep=given.keep, end=began + given.seconds)
    # Processes, not threads: environment and stdout, which `called` changes for each command, belong to a process.
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
        try:
            for result in pool.map(play_one, range(given.seed, given.seed + given.seeds)):
                results += [result] if result is not None else []
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
    return _report(results, time.monotonic() - began, given.results)


def _report(results: list[Result], seconds: float, path: Path | None) -> int:
    failed = [result.schedule.seed for result in results if result.error]
    kinds = sum((result.kinds for result in results), Counter[str]())
    counts = {
        "seeds": len(results),
        "faults": sum(result.faults for result in results),
        "fewest_faults_in_a_seed": min((result.faults for result in results), default=0),
        "rows": sum(result.rows for result in results),
        "failures_as_expected": sum(result.failures for result in results),
        "units_hit_by_three_deaths": sum(result.given_up for result in results),
        "resumed_by_hand": sum(result.resumed for result in results),
        "failed_seeds": failed,
        "seconds": round(seconds),
        "server": server_version(),
        "kinds": dict(kinds.most_common()),
    }
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(counts, indent=1) + "\n")
    print(  # noqa: T201
        f"\n{counts['seeds']} seeds, {counts['faults']} faults (at least {counts['fewest_faults_in_a_seed']} in each), "
        f"{counts['rows']:,} rows and {counts['failures_as_expected']:,} expected failures: lost 0, duplicated 0, "
        f"misaligned 0, unaccounted 0 in all but {len(failed)} seeds {failed or ''}; {counts['server']}, "
        f"{seconds:.0f} s\n" + ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common()),
        flush=True,
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
