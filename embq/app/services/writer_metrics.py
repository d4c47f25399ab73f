"""Prometheus metrics of a writer."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from embq.core.service.metrics import MetricSamples
from embq.writer.service import WriterService


def put_writer(writer: WriterService, samples: MetricSamples) -> None:
    """Put the metrics of a writer, see `embq.core.service.metrics.WRITER`.

    While the writer works, values may be of slightly different moments.
    """
    counts = writer.counts
    samples.put("embq_writer_commits_total", counts.commits)
    samples.put("embq_writer_parts_total", counts.parts)
    samples.put("embq_writer_rows_total", counts.rows)
    samples.put("embq_writer_failures_total", counts.failures)
    samples.put("embq_writer_bytes_total", counts.bytes)
    samples.put("embq_writer_commit_seconds", counts.seconds)
    for code, count in dict(counts.rejected).items():
        samples.put("embq_writer_rejected_total", count, code)
    runs = dict(writer.runs)
    samples.put("embq_writer_runs", len(runs))
    samples.put("embq_writer_runs_refused", writer.refused())
    for name, run in runs.items():
        samples.put("embq_writer_epoch", run.committer.epoch, name)
        samples.put("embq_writer_buffered_rows", run.buffer.rows, name)
        samples.put("embq_writer_buffered_bytes", run.buffer.bytes, name)
        if isinstance(root := run.layout.root, Path):
            with suppress(OSError):  # the folder may be gone
                samples.put("embq_writer_output_free_bytes", shutil.disk_usage(root).free, name)
