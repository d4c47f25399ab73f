"""What a training leaves behind: the weights, what they are for, and a picture of how they came to be."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from core.storage.durable import drop, publish
from training.classify.curve import draw
from training.classify.folder import FORMAT, write_json
from training.classify.writing import writing
from training.weights import save

if TYPE_CHECKING:
    from training.classify.training import Training


def finish(training: Training) -> None:
    """Write model.safetensors, model.json and, where matplotlib is installed, curve.png."""
    folder = training.folder
    temporary = folder.root / f".{folder.weights.name}.{os.getpid()}"
    try:
        with writing(folder.weights):
            save(training.learner.model.state_dict(), temporary)
            publish(temporary, folder.weights)
    finally:
        drop(temporary)
    write_json(folder.model, described(training))
    with writing(folder.curve):
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
