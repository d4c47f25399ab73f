"""How decoded images are resized."""

from __future__ import annotations

import numpy as np
import pytest

from worker.embedders.image.pixels import _resized
from worker.embedders.image.preprocess import Fit


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("size", "wanted", "scale"),
    [
        ((256, 256), (224, 224), 1),
        ((384, 512), (224, 298), 1),
        ((640, 300), (224, 224), 1),
        ((500, 700), (224, 300), 2),
    ],
)
def test_resized_pixels_lie_side_by_side_so_that_a_row_is_copied_and_not_laid_out_again(
    size: tuple[int, int], wanted: tuple[int, int], scale: int, channels: int
) -> None:
    whole = (size[0] * scale, size[1] * scale)
    fit = Fit(height=wanted[0], width=wanted[1], mode="squash", interpolation="bicubic")
    made = _resized(np.zeros((*size, channels), np.uint8), scale, whole, fit)
    assert made.shape == (*wanted, channels)
    assert made.flags.c_contiguous
