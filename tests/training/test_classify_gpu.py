"""A training on a GPU: in each precision to its end, and killed and gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.waiting import wait_until
from tests.training.classifying import TINY, Processes, class_shards, keys_of, log_of, trained

ARGUMENTS = [one for one in TINY if one != "--device=cpu"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_killed_training_on_a_gpu_goes_on_with_the_same_samples(precision: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    shards = class_shards(tmp_path / "s", [9, 5, 12, 7, 11])
    arguments = [str(shards), *ARGUMENTS, "--splitshards", f"--precision={precision}", "--output"]
    (ended,) = trained([*arguments, str(tmp_path / "whole")], tmp_path / "notes")
    assert ended.status == 0, ended.err
    out = tmp_path / "out"
    processes = Processes([*arguments, str(out)], tmp_path / "killed")
    wait_until(lambda: (out / "log.jsonl").exists() and (out / "log.jsonl").read_bytes().count(b"\n") >= 3)
    processes.kill()
    (ended,) = trained([*arguments, str(out)], tmp_path / "resumed")
    assert ended.status == 0, ended.err
    assert "goes on at epoch 1, step" in ended.err
    assert keys_of(out, 0) == keys_of(tmp_path / "whole", 0)
    # Kernels of a GPU may add in another order each time.
    losses = [[line["loss"] for line in log_of(one, "train")] for one in (out, tmp_path / "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
