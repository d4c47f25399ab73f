"""Every reader of what comes from outside takes what is right, and refuses what is almost right."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.attacks.borders import borders, forget, survives
from tests.attacks.mutations import mutated

EACH = 150
FORGIVING = {"checkpoint, resealed", "state of an upload", "target of an export"}
"""Readers that do without what they cannot read, or take any name."""


@pytest.fixture(scope="module", autouse=True)
def removed() -> Iterator[None]:
    yield
    forget()


def test_every_reader_takes_its_seeds_and_refuses_or_takes_what_is_near_them() -> None:
    """`make fuzz` goes on from here, guided by what the readers' code does."""
    taken: dict[str, int] = {}
    for name, border in borders().items():
        assert all(survives(border, seed) for seed in border.seeds), name
        turn = random.Random(f"{name} 22")
        tried = [b"", *(mutated(turn.choice(border.seeds), turn) for _ in range(EACH))]
        for data in tried:
            try:
                taken[name] = taken.get(name, 0) + survives(border, data)
            except Exception as error:
                raise AssertionError(f"{name} does not survive {data[:300]!r}") from error
    assert {name for name, count in taken.items() if count >= EACH} <= FORGIVING
