"""What follows from a change of what is served: the metrics tell it, and the model of a new version is loaded."""

from __future__ import annotations

from embq.serving.metrics import Metrics
from embq.serving.models import Models
from embq.serving.served_index import ServedIndex


class Changes:
    """Called by who notices: `watching` of versions, `following` of whole indices."""

    def __init__(self, metrics: Metrics, models: Models) -> None:
        self._metrics, self._models = metrics, models

    def opened(self, index: ServedIndex) -> None:
        """An index is served in a version. Its model is left to the start of the application."""
        version = index.version
        self._metrics.gauge("embq_index_rows").labels(index.name, index.modality).set(version.rows)
        info = self._metrics.gauge("embq_index_info")
        info.remove_by_labels({"index": index.name, "modality": index.modality})
        info.labels(index.name, index.modality, version.name).set(1)

    def appeared(self, index: ServedIndex) -> None:
        """An index is there that was not, while others are served."""
        self.opened(index)
        self._models.want(index.version)

    def taken_up(self, index: ServedIndex, result: str) -> None:
        """There was a new version; `result` is "done" or "failed"."""
        self._metrics.counter("embq_index_reloads_total").labels(index.name, index.modality, result).inc()
        if result == "done":
            self.appeared(index)

    def gone(self, index: ServedIndex) -> None:
        """An index is served no more."""
        for name in ("embq_index_rows", "embq_index_info"):
            self._metrics.gauge(name).remove_by_labels({"index": index.name, "modality": index.modality})
