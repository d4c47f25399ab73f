"""Published figures of GPUs."""

from __future__ import annotations

import re
from typing import NamedTuple


class Card(NamedTuple):
    """CUDA's capability, and dense TFLOP/s of data sheets: halves with sums in fp32, and fp32 without TF32."""

    capability: tuple[int, int]
    half: float
    fp32: float


CARDS = {
    "B200": Card((10, 0), 2250, 75),
    "H200": Card((9, 0), 989, 67),
    "H100": Card((9, 0), 989, 67),
    "L40S": Card((8, 9), 362, 91.6),
    "L4": Card((8, 9), 121, 30.3),
    "RTX4090": Card((8, 9), 165, 82.6),
    "A100": Card((8, 0), 312, 19.5),
    "A10G": Card((8, 6), 70, 35),
    "A10": Card((8, 6), 125, 31.2),
    "RTX3090": Card((8, 6), 71, 35.6),
    "T4": Card((7, 5), 65, 8.1),
    "V100": Card((7, 0), 125, 15.7),
    "P100": Card((6, 0), 21.2, 10.6),
    "GTX1080": Card((6, 1), 0.14, 8.9),
    "GTX1070": Card((6, 1), 0.1, 6.5),
}


def names(card: str) -> str:
    """Pattern of a card in the names that drivers give devices, such as GTX1070 in "NVIDIA GeForce GTX 1070"."""
    spaced = re.sub(r"(?<=[A-Z])(?=\d)", " ?", card)
    return rf"(?<![A-Z0-9]){spaced}(?![A-Z0-9])"


def gain_of_halves(device: str) -> float:
    """Peak speed of a device in bf16 and fp16 over that in fp32, by its name; 1 if no data sheet here has it."""
    matching = (card for name, card in CARDS.items() if re.search(names(name), device, re.IGNORECASE))
    return next((card.half / card.fp32 for card in matching), 1.0)
