"""`/v1/embeddings` and `/v1/models` of OpenAI's API, and `/embed` and `/info` of text-embeddings-inference.

Fields, answers and errors are those of https://platform.openai.com/docs/api-reference/embeddings and
https://huggingface.github.io/text-embeddings-inference, so that their clients work. A field that would change the
vectors and is not known here is an error.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import anyio
import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from embq.app.services.http_server import MOST_IN_FLIGHT
from embq.core.errors import DeviceError, EmbqError, InputError
from embq.core.process.libraries import version_of
from embq.core.rows.spec import RowSpec
from embq.core.rows.vectors import stored
from embq.retrieval.searching.query import Whole, json_field, json_object
from embq.retrieval.serving.app import Serving, answering, json_body
from embq.retrieval.serving.embeddings.loading import Loaded
from embq.retrieval.serving.embeddings.model import Job, ServedModel
from embq.retrieval.serving.http_errors import HttpError
from embq.retrieval.serving.middleware import client_of
from embq.retrieval.serving.unread_answers import CountedResponse, require_read

MOST_BODY = 4 * 2**20
"""Bytes of a body. The longest texts that models read, MOST_TEXTS of 512 tokens, are about as many."""

MAX_VALUES = 2_000_000
"""Values in a body: `MOST_BODY` of token ids are fewer."""

SMALLER = "send fewer texts in one request"

MOST_TEXTS = 2_048
"""Texts of one request, as OpenAI's API has it."""

ENCODED_HERE = 64 * 1024
"""Numbers of an answer that are encoded without a change of threads."""

Texts = str | list[str | int | list[int]]
"""OpenAI's API takes token ids of its own models, too, of one text or of several."""

OPENAI_BODY, TEI_BODY = '{"model": "NAME", "input": "a red car"}', '{"inputs": "a red car"}'
"""Examples of bodies, for errors."""

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}
"""Precision -> its name in text-embeddings-inference."""

Detokenizer = Callable[[Sequence[int]], str]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A parsed body.

    Attributes:
        rows: form of the vectors, in float32.
        must_fit: whether a text longer than the model reads is an error; else its beginning is embedded.
        base64: vectors as little-endian float32 in base64, as OpenAI's client asks for; else as lists of numbers.
        prompt_name, cut: as of `embq.worker.embedders.base.VariedEmbedder`.
    """

    model: ServedModel
    texts: Sequence[str]
    rows: RowSpec
    must_fit: bool = False
    base64: bool = False
    prompt_name: str = ""
    cut: str = ""


class EmbeddingApi:
    """The endpoints that embed.

    Args:
        detokenizer: returns the text of token ids; None refuses them.

    Attributes:
        routes: of the endpoints.
        broken: why the server stops by itself; None while it does not.
    """

    def __init__(self, loaded: Sequence[Loaded], detokenizer: Detokenizer | None = None) -> None:
        self._loaded, self._detokenizer = loaded, detokenizer
        self._models: dict[str, ServedModel] = {}
        self._since = int(time.time())
        self.broken: DeviceError | None = None
        self.routes: list[BaseRoute] = [
            Route("/v1/embeddings", answering(self.embeddings), methods=["POST"]),
            Route("/v1/models", answering(self.models), methods=["GET"]),
            Route("/v1/models/{name:path}", answering(self.model), methods=["GET"]),
            Route("/embed", answering(self.embed), methods=["POST"]),
            Route("/", answering(self.embed), methods=["POST"]),
            Route("/info", answering(self.info), methods=["GET"]),
        ]

    def measured_by(self, serving: Serving) -> EmbeddingApi:
        """The same with the metrics of a server; called once, before `start`."""
        for loaded in self._loaded:
            self._models[loaded.name] = ServedModel(loaded, serving.metrics, self._stop_server)
        return self

    def start(self) -> None:
        """Start the threads of the models."""
        for model in self._models.values():
            model.start()

    def stop(self) -> None:
        """End them."""
        for model in self._models.values():
            model.stop()

    async def models(self, request: Request) -> Response:
        """The served models, in OpenAI's form."""
        return _answer({"object": "list", "data": [self._described(name) for name in self._models]})

    async def model(self, request: Request) -> Response:
        """One of them."""
        return _answer(self._described(self._named(request.path_params["name"]).name))

    async def info(self, request: Request) -> Response:
        """The first model, or that of `?model=`, in the form of text-embeddings-inference."""
        model = self._named(request.query_params.get("model", ""))
        about = {"model_id": model.name, "model_sha": None, "model_dtype": DTYPES[model.precision]}
        limits = {"max_concurrent_requests": MOST_IN_FLIGHT, "max_client_batch_size": MOST_TEXTS, **model.limits}
        return _answer(
            {**about, "model_type": {"embedding": {}}, **limits, "auto_truncate": True, "version": version_of("embq")}
        )

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._since, "owned_by": "embq"}

    async def embeddings(self, request: Request) -> Response:
        """Vectors of texts, in OpenAI's form."""
        body_json = await json_body(request, MOST_BODY, example=OPENAI_BODY, smaller=SMALLER, max_values=MAX_VALUES)
        parsed = self._openai(json_object(body_json, OPENAI_BODY))
        job, vectors = await _embedded(request, parsed)

        def body() -> dict[str, Any]:
            data = [
                {"object": "embedding", "index": place, "embedding": vector}
                for place, vector in enumerate(_in_base64(vectors) if parsed.base64 else vectors.tolist())
            ]
            usage = {"prompt_tokens": job.tokens, "total_tokens": job.tokens}
            return {"object": "list", "data": data, "model": parsed.model.name, "usage": usage}

        return await _encoded(body, vectors, job)

    async def embed(self, request: Request) -> Response:
        """Vectors of texts, in the form of text-embeddings-inference."""
        body = await json_body(request, MOST_BODY, example=TEI_BODY, smaller=SMALLER, max_values=MAX_VALUES)
        job, vectors = await _embedded(request, self._tei(json_object(body, TEI_BODY)))
        return await _encoded(vectors.tolist, vectors, job)

    def _openai(self, fields: Mapping[str, Any]) -> Wanted:
        _check_names(fields, ("input", "model", "encoding_format", "dimensions", "user"))
        model = self._named(_field(fields, "model", str, ""))
        return Wanted(
            model=model,
            texts=_texts(fields, "input", self._detokenizer),
            rows=RowSpec(dtype="float32", truncate_dim=_dimensions(fields, model)),
            base64=_field(fields, "encoding_format", Literal["float", "base64"], "float") == "base64",
        )

    def _tei(self, fields: Mapping[str, Any]) -> Wanted:
        optional = ("normalize", "truncate", "truncation_direction", "prompt_name", "dimensions", "model")
        _check_names(fields, ("inputs", *optional))
        model = self._named(_field(fields, "model", str, ""))
        normalize: bool = _field(fields, "normalize", bool, True)
        if not normalize and model.spec.may_normalize:
            raise HttpError(
                f"{model.name} normalizes its vectors by itself",
                next_step="start the server with ?normalize=false behind the model's spec",
                param="normalize",
            )
        return Wanted(
            model=model,
            texts=_texts(fields, "inputs", self._detokenizer),
            rows=RowSpec(
                dtype="float32", truncate_dim=_dimensions(fields, model), normalize=True if normalize else None
            ),
            must_fit=not _field(fields, "truncate", bool, True),
            prompt_name=_field(fields, "prompt_name", str, ""),
            cut=_field(fields, "truncation_direction", Literal["left", "right", "Left", "Right"], "").lower(),
        )

    def _named(self, name: str) -> ServedModel:
        """The model of a name; of none the first."""
        model = self._models.get(name) if name else next(iter(self._models.values()))
        if model is None:
            raise HttpError(
                f"there is no model {name[:100]!r} here",
                next_step=f"name one of {', '.join(self._models)}",
                code="model_not_found",
                status=404,
                param="model",
            )
        return model

    def _stop_server(self, error: DeviceError) -> None:
        self.broken = error
        os.kill(os.getpid(), signal.SIGTERM)


def _field(fields: Mapping[str, Any], name: str, kind: type[T] | Any, default: T) -> Any:
    try:
        return json_field(fields, name, kind, default)
    except InputError as error:
        raise HttpError(error.message, next_step=error.next_step, code=error.code, param=name) from error


def _check_names(fields: Mapping[str, Any], allowed: Sequence[str]) -> None:
    if unknown := [name for name, value in fields.items() if name not in allowed and value is not None]:
        name = unknown[0][:40]
        raise HttpError(f"there is no field {name!r}", next_step=f"send only {', '.join(allowed)}", param=name)


def _dimensions(fields: Mapping[str, Any], model: ServedModel) -> int:
    """Numbers of a vector that are asked for; 0 for all."""
    dimensions: int = _field(fields, "dimensions", Whole, 0)
    if dimensions > model.dim:
        raise HttpError(
            f"dimensions is {dimensions:,}: the vectors of {model.name} have {model.dim:,} numbers",
            next_step=f"ask for {model.dim:,} or fewer, or leave it out",
            code="wrong_dimension",
            param="dimensions",
        )
    return dimensions


def _texts(fields: Mapping[str, Any], name: str, detokenizer: Detokenizer | None) -> list[str]:
    given = _field(fields, name, Texts, [])
    texts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not texts:
        raise HttpError(f"{name} has no text", next_step="send a text, or a list of texts", param=name)
    if len(texts) > MOST_TEXTS:
        raise HttpError(
            f"{name} has {len(texts):,} texts; {MOST_TEXTS:,} are the most",
            code="too_many",
            next_step="send several requests",
            status=413,
            param=name,
        )
    if all(isinstance(text, str) for text in texts):
        return texts
    if detokenizer is None:
        raise HttpError(
            f"{name} holds token ids; each model has its own, and here texts are taken only",
            next_step="send the texts, with LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False); or start "
            "the server with --token-ids cl100k_base, the tokenizer of OpenAI's models",
            code="token_ids",
            param=name,
        )
    try:
        return [text if isinstance(text, str) else detokenizer(text) for text in texts]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise HttpError(
            f"{name} holds what is neither a text nor ids of the tokenizer: {error}",
            next_step="send texts, or ids of the tokenizer that --token-ids names",
            code="token_ids",
            param=name,
        ) from error


async def _embedded(request: Request, parsed: Wanted) -> tuple[Job, np.ndarray]:
    """The finished job of a request, and its vectors, float32 of shape (texts, dim), in the form that is wanted.

    Raises ClientDisconnect when the client leaves; what has not been embedded is dropped then.
    """
    require_read(request)
    job = parsed.model.submit(parsed.texts, client_of(request.scope), prompt_name=parsed.prompt_name, cut=parsed.cut)
    result = asyncio.wrap_future(job.future)
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((result, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientDisconnect
    finally:
        leaving.cancel()
        result.cancel()
    if parsed.must_fit and job.truncated:
        raise HttpError(
            f"{job.truncated} of {len(parsed.texts)} texts are longer than {parsed.model.name} reads",
            next_step='send shorter ones, or {"truncate": true}',
            code="too_long",
            status=413,
        )
    vectors, faults = stored(result.result(), parsed.rows)
    for place, fault in faults.items():
        raise EmbqError(f"text {place}: {fault.message}", code=fault.code)
    return job, vectors


def _in_base64(vectors: np.ndarray) -> list[str]:
    return [base64.b64encode(row.tobytes()).decode() for row in vectors.astype("<f4", copy=False)]


async def _encoded(body: Callable[[], object], vectors: np.ndarray, job: Job) -> Response:
    headers = {"X-Embq-Truncated": str(job.truncated)} if job.truncated else {}
    if vectors.size <= ENCODED_HERE:
        return _answer(body(), headers)
    return await anyio.to_thread.run_sync(lambda: _answer(body(), headers))


def _answer(content: object, headers: Mapping[str, str] | None = None) -> Response:
    # Many numbers, which msgspec writes ten times faster than json.
    data = msgspec.json.encode(content)
    headers = {"Cache-Control": "no-store", **(headers or {})}
    return CountedResponse(data, headers=headers, media_type="application/json")
