"""`embq index`: builds, grows, changes and exports an index."""

from __future__ import annotations

from typing import Any

import click

from embq.app.cli.lazy_group import CommandWithVerbs
from embq.app.cli.sections import GENERAL, SectionedCommand, option, section
from embq.app.cli.shared_options import json_option, local_broker_option, quiet_option, vector_name_option

VERBS = {
    "dedup": ("embq.app.verbs.index:dedup", "Group near duplicates."),
    "export": ("embq.app.verbs.index:export", "Write an index as files that faiss and clip-retrieval read."),
}
"""Verb -> see `LazyGroup`."""

memory_option = option(
    "--current-memory-available",
    "--max-memory",
    "current_memory_available",
    metavar="SIZE",
    help="Memory limit on this machine.  [free memory, at most 32G]",
)
overwrite_option = option("--overwrite", is_flag=True, help="Replace exported files that exist.")
workers_option = option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    help="Processes on this machine; with --broker, the processes of `embq worker` on each machine.",
)


@click.command(
    "index",
    cls=CommandWithVerbs,
    later=VERBS,
    epilog="Examples: embq index ./out | embq index ./out --recall 0.98@10 --max-index-memory-usage 4G | "
    "embq index ./embeddings -o ./my-index --metric-type l2",
)
@click.argument("sources", metavar="OUT...", type=click.Path(), nargs=-1, required=True)
@section("Output")
@option(
    "--output",
    "-o",
    type=click.Path(file_okay=False),
    help="Folder, s3:// or gs:// URL of the index.  [OUT/index/NAME]",
)
@section("Index")
@option("--recall", default="0.95@10", metavar="R@K", help="Recall that searches must reach.")
@option("--max-index-memory-usage", default="16G", metavar="SIZE", help="Memory limit of the index for searching.")
@memory_option
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
@option("--seed", type=int, default=1234, help="Random seed for samples, queries and k-means.")
@workers_option
@section("Inputs")
@vector_name_option
@option("--file-format", type=click.Choice(["npy", "parquet", "hdf5"]), help="Format of a plain folder.  [by names]")
@option("--embedding-column-name", metavar="NAME", help="Column of vectors in parquet files.")
@option("--id-columns", default="", metavar="LIST", help="Columns of parquet files to keep besides the vectors.")
@option("--drop-invalid", is_flag=True, help="Skip vectors that are zero or not finite, and count them.")
@section("Changes")
@option("--rebuild", is_flag=True, help="Rebuild even if the current index is up to date.")
@option("--delete", multiple=True, metavar="KEY", help="Delete the rows with this key; repeatable.")
@option(
    "--delete-from",
    multiple=True,
    metavar="FILE",
    help="Delete the rows with the keys in FILE, one per line, or the duplicates in a groups.parquet of `dedup`.",
)
@option(
    "--delete-ids",
    multiple=True,
    metavar="FILE",
    help="Delete the rows with the ids in FILE, one per line, as the map and a search give them.",
)
@option("--compact", is_flag=True, help="Merge added rows into the lists, and drop deleted rows.")
@section("Files of faiss")
@option(
    "--index-path",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write the index as a file of faiss too, or as --nb-indices-to-keep files FILE0, FILE1, ....",
)
@overwrite_option
@section(GENERAL)
@option("--dry-run", is_flag=True, help="Print the plan and exit.")
@local_broker_option
@json_option
@quiet_option
def command(**options: Any) -> int:
    """Build a faiss index of the embeddings in OUT, tuned for the requested recall.

    OUT is an output folder of embq, or a folder of .npy, .parquet or .h5 files with embeddings; several of one kind
    become one index, with --output. The plan is printed before work starts. After an interruption, the same command
    continues. If OUT has more rows than its index, the new rows are added. The report is in infos.json and report.png
    of the version that CURRENT names. With --broker, the workers of that broker build; they see OUT and the index by
    the same names.

    Exit status: 0 the index is as requested, 3 it is built but misses the recall or the time, 65 it cannot be built.
    """
    from embq.app.indexing.build import index

    return index(options)


@click.command(
    "export",
    cls=SectionedCommand,
    epilog="Examples: embq index export ./out | embq index export ./out knn.index --shards 4 | "
    "embq index export ./out ./served --output-format clip-back",
)
@click.argument("source", metavar="OUT", type=click.Path())
@click.argument("path", metavar="[FILE|DIR]", type=click.Path(), required=False)
@option(
    "--output-format",
    "form",
    type=click.Choice(["faiss", "clip-back"]),
    default="faiss",
    help="A file of faiss, or a folder that clip-retrieval's back end serves.",
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
    """Write the index of OUT as a file that `faiss.read_index` opens, also memory-mapped.

    FILE is by default the folder of the index with .index behind its name. Ids are those of `embq search`, deleted rows
    are left out. Memory is that of centroids and codebooks, whatever the rows.

    With --output-format clip-back, DIR is a new folder, by default OUT.clip-back, with image.index, text.index,
    metadata and indices_paths.json: clip-retrieval back --indices_paths DIR/indices_paths.json.
    """
    from embq.app.indexing.faiss_export import export as run

    return run(options)


@click.command("dedup", cls=SectionedCommand, epilog="Example: embq index dedup ./out --threshold 0.95")
@click.argument("source", metavar="OUT", type=click.Path(file_okay=False))
@option(
    "--threshold",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    default=0.95,
    metavar="X",
    help="Least cosine of near duplicates.",
)
@vector_name_option
@option("--nprobe", type=click.IntRange(min=1), help="Lists that are searched for each row.  [those of a search]")
@memory_option
@workers_option
@option("--dry-run", is_flag=True, help="Print the plan and exit.")
@local_broker_option
@json_option
@quiet_option
def dedup(**options: Any) -> int:
    """Group near duplicates among the rows of the index of OUT: rows whose vectors have a cosine of at least X.

    Rows that are connected through others are one group, and the row with the lowest id is kept. Nothing is deleted:
    the groups are in dedup-X-VERSION/groups.parquet in the folder of the index, which `embq index OUT --delete-from`
    and `embq export --without` take. After an interruption, the same command continues.
    """
    from embq.app.indexing.dedup import run_dedup

    return run_dedup(options)
