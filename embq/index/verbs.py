"""`embq index`: builds, grows, changes, deduplicates and exports an index."""

from __future__ import annotations

from typing import Any

import click

from embq.app.cli.lazy_group import LazyGroup
from embq.app.cli.sections import GENERAL, SectionedCommand, option, section
from embq.app.cli.shared_options import (
    json_option,
    local_broker_option,
    machine_workers_option,
    option_group,
    quiet_option,
    vector_name_option,
)

index_argument = click.argument("source", metavar="OUT", type=click.Path())
"""An index, by its folder or by the output folder of its run."""
sources_argument = click.argument("sources", metavar="OUT...", type=click.Path(), nargs=-1, required=True)
output_option = option(
    "--output",
    "-o",
    type=click.Path(file_okay=False),
    help="Folder, s3:// or gs:// URL of the index.  [OUT/index/NAME]",
)
overwrite_option = option("--overwrite", is_flag=True, help="Replace what exists already.")
drop_invalid_option = option(
    "--drop-invalid", is_flag=True, help="Skip vectors that are zero, missing or not finite, and count them."
)
dry_run_option = option("--dry-run", is_flag=True, help="Print the plan and exit.")
process_options = option_group(
    option(
        "--current-memory-available",
        "--max-memory",
        "current_memory_available",
        metavar="SIZE",
        help="Memory limit on this machine.  [free memory, at most 32G]",
    ),
    machine_workers_option("; with --broker, those of `embq worker` on each machine.", default=1),
)
runner_options = option_group(local_broker_option, json_option, quiet_option)


@click.group(
    "index",
    cls=LazyGroup,
    default="build",
    epilog="Examples: embq index ./out | embq index add ./out | embq index delete ./out KEY",
)
def command() -> None:
    """Build a search index of embeddings, and change it.

    `embq index OUT` is `embq index build OUT`: a first word that names no verb is the folder to build from. A folder
    with the name of a verb is `./NAME`.
    """


@command.command(
    "build",
    cls=SectionedCommand,
    epilog="Examples: embq index build ./out | embq index ./out --recall 0.98@10 --max-index-memory-usage 4G | "
    "embq index ./embeddings -o ./my-index --metric-type l2",
)
@sources_argument
@section("Output")
@output_option
@overwrite_option
@section("Index")
@option("--recall", default="0.95@10", metavar="R@K", help="Recall that searches must reach.")
@option("--max-index-memory-usage", default="16G", metavar="SIZE", help="Memory limit of the index for searching.")
@option(
    "--max-index-query-time-ms",
    type=float,
    metavar="MS",
    help="Tune for the highest recall within this time per query, instead of the shortest time for --recall.",
)
@option(
    "--metric-type",
    type=click.Choice(["ip", "l2"]),
    default="ip",
    help="Metric; ip is the cosine for vectors of length 1.",
)
@option("--index-key", metavar="KEY", help="faiss factory string, such as IVF4096,SQ8.  [by memory]")
@option(
    "--nb-indices-to-keep",
    type=click.IntRange(min=1),
    default=1,
    help="Split the index into N pieces, each within the memory limit, for one machine each.",
)
@option(
    "--min-nearest-neighbors-to-retrieve",
    type=click.IntRange(min=1),
    default=20,
    help="Results that a search must be able to return.",
)
@option(
    "--refine",
    type=click.Choice(["auto", "none", "fp16"]),
    default="auto",
    help="Store float16 vectors on disk to re-rank candidates.",
)
@option(
    "--queries",
    multiple=True,
    metavar="NAME=FILE",
    help="Additional query set for measuring: .npy, or the output of a run of the same model.",
)
@option("--seed", type=click.IntRange(min=0), default=1234, help="Random seed for samples, queries and k-means.")
@process_options
@section("Inputs")
@vector_name_option
@option("--file-format", type=click.Choice(["npy", "parquet", "hdf5"]), help="Format of a plain folder.  [by names]")
@option("--embedding-column-name", metavar="NAME", help="Column of vectors in parquet files.")
@option("--id-columns", default="", metavar="LIST", help="Columns of parquet files to keep besides the vectors.")
@drop_invalid_option
@section("Files of faiss")
@option(
    "--index-path",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write the index as a file of faiss too, or as --nb-indices-to-keep files FILE0, FILE1, ....",
)
@section(GENERAL)
@dry_run_option
@runner_options
def build(**options: Any) -> int:
    """Build a faiss index of embeddings, tuned for the requested recall.

    OUT is an output folder of embq, or a folder of .npy or .parquet files with embeddings; several of one kind
    become one index, with --output. The plan is printed before work starts. After an interruption, the same command
    continues. An index of the same rows and options is kept, and one with deleted rows is not replaced, unless
    --overwrite is given. The report is in infos.json and report.png of the version that CURRENT names. With --broker,
    the workers of that broker build; they see OUT and the index by the same names.

    Exit status: 0 the index is as requested, 3 it is built but misses the recall or the time, 65 it cannot be built.
    """
    from embq.index.commands.build import index

    return index(options)


@command.command(
    "add",
    cls=SectionedCommand,
    epilog="Examples: embq index add ./out | embq index add ./embeddings -o ./my-index",
)
@sources_argument
@output_option
@vector_name_option
@drop_invalid_option
@process_options
@runner_options
def add(**options: Any) -> int:
    """Add new rows to an index, without training again.

    OUT and --output are those of `embq index build`; its other options are those of the index. OUT may also be the
    index itself: rows come from what it was built from. After an interruption, the same command continues.

    Exit status: 0 the rows are in the index, 3 their recall misses that of the index, 65 they cannot be added.
    """
    from embq.index.commands.changes import add_rows

    return add_rows(options)


@command.command(
    "delete",
    cls=SectionedCommand,
    epilog="Examples: embq index delete ./out KEY KEY | embq index delete ./out --from keys.txt",
)
@index_argument
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@option(
    "--from",
    "files",
    multiple=True,
    metavar="FILE",
    help="Delete the rows with the keys in FILE, one per line, or the duplicates in a groups.parquet of `dedup`.",
)
@option(
    "--ids",
    "id_files",
    multiple=True,
    metavar="FILE",
    help="Delete the rows with the ids in FILE, one per line, as the map and a search give them.",
)
@vector_name_option
@json_option
def delete(**options: Any) -> int:
    """Delete rows from an index, by keys or ids.

    Searches find them no more; `embq index compact` frees their memory. The rows in OUT stay. A KEY that begins with -
    stands behind --.

    Exit status: 0 the rows are deleted, 3 some keys have no row, 65 none has.
    """
    from embq.index.commands.changes import delete_rows

    return delete_rows(options)


@command.command("compact", cls=SectionedCommand, epilog="Example: embq index compact ./out")
@index_argument
@vector_name_option
@process_options
@runner_options
def compact(**options: Any) -> int:
    """Merge added rows into the lists of an index, and drop deleted rows.

    Answers stay the same. After an interruption, the same command continues.
    """
    from embq.index.commands.changes import compact_lists

    return compact_lists(options)


@command.command("dedup", cls=SectionedCommand, epilog="Example: embq index dedup ./out --threshold 0.95")
@index_argument
@option(
    "--threshold",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    default=0.95,
    metavar="X",
    help="Least cosine of near duplicates.",
)
@vector_name_option
@option("--nprobe", type=click.IntRange(min=1), help="Inverted lists to search for each row.  [those of a search]")
@process_options
@dry_run_option
@runner_options
def dedup(**options: Any) -> int:
    """Group near duplicates: rows with a cosine of at least X.

    Rows that are connected through others are one group, and the row with the lowest id is kept. Nothing is deleted:
    the groups are in dedup-X-VERSION/groups.parquet in the folder of the index, which
    `embq index delete OUT --from` and `embq export --without` take. After an interruption, the same command continues.
    """
    from embq.index.commands.dedup import run_dedup

    return run_dedup(options)


@command.command(
    "export",
    cls=SectionedCommand,
    epilog="Examples: embq index export ./out | embq index export ./out knn.index --shards 4 | "
    "embq index export ./out ./served --output-format clip-back",
)
@index_argument
@click.argument("path", metavar="[FILE|DIR]", type=click.Path(), required=False)
@option(
    "--output-format",
    "form",
    type=click.Choice(["faiss", "clip-back"]),
    default="faiss",
    help="Format: a file of faiss, or a folder that clip-retrieval's back end serves.",
)
@vector_name_option
@option(
    "--shards",
    type=click.IntRange(min=1),
    default=1,
    help="Write N files FILE0, FILE1, ... with a range of the lists each; searches merge their answers.",
)
@option(
    "--refine/--no-refine",
    default=None,
    help="Write stored vectors too, for re-ranking and cosines as `embq search` has them; faiss holds them in memory.  "
    "[clip-back: if there are any; faiss: no]",
)
@overwrite_option
@json_option
def export(**options: Any) -> int:
    """Write an index as files of faiss or clip-retrieval.

    `faiss.read_index` opens FILE, also memory-mapped; by default it is the folder of the index with .index behind its
    name. Ids are those of `embq search`, deleted rows are left out. Memory is that of centroids and codebooks, whatever
    the rows.

    With --output-format clip-back, DIR is a new folder, by default OUT.clip-back, with image.index, text.index,
    metadata and indices_paths.json: clip-retrieval back --indices_paths DIR/indices_paths.json.
    """
    from embq.index.commands.faiss_export import export as run

    return run(options)
