"""embq: queue-based embedding of images and texts on any number of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from embq.indexing.autofaiss import build_index

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

    from embq.searching.query import Result

__version__ = "0.1.0"

__all__ = ["__version__", "build_index", "search"]


def search(
    index: str | PathLike[str],
    text: str | None = None,
    *,
    image: bytes | str | PathLike[str] | None = None,
    vector: Any = None,
    id: int | None = None,
    like: Iterable[int] = (),
    unlike: Iterable[int] = (),
    where: Iterable[Any] = (),
    k: int = 10,
    offset: int = 0,
    name: str | None = None,
    embedding: str | None = None,
    nprobe: int | None = None,
    refine: bool | None = None,
    prompt: str | None = None,
    prompt_text: str | None = None,
    model: str | None = None,
) -> list[Result]:
    """The k rows of an index that are nearest to a text, an image, a vector or another row, best first.

    Args:
        index: folder of an index, of one of its versions, the output folder of a run, the s3:// or gs:// URL of an
            index, or the URL of an `embq serve`.
        image: an encoded image, or the path of its file.
        vector: numbers of shape (d,), as an array or a list, or the path of a .npy or JSON file.
        id: of a row, which is excluded from its own results.
        like, unlike: ids of rows towards which the query is moved, and away from which; they are excluded from the
            results.
        where: conditions that all results satisfy: texts as `embq search --where` takes them, or (column, operator,
            value). Operators are = != < <= > >= contains in.
        offset: results to skip, for the next page.
        name: which index of a server, where it serves several.
        embedding: which of the vectors of a run, where several are indexed.
        nprobe: inverted lists to search; None for the tuned number.
        refine: False skips re-ranking by full vectors.
        prompt, prompt_text: the prompt before the text: its name in the model, or the prompt itself.
        model: spec of the model, where it is not where the run had it; it must be the same model.

    One of text, image, vector and id is given, or none where `like` is. Raises `core.errors.EmbqError` with a code and
    a next step.
    """
    # Here, because `import embq` must stay light.
    from pathlib import Path

    from core.errors import UsageError
    from embq.searching.query import Query, path_of
    from embq.searching.remote import is_server, search_remote
    from indexer.filter.condition import read_conditions

    query = Query(
        text=text,
        image=image if isinstance(image, bytes) else path_of(image),
        vector=path_of(vector) or vector,
        id=id,
        like=tuple(like),
        unlike=tuple(unlike),
        where=read_conditions(where),
        k=k,
        offset=offset,
        nprobe=nprobe,
        refine=refine,
        prompt=prompt,
        prompt_text=prompt_text,
        model=model,
    )
    if is_server(index):
        return search_remote(str(index), query, name=name, output=embedding).results
    if name is not None:
        raise UsageError(
            "`name` selects an index of a server, and `index` is a folder",
            next_step="give the URL of the server as `index`",
        )
    from embq.searching.local import search_local

    return search_local(index if isinstance(index, str) else Path(index), query, output=embedding).results
