"""`POST /v1/embeddings` as OpenAI's API has it, and `POST /embed` as text-embeddings-inference: vectors of texts.

Texts of all requests share passes: each request is a unit of the stages that a worker has.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import anyio
import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from core.errors import EmbqError, MalformedError
from core.service.log import Events
from embq.embedding.in_process import CallUnit, InProcess, samples_of
from embq.serving.bodies import json_response, read_body
from embq.serving.http_errors import HttpError, response_of

MOST_BODY = 8 * 2**20
MOST_TEXTS = 2_048
"""Texts of one request, as OpenAI's API has it."""
MOST_WAITING = 16_384
"""Texts of all requests that wait for one model; what is beyond is refused."""
MOST_TOGETHER = 1_024
"""Requests of which texts may share passes."""
LOOK_S = 1.0
"""Between looks whether the client of a request is still there."""

_log = Events("serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiBody:
    """Body of `/v1/embeddings`.

    Attributes:
        input: a text or several.
        model: name of a served model.
        dimensions: numbers of a vector to keep; None for all.
        user: ignored.
    """

    input: str | list[Any]
    model: str
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TeiBody:
    """Body of `/embed`.

    Attributes:
        inputs: a text or several.
        normalize: whether vectors get length 1.
        truncate: whether a text that is longer than the model reads is truncated, and not refused.
        truncation_direction, prompt_name, dimensions: as text-embeddings-inference has them.
    """

    inputs: str | list[Any]
    normalize: bool = True
    truncate: bool = False
    truncation_direction: Literal["right", "Right"] = "right"
    prompt_name: None = None
    dimensions: int | None = None


class Embeddings:
    """The endpoints of some loaded models; see `embq.serving.app.Site`.

    Args:
        models: name -> model of texts. Requests of `/embed`, which name none, are for the first.
    """

    def __init__(self, models: Mapping[str, InProcess]) -> None:
        self._models = dict(models)
        self._waiting = dict.fromkeys(models, 0)
        self.routes = [
            Route("/v1/embeddings", _answering(self.openai, _openai_error), methods=["POST"]),
            Route("/v1/models", _answering(self.list_models, _openai_error), methods=["GET"]),
            Route("/embed", _answering(self.tei, _tei_error), methods=["POST"]),
        ]

    def start(self) -> None:
        """Nothing: the models are loaded."""

    def stop(self) -> None:
        """End their threads."""
        for model in self._models.values():
            model.close()

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models."""
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "embq"} for name in self._models]
        return json_response({"object": "list", "data": models})

    async def openai(self, request: Request) -> Response:
        """POST /v1/embeddings. A text that is longer than the model reads is truncated, as in a run."""
        body = _parsed(OpenAiBody, await read_body(request, MOST_BODY, "send fewer texts together"))
        if body.model not in self._models:
            raise HttpError(
                f"there is no model {body.model[:100]!r} here",
                code="model_not_found",
                next_step=f"use one of: {', '.join(self._models)}",
                status=404,
            )
        unit, dim = await self._embedded(request, body.model, _texts(body.input))
        return await anyio.to_thread.run_sync(partial(_openai_answer, body, unit, dim))

    async def tei(self, request: Request) -> Response:
        """POST /embed."""
        body = _parsed(TeiBody, await read_body(request, MOST_BODY, "send fewer texts together"))
        unit, dim = await self._embedded(request, next(iter(self._models)), _texts(body.inputs))
        if unit.truncated and not body.truncate:
            raise HttpError(
                f"{unit.truncated} of {len(unit.wanted)} inputs are longer than the model reads",
                code="too_long",
                next_step='send "truncate": true, or shorter texts',
                status=413,
            )
        return await anyio.to_thread.run_sync(partial(_tei_answer, body, unit, dim))

    async def _embedded(self, request: Request, name: str, texts: Sequence[str]) -> tuple[CallUnit, int]:
        """The finished unit of some texts, and the length of a vector. Raises HttpError where one has none."""
        if self._waiting[name] + len(texts) > MOST_WAITING:
            raise HttpError(
                f"{self._waiting[name]:,} texts are waiting for {name}",
                code="overloaded",
                next_step="ask again in a while",
                status=503,
                retry_after_s=1,
            )
        self._waiting[name] += len(texts)
        try:
            unit = await _finished(request, self._models[name], texts)
        finally:
            self._waiting[name] -= len(texts)
        if unit.failures:
            first = min(unit.failures, key=lambda failure: failure.ordinal or 0)
            raise HttpError(f"input {first.ordinal} cannot be embedded: {first.message}", code=first.code)
        return unit, self._models[name].embedder.dims["text"]


async def _finished(request: Request, model: InProcess, texts: Sequence[str]) -> CallUnit:
    """The unit of a request when all of it is done; raises ClientDisconnect where nobody waits for it any more."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[CallUnit] = loop.create_future()

    def done(unit: CallUnit) -> None:
        loop.call_soon_threadsafe(_set, future, unit)

    unit = await anyio.to_thread.run_sync(model.submit, [*samples_of(texts)], done)
    try:
        while not (await asyncio.wait([future], timeout=LOOK_S))[0]:
            model.check()
            if await request.is_disconnected():
                raise ClientDisconnect
        return future.result()
    finally:
        unit.lost = unit.lost or not future.done()


def _set(future: asyncio.Future[CallUnit], unit: CallUnit) -> None:
    if not future.done():
        future.set_result(unit)


def _parsed(form: type[Any], data: bytes) -> Any:
    try:
        return msgspec.json.decode(data, type=form, strict=True) if _known(form, data) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MalformedError) as error:
        raise HttpError(f"the body cannot be read: {error}", code="bad_request") from error


def _known(form: type[Any], data: bytes) -> bool:
    """True; raises HttpError for a field that the form does not have."""
    known = set(form.__dataclass_fields__)
    fields = msgspec.json.decode(data, type=dict[str, Any])
    if unknown := [name for name in fields if name not in known]:
        raise HttpError(
            f"there is no field {unknown[0][:40]!r}",
            code="bad_request",
            next_step=f"send only {', '.join(sorted(known))}",
        )
    return True


def _texts(given: str | list[Any]) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not texts or len(texts) > MOST_TEXTS:
        raise HttpError(
            f"the request has {len(texts):,} texts",
            code="too_many" if texts else "bad_request",
            next_step=f"send 1 to {MOST_TEXTS:,} together",
            status=413 if texts else 400,
        )
    if not all(isinstance(text, str) for text in texts):
        raise HttpError(
            "the input holds numbers or lists where texts are expected",
            code="bad_request",
            next_step="send texts: token ids are of one tokeniser, and this model has its own; in LangChain's "
            "OpenAIEmbeddings set check_embedding_ctx_length=False",
        )
    return texts


def _kept(unit: CallUnit, dim: int, dimensions: int | None) -> np.ndarray:
    """Vectors in the order of the texts, float32 (n, dimensions): cut ones of length 1, as with `--truncate-dim`."""
    vectors, ordinals = unit.vectors_of("text", dim)
    ordered = np.empty_like(vectors)
    ordered[ordinals] = vectors
    if dimensions is None:
        return ordered
    if not 1 <= dimensions <= dim:
        raise HttpError(
            f"dimensions is {dimensions}", code="bad_request", next_step=f"the model gives 1 to {dim}: leave it out"
        )
    return _of_length_1(ordered[:, :dimensions])


def _of_length_1(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: np.ndarray = vectors / np.maximum(lengths, np.float32(1e-12))
    return scaled


def _openai_answer(body: OpenAiBody, unit: CallUnit, dim: int) -> Response:
    vectors = _kept(unit, dim, body.dimensions)
    as_text = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": number,
            "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_text else vector.tolist(),
        }
        for number, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": unit.tokens, "total_tokens": unit.tokens}
    return json_response({"object": "list", "data": data, "model": body.model, "usage": usage})


def _tei_answer(body: TeiBody, unit: CallUnit, dim: int) -> Response:
    vectors = _kept(unit, dim, body.dimensions)
    return json_response((_of_length_1(vectors) if body.normalize else vectors).tolist())


# --- errors in the forms of both ---

Endpoint = Callable[[Request], Awaitable[Response]]


def _answering(endpoint: Endpoint, form: Callable[[dict[str, str], int], object]) -> Endpoint:
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            return Response(status_code=400)  # not read by anyone
        except EmbqError as error:
            told = error
        except Exception:  # noqa: BLE001 - the boundary to the client
            _log.bug("bug", route=request.url.path)
            told = EmbqError("embq has a bug; its log holds the details", next_step="report it with those lines")
        body, status, headers = response_of(told)
        return json_response(form(body, status), status, headers)

    return answer


def _message(body: dict[str, str]) -> str:
    return f"{body['message']}; {body['next']}" if body["next"] else body["message"]


def _openai_error(body: dict[str, str], status: int) -> object:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": _message(body), "type": kind, "param": None, "code": body["code"]}}


def _tei_error(body: dict[str, str], status: int) -> object:
    kind = {413: "Validation", 503: "Overloaded"}.get(status, "Validation" if status < 500 else "Backend")
    return {"error": _message(body), "error_type": kind}
