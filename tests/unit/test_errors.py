"""The tree of errors: what it says it is."""

from __future__ import annotations

import pickle
import re

import pytest

from embq.core import errors
from embq.core.errors import EmbqError, Exit, SampleError, SourceError

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, EmbqError)]


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    drawn = re.findall(r"^(.*?)(\w+Error) ", errors.__doc__ or "", re.MULTILINE)
    assert {name for _, name in drawn} == {kind.__name__ for kind in CLASSES}
    parents: dict[int, str] = {}
    for prefix, name in drawn:
        depth = len(prefix) // 4
        parents[depth] = name
        if depth > 1:
            base = getattr(errors, name).__mro__[1].__name__
            assert base == parents[depth - 1], f"{name} is drawn below {parents[depth - 1]}"


def test_the_exit_status_in_the_docstring_is_the_one_of_the_class() -> None:
    for name, status in re.findall(r"(\w+Error) .*exit (\d+)$", errors.__doc__ or "", re.MULTILINE):
        assert getattr(errors, name).exit_code == int(status), name


def test_the_exit_statuses_are_the_published_ones() -> None:
    assert sorted(int(status) for status in Exit) == [0, 2, 3, 65, 69, 70, 71, 72, 74, 75, 78, 130]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_keeps_its_message_its_code_and_its_next_step(kind: type[EmbqError]) -> None:
    if kind is SampleError:
        error: EmbqError = SampleError("decode", "not an image")
        assert (error.code, error.message) == ("decode", "not an image")
        return
    error = kind("what happened", next_step="what to do", code="why")
    assert (str(error), error.message, error.next_step, error.code) == ("what happened",) * 2 + ("what to do", "why")
    if kind is not SourceError:
        assert kind("x").code == kind.default_code


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_of_another_process_arrives_as_it_was(kind: type[EmbqError]) -> None:
    if kind is SampleError:
        error: EmbqError = SampleError("decode", "not an image")
    elif kind is SourceError:
        error = SourceError("what happened", code="why", transient=True)
    else:
        error = kind("what happened", next_step="what to do", code="why")
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is kind
    assert (arrived.args, vars(arrived)) == (error.args, vars(error))
