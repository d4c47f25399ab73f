"""The pipeline with the leases off: what `embq run` does to the samples, without all that makes it survive.

    python -m bench.bare INPUT OUT MODEL UNIT_SIZE

Stages, bounds and threads are those of a worker process, checks and parts those of a writer, and a result travels as
it does there: a small one in a message, a large one as a file beside the output. But there is no broker. Nothing is
hinted, claimed, renewed, charged or given back, nobody beats and nobody watches: one process takes unit after unit
from the manifest, and sends each result through a pipe to the process that commits it.

Prints {"rows", "embed_s"}: seconds from the moment at which the reader begins the first unit to the last commit.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, cast

from embq.core.models import DECODES, ModelConfig
from embq.core.process.limits import cores
from embq.core.queue.hints import Hint
from embq.core.queue.ledger import Ledger
from embq.core.queue.result_stream import Entry, PublishVerdict
from embq.core.rows.spec import RowSpec
from embq.core.run.commit_log import CommitLog
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.run_info import RunInfo, load_run
from embq.producer.announce import record_of
from embq.producer.enqueue import Request, prepare
from embq.sources.reader_options import ReadOptions
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.embedders.base import Embedder
from embq.worker.embedders.device.warm_up import warm_up
from embq.worker.embedders.registry import load
from embq.worker.meter.meter import Meter
from embq.worker.meter.progress_board import ProgressBoard, Span
from embq.worker.stages.pipeline import Pipeline
from embq.worker.stages.publish import PublishStage
from embq.writer.accept import Acceptor
from embq.writer.commit import Buffer, Committer

NONCE = "bare"
PREFETCH = 2
LOOK_S = 0.02
"""Interval at which the writer asks whether a part is due; `embq writer` rests as long when it has nothing to do."""


class Results(Protocol):
    """Takes results."""

    def send(self, result: Any, /) -> None:
        """Take the next one."""
        ...


class WideStream:
    """A result stream with room for any number of results, which publishing asks for."""

    def has_room(self) -> bool:
        return True


class FreeLedger:
    """Grants everything, keeps nothing, and hands results on. What the stages ask of `embq.core.queue.ledger.Ledger`.

    Attributes:
        began: monotonic seconds of the first `start`, or 0.0.
    """

    def __init__(self, results: Results) -> None:
        self.began = 0.0
        self.results = WideStream()
        self._taker = results

    def start(self, _held: Iterable[tuple[int, str]]) -> set[str]:
        self.began = self.began or time.monotonic()
        return set()

    def meta(self) -> dict[str, str]:
        return {"nonce": NONCE}

    def publish(self, u: int, token: str, fields: Mapping[str, str | bytes | int], *, size: int) -> PublishVerdict:
        self._taker.send({"u": u, "token": token, "bytes": size, **fields})
        return PublishVerdict.ACCEPTED


class NoBoard(ProgressBoard):
    """A progress board that keeps nothing."""

    def step(self, stage: str, units: Iterable[Span] = ()) -> AbstractContextManager[None]:
        del stage, units
        return nullcontext()

    def advance(self) -> None:
        return


def work(root: Path, results: Connection) -> None:
    """The worker process; at the end it sends the time of the first unit."""
    results.send(embed_all(root, results))


def embed_all(
    root: Path, results: Results, loaded: Callable[[ModelConfig, str], Embedder] = load, *, threads: int = 0
) -> float:
    """Every unit of the manifest through the pipeline, in order; gives the time at which the first began.

    Args:
        loaded: gives the model of a config on a device.
        threads: that prepare; 0 for one for each core.
    """
    layout, info = Layout(root), load_run(root)
    record = record_of(info, root)
    embedder = loaded(info.model, "cpu")
    warm_up(embedder, info.model.modalities)
    free = FreeLedger(results)
    ledger = cast("Ledger", free)
    leases, meter = Leases(), Meter(threads or cores(), board=NoBoard())
    publish = PublishStage(meter, fingerprint=embedder.fingerprint, dims=embedder.dims, transport="auto")
    pipeline = Pipeline(embedder, leases, meter, publish, prefetch=PREFETCH)
    pipeline.start()
    for u, unit in enumerate(Manifest(layout)):
        hint = Hint(run=info.run, gen="bare", u=u, unit=unit)
        one = LeasedUnit(hint, record, ledger, f"bare:{u}", attempts=0, poison=frozenset())
        leases.add(one)
        pipeline.submit(one)
    while not leases.wait_until_at_most(0, timeout_s=1.0):
        if pipeline.error is not None:
            raise pipeline.error
    pipeline.close()
    return free.began


def write(root: Path, results: Connection) -> tuple[int, float]:
    """The writer: every result checked and committed; gives the rows, and the time of the last commit."""
    layout, info = Layout(root), load_run(root)
    manifest, log = Manifest(layout), CommitLog(layout)
    committer = Committer(layout, info, log, log.replay(info.units), writer="bare", version="bench")
    committer.take_epoch()
    acceptor = Acceptor(layout, manifest, info, fingerprint="", widths={})
    buffer = Buffer(part_rows=info.part_rows)
    last_commit = 0.0

    def flush() -> None:
        nonlocal last_commit
        if not (taken := buffer.drain()):
            return
        committer.fingerprint = acceptor.fingerprint
        committer.commit(taken)
        last_commit = time.monotonic()
        for result in taken:
            if result.staged:
                (layout.staging / result.staged).unlink()

    while committer.state.count < len(manifest):
        if results.poll(LOOK_S):
            result = acceptor.accept(_entry(results.recv()))
            if not buffer.fits(result):
                flush()
            buffer.add(result)
        if buffer.is_due() or committer.state.count + len(buffer.units) == len(manifest):
            flush()
    committer.close({})
    return committer.state.rows, last_commit


def _entry(fields: Mapping[str, str | bytes | int]) -> Entry:
    """A result as the broker's stream gives it."""
    as_bytes = {name: value if isinstance(value, bytes) else str(value).encode() for name, value in fields.items()}
    return Entry("0-1", as_bytes)


def plan(
    source: Path, root: Path, model: str, unit_size: int, *, dtype: str = "float16", modalities: tuple[str, ...] = ()
) -> RunInfo:
    """The run, planned as `embq run` plans it."""
    options = ReadOptions(unit_samples=unit_size)
    request = Request(
        inputs=(str(source),),
        output=root,
        models=(model,),
        modalities=modalities,
        precision="fp32",
        part_rows=1_000_000,
        options=options,
        rows=RowSpec(dtype=dtype),
        version="bench",
        decode=DECODES[0],
    )
    return prepare(request).info


def main() -> None:
    """One run."""
    source, root, model, unit_size = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    plan(source, root, model, unit_size)
    (Layout(root).staging / ".shared").write_text(NONCE)
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe(duplex=False)
    worker = processes.Process(target=work, args=(root, theirs))
    worker.start()
    theirs.close()
    rows, last_commit = write(root, ours)
    began = ours.recv()
    worker.join()
    print(json.dumps({"rows": rows, "embed_s": last_commit - began}))


if __name__ == "__main__":
    main()
