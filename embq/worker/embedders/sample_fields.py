"""Image and text of a sample, checked, as every model family needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from embq.core.errors import ModelError, SampleError
from embq.core.models import ModelConfig
from embq.core.units import Sample

T = TypeVar("T")


def image_of(sample: Sample) -> bytes:
    """The sample's encoded image; SampleError `missing_member` if it has none."""
    if sample.image is None:
        raise SampleError("missing_member", f"the sample has no image{_has(sample, '--image-key')}")
    return bytes(sample.image)


def text_of(sample: Sample) -> str:
    """The sample's text, exactly as it came.

    Raises SampleError `missing_member` without a text, `empty_text` if it is empty or only white space (a
    vector of nothing would be a near neighbour of every short text), `text_not_utf8` if it cannot be written as
    UTF-8, which JSON escapes such as "\\ud800" can produce and no tokeniser accepts.
    """
    if sample.text is None:
        raise SampleError("missing_member", f"the sample has no text{_has(sample, '--caption-key')}")
    if not sample.text.strip():
        raise SampleError("empty_text", "the text is empty or only white space")
    try:
        sample.text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SampleError("text_not_utf8", f"the text is not valid Unicode: {error.reason}") from error
    return sample.text


def _has(sample: Sample, option: str) -> str:
    """What a sample of a shard has instead, ready to stand behind a message; "" if that is not known."""
    if not sample.parts:
        return ""
    shown = ", ".join(sample.parts[:8]) + (", ..." if len(sample.parts) > 8 else "")
    return f"; its members end in {shown}: {option} names another ending"


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust panicked: that is no Exception, and its type is exported by nothing."""
    return type(error).__module__ == "pyo3_runtime"


@contextmanager
def no_panic() -> Iterator[None]:
    """Turn a panic of a tokeniser, which would end the worker, into SampleError `not_tokenised`."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        why = " ".join(str(error).split())[:200]
        raise SampleError("not_tokenised", f"the model's tokeniser fails for the text: {why}") from None


def prepare_each(samples: Sequence[Sample], prepare: Callable[[Sample], T]) -> list[T | SampleError]:
    """`prepare` of every sample in order, with the SampleError it raised in place of an answer."""
    answers: list[T | SampleError] = []
    for sample in samples:
        try:
            if sample.error is not None:
                raise SampleError(*sample.error)
            answers.append(prepare(sample))
        except SampleError as error:
            answers.append(error.with_traceback(None))  # whose frames hold all samples, and these answers
    return answers


def prepare_texts(
    samples: Sequence[Sample], rows: Callable[[Sequence[str]], Sequence[T | SampleError]]
) -> list[T | SampleError]:
    """`rows` of the texts of all samples that have one, in one call; every other sample gets its SampleError."""
    texts = prepare_each(samples, text_of)
    results = iter(rows([text for text in texts if isinstance(text, str)]))
    return [next(results) if isinstance(text, str) else text for text in texts]


def check_modalities(config: ModelConfig, *supported: str) -> None:
    """Raise ModelError if the config asks for none, or for an embedding that this family cannot give."""
    if not config.modalities:
        raise ModelError(f"{config.spec}: no modality asked for", next_step=f"use {' or '.join(supported)}")
    for modality in config.modalities:
        if modality not in supported:
            raise ModelError(
                f"{config.spec} embeds {' and '.join(supported)}, not {modality}",
                next_step=f"ask for {' or '.join(supported)}, or use an open_clip model, which has both",
            )
