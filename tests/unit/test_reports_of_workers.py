"""Reports of a fleet, as many runs look at them."""

from __future__ import annotations

from typing import Any

import pytest

from embq.app.status import broker_snapshot as module
from embq.app.status.broker_snapshot import Reports


def worker(name: str, model: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "model": model, "silent_s": 0.5, "rows_per_s": 2.0, "load_s": 1.0, **changes}


def test_workers_are_told_apart_by_model_and_by_run() -> None:
    found = Reports(
        [
            worker("b", "m", runs={"r": {"units": 1}}),
            worker("a", "m", runs={"r": {"units": 2}}, silent_s=60.0, load_s=3.0),
            worker("c", "other", runs={"r": {"units": 3}}),
            worker("d", "third", serves="a run of its own"),
            worker("e", "fourth"),
        ]
    )
    serving = found.serving("m")
    assert [one["name"] for one in serving.workers] == ["a", "b"]
    assert (serving.rows_per_s, serving.load_s) == (2.0, 3.0), "the rate is of those that are not silent"
    assert found.other_models("m") == ["fourth", "other"]
    assert found.shares("r") == [{"units": 1}, {"units": 3}]
    assert found.shares("r", "m") == [{"units": 1}]
    assert found.shares("none") == found.serving("none").workers == []


def test_the_bottleneck_of_a_model_is_found_once_however_many_runs_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = module.bottleneck_now
    monkeypatch.setattr(module, "bottleneck_now", lambda workers: calls.append(len(workers)) or real(workers))
    found = Reports([worker("a", "m"), worker("b", "m")])
    assert found.serving("m").now == found.serving("m").now
    assert calls == [2]
