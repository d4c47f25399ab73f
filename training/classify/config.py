"""What one training of a classifier is, as its flags say it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

ANEW = {"resume": "epoch"}
"""Another value changes who reads what, but not what is learnt of it: an interrupted epoch begins anew."""
FREE = {"resume": "free"}
"""Another value changes nothing of what is learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One training. A field without a mark decides what is learnt: a checkpoint goes on with the same value only.

    Attributes:
        shards: the training set, in any form that `open_shards` takes.
        out: the folder of the training.
        validation: shards to measure on after each epoch; "" for none.
        classes: a classes.json; "" for the one beside the shards.
        arch: `timm:NAME`, `torchvision:NAME`, or NAME, looked for in that order.
        start: a safetensors file with the weights to begin with; "" for random ones.
        epochs: how often the training set is gone through.
        batch_size: samples of one process in one step.
        image_size: pixels on each side of what the model sees.
        loader_workers: processes that read and decode, for each process that trains; 0 for none.
        shuffle_buffer: samples among which a loader worker draws the next one.
        epoch_samples: samples of one epoch, of all processes; None for what sizes.json says.
        splitshards: exact epochs, each sample once; else resampled ones.
        lr: the highest learning rate.
        momentum: of SGD.
        weight_decay: of SGD.
        warmup_steps: steps in which the learning rate rises; from there on it falls as a cosine, to 0.
        label_smoothing: part of the target that is spread over all classes.
        clip: highest norm of the gradient; 0 for any.
        precision: fp32, bf16 or fp16; "" for bf16 where the GPU computes in it, else fp32.
        seed: of weights, orders, augmentation and dropout.
        checkpoint_minutes: between two checkpoints within an epoch; each epoch ends with one too.
        log_every: steps from one line of the log to the next.
        max_failures: part of an epoch's samples that may be unreadable before the training stops.
        log_keys: whether to note in OUT/keys which samples each process trained on.
        device: "cuda" or "cpu".
    """

    shards: str
    out: str = field(metadata=FREE)
    validation: str = field(default="", metadata=FREE)
    classes: str = field(default="", metadata=FREE)
    arch: str = "resnet18"
    start: str = field(default="", metadata=FREE)
    epochs: int = 90
    batch_size: int = 32
    image_size: int = 224
    loader_workers: int = field(default=4, metadata=ANEW)
    shuffle_buffer: int = 1000
    epoch_samples: int | None = None
    splitshards: bool = False
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup_steps: int = 0
    label_smoothing: float = 0.0
    clip: float = 0.0
    precision: str = ""
    seed: int = 0
    checkpoint_minutes: float = field(default=10.0, metadata=FREE)
    log_every: int = field(default=20, metadata=FREE)
    max_failures: float = field(default=0.01, metadata=FREE)
    log_keys: bool = field(default=False, metadata=FREE)
    device: str = field(default="cuda", metadata=FREE)

    def arguments(self) -> list[str]:
        """The flags that say this, for another process of the same training."""
        said: list[str] = []
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "shards" or value is None or value is False or value == "":
                continue
            said += [flag(one.name)] if value is True else [f"{flag(one.name)}={value}"]
        return [*said, "--", self.shards]

    def to_json(self) -> dict[str, Any]:
        """Every field by its name."""
        return asdict(self)


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def differences(before: Mapping[str, Any], now: Config) -> list[str]:
    """The flags that would change what a training learns, with both values; other shards are found by their content."""
    return _differing(before, now, {})


def rereads(before: Mapping[str, Any], now: Config) -> list[str]:
    """The flags that change only who reads what, with both values."""
    return _differing(before, now, ANEW)


def _differing(before: Mapping[str, Any], now: Config, mark: Mapping[str, str]) -> list[str]:
    marked = [one.name for one in fields(now) if one.metadata == mark and one.name != "shards"]
    return [
        f"{flag(name)} {_shown(before[name])}, now {_shown(getattr(now, name))}"
        for name in marked
        if name in before and before[name] != getattr(now, name)
    ]


def _shown(value: object) -> str:
    return (
        "not given"
        if value is None or value is False or value == ""
        else "given"
        if value is True
        else json.dumps(value)
    )
