"""embq in LlamaIndex: `EmbqRetriever` over an index, `EmbqEmbedding` over a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embq.app.embedding.model import Model
from embq.core.extras import missing
from embq.integrations.retrieval import Retrieval, fields_of, text_of

try:
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.embeddings import BaseEmbedding
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
except ModuleNotFoundError as error:
    raise missing("llama_index") from error


class EmbqEmbedding(BaseEmbedding):
    """Vectors of a model in this process.

    Args:
        model: spec as of `embq run --model`, or an `embq.Model`.
        options: those of LlamaIndex' `BaseEmbedding`.
    """

    _model: Model = PrivateAttr()

    def __init__(self, model: str | Model, **options: Any) -> None:
        loaded = Model(model) if isinstance(model, str) else model
        super().__init__(model_name=str(loaded.spec), **options)
        self._model = loaded

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._model.encode_document(texts).tolist()
        return vectors

    def _get_query_embedding(self, query: str) -> list[float]:
        vector: list[float] = self._model.encode_query(query).tolist()
        return vector

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


class EmbqRetriever(BaseRetriever):
    """The nearest rows of an index as nodes: caption as the text, id, key, score, source and columns as metadata.

    Args:
        index, embedding: as `embq.integrations.retrieval.Retrieval` takes them.
        similarity_top_k: nodes of a query.
        where: conditions that all nodes satisfy, as `embq.search` takes them.
    """

    def __init__(
        self,
        index: str,
        *,
        similarity_top_k: int = 2,
        where: Sequence[Any] = (),
        vector_name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._retrieval = Retrieval(index, vector_name)
        self._k, self._where = similarity_top_k, where

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        results = self._retrieval.search(query_bundle.query_str, self._k, self._where)
        return [
            NodeWithScore(node=TextNode(id_=str(hit.id), text=text_of(hit), metadata=fields_of(hit)), score=hit.score)
            for hit in results
        ]
