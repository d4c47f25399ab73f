"""Error of the predicted end of a run.

    python -m bench.eta [CASE ...]

Real services around a real server, with simulated devices whose batches take as long as their tokens say. One process
watches the run as `embq status --watch --json`, once a second. Of each look from 20 % of the run on, the error is the
predicted end less the true one, over what the whole run takes (`worst`, `p95`; 10 % is the bar), and over what is left
of it (`rest_worst`, `rest_p95`; until 90 %, because it has no meaning near the end). `silent` is the share of these
looks that predicted nothing.

Where a device leaves or joins half-way, the truth before it is the end that the run would have had with the devices
that it had then: their speeds are known. The first `SETTLING_S` seconds after it do not count; `settled_s` is how long
it took until the error stayed below the bar.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import RESULTS, table, write
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.queue.keys import run_key
from embq.core.run.run_info import load_run

TOKENS_PER_S = 8_000
"""Rate of all devices of a case together at its start: so low that one core is fast enough for texts of two words."""
SECONDS = 36.0
BAR, FROM, REST_UNTIL = 0.10, 0.20, 0.90
SETTLING_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run to be watched.

    Attributes:
        lengths: words of `n` texts of `mean` words, for each input file.
        devices: speeds of the devices that are there from the start; the last one is a service of its own.
        leaves: seconds after the first batch at which that last device is told to stop.
        joins: seconds after the first batch at which a device of speed 1 comes.
    """

    lengths: Callable[[], list[list[int]]]
    devices: tuple[int, ...] = (1, 1, 1)
    leaves: float | None = None
    joins: float | None = None

    @property
    def changes(self) -> float | None:
        """Time at which a device leaves or joins."""
        return self.leaves or self.joins

    @property
    def speeds(self) -> tuple[int, int]:
        """All devices together, before and after one leaves or joins."""
        before = sum(self.devices)
        return before, before - (self.devices[-1] if self.leaves else 0) + (1 if self.joins else 0)


def equal() -> list[list[int]]:
    """Texts of one length."""
    return [_filled(lambda: 50)]


def skewed() -> list[list[int]]:
    """A few long texts hold most of the words."""
    rng = random.Random(0)
    return [_filled(lambda: max(1, round(rng.lognormvariate(3.5, 1.0))))]


def ascending() -> list[list[int]]:
    """The same, the shortest first."""
    return [sorted(skewed()[0])]


def two_files() -> list[list[int]]:
    """Half of the words in short texts, and then half of them in long ones."""
    rng = random.Random(0)
    return [_filled(lambda: rng.randint(5, 15), 0.5), _filled(lambda: rng.randint(150, 250), 0.5)]


def _filled(length: Callable[[], int], share: float = 1.0) -> list[int]:
    left, lengths = TOKENS_PER_S * SECONDS * share, []
    while left > 0:
        lengths.append(length())
        left -= lengths[-1]
    return lengths


CASES = {
    "equal": Case(lengths=equal),
    "skewed": Case(lengths=skewed),
    "ascending": Case(lengths=ascending),
    "two files": Case(lengths=two_files),
    "10:1:1": Case(lengths=skewed, devices=(10, 1, 1)),
    "leaves": Case(lengths=skewed, leaves=SECONDS / 2),
    "joins": Case(lengths=skewed, devices=(1, 1), joins=SECONDS / 3),
}


@dataclass(slots=True)
class Watched:
    """Observations of a run; times are Unix seconds.

    Attributes:
        looks: (time, predicted seconds or None).
        changed: when a device left or joined.
    """

    case: Case
    looks: list[tuple[float, float | None]] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    changed: float | None = None

    def truth(self, at: float) -> float:
        """The end of the run as it was to be expected at a time, by the speeds of the devices."""
        if self.changed is None or at >= self.changed:
            return self.ended
        before, after = self.case.speeds
        return self.changed + (self.ended - self.changed) * after / before


def watch(case: Case) -> Watched:
    """Run a case to its end."""
    seen = Watched(case)
    with tempfile.TemporaryDirectory(prefix="embq-bench-") as name, EmbeddedServer(Path(name) / "b") as server:
        folder, out = Path(name), Path(name) / "out"
        inputs = _write_texts(folder, case.lengths())
        client = connect(server.url)
        environment = {**os.environ, "EMBQ_BROKER_URL": server.url}
        each_ms = 1000 * sum(case.devices) / TOKENS_PER_S
        model = f"stub:16?ms_per_token={each_ms}"
        _embq(environment, folder, "enqueue", *inputs, "-o", str(out), "-m", model, "--unit-size", "20").wait()
        meta = run_key(load_run(out).run, "meta")
        with _services(environment, folder, case) as change:
            while not client.hexists(meta, "began_ms"):
                time.sleep(0.01)
            seen.began = int(client.hget(meta, "began_ms") or 0) / 1000
            status = _embq(environment, folder, "status", str(out), "--watch", "--json")
            assert status.stdout is not None
            asked = False
            for line in status.stdout:
                look, now = json.loads(line), time.time()
                if look["state"] != "done":
                    seen.looks.append((now, look["eta_s"]))
                if case.changes is not None and not asked and now - seen.began >= case.changes:
                    asked = change()
                # A device that leaves ends what it has begun; one that joins counts from its first unit.
                at_work = sum(bool(worker["unit"]) for worker in look["workers"])
                if asked and seen.changed is None and (case.leaves or at_work > len(case.devices)):
                    seen.changed = now
            status.wait()
            seen.ended = int(client.hget(meta, "last_commit_ms") or 0) / 1000
        client.close()
    return seen


@contextmanager
def _services(environment: dict[str, str], folder: Path, case: Case) -> Iterator[Callable[[], bool]]:
    """Writer, producer and workers; gives what lets the last device leave, or another one join."""
    names = [f"sim:{speed}" for speed in case.devices]
    kept = names[:-1] if case.leaves else names
    running = [_embq(environment, folder, verb) for verb in ("writer", "producer")]
    running.append(_embq(environment, folder, "worker", "--devices", ",".join(kept)))
    if case.leaves:
        running.append(_embq(environment, folder, "worker", "--devices", names[-1]))

    def change() -> bool:
        if case.leaves:
            running[-1].terminate()
        else:
            running.append(_embq(environment, folder, "worker", "--devices", "sim:1"))
        return True

    try:
        yield change
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(60)


def _embq(environment: dict[str, str], folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with open(folder / f"{arguments[0]}.log", "ab") as log:
        out = subprocess.PIPE if arguments[0] == "status" else log
        command = [sys.executable, "-m", "embq", *arguments]
        return subprocess.Popen(command, env=environment, stdout=out, stderr=log)


def _write_texts(folder: Path, files: list[list[int]]) -> list[str]:
    rng = random.Random(1)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 9))) for _ in range(5000)]
    paths = []
    for number, lengths in enumerate(files):
        paths.append(folder / f"texts{number}.jsonl")
        with paths[-1].open("w") as file:
            for i, length in enumerate(lengths):
                file.write(json.dumps({"id": f"{number}-{i}", "text": " ".join(rng.choices(words, k=length))}) + "\n")
    return [str(path) for path in paths]


def figures_of(name: str, seen: Watched) -> dict[str, Any]:
    """The errors of one case."""
    whole = seen.ended - seen.began
    errors, rest, silent, settled_s = [], [], 0, 0.0
    counted = [(at, eta) for at, eta in seen.looks if at >= seen.began + FROM * whole and at < seen.ended]
    for at, eta in counted:
        if eta is None:
            silent += 1
            continue
        truth = seen.truth(at)
        error = abs(at + eta - truth)
        if seen.changed is not None and seen.changed <= at:
            settled_s = at - seen.changed if error / whole > BAR else settled_s
            if at < seen.changed + SETTLING_S:
                continue
        errors.append(error / (truth - seen.began))
        if at - seen.began < REST_UNTIL * (truth - seen.began):
            rest.append(error / (truth - at))
    return {
        "case": name,
        "seconds": round(whole, 1),
        "worst": round(max(errors), 3),
        "p95": round(float(np.percentile(errors, 95)), 3),
        "rest_worst": round(max(rest), 3),
        "rest_p95": round(float(np.percentile(rest, 95)), 3),
        "settled_s": None if seen.changed is None else round(settled_s, 1),
        "silent": round(silent / len(counted), 3),
        "bar": BAR,
    }


def plot(all_seen: dict[str, Watched]) -> Path:
    """The predicted end over time against the true one, for each case."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    columns = min(4, len(all_seen))
    rows = -(-len(all_seen) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3.6 * columns, 3.1 * rows), squeeze=False, sharey=True)
    latest = max(seen.ended - seen.began for seen in all_seen.values())
    for axis, (name, seen) in zip(axes.flat, all_seen.items(), strict=False):
        whole = seen.ended - seen.began
        times = np.linspace(seen.began, seen.ended, 400)
        truth = np.array([seen.truth(at) for at in times]) - seen.began
        axis.fill_between(times - seen.began, truth * (1 - BAR), truth * (1 + BAR), color="#dddddd", label="10 %")
        axis.plot(times - seen.began, truth, color="black", linewidth=1, label="true end")
        told = [(at - seen.began, at + eta - seen.began) for at, eta in seen.looks if eta is not None]
        axis.plot(*zip(*told, strict=True), "o-", markersize=2.5, linewidth=1, color="#c0392b", label="predicted end")
        axis.axvline(FROM * whole, color="#888888", linestyle=":", linewidth=1)
        if seen.changed is not None:
            axis.axvline(seen.changed - seen.began, color="#2471a3", linewidth=1)
        axis.set_title(name, fontsize=10)
        axis.set_ylim(0, 1.3 * latest)
        axis.set_xlabel("seconds since the first unit", fontsize=8)
    axes[0][0].set_ylabel("end, seconds since the first unit", fontsize=8)
    axes[0][0].legend(fontsize=7, loc="lower right")
    for axis in axes.flat[len(all_seen) :]:
        axis.set_axis_off()
    figure.tight_layout()
    path = RESULTS / "eta.png"
    figure.savefig(path, dpi=110)
    return path


def main() -> None:
    """Watch all cases, print, write and plot."""
    names = sys.argv[1:] or list(CASES)
    all_seen = {name: watch(CASES[name]) for name in names}
    figures = [figures_of(name, seen) for name, seen in all_seen.items()]
    table(list(figures[0]), [list(one.values()) for one in figures])
    print("plot", plot(all_seen))
    print("wrote", write("eta", {"cases": figures}))


if __name__ == "__main__":
    main()
