"""Runs without rows: removed if their own command is wrong, and if a corrected command takes their folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embq.app.cli.shared_options import settings_with
from embq.app.status.run_monitor import RunMonitor
from embq.core.broker.embedded import keep_to_ourselves
from embq.core.errors import EmbqError, Exit, TryLaterError
from embq.core.run import checkpoint
from embq.core.run.control import RunState
from embq.core.run.layout import ENTRIES, Layout
from embq.core.run.run_info import RunInfo, load_run
from embq.core.storage.paths import Place

NOTHING_MADE = (Exit.USAGE, Exit.BAD_INPUT, Exit.CONFIG)
"""Exit statuses of errors that the same command ends with again."""


def is_new(root: Place) -> bool:
    """True for a folder of this machine that is missing or empty."""
    return isinstance(root, Path) and (not root.exists() or (root.is_dir() and not any(root.iterdir())))


@contextmanager
def undone_on_error(root: Place, new_run: RunInfo | None, *, broker: str) -> Iterator[None]:
    """Remove a run whose block ends with an error of the command itself before anything was committed: the corrected
    command then finds no other run there.

    Args:
        new_run: the run, if this process has made it in a new folder; None leaves everything alone.
        broker: a run that is in a broker of others is left alone.
    """
    try:
        yield
    except EmbqError as error:
        of_command = error.exit_code in NOTHING_MADE and error.code != "service"  # else the service's log says why
        ours = new_run is not None and not settings_with(broker).broker_url
        if isinstance(root, Path) and ours and of_command and _is_unbegun(root, new_run):
            shutil.rmtree(root)
        raise


def remove_without_rows(root: Place) -> bool:
    """Remove a run of `embq run` that has no rows and that no process serves; returns whether it was removed."""
    layout = Layout(root)
    progress = RunMonitor(root, None).poll()
    if not isinstance(root, Path) or progress.rows:
        return False
    # A run that had no private server may be known to the broker of others, whose services may be at work on it.
    private = layout.broker.is_dir() and any(entry.name != "lock" for entry in layout.broker.iterdir())
    if progress.state != RunState.DONE and not private:
        return False
    if {entry.name for entry in root.iterdir()} - {*ENTRIES, layout.run_json.name}:  # files of others
        return False
    try:
        lock = keep_to_ourselves(layout.broker)
    except TryLaterError:
        return False
    with lock:
        shutil.rmtree(root)
    return True


def _is_unbegun(root: Path, new_run: RunInfo | None) -> bool:
    info = load_run(root)
    return new_run is not None and info.run == new_run.run and checkpoint.current(Layout(root), info.units).count == 0
