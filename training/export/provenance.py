"""Where an exported model came from. The same checkpoint gives the same words: nothing in them is a time."""

from __future__ import annotations

from typing import Any

from core.errors import EmbqError
from core.process.packages import version_of
from core.storage.durable import file_sha256
from training.export.checkpoint import Checkpoint
from training.export.params import Arguments
from training.openclip.log import read

KEPT = ("name", "model", "pretrained", "precision", "epochs", "batch_size", "world_size", "lr", "seed", "train_data")
"""Arguments of the training that are told."""


def provenance_of(
    checkpoint: Checkpoint, arguments: Arguments, fingerprint: str, weights_sha256: str
) -> dict[str, Any]:
    """What `embq_export.json` says.

    Args:
        fingerprint: see `training.export.exported.Exported`.
        weights_sha256: of the safetensors file.
    """
    return {
        "schema": 1,
        "checkpoint": {
            "path": str(checkpoint.path),
            "bytes": checkpoint.path.stat().st_size,
            "sha256": file_sha256(checkpoint.path),
            "epoch": checkpoint.epoch,
        },
        "training": {name: arguments[name] for name in KEPT},
        "samples_seen": _samples_seen(checkpoint),
        "shards_digest": _shards_digest(arguments),
        "weights_sha256": weights_sha256,
        "fingerprint": fingerprint,
        "versions": versions("open_clip_torch"),
    }


def versions(library: str) -> dict[str, str]:
    """Of embq, of the library whose model it is, and of torch."""
    return {name: version_of(name) for name in ("embq", library, "torch")}


def _samples_seen(checkpoint: Checkpoint) -> int | None:
    """Samples of all steps up to the checkpoint, from the training's log; None where it does not say."""
    log = None if checkpoint.params is None else checkpoint.params.with_name("out.log")
    if log is None or checkpoint.epoch is None or not log.is_file():
        return None
    of_epochs = {one.epoch: one.samples_per_epoch for one in read(log).iterations}
    seen = [of_epochs.get(epoch) for epoch in range(checkpoint.epoch)]
    return None if None in seen else sum(one or 0 for one in seen)


def _shards_digest(arguments: Arguments) -> str | None:
    """Of the names and counts of the training's shards; None where they are not here any more."""
    from training.shards.counts import open_shards

    try:
        return open_shards(arguments["train_data"]).digest if arguments["train_data"] else None
    except EmbqError:
        return None
