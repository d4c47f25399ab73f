"""Exports a classifier to a folder for `hf:FOLDER`: a timm model, as transformers wraps it.

Its vectors are what the classifier's last layer reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embq.core.errors import InputError, ModelError
from embq.core.storage.beneath import read_small, require_regular
from embq.core.storage.durable import file_sha256
from embq.training.classify.checkpoint import FORMAT
from embq.training.classify.models import built
from embq.training.export.model_folder import PROVENANCE, Exported, check_target, fingerprint_of, new_folder
from embq.training.export.openclip import versions
from embq.training.run.folder import save_weights

CONFIG = "config.json"
DESCRIBED = "model.json"
WEIGHTS = "model.safetensors"


def is_classifier(given: Path) -> bool:
    """True if a path is the folder of a training by `embq train classify`, or in one."""
    folder = _training(given)
    return given.exists() and any(_read(folder / name).get("format") == FORMAT for name in (DESCRIBED, CONFIG))


def _training(given: Path) -> Path:
    """The folder of the training that a path belongs to."""
    folder = given if given.is_dir() else given.parent
    return folder.parent if folder.name == "checkpoints" else folder


def export_classifier(given: Path, target: Path) -> Exported:
    """Write the model of a finished training as a folder that the workers load.

    Args:
        given: the folder of the training, its model.safetensors, or the folder of its checkpoints.
        target: a folder that is new or empty.

    Raises InputError if the training is not over, ModelError if no worker loads its architecture, OutputError
    if the folder cannot be written.
    """
    check_target(target)
    folder = _training(given)
    described = _read(folder / DESCRIBED)
    if given.is_file() and given.name != WEIGHTS:
        raise InputError(
            f"{given}: of a classifier only the model at the end of its training is exported",
            next_step=f"give the folder of the training, which has a {WEIGHTS} when it is over",
        )
    if not described or not (folder / WEIGHTS).is_file():
        raise InputError(
            f"{folder}: its training is not over, which writes {WEIGHTS} and {DESCRIBED} last",
            next_step="give the same embq train classify again: it goes on",
        )
    library, _, name = str(described["arch"]).partition(":")
    if library != "timm":
        raise ModelError(
            f"{folder} is of {described['arch']}, and the workers load architectures of timm, none of {library}",
            next_step="train with --model timm:NAME to have a model to embed with",
        )
    with new_folder(target) as output:
        trained = _trained(described, folder / WEIGHTS)
        config = _config(name, described, trained)
        (output / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_weights(trained.state_dict(), output / WEIGHTS)
        _check_equal(trained, described, output)
        provenance = _provenance(folder, described, fingerprint_of(f"hf:{output}"), file_sha256(output / WEIGHTS))
        (output / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
        size = (output / WEIGHTS).stat().st_size
    return Exported(folder=target, spec=f"hf:{target.absolute()}", provenance=provenance, weights_bytes=size)


def _read(path: Path) -> Mapping[str, Any]:
    """A JSON object; an empty one if there is none."""
    try:
        content = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _trained(described: Mapping[str, Any], weights: Path) -> Any:
    """The trained classifier; ModelError if the weights do not belong to it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    size, classes = int(described["preprocessing"]["image_size"]), len(described["classes"])
    model = built(described["arch"], classes=classes, image_size=size)
    try:
        model.load_state_dict(load_file(require_regular(weights)))
    except (OSError, SafetensorError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{weights} are not the weights of the {described['arch']} that {DESCRIBED} beside it describes: {first}",
            next_step="copy both files of one training",
        ) from error
    return model.eval()


def _config(name: str, described: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """timm's own form of a configuration, which transformers recognises by its keys."""
    import timm

    shown, size = described["preprocessing"], int(described["preprocessing"]["image_size"])
    pretrained = timm.get_pretrained_cfg(name)
    is_fixed = pretrained is not None and bool(pretrained.fixed_input_size)
    return {
        "architecture": name,
        "num_classes": len(described["classes"]),
        "num_features": model.num_features,
        "label_names": described["classes"],
        **({"model_args": {"img_size": size}} if is_fixed else {}),
        "pretrained_cfg": {
            "input_size": [3, size, size],
            "fixed_input_size": is_fixed,
            "interpolation": shown["interpolation"],
            "crop_pct": _crop_pct(size, float(shown["shown"])),
            "crop_mode": "center",
            "mean": shown["mean"],
            "std": shown["std"],
        },
    }


def _crop_pct(size: int, shown: float) -> float:
    """The crop ratio with which timm, which rounds down, resizes as the training did."""
    short = round(size / shown)
    return shown if int(size / shown) == short else size / (short + 0.25)


def _check_equal(trained: Any, described: Mapping[str, Any], folder: Path) -> None:
    """ModelError if transformers has other weights, or gives another vector than the last layer's input.

    The vectors are compared but for what another order of sums rounds differently: transformers leaves weights where
    they lie in the mapped file, and the kernels for tensors that are aligned differently may be others.
    """
    import torch
    from transformers import TimmWrapperModel

    from embq.worker.embedders.loading import read_model

    loaded, _ = read_model(TimmWrapperModel, folder)
    size = int(described["preprocessing"]["image_size"])
    image = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = trained.forward_head(trained.forward_features(image), pre_logits=True)
        given = loaded(pixel_values=image, return_dict=True).pooler_output
    if not torch.isfinite(expected).all():
        raise ModelError(
            f"{described['arch']} gives vectors that are not finite: the training has diverged",
            next_step="train with a smaller --lr, or with --clip",
        )
    weights, after = trained.state_dict(), loaded.timm_model.state_dict()
    same = after.keys() <= weights.keys() and all(torch.equal(weights[name], tensor) for name, tensor in after.items())
    if not same or not torch.allclose(expected, given, rtol=1e-5, atol=1e-6 * float(expected.abs().max())):
        raise ModelError(
            f"transformers gives another vector of {described['arch']} than the one that its last layer reads",
            next_step="train another architecture; report this one",
        )


def _provenance(folder: Path, described: Mapping[str, Any], fingerprint: str, weights_sha256: str) -> dict[str, Any]:
    weights, training = folder / WEIGHTS, described["training"]
    return {
        "schema": 1,
        "checkpoint": {
            "path": str(weights),
            "bytes": weights.stat().st_size,
            "sha256": file_sha256(weights),
            "epoch": training["epochs"],
        },
        "training": {"arch": described["arch"], **training},
        "samples_seen": training["samples"],
        "shards_digest": training["digest"],
        "weights_sha256": weights_sha256,
        "fingerprint": fingerprint,
        "versions": versions("timm"),
    }
