"""Staging folder: results that workers on shared storage hand over by file name; in an object store their parts."""

from __future__ import annotations

import re
import secrets

from embq.core.queue.result_stream import PART_SUFFIX, RESULT_SUFFIX, Entry
from embq.core.run.layout import Layout
from embq.core.storage.beneath import written
from embq.core.storage.durable import drop_in, names_in, overwrite, writing
from embq.core.storage.objects import ObjectPath
from embq.core.storage.objects import unfinished as uploads

_NONCE = ".shared."
"""Begin of the name of a nonce that is being written."""
_STAGED = re.compile(rf"[!-.0-~]{{1,240}}(?:{re.escape(RESULT_SUFFIX)}|{re.escape(PART_SUFFIX)})")
"""Names that workers give: printable ASCII without a slash. They begin with the id of the unit."""


def leave_nonce(layout: Layout, nonce: str) -> None:
    """Workers that can read this file share storage with us and may hand over large results by name."""
    if isinstance(layout.staged_parts, ObjectPath) and layout.takes_parts:
        overwrite(layout.staged_parts / ".shared", nonce.encode())
    name = f"{_NONCE}{secrets.token_hex(4)}"
    path = layout.staging / ".shared"
    with writing(path), written(layout.staging.parent, f"{layout.staging.name}/.shared", temporary=name) as file:
        file.write(nonce.encode())


def is_staged(ref: str, unit_id: str) -> bool:
    """True if a result of the unit may name this file: it is in the staging folder, and no other unit's."""
    return _STAGED.fullmatch(ref) is not None and ref.startswith(f"{unit_id}.")


def drop_staged(layout: Layout, entry: Entry, unit_id: str) -> None:
    """Remove the file of a result of the unit that will not be taken, if it names one."""
    ref = entry.fields.get("ref", b"").decode("utf-8", "replace")
    if is_staged(ref, unit_id):
        drop_ref(layout, ref)


def drop_ref(layout: Layout, ref: str) -> None:
    """Remove the file of a result that is not taken, or is committed: a part has another name by then."""
    drop_in(layout.staged_parts if ref.endswith(PART_SUFFIX) else layout.staging, ref)


def sweep(layout: Layout, *, unfinished: bool) -> None:
    """Remove results that will not be read, such as those of workers that died before they published.

    A worker that has been overtaken may still be writing its file, and removes it itself; it is in the way only
    where no worker is alive. A nonce that is not whole is one of a writer that was killed.

    Args:
        unfinished: also what is still being written.
    """
    for place in {layout.staging, layout.staged_parts}:
        for name in names_in(place):
            if unfinished or not name.startswith(".") or name.startswith(_NONCE):
                drop_in(place, name)
    if unfinished and isinstance(layout.staged_parts, ObjectPath):
        for upload in uploads(layout.staged_parts):
            upload.abort()
