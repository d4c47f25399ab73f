"""Sizes of a version: its files, rows and lists."""

from __future__ import annotations

from typing import Any

import numpy as np

from embq.index.index_files.lists import read_lists
from embq.index.index_files.version import Version


def sizes_of(version: Version) -> dict[str, Any]:
    """Sizes of a version for infos.json; names with spaces are autofaiss's."""
    index_bytes = version.trained.bytes + sum(file.bytes for group in version.groups for file in group)
    rows_bytes = sum(file.bytes for file in version.rows)
    identity_bytes = sum(file.bytes for file in version.identity)
    n = max(1, version.n)
    return {
        "size in bytes": index_bytes,
        "nb vectors": version.n,
        "compression ratio": 4.0 * version.n * version.plan.dim / max(1, index_bytes),
        "bytes": {"index": index_bytes, "rows": rows_bytes, "identity": identity_bytes},
        "bytes_per_vector": {"ram": index_bytes / n, "disk": (index_bytes + rows_bytes + identity_bytes) / n},
        "rows": {"ids": version.next_id, "excluded": version.excluded, "deleted": version.deleted},
        "excluded": version.excluded,
    }


def imbalance(version: Version) -> float:
    """Imbalance factor: work of a search relative to lists of equal length, for which it is 1."""
    sizes = list_sizes(version)
    return imbalance_of(len(sizes), float(np.square(sizes).sum()), int(sizes.sum()))


def imbalance_of(lists: int, squares: float, rows: int) -> float:
    """The same of a number of lists, the sum of the squares of their sizes, and all of their rows."""
    return lists * squares / max(1, rows) ** 2


def list_sizes(version: Version) -> np.ndarray:
    """Rows in each list, all groups together: float64 (nlist,)."""
    total = np.zeros(max(file.last for group in version.groups for file in group))
    for group in version.groups:
        for file in group:
            lists = read_lists(file.check(version.index), mapped=True)
            total[file.first : file.last] += [lists.list_size(at) for at in range(file.last - file.first)]
    return total
