"""The columns of a run's metadata, found by a look at its first units when it is made."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain, islice

from core.errors import EmbqError
from core.rows.metadata import find_columns
from core.rows.spec import Column
from core.service.log import Events
from core.units import Unit
from sources.inspection import first_metadata
from sources.kinds import may_have_metadata

log = Events("producer")

LOOK_UNITS = 8
"""Units that are looked into."""

LOOK_AMONG = 64
"""First units among which they are looked for, so that planning still streams where few can have metadata."""

LOOK_SAMPLES = 100
"""Samples of each of them."""

LOOK_S = 10.0
"""So long all of it may take; inputs that are slower than this get the columns that were seen until then."""


def first_columns(units: Iterator[Unit]) -> tuple[tuple[Column, ...], Iterator[Unit]]:
    """The columns of a run of `units`, and all the units again.

    The same inputs give the same columns. A unit that cannot be read, or ends its reader, says nothing; it will fail
    when its turn comes. Raises what taking the first units does.
    """
    first = list(islice(units, LOOK_AMONG))
    deadline = time.monotonic() + LOOK_S
    texts: list[str] = []
    looked = 0
    for unit in first:
        if looked == LOOK_UNITS:
            break
        if (left_s := deadline - time.monotonic()) <= 0:
            log.warning("metadata_slow", source=unit.source, after_s=LOOK_S)
            break
        if not may_have_metadata(unit):
            continue
        looked += 1
        try:
            texts += first_metadata(unit, LOOK_SAMPLES, wait_s=left_s)
        except EmbqError as error:
            log.warning("metadata_unseen", source=unit.source, code=error.code, why=error.message)
    return find_columns(texts), chain(first, units)
