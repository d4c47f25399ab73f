"""Where outputs may lie. Which folder a run is written to is said over the network, by whoever may hand runs over."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from core.errors import ConfigError, EmbqError, InputError
from core.storage.objects import ObjectPath
from core.storage.paths import is_url, place


@dataclass(frozen=True, slots=True)
class Outputs:
    """The folders and URLs that outputs may lie in or below.

    Attributes:
        roots: as EMBQ_OUTPUTS has them; empty allows all.
    """

    roots: Sequence[str] = ()

    def __post_init__(self) -> None:
        for root in self.roots:
            try:
                place(root)
            except EmbqError as error:
                raise ConfigError(
                    f"EMBQ_OUTPUTS names {root}, where no output can lie: {error.message}", next_step=error.next_step
                ) from error

    def check(self, output: str) -> None:
        """InputError where an output is elsewhere. Links are followed, so none leads out of the roots."""
        if self.roots and not any(_is_inside(output, root) for root in self.roots):
            raise InputError(
                f"{output} is outside of where outputs may lie here ({', '.join(self.roots)})",
                next_step="choose another --output, or have its folder added to EMBQ_OUTPUTS of producer and writer",
                code="outside_outputs",
            )


ANYWHERE = Outputs()


def _is_inside(output: str, root: str) -> bool:
    if is_url(output) or is_url(root):
        try:
            there, above = place(output), place(root)
        except EmbqError:
            return False
        both = isinstance(there, ObjectPath) and isinstance(above, ObjectPath)
        return both and f"{there}/".startswith(f"{above}/")
    try:
        real, above_real = os.path.realpath(output), os.path.realpath(root)
    except (OSError, ValueError):  # a zero byte, or a loop of links
        return False
    return os.path.commonpath([real, above_real]) == above_real
