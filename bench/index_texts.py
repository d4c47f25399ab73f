"""Texts that are on the machine already: prose of installed packages, cut to sentences and short paragraphs.

Docstrings, comments and documentation files of the standard library and of every installed package. Source is
parsed, never imported. Which texts they are depends on what is installed; their order does not depend on anything
else: it is that of a hash of the text, so the first n of them are a random sample of all.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

LONGEST = 240
"""Characters: about 50 tokens. Longer paragraphs are cut between sentences, so that a million can be embedded here."""
SHORTEST = 24
LETTERS = 0.6
"""Least share of letters and blanks: leaves out tables, rulers and commented code."""
PROSE = frozenset({".rst", ".md", ".txt"})
HEADERS = frozenset({".h", ".hpp", ".c", ".cpp", ".cuh"})
SENTENCE = re.compile(r"(?<=[.!?:;])\s+(?=[A-Z`\"'(*])")
HASHES = re.compile(r"(?:^[ \t]*#[^\n]*\n?)+", re.MULTILINE)
SLASHES = re.compile(r"(?:^[ \t]*//[^\n]*\n?)+|/\*.*?\*/", re.MULTILINE | re.DOTALL)
MARKS = re.compile(r"^[ \t]*(?:#+!?|//+[/!<]*|/\*+|\*+/?)[ \t]?", re.MULTILINE)


def texts(processes: int = 2) -> list[str]:
    """Every text once, in the order of their hashes."""
    folders = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
    files = sorted({file for folder in folders for file in _files(folder)})
    found: dict[bytes, str] = {}
    with ProcessPoolExecutor(processes) as pool:
        for pieces in pool.map(_pieces_of, files, chunksize=64):
            for piece in pieces:
                found[hashlib.blake2b(piece.encode(), digest_size=16).digest()] = piece
    return [found[digest] for digest in sorted(found)]


def code(known: set[str], processes: int = 2) -> list[str]:
    """Blocks of lines of Python source, for where prose does not suffice; none that is in `known`, by their hashes."""
    folder = Path(sysconfig.get_path("purelib"))
    found: dict[bytes, str] = {}
    with ProcessPoolExecutor(processes) as pool:
        for pieces in pool.map(_blocks_of, sorted(folder.rglob("*.py")), chunksize=64):
            for piece in pieces:
                if piece not in known:
                    found[hashlib.blake2b(piece.encode(), digest_size=16).digest()] = piece
    return [found[digest] for digest in sorted(found)]


def _files(folder: Path) -> Iterator[Path]:
    wanted = PROSE | HEADERS | {".py", ".pyi"}
    for file in folder.rglob("*"):
        if file.suffix in wanted and file.is_file():
            yield file


def _pieces_of(file: Path) -> list[str]:
    try:
        source = file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return []
    return [piece for prose in _prose_of(source, file.suffix) for piece in _cut(prose)]


def _blocks_of(file: Path) -> list[str]:
    try:
        source = file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return []
    return list(_blocks(source))


def _blocks(source: str) -> Iterator[str]:
    """Blocks of lines between empty ones."""
    for block in re.split(r"\n\s*\n", source):
        yield from _good(" ".join(block.split())[:LONGEST].rstrip())


def _prose_of(source: str, suffix: str) -> Iterator[str]:
    if suffix in PROSE:
        yield source
        return
    for block in (HASHES if suffix in (".py", ".pyi") else SLASHES).finditer(source):
        yield MARKS.sub("", block.group())
    if suffix not in (".py", ".pyi"):
        return
    with warnings.catch_warnings():
        # Old escape sequences in other people's strings.
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _cut(prose: str) -> Iterator[str]:
    """Paragraphs as they are where they are short, else sentences together up to `LONGEST`."""
    for paragraph in re.split(r"\n\s*\n", prose):
        text = " ".join(paragraph.split())
        if len(text) <= LONGEST:
            yield from _good(text)
            continue
        kept = ""
        for sentence in SENTENCE.split(text):
            if kept and len(kept) + 1 + len(sentence) > LONGEST:
                yield from _good(kept)
                kept = ""
            kept = f"{kept} {sentence}".strip()
            while len(kept) > LONGEST:
                end = kept.rfind(" ", 0, LONGEST)
                end = LONGEST if end <= 0 else end
                yield from _good(kept[:end])
                kept = kept[end:].strip()
        yield from _good(kept)


def _good(text: str) -> Iterator[str]:
    if len(text) < SHORTEST or "\0" in text or text.count(" ") < 3:
        return
    if sum(letter.isalpha() or letter == " " for letter in text) >= LETTERS * len(text):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            return
        yield text
