"""Prometheus metrics of a writer."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from embq.core.service.metrics import MetricSamples
from embq.writer.service import WriterService


class WriterMetrics:
    """Reads a writer that is at work; see `embq.core.service.metrics.WRITER`."""

    def __init__(self, writer: WriterService) -> None:
        self._writer = writer

    def __call__(self, readings: MetricSamples) -> None:
        """Read all; while the writer works, values may be of slightly different moments."""
        counts = self._writer.counts
        readings.put("embq_writer_commits_total", counts.commits)
        readings.put("embq_writer_parts_total", counts.parts)
        readings.put("embq_writer_rows_total", counts.rows)
        readings.put("embq_writer_failures_total", counts.failures)
        readings.put("embq_writer_bytes_total", counts.bytes)
        readings.put("embq_writer_commit_seconds", counts.seconds)
        for code, count in dict(counts.rejected).items():
            readings.put("embq_writer_rejected_total", count, code)
        runs = dict(self._writer.runs)
        readings.put("embq_writer_runs", len(runs))
        readings.put("embq_writer_runs_refused", self._writer.refused())
        for name, run in runs.items():
            readings.put("embq_writer_epoch", run.committer.epoch, name)
            readings.put("embq_writer_buffered_rows", run.buffer.rows, name)
            readings.put("embq_writer_buffered_bytes", run.buffer.bytes, name)
            if isinstance(root := run.layout.root, Path):
                with suppress(OSError):  # the folder may be gone
                    readings.put("embq_writer_output_free_bytes", shutil.disk_usage(root).free, name)
