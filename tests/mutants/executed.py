"""Which tests execute a line, also in the processes that they start.

The plugin names the running test in what coverage hands down to processes; `Executed` reads the data of such a run.
A process that a test kills leaves no data, so a test may execute more lines than are known here.
"""

from __future__ import annotations

import ast
import base64
import json
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from coverage import CoverageData

VARIABLE = "COVERAGE_PROCESS_CONFIG"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Name the test in the configuration of the processes that it starts."""
    if text := os.environ.get(VARIABLE):
        config = {**json.loads(base64.b64decode(text)), "context": f"{item.nodeid}|process"}
        os.environ[VARIABLE] = base64.b64encode(json.dumps(config).encode()).decode()


class Executed:
    """The tests that executed each line of the modules below a folder; none of any line without a file of data."""

    def __init__(self, root: Path, file: Path | None) -> None:
        self._root = root
        self._data = CoverageData(str(file)) if file else CoverageData(no_disk=True)
        self._data.read()
        self._files = {name.rpartition("/embq/")[2]: name for name in self._data.measured_files()}
        self._contexts = lru_cache(maxsize=64)(self._data.contexts_by_lineno)

    def tests(self, module: str, line: int) -> set[str]:
        """Node ids of the tests that executed the statement on a line of a module, `embq/core/units.py`."""
        contexts = self._contexts(self._files.get(module.removeprefix("embq/"), ""))
        path = self._root / module
        lines = _statement(ast.parse(path.read_text()), line) if path.exists() else ()
        return {name.partition("|")[0] for it in lines for name in contexts.get(it, ()) if name}


def _statement(tree: ast.AST, line: int) -> Iterator[int]:
    """Lines of the innermost statement on a line, from its first one."""
    nodes = [it for it in ast.walk(tree) if isinstance(it, ast.stmt | ast.ExceptHandler)]
    around = [it.lineno for it in nodes if it.lineno <= line <= (it.end_lineno or it.lineno)]
    yield from range(max(around, default=line), line + 1)
