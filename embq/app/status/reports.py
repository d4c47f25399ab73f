"""Reports of all workers at one moment, sorted once by run and by model, because each of many runs looks at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from embq.app.status.bottleneck import Bottleneck, bottleneck_now, bottleneck_so_far
from embq.app.status.eta import SILENT_S

Report = dict[str, Any]


class Serving:
    """The workers that serve one model; what follows from their reports is computed once for all readers.

    Attributes:
        workers: their reports, by name.
    """

    def __init__(self, workers: Sequence[Report] = ()) -> None:
        self.workers = sorted(workers, key=lambda worker: str(worker.get("name")))

    @cached_property
    def now(self) -> Bottleneck:
        """Their bottleneck now."""
        return bottleneck_now(self.workers)

    @cached_property
    def so_far(self) -> Bottleneck:
        """Their bottleneck since they have work."""
        return bottleneck_so_far(self.workers)

    @cached_property
    def rows_per_s(self) -> float:
        """Of those that are not silent, together."""
        reporting = (worker for worker in self.workers if worker.get("silent_s", 0.0) <= SILENT_S)
        return sum(float(worker.get("rows_per_s", 0)) for worker in reporting)

    @cached_property
    def load_s(self) -> float:
        """Seconds of loading, of the slowest."""
        return max((float(worker.get("load_s", 0)) for worker in self.workers), default=0.0)


class Reports:
    """Reports of all workers, also of those that serve other models."""

    def __init__(self, workers: Sequence[Report] = ()) -> None:
        by_model: dict[Any, list[Report]] = {}
        self._of_run: dict[str, list[Report]] = {}
        for worker in workers:
            by_model.setdefault(worker.get("model"), []).append(worker)
            for run in worker.get("runs", ()):
                self._of_run.setdefault(run, []).append(worker)
        self._serving = {model: Serving(of_model) for model, of_model in by_model.items()}
        self._free = {str(worker.get("model")) for worker in workers if not worker.get("serves")}

    def serving(self, model: str) -> Serving:
        """The workers that serve a model."""
        return self._serving.get(model) or Serving()

    def other_models(self, model: str) -> list[str]:
        """Models of the workers that can serve this one later."""
        return sorted(self._free - {model})

    def of_run(self, run: str, model: str = "") -> list[Report]:
        """The workers with units of a run, of those that serve a model if one is named."""
        return [worker for worker in self._of_run.get(run, ()) if model in ("", worker.get("model"))]

    def shares(self, run: str, model: str = "") -> list[Mapping[str, Any]]:
        """The part of each live one's report on the run."""
        return [worker["runs"][run] for worker in self.of_run(run, model) if worker["silent_s"] <= SILENT_S]
