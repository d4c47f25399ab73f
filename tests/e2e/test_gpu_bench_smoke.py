"""The benchmark of a GPU does on a CPU, with small models, all that it will do there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("skimage")
pytest.importorskip("simplejpeg")

from bench import gpu  # noqa: E402
from bench.gpu_models import IMAGES, MINILM, TEXTS, TINY, word_pieces  # noqa: E402
from bench.gpu_text import TOKENS, texts_of  # noqa: E402
from bench.report import RESULTS  # noqa: E402


@pytest.mark.slow
def test_it_measures_images_and_texts_and_writes_no_result_of_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    assert gpu.main(["--device", "cpu", "--quick"]) == 0
    said = capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == before
    for case in TINY:
        (row,) = [line.split() for line in said.splitlines() if line.split()[:1] == [case.name]]
        assert "-" not in row, "the run gave figures"
        assert all(float(cell.replace(",", "").rstrip("%")) > 0 for cell in row[1:])
    assert "images decoded" in said
    assert "texts tokenised" in said


def test_each_word_of_its_texts_is_a_token() -> None:
    tokenizer = word_pieces()
    assert len(tokenizer) == MINILM.vocab_size
    ids = tokenizer(texts_of([TOKENS, 5]))["input_ids"]
    assert [len(row) for row in ids] == [TOKENS, 5]
    assert tokenizer.unk_token_id not in ids[0]


def test_operations_are_counted_with_attention() -> None:
    """Of ViT-B/32 open_clip says 8.82 billion for an image (`docs/model_profile.csv`)."""
    forward = IMAGES[0].forward("cpu", torch.float32, (1,), 0.01)
    assert forward.flops == pytest.approx(8.82e9, rel=0.01)
    assert {case.name for case in TEXTS} == {"MiniLM-L6", "DistilBERT", "BERT-base"}


def test_what_is_missing_is_named_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name in ("open_clip", "rq") else sys.modules["sys"])
    assert gpu.main(["--device", "cpu"]) == 2
    assert "open_clip_torch, rq" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, and it would be measured")
def test_without_a_gpu_and_for_unknown_models_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "torch sees none here" in capsys.readouterr().out
    assert gpu.main(["--device", "cpu", "--quick", "--only", "tiny,huge"]) == 2
    assert "no such model: huge" in capsys.readouterr().out


def test_a_run_that_fails_or_has_no_time_says_so(tmp_path: Path) -> None:
    missing = gpu.run("stub:8", tmp_path / "missing.jsonl", tmp_path, "cpu", "fp32", 60)
    assert "missing.jsonl" in missing["failed"]
    (tmp_path / "texts.jsonl").write_text('{"id": "1", "text": "a"}\n')
    late = gpu.run("stub:8", tmp_path / "texts.jsonl", tmp_path, "cpu", "fp32", 0.01)
    assert late == {"failed": "no time was left"}


def test_models_for_which_no_time_is_left_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "LIMIT_S", 0.0)
    assert gpu.main(["--device", "cpu", "--quick"]) == 0
    said = capsys.readouterr().out
    for case in TINY:
        assert f"{case.name}: no time was left" in said
