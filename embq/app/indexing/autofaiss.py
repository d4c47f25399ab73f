"""autofaiss' `build_index` over embq's own build: the same arguments, the same files, the same return value.

What cannot be honoured is refused by `UNSUPPORTED`; docs/how-to/index/from-autofaiss.md has the same table.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embq.core.errors import Exit, InputError, UsageError
from embq.core.process.limits import cores
from embq.core.storage.durable import drop, output_error, overwrite, publish

if TYPE_CHECKING:
    from os import PathLike

    import numpy as np

    from embq.indexer.build.build import Built
    from embq.indexer.collection.opening import Collection
    from embq.indexer.faiss_file import FaissExport, FaissFile
    from embq.indexer.plan.build_options import BuildOptions

SPARK_FOLDER = "hdfs://root/tmp/distributed_autofaiss_indices"
"""autofaiss' default of `temporary_indices_folder`: what was not given."""

UNSUPPORTED = {
    "index_param": "search parameters are measured and chosen; set others on the index that is returned: "
    "faiss.ParameterSpace().set_index_parameters(index, 'nprobe=16')",
    "use_gpu": "GPUs take part as workers: start `embq worker` beside them, and give distributed='redis://HOST:6379'",
    "distributed": "start `embq worker` on the machines, and give their broker: distributed='redis://HOST:6379'",
    "temporary_indices_folder": "give a folder of this machine, or with `distributed` one that all workers share",
    "index_path": "give a path of this machine, and copy the file afterwards",
    "index_infos_path": "give a path of this machine, and copy the file afterwards",
    "ids_path": "give a folder of this machine, and copy it afterwards",
}
"""Argument that is refused where it asks for what embq does not do -> what to do instead."""

FLAT_ROWS = 1_000_000
"""Below this autofaiss keeps full vectors where memory allows."""
BROKERS = ("redis://", "rediss://", "unix://")
COPY_ROWS = 65_536
IDS_FILE = "part-00000000.parquet"


def build_index(
    embeddings: str | PathLike[str] | np.ndarray | Sequence[str | PathLike[str]],
    index_path: str | PathLike[str] | None = "knn.index",
    index_infos_path: str | PathLike[str] | None = "index_infos.json",
    ids_path: str | PathLike[str] | None = None,
    save_on_disk: bool = True,
    file_format: str = "npy",
    embedding_column_name: str = "embedding",
    id_columns: Sequence[str] | None = None,
    index_key: str | None = None,
    index_param: str | None = None,
    max_index_query_time_ms: float = 10.0,
    max_index_memory_usage: str = "16G",
    min_nearest_neighbors_to_retrieve: int = 20,
    current_memory_available: str = "32G",
    use_gpu: bool = False,
    metric_type: str = "ip",
    nb_cores: int | None = None,
    make_direct_map: bool = False,
    should_be_memory_mappable: bool = False,
    distributed: str | None = None,
    temporary_indices_folder: str | PathLike[str] = SPARK_FOLDER,
    verbose: int = logging.INFO,
    nb_indices_to_keep: int = 1,
    drop_invalid: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Build a faiss index with the arguments of autofaiss 2.18; gives (index, infos).

    The index is a `faiss.Index` with all ids, searched without anything of embq. infos has autofaiss' keys first, then
    those of embq's report. With `nb_indices_to_keep` above 1 they are (None, {path: infos}).

    Args:
        embeddings: floats of shape (n, d); or a folder, or several, with .npy, .parquet or .h5 files or the output of a
            run. Ids are places of rows in all files, sorted by their paths.
        index_path: the file; of several the beginning of their names, as autofaiss has it. Existing ones are replaced.
        index_infos_path: JSON file of infos.
        ids_path: folder for a parquet file with `id_columns` and `i`, the id in the index.
        save_on_disk: False: nothing is written at `index_path` and `index_infos_path`.
        max_index_query_time_ms: the highest recall within this time per query is tuned for.
        max_index_memory_usage: of the index, or of each of several.
        current_memory_available: of building; never more than is free on this machine.
        nb_cores: threads; None for all cores.
        should_be_memory_mappable: the index that is returned is mapped from its file and not read. Every file can be
            opened so.
        distributed: URL of a broker, whose workers build.
        temporary_indices_folder: folder for the index while it is built; beside `index_path` unless it is given.
        verbose: level of logging; above `logging.INFO` no progress is shown on stderr.
        drop_invalid: leave vectors that are not finite out of the index; others keep their ids. autofaiss fails.

    Raises `embq.core.errors.UsageError` for what is not supported, with what to do instead, and as `embq index` fails.
    """
    folder = None if str(temporary_indices_folder) == SPARK_FOLDER else temporary_indices_folder
    _refuse_urls(temporary_indices_folder=folder, index_path=index_path, index_infos_path=index_infos_path)
    _refuse_urls(ids_path=ids_path)
    for argument, value in (("index_param", index_param), ("use_gpu", use_gpu)):
        if value:
            _refuse(argument, value)
    if nb_cores is not None and nb_cores < 0:
        raise UsageError(f"nb_cores is {nb_cores}", next_step="give a number of threads, or None for all cores")
    if distributed and not distributed.startswith(BROKERS):
        _refuse("distributed", distributed)
    if bool(ids_path) != bool(id_columns) or (id_columns and file_format != "parquet"):
        raise UsageError(
            "id_columns are columns of parquet files that are written to ids_path",
            next_step="give both with file_format='parquet', or neither",
        )
    if save_on_disk and not (index_path and index_infos_path):
        raise UsageError("save_on_disk needs index_path and index_infos_path", next_step="give both, or False")
    if nb_indices_to_keep > 1 and (make_direct_map or not save_on_disk):
        raise UsageError(
            f"{nb_indices_to_keep} indices are files, and are opened one by one",
            next_step="leave save_on_disk at True, and call make_direct_map() on those that you open",
        )
    if ids_path:
        _refuse_used(Path(ids_path))  # and not after hours of building
    from embq.indexer.plan.build_options import BuildOptions, available_memory, parse_bytes

    wanted = BuildOptions(
        max_index_memory_usage=parse_bytes(max_index_memory_usage),
        current_memory_available=min(parse_bytes(current_memory_available), available_memory()),
        max_index_query_time_ms=float(max_index_query_time_ms),
        metric=metric_type,
        index_key=index_key,
        nb_indices_to_keep=int(nb_indices_to_keep),
        min_nearest_neighbors_to_retrieve=int(min_nearest_neighbors_to_retrieve),
        refine="none",  # faiss alone does not re-rank
    )
    wanted.check()
    parent = folder or (Path(index_path or "").absolute().parent if save_on_disk else tempfile.gettempdir())
    name = Path(index_path).name if save_on_disk and index_path else "embq"
    is_array = hasattr(embeddings, "__array__") and not isinstance(embeddings, str)
    with _workspace(Path(parent).absolute(), name, resumable=save_on_disk and not is_array) as workspace:
        roots = [_written(embeddings, workspace / "embeddings.npy")] if is_array else _paths(embeddings)
        collection = _collection(roots, file_format, embedding_column_name, id_columns or ())
        if make_direct_map:
            if (left := wanted.max_index_memory_usage - 8 * collection.n) <= 0:
                raise UsageError(
                    f"a direct map of {collection.n:,} rows takes {8 * collection.n:,} bytes, and "
                    f"max_index_memory_usage is {max_index_memory_usage}",
                    next_step="give more memory, or leave out make_direct_map",
                )
            wanted = replace(wanted, max_index_memory_usage=left)
        wanted = replace(wanted, index_key=index_key or _flat_key(collection, wanted))
        quiet = verbose > logging.INFO
        options = {"broker": distributed or "", "nb_cores": nb_cores and int(nb_cores), "drop_invalid": drop_invalid}
        built = _built(workspace / "index", collection, wanted, options, quiet=quiet)
        path = Path(index_path).absolute() if save_on_disk and index_path else workspace / name
        from embq.indexer.faiss_file import write_faiss_file

        path.parent.mkdir(parents=True, exist_ok=True)
        exported = write_faiss_file(built.version.index, path, shards=nb_indices_to_keep, overwrite=True)
        if make_direct_map:
            _add_direct_map(path)
        infos = {str(one.path): _infos(built, one, saved=save_on_disk) for one in exported.files}
        if ids_path and id_columns:
            _write_ids(collection, id_columns, Path(ids_path))
        if save_on_disk and index_infos_path:
            _write_infos(Path(index_infos_path), path, exported, infos)
        if nb_indices_to_keep > 1:
            return None, infos
        return _opened(path, mapped=should_be_memory_mappable and save_on_disk, threads=nb_cores), infos[str(path)]


def index_as_autofaiss(arguments: Mapping[str, Any], *, as_json: bool, quiet: bool) -> int:
    """Run `embq index` with arguments of autofaiss; returns the exit status."""
    import click

    from embq.indexer.build.report import summary

    level = logging.ERROR if quiet or as_json else logging.INFO
    # The index is not used here: it is mapped, and not read.
    index, infos = build_index(**{"verbose": level, **arguments, "should_be_memory_mappable": True})
    reports = list(infos.values()) if index is None else [infos]
    if as_json:
        click.echo(json.dumps({"schema": 1, "indices": reports}))
    else:
        click.echo(summary(reports[0]))
        for one in reports:
            click.echo(f"file       {one['index_path']}: {one['nb vectors']:,} rows")
    return Exit.DONE if reports[0]["target_met"] is not False else Exit.SOME_FAILED


def _refuse(name: str, value: object) -> None:
    raise UsageError(f"{name}={value!r} is not supported", next_step=UNSUPPORTED[name])


def _refuse_urls(**paths: str | PathLike[str] | None) -> None:
    for name, path in paths.items():
        if path is not None and "://" in str(path):
            _refuse(name, str(path))


@contextmanager
def _workspace(parent: Path, name: str, *, resumable: bool) -> Iterator[Path]:
    """A hidden folder for what is removed at the end.

    Args:
        resumable: the same folder each time, kept where the work is interrupted, so that the same call continues.

    Raises TryLaterError where another process is at work in it.
    """
    from embq.indexer.index_files.files import alone

    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = parent / f".{name}.embq" if resumable else Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))
    except OSError as error:
        raise output_error(error, parent) from error
    with alone(folder):
        try:
            yield folder
        except BaseException as error:
            if not resumable or isinstance(error, InputError | UsageError):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _paths(embeddings: Any) -> list[str]:
    several = list(embeddings) if isinstance(embeddings, Iterable) and not isinstance(embeddings, str) else [embeddings]
    if not several or not all(isinstance(one, str) or hasattr(one, "__fspath__") for one in several):
        raise UsageError("embeddings is neither an array nor paths", next_step="give numpy.float32(vectors) or paths")
    return [str(one) for one in several]


def _written(array: Any, path: Path) -> str:
    """Write an array as float32 file, some rows at a time whatever its type and order; gives the path."""
    import numpy as np

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
    try:
        with open(path, "wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for first in range(0, len(array), COPY_ROWS):
                file.write(np.ascontiguousarray(array[first : first + COPY_ROWS], "<f4").data)
    except OSError as error:
        raise output_error(error, path) from error
    return str(path)


def _collection(roots: Sequence[str], file_format: str, column: str, id_columns: Sequence[str]) -> Collection:
    from embq.indexer.collection.clip_retrieval import FOLDERS
    from embq.indexer.collection.opening import open_collection
    from embq.indexer.collection.remote import RemotePath, located

    names = {name: output for output, name in FOLDERS.items()}
    places = [place for root in roots if not isinstance(place := located(root), RemotePath)]
    if len(roots) == 1 and places and (above := places[0]).name in names and (above.parent / "run.json").exists():
        return open_collection(above.parent, output=names[above.name])  # without what it has not committed
    if any((place / "run.json").exists() for place in places):
        return open_collection(*roots)  # a run says itself what its files are
    return open_collection(
        *roots,
        file_format=file_format,
        column=None if column == "embedding" else column,
        id_columns=id_columns,
    )


def _flat_key(collection: Collection, wanted: BuildOptions) -> str | None:
    """The key of full vectors where they are few and fit the memory; None leaves the choice to the plan."""
    from embq.indexer.plan.codec_choices import lists_for
    from embq.indexer.plan.codecs import codec

    nlist = lists_for(collection.n)
    needed = codec("Flat", collection.dim).index_bytes(collection.n, nlist, collection.dim)
    fits = needed <= wanted.max_index_memory_usage * wanted.nb_indices_to_keep
    return f"IVF{nlist},Flat" if fits and collection.n < FLAT_ROWS else None


def _built(
    folder: Path, collection: Collection, wanted: BuildOptions, options: Mapping[str, Any], *, quiet: bool
) -> Built:
    """Build the index in a folder of embq."""
    from embq.app.indexing.build import built_index
    from embq.indexer.index_files.files import to_json
    from embq.indexer.tune.queries import plan_queries

    # Tuning reads the target from these, under the names of `embq index`.
    asked = {**to_json(wanted), "recall": f"{wanted.recall}@{wanted.recall_at}", "current_memory_available": None}
    queries = plan_queries(collection, files={}, seed=wanted.seed)
    options = {**options, "workers": 1, "rebuild": False}
    # Inner products, also of vectors of length 1: callers sort by what faiss returns.
    return built_index(folder, collection, wanted, asked, queries, options, unit_length=False, quiet=quiet)


def _infos(built: Built, file: FaissFile, *, saved: bool) -> dict[str, Any]:
    """The report of an index as that of one of its files."""
    from embq.indexer.index_files.files import read_json

    infos = read_json(built.version.path / "infos.json")
    size = file.path.stat().st_size
    return {
        **infos,
        "index_path": str(file.path) if saved else "",
        "size in bytes": size,
        "nb vectors": file.rows,
        "compression ratio": 4 * file.rows * infos["vectors dimension"] / size,
    }


def _write_infos(infos_path: Path, path: Path, exported: FaissExport, infos: Mapping[str, Any]) -> None:
    try:
        infos_path.absolute().parent.mkdir(parents=True, exist_ok=True)
        for one in exported.files:
            suffix = one.path.name.removeprefix(path.name)
            text = json.dumps(infos[str(one.path)], indent=1) + "\n"
            overwrite(infos_path.with_name(infos_path.name + suffix).absolute(), text.encode())
    except OSError as error:
        raise output_error(error, infos_path) from error


def _refuse_used(folder: Path) -> None:
    """Raise UsageError where the folder of ids holds other files, which would be read with them."""
    try:
        names = [one.name for one in folder.iterdir()] if folder.exists() else []
    except OSError as error:
        raise output_error(error, folder) from error
    if others := [name for name in names if name not in (IDS_FILE, f".{IDS_FILE}")]:
        raise UsageError(f"ids_path {folder} holds {others[0]}", next_step="give a new folder, or empty this one")


def _write_ids(collection: Collection, columns: Sequence[str], folder: Path) -> None:
    """Write the columns and `i`, the id, of all rows as a parquet file."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from embq.indexer.collection.parquet import rows_of
    from embq.indexer.collection.parts import path_of

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


def _opened(path: Path, *, mapped: bool, threads: int | None) -> Any:
    """The index in a file."""
    from embq.indexer.faiss_module import faiss, set_threads

    set_threads(threads or cores())
    flags = faiss().IO_FLAG_MMAP | faiss().IO_FLAG_READ_ONLY if mapped else 0
    return faiss().read_index(str(path), flags)


def _add_direct_map(path: Path) -> None:
    """Write the index in a file with a direct map; of mapped lists faiss would write the name of their file."""
    from embq.indexer.faiss_module import faiss
    from embq.indexer.index_files.files import write_by_faiss

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
