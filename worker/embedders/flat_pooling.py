"""Vectors of texts from the states of their tokens, where texts lie one after the other.

The formulas are those of sentence-transformers 6.2 for padded texts, `Pooling.forward`. Its own for flat ones add with
atomics, in an order that changes from run to run; here each sum is one loop over the tokens of a text, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worker.embedders.flat import FlatTexts

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def pooled(states: torch.Tensor, texts: FlatTexts, modes: Sequence[str], *, skipped: int = 0) -> torch.Tensor:
    """One vector per text: shape (texts, dim x modes), in the type of `states`, which have shape (tokens, dim).

    Args:
        modes: names of `MODES`; their vectors are put one after the other.
        skipped: so many tokens at the beginning of each text, those of a prompt, are left out.
    """
    tokens = PooledTokens(states, texts, skipped)
    of_mode: dict[str, Callable[[], torch.Tensor]] = {
        "cls": tokens.first,
        "max": tokens.greatest,
        "mean": lambda: tokens.weighted(tokens.kept, 1.0),
        "mean_sqrt_len_tokens": lambda: tokens.weighted(tokens.kept, 0.5),
        "weightedmean": lambda: tokens.weighted(tokens.kept * (tokens.places + 1), 1.0),
        "lasttoken": tokens.last,
    }
    return torch.cat([of_mode[mode]() for mode in modes], dim=-1).to(states.dtype)


class PooledTokens:
    """The tokens of a flat batch, each with its place and whether it counts.

    Attributes:
        places: of each token in its text, from 0; shape (tokens,).
        kept: 1.0 where a token counts, 0.0 where it is skipped; shape (tokens,).
    """

    def __init__(self, states: torch.Tensor, texts: FlatTexts, skipped: int) -> None:
        self._states = states.float()
        self._starts = texts.starts.long()
        self._skipped = skipped
        self.places = texts.places()
        self.kept = (self.places >= skipped).float()

    def first(self) -> torch.Tensor:
        """The first token that counts; the very first one where none does."""
        lengths = self._starts.diff()
        return self._states[self._starts[:-1] + torch.where(lengths > self._skipped, self._skipped, 0)]

    def last(self) -> torch.Tensor:
        """The last token; zeros where it does not count."""
        at = self._starts[1:] - 1
        return self._states[at] * self.kept[at, None]

    def greatest(self) -> torch.Tensor:
        """The greatest value of each dimension."""
        return self._reduced(self._states.masked_fill(self.kept[:, None] == 0, -torch.inf), "max")

    def weighted(self, weights: torch.Tensor, power: float) -> torch.Tensor:
        """The sum over tokens with weights, divided by a power of the sum of the weights."""
        total = self._reduced(weights[:, None], "sum").clamp(min=1e-9)
        return self._reduced(self._states * weights[:, None], "sum") / total**power

    def _reduced(self, values: torch.Tensor, how: str) -> torch.Tensor:
        # Unsafe means unchecked: checking the offsets would wait for the device.
        return torch.segment_reduce(values, how, offsets=self._starts, axis=0, unsafe=True)
