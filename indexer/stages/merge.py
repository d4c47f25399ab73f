"""Some of the lists of all blocks, put together: one slice of them is in memory, whatever the size of the rest."""

from __future__ import annotations

from indexer.building import BuildSpec
from indexer.lists import append, empty_lists, read_lists, write_lists
from indexer.task import Made, Task
from indexer.template import Template


def merge(task: Task) -> Made:
    """The lists of one slice, rows in the order of their blocks."""
    spec = BuildSpec.from_description(task.spec)
    template = Template.read(task.file("train", 0, "trained"))
    first, last = slice_bounds(template.nlist, spec.plan.slices, task.unit.number)
    merged = empty_lists(last - first, template.code_size)
    rows = 0
    for number in range(len(spec.blocks)):
        source = read_lists(task.file("add", number, "lists"), mapped=True)
        rows += append(merged, source, first=first, last=last)
    path = task.temporary("lists")
    write_lists(merged, path)
    return Made(kept={"lists": path}, stats={"first_list": first, "last_list": last, "rows": rows})


def slice_bounds(nlist: int, slices: int, number: int) -> tuple[int, int]:
    """The lists of one slice: from the first to before the last."""
    return nlist * number // slices, nlist * (number + 1) // slices
