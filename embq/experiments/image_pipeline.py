"""What all stages of a worker do together with a user's own images.

In this process, by the code that a worker runs: its readers, its embedder, its pipeline. Without a broker and a writer,
so what comes out is what a worker can do where these keep up.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

from core.queue.hints import Hint
from core.queue.registry import RunRecord
from core.units import Unit
from embq.experiments.image_stages import Look, Rate
from worker.claim.lease import LeasedUnit, Leases
from worker.meter.bottleneck import Bottleneck
from worker.meter.meter import Meter
from worker.meter.progress_board import ProgressBoard
from worker.stages.embed import EmbedStage
from worker.stages.pipeline import Pipeline
from worker.stages.read import ReadStage

if TYPE_CHECKING:
    from core.models import ModelConfig
    from core.queue.ledger import Ledger
    from worker.embedders.base import Embedder
    from worker.stages.publish import PublishStage

UNITS_WAITING = 4
"""That wait for the reader, claimed: as a worker has its next ones in hand while it reads one."""


class _Granting:
    """A ledger that grants everything and keeps nothing: what the read stage asks of one."""

    def start(self, _held: Iterable[tuple[int, str]]) -> set[str]:
        return set()

    def release(self, u: int, token: str, *, failed: tuple[str, str] | None = None) -> bool:
        del u, token, failed
        return True


class _Discard:
    """Takes complete units in place of what publishes them."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    def run(self, work: LeasedUnit) -> None:
        self._leases.remove(work)


def _pipeline(embedder: Embedder, leases: Leases, stats: Meter, threads: int) -> Pipeline:
    """That of a worker, but for what it does with complete units."""
    board = ProgressBoard()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
    return Pipeline(
        leases,
        prefetch=2 * UNITS_WAITING,
        pool=pool,
        make_read=lambda put, upcoming: ReadStage(
            embedder, pool, stats, board, roots=(), hand_on=put, upcoming=upcoming
        ),
        make_embed=lambda put: EmbedStage(embedder, leases, stats, board, hand_on=put),
        publish=cast("PublishStage", _Discard(leases)),
    )


def together(
    embedder: Embedder, config: ModelConfig, units: Sequence[Unit], threads: int, seconds: float, look: Look
) -> tuple[Rate, dict[str, Any]]:
    """How fast reading, preparing and the device are at the same time, as in a worker, for about that time after the
    first pass; and what such a worker would say that limits it. Units are begun anew until the time is over.
    """
    leases, stats = Leases(), Meter(threads)
    pipeline = _pipeline(embedder, leases, stats, threads)
    attribution = Bottleneck(stats, modalities=config.modalities, decode=config.decode)
    record = RunRecord(run="bench", output="", model=config, units=len(units))
    ledger = cast("Ledger", _Granting())
    numbered = enumerate(itertools.cycle(units))
    passes: list[tuple[float, int]] = []
    pipeline.start()
    began = time.monotonic()
    deadline = began + 4 * seconds
    try:
        while time.monotonic() < deadline:
            if pipeline.error is not None:
                raise pipeline.error
            if pipeline.waiting < UNITS_WAITING:
                u, unit = next(numbered)
                hint = Hint(run="bench", gen="bench", u=u, unit=unit)
                work = LeasedUnit(hint, record, ledger, f"bench:{u}", attempts=0, poison=frozenset())
                leases.add(work)
                pipeline.submit(work)
                continue
            if stats.last_batch_at is not None and (not passes or passes[-1][0] != stats.last_batch_at):
                if not passes:
                    attribution.look()
                    deadline = time.monotonic() + seconds
                passes.append((stats.last_batch_at, stats.rows))
            time.sleep(0.002)
            look()
        said = attribution.look()
    finally:
        for work in leases.snapshot():
            work.lost = True  # or the reader would go on to the end of its unit
        pipeline.close()
    if len(passes) < 2:
        return Rate(samples=stats.rows, seconds=time.monotonic() - began), said
    (first_at, first), (last_at, last) = passes[0], passes[-1]
    return Rate(samples=last - first, seconds=last_at - first_at), said
