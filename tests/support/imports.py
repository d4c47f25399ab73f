"""Which modules of embq import which: at their head, in functions, and by the name of a module in a string."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import embq

ROOT = Path(embq.__file__).parent
TABLES = frozenset({"embq.app.cli.verb_table", "embq.core.queue.other_work", "embq.core.queue.keys"})
"""The modules in which the core names those of satellites, and one with names of jobs, which nothing imports."""
MODULES = {
    ".".join(("embq", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}


@cache
def imported(module: str) -> frozenset[str]:
    """The modules of embq that a module imports, but for annotations, and those that its strings name."""
    tree = ast.parse(MODULES[module].read_text())
    names = {name for node in _executed(tree) for name in _names(node, strings=module not in TABLES)}
    return frozenset(found for name in names if (found := _module(name)))


def closure(modules: Iterable[str]) -> set[str]:
    """The modules that some modules reach, with the packages around them; `embq` itself, the face, reaches all."""
    reached: set[str] = set()
    waiting = [*modules]
    while waiting:
        module = waiting.pop()
        if module not in reached and module != "embq":
            reached.add(module)
            waiting += imported(module)
            waiting += [module.rpartition(".")[0]]
    return reached


def lines(modules: Iterable[str]) -> int:
    """Lines of modules together."""
    return sum(MODULES[module].read_text().count("\n") for module in modules)


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree without texts of their own, such as docstrings, and what is for type checkers."""
    yield node
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                for other in child.orelse:
                    yield from _executed(other)
            case ast.Expr(value=ast.Constant()):
                pass
            case _:
                yield from _executed(child)


def _names(node: ast.AST, *, strings: bool) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (name.name for name in names)
        case ast.ImportFrom(module=str(module), names=names):
            yield from (f"{module}.{name.name}" for name in names)
        case ast.Constant(value=str(text)) if strings and re.fullmatch(r"embq(\.\w+)+(:\w+)?", text):
            if text.partition(":")[0] in MODULES:
                yield text.partition(":")[0]


def _module(name: str) -> str:
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name
