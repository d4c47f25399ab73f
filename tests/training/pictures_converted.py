"""Folders of small photographs, their conversion into shards, and `embq shards` at work on them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embq.training.shards.conversion import Converted
from embq.training.shards.conversion import convert as carry_out
from embq.training.shards.conversion_plan import ConversionPlan, Layout, Pattern
from embq.training.shards.listing import class_folders
from embq.training.shards.pictures import Listing
from tests.support.archives import members_of
from tests.support.picture_files import encoded, photograph


def class_tree(root: Path, count: int = 90, classes: tuple[str, ...] = ("cat", "dog", "owl")) -> Path:
    """Different photographs, taking turns among the folders of classes."""
    for number in range(count):
        folder = root / classes[number % len(classes)]
        folder.mkdir(parents=True, exist_ok=True)
        picture = photograph(size=(48 + number % 50, 40 + number // 50))
        (folder / f"p{number:03d}.JPEG").write_bytes(encoded(picture, "JPEG"))
    return root


def classed(root: Path, known: Sequence[str] | None = None) -> Listing:
    """The pictures of a tree, none of whose classes may be empty."""
    return class_folders(str(root), vocab=known, allow_empty=False)


def plan_of(
    listing: Listing, out: Path, *, per_shard: int = 20, seed: int | None = 0, metadata: bool = True
) -> ConversionPlan:
    """The plan of a conversion into `out`."""
    pattern = Pattern.parse(f"{out}/train-%06d.tar")
    return ConversionPlan.make(
        listing, Layout(pattern=pattern, samples_per_shard=per_shard, seed=seed, metadata=metadata)
    )


def convert(plan: ConversionPlan, processes: int = 1) -> Converted:
    """Carry out a plan."""
    return carry_out(plan, "pictures", processes=processes)


def shards(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`embq shards` in a process of its own."""
    command = [sys.executable, "-m", "embq", "shards", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def samples_of(folder: Path, name: str = "*.tar") -> dict[str, dict[str, bytes]]:
    """Key -> extension -> content, of all shards of this name, in their order."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(folder.glob(name)):
        for name, content in members_of(path):
            key, _, extension = name.partition(".")
            assert extension not in found.setdefault(key, {}), f"{name} is there twice"
            found[key][extension] = content
    return found


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The object that `--json` printed."""
    found: dict[str, Any] = json.loads(done.stdout)
    return found
