"""Strict reader of JSON from outside: the broker, an output folder, the network.

A form is a dataclass or msgspec struct whose annotations hold types, ranges and lengths. `read` and `read_hash` raise
`MalformedError` and nothing else, for any bytes. A service skips what is malformed (`skipped`) and goes on.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from embq.core.errors import MalformedError as MalformedError
from embq.core.service.log import Events

T = TypeVar("T")

MOST_BYTES = 1 << 20
"""Default limit of the bytes of a form."""

_NO_SURROGATES = r"\A[^\ud800-\udfff]*\Z"
_NO_BYTES = r"\ud800-\udc7f\udd00-\udfff"
"""Surrogates that stand for no byte (PEP 383), so that a path with one can be neither opened nor hashed."""

RunId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
StageId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""Run of a stage of an index build."""
LedgerId = Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{16}){1,2}\Z")]
"""Either of them."""
UploadName = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
UnitId = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Generation = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9-]{1,64}\Z")]
"""Generation of a run's queue."""
WorkerName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{1,200}\Z")]
"""Name of a worker process or a service."""

UnitNumber = Annotated[int, Meta(ge=0, lt=100_000_000)]
"""Index of a unit in the manifest. The bound keeps a run's bitmap of units below 13 MB."""
UnitCount = Annotated[int, Meta(ge=0, le=100_000_000)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
"""Rows, samples, tokens, bytes, milliseconds or nanoseconds."""
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Rate = Annotated[float, Meta(ge=0, le=1e15)]
"""Anything per second."""

Word = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._+-]{0,64}\Z")]
"""A state, code, version or kind."""
ShortText = Annotated[str, Meta(max_length=1_000, pattern=_NO_SURROGATES)]
"""One line for people; it may hold control characters, which `printable` escapes where it is shown."""
LongText = Annotated[str, Meta(max_length=16_000, pattern=_NO_SURROGATES)]
RelativePath = Annotated[
    str,
    Meta(
        max_length=8_192,
        pattern=rf"\A(?!\.\.?(?:/|\Z))[^/\0{_NO_BYTES}]+(?:/(?!\.\.?(?:/|\Z))[^/\0{_NO_BYTES}]+)*\Z",
    ),
]
"""Path below a folder: no absolute one, without `.`, `..` and empty parts."""
FileName = Annotated[str, Meta(max_length=200, pattern=rf"\A(?!\.\.?\Z)[^/\\\x00-\x1f\x7f{_NO_BYTES}]+\Z")]
"""One part of a path, such as the name of an index below `index/`: no separator and no control character."""
PathText = Annotated[str, Meta(min_length=1, max_length=8_192, pattern=rf"\A[^\0{_NO_BYTES}]*\Z")]
"""Path or URL. Bytes of a path that are not UTF-8 stand in it as lone surrogates."""


def read(form: type[T], data: bytes | str, *, what: str, most_bytes: int = MOST_BYTES) -> T:
    """The value of type `form` that the JSON text `data` holds; MalformedError if it holds anything else.

    Integers are within 64 bits and numbers finite, whatever `form` says.

    Args:
        what: noun for messages, such as "run record".
        most_bytes: longest text that is looked at.
    """
    return convert(form, _parsed(data, what, most_bytes), what=what)


def read_part(form: type[T], data: bytes, *, what: str) -> T:
    """As `read`, in half of the time, and in a tenth for a few fields out of many; the others are not looked at.

    Integers may have more than 64 bits where `form` does not say.
    """
    prepare(form)
    if len(data) <= MOST_BYTES:
        with suppress(ValueError, RecursionError, OverflowError):
            return msgspec.json.decode(data, type=form)
    return read(form, data, what=what)  # which takes lone surrogates, or says what is wrong


def convert(form: type[T], value: object, *, what: str) -> T:
    """`value`, made of plain JSON values, as type `form`; MalformedError if it does not fit."""
    prepare(form)
    try:
        return msgspec.convert(value, form)
    except (ValueError, RecursionError, OverflowError) as error:
        raise malformed(what, error) from error


def read_hash(form: type[T], raw: Mapping[bytes, bytes], *, what: str) -> T:
    """A hash of the broker as type `form`; values are texts or decimal numbers, unknown fields are ignored."""
    prepare(form)
    try:
        texts = {name.decode(): value.decode() for name, value in raw.items()}
        return msgspec.convert(texts, form, strict=False)
    except (ValueError, RecursionError, OverflowError) as error:
        raise malformed(what, error) from error


def prepare(form: Any) -> None:
    """Have msgspec look at the annotations of a form, one thread at a time.

    It does so at the first conversion, and ends the process where two threads are at it (msgspec 0.22): the second
    finds what the first has half made.
    """
    if form not in _prepared:
        with _preparing, suppress(msgspec.ValidationError):
            msgspec.convert(None, form)
        _prepared.add(form)


_prepared: set[Any] = set()
_preparing = threading.Lock()


def read_text(data: bytes, *, what: str, most_bytes: int = MOST_BYTES) -> str:
    """UTF-8 text of bounded length; MalformedError for anything else."""
    if len(data) > most_bytes:
        raise malformed(what, f"it has {len(data)} bytes, at most {most_bytes} are read")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise malformed(what, error) from error


def read_version(data: bytes | str, version: int, *, what: str, most_bytes: int = MOST_BYTES) -> dict[str, Any] | None:
    """The fields of a JSON object with `v` equal to `version`, for `convert`; None for another version."""
    fields = read(dict[str, Any], data, what=what, most_bytes=most_bytes)
    if convert(int, fields.get("v"), what=f"version of a {what}") != version:
        return None
    return fields


def one_of(words: Sequence[str]) -> Meta:
    """Constraint of a text that is one of `words`."""
    return Meta(pattern=rf"\A(?:{'|'.join(map(re.escape, words))})\Z")


def write(value: object) -> str:
    """A form as JSON text, with the fields in the order of their declaration."""
    return json.dumps(msgspec.to_builtins(value))


def malformed(what: str, why: object) -> MalformedError:
    """The error for malformed data."""
    return MalformedError(f"{what} is malformed: {' '.join(str(why).split())[:300]}")


def _parsed(data: bytes | str, what: str, most_bytes: int) -> Any:
    text = read_text(data, what=what, most_bytes=most_bytes) if isinstance(data, bytes) else data
    if len(text) > most_bytes:
        raise malformed(what, f"it has {len(text)} characters, at most {most_bytes} are read")
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise malformed(what, error) from error


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**63:
        raise ValueError("an integer has more than 64 bits")
    return number


def _real(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError("a number is out of range")
    return number


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_real, parse_constant=_constant)
"""Not that of msgspec, which refuses lone surrogates, the form of bytes of paths that are not UTF-8."""


def decimal(text: str) -> int | None:
    """The number that ASCII digits write, below 10**18; None for any other text.

    `str.isdigit` also takes digits that `int` refuses, such as superscripts, and numbers of any length.
    """
    return int(text) if len(text) <= 18 and text.isascii() and text.isdigit() else None


class Skips:
    """Counts malformed items that were skipped, and logs each once, at a limited rate.

    Args:
        clock: monotonic seconds.
    """

    LINES_A_MINUTE = 60
    MOST_KEYS = 10_000

    def __init__(self, log: Events, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._named: dict[tuple[str, str], None] = {}
        self._minute, self._lines, self._unnamed = float("-inf"), 0, 0

    def add(self, what: str, key: str, error: Exception | str) -> None:
        """Count one; a new `key` is logged, up to 60 a minute."""
        with self._lock:
            self._counts[what] = self._counts.get(what, 0) + 1
            if (what, key) in self._named:
                return
            self._named[what, key] = None
            if len(self._named) > self.MOST_KEYS:
                del self._named[next(iter(self._named))]
            if self._clock() - self._minute >= 60:
                self._minute, self._lines = self._clock(), 0
            self._lines += 1
            if self._lines > self.LINES_A_MINUTE:
                self._unnamed += 1
                return
            unnamed, self._unnamed = self._unnamed, 0
        extra = {"others_unnamed": unnamed} if unnamed else {}
        self._log.warning("malformed_skipped", what=what, key=key[:200], why=error, **extra)

    def counts(self) -> dict[str, int]:
        """Noun -> number of skipped items since the start of this process."""
        with self._lock:
            return dict(self._counts)


_SKIPS = Skips(Events("wire"))


def skipped(what: str, key: str | bytes, error: Exception | str) -> None:
    """Count and log a malformed item that a service skips.

    Args:
        what: the noun of `read`; one of a fixed set, because it is a label of a metric.
        key: key or name of the item.
    """
    _SKIPS.add(what, key.decode(errors="backslashreplace") if isinstance(key, bytes) else key, error)


def skip_counts() -> dict[str, int]:
    """Noun -> number of items that this process has skipped."""
    return _SKIPS.counts()


def read_each(form: type[T], raw: Mapping[bytes, bytes], *, what: str) -> dict[str, T]:
    """The values of a hash of the broker whose fields are JSON; malformed ones are skipped."""
    values: dict[str, T] = {}
    for name, text in raw.items():
        try:
            key = convert(ShortText, read_text(name, what=f"name of a {what}"), what=f"name of a {what}")
            values[key] = read(form, text, what=what)
        except MalformedError as error:
            skipped(what, name, error)
    return values


def python_value(value: Any) -> Any:
    """Python's own value of a scalar or an array of numpy, also in a list."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [*map(python_value, value)] if isinstance(value, list | tuple) else value
