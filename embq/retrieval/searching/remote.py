"""`embq search http://...`: a query to an index behind an `embq serve`, without numpy or model libraries."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from embq.core.errors import ConfigError, InputError, UsageError
from embq.retrieval.searching.http_client import Address, fetch_json
from embq.retrieval.searching.query import SCHEMA, Answer, Query, Result

HEALTH_S, SEARCH_S = 15.0, 330.0
"""Time limits of `/health`, and of `/search` including the wait for a model."""

MOST_IMAGE = 10 * 2**20
"""Bytes of an image that a server accepts; models look at a few hundred pixels of it."""

EMBEDDED = {"off": "it was started with --no-model", "none": "the index does not say which model made its vectors"}
"""State of a model that embeds no query -> reason."""


def is_server(index: object) -> bool:
    """True if an index is behind a server."""
    return isinstance(index, str) and index.startswith(("http://", "https://"))


def looks_like_server(index: str) -> bool:
    """True if it is a server address without http://, and not a folder."""
    return re.fullmatch(r"(\[[0-9a-f:]+\]|[\w.-]+):\d{1,5}/?", index) is not None and not Path(index).exists()


def search_remote(
    url: str,
    query: Query,
    *,
    name: str | None = None,
    output: str | None = None,
    on_load: Callable[[str], None] | None = None,
) -> Answer:
    """Search an index that `embq serve` serves.

    Args:
        url: of the server.
        name: of the index, if several are served.
        output: which of the vectors of a run, or which modality, if the name has several.
        on_load: called with a model's spec if the server is still loading it.

    Raises UsageError for an invalid query, ServerError if no embq serve answers, ConfigError if it is of another
    version, InputError for a query that it cannot answer, TryLaterError if it can later.
    """
    query.check()
    local_options = {"--model": query.model, "--prompt-name": query.prompt_name, "--prompt": query.prompt}
    if given := [option for option, value in local_options.items() if value is not None]:
        raise UsageError(
            f"{given[0]} is for an index on this machine: a server embeds with its own model and prompt",
            next_step='leave it out; a prompt can be part of the text: "query: a red bicycle"',
        )
    address = Address.parse(url)
    query = query.loaded()
    if isinstance(query.image, bytes) and len(query.image) > MOST_IMAGE:
        raise InputError(
            f"the image has {len(query.image):,} bytes; a server accepts {MOST_IMAGE:,}",
            next_step="make it smaller: models look at a few hundred pixels of it",
            code="too_large",
        )
    began = time.perf_counter()
    health = _health(address)
    index = _select_index(address, health["indices"], name, output)
    if query.text is not None or query.image is not None:
        _check_model(address, index, on_load)
    body = replace(query, index=index["name"], modality=index["modality"]).to_json()
    answer = fetch_json(address, "/search", body, timeout_s=SEARCH_S)
    try:
        results = [_result(result) for result in answer["results"]]
        timing = {key: float(answer["timing"][key]) for key in ("filter_ms", "embed_ms", "search_ms", "rows_ms")}
    except (KeyError, TypeError, ValueError) as error:
        raise address.not_embq("its answer to a search is not one of embq") from error
    elsewhere_s = time.perf_counter() - began - sum(timing.values()) / 1000
    return Answer(results=results, timing={"load_s": round(max(0.0, elsewhere_s), 3), **timing})


def _health(address: Address) -> Mapping[str, Any]:
    """The answer of `/health`, checked."""
    health = fetch_json(address, "/health", None, timeout_s=HEALTH_S)
    indices = health.get("indices")
    if not isinstance(indices, list) or not all(
        isinstance(index, dict) and {"name", "modality", "model_state"} <= index.keys() for index in indices
    ):
        raise address.not_embq("its health does not list indexes")
    if health.get("search") != SCHEMA:
        raise ConfigError(
            f"{address} is embq {str(health.get('embq', 'of an unknown version'))[:20]}, whose search format "
            f"differs from that of embq {version_of('embq')} here",
            next_step="install the same version on both sides",
            code="other_version",
        )
    return health


def _select_index(
    address: Address, indices: Sequence[Mapping[str, Any]], name: str | None, output: str | None
) -> Mapping[str, Any]:
    """The index of this name and output; InputError if there is none, or more than one."""
    if not indices:
        raise InputError(
            f"{address} serves no index yet",
            next_step="run `embq index OUT` on that machine; a server that follows OUT's folder loads it by itself",
            code="no_index",
        )
    names = list(dict.fromkeys(str(index["name"]) for index in indices))
    if name is not None and name not in names:
        raise InputError(
            f"{address} serves no index {name!r}", next_step=f"--name {' | '.join(names)}", code="no_such_index"
        )
    if name is None and len(names) > 1:
        raise InputError(
            f"{address} serves {len(names)} indexes", next_step=f"--name {' | '.join(names)}", code="which_index"
        )
    of_name = [index for index in indices if index["name"] == (name or names[0])]
    fitting = [index for index in of_name if output is None or output in (index.get("output"), index["modality"])]
    if len(fitting) == 1:
        return fitting[0]
    outputs = [str(index.get("output") or index["modality"]) for index in of_name]
    problem = f"has no {output!r}" if output is not None else f"has {len(outputs)} embeddings"
    raise InputError(
        f"the index {name or names[0]!r} of {address} {problem}",
        next_step=f"--vector-name {' | '.join(outputs)}",
        code="no_such_index" if output is not None else "which_index",
    )


def _check_model(address: Address, index: Mapping[str, Any], on_load: Callable[[str], None] | None) -> None:
    state, model = index["model_state"], str(index.get("model", ""))
    if state in EMBEDDED:
        raise InputError(
            f"{address} embeds no queries for {index['name']!r}: {EMBEDDED[state]}",
            next_step="search by --vector or --id",
            code="no_model",
        )
    if state == "loading" and on_load is not None:
        on_load(model)


def _result(fields: Mapping[str, Any]) -> Result:
    return Result(
        rank=int(fields["rank"]),
        id=int(fields["id"]),
        key=str(fields["key"]),
        score=float(fields["score"]),
        caption=fields["caption"],
        source=fields["source"],
        metadata=dict(fields.get("metadata") or {}),
    )
