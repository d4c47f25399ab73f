"""MMoCLIP on one GPU; on a CPU its bench does all that it will do there, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.session import ended

pytest.importorskip("open_clip_train")

from bench.mmoclip import gpu
from bench.report import RESULTS


@pytest.mark.slow
def test_the_bench_of_a_gpu_works_and_writes_no_result_of_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--quick"]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["tiny"]]
    name, device, batch, iterations, first, rate, *_ = row
    assert (name, device, batch, iterations) == ("tiny", "CPU", "16", "4")
    assert float(first) > 0
    assert float(rate) > 0
    assert (
        not (RESULTS / "mmoclip_gpu.json").exists()
        or json.loads((RESULTS / "mmoclip_gpu.json").read_text())["machine"]["gpu"]
    )


def test_without_a_gpu_it_says_what_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu"]) == 2
    assert "--device cpu --quick" in capsys.readouterr().err


@pytest.mark.gpu
def test_vit_l_14_trains_on_a_gpu_beside_the_published_rate(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    arguments = [
        "--num-devices",
        "1",
        "--samples",
        "320",
        "--batch-size",
        "64",
        "--grad-checkpointing",
        "--json",
        "--output",
    ]
    status, stdout, stderr = ended("bench", "mmoclip", *arguments, tmp_path / "out", deadline_s=280)
    assert status == 0, stderr
    told = json.loads(stdout)
    assert told["gpu"]
    assert (told["iterations"], told["model"], told["comparable"]) == (5, "ViT-L-14", False)
    assert told["loss"] == pytest.approx(told["loss_expected"], abs=0.05)
    assert told["samples_per_s_per_gpu"] > 5
    assert told["extrapolated_secs_on_32_gpus"] > 0
    assert not any("CPU" in reason for reason in told["reasons"])
