"""`embq index`."""

from __future__ import annotations

from typing import Any

import click

from embq.cli.options import json_option


@click.command(
    "index",
    epilog="Examples: embq index ./out | embq index ./out --recall 0.98@10 --max-index-memory-usage 4G | "
    "embq index ./embeddings --to ./my-index --metric-type l2",
)
@click.argument("source", metavar="OUT", type=click.Path())
@click.option(
    "--to", "to", type=click.Path(file_okay=False), default=None, help="Folder of the index.  [OUT/index/<output>]"
)
@click.option(
    "--output",
    default=None,
    metavar="NAME",
    help="Which of a run's vectors: image, text or a model's.  [image or the only one]",
)
@click.option("--recall", default="0.95@10", show_default=True, metavar="R@K", help="What a search must find.")
@click.option(
    "--max-index-memory-usage",
    default="16G",
    show_default=True,
    metavar="SIZE",
    help="Memory that the index may take when it is searched.",
)
@click.option(
    "--current-memory-available",
    "--max-memory",
    "current_memory_available",
    default=None,
    metavar="SIZE",
    help="Memory that building may take on this machine.  [what is free, at most 32G]",
)
@click.option(
    "--max-index-query-time-ms",
    type=float,
    default=None,
    metavar="MS",
    help="Give the highest recall within this time per query, instead of the shortest time for --recall.",
)
@click.option(
    "--metric-type",
    type=click.Choice(["ip", "l2"]),
    default="ip",
    show_default=True,
    help="ip is the cosine where vectors have length 1.",
)
@click.option(
    "--index-key", default=None, metavar="KEY", help="faiss factory string, such as IVF4096,SQ8.  [by memory]"
)
@click.option(
    "--nb-indices-to-keep",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Index as N pieces, each within the memory; a machine may load one.",
)
@click.option(
    "--min-nearest-neighbors-to-retrieve",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="Answers that a search must be able to give.",
)
@click.option(
    "--refine",
    type=click.Choice(["auto", "none", "fp16"]),
    default="auto",
    show_default=True,
    help="Keep rows on disk as float16, and re-rank candidates by them.",
)
@click.option(
    "--queries",
    multiple=True,
    metavar="NAME=FILE",
    help="A further set of queries to measure with: .npy, or the output of a run of the same model.",
)
@click.option(
    "--file-format", type=click.Choice(["npy", "parquet", "hdf5"]), default=None, help="Of a plain folder.  [by names]"
)
@click.option("--embedding-column-name", default=None, metavar="NAME", help="Column of the vectors in parquet.")
@click.option("--id-columns", default="", metavar="LIST", help="Columns of parquet to keep beside the vectors.")
@click.option("--drop-invalid", is_flag=True, help="Leave out vectors that are zero or not finite, and count them.")
@click.option("--seed", type=int, default=1234, show_default=True, help="Of samples, queries and k-means.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Processes on this machine; with --broker those that `embq worker` has on each.",
)
@click.option("--rebuild", is_flag=True, help="Build anew even where the current index is just that.")
@click.option("--delete", multiple=True, metavar="KEY", help="Delete the rows with this key from the index.")
@click.option(
    "--delete-from", multiple=True, metavar="FILE", help="Delete the rows with the keys in FILE, one on each line."
)
@click.option("--compact", is_flag=True, help="Merge what was added, and drop what was deleted.")
@click.option("--dry-run", is_flag=True, help="Print the plan, and do nothing.")
@click.option(
    "--broker",
    default="",
    metavar="URL",
    help="Have the workers of this broker do the steps.  [this machine does them, whatever EMBQ_BROKER_URL says]",
)
@json_option
@click.option("--quiet", "-q", is_flag=True, help="No progress, only the account at the end.")
def command(**options: Any) -> int:
    """Make the embeddings of OUT searchable: a faiss index, with the recall that was asked for.

    OUT is an output folder of embq, or a folder of .npy, .parquet or .h5 files with embeddings. The plan is printed
    before work starts. Interrupted, the same command goes on. Where OUT has got more rows since, they are added to the
    index that is there. The report is in infos.json and report.png of the
    version that CURRENT names.

    Exit status: 0 the index is as asked for, 3 it is built and misses the recall or the time, 65 it cannot be built.
    """
    from embq.indexing.build import index

    return index(options)
