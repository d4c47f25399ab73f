"""What the processes of open_clip's training could not read.

open_clip leaves it out and logs a line of it, of process 0 only. So each process notes what it meets, loader workers
too, in a file of its own; hosts without a common folder note it each in theirs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from training.openclip.cures import log_by_name, name_of, replaced


@contextmanager
def noted_failures(folder: Path | None) -> Iterator[None]:
    """Each rank has a file `rank-R.txt` of lines `shard<tab>member`; the member is "" of a shard that is damaged.

    It is there from the beginning, so that who counts knows of which ranks there is something to count; each epoch and
    each start adds its own lines. None notes nothing, and then nothing is changed.
    """
    if folder is None:
        yield
        return
    from open_clip_train import data

    get_shards, read_shards = data.get_wds_dataset, data.tarfile_to_samples_nothrow

    def with_notes(args: Any, *rest: Any, **options: Any) -> Any:
        path = folder / f"rank-{args.rank}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:  # a training is worth more than its notes
            logging.warning("%s cannot be written: %s", path, error.strerror)
            return get_shards(args, *rest, **options)
        note = partial(log_and_note, path)
        # open_clip's reader of training shards was given its `log_and_continue` when it was defined.
        with (
            replaced(data, "log_and_continue", note),
            replaced(data, "tarfile_to_samples_nothrow", partial(read_shards, handler=note)),
        ):
            return get_shards(args, *rest, **options)

    with replaced(data, "get_wds_dataset", with_notes):
        yield


def log_and_note(path: Path, error: Exception) -> bool:
    """In place of `log_and_continue` of open_clip_train/data.py; at module level, so that loader workers can get it."""
    shard, member = name_of(error)
    try:
        # In one write at the end, whichever loader worker comes first.
        to = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(to, f"{shard}\t{member}\n".encode())
        finally:
            os.close(to)
    except OSError as refused:
        logging.warning("%s cannot be written: %s", path, refused.strerror)
    return log_by_name(error)


def noted(folder: Path) -> tuple[int, list[tuple[str, str]]]:
    """(ranks that have noted, each shard and member that one of them could not read, in order)."""
    files = [path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("rank-*.txt")]
    found = {
        (shard, member) for text in files for line in text.splitlines() for shard, _, member in [line.partition("\t")]
    }
    return len(files), sorted(found)
