"""Probes that run in a process of their own, where a broken driver, library or file may crash it.

Each prints one JSON object: its answer, or "error" with `error_fields`. Started by `embq.app.doctor.probes.child`.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from embq.core.errors import DeviceError, EmbqError, SampleError, error_fields
from embq.core.extras import install, missing

if TYPE_CHECKING:
    from embq.core.models import ModelConfig
    from embq.worker.embedders.base import Embedder


def device(name: str) -> dict[str, Any]:
    """Compute on the CPU, or on the one GPU of this process: a driver that lists a GPU may still fail to use it.

    Raises DeviceError if it does not compute, and what `check_device` raises.
    """
    from embq.worker.embedders.device.capability import check_device

    torch: Any = importlib.import_module("torch")
    answer = {"torch": torch.__version__}
    if name == "cpu":
        return answer
    check_device(name)
    try:
        answer["bytes"] = torch.cuda.get_device_properties(0).total_memory
        assert (torch.ones(8, device=name) + 1).sum().item() == 16, "it computes wrongly"
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(str(error).partition("\n")[0] or type(error).__name__) from error
    return answer


def files(*specs: str) -> dict[str, Any]:
    """Locate the files of models."""
    from embq.core.models import ModelSpec
    from embq.worker.embedders.lookup import locate

    return {"where": [locate(ModelSpec.given(spec)).where for spec in specs]}


def model(spec: str) -> dict[str, Any]:
    """Load a model on the CPU, and embed one sample."""
    from embq.core.models import ModelConfig, ModelSpec

    parsed = ModelSpec.given(spec)
    modalities = ["image", "text"] if parsed.family == "open_clip" else ["text"]
    if parsed.family == "hf":
        from embq.worker.embedders.hugging_face import own_modality

        with suppress(ImportError):  # which `load` reports
            modalities = [own_modality(parsed)]
    loaded, dims = _embed_one(ModelConfig(spec=spec, modalities=tuple(modalities), precision="fp32"), "cpu")
    return {"dims": dims, "fingerprint": loaded.fingerprint}


def run_model(record: str, on_device: str) -> dict[str, Any]:
    """Load the model of a run record on a device, and embed one sample."""
    from embq.core.queue.runs import RunRecord

    run = RunRecord.from_json(record)
    assert run is not None
    loaded, _ = _embed_one(run.model, on_device)
    return {"fingerprint": loaded.fingerprint}


def _embed_one(config: ModelConfig, on_device: str) -> tuple[Embedder, dict[str, int]]:
    """The loaded model, and the dimension of each output."""
    from embq.core.units import Sample
    from embq.worker.embedders.registry import load

    image = None
    if "image" in config.modalities:
        from PIL import Image

        picture = io.BytesIO()
        Image.new("RGB", (64, 64), (200, 100, 50)).save(picture, "PNG")  # every image model takes this size
        image = picture.getvalue()
    loaded = load(config, on_device)
    (prepared,) = loaded.prepare([Sample(ordinal=0, key="k", image=image, text="a test")])
    if isinstance(prepared, SampleError):
        raise prepared
    vectors = loaded.embed([prepared])
    return loaded, {name: vector.shape[1] for name, vector in vectors.items()}


def sample(unit: str) -> dict[str, Any]:
    """Read the first sample of a unit as a worker does: size and version first, then bytes."""
    from embq.core.settings import Settings
    from embq.core.units import Unit
    from embq.sources.access.allowed_hosts import Reach, limit
    from embq.sources.unit_reader import read

    settings = Settings.from_environment()
    limit(Reach.of(settings.roots, settings.private_hosts))
    first = next(iter(read(Unit.from_description(json.loads(unit)), settings.roots)), None)
    return {"key": "" if first is None else first.key}


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    probe.__name__: probe for probe in (device, files, model, run_model, sample)
}


def main(name: str, *arguments: str) -> None:
    """Run a probe; prints its answer or its error."""
    try:
        answer = PROBES[name](*arguments)
    except EmbqError as error:
        answer = {"error": error_fields(error)}
    except ModuleNotFoundError as error:
        package = str(error.name)
        missed = missing(package, f"the package {package} is not installed", next_step=install([package]))
        answer = {"error": error_fields(missed)}
    print(json.dumps(answer))  # noqa: T201 - the answer to the parent


if __name__ == "__main__":
    main(*sys.argv[1:])
