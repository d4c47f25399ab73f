"""Arguments of Python's functions: checks of their types, and errors in the words of Python.

Functions of embq share the names of their parameters, so one table has the types of all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

from embq.core.errors import EmbqError, UsageError

TEXTS = ("image_column", "modality", "model", "name", "precision", "prompt", "prompt_name", "task", "text_column")
"""Parameters that take a text."""

_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys((*TEXTS, "vector_name"), ((str,), "a text")),
    **dict.fromkeys(("text_column", "image_column", "output_column"), ((str, int), "the name of a column")),
    "image": ((bytes, str, os.PathLike), "an encoded image as bytes, or the path of its file"),
    **dict.fromkeys(("refine", "progress", "show_progress_bar", "mmap"), ((bool,), "True or False")),
    "timeout_s": ((Real,), "a number of seconds"),
}
"""Parameter -> the types that it takes, and what they are for people."""


def described(value: Any) -> str:
    """A value that is refused, for a message: its type, and itself if it is short."""
    if value is None:
        return "None"
    kind = type(value).__name__
    text = repr(value) if isinstance(value, str | bytes | Real) else ""
    return f"{text}, of type {kind}" if 0 < len(text) <= 40 else f"of type {kind}"


def check(*, required: tuple[str, ...] = (), **arguments: Any) -> None:
    """Raise UsageError for the first argument of a type that its parameter does not take.

    Args:
        required: the parameters that do not take None.
    """
    for name, value in arguments.items():
        types, what = _TYPES[name]
        if value is None and name not in required:
            continue
        is_number_by_accident = isinstance(value, bool) and bool not in types
        if not isinstance(value, types) or is_number_by_accident:
            raise refused(name, value, what)


def refused(name: str, value: Any, what: str) -> UsageError:
    """The error for an argument.

    Args:
        what: what the parameter takes.
    """
    return UsageError(f"{name} is {described(value)}", next_step=f"give {what}")


def whole_number(name: str, value: Any, least: int) -> int:
    """A whole number of any type; UsageError for anything else, and below `least`."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least:
        return int(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        raise UsageError(f"{name} is {value}", next_step=f"give {least} or more")
    raise refused(name, value, f"a whole number, {least} or more")


def refuse_set(name: str, value: Any) -> None:
    """Raise UsageError for a set: its items come in another order in each process."""
    if isinstance(value, set | frozenset):
        raise UsageError(f"{name} is a set, which has no order", next_step="give a list")


def listed(name: str, value: Any, what: str) -> list[Any]:
    """The items of a list, or of anything else with an order; UsageError for a text, a mapping or a set."""
    refuse_set(name, value)
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise refused(name, value, f"a list of {what}")
    return list(value)


def path_text(name: str, value: Any) -> str:
    """A path or URL as text; UsageError for anything else."""
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise refused(name, value, "a folder, a file or a URL as str or pathlib.Path, or what embq.open returns")
    return path


def path_texts(name: str, value: Any) -> list[str]:
    """One path or several as texts; UsageError for anything else."""
    if isinstance(value, str | os.PathLike):
        return [path_text(name, value)]
    return [path_text(f"{name}[{place}]", item) for place, item in enumerate(listed(name, value, "paths"))]


_OPTION = re.compile(
    r"(?:'?-\w'? / )?(?P<quote>['`]?)--(?P<name>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?![\w-])(?P=quote)"
    r"(?:[ =](?P<value>\d[\d.]*(?=\s|$)|[A-Z]+\b|[\w.:/+?&,=-]*\w(?=$|[,;)](?:\s|$)| \|| or )))?"
)
"""An option in a message, with the value behind it if that is a number, a placeholder or the end of a clause."""

_FOR_A_SHELL = re.compile(r"(`embq [^`]*`|\bembq [a-z]+ [^;]*)")
"""A command line in a message."""


def python_words(text: str, renamed: Mapping[str, str]) -> str:
    """A message about options of the command line as one about parameters: `--prompt-name` is `prompt_name=`.

    Args:
        renamed: parameters that the function calls otherwise than the command line does.
    """

    def parameter(match: re.Match[str]) -> str:
        name, value = match["name"].replace("-", "_"), match["value"]
        name = renamed.get(name, name)
        if name in PARAMETERS:
            plain = value is None or value.isupper() or value.replace(".", "").isdigit()
            return f"{name}={value or ''}" if plain else f'{name}="{value}"'
        if (flag := name.removeprefix("no_")) != name and flag in PARAMETERS:
            return match[0].replace(match[0].split(" ")[0], f"{flag}=False", 1)
        return match[0]

    parts = _FOR_A_SHELL.split(text)
    return "".join(part if place % 2 else _OPTION.sub(parameter, part) for place, part in enumerate(parts))


PARAMETERS = frozenset(
    (
        *("add", "batch_size", "broker", "caption_key", "chunk_overlap", "chunk_tokens", "current_memory_available"),
        *("damaged", "decode", "delimiter", "device", "devices", "drain_timeout", "drop_invalid", "dtype"),
        *("embedding_column_name", "exclude", "file_format", "id", "id_column", "id_columns", "image", "image_column"),
        *("image_key", "include", "index_key", "index_path", "inline", "input_format", "int8_range", "k", "keep_going"),
        *("late_chunking", "like", "limit", "log", "map", "max_index_memory_usage", "max_index_query_time_ms"),
        *("metadata_columns", "metric_type", "min_nearest_neighbors_to_retrieve", "modality", "model", "name"),
        *("nb_indices_to_keep", "no_header", "normalize", "nprobe", "offset", "output", "output_format", "overwrite"),
        *("precision", "prefetch", "priority", "prompt", "prompt_name", "queries", "quotes", "recall", "refine"),
        *("sample", "seed", "similarity", "text_column", "threads", "transport", "truncate_dim", "unit_size"),
        *("unlike", "upload", "vector", "vector_name", "where", "workers", "write_batch_size"),
    )
)
"""Options of the command line that functions of Python take under these names."""


@contextmanager
def python_errors(**renamed: str) -> Iterator[None]:
    """Have the errors of public functions name parameters where those of the command line name options.

    It is a decorator as well, but for generators.

    Args:
        renamed: see `python_words`.
    """
    try:
        yield
    except EmbqError as error:
        error.reword(lambda text: python_words(text, renamed))
        raise
