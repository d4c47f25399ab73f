"""Settings that the benchmark fixes, as flags of open_clip and as values in `params.txt`."""

from __future__ import annotations

from collections.abc import Mapping

MODEL = "ViT-L-14"
SAMPLES = 3_200_000
BATCH_SIZE = 512
"""Per GPU, of the published result; the benchmark leaves it free."""
WORKERS = 4
"""Loader processes per GPU, open_clip's default; the published result had 24. One core feeds several GPUs."""
NAME = "test"
"""Name of the training: its log is LOGS/test/out.log."""

BASELINE_S = 1260.0
BASELINE_GPUS = 32
BASELINE_GPU = "A100"
PUBLISHED_PER_GPU_S = 79.2
"""Samples a second per A100 of the published run on 8 nodes of 4: 194 iterations of 512 samples in 1253.51 s."""

VALUES = {
    "dataset_type": "synthetic",
    "train_num_samples": str(SAMPLES),
    "epochs": "1",
    "model": MODEL,
    "local_loss": "True",
    "gather_with_grad": "True",
    "log_every_n_steps": "1",
    "accum_freq": "1",
}
"""Argument of open_clip -> the only value that is comparable."""

WHOLE_WORK = {
    "force_image_size": "None",
    "force_patch_dropout": "None",
    "force_context_length": "None",
    "lock_image": "False",
    "lock_text": "False",
    "siglip": "False",
    "use_bnb_linear": "None",
    "distill_model": "None",
    "resume": "None",
}
"""Argument -> its value if the work is the benchmark's. A version of open_clip without it cannot change the work."""


def flags(*, model: str = MODEL, samples: int = SAMPLES, batch_size: int = BATCH_SIZE, logs: str = "logs") -> list[str]:
    """Flags of a training; those that the benchmark fixes have its values unless others are asked for."""
    return [
        *("--dataset-type", "synthetic", "--train-num-samples", str(samples), "--epochs", "1"),
        *("--model", model, "--local-loss", "--gather-with-grad", "--log-every-n-steps", "1"),
        *("--dist-url", "env://", "--name", NAME, "--logs", logs, "--batch-size", str(batch_size)),
    ]


def differences(settings: Mapping[str, str]) -> list[str]:
    """Reasons why a training with these arguments is not comparable with the benchmark."""
    if not settings:
        return ["the arguments of the training are not known: there is no params.txt beside the log"]
    reasons = []
    for name, value in VALUES.items():
        if name not in settings:
            reasons.append(f"{name} is not known: {value} is required")
        elif settings[name] != value:
            reasons.append(f"{name} is {settings[name]}: {value} is required")
    for name, value in WHOLE_WORK.items():
        if settings.get(name, value) != value:
            reasons.append(f"{name} is {settings[name]}, which changes the work")
    return reasons


def iterations(samples: int, world_size: int, batch_size: int) -> int:
    """Iterations of an epoch: samples per process, rounded up, in whole batches."""
    return -(-samples // world_size) // batch_size
