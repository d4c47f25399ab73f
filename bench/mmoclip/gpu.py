"""Speed of MMoCLIP on one GPU: ViT-L-14 on made-up pairs, in samples a second beside the published 79.2 of an A100.

    python -m bench.mmoclip.gpu [--device cuda] [--quick]

In at most eight minutes, and without a network. `embq bench mmoclip` trains on one GPU under the published conditions,
512 samples a batch, AMP in fp16 and gradient checkpointing, then in bf16, with smaller batches that need no
checkpointing, and compiled. It is given few samples; a training that would take longer than its part of the time is
stopped, and its rate is that of the iterations until then. No figure is comparable with the baseline of 32 GPUs: what
they leave out is the exchange between GPUs.

The result is written to build/bench/mmoclip_gpu.json where the device is a GPU. `--quick` does it with a tiny model
on a CPU as well, to see that it works; its figures say nothing.

On a machine without a package index, carry the wheels of what it lacks: embq[train] is torch, torchvision,
open_clip_torch with timm, ftfy and wcwidth, webdataset (braceexpand), pandas, pillow and safetensors; embq itself needs
click, rich, fsspec, pyarrow, redis and rq here.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embq.training.mmoclip import required

LIMIT_S = 470.0
"""For all of it."""
PART_S = 150.0
"""For each training, its start and the compilation included."""
LEAST_S = 60.0
"""Seconds that must be left for a training to be begun."""
GRACE_S = 60.0
GFLOP_PER_PAIR = 3 * 175.33
"""Forward and backward of ViT-L-14, by open_clip's profile; computing activations twice is not counted."""
TINY = Path(__file__).parent / "tiny-vit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training."""

    name: str
    batch_size: int
    iterations: int
    options: tuple[str, ...]


CASES = (
    Case(name="as published", batch_size=512, iterations=20, options=("--grad-checkpointing",)),
    Case(name="bf16", batch_size=512, iterations=20, options=("--grad-checkpointing", "--precision", "amp_bf16")),
    Case(name="bf16, 128, activations kept", batch_size=128, iterations=40, options=("--precision", "amp_bf16")),
    Case(
        name="bf16, 128, compiled",
        batch_size=128,
        iterations=40,
        options=("--precision", "amp_bf16", "--torchcompile"),
    ),
)
QUICK = (
    Case(name="tiny", batch_size=16, iterations=4, options=("--model", f"local-dir:{TINY}", "--precision", "fp32")),
)


def main(arguments: list[str] | None = None) -> int:
    """The figures of one device."""
    parser = argparse.ArgumentParser(prog="python -m bench.mmoclip.gpu", description="MMoCLIP on one GPU.")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it work?")
    asked = parser.parse_args(arguments)
    if asked.device == "cpu" and not asked.quick:
        print("ViT-L-14 takes hours on a CPU; --device cpu --quick shows that it works", file=sys.stderr)
        return 2
    began = time.monotonic()
    figures: dict[str, Any] = {"published_per_gpu_s": required.PUBLISHED_PER_GPU_S, "trainings": {}}
    with tempfile.TemporaryDirectory() as folder:
        for case in QUICK if asked.quick else CASES:
            left_s = LIMIT_S - (time.monotonic() - began)
            if left_s < LEAST_S:
                figures["trainings"][case.name] = {"failed": "no time was left"}
                continue
            print(f"{case.name}: {left_s:.0f} s left", file=sys.stderr, flush=True)
            figures["trainings"][case.name] = trained(case, asked.device, Path(folder), min(PART_S, left_s))
    figures["seconds"] = round(time.monotonic() - began, 1)
    show(figures)
    if asked.device == "cuda" and not asked.quick:
        from bench.report import write

        print(write("mmoclip_gpu", figures))
    return 0 if all("failed" not in one for one in figures["trainings"].values()) else 1


def trained(case: Case, device: str, folder: Path, limit_s: float) -> dict[str, Any]:
    """The verb's own figures of one training; or what it said in place of them."""
    out = folder / case.name.replace(" ", "-").replace(",", "")
    command = [sys.executable, "-m", "embq", "bench", "mmoclip", "--device", device, "--num-devices", "1", "--json"]
    command += ["--batch-size", str(case.batch_size), "--samples", str(case.batch_size * case.iterations)]
    command += [*case.options, "--output", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, said = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=GRACE_S)
    results = list(out.glob("*/result.json"))
    if not results:
        return {"failed": said.strip()[-2000:]}
    found = json.loads(results[0].read_text(encoding="utf-8"))
    rate = found["samples_per_s_per_gpu"]
    if rate is None:
        return {"failed": "; ".join(found["faults"])}
    tera = {"tflop_per_s": round(rate * GFLOP_PER_PAIR / 1000, 1)} if found["model"] == required.MODEL else {}
    return {**found, **tera, "of_published": round(rate / required.PUBLISHED_PER_GPU_S, 3)}


def show(figures: dict[str, Any]) -> None:
    """Print the figures in columns, and what failed below them."""
    from bench.report import table

    header = ["", "GPU", "batch", "iterations", "first, s", "samples/s", "x A100", "TFLOP/s"]
    rows = [
        [
            name,
            one["gpu"] or "CPU",
            one["batch_size"],
            one["iterations"],
            f"{one['first_iteration_s']:.1f}",
            f"{one['samples_per_s_per_gpu']:.1f}",
            f"{one['of_published']:.2f}",
            one.get("tflop_per_s", "-"),
        ]
        for name, one in figures["trainings"].items()
        if "failed" not in one
    ]
    table(header, rows)
    for name, one in figures["trainings"].items():
        if "failed" in one:
            print(f"{name}: {one['failed']}")


if __name__ == "__main__":
    sys.exit(main())
