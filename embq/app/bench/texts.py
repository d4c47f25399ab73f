"""Texts for the experiments: a user's file, or docstrings of the standard library."""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path

from embq.core.errors import InputError
from embq.producer.plan import plan
from embq.sources.reader_options import ReadOptions
from embq.sources.unit_reader import read

LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "__pycache__"})
"""Folders that are skipped: those without prose, and installed packages."""


def docstrings(limit: int, *, installed: bool = False) -> list[tuple[str, str]]:
    """Up to `limit` docstrings of the standard library, as ("json.dumps", text), ordered by file and line.

    The source is parsed, never imported. With `installed`, the docstrings of installed packages follow, which gives
    far more texts, but different ones on each machine. Keys are unique: the first definition of a name counts.
    """
    folders = [Path(sysconfig.get_path("stdlib"))]
    if installed:
        folders.append(Path(sysconfig.get_path("purelib")))
    found: dict[str, str] = {}
    for folder in folders:
        for file in _python_files(folder, folder):
            for key, text in _docstrings_of(file, _module_name(file.relative_to(folder))):
                found.setdefault(key, text)
                if len(found) == limit:
                    return list(found.items())
    return list(found.items())


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


def _docstrings_of(file: Path, module: str) -> Iterator[tuple[str, str]]:
    with warnings.catch_warnings():
        # Old escape sequences in other people's strings.
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            return
    stack: list[tuple[str, ast.AST]] = [(module, tree)]
    while stack:
        name, node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and _is_clean(text):
                yield name, text
        if isinstance(node, ast.Module | ast.ClassDef):
            inner = [
                (f"{name}.{child.name}", child)
                for child in node.body
                if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            stack.extend(reversed(inner))


def _is_clean(text: str) -> bool:
    """True if a text is not blank and can be written as a line of UTF-8."""
    if not text.strip() or "\0" in text:
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


BUILT_IN = 2_000
"""Number of docstrings; 60 tokens on average, some of them long."""
MOST = 100_000
"""Most texts of a user's file; held in memory."""


def texts_for(file: str, *, seed: int) -> list[str]:
    """The texts of a file, or docstrings where `file` is "", shuffled by `seed`.

    Raises InputError where the file cannot be read or holds no text.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """An input file.

    Attributes:
        path: .jsonl, one record a line.
        count: its records.
    """

    path: Path
    count: int


def write_records(folder: Path, texts: Sequence[str], count: int) -> Records:
    """Write a file of `count` texts with unique keys, repeating the texts as needed."""
    path = folder / f"{count}.jsonl"
    if not path.exists():
        with path.open("w", encoding="utf-8") as file:
            for number, text in enumerate(islice(cycle(texts), count)):
                file.write(json.dumps({"id": f"k{number:08d}", "text": text}) + "\n")
    return Records(path=path, count=count)
