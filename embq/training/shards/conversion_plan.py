"""The plan of a conversion: names of the shards, and which picture goes where."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from embq.core.errors import UsageError
from embq.training.shards.names import SPECIAL, contract
from embq.training.shards.pictures import Listing, Picture

EXAMPLE = "for example shards/train-%06d.tar; shards/train-{000000..}.tar means the same"

_NUMBER = re.compile(r"%0?(?P<width>[0-9]*)d|\{(?P<zeros>0+)\.\.\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Names of shards that differ in a number.

    Attributes:
        folder: where they are to be.
        prefix: what stands before the number.
        width: digits of the number, with leading zeros.
        suffix: what stands behind it; ends in .tar.
    """

    folder: Path
    prefix: str
    width: int
    suffix: str

    @staticmethod
    def parse(text: str) -> Pattern:
        """Parse a pattern such as `out/train-%06d.tar`; UsageError if it is none."""
        folder, name = os.path.split(text)
        numbers = list(_NUMBER.finditer(name))
        if "://" in text:
            raise UsageError(f"{text!r}: shards are written into a folder of this machine", next_step=EXAMPLE)
        if len(numbers) != 1:
            how_many = "no number" if not numbers else "more than one number"
            raise UsageError(
                f"{text!r}: there is {how_many} in the name that tells the shards apart", next_step=EXAMPLE
            )
        prefix, suffix = name[: numbers[0].start()], name[numbers[0].end() :]
        if not suffix.endswith(".tar"):
            raise UsageError(f"{text!r}: shards are plain tar files: the name must end in .tar", next_step=EXAMPLE)
        if bad := [text for text in (*SPECIAL, "%") if text in prefix + suffix]:
            raise UsageError(f"{text!r}: {bad[0]!r} in the name of a shard cannot be said in lists", next_step=EXAMPLE)
        if prefix.startswith("."):
            raise UsageError(f"{text!r}: a folder's hidden files are not taken for shards", next_step=EXAMPLE)
        width = len(numbers[0]["zeros"] or "") or int(numbers[0]["width"] or 1)
        return Pattern(folder=Path(folder or "."), prefix=prefix, width=width, suffix=suffix)

    def __str__(self) -> str:
        return str(self.folder / f"{self.prefix}%0{self.width}d{self.suffix}")

    @property
    def stem(self) -> str:
        """The name without number and suffix; "" for numbers alone."""
        return (self.prefix + self.suffix.removesuffix(".tar")).strip("-_. ")

    def name(self, number: int) -> str:
        """The name of a shard in its folder."""
        return f"{self.prefix}{number:0{self.width}d}{self.suffix}"

    def path(self, number: int) -> Path:
        """Path of a shard."""
        return self.folder / self.name(number)

    def expression(self, shards: int) -> str:
        """The expression for the first `shards` of them."""
        names = (str(self.path(number)) for number in range(shards))
        return "::".join(run.expression for run in contract(names))

    def existing(self) -> list[str]:
        """Names in the folder that match, in order."""
        fits = re.compile(re.escape(self.prefix) + f"[0-9]{{{self.width},}}" + re.escape(self.suffix))
        try:
            return sorted(name for name in os.listdir(self.folder) if fits.fullmatch(name))
        except FileNotFoundError:
            return []

    def require_room(self, shards: int) -> None:
        """UsageError if this many shards need more digits, so that their names would not sort."""
        if shards > 10**self.width:
            needed = len(str(shards - 1))
            raise UsageError(
                f"{self}: {shards:,} shards need numbers of {needed} digits",
                next_step=f"write %0{max(needed, 6)}d in place of %0{self.width}d",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Settings of a conversion.

    Attributes:
        pattern: where the shards are to be.
        samples_per_shard: of each but the last.
        seed: of the order; None keeps that of the listing.
        metadata: whether each sample gets a `json` that says which file it was.
    """

    pattern: Pattern
    samples_per_shard: int
    seed: int | None
    metadata: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The pictures of one shard, in order.

    Attributes:
        shard: its number.
        first: number of its first sample, from which its key is made.
    """

    shard: int
    first: int
    pictures: Sequence[Picture]

    @property
    def bytes(self) -> int:
        """Bytes of the pictures."""
        return sum(picture.size for picture in self.pictures)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan:
    """Pictures in the order of their samples, cut into shards of equal numbers.

    A shard is a fixed part of the order, so its bytes do not depend on the process that writes it.
    """

    layout: Layout
    listing: Listing
    order: Sequence[Picture]

    @staticmethod
    def make(listing: Listing, layout: Layout) -> ConversionPlan:
        """The plan for a listing; UsageError if the pattern has too few digits."""
        plan = ConversionPlan(layout=layout, listing=listing, order=_ordered(listing.pictures, layout.seed))
        layout.pattern.require_room(plan.shards)
        return plan

    @property
    def shards(self) -> int:
        """Number of shards."""
        return -(-len(self.order) // self.layout.samples_per_shard)

    @property
    def bytes(self) -> int:
        """Bytes of all pictures."""
        return sum(picture.size for picture in self.order)

    def slices(self) -> Iterator[ShardPlan]:
        """The shards in order."""
        size = self.layout.samples_per_shard
        for shard in range(self.shards):
            first = shard * size
            yield ShardPlan(shard=shard, first=first, pictures=self.order[first : first + size])

    def sizes(self) -> dict[str, int]:
        """Name of each shard -> its samples."""
        return {self.layout.pattern.name(shard.shard): len(shard.pictures) for shard in self.slices()}

    def digest(self) -> str:
        """Hash of everything that decides the bytes of the shards: settings, and sizes and times of the files."""
        layout = self.layout
        sha256 = hashlib.sha256(json.dumps([layout.samples_per_shard, layout.metadata, self.listing.classes]).encode())
        for shard in self.slices():
            sha256.update(json.dumps(shard.pictures).encode())
        return sha256.hexdigest()


def _ordered(pictures: Sequence[Picture], seed: int | None) -> Sequence[Picture]:
    """The pictures in their order, or shuffled by a seed in the same way by every version of Python.

    Of `random`, only the sequence of `random()` is promised to stay as it is, `shuffle` is not.
    """
    if seed is None:
        return pictures
    drawn = random.Random(seed)
    places = [drawn.random() for _ in pictures]
    return [pictures[at] for at in sorted(range(len(pictures)), key=places.__getitem__)]
