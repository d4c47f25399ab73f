"""Runs `embq index dedup`: plan, groups of near rows, and the commands that leave the duplicates out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from embq.core.errors import Exit, command_line
from embq.core.formats.duplicate_groups import GROUPS
from embq.core.process.limits import cores
from embq.core.service.progress_line import duration, size_text
from embq.index.commands.build import memory_of, runner_of
from embq.index.commands.progress import ConsoleProgress
from embq.index.dedup.dedup import DedupPlan, dedup, make_spec, plan_dedup
from embq.index.dedup.stages import MOST_NEIGHBOURS
from embq.index.index_files.files import to_json
from embq.index.index_files.version import index_path, read_current, resolve_index


def run_dedup(options: Mapping[str, Any]) -> int:
    """Group near duplicates; returns the exit status."""
    memory_bytes = memory_of(options)
    index = resolve_index(index_path(options["source"]), options["vector_name"])
    base = read_current(index)
    spec = make_spec(base, options["threshold"], options["nprobe"])
    quiet = options["quiet"] or options["as_json"]
    if options["dry_run"] or not quiet:
        share = memory_bytes // options["workers"]
        planned = plan_dedup(base, spec, threads=cores(), memory_bytes=share)
        if options["dry_run"]:
            click.echo(json.dumps(to_json(planned)) if options["as_json"] else _describe(planned, spec.threshold))
            return Exit.DONE
        click.echo(_describe(planned, spec.threshold), err=True)
    with runner_of(options, memory_bytes) as runner:
        folder, report = dedup(index, base, spec, runner, ConsoleProgress(quiet=quiet))
    if options["as_json"]:
        click.echo(json.dumps({**report, "index": str(index), "folder": str(folder)}))
    else:
        _print_result(options["source"], folder, report)
    return Exit.DONE


def _describe(plan: DedupPlan, threshold: float) -> str:
    return "\n".join(
        [
            f"near duplicates with a cosine of at least {threshold:g} among {plan.rows:,} rows; {plan.nprobe:,} of "
            f"{plan.nlist:,} lists are searched for each",
            f"pairs       about {plan.pairs:,}, by a sample of the rows",
            f"in memory   {size_text(plan.ram_bytes)} for each process",
            f"on disk     {size_text(plan.disk_bytes)} while it lasts",
            f"time        about {duration(max(1.0, plan.seconds))}",
        ]
    )


def _print_result(source: str, folder: Path, report: Mapping[str, Any]) -> None:
    click.echo(
        f"{report['duplicates']:,} of {report['rows']:,} rows are near duplicates of {report['groups']:,} others "
        f"(cosine >= {report['threshold']:g}); the largest group has {report['largest_group']:,} rows\n"
        f"groups      {folder / GROUPS}"
    )
    if report["duplicates"]:
        click.echo(
            f"delete      {command_line('index', 'delete', source, '--from', folder / GROUPS)}\n"
            f"leave out   {command_line('export', 'OUT', 'DIR', '--output', 'parquet', '--without', folder / GROUPS)}"
        )
    if report["saturated"]:
        click.echo(
            f"note: {report['saturated']:,} rows have more than {MOST_NEIGHBOURS} near ones, and are connected with "
            "the nearest of these; after deleting, the same command shows what is left",
            err=True,
        )
