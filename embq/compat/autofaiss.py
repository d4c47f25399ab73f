"""autofaiss' `build_index` over embq's own build, in Python and on the command line.

What cannot be honoured is refused by `UNSUPPORTED`; docs/how-to/index/from-autofaiss.md has the same table.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from embq.app.cli.shared_options import json_option, quiet_option, without_password
from embq.compat.fire import FireCommand, FireOption, names_of
from embq.core.errors import Exit, UsageError

if TYPE_CHECKING:
    from os import PathLike

    import numpy as np

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
"""Argument that is refused if it asks for what embq does not do -> what to do instead."""

BROKERS = ("redis://", "rediss://", "unix://")


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
    """Build a faiss index with the arguments of autofaiss 2.18; returns (index, infos).

    The index is a `faiss.Index` with all ids, searched without anything of embq. infos has autofaiss' keys first, then
    those of embq's report. With `nb_indices_to_keep` above 1 they are (None, {path: infos}).

    Args:
        embeddings: floats of shape (n, d); or a folder, or several, with .npy or .parquet files or the output of a
            run. Ids are places of rows in all files, sorted by their paths.
        index_path: the file; of several the beginning of their names, as autofaiss has it. Existing ones are replaced.
        index_infos_path: JSON file of infos.
        ids_path: folder for a parquet file with `id_columns` and `i`, the id in the index.
        save_on_disk: False: nothing is written at `index_path` and `index_infos_path`.
        file_format: npy, parquet, or hdf5 of an export.
        embedding_column_name: column of vectors in parquet files.
        id_columns: columns of parquet files for `ids_path`.
        index_key: factory string of faiss; None chooses by memory.
        index_param: refused: search parameters are measured and chosen.
        max_index_query_time_ms: the highest recall within this time per query is tuned for.
        max_index_memory_usage: of the index, or of each of several.
        min_nearest_neighbors_to_retrieve: results that a search must be able to return.
        current_memory_available: of building; never more than is free on this machine.
        use_gpu: refused: workers use GPUs, see `distributed`.
        metric_type: ip or l2.
        nb_cores: threads; None for all cores.
        make_direct_map: add what faiss needs to reconstruct vectors; counted as memory.
        should_be_memory_mappable: the index that is returned is mapped from its file and not read. Every file can be
            opened so.
        distributed: URL of a broker, whose workers build.
        temporary_indices_folder: folder for the index while it is built; beside `index_path` unless it is given.
        verbose: level of logging; above `logging.INFO` no progress is shown on stderr.
        nb_indices_to_keep: files into which the index is split, each within the memory limit.
        drop_invalid: leave vectors that are not finite out of the index; others keep their ids. autofaiss fails.

    Raises `embq.core.errors.UsageError` for what is not supported, with what to do instead, and as `embq index` fails.
    """
    _check(locals())
    from embq.compat import faiss_build as files
    from embq.index.faiss_file import write_faiss_file

    settings = files.build_options(
        max_index_memory_usage,
        current_memory_available,
        max_index_query_time_ms=float(max_index_query_time_ms),
        metric=metric_type,
        index_key=index_key,
        nb_indices_to_keep=int(nb_indices_to_keep),
        min_nearest_neighbors_to_retrieve=int(min_nearest_neighbors_to_retrieve),
    )
    threads = None if nb_cores is None else int(nb_cores)
    file = Path(index_path).absolute() if save_on_disk and index_path else None
    folder = None if str(temporary_indices_folder) == SPARK_FOLDER else temporary_indices_folder
    parent = Path(folder or (file.parent if file else tempfile.gettempdir())).absolute()
    is_array = hasattr(embeddings, "__array__") and not isinstance(embeddings, str)
    with files.workspace(parent, file.name if file else "embq", resumable=save_on_disk and not is_array) as workspace:
        roots = [files.written(embeddings, workspace / "embeddings.npy")] if is_array else files.paths_of(embeddings)
        collection = files.collection_of(roots, file_format, embedding_column_name, id_columns or ())
        settings = files.settled(settings, collection, direct_map=make_direct_map)
        options = {"broker": distributed or "", "nb_cores": threads, "drop_invalid": drop_invalid}
        built = files.built(workspace / "index", collection, settings, options, quiet=verbose > logging.INFO)
        path = file or workspace / "embq"
        path.parent.mkdir(parents=True, exist_ok=True)
        exported = write_faiss_file(built.version.index, path, shards=nb_indices_to_keep, overwrite=True)
        if make_direct_map:
            files.add_direct_map(path)
        infos = {str(part.path): files.infos_of(built, part, saved=save_on_disk) for part in exported.files}
        if ids_path and id_columns:
            files.write_ids(collection, id_columns, Path(ids_path))
        if save_on_disk and index_infos_path:
            files.write_infos(Path(index_infos_path), path, exported, infos)
        if nb_indices_to_keep > 1:
            return None, infos
        mapped = should_be_memory_mappable and save_on_disk
        return files.opened(path, mapped=mapped, threads=threads), infos[str(path)]


def build_and_print(arguments: Mapping[str, Any], *, as_json: bool, quiet: bool) -> int:
    """Build an index with the arguments of `build_index`, and print its report; returns the exit status."""
    from embq.index.stages.report import summary

    level = logging.ERROR if quiet or as_json else logging.INFO
    # The index is not used here: it is mapped, and not read.
    index, infos = build_index(**{"verbose": level, **arguments, "should_be_memory_mappable": True})
    reports = list(infos.values()) if index is None else [infos]
    if as_json:
        click.echo(json.dumps({"schema": 1, "indices": reports}))
    else:
        click.echo(summary(reports[0]))
        for report in reports:
            click.echo(f"file       {report['index_path']}: {report['nb vectors']:,} rows")
    return Exit.DONE if reports[0]["target_met"] is not False else Exit.SOME_FAILED


def _options() -> list[click.Parameter]:
    """The parameters of `build_index` as options, with what its docstring says of them."""
    parameters = inspect.signature(build_index).parameters
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(build_index) or "", re.MULTILINE)
    lines = {name: " ".join(text.split()) for name, text in entries}
    types = {name: int if name == "nb_cores" else type(parameter.default) for name, parameter in parameters.items()}
    return [
        FireOption(
            [f"--{name}"],
            type=types[name] if types[name] in (bool, int, float) else str,
            switch=types[name] is bool,
            callback=LISTS.get(name),
            required=name == "embeddings",
            help=lines.get(name),
        )
        for name in parameters
    ]


LISTS: dict[str, Callable[[click.Context, click.Parameter, Any], Any]] = {
    "embeddings": lambda _ctx, _param, value: names_of(value),
    "id_columns": lambda _ctx, _param, value: value and names_of(f"[{value}]"),
    "distributed": without_password,
}
"""Argument -> callback of its option."""


@click.group("autofaiss", epilog="Example: embq autofaiss build_index --embeddings vectors --index_path knn.index")
def command() -> None:
    """Run commands of autofaiss by embq, as they are published. `embq build_index` is `embq autofaiss build_index`."""


@command.command(
    "build_index",
    cls=FireCommand,
    params=_options(),
    epilog="Example: embq build_index --embeddings vectors --index_path knn.index --index_infos_path infos.json",
)
@json_option
@quiet_option
def build_index_command(as_json: bool, quiet: bool, **arguments: Any) -> int:
    """Build an index of faiss as `autofaiss build_index` would, with its defaults."""
    given = {name: value for name, value in arguments.items() if value is not None}
    return build_and_print(given, as_json=as_json, quiet=quiet)


def _check(arguments: Mapping[str, Any]) -> None:
    """Raise UsageError for a value of `build_index` that embq does not take, and for those that do not go together."""
    for name, instead in UNSUPPORTED.items():
        value = arguments[name]
        if name in ("index_param", "use_gpu"):
            refused = bool(value)
        elif name == "distributed":
            refused = bool(value) and not value.startswith(BROKERS)
        else:
            refused = "://" in str(value) and str(value) != SPARK_FOLDER
        if refused:
            raise UsageError(f"{name}={value!r} is not supported", next_step=instead)
    nb_cores, ids_path, id_columns = arguments["nb_cores"], arguments["ids_path"], arguments["id_columns"]
    if nb_cores is not None and nb_cores < 0:
        raise UsageError(f"nb_cores is {nb_cores}", next_step="give a number of threads, or None for all cores")
    if bool(ids_path) != bool(id_columns) or (id_columns and arguments["file_format"] != "parquet"):
        raise UsageError(
            "id_columns are columns of parquet files that are written to ids_path",
            next_step="give both with file_format='parquet', or neither",
        )
    if arguments["save_on_disk"] and not (arguments["index_path"] and arguments["index_infos_path"]):
        raise UsageError("save_on_disk needs index_path and index_infos_path", next_step="give both, or False")
    several = arguments["nb_indices_to_keep"]
    if several > 1 and (arguments["make_direct_map"] or not arguments["save_on_disk"]):
        raise UsageError(
            f"{several} indices are files, and are opened one by one",
            next_step="leave save_on_disk at True, and call make_direct_map() on those that you open",
        )
    if ids_path:
        from embq.compat.faiss_build import refuse_used

        refuse_used(Path(ids_path))  # and not after hours of building
