"""embq in LangChain: `EmbqRetriever` over an index, `EmbqEmbeddings` over a model."""

from __future__ import annotations

from typing import Any

from embq.app.embedding.model import Model
from embq.core.extras import missing
from embq.integrations.retrieval import Retrieval, fields_of, text_of

try:
    from langchain_core.callbacks import CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever
    from pydantic import PrivateAttr
except ModuleNotFoundError as error:
    raise missing("langchain_core") from error


class EmbqEmbeddings(Embeddings):
    """Vectors of a model in this process.

    Args:
        model: spec as of `embq run --model`, or an `embq.Model`.
        options: those of `embq.Model`, such as `device`.
    """

    def __init__(self, model: str | Model, **options: Any) -> None:
        self.model = Model(model, **options) if isinstance(model, str) else model

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """A vector per text, with the model's prompt for documents if it has one."""
        vectors: list[list[float]] = self.model.encode_document(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """A vector, with the model's prompt for queries if it has one."""
        vector: list[float] = self.model.encode_query(text).tolist()
        return vector


class EmbqRetriever(BaseRetriever):
    """The nearest rows of an index as documents: caption as the text, id, key, score, source and columns as metadata.

    Attributes:
        index: as `embq.integrations.retrieval.Retrieval` takes it.
        k: documents of a query.
        where: conditions that all documents satisfy, as `embq.search` takes them.
        vector_name: which of the vectors of a run, if several are indexed.
    """

    index: str
    k: int = 4
    where: list[Any] = []  # noqa: RUF012 - pydantic copies it
    vector_name: str | None = None
    _retrieval: Retrieval = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Keep the index open between queries."""
        self._retrieval = Retrieval(self.index, self.vector_name)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        results = self._retrieval.search(query, self.k, self.where)
        return [Document(id=str(hit.id), page_content=text_of(hit), metadata=fields_of(hit)) for hit in results]
