"""Which files of tests are about a place in the code.

Those that import its module come first. Most code is reached through commands and processes instead, where the number
of imports on the way says nothing, but the words of the code do: names, codes and texts that few files of tests have.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

WORD = re.compile(r"[^\W\d]\w{3,}")
NEAR_LINES = 15
"""Lines above and below a place whose words count as well as those of the module, which count once."""
NEAR_WEIGHT = 3


class Nearness:
    """Orders the files of tests of a tree."""

    def __init__(self, root: Path) -> None:
        sources = {path: path.read_text() for path in sorted((root / "tests").rglob("test_*.py"))}
        self._root = root
        self._words = {path: _words(f"{text} {path.stem.replace('_', ' ')}") for path, text in sources.items()}
        self._names = {path: {*_names(ast.parse(text))} for path, text in sources.items()}
        self._files_with = Counter(word for words in self._words.values() for word in words)

    def nearest(self, module: str, line: int) -> list[Path]:
        """All files, the nearest to a line of a module first."""
        text = (self._root / module).read_text()
        near = _words("\n".join(text.splitlines()[max(0, line - NEAR_LINES) : line + NEAR_LINES]))
        words = _words(f"{text} {Path(module).stem}")
        dotted = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

        def place(path: Path) -> tuple[bool, float]:
            is_imported = any(f"{name}.".startswith(f"{dotted}.") for name in self._names[path])
            shared = [(1 + NEAR_WEIGHT * (it in near)) / self._files_with[it] for it in words & self._words[path]]
            return not is_imported, -sum(shared)

        return sorted(self._words, key=place)


def _words(text: str) -> set[str]:
    return set(WORD.findall(text))


def _names(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a file imports or has in strings, as what it replaces or the program of a process."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{name.name}" for name in names)
            case ast.Constant(value=str(text)) if "embq." in text:
                yield from re.findall(r"embq(?:\.\w+)+", text)
