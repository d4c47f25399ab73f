"""Indexes that are files of faiss alone: what they are built of, where, and the files beside them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embq.core.errors import InputError, UsageError
from embq.core.process.limits import cores
from embq.core.storage.durable import drop, output_error, overwrite, publish, writing
from embq.index.collection.clip_retrieval import FOLDERS
from embq.index.collection.opening import Collection, open_collection
from embq.index.collection.parquet import rows_of
from embq.index.collection.parts import path_of
from embq.index.collection.remote import located
from embq.index.commands.build import built_index
from embq.index.faiss_file import FaissExport, FaissFile
from embq.index.faiss_module import faiss, set_threads
from embq.index.index_files.files import index_lock, read_json, to_json, write_by_faiss
from embq.index.plan.build_options import BuildOptions, available_memory, parse_bytes
from embq.index.plan.codec_choices import lists_for
from embq.index.plan.codecs import codec
from embq.index.stages.build import Built
from embq.index.tune.queries import plan_queries

FLAT_ROWS = 1_000_000
"""Below this autofaiss keeps full vectors if memory allows."""
COPY_ROWS = 65_536
IDS_FILE = "part-00000000.parquet"


def build_options(index_memory: str, memory: str, **options: Any) -> BuildOptions:
    """The options of a build within two sizes; UsageError if one has no meaning."""
    settings = BuildOptions(
        max_index_memory_usage=parse_bytes(index_memory),
        current_memory_available=min(parse_bytes(memory), available_memory()),
        refine="none",  # faiss alone does not re-rank
        **options,
    )
    settings.check()
    return settings


@contextmanager
def workspace(parent: Path, name: str, *, resumable: bool) -> Iterator[Path]:
    """A hidden folder for what is removed at the end.

    Args:
        resumable: the same folder each time, kept if the work is interrupted, so that the same call continues.

    Raises TryLaterError if another process is at work in it.
    """
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        folder = parent / f".{name}.embq" if resumable else Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
    with index_lock(folder):
        try:
            yield folder
        except BaseException as error:
            if not resumable or isinstance(error, InputError | UsageError):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def paths_of(embeddings: Any) -> list[str]:
    several = list(embeddings) if isinstance(embeddings, Iterable) and not isinstance(embeddings, str) else [embeddings]
    if not several or not all(isinstance(path, str) or hasattr(path, "__fspath__") for path in several):
        raise UsageError("embeddings is neither an array nor paths", next_step="give numpy.float32(vectors) or paths")
    return [str(path) for path in several]


def written(array: Any, path: Path) -> str:
    """Write an array as float32 file, some rows at a time whatever its type and order; returns the path."""
    try:
        array = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:  # of torch: on a device, or with a gradient
        raise InputError(
            f"embeddings is no array of numpy: {error}", next_step="give numpy.float32(vectors)", code="not_vectors"
        ) from error
    if array.ndim != 2 or array.dtype.kind != "f" or 0 in array.shape:
        raise InputError(
            f"embeddings is an array of {array.dtype} and shape {tuple(array.shape)}, and not one of rows of floats",
            next_step="give a matrix with a row for each vector, such as numpy.float32(vectors)",
            code="not_vectors",
        )
    header = {"descr": "<f4", "fortran_order": False, "shape": tuple(array.shape)}
    with writing(path), open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for first in range(0, len(array), COPY_ROWS):
            file.write(np.ascontiguousarray(array[first : first + COPY_ROWS], "<f4").data)
    return str(path)


def collection_of(roots: Sequence[str], file_format: str, column: str, id_columns: Sequence[str]) -> Collection:
    names = {name: output for output, name in FOLDERS.items()}
    places = [located(root) for root in roots]
    if len(roots) == 1 and (above := places[0]).name in names and (above.parent / "run.json").exists():
        return open_collection(above.parent, output=names[above.name])  # without what it has not committed
    if any((place / "run.json").exists() for place in places):
        return open_collection(*roots)  # a run says itself what its files are
    return open_collection(
        *roots,
        file_format=file_format,
        column=None if column == "embedding" else column,
        id_columns=id_columns,
    )


def settled(settings: BuildOptions, collection: Collection, *, direct_map: bool) -> BuildOptions:
    """The options for a collection, with full vectors if these are few and fit the memory beside a direct map.

    Raises UsageError if the map alone exceeds the memory.
    """
    if direct_map:
        remaining = settings.max_index_memory_usage - 8 * collection.n
        if remaining <= 0:
            raise UsageError(
                f"a direct map of {collection.n:,} rows takes {8 * collection.n:,} bytes, and max_index_memory_usage "
                f"is {settings.max_index_memory_usage:,}",
                next_step="give more memory, or leave out make_direct_map",
            )
        settings = replace(settings, max_index_memory_usage=remaining)
    # Each index that is kept has whole lists.
    nlist = max(lists_for(collection.n), min(settings.nb_indices_to_keep, collection.n))
    needed = codec("Flat", collection.dim).index_bytes(collection.n, nlist, collection.dim)
    fits = needed <= settings.max_index_memory_usage * settings.nb_indices_to_keep
    flat = f"IVF{nlist},Flat" if fits and collection.n < FLAT_ROWS else None
    return replace(settings, index_key=settings.index_key or flat)


def built(
    folder: Path, collection: Collection, settings: BuildOptions, options: Mapping[str, Any], *, quiet: bool
) -> Built:
    """Build the index in a folder of embq."""
    # Tuning reads the target from these, under the names of `embq index`.
    given = {**to_json(settings), "recall": f"{settings.recall}@{settings.recall_at}", "current_memory_available": None}
    queries = plan_queries(collection, files={}, seed=settings.seed)
    options = {**options, "workers": 1, "overwrite": False}
    # Inner products, also of vectors of length 1: callers sort by what faiss returns.
    return built_index(folder, collection, settings, given, queries, options, unit_length=False, quiet=quiet)


def infos_of(built: Built, file: FaissFile, *, saved: bool) -> dict[str, Any]:
    """The report of an index as that of one of its files."""
    infos = read_json(built.version.path / "infos.json")
    size = file.path.stat().st_size
    return {
        **infos,
        "index_path": str(file.path) if saved else "",
        "size in bytes": size,
        "nb vectors": file.rows,
        "compression ratio": 4 * file.rows * infos["vectors dimension"] / size,
    }


def write_infos(infos_path: Path, path: Path, exported: FaissExport, infos: Mapping[str, Any]) -> None:
    with writing(infos_path):
        infos_path.absolute().parent.mkdir(parents=True, exist_ok=True)
        for file in exported.files:
            suffix = file.path.name.removeprefix(path.name)
            text = json.dumps(infos[str(file.path)], indent=1) + "\n"
            overwrite(infos_path.with_name(infos_path.name + suffix).absolute(), text.encode())


def refuse_used(folder: Path) -> None:
    """Raise UsageError if the folder of ids holds other files, which would be read with them."""
    try:
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
    except OSError as error:
        raise output_error(error, folder) from error
    if foreign := [name for name in names if name not in (IDS_FILE, f".{IDS_FILE}")]:
        raise UsageError(f"ids_path {folder} holds {foreign[0]}", next_step="give a new folder, or empty this one")


def write_ids(collection: Collection, columns: Sequence[str], folder: Path) -> None:
    """Write the columns and `i`, the id, of all rows as a parquet file."""
    final, writer, first = folder.absolute() / IDS_FILE, None, 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = final.with_name(f".{IDS_FILE}")
        for part in collection.parts:
            path = path_of(collection.root, part.files[0])
            for table in rows_of(path, part, columns, 0, part.rows):
                table = table.append_column("i", pa.array(np.arange(first, first + table.num_rows)))
                writer = writer or pq.ParquetWriter(temporary, table.schema)
                writer.write_table(table.cast(writer.schema))
                first += table.num_rows
        assert writer is not None, "a collection has rows"
        writer.close()
        publish(temporary, final)
    except pa.ArrowException as error:
        raise InputError(f"the columns {', '.join(columns)} differ from file to file: {error}") from error
    except OSError as error:
        raise output_error(error, final) from error


def opened(path: Path, *, mapped: bool, threads: int | None) -> Any:
    """The index in a file."""
    set_threads(threads or cores())
    flags = faiss().IO_FLAG_MMAP | faiss().IO_FLAG_READ_ONLY if mapped else 0
    return faiss().read_index(str(path), flags)


def add_direct_map(path: Path) -> None:
    """Write the index in a file with a direct map; of mapped lists faiss would write the name of their file."""
    index = faiss().read_index(str(path))
    faiss().extract_index_ivf(index).make_direct_map()
    temporary = path.with_name(f".{path.name}.map")
    try:
        write_by_faiss(temporary, lambda writer: faiss().write_index(index, writer))
        publish(temporary, path)
    except OSError as error:
        raise output_error(error, path) from error
    finally:
        drop(temporary)
