"""Texts and bytes that are almost right."""

from __future__ import annotations

import json
from contextlib import suppress
from random import Random
from typing import Any

NASTY: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 255, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, 1e308, 0.5, float("nan"), float("-inf")),
    *("", " ", "0", "-1", "1e9", "NaN", "\x1b[2J", "\ud800", "a\0b", "x" * 5_000, "../../x", "/etc/passwd", "a/../b"),
    *("0123456789abcdef", "file:///etc/passwd", "true", "٣", "é" * 300, "1-0", "cuda:0"),
    *([], {}, [[]], [None] * 300, {"": {"": {}}}, {"v": 4}),
)
FRAGMENTS = (
    b"",
    b"\0",
    b"\xff" * 8,
    b"[" * 3_000,
    b'{"a":' * 3_000,
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"9" * 5_000,
    b"\n",
)


def mutated(data: bytes, random: Random) -> bytes:
    """Something else than `data`, near to it: as JSON where it is JSON, else as bytes."""
    if random.random() < 0.7:
        with suppress(ValueError, RecursionError):
            tree = json.loads(data)
            for _ in range(random.choice((1, 1, 2, 5))):
                tree = _changed(tree, random)
            return json.dumps(tree, ensure_ascii=random.random() < 0.8).encode("utf-8", "surrogatepass")
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        at = random.randrange(len(found) + 1)
        match random.randrange(5):
            case 0:
                found[at:at] = random.choice(FRAGMENTS)
            case 1:
                del found[at : at + random.choice((1, 4, 64, 4_096))]
            case 2:
                found[at : at + 1] = bytes([random.randrange(256)])
            case 3:
                found[at : at + 4] = random.choice((b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xff" * 4, bytes(4)))
            case _:
                other = random.randrange(len(found) + 1)
                found[at:at] = found[other : other + random.choice((4, 64))]
    return bytes(found)


def _changed(tree: Any, random: Random) -> Any:
    """`tree` with one node replaced, removed, named otherwise, or put in another's place."""
    nodes = list(_nodes(tree))
    if not nodes:
        return random.choice(NASTY)
    holder, key = random.choice(nodes)
    match random.randrange(6):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[str(random.choice(NASTY))[:200]] = holder.pop(key)
        case 2:
            other, name = random.choice(nodes)
            if other is not holder:
                holder[key] = json.loads(json.dumps(other.get(name) if isinstance(other, dict) else None))
        case 3:
            holder[key] = [holder[key]]
        case _:
            holder[key] = random.choice(NASTY)
    return tree


def _nodes(tree: Any) -> Any:
    """(dict or list, key) of every value."""
    if isinstance(tree, dict):
        for key, value in list(tree.items()):
            yield tree, key
            yield from _nodes(value)
    elif isinstance(tree, list):
        for number, value in enumerate(tree[:20]):
            yield tree, number
            yield from _nodes(value)
