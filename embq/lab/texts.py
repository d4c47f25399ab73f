"""Texts for the experiments: a user's file, or docstrings of the standard library."""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

from embq.core.errors import InputError
from embq.producer.plan import plan
from embq.sources.reader_options import ReadOptions
from embq.sources.unit_reader import read

LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "__pycache__"})
"""Folders that are skipped: those without prose, and installed packages."""

Texts = Iterator[tuple[str, str]]
"""Names of definitions, and their docstrings."""


def docstrings(limit: int, *, installed: bool = False) -> list[tuple[str, str]]:
    """Up to `limit` docstrings of the standard library, as ("json.dumps", text), ordered by file and line.

    The source is parsed, never imported. With `installed`, the docstrings of installed packages follow, which gives
    far more texts, but different ones on each machine. Keys are unique: the first definition of a name counts.
    """
    folders = [Path(sysconfig.get_path("stdlib"))]
    if installed:
        folders.append(Path(sysconfig.get_path("purelib")))
    texts: dict[str, str] = {}
    for folder in folders:
        for file in _python_files(folder, folder):
            for key, text in _docstrings_of(file, _module_name(file.relative_to(folder))):
                texts.setdefault(key, text)
                if len(texts) == limit:
                    return list(texts.items())
    return list(texts.items())


def _python_files(folder: Path, root: Path) -> Iterator[Path]:
    left_out = LEFT_OUT if folder == root else frozenset({"test", "tests", "__pycache__"})
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            if entry.name not in left_out and entry.name.isidentifier():
                yield from _python_files(entry, root)
        elif entry.suffix == ".py":
            yield entry


def _module_name(file: Path) -> str:
    parts = list(file.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _docstrings_of(file: Path, module: str) -> Texts:
    with warnings.catch_warnings():
        # Old escape sequences in other people's strings.
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            return
    yield from _docstrings_below(tree, module)


def _docstrings_below(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Texts:
    text = ast.get_docstring(node)
    # Neither blank, nor impossible to write as a line of UTF-8.
    if text and text.strip() and "\0" not in text and text == text.encode(errors="ignore").decode():
        yield name, text
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _docstrings_below(child, f"{name}.{child.name}")


BUILT_IN = 2_000
"""Number of docstrings; 60 tokens on average, some of them long."""
MOST = 100_000
"""Most texts of a user's file; held in memory."""


def texts_for(file: str, *, seed: int) -> list[str]:
    """The texts of a file, or docstrings if `file` is "", shuffled by `seed`.

    Raises InputError if the file cannot be read or holds no text.
    """
    texts = list(islice(_read(file), MOST) if file else _built_in())
    if not texts:
        raise InputError(f"{file} holds no text", next_step="name a file of texts with --texts", code="empty_input")
    random.Random(seed).shuffle(texts)
    return texts


@cache
def _built_in() -> tuple[str, ...]:
    return tuple(text for _, text in docstrings(BUILT_IN))


def _read(file: str) -> Iterator[str]:
    for unit in plan((file,), ReadOptions(), ("text",)).units:
        for sample in read(unit, ()):
            if sample.text and sample.error is None:
                yield sample.text
