"""Check of names and prose in the packages: `python -m tests.support.words FOLDER...`, part of `make check`.

A name must say what it holds, so participles, pronouns and adverbs are refused as names of variables, parameters,
functions and classes. Phrases that stand for "if", "returns" or a number are refused in docstrings and comments.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

RULE = "CONTRIBUTING.md, Style 3 and 4"
NAMES = "asked|before|found|gone|kept|known|left|made|more|one|others|said|seen|some|there|told|wanted|whole"
FUNCTIONS = f"{NAMES}|alone|ask|heard|look|mend|moved|take|tell"
PHRASES = re.compile(
    r"(?:None|False|True|\"\"|Error`?) where\b|\bas ever\b|\bfor good\b|\bso many\b|\b[Ww]hoever\b"
    r"|; gives\b|\b(?:is|are|was|were|be) told\b(?! apart)"
    r"|\b[Ww]here it (?:can|cannot|does|fails|has|lacks|may|needs|needed)\b"
)
ALLOWED = {
    ("embq/core/queue/heartbeats.py", "whole"): "a field of the reports that workers send",
    ("embq/index/stages/spec.py", "asked"): "a field of build.json",
    ("embq/index/tune/points.py", "found"): "a field of infos.json",
    ("embq/core/storage/hashing.py", "tell"): "a method of every file",
    ("embq/core/storage/objects.py", "tell"): "a method of every file",
}


def _names(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """(line, name, whether it is a function) of each definition."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ClassDef(name=name):
                yield node.lineno, name, False
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name, False
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name, True


def _prose(source: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of each line of a docstring, and of each comment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from enumerate(node.value.value.split("\n"), node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def findings(path: str, source: str) -> list[str]:
    """A line for each banned name or phrase of a module, as FILE:LINE: the word and the rule."""
    tree = ast.parse(source)
    names = [(line, name, is_function) for line, name, is_function in _names(tree) if (path, name) not in ALLOWED]
    # Of an image or a window, left is a side.
    sides = {"left"} if {"right", "top"} & {name for _, name, _ in names} else ()
    banned = [
        (line, f"the name {name}")
        for line, name, is_function in names
        if re.fullmatch(f"_*(?:{FUNCTIONS if is_function else NAMES})_*", name) and name not in sides
    ]
    banned += [(line, f'"{match[0]}"') for line, text in _prose(source, tree) for match in PHRASES.finditer(text)]
    return [f"{path}:{line}: {word} is on the list of {RULE}" for line, word in sorted(banned)]


def main(folders: list[str]) -> int:
    """Print the findings in all Python files below some folders; 1 if there are any."""
    lines = [
        line
        for folder in folders
        for path in sorted(Path(folder).rglob("*.py"))
        for line in findings(path.as_posix(), path.read_text(encoding="utf-8"))
    ]
    print("\n".join(lines), end="\n" if lines else "")  # noqa: T201
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
