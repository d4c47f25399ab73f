"""The tree of errors: what it says it is."""

from __future__ import annotations

import pickle
import traceback

import pytest

from embq.core import errors
from embq.core.errors import EmbqError, SampleError, SourceError

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, EmbqError)]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_keeps_its_message_its_code_and_its_next_step(kind: type[EmbqError]) -> None:
    if kind is SampleError:
        error: EmbqError = SampleError("decode", "not an image")
        assert (error.code, error.message) == ("decode", "not an image")
        return
    error = kind("what happened", next_step="what to do", code="why")
    assert (str(error), error.message, error.next_step, error.code) == ("what happened",) * 2 + ("what to do", "why")
    assert traceback.format_exception_only(error)[-1] == "next: what to do\n"
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
