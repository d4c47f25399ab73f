#!/usr/bin/env python3
"""ImageNet as shards, as the webdataset ImageNet kit's `convert-image.py`."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from embq.app.cli.entry_point import run, show_error
from embq.core.errors import Exit, InputError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("root", metavar="ROOT")
@click.option("--odir", default="./shards", show_default=True, metavar="DIR", help="Where the shards are to be.")
def convert_image(root: str, odir: str) -> NoReturn:
    """Write ImageNet as shards: ROOT/train shuffled, ROOT/val in order, each a folder of class folders.

    The same as `embq shards convert ROOT/train DIR/imagenet-train-%06d.tar`, then with --no-shuffle for val. Other
    than the kit's, it keeps the bytes of the pictures, and shuffles.
    """
    if missing := [part for part in ("train", "val") if not os.path.isdir(os.path.join(root, part))]:
        error = InputError(
            f"{os.path.join(root, missing[0])}: is no folder",
            code="source_missing",
            next_step="name the folder that holds train and val, or convert each with `embq shards convert`",
        )
        show_error(error)
        sys.exit(error.exit_code)
    statuses: list[int] = []
    for part, options in (("train", []), ("val", ["--no-shuffle"])):
        pattern = os.path.join(odir, f"imagenet-{part}-%06d.tar")
        statuses.append(run(["shards", "convert", os.path.join(root, part), pattern, *options]))
        if statuses[-1] not in (Exit.DONE, Exit.SOME_FAILED):
            break
    sys.exit(max(statuses))


if __name__ == "__main__":
    convert_image()
