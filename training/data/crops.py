"""Which piece of a picture a training sees. After "Going deeper with convolutions" (Szegedy et al. 2015), section 6."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

AREA = (0.08, 1.0)
"""Of the picture's area, least and most."""

ASPECT = (3 / 4, 4 / 3)
"""Width over height, least and most."""

TRIES = 10
"""To find a piece that fits; of a photograph of 4 by 3 the first one does 7 times out of 10."""

SHOWN = 0.875
"""Of the short side, what the middle of a picture shows in validation: 224 of 256."""


class Crop(NamedTuple):
    """A piece of a picture in pixels, and whether left and right change places."""

    top: int
    left: int
    height: int
    width: int
    flipped: bool = False


def random_crop(height: int, width: int, numbers: random.Random) -> Crop:
    """A piece of random area and aspect, flipped or not."""
    flipped = numbers.random() < 0.5
    for _ in range(TRIES):
        area = height * width * numbers.uniform(*AREA)
        aspect = math.exp(numbers.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            return Crop(numbers.randint(0, height - tall), numbers.randint(0, width - wide), tall, wide, flipped)
    wide = min(width, round(height * ASPECT[1]))
    tall = min(height, round(width / ASPECT[0]))
    return Crop((height - tall) // 2, (width - wide) // 2, max(1, tall), max(1, wide), flipped)
