"""`embq shards convert`: write pictures as webdataset shards."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import json_option, machine_workers_option
from embq.core.errors import Exit, InputError

if TYPE_CHECKING:
    from embq.training.shards.conversion import Converted
    from embq.training.shards.conversion_plan import ConversionPlan
    from embq.training.shards.pictures import Listing


SHOWN = 20
"""Left-out pictures that are printed; --json and the record have all."""


@click.command(
    "convert", cls=SectionedCommand, epilog="Example: embq shards convert ./imagenet/train shards/train-%06d.tar"
)
@click.argument("source", metavar="DIR|LIST", type=click.Path())
@click.argument("pattern", metavar="PATTERN", type=click.Path())
@option("--samples-per-shard", type=click.IntRange(min=1), default=1000, help="Samples of each shard but the last.")
@option("--seed", type=int, default=0, help="Random seed for the order of the samples.")
@option("--no-shuffle", is_flag=True, help="Keep the order of names or of LIST, as for validation.")
@option("--no-classes", is_flag=True, help="Take all pictures below DIR, without classes.")
@option(
    "--classes",
    "classes_file",
    metavar="FILE",
    help="Class names by index, a JSON list.  [the classes.json beside PATTERN]",
)
@option("--allow-empty", is_flag=True, help="Accept classes without pictures; their indices stay unused.")
@option("--no-metadata", is_flag=True, help="Omit the json of each sample, which names its file.")
@option("--decode-images", is_flag=True, help="Decode every image completely, and leave out those that fail.")
@machine_workers_option()
@option("--dry-run", is_flag=True, help="Print what would be written, and write nothing.")
@json_option
def command(
    source: str,
    pattern: str,
    samples_per_shard: int,
    seed: int,
    no_shuffle: bool,
    classes_file: str | None,
    no_metadata: bool,
    decode_images: bool,
    workers: int | None,
    dry_run: bool,
    as_json: bool,
    **listing_options: bool,
) -> int:
    """Write the pictures of DIR or LIST as webdataset shards PATTERN, such as shards/train-%06d.tar.

    DIR holds a folder for each class, or pictures with captions in .txt files beside them. LIST is a .csv, .tsv or
    .jsonl with a path and a class, a caption or both in each row, or a file with a path on each line. A sample consists
    of the unchanged picture, its class index as cls, its caption as txt, and its file name as json.

    The same pictures, options and seed give the same bytes, with any number of processes. The same command resumes an
    interrupted conversion. classes.json and sizes.json are written last, beside the shards.

    Exit status: 0 all pictures are in the shards, 3 some were left out.
    """
    from embq.core.process.limits import cores
    from embq.training.run.progress import Counter
    from embq.training.shards.conversion import convert
    from embq.training.shards.conversion_plan import ConversionPlan, Layout, Pattern
    from embq.training.shards.listing import known_classes, listing_of

    named, began = Pattern.parse(pattern), time.monotonic()
    processes, classes = workers or min(8, cores()), known_classes(classes_file, named)
    with Counter("pictures found", quiet=as_json) as progress:
        listing = listing_of(source, named, lambda count: progress.add(count, 0), classes=classes, **listing_options)
    listing = _usable(listing, check=decode_images, metadata=not no_metadata, processes=processes, quiet=as_json)
    layout = Layout(
        pattern=named,
        samples_per_shard=samples_per_shard,
        seed=None if no_shuffle else seed,
        metadata=not no_metadata,
    )
    plan = ConversionPlan.make(listing, layout)
    if dry_run:
        _print(plan, None, 0.0, as_json=as_json)
        return Exit.SOME_FAILED if listing.left_out else Exit.DONE
    with Counter("samples", len(plan.order), plan.bytes, quiet=as_json) as progress:
        done = convert(
            plan,
            source,
            processes=processes,
            skipped=lambda shard: progress.skip(len(shard.pictures), shard.bytes),
            wrote=lambda shard: progress.add(len(shard.pictures), shard.bytes),
        )
    _print(plan, done, time.monotonic() - began, as_json=as_json)
    return Exit.SOME_FAILED if listing.left_out else Exit.DONE


def _usable(listing: Listing, *, check: bool, metadata: bool, processes: int, quiet: bool) -> Listing:
    """The listing without pictures that become no sample."""
    from embq.training.run.progress import Counter
    from embq.training.shards.writing import checked, of_a_size

    listing = of_a_size(listing)
    if check:
        total = sum(picture.size for picture in listing.pictures)
        each = total / max(1, len(listing.pictures))
        with Counter("pictures checked", len(listing.pictures), total, quiet=quiet) as progress:
            listing = checked(
                listing,
                metadata=metadata,
                processes=processes,
                looked=lambda count: progress.add(count, round(count * each)),
            )
    if not listing.pictures:
        first = listing.left_out[0]
        raise InputError(
            f"none of the {len(listing.left_out):,} pictures can be used; the first is {first.name}: {first.message}",
            code="empty_input",
            next_step="check the paths, and that the pictures are whole",
        )
    return listing


def _print(plan: ConversionPlan, done: Converted | None, seconds: float, *, as_json: bool) -> None:
    from embq.core.service.progress_line import size_text
    from embq.training.shards.pictures import notes

    listing, pattern = plan.listing, plan.layout.pattern
    expression, note_lines = pattern.expression(plan.shards), notes(listing)
    if as_json:
        shape = {
            "schema": 1,
            "expression": expression,
            "shards": plan.shards,
            "written": done.written if done else 0,
            "kept": done.skipped if done else 0,
            "samples": len(plan.order),
            "bytes": plan.bytes,
            "classes": None if listing.classes is None else len(listing.classes),
            "captions": sum(picture.has_caption for picture in plan.order),
            "left_out": [entry._asdict() for entry in listing.left_out],
            "notes": note_lines,
            "seconds": round(seconds, 3),
            "dry_run": done is None,
        }
        click.echo(json.dumps(shape))
        return
    classes = "" if listing.classes is None else f", {len(listing.classes):,} classes"
    click.echo(expression)
    click.echo(f"{plan.shards:,} shards, {len(plan.order):,} samples, {size_text(plan.bytes)} of pictures{classes}")
    if done is None:
        click.echo("nothing was written")
    elif done.written:
        existing = f", {done.skipped:,} were there already" if done.skipped else ""
        click.echo(f"{done.written:,} shards written in {seconds:.1f} s{existing}")
    else:
        click.echo("all were there already")
    for note in note_lines:
        click.echo(f"note: {note}", err=True)
    for left_out in listing.left_out[:SHOWN]:
        click.echo(f"left out {left_out.name}: {left_out.code}: {left_out.message}", err=True)
    if len(listing.left_out) > SHOWN:
        click.echo(
            f"... and {len(listing.left_out) - SHOWN:,} more, all of them in the record beside the shards", err=True
        )
