"""A conversion before its first byte: which picture goes where, decided by the pictures and the options alone."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from training.shards.pattern import Pattern
from training.shards.pictures import Listing, Picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How pictures become shards.

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
class Slice:
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
        """Of the pictures."""
        return sum(picture.size for picture in self.pictures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Pictures in the order of their samples, cut into shards of the same number of them.

    A shard is a fixed slice, so its bytes do not depend on who writes it, or when.
    """

    layout: Layout
    listing: Listing
    order: Sequence[Picture]

    @staticmethod
    def make(listing: Listing, layout: Layout) -> Plan:
        """The plan for a listing; UsageError where the pattern has no room for its shards."""
        plan = Plan(layout=layout, listing=listing, order=_ordered(listing.pictures, layout.seed))
        layout.pattern.require_room(plan.shards)
        return plan

    @property
    def shards(self) -> int:
        """How many."""
        return -(-len(self.order) // self.layout.samples_per_shard)

    @property
    def bytes(self) -> int:
        """Of all pictures."""
        return sum(picture.size for picture in self.order)

    def slices(self) -> Iterator[Slice]:
        """The shards in order."""
        size = self.layout.samples_per_shard
        for shard in range(self.shards):
            first = shard * size
            yield Slice(shard=shard, first=first, pictures=self.order[first : first + size])

    def sizes(self) -> dict[str, int]:
        """Name of each shard -> its samples."""
        return {self.layout.pattern.name(one.shard): len(one.pictures) for one in self.slices()}

    def digest(self) -> str:
        """Of all that decides the bytes, as far as it can be seen from outside the files: sizes and times."""
        layout = self.layout
        seen = hashlib.sha256(json.dumps([layout.samples_per_shard, layout.metadata, self.listing.classes]).encode())
        for one in self.slices():
            seen.update(json.dumps(one.pictures).encode())
        return seen.hexdigest()


def _ordered(pictures: Sequence[Picture], seed: int | None) -> Sequence[Picture]:
    """The pictures in their order, or in one drawn from a seed, the same with every version of Python.

    Of `random`, only the sequence of `random()` is promised to stay as it is, `shuffle` is not.
    """
    if seed is None:
        return pictures
    drawn = random.Random(seed)
    places = [drawn.random() for _ in pictures]
    return [pictures[at] for at in sorted(range(len(pictures)), key=places.__getitem__)]
