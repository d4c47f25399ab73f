"""A query to an index and its answer, the same for a local index and for one behind an `embq serve`.

Imports nothing that is missing if only embq itself is installed; numpy is imported to read a .npy file.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from embq.core import wire
from embq.core.arguments import check, described, refuse_set, refused
from embq.core.errors import InputError, MalformedError, SampleError, UsageError
from embq.core.extras import missing
from embq.core.filter.condition import MOST_CONDITIONS, Condition, conditions_from_json, given_conditions

T = TypeVar("T")

KINDS = ("text", "image", "vector", "id")
"""A query is one of these."""

JSON_FIELDS = (*KINDS, "k", "offset", "where", "like", "unlike", "index", "modality", "nprobe", "refine")
"""Fields of the body of `/search`."""

SCHEMA = 1
"""Version of the body and the answer of `/search`, in `/health` for clients of other versions."""

DEFAULT_RESULTS = 10

MOST_RESULTS = 10_000
"""Most ids of one answer of a server, the skipped ones among them; clip-retrieval's page asks for 3,000."""

MOST_EXAMPLES = 32
"""Rows that a query resembles, and rows that it does not."""

MOST_TEXT = 10_000
"""Most characters of a text that a server takes. Models read a few hundred tokens and cut off the rest."""

MOST_VECTOR_FILE = 1 << 30
"""Bytes of a file of query vectors; a larger file was given by mistake."""

FLOAT32_MAX = (2 - 2**-23) * 2.0**127

INTEGERS = {"id", "k", "offset", "nprobe"}
"""Fields that are whole numbers."""

CHECKED = {"refine", "prompt_name", "prompt", "model"}
"""Fields of other types."""

Whole = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Signed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
FromZero = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Examples: Any = Annotated[list[Signed], Meta(max_length=MOST_EXAMPLES)]
Modality = Literal["", "image", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query: one of `text`, `image`, `vector` and `id`, or none if `like` is given, and how it is answered.

    Attributes:
        image: an encoded image, or the path of its file.
        vector: numbers of shape (d,), or (n, d), of which the first row counts; or the path of a file of them.
        id: of a row, which is excluded from its own results.
        k: most results.
        offset: results to skip before the first.
        where: conditions that all results satisfy.
        like: ids of rows towards which the query is moved, which are excluded from the results.
        unlike: ids of rows away from which it is moved, excluded as well.
        index: name of a server's index; "" if there is only one.
        modality: of a server's index: "image" or "text"; "" if the name has only one.
        nprobe: inverted lists to search; None for the tuned number.
        refine: False skips re-ranking by full vectors.
        prompt_name: name of the model's prompt before the text; only for a local index, as the next two.
        prompt: the prompt itself.
        model: spec of the model, if it is not where the run had it.
    """

    text: str | None = None
    image: bytes | Path | None = None
    vector: Any = None
    id: int | None = None
    k: int = DEFAULT_RESULTS
    offset: int = 0
    where: tuple[Condition, ...] = ()
    like: tuple[int, ...] = ()
    unlike: tuple[int, ...] = ()
    index: str = ""
    modality: str = ""
    nprobe: int | None = None
    refine: bool | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    model: str | None = None

    @classmethod
    def given(
        cls,
        text: str | None = None,
        *,
        image: bytes | str | os.PathLike[str] | None = None,
        vector: Any = None,
        where: Iterable[Any] = (),
        like: Iterable[int] = (),
        unlike: Iterable[int] = (),
        **options: Any,
    ) -> Query:
        """The query in the arguments of `embq.search`; InputError `bad_filter`, UsageError for a k of 2.5."""
        check(image=image, **{name: options[name] for name in CHECKED & options.keys()})
        for name in INTEGERS & options.keys():
            if options[name] is not None or name in ("k", "offset"):
                options[name] = _as_integer(name, options[name])
        return cls(
            text=text,
            image=image if isinstance(image, bytes) else path_of(image),
            vector=path_of(vector) or vector,
            where=given_conditions(where),
            like=_row_ids("like", like),
            unlike=_row_ids("unlike", unlike),
            **options,
        )

    @classmethod
    def from_json(cls, body: object) -> Query:
        """The query in a body of `/search`. Absent and null mean the same.

        Raises InputError `no_query`, `bad_query`, `bad_filter`, `too_many`, `too_long` or `bad_request`; also for
        unknown fields.
        """
        fields = json_object(body)
        if unknown := [name for name in fields if name not in JSON_FIELDS]:
            raise _bad_request(f"there is no field {unknown[0][:40]!r}", f"send only {', '.join(JSON_FIELDS)}")
        given = [name for name in KINDS if fields.get(name) is not None]
        like = json_field(fields, "like", Examples, [])
        if len(given) > 1 or not (given or like):
            message = f"the request has several queries: {', '.join(given)}" if given else "the request has no query"
            raise InputError(message, code="no_query", next_step=f"send one of {', '.join(KINDS)}")
        k, offset = count_field(fields, "k", DEFAULT_RESULTS, Whole), count_field(fields, "offset", 0, FromZero)
        count_field({"offset + k": offset + k}, "offset + k", 0, Whole)
        return cls(
            **(query_field(given[0], fields[given[0]]) if given else {}),
            k=k,
            offset=offset,
            where=_where(fields.get("where")),
            like=tuple(like),
            unlike=tuple(json_field(fields, "unlike", Examples, [])),
            index=json_field(fields, "index", str, ""),
            modality=json_field(fields, "modality", Modality, ""),
            nprobe=json_field(fields, "nprobe", Whole, None),
            refine=json_field(fields, "refine", bool, None),
        )

    def to_json(self) -> dict[str, Any]:
        """The body of a `/search` request for a query that is `loaded`."""
        fields = {name: getattr(self, name) for name in JSON_FIELDS}
        if isinstance(self.image, bytes):
            fields["image"] = base64.b64encode(self.image).decode()
        fields["where"] = [condition.describe() for condition in self.where]
        fields["offset"] = self.offset or None
        return {name: value for name, value in fields.items() if value not in (None, "", (), [])}

    @property
    def kinds(self) -> list[str]:
        """Those of `KINDS` that are given."""
        return [name for name in KINDS if getattr(self, name) is not None]

    @property
    def excluded(self) -> frozenset[int]:
        """Ids of rows that are no results: they are the query."""
        return frozenset((*self.like, *self.unlike, *(() if self.id is None else (self.id,))))

    def check(self) -> None:
        """Raise UsageError if there is no query, or more than one, or options do not belong to it."""
        given = self.kinds
        if len(given) > 1 or not (given or self.like):
            raise UsageError(
                f"several queries are given: {', '.join(given)}" if given else "no query is given",
                next_step="give one of a text, an image, a vector and the id of a row, or rows that results are like",
            )
        if self.k < 1 or self.offset < 0:
            raise UsageError(
                f"k is {self.k}, offset is {self.offset}", next_step="ask for one result or more, after 0 or more"
            )
        if self.nprobe is not None and self.nprobe < 1:
            raise UsageError(f"nprobe is {self.nprobe}", next_step="search one list or more, or leave nprobe out")
        for name, most in (("where", MOST_CONDITIONS), ("like", MOST_EXAMPLES), ("unlike", MOST_EXAMPLES)):
            if (count := len(getattr(self, name))) > most:
                raise UsageError(f"{name} is given {count} times", next_step=f"give it {most} times or fewer")
        if self.text is None and (self.prompt_name is not None or self.prompt is not None):
            raise UsageError("a prompt is given without a text", next_step="leave the prompt out")
        if self.prompt_name is not None and self.prompt is not None:
            raise UsageError("both --prompt-name and --prompt are given", next_step="leave out one of the two")

    def of(self, item: Any) -> Query:
        """The query by one item of `split`, with the options of this one; UsageError if it is a query already."""
        if given := self.kinds:
            raise UsageError(f"`queries` and `{given[0]}` are given", next_step="leave out one of the two")
        if isinstance(item, str):
            return replace(self, text=item)
        return replace(self, **({"image": item} if isinstance(item, bytes | Path) else {"vector": item}))

    def loaded(self) -> Query:
        """The query, checked, with its files read: `image` is bytes, `vector` a list of float."""
        self.check()
        image = read_image(self.image) if isinstance(self.image, Path) else self.image
        return replace(self, image=image, vector=None if self.vector is None else vector_numbers(self.vector))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A row that an index found.

    Attributes:
        rank: 1 for the best.
        id: of the row.
        key: of its sample.
        score: cosine with the query; inner product if vectors have other lengths than 1; with metric l2 the
            squared distance, smallest first.
        caption: its text; None without one.
        source: the input that it came from; None if that is not known.
        metadata: its other columns.
    """

    rank: int
    id: int
    key: str
    score: float
    caption: str | None
    source: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """JSON-ready values; metadata only if the index has such columns."""
        values = {name: getattr(self, name) for name in ("rank", "id", "key", "score", "caption", "source")}
        return {**values, "metadata": dict(self.metadata)} if self.metadata else values


def by_document(results: Iterable[Result]) -> list[list[Result]]:
    """The chunks of each document together, its best first, and every other row alone; in the order of the best."""
    groups: dict[object, list[Result]] = {}
    for result in results:
        of = result.metadata
        document = (result.source, str(of["document"])) if {"document", "chunk", "chunks"} <= of.keys() else result.id
        groups.setdefault(document, []).append(result)
    return list(groups.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The results of a query, and timings.

    Attributes:
        results: best first.
        timing: load_s: opening the index and the model; embed_ms: the query; filter_ms: the rows that satisfy the
            conditions; search_ms: its neighbours; rows_ms: their keys and captions.
    """

    results: list[Result]
    timing: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAnswer(Answer):
    """The answer of an index that a server holds.

    Attributes:
        index: its name.
        version: of the index.
    """

    index: str
    version: str

    def describe(self) -> dict[str, Any]:
        """The JSON of `/search`."""
        return {
            "schema": SCHEMA,
            "results": [result.describe() for result in self.results],
            "timing": {name: round(value, 3) for name, value in self.timing.items()},
            "index": self.index,
            "version": self.version,
        }


# --- fields of a JSON body ---


EXAMPLE = '{"text": "a red car"}'
"""A body of `/search`."""


def json_object(body: object, example: str = EXAMPLE) -> Mapping[str, Any]:
    """The fields of a body; InputError `bad_request`, with an example, if it is not an object."""
    if not isinstance(body, dict):
        raise _bad_request("the body is not a JSON object", f"send an object, such as {example}")
    return body


def json_field(fields: Mapping[str, Any], name: str, kind: type[T] | Any, default: T | None) -> Any:
    """A field of a type that msgspec knows; `default` if it is absent or null. Raises InputError `bad_request`."""
    if (value := fields.get(name)) is None:
        return default
    try:
        return wire.convert(kind, value, what=name)
    except MalformedError as error:
        raise _bad_request(error.message, f"correct {name}, or leave it out") from error


def count_field(fields: Mapping[str, Any], name: str, default: int, kind: Any) -> int:
    """A number of results; InputError `too_many` above MOST_RESULTS."""
    count: int = json_field(fields, name, kind, default)
    if count > MOST_RESULTS:
        raise InputError(
            f"{name} is {count:,}; {MOST_RESULTS:,} is the most that one answer holds",
            code="too_many",
            next_step=f"ask for {MOST_RESULTS:,} or fewer",
        )
    return count


def query_field(name: str, value: object, kind: str = "") -> dict[str, Any]:
    """The arguments of `Query` for one field that holds a query; InputError if it cannot be used.

    Args:
        kind: one of KINDS, or another name of a text; `name` if that is "".
    """
    kind = kind or name
    if kind == "vector":
        if not isinstance(value, list) or (value and isinstance(value[0], list)):
            raise InputError(
                f"{name} is not a list of numbers", code="bad_query", next_step="send one vector: [0.1, -0.2, ...]"
            )
        return {"vector": vector_numbers(value)}
    if kind == "id":
        return {"id": json_field({name: value}, name, Signed, None)}
    text: str = json_field({name: value}, name, str, None)
    if kind == "image":
        return {"image": _image_bytes(text)}
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _bad_request(f"{name} is not valid Unicode: {error.reason}", "send whole characters") from error
    if len(text) > MOST_TEXT:
        raise InputError(
            f"{name} has {len(text):,} characters; {MOST_TEXT:,} are the most",
            code="too_long",
            next_step="send its beginning",
        )
    return {kind: text}


def _where(value: object) -> tuple[Condition, ...]:
    try:
        return () if value is None else conditions_from_json(value)
    except MalformedError as error:
        raise _bad_request(error.message, 'send a list of conditions, such as [["year", ">=", 2020]]') from error


def _image_bytes(text: str) -> bytes:
    """The bytes of an image in base64, or in the `data:` URL that a browser makes of a file."""
    data = text.partition(",")[2] if text.startswith("data:") and "," in text else text
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(
            f"image is not base64: {error}", code="bad_query", next_step="send the bytes of an image file in base64"
        ) from error


def _bad_request(message: str, next_step: str) -> InputError:
    return InputError(message, next_step=next_step, code="bad_request")


# --- arguments of Python ---


def split(queries: Any) -> tuple[list[Any], bool]:
    """Texts, images and vectors as a list, and whether one was given alone: a text, an image, or numbers of shape (d,).

    Args:
        queries: one or several. Of an array of shape (n, d) each row is one.
    """
    if isinstance(queries, (str, bytes, Path)):
        return [queries], True
    if not isinstance(queries, Iterable) or isinstance(queries, Mapping):
        raise UsageError(
            f"the query or list of queries is {described(queries)}",
            next_step="give a text, an image, a vector, or a list of them",
        )
    refuse_set("queries", queries)
    items = list(queries)
    first = items[0] if items else ""
    if isinstance(first, Real) or (getattr(first, "ndim", None) == 0 and not isinstance(first, (str, bytes))):
        return [items], True
    for place, item in enumerate(() if hasattr(queries, "ndim") else items):
        _check_item(place, item)
    return items, False


def _check_item(place: int, item: Any) -> None:
    if isinstance(item, Real) or not (isinstance(item, (str, bytes, Path)) or hasattr(item, "__len__")):
        raise UsageError(
            f"item {place} of the queries is {described(item)}",
            next_step="give texts, images as bytes or pathlib.Path, or vectors",
        )


def _row_ids(name: str, rows: Any) -> tuple[int, ...]:
    """Ids of rows, none for None; UsageError if they are no list of them."""
    if rows is None:
        return ()
    if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes, Mapping)):
        raise refused(name, rows, "a list of ids of rows")
    return tuple(_as_integer(name, row) for row in rows)


def _as_integer(name: str, value: Any) -> int:
    """A whole number of any type, such as 2.0 or numpy's; UsageError for anything else."""
    try:
        if int(value) == value:
            return int(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise UsageError(f"{name} is {value!r}", next_step="give a whole number")


# --- files and vectors of a query ---


def vector_numbers(given: Any) -> list[float]:
    """The numbers of a vector, or of the first of several: of an array, a list, or a .npy or JSON file.

    Raises InputError `bad_query` if there is none or a number is not finite in float32, ConfigError if a .npy
    file is given and numpy is not installed.
    """
    path = path_of(given)
    try:
        if path is not None:
            if path.stat().st_size > MOST_VECTOR_FILE:
                raise ValueError("it is larger than 1 GB")
            given = _load_npy(path) if path.suffix == ".npy" else json.loads(path.read_bytes())
        numbers = given[:1].tolist() if getattr(given, "ndim", 1) > 1 else given
        numbers = wire.python_value(numbers)
        if not isinstance(numbers, (list, tuple)) or not numbers:
            raise ValueError("it is not a list of numbers")
        if isinstance(numbers[0], (list, tuple)):
            if len({len(row) if isinstance(row, (list, tuple)) else -1 for row in numbers}) > 1:
                raise ValueError("its vectors have different lengths")
            numbers = numbers[0]
        if not all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers):
            raise ValueError("it holds something else than numbers")
        values = [float(number) for number in numbers]
        if not all(abs(number) <= FLOAT32_MAX for number in values):
            raise ValueError("it has numbers that are not finite in float32")
    except (OSError, ValueError, TypeError, EOFError, OverflowError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        what = f"{path} holds no vector" if path is not None else "the query is not a vector"
        is_typed = str(path).startswith("[")
        raise InputError(
            f"{what}: {reason}",
            next_step="write the list into a file, and give its name"
            if is_typed
            else "give a .npy file of one vector, or a file with a JSON list of numbers"
            if path is not None
            else "give an array or a list of numbers, or the path of a .npy file of one vector",
            code="bad_query",
        ) from error
    return values


def _load_npy(path: Path) -> Any:
    try:
        import numpy as np
    except ImportError as error:
        raise missing(
            "numpy",
            f"{path} is a file of numpy, which is not installed here",
            next_step="pip install numpy, or give the vector as a JSON list of numbers",
            code="no_numpy",
        ) from error
    return np.load(path, mmap_mode="r", allow_pickle=False)


def read_image(path: Path) -> bytes:
    """The bytes of an image file; InputError `bad_query` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}", next_step="give the file of an image", code="bad_query"
        ) from error


def not_embedded(error: SampleError) -> InputError:
    """The error of a query that the model cannot embed."""
    return InputError(
        f"the query cannot be embedded: {error.message}", next_step="ask with other words, or image", code="bad_query"
    )


def path_of(value: Any) -> Path | None:
    """A path that is text or path-like; None for anything else."""
    return Path(value) if isinstance(value, (str, os.PathLike)) else None
