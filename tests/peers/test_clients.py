"""Clients of embedding servers against `embq serve --embeddings`: each gives the vectors of the served model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import embq
from tests.e2e.served import served

TEXTS = ["a red car on a road", "the sea at night", "bread " * 300, "ein Bär", "naïve ☃"]
MODEL = "text-embedding-3-small"
"""The name of a model of OpenAI: LlamaIndex refuses others."""
Embeds = Callable[[list[str]], Any]

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("--embeddings", f"{MODEL}=minilm", "--device", "cpu") as server:
        yield server.url


@pytest.fixture(scope="module")
def expected() -> Iterator[np.ndarray]:
    model = embq.Model("minilm", device="cpu")
    yield model.encode(TEXTS)
    model.close()


def _openai(url: str) -> dict[str, Embeds]:
    from openai import AsyncOpenAI, OpenAI

    def asked(texts: list[str], **options: Any) -> list[list[float]]:
        with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            return [one.embedding for one in client.embeddings.create(model=MODEL, input=texts, **options).data]

    async def later(texts: list[str]) -> list[list[float]]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            answers = await asyncio.gather(*(client.embeddings.create(model=MODEL, input=text) for text in texts))
        return [answer.data[0].embedding for answer in answers]

    return {
        "texts": asked,
        "numbers": lambda texts: asked(texts, encoding_format="float"),
        "base64 and all dimensions": lambda texts: asked(texts, dimensions=384, user="me"),
        "at once": lambda texts: asyncio.run(later(texts)),
    }


def _huggingface_hub(url: str) -> dict[str, Embeds]:
    from huggingface_hub import InferenceClient

    def asked(texts: list[str], **options: Any) -> Any:
        client = InferenceClient(base_url=f"{url}/embed")
        return np.concatenate([client.feature_extraction(text, **options) for text in texts])

    return {
        "feature_extraction": asked,
        "normalized and truncated": lambda texts: asked(texts, normalize=True, truncate=True),
    }


def _langchain(url: str) -> dict[str, Embeds]:
    from langchain_openai import OpenAIEmbeddings

    given: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": MODEL}
    texts_only = OpenAIEmbeddings(**given, check_embedding_ctx_length=False)
    return {
        "documents": texts_only.embed_documents,
        "a query": lambda texts: [texts_only.embed_query(text) for text in texts],
        "later": lambda texts: asyncio.run(texts_only.aembed_documents(texts)),
        "in parts": OpenAIEmbeddings(**given, check_embedding_ctx_length=False, chunk_size=2).embed_documents,
    }


def _llama_index(url: str) -> dict[str, Embeds]:
    from llama_index.embeddings.openai import OpenAIEmbedding
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding

    known = OpenAIEmbedding(api_base=f"{url}/v1", api_key="none", model=MODEL)
    like = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{url}/v1", api_key="none")
    return {
        "openai": known.get_text_embedding_batch,
        "openai_like": like.get_text_embedding_batch,
        "a query": lambda texts: [like.get_query_embedding(text) for text in texts],
        "later": lambda texts: asyncio.run(like.aget_text_embedding_batch(texts)),
    }


def _litellm(url: str) -> dict[str, Embeds]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or the import asks GitHub for prices
    import litellm

    def asked(texts: list[str], model: str = f"openai/{MODEL}", **options: Any) -> list[list[float]]:
        answer = litellm.embedding(model=model, input=texts, api_base=f"{url}/v1", api_key="none", **options)
        return [one["embedding"] for one in answer.data]

    return {
        "openai": asked,
        "hosted_vllm": lambda texts: asked(texts, f"hosted_vllm/{MODEL}"),
        "numbers": lambda texts: asked(texts, encoding_format="float"),
    }


CLIENTS = {"openai": _openai, "huggingface_hub": _huggingface_hub, "langchain": _langchain}
CLIENTS |= {"llama_index": _llama_index, "litellm": _litellm}
WAYS = [(client, way) for client, make in CLIENTS.items() for way in make("http://localhost")]


@pytest.mark.parametrize(("client", "way"), WAYS, ids=[f"{client}: {way}" for client, way in WAYS])
def test_a_client_gets_the_vectors_of_the_model(
    url: str, expected: np.ndarray, client: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Offline, huggingface_hub asks no address at all.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    found = np.array(CLIENTS[client](url)[way](TEXTS), np.float32)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-5)
