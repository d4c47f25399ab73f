"""Estimates a run before it is made: units, bytes, rows and size of the vectors."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from dataclasses import dataclass

from embq.core.errors import EmbqError
from embq.core.models import Chunking, ModelConfig, ModelSpec
from embq.core.rows.metadata import renamed
from embq.core.rows.spec import DTYPES, Column, RowSpec
from embq.core.run.run_info import load_run
from embq.core.units import Sample, Unit
from embq.producer.enqueue import Request, additions_to, plan_of
from embq.producer.model_args import vector_dim
from embq.producer.plan import first_columns
from embq.sources.unit_reader import read

LOOKED_AT = 3
"""Units that are read where only reading tells how many samples they have."""
LOOKED_AT_BYTES = 1 << 30
LOOKED_AT_S = 20.0
CHARS_PER_TOKEN = 3.3
"""Characters per token of text in European languages, with chunks that end with a sentence and so are not quite full.
Source code and other scripts have fewer."""
NUMBER_BITS = {"float16": 16, "float32": 32, "int8": 8, "binary": 1}
"""Stored type -> bits of one number of a vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Size of a run.

    Attributes:
        run: id of the run in the output folder, "" if there is none. With a run, all but `existing_units` is about what
            would be added to it.
        existing_units: units of that run.
        config: the model, with the modalities that the inputs have.
        stored: the stored form of its vectors.
        kinds: kind of input -> units.
        bytes: of the inputs.
        rows: samples; None if no unit could be read to find out.
        exact: whether the samples were counted and not estimated.
        looked_at: units that were read for the estimate.
        columns: the columns of metadata.
        documents: texts that are cut into chunks, each of which is a row; None if none are cut, or only reading
            tells how many there are.
        warnings: about the inputs, one line each.
        listing: as in the plan.
    """

    run: str
    existing_units: int
    config: ModelConfig
    stored: RowSpec
    kinds: dict[str, int]
    bytes: int
    rows: int | None
    exact: bool
    looked_at: int
    warnings: tuple[str, ...]
    columns: tuple[Column, ...] = ()
    documents: int | None = None
    listing: str = ""

    @property
    def units(self) -> int:
        """Number of units."""
        return sum(self.kinds.values())

    def vector_bytes(self, dims: int) -> dict[str, int]:
        """Bytes of all vectors of `dims` numbers a row, by the dtype in which they are stored; {} without `rows`."""
        return {} if self.rows is None else {dtype: self.rows * dims * NUMBER_BITS[dtype] // 8 for dtype in DTYPES}

    def stored_dims(self, dims: int) -> int:
        """Stored numbers of a row whose vectors have one length and `dims` numbers together."""
        count = len(self.config.outputs)
        return self.stored.kept_dim(dims // count) * count if count else dims


def estimate(request: Request) -> Estimate:
    """Plan a request and throw the plan away. Raises what `embq.producer.enqueue.prepare` would; writes nothing.

    Where only reading tells how many samples a unit has, a few units are read.
    """
    layout, planned, config = plan_of(request)
    existing_run = load_run(layout.root) if layout.run_json.exists() else None
    if existing_run is None:
        columns, units = first_columns(planned.units)
    else:
        columns, units = existing_run.rows.columns, additions_to(layout, request, planned, existing_run)
    tally = _Tally(config.chunking)
    for unit in units:
        tally.add(unit)
    rows, looked_at = tally.estimated()
    return Estimate(
        run=existing_run.run if existing_run is not None else "",
        existing_units=existing_run.units if existing_run is not None else 0,
        config=config,
        stored=request.rows,
        kinds=dict(tally.kinds),
        bytes=tally.bytes,
        rows=rows,
        exact=not tally.unread,
        looked_at=looked_at,
        warnings=(*planned.warnings, *(renamed(columns) if existing_run is None else ())),
        listing=planned.listing,
        columns=columns,
        documents=tally.samples if config.chunking is not None and tally.counted else None,
    )


class _Tally:
    """Totals of the units, and a random sample of those whose rows only reading tells.

    Attributes:
        samples: of the units whose number of samples is planned.
        counted: whether all units do, empty ones aside.
        unread: number of units that have to be read to know their rows.
    """

    def __init__(self, chunking: Chunking | None) -> None:
        self.kinds: Counter[str] = Counter()
        self.bytes = self.samples = self.unread = 0
        self.counted = True
        self._unread_bytes = 0
        self._chosen: list[Unit] = []
        self._chunking = chunking
        self._rng = random.Random(0)

    def add(self, unit: Unit) -> None:
        """Add one unit."""
        self.kinds[unit.kind] += 1
        self.bytes += _size(unit)
        self.samples += unit.samples or 0
        self.counted = self.counted and (unit.samples is not None or not _size(unit))
        if unit.samples is not None and self._chunking is None:
            return
        self.unread += 1
        self._unread_bytes += _size(unit)
        if len(self._chosen) < LOOKED_AT:
            self._chosen.append(unit)
        elif (at := self._rng.randrange(self.unread)) < LOOKED_AT:
            self._chosen[at] = unit

    def estimated(self) -> tuple[int | None, int]:
        """Rows, None if no unit could be read to find out; and the number of those that were read for it."""
        chunking = self._chunking
        counted_rows, looked_at = _count(self._chosen, chunking)
        rows: int | None = self.samples
        if self.unread and chunking is not None and self.counted:
            texts = sum(unit.samples or 0 for unit in looked_at)
            rows = round(counted_rows / texts * self.samples) if texts else None
        elif self._unread_bytes:  # files that could not be planned have none
            read_bytes = sum(map(_size, looked_at))
            known_rows = self.samples if chunking is None else 0
            rows = known_rows + round(counted_rows / read_bytes * self._unread_bytes) if read_bytes else None
        return rows, len(looked_at)


def known_dims(config: ModelConfig, rows: RowSpec) -> int | None:
    """Stored numbers of all vectors of a row; None if only loading the model tells."""
    lengths = [vector_dim(ModelSpec.parse(output.spec)) for output in config.outputs]
    return None if None in lengths else sum(rows.kept_dim(length) for length in lengths if length is not None)


def _size(unit: Unit) -> int:
    return sum(size for _, size in unit.items) if unit.items else unit.stop - unit.start


def _count(units: list[Unit], chunking: Chunking | None) -> tuple[int, list[Unit]]:
    """Rows of those of `units` that could be read in a bounded time, and which these are."""
    deadline = time.monotonic() + LOOKED_AT_S
    rows = 0
    done: list[Unit] = []
    for unit in units:
        if _size(unit) > LOOKED_AT_BYTES or time.monotonic() > deadline:
            continue
        try:
            rows += sum(1 if chunking is None else _chunks(chunking, sample) for sample in read(unit, ()))
        except EmbqError:  # the run will report it
            continue
        done.append(unit)
    return rows, done


def _chunks(chunking: Chunking, sample: Sample) -> int:
    """Approximate number of chunks of a text."""
    fresh = (chunking.tokens - chunking.overlap) * CHARS_PER_TOKEN
    return max(1, math.ceil(len(sample.text or "") / fresh))
