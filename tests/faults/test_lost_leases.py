"""A unit whose lease is lost leaves the pipeline, wherever it is by then."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from embq.core.models import ModelConfig
from embq.core.rows.spec import RowSpec
from embq.core.units import Sample, Unit
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.embedders.registry import load
from embq.worker.meter.meter import Meter
from embq.worker.stages.embed import EmbedStage
from embq.worker.stages.read import Chunk, EndOfUnit

CONFIG = ModelConfig(spec="stub:4", modalities=("text",), precision="fp32")


@pytest.mark.fault("N1", "a unit whose lease is lost leaves the pipeline wherever it is", gate=True)
@pytest.mark.parametrize("moment", ["before its samples", "before its end", "after its end"])
def test_a_unit_whose_lease_is_lost_is_let_go_of_and_not_handed_on(moment: str) -> None:
    embedder = load(CONFIG, "cpu")
    leases = Leases()
    handed_on: list[LeasedUnit] = []
    stage = EmbedStage(embedder, Meter(), hand_on=handed_on.append)
    lost, kept = _unit("lost"), _unit("kept")
    for work in (lost, kept):
        leases.add(work)

    for work in (lost, kept):
        work.lost = work is lost and moment == "before its samples"
        samples = [Sample(ordinal=n, key=str(n), text=f"{n}") for n in range(3)]
        prepared: Future[Any] = Future()
        prepared.set_result((samples, embedder.prepare(samples)))
        stage.add(Chunk(work, samples, prepared))
        work.lost = work.lost or (work is lost and moment == "before its end")
        stage.add(EndOfUnit(work, 3))
    lost.lost = True
    stage.flush()

    assert handed_on == [kept]
    assert leases.snapshot() == [kept]  # until it is published


def _unit(name: str) -> LeasedUnit:
    hint = SimpleNamespace(u=0, run="r", gen="1-0", unit=Unit(kind="lines", source=name))
    record = SimpleNamespace(model=CONFIG, rows=RowSpec())
    ledger = SimpleNamespace(start=lambda held: set())
    return LeasedUnit(
        cast("Any", hint), cast("Any", record), cast("Any", ledger), f"1-0:{name}:0", attempts=0, poison=frozenset()
    )
