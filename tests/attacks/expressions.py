"""Every regular expression of embq, found in its source, and texts that make an expression slow."""

from __future__ import annotations

import ast
import gc
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import embq

ROOT = Path(embq.__file__).parent
USES = ("fullmatch", "match", "search", "sub", "subn", "split", "findall", "finditer")
SIZE = 4096
FAST_S = 0.002
"""Less than this for SIZE characters is linear: a quadratic expression takes 10 ms and more."""
LIMIT_S = 0.5
"""Of processor time, for one text."""
WORST = 2.7
"""Growth of the time upon doubling that is taken for linear: 4 is quadratic, and a measured time varies."""


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression in the source.

    Attributes:
        place: file and line.
        source: of its pattern, as Python.
        uses: the functions of `re` that it is used with.
        pattern: None if it depends on more than constants of its module.
    """

    place: str
    source: str
    uses: frozenset[str]
    pattern: str | bytes | None
    flags: int


def expressions() -> list[Expression]:
    """All calls of `re` that take a pattern, and all patterns of msgspec."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    trees = {name: ast.parse(text) for name, text in texts.items() if _OF_INTEREST.search(text)}
    uses = defaultdict(set)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in USES:
                at = node.value
                uses[at if isinstance(at, ast.Call) else _key(name, getattr(at, "id", getattr(at, "attr", "")))].add(
                    node.attr
                )
    return [found for name, tree in trees.items() for found in _in_module(name, tree, uses)]


_OF_INTEREST = re.compile(rf"\bre\b|pattern=|\.(?:{'|'.join(USES)})\(")


def _key(module: str, name: str | None) -> tuple[str, str]:
    """A name as it is known: one with an underscore in its module only."""
    return (module if name and name.startswith("_") else "", name or "")


def _in_module(name: str, tree: ast.Module, uses: Mapping[Any, set[str]]) -> Iterator[Expression]:
    in_module = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    values: dict[str, Any] = {"re": re}
    names = {}
    for statement in tree.body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        if isinstance(target, ast.Name) and (value := getattr(statement, "value", None)) is not None:
            names[value] = target.id
            values[target.id] = _value(value, values)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function, found, flags = ast.unparse(node.func), set(), node.args[-1:]
        if function == "re.compile":
            named = uses.get(_key(name, names[node])) if node in names else None
            found = uses.get(node) or named or in_module & set(USES[:3]) or set(USES[:3])
        elif function.removeprefix("re.") in USES and function.startswith("re."):
            found = {function[3:]}
        patterns = node.args[:1] if found else [word.value for word in node.keywords if word.arg == "pattern"]
        if not found and function != "Meta":
            continue
        for pattern in patterns:
            flag = flags[0] if flags and ast.unparse(flags[0]).startswith("re.") else ast.Constant(0)
            value = _value(pattern, values)
            yield Expression(
                place=f"{name}:{node.lineno}",
                source=ast.unparse(pattern),
                uses=frozenset(found or {"search"}),
                pattern=value if isinstance(value, str | bytes) else None,
                flags=int(_value(flag, values) or 0),
            )


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    """What a constant expression is; None if it is something else."""
    try:
        return eval(ast.unparse(node), dict(values))
    except Exception:  # noqa: BLE001 - whatever a name of another module raises
        return None


def attacks(pattern: str | bytes) -> Iterator[tuple[str, str, str]]:
    """(beginning, what is repeated, end): of the expression's own pieces, each with its neighbours."""
    pieces = list(dict.fromkeys(filter(None, _pieces(parser.parse(_text(pattern))))))[:40]
    starts = list(dict.fromkeys(["", *(before for before, _ in _repeats(parser.parse(_text(pattern)), ""))]))
    pumps = [*pieces, *(one + two for one, two in pairwise(pieces))]
    for pump in pumps:
        for end in ("", "\n\0"):
            yield "", pump, end
    for start in starts[1:]:
        for pump in pieces:
            yield start, pump, "\n\0"


def _text(pattern: str | bytes) -> str:
    return pattern.decode("latin-1") if isinstance(pattern, bytes) else pattern


def _sample(items: Any, times: int = 1) -> str:
    """A text that the expression takes; `times` for what may be repeated."""
    return "".join(_one(operation, value, times) for operation, value in items)


def _one(operation: Any, value: Any, times: int) -> str:
    match str(operation):
        case "LITERAL":
            return chr(value)
        case "NOT_LITERAL":
            return "x" if value != ord("x") else "y"
        case "ANY":
            return "x"
        case "IN":
            return next(_members(value))
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            least, most, items = value
            return _sample(items, times) * max(min(least, 64), min(most, times))
        case "SUBPATTERN":
            return _sample(value[3], times)
        case "ATOMIC_GROUP":
            return _sample(value, times)
        case "BRANCH":
            return _sample(value[1][0], times)
    return ""


def _members(items: Any) -> Iterator[str]:
    if items[0][0] is parser.NEGATE:
        taken = re.compile(f"[{''.join(re.escape(char) for char in _listed(items[1:]))}]")
        yield from (char for char in "x~\x01" if not taken.match(char))
    yield from _listed(items)
    yield "x"


def _listed(items: Any) -> Iterator[str]:
    for operation, value in items:
        match str(operation):
            case "LITERAL":
                yield chr(value)
            case "RANGE":
                yield from (chr(value[0]), chr(value[1]))
            case "CATEGORY":
                yield {"CATEGORY_DIGIT": "1", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "a"}.get(str(value), "~")


def _pieces(items: Any) -> Iterator[str]:
    """Samples of all parts of an expression, and characters of its classes."""
    yield _sample(items)
    for operation, value in items:
        yield _one(operation, value, 1)
        if str(operation) == "IN":
            yield from list(_members(value))[:3]
        for part in _parts(operation, value):
            yield from _pieces(part)


def _repeats(items: Any, before: str) -> Iterator[tuple[str, Any]]:
    """(sample of what stands before, body) of each repetition."""
    for operation, value in items:
        if str(operation).endswith("REPEAT"):
            yield before, value[2]
        for part in _parts(operation, value):
            yield from _repeats(part, before)
        before += _one(operation, value, 1)


def _parts(operation: Any, value: Any) -> list[Any]:
    match str(operation):
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            return [value[2]]
        case "SUBPATTERN":
            return [value[3]]
        case "ATOMIC_GROUP":
            return [value]
        case "BRANCH":
            return list(value[1])
        case "ASSERT" | "ASSERT_NOT":
            return [value[1]]
    return []


def is_slow(call: Callable[[str], object], start: str, pump: str, end: str, size: int = SIZE) -> bool:
    """Whether the time of a call grows more than its text, up to `size` characters."""

    def time_of(length: int) -> float:
        text = start + pump * (1 + length // len(pump)) + end
        best = float("inf")
        for _ in range(3):
            began = time.process_time()
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)  # `re` looks for signals
            try:
                call(text)
            except _TooLongError:
                return float("inf")
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            best = min(best, time.process_time() - began)
            if best < FAST_S:
                break
        return best

    def is_steep() -> bool:
        before = time_of(length)
        return before == float("inf") or time_of(2 * length) > WORST * before

    handler, length = signal.signal(signal.SIGVTALRM, _stop), size
    # A collection passes over the syntax trees of all of embq, and longer texts are more likely to meet one.
    gc.disable()
    try:
        if time_of(size) < FAST_S:
            return False
        while length > 32 and time_of(length) > 5 * FAST_S:
            length //= 2
        return all(is_steep() for _ in range(6))  # other processes disturb even processor time
    finally:
        gc.enable()
        signal.signal(signal.SIGVTALRM, handler)


class _TooLongError(Exception):
    pass


def _stop(*_: object) -> None:
    raise _TooLongError


def call_of(compiled: re.Pattern[Any], use: str) -> Callable[[str], object]:
    """A use of an expression, with a text."""
    encode = (lambda text: text.encode("latin-1", "replace")) if isinstance(compiled.pattern, bytes) else str
    function = getattr(compiled, use)
    if use in ("sub", "subn"):
        return lambda text: function(encode("")[:0], encode(text))
    if use == "finditer":
        return lambda text: sum(1 for _ in function(encode(text)))
    return lambda text: function(encode(text))
