"""`embq index`: builds, grows, changes and exports an index."""

from __future__ import annotations

from typing import Any

import click

from embq.app.cli.index_command import IndexCommand
from embq.app.cli.run_command import InputsArgument
from embq.app.cli.sections import SectionedCommand
from embq.app.cli.shared_options import json_option, local_broker_option, quiet_option, vector_name_option

VERBS = {
    "dedup": ("embq.app.verbs.index:dedup", "Group near duplicates."),
    "export": ("embq.app.verbs.index:export", "Write an index as files that faiss and clip-retrieval read."),
}
"""Verb -> see `LazyGroup`."""

memory_option = click.option(
    "--current-memory-available",
    "--max-memory",
    "current_memory_available",
    default=None,
    metavar="SIZE",
    help="Memory limit on this machine.  [free memory, at most 32G]",
)
overwrite_option = click.option("--overwrite", is_flag=True, help="Replace exported files that exist.")
workers_option = click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Processes on this machine; with --broker, the processes of `embq worker` on each machine.",
)


@click.command(
    "index",
    cls=IndexCommand,
    later=VERBS,
    epilog="Examples: embq index ./out | embq index ./out --recall 0.98@10 --max-index-memory-usage 4G | "
    "embq index ./embeddings -o ./my-index --metric-type l2. The options of `autofaiss build_index` (--embeddings, "
    "--index_path, --index_infos_path, ...) and of `clip-retrieval index` (--embeddings_folder, --index_folder, ...) "
    "are accepted as well.",
)
@click.argument("sources", cls=InputsArgument, metavar="OUT...", type=click.Path(), nargs=-1, required=True)
@click.option(
    "--output",
    "-o",
    type=click.Path(file_okay=False),
    default=None,
    help="Folder, s3:// or gs:// URL of the index.  [OUT/index/NAME]",
)
@vector_name_option
@click.option("--recall", default="0.95@10", show_default=True, metavar="R@K", help="Recall that searches must reach.")
@click.option(
    "--max-index-memory-usage",
    default="16G",
    show_default=True,
    metavar="SIZE",
    help="Memory limit of the index for searching.",
)
@memory_option
@click.option(
    "--max-index-query-time-ms",
    type=float,
    default=None,
    metavar="MS",
    help="Tune for the highest recall within this time per query, instead of the shortest time for --recall.",
)
@click.option(
    "--metric-type",
    type=click.Choice(["ip", "l2"]),
    default="ip",
    show_default=True,
    help="Metric; ip is the cosine for vectors of length 1.",
)
@click.option(
    "--index-key", default=None, metavar="KEY", help="faiss factory string, such as IVF4096,SQ8.  [by memory]"
)
@click.option(
    "--nb-indices-to-keep",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Split the index into N pieces, each within the memory limit, for one machine each.",
)
@click.option(
    "--min-nearest-neighbors-to-retrieve",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="Results that a search must be able to return.",
)
@click.option(
    "--refine",
    type=click.Choice(["auto", "none", "fp16"]),
    default="auto",
    show_default=True,
    help="Store float16 vectors on disk to re-rank candidates.",
)
@click.option(
    "--queries",
    multiple=True,
    metavar="NAME=FILE",
    help="Additional query set for measuring: .npy, or the output of a run of the same model.",
)
@click.option(
    "--file-format",
    type=click.Choice(["npy", "parquet", "hdf5"]),
    default=None,
    help="Format of a plain folder.  [by names]",
)
@click.option("--embedding-column-name", default=None, metavar="NAME", help="Column of vectors in parquet files.")
@click.option("--id-columns", default="", metavar="LIST", help="Columns of parquet files to keep besides the vectors.")
@click.option("--drop-invalid", is_flag=True, help="Skip vectors that are zero or not finite, and count them.")
@click.option("--seed", type=int, default=1234, show_default=True, help="Random seed for samples, queries and k-means.")
@workers_option
@click.option("--rebuild", is_flag=True, help="Rebuild even if the current index is up to date.")
@click.option("--delete", multiple=True, metavar="KEY", help="Delete the rows with this key; repeatable.")
@click.option(
    "--delete-from",
    multiple=True,
    metavar="FILE",
    help="Delete the rows with the keys in FILE, one per line, or the duplicates in a groups.parquet of `dedup`.",
)
@click.option(
    "--delete-ids",
    multiple=True,
    metavar="FILE",
    help="Delete the rows with the ids in FILE, one per line, as the map and a search give them.",
)
@click.option("--compact", is_flag=True, help="Merge added rows into the lists, and drop deleted rows.")
@click.option(
    "--index-path",
    type=click.Path(dir_okay=False),
    default=None,
    metavar="FILE",
    help="Write the index as a file of faiss too, or as --nb-indices-to-keep files FILE0, FILE1, ....",
)
@overwrite_option
@click.option("--dry-run", is_flag=True, help="Print the plan and exit.")
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
    arguments, clip = options.pop("autofaiss"), options.pop("clip_index")
    if clip:
        from embq.app.indexing.clip_index import index_as_clip_retrieval

        return index_as_clip_retrieval(arguments, **clip, as_json=options["as_json"], quiet=options["quiet"])
    if arguments:
        from embq.app.indexing.autofaiss import index_as_autofaiss

        return index_as_autofaiss(arguments, as_json=options["as_json"], quiet=options["quiet"])
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
@click.option(
    "--output-format",
    "form",
    type=click.Choice(["faiss", "clip-back"]),
    default="faiss",
    show_default=True,
    help="A file of faiss, or a folder that clip-retrieval's back end serves.",
)
@vector_name_option
@click.option(
    "--shards",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Write N files FILE0, FILE1, ... with a range of the lists each; searches merge their answers.",
)
@click.option(
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
@click.option(
    "--threshold",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    default=0.95,
    show_default=True,
    metavar="X",
    help="Least cosine of near duplicates.",
)
@vector_name_option
@click.option(
    "--nprobe",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="Lists that are searched for each row.  [those of a search]",
)
@memory_option
@workers_option
@click.option("--dry-run", is_flag=True, help="Print the plan and exit.")
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
