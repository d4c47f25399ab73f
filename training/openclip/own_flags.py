"""The flags of `python -m training.openclip` that open_clip does not have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFlags:
    """What embq's entry point does beside open_clip's training.

    Attributes:
        keys: folder for the keys of the samples that each rank was trained on; None for nowhere.
        unreadable: folder for what each rank could not read; None for nowhere.
        progress: a line of progress on the terminal, in place of open_clip's log, which its file has anyway.
    """

    keys: Path | None = None
    unreadable: Path | None = None
    progress: bool = False

    def render(self) -> list[str]:
        """The flags that say this."""
        keys = [] if self.keys is None else ["--keys", str(self.keys)]
        unreadable = [] if self.unreadable is None else ["--unreadable", str(self.unreadable)]
        return [*keys, *unreadable, *(["--progress"] if self.progress else [])]


def split_flags(arguments: Sequence[str]) -> tuple[OwnFlags, list[str]]:
    """(our flags, those of open_clip in their order)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--unreadable", type=Path)
    parser.add_argument("--progress", action="store_true")
    own, others = parser.parse_known_args(list(arguments))
    return OwnFlags(keys=own.keys, unreadable=own.unreadable, progress=own.progress), others
