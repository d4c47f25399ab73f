"""Profile of `embq run` on a GPU: threads, interpreter lock, device, kernels.

    python -m bench.gpu_profile [--device cuda:0] [--quick] [--model ViT-B-32] [--workers 1x16,2x8,4x4] [--rows 300000]
        [--decode HOW] [--cores N] [--output FILE]

In at most nine minutes: for each number of workers on the device x threads that prepare, `embq run` with a model of
`bench.gpu` in bf16 over so many of its JPEGs or texts. While it embeds, for `WINDOW_S` seconds and of one worker:

- the CPU time of each thread, as `top -H` shows it;
- the share of the time for which the interpreter's lock is held, and by which threads and functions, where the command
  py-spy is on PATH (a wheel; it stops the process for a moment at each of `SPY_HZ` samples a second);
- what NVML says of the GPU: how long it is busy, its memory, its power and what the host sends to it.

Then `PASSES` passes of the embedder alone under torch.profiler. The result is written after each of these parts, to
build/bench/gpu_profile.json where the device is a GPU. `--quick` does all of it in a minute on a CPU as well.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu import (
    MOST_RUN_S,
    add_options,
    image_source,
    in_a_process,
    keeper,
    lacks,
    make_pictures,
    precision_of,
    run,
    say,
    text_source,
)
from bench.report import table
from embq.core.models import CPU_DECODES

if TYPE_CHECKING:
    from bench.gpu_models import Case, Scale
    from bench.image_cpu import Look

MODEL = "ViT-B-32"
WORKERS, QUICK_WORKERS = "1x16,2x8,4x4", "1x2,2x1"
ROWS, QUICK_ROWS = 300_000, 192
WINDOW_S, QUICK_WINDOW_S = 8.0, 1.0
SETTLE_S = 1.0
"""From the last model's being loaded to the window."""
PASSES = 20
SPY_HZ = 100
MOST_NAMED = 12


def main(arguments: list[str] | None = None) -> int:
    """The profile of one device."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_profile", description="embq run on a GPU, in detail.")
    add_options(parser)
    parser.add_argument("--workers", default="", metavar="WxT,WxT", help=f"workers x threads  [{WORKERS}]")
    parser.add_argument("--model", default=MODEL, metavar="NAME", help=f"one of bench.gpu's  [{MODEL}]")
    parser.add_argument("--rows", type=int, default=0, help=f"of each run  [{ROWS}]")
    parser.add_argument("--cores", type=int, default=0, metavar="N", help="only so many of them for the runs")
    parser.add_argument("--decode", default=CPU_DECODES[0], metavar="HOW", help="as of `embq run`")
    asked = parser.parse_args(arguments)
    if why := lacks(asked):
        print(why, file=sys.stderr)
        return 2
    from bench.gpu_models import CASES, QUICK, TINY, Scale

    models = {one.name: one for one in (TINY if asked.quick else CASES)}
    if asked.model not in models and not asked.quick:
        print(f"no such model: {asked.model}; there are {', '.join(models)}", file=sys.stderr)
        return 2
    case: Case = models.get(asked.model, TINY[0])
    scale = QUICK if asked.quick else Scale()
    rows = asked.rows or (QUICK_ROWS if asked.quick else ROWS)
    precision = precision_of(asked.device)
    keep = keeper("gpu_profile", asked)
    runs: list[dict[str, Any]] = []
    figures: dict[str, Any] = {"model": case.name, "precision": precision, "decode": asked.decode, "rows": rows}
    figures["cores"] = asked.cores or len(os.sched_getaffinity(0))
    figures["runs"] = runs
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if case.kind == "images":
            say("making photographs")
            make_pictures(folder, scale)
        if asked.cores:
            os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: asked.cores]))
        source = (image_source if case.kind == "images" else text_source)(folder, rows, scale)
        for pair in (asked.workers or (QUICK_WORKERS if asked.quick else WORKERS)).split(","):
            workers, threads = map(int, pair.split("x"))
            say(f"embq run, {workers} workers x {threads} threads")
            watch = Watched(asked.device, workers, QUICK_WINDOW_S if asked.quick else WINDOW_S)
            found = run(
                case.config(folder, precision).spec,
                source,
                folder,
                asked.device,
                precision,
                MOST_RUN_S,
                options=(
                    *("--workers", str(workers), "--threads", str(threads)),
                    *(("--decode", asked.decode) if case.kind == "images" else ()),
                ),
                watch=watch.start,
            )
            runs.append({"workers": workers, "threads": threads, **found, **watch.figures()})
            keep(figures)
        say(f"{PASSES} passes under torch.profiler")
        try:
            figures["passes"] = in_a_process(passes, case, asked.device, precision, folder, scale)
        except RuntimeError as error:
            figures["passes"] = {"failed": str(error)}
        keep(figures)
    show(figures)
    return 0


class Watched:
    """Looks at a run from the moment when all its models are loaded, for a window of time."""

    def __init__(self, device: str, workers: int, seconds: float) -> None:
        self._device = device
        self._workers = workers
        self._seconds = seconds
        self._found: dict[str, Any] = {}
        self._thread: threading.Thread | None = None

    def start(self, pid: int, output: Path) -> None:
        """Look at the run of that process and output folder, in a thread."""
        self._thread = threading.Thread(target=self._look, args=(pid, output), name="watched", daemon=True)
        self._thread.start()

    def figures(self) -> dict[str, Any]:
        """The looks; waits for the run's end."""
        if self._thread is not None:
            self._thread.join()
        return self._found

    def _look(self, pid: int, output: Path) -> None:
        from bench.image_cpu import Watch

        watch = Watch(pid)
        watch.start()
        log = output / "_logs" / "worker.log"
        while watch.is_alive() and _loaded(log) < self._workers:
            time.sleep(0.1)
        watch.join(SETTLE_S)
        found = {process for process, kind, _ in watch.looks[-1].seconds if kind == "worker"} if watch.looks else set()
        if not watch.is_alive() or not found:
            return  # it has failed, or was over at once
        worker = min(found)
        began = time.time()
        spy = _spy(worker, self._seconds)
        device = device_figures(self._device, self._seconds)
        ended = time.time()
        lock, names = spy()
        watch.join()
        self._found = {"process": thread_figures(watch.looks, worker, began, ended, names), "gpu": device, "lock": lock}


def _loaded(log: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return log.read_text(errors="replace").count(" model_loaded ")
    return 0


def thread_figures(
    looks: list[Look], worker: int, began: float, ended: float, names: Mapping[int, str]
) -> dict[str, Any]:
    """Cores that a process used between two moments, and those of its threads, by pool.

    Args:
        names: thread -> its name in Python; others have those of the kernel's.
    """
    within = [look for look in looks if began <= look.at <= ended]
    if len(within) < 2:
        return {}
    first, last = within[0], within[-1]
    seconds = last.at - first.at
    used: Counter[str] = Counter()
    for (process, _, thread), cpu_s in last.seconds.items():
        if process == worker:
            spent_s = cpu_s - first.seconds.get((process, "worker", thread), 0.0)
            used[pool_of(names.get(thread, "no Python"))] += spent_s / seconds  # type: ignore[assignment]
    return {
        "seconds": round(seconds, 2),
        "cores": round(sum(used.values()), 2),
        "threads": {name: round(share, 3) for name, share in used.most_common(MOST_NAMED)},
    }


def pool_of(name: str) -> str:
    """A thread's name without its number, which those of a pool share."""
    return re.sub(r"[-_]?\d+$", "", name)


def _spy(pid: int, seconds: float) -> Callable[[], tuple[dict[str, Any], dict[int, str]]]:
    """Begin to sample who holds the interpreter's lock of a process; call what is returned for that, and for the
    names of its threads. Both are empty without py-spy, or where it may not look."""
    command = shutil.which("py-spy")
    if command is None:
        return lambda: ({}, {})
    target = ["--pid", str(pid)]
    dumped = subprocess.run([command, "dump", *target], capture_output=True, text=True, check=False).stdout
    names = {int(thread): name for thread, name in re.findall(r'^Thread (\d+) .*: "(.*)"', dumped, re.MULTILINE)}
    into = tempfile.NamedTemporaryFile()  # noqa: SIM115 - py-spy writes to it after this function
    options = ["--gil", "--threads", "--rate", str(SPY_HZ), "--duration", str(max(1, round(seconds)))]
    sampling = subprocess.Popen(
        [command, "record", *options, "--format", "raw", "--output", into.name, *target],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def figures() -> tuple[dict[str, Any], dict[int, str]]:
        with into:
            sampling.wait()
            return lock_figures(Path(into.name).read_text(), SPY_HZ * max(1, round(seconds))), names

    return figures


def lock_figures(raw: str, samples: int) -> dict[str, Any]:
    """The share of samples in which the interpreter's lock was held, also by threads and functions."""
    threads: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        threads[pool_of(thread.partition(": ")[2])] += int(count)
        functions[re.sub(r":\d+\)$", ")", frames[-1]) if frames else ""] += int(count)
    if not threads:
        return {}
    return {
        "held": round(threads.total() / samples, 3),
        "threads": {name: round(count / samples, 3) for name, count in threads.most_common(MOST_NAMED)},
        "functions": {name: round(count / samples, 3) for name, count in functions.most_common(MOST_NAMED)},
    }


def device_figures(device: str, seconds: float) -> dict[str, float]:
    """Means of NVML's readings of a GPU over some seconds; waits for as long on other devices too."""
    if not device.startswith("cuda"):
        time.sleep(seconds)
        return {}
    from embq.worker.supervisor.devices import find_gpus, nvml

    library = nvml()
    gpus = {f"cuda:{gpu.number}": gpu for gpu in find_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))}
    handle = library.nvmlDeviceGetHandleByUUID(gpus[device].visible)
    asked: dict[str, Callable[[], float]] = {
        "busy": lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "memory_gib": lambda: library.nvmlDeviceGetMemoryInfo(handle).used / 2**30,
        "power_w": lambda: library.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "sm_mhz": lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM),
        "received_gb_per_s": lambda: library.nvmlDeviceGetPcieThroughput(handle, library.NVML_PCIE_UTIL_RX_BYTES) / 1e6,
    }
    seen: dict[str, list[float]] = {}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for name, ask in asked.items():
            with contextlib.suppress(library.NVMLError):  # a virtual machine may hide some of it
                seen.setdefault(name, []).append(ask())
        time.sleep(0.1)
    return {name: round(sum(values) / len(values), 3) for name, values in seen.items()}


def passes(case: Case, device: str, precision: str, folder: Path, scale: Scale) -> dict[str, Any]:
    """Passes of the embedder, one begun before the vectors of the one before are there, under torch.profiler."""
    from torch.profiler import profile

    from bench.gpu_models import loaded, samples_of

    embedder = loaded(case, device, precision, folder)
    turns = itertools.cycle(embedder.prepare(samples_of(case, folder, scale)))
    batches = [list(itertools.islice(turns, embedder.batch_size)) for _ in range(PASSES)]
    dict(embedder.embed(batches[0]))
    with profile() as profiled:
        began, cpu_began = time.perf_counter(), time.thread_time()
        before: Mapping[str, Any] = {}
        for batch in batches:
            before, vectors = embedder.embed(batch), before
            dict(vectors)
        dict(before)
        seconds, cpu_s = time.perf_counter() - began, time.thread_time() - cpu_began
    events = profiled.key_averages()
    kernels = [event for event in events if event.device_type.name == "CUDA"]
    return {
        "passes": PASSES,
        "rows": embedder.batch_size,
        "pass_ms": round(1e3 * seconds / PASSES, 3),
        "launching_thread_ms": round(1e3 * cpu_s / PASSES, 3),
        "device_ms": round(sum(event.self_device_time_total for event in kernels) / 1e3 / PASSES, 3),
        "on_device": _named({event.key: event.self_device_time_total for event in kernels}),
        "on_host": _named({event.key: event.self_cpu_time_total for event in events}),
    }


def _named(microseconds: Mapping[str, float]) -> dict[str, float]:
    """The longest, in milliseconds of a pass."""
    most = Counter(microseconds).most_common(MOST_NAMED)
    return {name[:100]: round(us / 1e3 / PASSES, 3) for name, us in most}


def show(figures: Mapping[str, Any]) -> None:
    """Print the figures in columns."""
    rows = []
    for one in figures["runs"]:
        cells = [one.get("rows_per_s"), one.get("process", {}).get("cores"), one.get("lock", {}).get("held")]
        gpu = one.get("gpu", {})
        cells += [gpu.get("busy"), gpu.get("received_gb_per_s"), gpu.get("memory_gib")]
        rows.append([f"{one['workers']}x{one['threads']}", *("-" if cell is None else cell for cell in cells)])
    table(["run", "rows/s", "cores of a process", "lock held", "GPU busy", "GB/s to it", "GiB on it"], rows)
    for one in figures["runs"]:
        if "failed" in one:
            print(f"{one['workers']}x{one['threads']}: {one['failed']}")
    for name, value in figures["passes"].items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    sys.exit(main())
