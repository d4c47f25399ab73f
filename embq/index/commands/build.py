"""Runs `embq index build`: from its options to a published version."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from embq.app.cli.arguments import parsed
from embq.app.cli.authorization import authorized_client
from embq.app.cli.shared_options import settings_with
from embq.core.errors import Exit, UsageError, command_line
from embq.core.models import ModelConfig
from embq.core.process.limits import cores
from embq.core.storage.beneath import below
from embq.core.storage.paths import Place, place
from embq.index.change.growth import holds
from embq.index.collection.opening import Collection, largest_number, open_collection
from embq.index.commands.faiss_export import export_json, export_text, file_path
from embq.index.commands.progress import ConsoleProgress
from embq.index.faiss_file import FaissExport, refuse_existing, write_faiss_file
from embq.index.index_files.files import read_json, to_json
from embq.index.index_files.remote import fetched
from embq.index.index_files.version import Version, find_current
from embq.index.plan.build_options import BuildOptions, available_memory, parse_bytes, parse_recall
from embq.index.plan.costs import measure_speeds
from embq.index.plan.index_plan import IndexPlan, describe_plan, make_plan
from embq.index.stages.build import Built, build, build_id
from embq.index.stages.report import summary, write_report
from embq.index.stages.runners import Runner, local
from embq.index.stages.spec import BuildSpec
from embq.index.tune.queries import QueryPlan, plan_queries
from embq.index.workers.queue_runner import QueueRunner

FEW_ROWS = 1_000
"""Below this, search is exhaustive and nothing is trained, so that queries need not be held out."""

DECIDING = (
    "recall",
    "max_index_memory_usage",
    "current_memory_available",
    "max_index_query_time_ms",
    "metric_type",
    "index_key",
    "nb_indices_to_keep",
    "min_nearest_neighbors_to_retrieve",
    "refine",
    "queries",
    "drop_invalid",
    "seed",
)
"""Options that identify a build, to continue an interrupted one; those that do not change the index are left out."""


def index(options: Mapping[str, Any]) -> int:
    """Build an index; returns the exit status."""
    collection = _collection_of(options)
    if options["dry_run"]:
        plan = plan_of(collection, build_options(options), unit_length=collection.unit_length)
        click.echo(json.dumps(to_json(plan)) if options["as_json"] else describe_plan(plan))
        return Exit.DONE
    result = built(collection, options)
    if not result.fresh and not options["as_json"]:
        click.echo("the index exists already and is as requested; --overwrite builds it anew", err=True)
    if (unindexed := _not_indexed(result.index, collection, options)) and not options["as_json"]:
        commands = "; ".join(command_line("index", *options["sources"], "--vector-name", name) for name in unindexed)
        click.echo(f"note: this index is of {collection.output} alone; for the others of the run: {commands}", err=True)
    return print_result(result, collection, options, exported=_exported(result, options))


def index_of(sources: Sequence[str], output: str | None, options: Mapping[str, Any]) -> Place:
    """See `embq.build_index`; returns the folder or URL of the index."""
    params = parsed("index build", options, sources, "--quiet", *(() if output is None else ("--output", output)))
    return built(_collection_of(params), params).index


def _collection_of(options: Mapping[str, Any]) -> Collection:
    return open_collection(
        *options["sources"],
        output=options["vector_name"],
        column=options["embedding_column_name"],
        file_format=options["file_format"],
        id_columns=[name.strip() for name in options["id_columns"].split(",") if name.strip()],
    )


def built(collection: Collection, options: Mapping[str, Any]) -> Built:
    """The index of a collection, built unless the current version has these rows and options."""
    settings = build_options(options)
    folder = index_folder(options["output"], options["sources"], collection)
    if options["index_path"]:
        refuse_existing(file_path(options["index_path"]), settings.nb_indices_to_keep, overwrite=options["overwrite"])
    queries = plan_queries(collection, files=query_files(options["queries"]), seed=settings.seed)
    deciding = {name: options[name] for name in DECIDING}
    current = None if options["overwrite"] else find_current(folder)
    if current is not None and current.build != build_id(collection, deciding):
        if holds(current, collection, deciding):
            return Built(folder, current, fresh=False)
        _tell_of_replacing(current, folder)
    quiet = options["quiet"] or options["as_json"]
    return built_index(
        folder, collection, settings, deciding, queries, options, unit_length=collection.unit_length, quiet=quiet
    )


def plan_of(collection: Collection, settings: BuildOptions, *, unit_length: bool) -> IndexPlan:
    """The plan of an index on this machine."""
    largest = 1.0 if collection.unit_length else largest_number(collection)
    return make_plan(
        collection.n, collection.dim, settings, unit_length=unit_length, speeds=measure_speeds(), largest=largest
    )


def _tell_of_replacing(current: Version, index: Place) -> None:
    """Print that an index is built anew; UsageError if deleted rows would be back."""
    if current.deleted:
        raise UsageError(
            f"{current.deleted:,} rows were deleted from {index}, and a new build has them again",
            next_step="add new rows with `embq index add`, or build from all rows with --overwrite",
        )
    if isinstance(index, Path):
        click.echo(f"note: {index} is built anew; `embq index add` adds new rows without training again", err=True)


def built_index(
    folder: Place,
    collection: Collection,
    settings: BuildOptions,
    deciding: Mapping[str, Any],
    queries: QueryPlan,
    options: Mapping[str, Any],
    *,
    unit_length: bool,
    quiet: bool,
) -> Built:
    """Build the index of a collection, or resume an interrupted build.

    Args:
        deciding: options that identify the build.
        options: as of `runner_of`, and "drop_invalid" and "overwrite".
        unit_length: whether vectors have length 1, so that cosines may be squared distances inside.
    """

    def spec() -> BuildSpec:
        return BuildSpec(
            collection=collection,
            plan=plan_of(collection, settings, unit_length=unit_length),
            asked=deciding,
            queries=queries,
            held_out=() if collection.n < FEW_ROWS else tuple(queries.held_out(collection.n).tolist()),
            drop_invalid=options["drop_invalid"],
            memory_bytes=settings.current_memory_available,
        )

    with runner_of(options, settings.current_memory_available) as runner:
        progress = ConsoleProgress(quiet=quiet)
        return build(folder, collection, deciding, spec, runner, progress, write_report, overwrite=options["overwrite"])


def build_options(options: Mapping[str, Any]) -> BuildOptions:
    """The build options; UsageError if one cannot be parsed."""
    recall, recall_at = parse_recall(options["recall"])
    within_ms = options["max_index_query_time_ms"]
    return BuildOptions(
        max_index_memory_usage=parse_bytes(options["max_index_memory_usage"]),
        current_memory_available=memory_of(options),
        **({} if within_ms is None else {"max_index_query_time_ms": within_ms}),
        metric=options["metric_type"],
        index_key=options["index_key"],
        nb_indices_to_keep=options["nb_indices_to_keep"],
        min_nearest_neighbors_to_retrieve=options["min_nearest_neighbors_to_retrieve"],
        recall=recall,
        recall_at=recall_at,
        refine=options["refine"],
        workers=options["workers"],
        seed=options["seed"],
    )


def memory_of(options: Mapping[str, Any]) -> int:
    """Bytes that the processes of this machine may take together."""
    given = options["current_memory_available"]
    return available_memory() if given is None else parse_bytes(given)


def index_folder(to: str | None, sources: Sequence[str], collection: Collection) -> Place:
    """The folder or URL of the index."""
    if to is None and len(sources) > 1:
        raise UsageError(
            f"one index of {len(sources)} folders has no folder of its own", next_step="add --output FOLDER"
        )
    where = place(to if to is not None else sources[0])
    if to is not None:
        return where.absolute() if isinstance(where, Path) else where
    folder = where if where.is_dir() else where.parent
    return below(folder.absolute() if isinstance(folder, Path) else folder, f"index/{collection.output}")


def query_files(pairs: Sequence[str]) -> dict[str, str]:
    """Name -> path of each additional query set."""
    paths = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not equals or not name or not path:
            raise UsageError(f"--queries {pair!r} is not NAME=FILE", next_step="for example --queries text=prompts.npy")
        paths[name] = path
    return paths


@contextmanager
def runner_of(options: Mapping[str, Any], memory_bytes: int) -> Iterator[Runner]:
    """The runner of the steps: local processes, or the workers of --broker.

    Args:
        memory_bytes: that all processes of a machine may take together.

    EMBQ_BROKER_URL is ignored: it is set wherever runs are enqueued, also for users of the broker without this right,
    and for folders that its workers cannot reach.
    """
    if not options["broker"]:
        yield local(options["workers"], threads=options.get("nb_cores") or cores(), memory_bytes=memory_bytes)
        return
    settings = settings_with(options["broker"])
    client = authorized_client(
        settings, "index", patient=True, instead="; or build it on this machine, without --broker"
    )
    runner = QueueRunner(
        client,
        url=settings.broker_url,
        memory_bytes=memory_bytes,
        lease_s=settings.lease_s,
        say=lambda text: click.echo(text, err=True),
    )
    try:
        yield runner
    finally:
        runner.close()


def _exported(built: Built, options: Mapping[str, Any]) -> FaissExport | None:
    """The files of --index-path, written; None without it."""
    if not options["index_path"]:
        return None
    return write_faiss_file(
        built.index if isinstance(built.index, Path) else fetched(built.index),
        file_path(options["index_path"]),
        shards=options["nb_indices_to_keep"],
        overwrite=options["overwrite"],
    )


def print_result(
    built: Built, collection: Collection, options: Mapping[str, Any], *, exported: FaissExport | None = None
) -> int:
    """Print a build or an addition; returns the exit status."""
    infos = read_json(built.path / "infos.json")
    if options["as_json"]:
        extra = {} if exported is None else {"export": export_json(exported)}
        print_json(built.version, index=built.index, fresh=built.fresh, infos=infos, **extra)
    else:
        if not collection.complete:
            click.echo("note: the run is not complete; the rows committed so far were indexed", err=True)
        click.echo(summary(infos, report=built.path))
        if exported is not None:
            click.echo(export_text(exported))
    return Exit.DONE if infos.get("target_met", True) is not False else Exit.SOME_FAILED


def print_json(version: Version, *, index: Place | None = None, **fields: Any) -> None:
    """Print a result as JSON: index (None for that of the version), version, and further fields."""
    click.echo(json.dumps({"schema": 1, "index": str(index or version.index), "version": version.name, **fields}))


def _not_indexed(index: Place, collection: Collection, options: Mapping[str, Any]) -> list[str]:
    """The other outputs of a run that have no index beside this one; none if the place of the index was given."""
    if collection.model is None or options["output"] is not None:
        return []
    names = ModelConfig.from_description(collection.model).output_names
    return [name for name in names if name != collection.output and not (index.parent / name / "CURRENT").exists()]
