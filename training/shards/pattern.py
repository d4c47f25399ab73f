"""The pattern by which shards are named, such as `out/train-%06d.tar`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from core.errors import UsageError
from training.shards.sums import SPECIAL, contract

EXAMPLE = "for example shards/train-%06d.tar; shards/train-{000000..}.tar means the same"

_NUMBER = re.compile(r"%0?(?P<width>[0-9]*)d|\{(?P<zeros>0+)\.\.\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Names of shards that differ in one number.

    Attributes:
        folder: where they are to be.
        before: what stands before the number.
        width: digits of the number, with leading zeros.
        after: what stands behind it; ends in .tar.
    """

    folder: Path
    before: str
    width: int
    after: str

    @staticmethod
    def parse(text: str) -> Pattern:
        """The pattern that a user wrote; UsageError where it is none."""
        folder, name = os.path.split(text)
        found = list(_NUMBER.finditer(name))
        if "://" in text:
            raise UsageError(f"{text!r}: shards are written into a folder of this machine", next_step=EXAMPLE)
        if len(found) != 1:
            how_many = "no number" if not found else "more than one number"
            raise UsageError(
                f"{text!r}: there is {how_many} in the name that tells the shards apart", next_step=EXAMPLE
            )
        before, after = name[: found[0].start()], name[found[0].end() :]
        if not after.endswith(".tar"):
            raise UsageError(f"{text!r}: shards are plain tar files: the name must end in .tar", next_step=EXAMPLE)
        if said := [text for text in (*SPECIAL, "%") if text in before + after]:
            raise UsageError(f"{text!r}: {said[0]!r} in the name of a shard cannot be said in lists", next_step=EXAMPLE)
        if before.startswith("."):
            raise UsageError(f"{text!r}: a folder's hidden files are not taken for shards", next_step=EXAMPLE)
        width = len(found[0]["zeros"] or "") or int(found[0]["width"] or 1)
        return Pattern(folder=Path(folder or "."), before=before, width=width, after=after)

    def __str__(self) -> str:
        return str(self.folder / f"{self.before}%0{self.width}d{self.after}")

    @property
    def stem(self) -> str:
        """A name for what belongs to these shards; "" where they have no other name than their numbers."""
        return (self.before + self.after.removesuffix(".tar")).strip("-_. ")

    def name(self, number: int) -> str:
        """The name of a shard in its folder."""
        return f"{self.before}{number:0{self.width}d}{self.after}"

    def path(self, number: int) -> Path:
        """Where a shard is to be."""
        return self.folder / self.name(number)

    def expression(self, shards: int) -> str:
        """What stands for the first so many shards."""
        names = (str(self.path(number)) for number in range(shards))
        return "::".join(run.expression for run in contract(names))

    def there(self) -> list[str]:
        """The names in the folder that fit, whoever made them, in order."""
        fits = re.compile(re.escape(self.before) + f"[0-9]{{{self.width},}}" + re.escape(self.after))
        try:
            return sorted(name for name in os.listdir(self.folder) if fits.fullmatch(name))
        except FileNotFoundError:
            return []

    def require_room(self, shards: int) -> None:
        """UsageError where the numbers of so many shards are longer than its zeros, so that they would not sort."""
        if shards > 10**self.width:
            needed = len(str(shards - 1))
            raise UsageError(
                f"{self}: {shards:,} shards need numbers of {needed} digits",
                next_step=f"write %0{max(needed, 6)}d in place of %0{self.width}d",
            )
