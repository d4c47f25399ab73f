"""embq: queue-based embedding of images and texts on any number of GPUs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from os import PathLike
    from pathlib import Path
    from typing import Unpack

    import numpy as np

    from embq.app.embedding.model import Device, Model
    from embq.app.embedding.options import AddOptions, EnqueueOptions, IndexOptions, RunOptions
    from embq.app.embedding.runs import Inputs, Run
    from embq.app.output.output import Output
    from embq.core.errors import (
        BrokerError,
        ConfigError,
        DeviceError,
        EmbqError,
        InputError,
        ModelError,
        OutputError,
        SampleError,
        SourceError,
        TryLaterError,
        UsageError,
    )
    from embq.retrieval.open_index import BatchOptions, Index, SearchOptions
    from embq.retrieval.searching.query import Result

if sys.flags.safe_path:  # so are all processes that embq starts: they take nothing from the current folder
    from embq.core.process.current_folder import leave_out_current_folder

    leave_out_current_folder()

__version__ = "0.1.0"

__all__ = [
    "BrokerError",
    "ConfigError",
    "DeviceError",
    "EmbqError",
    "Index",
    "InputError",
    "Model",
    "ModelError",
    "OutputError",
    "SampleError",
    "SourceError",
    "TryLaterError",
    "UsageError",
    "__version__",
    "add_to_index",
    "build_index",
    "embed",
    "enqueue",
    "run",
    "search",
]

_LATER = {
    "Index": "embq.retrieval.open_index",
    "Model": "embq.app.embedding.model",
    **{name: "embq.core.errors" for name in __all__ if name.endswith("Error")},
}
"""Name -> the module that has it, imported when the name is first used: `import embq` must stay light."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'embq' has no attribute {name!r}")
    from importlib import import_module

    with _importing("embed" if name == "Model" else "search"):
        return getattr(import_module(_LATER[name]), name)


def _importing(verb: str) -> AbstractContextManager[None]:
    """Raise an error with its next step, which is a ModuleNotFoundError as well, where an extra is not installed."""
    from embq.core.extras import importing

    return importing(verb)


def _errors() -> AbstractContextManager[None]:
    """Have errors name parameters where those of the command line name options."""
    from embq.core.arguments import python_errors

    return python_errors()


def __dir__() -> list[str]:
    return [*__all__, "open"]  # which `from embq import *` leaves out: it is a builtin


T = TypeVar("T")


@overload
def embed(
    data: Sequence[Any] | Iterator[Any],
    model: str | Model,
    *,
    precision: str = ...,
    device: Device | Sequence[Device] = ...,
    on_error: Literal["raise", "null"] = ...,
    progress: bool | None = ...,
) -> np.ndarray: ...


@overload
def embed(
    data: T,
    model: str | Model,
    *,
    text_column: str | None = ...,
    image_column: str | None = ...,
    output_column: str = ...,
    precision: str = ...,
    device: Device | Sequence[Device] = ...,
    on_error: Literal["raise", "null"] = ...,
    progress: bool | None = ...,
) -> T: ...


def embed(
    data: Any,
    model: str | Model,
    *,
    text_column: str | None = None,
    image_column: str | None = None,
    output_column: str = "embedding",
    precision: str = "auto",
    device: Device | Sequence[Device] = "auto",
    on_error: Literal["raise", "null"] = "raise",
    progress: bool | None = None,
) -> Any:
    """Vectors of texts or images, with the numbers of `embq run`.

    Args:
        data: a list or an iterator of texts (str, or dicts with one under "text"), or of images (`pathlib.Path`,
            encoded bytes, PIL images); or a table: a DataFrame of pandas or polars, a `pyarrow.Table`, a
            `datasets.Dataset`, a dict of columns.
        model: spec as of `embq run --model`, or an `embq.Model`, which is loaded once for several calls.
        text_column, image_column: which of the table's; images in it are paths or encoded bytes.
        output_column: name of the new column.
        precision: as `--precision`.
        device: "auto" embeds in this process, on the first GPU or the CPU; "cpu", "cuda:1" there; "all" by a worker
            process on each device of this machine, as does a list such as "cuda:0,cuda:1". A number is that of a GPU,
            a `torch.device` the same device, None "auto".
        on_error: "raise", or "null" for NaN in an array and null in a column where an item has no vector.
        progress: None shows a bar for much input, in a terminal or a notebook.

    Returns float32 of shape (n, dim) in the order given; of a table, the table with a column of vectors.

    Raises `EmbqError` with a code and a next step: `not_embedded` where items have no vector.
    """
    with _importing("embed"):
        from embq.app.embedding.embed import embed

    return embed(
        data,
        model,
        text_column=text_column,
        image_column=image_column,
        output_column=output_column,
        precision=precision,
        device=device,
        on_error=on_error,
        progress=progress,
    )


def run(inputs: Inputs, output: str | PathLike[str], *, model: str | list[str], **options: Unpack[RunOptions]) -> Run:
    """Start `embq run` in a process of its own, and give a handle on it.

    Args:
        inputs: as on the command line; one or several.
        output: folder or s3:// URL.
        options: those of `embq run` with underscores, such as `chunk_tokens=256`, `similarity=True`.

    Returns an `embq.app.embedding.runs.Run`: `.progress()`, `.wait()`, `.cancel()`, `.stop()`. The run stops, and can
    be gone on with, where this program ends. Raises UsageError for an option that there is not; other errors of the run
    are raised by its handle.
    """
    from embq.app.embedding.runs import run

    return run(inputs, output, model=model, **options)


def enqueue(
    inputs: Inputs, output: str | PathLike[str], *, model: str | list[str], **options: Unpack[EnqueueOptions]
) -> Run:
    """Plan a run and hand it to resident workers, as `embq enqueue`; arguments as of `embq.run`.

    Returns when it is handed over. Raises what `embq enqueue` ends with.
    """
    from embq.app.embedding.runs import enqueue

    return enqueue(inputs, output, model=model, **options)


def open(path: str | PathLike[str]) -> Output:
    """The results of a run: as tables, arrays, tensors and searches; see `embq.app.output.output.Output`.

    Args:
        path: output folder, or its s3:// or gs:// URL.
    """
    with _importing("export"):
        from embq.app.output.output import open_output

    return open_output(path)


def build_index(
    source: str | PathLike[str] | Sequence[str | PathLike[str]],
    output: str | PathLike[str] | None = None,
    *,
    recall: float | str = 0.95,
    **options: Unpack[IndexOptions],
) -> Index:
    """Build an index as `embq index build` does, in this process; one of the same rows and options is kept.

    Args:
        source: output folder of a run, or a folder of vectors; several of one kind become one index, with `output`.
        output: folder of the index; None for that of the run.
        recall: that searches must reach: R of the best 10, or "R@K".
        options: those of `embq index build` with underscores, such as `metric_type="l2"`, `vector_name="text"`.

    Returns the index, open. Raises what `embq index build` ends with. `embq.compat.autofaiss.build_index` has the
    signature of autofaiss.
    """
    with _importing("index"):
        from embq.core.arguments import path_text, path_texts
        from embq.index.commands.build import index_of
        from embq.retrieval.open_index import Index

    with _errors():
        given = {**options, "recall": recall if isinstance(recall, str) else f"{recall}@10"}
        folder = None if output is None else path_text("output", output)
        return Index(str(index_of(path_texts("source", source), folder, given)))


def add_to_index(
    source: str | PathLike[str] | Sequence[str | PathLike[str]],
    output: str | PathLike[str] | None = None,
    **options: Unpack[AddOptions],
) -> Index:
    """Add the rows of `source` that its index lacks, without training again, as `embq index add` does.

    Args:
        source, output: as of `build_index`; or the folder of the index alone, for rows of what it was built from.
        options: those of `embq index add` with underscores, such as `drop_invalid=True`.

    Returns the index, open. Raises what `embq index add` ends with.
    """
    with _importing("index"):
        from embq.core.arguments import path_text, path_texts
        from embq.index.commands.changes import added_to
        from embq.retrieval.open_index import Index

    with _errors():
        folder = None if output is None else path_text("output", output)
        return Index(added_to(path_texts("source", source), folder, options))


@overload
def search(
    index: str | PathLike[str],
    text: str | bytes | Path | None = ...,
    *,
    k: int = ...,
    name: str | None = ...,
    vector_name: str | None = ...,
    **options: Unpack[SearchOptions],
) -> list[Result]: ...


@overload
def search(
    index: str | PathLike[str],
    text: Sequence[Any],
    *,
    k: int = ...,
    name: str | None = ...,
    vector_name: str | None = ...,
    **options: Unpack[BatchOptions],
) -> list[list[Result]]: ...


@overload
def search(
    index: str | PathLike[str],
    text: np.ndarray,
    *,
    k: int = ...,
    name: str | None = ...,
    vector_name: str | None = ...,
    **options: Unpack[BatchOptions],
) -> Any: ...


def search(
    index: str | PathLike[str],
    text: Any = None,
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
    vector_name: str | None = None,
    nprobe: int | None = None,
    refine: bool | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    model: str | None = None,
) -> Any:
    """The k rows of an index that are nearest to a text, an image, a vector or another row, best first.

    Args:
        index: folder of an index, of one of its versions, the output folder of a run, what `embq.open` returns, the
            s3:// or gs:// URL of an index, or the URL of an `embq serve`.
        text: the query; or a list of texts, which gives a list of such lists. It may be an image (`pathlib.Path`,
            encoded bytes) or a vector as well, as `embq.Index.search` takes them.
        image: an encoded image, or the path of its file.
        vector: numbers of shape (d,), as an array or a list, or the path of a .npy or JSON file.
        id: of a row, which is excluded from its own results.
        like, unlike: ids of rows towards which the query is moved, and away from which; they are excluded from the
            results.
        where: conditions that all results satisfy: texts as `embq search --where` takes them, or (column, operator,
            value). Operators are = != < <= > >= contains in.
        offset: results to skip, for the next page.
        name: which index of a server, if it serves several.
        vector_name: which of the vectors of a run, where several are indexed.
        nprobe: inverted lists to search; None for the tuned number.
        refine: False skips re-ranking by full vectors.
        prompt_name, prompt: the prompt before the text: its name in the model, or the prompt itself.
        model: spec of the model, if it is not where the run had it; it must be the same model.

    One of text, image, vector and id is given, or none where `like` is. Raises `embq.core.errors.EmbqError` with a code
    and a next step.
    """
    from embq.core.arguments import check, path_text
    from embq.core.errors import UsageError
    from embq.retrieval.searching.query import Query, split
    from embq.retrieval.searching.remote import is_server, search_remote

    with _errors():
        at = path_text("index", index)
        check(name=name, vector_name=vector_name)
        base = Query.given(
            image=image,
            vector=vector,
            id=id,
            like=like,
            unlike=unlike,
            where=where,
            k=k,
            offset=offset,
            nprobe=nprobe,
            refine=refine,
            prompt_name=prompt_name,
            prompt=prompt,
            model=model,
        )
        items, is_single = ([], True) if text is None else split(text)
        queries = [base] if text is None else [base.of(item) for item in items]
        if is_server(at):
            answers = [search_remote(at, query, name=name, output=vector_name).results for query in queries]
        elif name is not None:
            raise UsageError(
                "`name` selects an index of a server, and `index` is a folder",
                next_step="give the URL of the server as `index`",
            )
        else:
            with _importing("search"):
                from embq.retrieval.searching.local import OpenIndex

            loaded = [query.loaded() for query in queries]
            with OpenIndex(at, vector_name) as opened:
                answers = opened.answers(loaded)
        return answers[0] if is_single else answers
