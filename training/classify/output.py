"""What a training leaves behind: the weights, what they are for, and a picture of how they came to be."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from core.durable import drop, publish
from core.errors import OutputError
from training.classify.curve import draw
from training.classify.folder import FORMAT, write_json

if TYPE_CHECKING:
    from training.classify.training import Training


def finish(training: Training) -> None:
    """Write model.safetensors, model.json and, where matplotlib is installed, curve.png."""
    from safetensors.torch import save_file

    folder = training.folder
    temporary = folder.root / f".{folder.weights.name}.{os.getpid()}"
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in training.learner.model.state_dict().items()}
    try:
        save_file(weights, temporary)
        publish(temporary, folder.weights)
        write_json(folder.model, described(training))
    except OSError as error:
        drop(temporary)
        raise OutputError(
            f"{folder.weights} cannot be written: {error}",
            next_step="make room, then start the same command again: it only writes the model",
        ) from error
    draw(folder.log, folder.curve)


def described(training: Training) -> dict[str, Any]:
    """What the weights are: enough to build the model again, and to give it what it was trained on."""
    import torch

    from training.data.crops import SHOWN

    view, config = training.view, training.config
    return {
        "format": FORMAT,
        "arch": config.arch,
        "classes": training.plan.classes,
        "preprocessing": {
            "image_size": view.image_size,
            "shown": SHOWN,
            "interpolation": "bilinear",
            "mean": list(view.mean),
            "std": list(view.std),
        },
        "training": {
            "epochs": config.epochs,
            "samples": training.samples,
            "shards": config.shards,
            "digest": training.plan.shards.digest,
            "precision": config.precision,
            "seed": config.seed,
        },
        "torch": torch.__version__,
    }
