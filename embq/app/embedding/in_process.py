"""A loaded model in this process, with the stages of a worker around it: the same passes, and so the same numbers."""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import numpy as np

from embq.core.errors import DeviceError, EmbqError, ModelError, UsageError
from embq.core.models import ModelConfig, ModelSpec
from embq.core.process.limits import cores
from embq.core.queue.hints import Hint
from embq.core.queue.ledger import Ledger
from embq.core.queue.runs import RunRecord
from embq.core.rows.spec import RowSpec
from embq.core.run.run_info import WorkerDefaults
from embq.core.settings import child_environment
from embq.core.units import Failure, Sample, Unit
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.embedders.base import PromptedEmbedder
from embq.worker.embedders.device.tuning import tune
from embq.worker.embedders.device.warm_up import warm_up
from embq.worker.embedders.registry import load
from embq.worker.meter.meter import Meter
from embq.worker.stages.pipeline import POLL_S, Pipeline
from embq.worker.stages.publish import Publisher
from embq.worker.supervisor.slot import KEPT_MEMORY

UNIT_SAMPLES = 1_000
"""Samples that are handed to the stages together."""
UNITS_AHEAD = 4
"""Units in the stages at once; their samples are in memory."""


class CallUnit(LeasedUnit):
    """Some samples of a call, which are not leased from anybody.

    Args:
        samples: their ordinals count from 0.
        done: called with the unit when all of them are rows or failures, in a thread of the stages.
    """

    def __init__(
        self, number: int, samples: list[Sample], record: RunRecord, done: Callable[[CallUnit], object]
    ) -> None:
        unit = Unit(kind="call", source=f"call:{number}", samples=len(samples))
        hint = Hint(run=record.run, gen="", u=number, unit=unit)
        # There is no ledger: what would ask it is overridden.
        super().__init__(hint, record, cast(Ledger, None), f"call.{number}", attempts=0, poison=frozenset())
        self.requested = samples
        self.done = done

    def begin(self) -> bool:
        """See `Lease`."""
        return not self.lost

    def vectors_of(self, output: str, dim: int) -> tuple[np.ndarray, list[int]]:
        """float32 of shape (rows, dim), and the ordinal of each."""
        if not self.samples:
            return np.empty((0, dim), np.float32), []
        return np.concatenate(self.vectors[output]), [sample.ordinal for sample in self.samples]


class InProcess(Publisher):
    """A model on one device. Safe to use from any thread; calls share passes.

    Args:
        config: of the model.
        device: "cpu", "cuda", "cuda:1".
        batch_size: most samples of a pass; 0 for what suits the device.
        threads: that decode and tokenise; 0 for one per core.

    Raises as `embq.worker.embedders.registry.load` does, and UsageError as `check_not_forked`.
    """

    def __init__(self, config: ModelConfig, device: str, *, batch_size: int = 0, threads: int = 0) -> None:
        check_not_forked()
        _LOADED_BY.add(os.getpid())
        if device == "cpu":
            keep_memory()
        self.embedder = load(config, device)
        if batch_size:
            self.embedder.batch_size = batch_size
        warm_up(self.embedder, config.modalities)
        tune(self.embedder, config, device=device, batch_size=batch_size)
        self._record = RunRecord(
            run="0" * 16, output="/", model=config, units=1, rows=RowSpec(dtype="float32"), workers=WorkerDefaults()
        )
        self._numbers = itertools.count()
        self._prompt = (ModelSpec.parse(config.spec), "")
        self._callers: list[int] = []
        self._turns = threading.Condition()
        self._pipeline = Pipeline(
            self.embedder,
            Leases(),
            Meter(threads or cores()),
            self,
            prefetch=UNITS_AHEAD,
            source=lambda unit: cast(CallUnit, unit).requested,
        )
        self._pipeline.start()

    def run(self, lease: LeasedUnit) -> None:
        """The last stage: give a complete unit back to its call."""
        unit = cast(CallUnit, lease)
        unit.done(unit)

    def submit(self, samples: list[Sample], done: Callable[[CallUnit], object]) -> CallUnit:
        """Have samples embedded, whose ordinals count from 0. A unit that is `lost` is left out from then on."""
        unit = CallUnit(next(self._numbers), samples, self._record, done)
        self._pipeline.submit(unit)
        return unit

    def check(self) -> None:
        """Raise what broke a stage; the model can be used no more."""
        if self._pipeline.running:
            return
        error = self._pipeline.error
        if isinstance(error, EmbqError):
            raise error
        raise DeviceError("the model of this process is closed, or has failed before") from error

    @contextmanager
    def prompted(self, spec: ModelSpec, task: str = "") -> Iterator[None]:
        """A call with the prompt of a spec. Calls with the same prompt share passes; one with another waits for them.

        Args:
            spec, task: as of `PromptedEmbedder.use_prompt`.

        Raises ModelError if the model has no such prompt, UsageError if the call would wait for itself.
        """
        me = threading.get_ident()
        with self._turns:
            while self._callers and self._prompt != (spec, task):
                if me in self._callers:
                    raise UsageError(
                        "the items of a call come from a call of the same model with another prompt",
                        next_step="make a list of the items first",
                    )
                self._turns.wait()
            if self._prompt != (spec, task):
                if not isinstance(self.embedder, PromptedEmbedder):
                    raise ModelError(f"{spec}: the model takes no prompt", next_step="leave the prompt out")
                self.embedder.use_prompt(spec, task)
                self._prompt = (spec, task)
            self._callers.append(me)
        try:
            yield
        finally:
            with self._turns:
                self._callers.remove(me)
                self._turns.notify_all()

    def embed(self, samples: Iterable[Sample]) -> Iterator[CallUnit]:
        """The units of a call, in the order of its samples. What is taken of `samples` is bounded.

        Raises what broke a stage; the model can then be used no more.
        """
        done: queue.SimpleQueue[CallUnit] = queue.SimpleQueue()
        under_way: deque[CallUnit] = deque()
        finished: set[int] = set()
        iterator = iter(samples)
        try:
            while True:
                while len(under_way) < UNITS_AHEAD and (part := list(itertools.islice(iterator, UNIT_SAMPLES))):
                    under_way.append(self.submit(part, done.put))
                if not under_way:
                    return
                while under_way[0].u not in finished:
                    finished.add(self._next_done(done).u)
                finished.discard(under_way[0].u)
                yield under_way.popleft()
        finally:
            for unit in under_way:  # of a call that was given up
                unit.lost = True

    def close(self) -> None:
        """End the threads."""
        self._pipeline.close()

    def _next_done(self, done: queue.SimpleQueue[CallUnit]) -> CallUnit:
        while True:
            try:
                return done.get(timeout=POLL_S)
            except queue.Empty:
                self.check()


_LOADED_BY: set[int] = set()
"""Ids of the processes, this one and those from which it was forked, that have loaded a model."""


def check_not_forked() -> None:
    """Raise UsageError in a process that was forked after a model was loaded.

    None of the threads of a model are in the child, and torch computes no more there, not even with a new model: a pass
    waits for ever or ends the process.
    """
    if _LOADED_BY - {os.getpid()}:
        raise UsageError(
            "this process was forked from one that has loaded a model, and can compute with none",
            next_step="load the model after the fork, in each process: with multiprocessing by the start method "
            "'spawn' (DataLoader: multiprocessing_context='spawn'), with gunicorn without --preload",
        )


_MALLOC = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3}
"""Variable of glibc -> number of the parameter of `mallopt` (malloc.h) that it sets at the start of a process."""


def keep_memory() -> None:
    """Have glibc keep what a pass frees for the next one, as worker processes on a CPU do; nothing elsewhere."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in KEPT_MEMORY.items():
            if name not in child_environment():
                mallopt(_MALLOC[name], int(value))


def rows_and_failures(units: Iterable[CallUnit], output: str, dim: int) -> tuple[np.ndarray, dict[int, Failure]]:
    """float32 of shape (samples, dim), NaN if a sample has no vector; and position -> failure."""
    blocks, first = [np.empty((0, dim), np.float32)], 0
    failures: dict[int, Failure] = {}
    for unit in units:
        block = np.full((len(unit.requested), dim), np.nan, np.float32)
        vectors, ordinals = unit.vectors_of(output, dim)
        block[ordinals] = vectors
        failures |= {first + (failure.ordinal or 0): failure for failure in unit.failures}
        blocks.append(block)
        first += len(block)
    return np.concatenate(blocks), failures


def samples_of(texts: Iterable[Any]) -> Iterator[Sample]:
    """Samples of texts or encoded images, numbered from 0 within each unit."""
    for number, item in enumerate(texts):
        ordinal = number % UNIT_SAMPLES
        if isinstance(item, bytes):
            yield Sample(ordinal=ordinal, key=str(number), image=item)
        elif isinstance(item, tuple):  # why there is none
            yield Sample(ordinal=ordinal, key=str(number), error=item)
        else:
            yield Sample(ordinal=ordinal, key=str(number), text=item)
