"""Counts samples that open_clip silently leaves out: without a caption, or with an image of another kind."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from embq.core.storage.paths import is_url
from embq.sources.access.files import source_errors
from embq.sources.formats.compressed import beginning
from embq.sources.formats.tar import LOOKED_AT_BYTES, SUFFIX, TarSource, split_name
from embq.sources.formats.tar_headers import Member, parse_first_members, parse_members
from embq.sources.reader_options import ReadOptions

IMAGES = frozenset({"png", "jpg", "jpeg", "webp"})
CAPTION = "txt"
"""Extensions by which `filter_no_caption_or_no_image` of open_clip_train/data.py chooses samples."""


@dataclass(slots=True, kw_only=True)
class UsableSamples:
    """Counts of samples in shards.

    Attributes:
        samples: all of them.
        used: those with a caption and an image that open_clip takes.
        without_caption: samples of which no member ends in `.txt`.
        extensions: what samples without such an image have instead.
    """

    samples: int = 0
    used: int = 0
    without_caption: int = 0
    extensions: Counter[str] = field(default_factory=Counter)

    @property
    def left_out(self) -> int:
        """Samples that are not trained on."""
        return self.samples - self.used

    def sentence(self) -> str:
        """Reasons for samples that are left out, as a sentence."""
        reasons = [f"{self.without_caption:,} without a caption (.{CAPTION})"] if self.without_caption else []
        if self.extensions:
            kinds = ", ".join(f".{kind}" for kind, _ in self.extensions.most_common(5))
            reasons.append(f"{self.extensions.total():,} without a .jpg, .jpeg, .png or .webp (they have {kinds})")
        return f"{self.left_out:,} of {self.samples:,} samples are left out by open_clip: {' and '.join(reasons)}"

    def scan(self, members: Iterable[Member]) -> None:
        """Count the samples of members: neighbours with one key, as open_clip groups them."""
        key, extensions = "", set[str]()
        for member in members:
            own, extension = split_name(member.name)
            if not own:
                continue
            if own != key or extension in extensions:
                self._count(extensions)
                key, extensions = own, set()
            extensions.add(extension)
        self._count(extensions)

    def _count(self, extensions: set[str]) -> None:
        if not extensions:
            return
        self.samples += 1
        has_image = not IMAGES.isdisjoint(extensions)
        self.used += has_image and CAPTION in extensions
        self.without_caption += CAPTION not in extensions
        if not has_image:
            self.extensions[min(extensions - {CAPTION, "json", "cls"}, default="none")] += 1


def count_usable(urls: Iterable[str]) -> UsableSamples:
    """Count samples: all of a plain local shard, those at the beginning of any other.

    Raises SourceError if one is damaged or cannot be read.
    """
    looked = UsableSamples()
    for url in urls:
        looked.scan(_members(url))
    return looked


def _members(url: str) -> list[Member]:
    if is_url(url) or not url.endswith(SUFFIX):
        (unit,) = TarSource().split(url, ReadOptions())
        first = beginning(unit, LOOKED_AT_BYTES)
        members = parse_first_members(first)
        if len(first) < LOOKED_AT_BYTES or not members:
            return members
        cut = split_name(members[-1].name)[0]  # of which more may follow
        return [member for member in members if split_name(member.name)[0] != cut]
    with source_errors(url), open(url, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return parse_members(data, url)
