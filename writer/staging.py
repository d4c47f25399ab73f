"""The staging folder as the writer sees it: results that workers hand over by name, because they share its storage."""

from __future__ import annotations

import re
from pathlib import Path

from core.durable import drop, output_error
from core.layout import Layout
from core.result_stream import Entry

_STAGED = re.compile(r"[!-.0-~]{1,240}\.arrow")
"""Names that workers give: printable ASCII without a slash."""


def leave_nonce(layout: Layout, nonce: str) -> None:
    """Workers that can read this file share storage with us and may hand over large results by name."""
    path = layout.staging / ".shared"
    try:
        path.write_text(nonce)
    except OSError as error:
        raise output_error(error, path) from error


def staged_path(layout: Layout, ref: str) -> Path | None:
    """The staging file that a result names; None where the name could lead out of the staging folder."""
    return layout.staging / ref if _STAGED.fullmatch(ref) else None


def drop_staged(layout: Layout, entry: Entry) -> None:
    """Remove the file of a result that will not be taken, where it names one."""
    ref = entry.fields.get("ref", b"").decode("utf-8", "replace")
    if path := staged_path(layout, ref):
        drop(path)


def sweep(layout: Layout, *, unfinished: bool) -> None:
    """Remove results that nobody will take any more, such as those of workers that died before they published.

    A worker that has been overtaken may still be writing its file, and removes it itself; it is in the way only
    where no worker is alive.

    Args:
        unfinished: also what is still being written.
    """
    for path in layout.staging.iterdir():
        if unfinished or not path.name.startswith("."):
            drop(path)
