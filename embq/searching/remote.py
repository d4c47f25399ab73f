"""Asking an `embq serve` one question: what `embq search http://…` does, with nothing but the standard library."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from core.errors import ConfigError, InputError, UsageError
from embq.searching.http_client import Address, answered
from embq.searching.query import Answer, Question, Result, path_of, read_image

SCHEMA = 1
"""Of question and answer, as `/health` says it."""

HEALTH_S, SEARCH_S = 15.0, 330.0
"""Seconds that a server may take to say that it is there; and to answer, its wait for a model included."""

MOST_IMAGE = 10 * 2**20
"""Bytes of an image that a server takes; models look at a few hundred pixels of it."""

EMBEDDED = {"off": "it was started with --no-model", "none": "the index does not say which model made its vectors"}
"""State of a model that answers no texts and images -> why."""


def is_server(index: object) -> bool:
    """Whether an index is behind a server."""
    return isinstance(index, str) and index.startswith(("http://", "https://"))


def looks_like_server(index: str) -> bool:
    """Whether it is the address of a server without its http://, and no folder."""
    return re.fullmatch(r"(\[[0-9a-f:]+\]|[\w.-]+):\d{1,5}/?", index) is not None and not Path(index).exists()


def ask_server(
    url: str,
    question: Question,
    *,
    name: str | None = None,
    output: str | None = None,
    on_load: Callable[[str], None] | None = None,
) -> Answer:
    """Ask an index that `embq serve` serves.

    Args:
        url: of the server.
        name: of the index, where several are served.
        output: which of the vectors of a run, or which modality, where the name has several.
        on_load: called with a model's spec where the server is still loading it.

    Raises UsageError for a question that is none, ServerError where no embq serve answers, ConfigError where it is of
    another version, InputError for a question that it cannot answer, TryLaterError where it can later.
    """
    question.check()
    _check_of_server(question)
    address = Address.parse(url)
    body = _body(question)
    began = time.perf_counter()
    health = _health(address)
    index = _chosen(address, health["indices"], name, output)
    if question.text is not None or question.image is not None:
        _check_model(address, index, on_load)
    body |= {"index": index["name"], "modality": index["modality"]}
    answer = answered(address, "/search", body, timeout_s=SEARCH_S)
    try:
        results = [_result(one) for one in answer["results"]]
        timing = {key: float(answer["timing"][key]) for key in ("embed_ms", "search_ms", "rows_ms")}
    except (KeyError, TypeError, ValueError) as error:
        raise address.other("its answer to a search is none") from error
    elsewhere_s = time.perf_counter() - began - sum(timing.values()) / 1000
    return Answer(results=results, timing={"load_s": round(max(0.0, elsewhere_s), 3), **timing})


def _check_of_server(question: Question) -> None:
    given = {"--model": question.model, "--prompt": question.prompt, "--prompt-text": question.prompt_text}
    if not_there := [option for option, value in given.items() if value is not None]:
        raise UsageError(
            f"{not_there[0]} is for an index on this machine: a server embeds with its own model and the prompt of it",
            next_step='leave it out; a prompt may stand in the text itself: "query: a red bicycle"',
        )


def _health(address: Address) -> Mapping[str, Any]:
    """What the server says of itself, checked."""
    said = answered(address, "/health", None, timeout_s=HEALTH_S)
    indices = said.get("indices")
    if not isinstance(indices, list) or not all(
        isinstance(one, dict) and {"name", "modality", "model_state"} <= one.keys() for one in indices
    ):
        raise address.other("it does not say which indices it has")
    if said.get("search") != SCHEMA:
        raise ConfigError(
            f"{address} is embq {str(said.get('embq', 'of an unknown version'))[:20]}, whose searches are in another "
            f"form than those of embq {version_of('embq')} here",
            next_step="install the same version on both sides",
            code="other_version",
        )
    return said


def _chosen(
    address: Address, indices: Sequence[Mapping[str, Any]], name: str | None, output: str | None
) -> Mapping[str, Any]:
    """The index that is meant; InputError where there is none, or more than one."""
    if not indices:
        raise InputError(
            f"{address} serves no index yet",
            next_step="embq index OUT on that machine; where it follows OUT's folder, it takes the index up by itself",
            code="no_index",
        )
    names = list(dict.fromkeys(str(one["name"]) for one in indices))
    if name is not None and name not in names:
        raise InputError(
            f"{address} serves no index {name!r}", next_step=f"--index {' | '.join(names)}", code="no_such_index"
        )
    if name is None and len(names) > 1:
        raise InputError(
            f"{address} serves {len(names)} indices", next_step=f"--index {' | '.join(names)}", code="which_index"
        )
    of_name = [one for one in indices if one["name"] == (name or names[0])]
    fitting = [one for one in of_name if output is None or output in (one.get("output"), one["modality"])]
    if len(fitting) == 1:
        return fitting[0]
    there = [str(one.get("output") or one["modality"]) for one in of_name]
    said = f"has no {output!r}" if output is not None else f"is of {len(there)} outputs"
    raise InputError(
        f"the index {name or names[0]!r} of {address} {said}",
        next_step=f"--output {' | '.join(there)}",
        code="no_such_index" if output is not None else "which_index",
    )


def _check_model(address: Address, index: Mapping[str, Any], on_load: Callable[[str], None] | None) -> None:
    state, model = index["model_state"], str(index.get("model", ""))
    if state in EMBEDDED:
        raise InputError(
            f"{address} embeds no queries for {index['name']!r}: {EMBEDDED[state]}",
            next_step="ask by --vector or --id",
            code="no_model",
        )
    if state == "loading" and on_load is not None:
        on_load(model)


def _body(question: Question) -> dict[str, Any]:
    """The question as JSON-ready fields; InputError where it cannot be sent."""
    body: dict[str, Any] = {"k": question.k}
    if question.text is not None:
        body["text"] = question.text
    elif question.image is not None:
        image = read_image(question.image) if isinstance(question.image, Path) else question.image
        if len(image) > MOST_IMAGE:
            raise InputError(
                f"the image has {len(image):,} bytes; a server takes {MOST_IMAGE:,}",
                next_step="make it smaller: models look at a few hundred pixels of it",
                code="too_large",
            )
        body["image"] = base64.b64encode(image).decode()
    elif question.id is not None:
        body["id"] = question.id
    else:
        body["vector"] = vector_numbers(question.vector)
    options = {"nprobe": question.nprobe, "refine": question.refine}
    return body | {name: value for name, value in options.items() if value is not None}


def vector_numbers(given: Any) -> list[float]:
    """The numbers of a vector, or of the first of several: of an array, a list, or a .npy or JSON file.

    Raises InputError `bad_query` where it is none, ConfigError where a .npy file is given and numpy is not installed.
    """
    path = path_of(given)
    try:
        if path is not None and path.suffix == ".npy":
            given = _npy(path)
        elif path is not None:
            given = json.loads(path.read_bytes())
        numbers = given.tolist() if hasattr(given, "tolist") else given
        if isinstance(numbers, (list, tuple)) and numbers and isinstance(numbers[0], (list, tuple)):
            numbers = numbers[0]
        if not isinstance(numbers, (list, tuple)) or not numbers:
            raise ValueError("it is no list of numbers")
        if not all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in numbers):
            raise ValueError("it holds something else than numbers")
        found = [float(one) for one in numbers]
        json.dumps(found, allow_nan=False)
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        what = f"{path} holds no vector" if path is not None else "the query is no vector"
        raise InputError(
            f"{what}: {reason}", next_step="give a .npy file of one vector, or a JSON list of numbers", code="bad_query"
        ) from error
    return found


def _npy(path: Path) -> Any:
    try:
        from embq.searching.vectors import read_vector
    except ImportError as error:
        raise ConfigError(
            f"{path} is a file of numpy, which is not installed here",
            next_step="pip install numpy, or give the vector as a JSON list of numbers",
            code="no_numpy",
        ) from error
    return read_vector(path)


def _result(said: Mapping[str, Any]) -> Result:
    return Result(
        rank=int(said["rank"]),
        id=int(said["id"]),
        key=str(said["key"]),
        score=float(said["score"]),
        caption=said["caption"],
        source=said["source"],
        metadata=dict(said.get("metadata") or {}),
    )
