"""From the members of a sample to pixels and a label, or to the reason why there are none."""

from __future__ import annotations

from collections.abc import Callable

import torch

from core.errors import SampleError
from core.units import Sample
from sources.fields import IMAGE_EXTENSIONS
from training.data.reading import RawSample
from worker.embedders.image.decoding import Picture

LABEL = "cls"
"""Extension of the member that holds the number of the class, in decimal digits."""

LABEL_MAX_BYTES = 20
"""No int64 has more digits."""

PixelsOf = Callable[[Picture, str], torch.Tensor]
"""The pixels that a step sees of a picture with a key: uint8 of shape (3, size, size)."""


def prepared(sample: RawSample, pixels_of: PixelsOf, classes: int | None) -> tuple[torch.Tensor, int]:
    """The pixels and the label of a sample; SampleError with its code where it lacks one or has one of no use."""
    label = label_of(sample, classes)
    key = sample["__key__"]
    image = next((sample[extension] for extension in IMAGE_EXTENSIONS if extension in sample), None)
    with Picture(Sample(ordinal=0, key=key, image=image)) as picture:
        return pixels_of(picture, key), label


def label_of(sample: RawSample, classes: int | None) -> int:
    """The label of a sample; SampleError `missing_label` or `bad_label`."""
    written = sample.get(LABEL)
    if written is None:
        raise SampleError("missing_label", f"the sample has no .{LABEL}")
    digits = written.strip()
    if not digits.isdigit() or len(digits) > LABEL_MAX_BYTES:
        raise SampleError("bad_label", f".{LABEL} is {written[:LABEL_MAX_BYTES]!r}, not the number of a class")
    label = int(digits)
    if label >= (2**63 if classes is None else classes):
        raise SampleError("bad_label", f".{LABEL} is {label}, and there are {classes} classes")
    return label
