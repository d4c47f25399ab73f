"""One slice of the lists of all groups of a version, without what is deleted. No more than that is held in memory."""

from __future__ import annotations

from indexer.compaction import append_kept
from indexer.deletes import deleted_bits
from indexer.lists import empty_lists, read_lists, write_lists
from indexer.task import Made, Task
from indexer.version import read_version


def compact(task: Task) -> Made:
    """The lists of one slice: rows in the order of the groups, as searching them one upon the other sees them."""
    base = read_version(task.index, task.spec["base"])
    first, last = task.spec["bounds"][task.unit.number]
    bits = deleted_bits(base)
    merged, rows = None, 0
    for group in base.groups:
        for one in group:
            start, stop = max(first, one.first), min(last, one.last)
            if start < stop:
                source = read_lists(one.file.check(task.index), mapped=True)
                merged = merged or empty_lists(last - first, source.code_size)
                rows += append_kept(
                    merged, source, first=start - one.first, offset=start - first, count=stop - start, bits=bits
                )
    path = task.temporary("lists")
    write_lists(merged, path)
    return Made(kept={"lists": path}, stats={"first_list": first, "last_list": last, "rows": rows})
