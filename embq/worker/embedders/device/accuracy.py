"""Accuracy check of a faster variant: its vectors must be as near to fp32 as those of the usual one.

Two variants in half precision round differently, and neither is right: with all-MiniLM-L6-v2 in bf16 their vectors
differ by as much as each differs from fp32. So each is compared with fp32 of the same weights and inputs. The error of
a vector is 1 - cosine with its fp32 vector.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cosine_similarity

PROBES = 32
"""Samples that are compared."""

RATIO = 1.5
"""A way is refused where its errors are greater than those of the usual way by more than half: by the geometric mean of
their ratios, sample by sample. The error of one sample is chance, and a few great ones decide an arithmetic mean. Of 32
random BERTs in bf16 (6 and 12 layers, width 32 and 128) the geometric mean for texts without padding, of 32 texts, was
0.70 to 1.32, the ratio of arithmetic means 0.35 to 1.54, of medians 0.68 to 1.60, of greatest errors 0.09 to 4.8."""

WORST_RATIO = 10.0
"""The same of the greatest errors. A fault in few samples, such as the last or the longest, hardly moves the mean."""

LEAST_ERROR = 1e-8
"""An error below this counts as this. Sums in another order in fp32 give 1e-12, TF32 gives 5e-7, and storing vectors as
float16 gives 4e-8. So it is the bar in fp32, where the usual way has no error, and where there is no room for weights
in fp32: there a way has to give the vectors of the usual one."""


def places(rows: int) -> torch.Tensor:
    """Rows of a batch that are compared: the first, the last, and others between them."""
    return torch.linspace(0, rows - 1, min(rows, PROBES)).long()


class AccuracyCheck:
    """Reference vectors for the check of a variant.

    Args:
        usual: vectors of the usual way, of shape (rows, dim).
        exact: those of the same rows in fp32. Rows of which the usual way gives no finite vector are left out.
    """

    def __init__(self, usual: torch.Tensor, exact: torch.Tensor) -> None:
        self._exact = exact
        errors = _errors(usual, exact)
        self._kept = errors.isfinite()
        self._usual = errors[self._kept]

    def ratio(self, vectors: torch.Tensor) -> float:
        """Error of a variant with these vectors, as a multiple of the usual variant's error, see `RATIO`."""
        return float((self._kept_errors(vectors) / self._usual).log().mean().exp())

    def refusal(self, vectors: torch.Tensor) -> str:
        """Why a way with these vectors is refused; "" where it is not."""
        if not len(self._usual):
            return "the usual way gives no finite vector"
        ratio, worst = self.ratio(vectors), float(self._kept_errors(vectors).max() / self._usual.max())
        if ratio <= RATIO and worst <= WORST_RATIO:
            return ""
        return f"its error is {ratio:.2g} times that of the usual way, and {worst:.2g} times in the worst sample"

    def _kept_errors(self, vectors: torch.Tensor) -> torch.Tensor:
        return _errors(vectors, self._exact)[self._kept]


def _errors(vectors: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """1 - cosine of each row, infinite where that is no number; float64 on the CPU."""
    cosines = cosine_similarity(vectors.double(), exact.to(vectors.device).double())
    return torch.where(cosines.isfinite(), 1 - cosines, torch.inf).clamp(min=LEAST_ERROR).cpu()
