"""The border: what one has to understand to change a run, and what satellites use of the core."""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

import embq
from embq.app.cli.verb_table import BENCH_VERBS, UNLISTED, VERBS
from embq.core.queue.other_work import KINDS
from tests.support.imports import MODULES, closure, imported, lines

SATELLITES = ("fleet", "index", "lab", "retrieval", "training")
USED = Path(__file__).parents[1] / "satellites.txt"
"""Modules of the core that a satellite imports, a line each: satellite, module. A new line is a wider border."""

RUN_LINES = 50_800
"""Lines that the verbs of runs and the services reach at most. It may shrink; it grows with a reason only."""
RUN_VERBS = ("run", "enqueue", "pause", "resume", "cancel", "retry", "status", "logs", "failures")
SERVICES = ("producer", "worker", "writer", "health")


def satellite_of(module: str) -> str:
    """The satellite of a module; "" for one of the core."""
    name = module.split(".")[1] if "." in module else ""
    return name if name in SATELLITES else ""


def test_the_verbs_of_runs_reach_no_satellite_and_few_lines() -> None:
    starts = {VERBS[verb][0].partition(":")[0] for verb in (*RUN_VERBS, *SERVICES)}
    reached = closure([*starts, "embq.__main__"])
    assert {module for module in reached if satellite_of(module)} == set()
    assert RUN_LINES - 500 < lines(reached) <= RUN_LINES


def test_what_satellites_import_of_the_core_is_listed() -> None:
    found = {
        f"{satellite} {module}"
        for source in MODULES
        if (satellite := satellite_of(source))
        for module in imported(source)
        if not satellite_of(module) and module != "embq"
    }
    assert sorted(found) == USED.read_text().splitlines()
    counts = Counter(line.partition(" ")[0] for line in found)
    assert counts.keys() == {*SATELLITES}


@pytest.mark.parametrize("where", [*(where for where, _ in (VERBS | BENCH_VERBS).values()), *UNLISTED.values()])
def test_each_entry_of_the_table_of_verbs_is_a_command(where: str) -> None:
    module, _, name = where.partition(":")
    assert module in MODULES
    assert callable(getattr(import_module(module), name or "command"))


def test_each_kind_of_work_is_a_module_with_the_functions_of_a_kind() -> None:
    for module in KINDS.values():
        kind = import_module(module)
        assert all(callable(getattr(kind, name)) for name in ("announced", "forget_abandoned", "access", "serve"))


def test_no_public_name_is_a_package() -> None:
    packages = {path.parent.name for path in Path(embq.__file__).parent.glob("*/__init__.py")}
    assert packages.isdisjoint(dir(embq))
