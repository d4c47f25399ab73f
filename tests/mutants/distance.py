"""How many imports lie between a module of embq and each file of tests."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

MODULE = re.compile(r"(?:embq|tests|bench)(?:\.\w+)+")


class Imports:
    """The graph of imports of a tree, by names of modules.

    A name in a string counts as an import: it is what a test replaces, a command that is found when it is called, or
    the program of a process.
    """

    def __init__(self, root: Path) -> None:
        files = {
            ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
            for folder in ("embq", "tests", "bench")
            for path in (root / folder).rglob("*.py")
        }
        self.path_of = files
        self.importers: dict[str, set[str]] = defaultdict(set)
        self.imports_of: dict[str, set[str]] = {}
        for module, path in files.items():
            names = {_known(name, files) for name in _names(ast.parse(path.read_bytes()))} - {"", module}
            self.imports_of[module] = names
            for name in names:
                self.importers[name].add(module)

    def distances(self, path: Path) -> dict[Path, tuple[int, int]]:
        """Of each file from which a module is reached: the imports on the way, and those of the file altogether."""
        near = {module for module, file in self.path_of.items() if file == path}
        reached: dict[Path, tuple[int, int]] = {}
        number = 0
        while near:
            reached |= {self.path_of[module]: (number, len(self.imports_of[module])) for module in near}
            further = {importer for module in near for importer in self.importers[module]}
            near = {module for module in further if self.path_of[module] not in reached}
            number += 1
        return reached


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{name.name}" for name in names)
            case ast.Constant(value=str(text)):
                yield from MODULE.findall(text)


def _known(name: str, files: dict[str, Path]) -> str:
    """The longest part of a dotted name that is a module; empty if it is of another tree."""
    while name and name not in files:
        name = name.rpartition(".")[0]
    return name
