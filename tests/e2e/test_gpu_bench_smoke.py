"""The benchmarks of a GPU do on a CPU, with small models, all that they will do there."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.lazy import lazy

pytest.importorskip("skimage")
pytest.importorskip("psutil")


from bench import gpu, gpu_profile
from bench.image_cpu import Look
from bench.report import RESULTS

torch = lazy("torch")
gpu_models = lazy("bench.gpu_models")


@pytest.mark.slow
def test_it_measures_images_and_texts_and_writes_no_result_of_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in RESULTS.glob("*")}
    assert gpu.main(["--device", "cpu", "--quick"]) == 0
    said = capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in RESULTS.glob("*")} == before
    for case in gpu_models.TINY:
        (row,) = [line.split() for line in said.splitlines() if line.split()[:1] == [case.name]]
        assert "-" not in row, "the run gave figures"
        assert all(float(cell.replace(",", "").rstrip("%")) > 0 for cell in row[1:])
    assert "images decoded" in said
    assert "texts tokenised" in said


@pytest.mark.slow
def test_a_profile_holds_each_run_and_the_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_profile.main(["--device", "cpu", "--quick", "--output", str(tmp_path / "profile.json")]) == 0
    figures = json.loads((tmp_path / "profile.json").read_text())["figures"]
    assert [(one["workers"], one["threads"]) for one in figures["runs"]] == [(1, 2), (2, 1)]
    assert all(one["rows"] >= gpu_profile.QUICK_ROWS for one in figures["runs"])
    alone, two = (one.get("process") for one in figures["runs"])
    assert alone["cores"] > 0, "the process computes on the CPU"
    # One worker of two may have done all before the other has its model: such a run is not looked at.
    assert not two or two["cores"] > 0
    assert figures["passes"]["pass_ms"] > 0
    assert "1x2" in capsys.readouterr().out


@pytest.mark.slow
def test_a_process_that_dies_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError):
        gpu.in_a_process(os._exit, 1)


@pytest.mark.parametrize("is_memory", [True, False])
def test_a_device_error_ends_one_model_and_what_is_done_is_written_after_each(
    is_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images, texts = gpu_models.TINY
    error = torch.OutOfMemoryError("no memory") if is_memory else RuntimeError("CUDA error")
    out = tmp_path / "gpu.json"
    written: list[list[str]] = []

    def in_this_process(do: Callable[..., Any], *arguments: Any, prepares: bool = False) -> Any:
        if do is not gpu_models.alone:
            return "CPU", 1e9
        written.append(list(json.loads(out.read_text())["figures"]["models"]) if out.exists() else [])
        if arguments[0] is images:
            raise error
        one = {"rows_per_s": 5.0, "rows": 4, "flops": 1e6}
        return {
            "forward": one,
            "loop": one,
            "prepare": {"per_s_one_thread": 1.0, "per_s_one_process": 1.5, "per_s": 2.0},
        }

    monkeypatch.setattr(gpu, "in_a_process", in_this_process)
    monkeypatch.setattr(gpu, "at_once", lambda count, do, *arguments: do(threading.Barrier(1), *arguments))
    monkeypatch.setattr(gpu, "make_pictures", lambda folder, scale: None)
    monkeypatch.setattr(gpu, "run", lambda *arguments: {"rows_per_s": 4.0})
    assert gpu.main(["--device", "cpu", "--quick", "--output", str(out)]) == 0
    assert written == [[], [images.name]], "the first model's error is there before the second one begins"
    models = json.loads(out.read_text())["figures"]["models"]
    assert str(error) in models[images.name]["failed"]
    assert models[texts.name]["run_of_alone"] == 0.8
    assert f"{images.name}: {error}" in capsys.readouterr().out


@pytest.mark.slow
def test_every_batch_is_computed_in_inference_mode(tmp_path: Path) -> None:
    batches: list[bool] = []

    def look(module: object, inputs: tuple[Any, ...], output: Any) -> None:
        if inputs and isinstance(inputs[0], torch.Tensor) and len(inputs[0]) > 1:
            batches.append(torch.is_inference_mode_enabled())

    hook = torch.nn.modules.module.register_module_forward_hook(look)
    try:
        figures = gpu_models.alone(gpu_models.TINY[1], "cpu", "fp32", tmp_path, gpu_models.QUICK)
    finally:
        hook.remove()
    assert batches
    assert all(batches)
    assert figures["loop"]["tokens_per_s"] == pytest.approx(gpu_models.TOKENS * figures["loop"]["rows_per_s"], rel=0.01)
    mean = sum(gpu_models.mixed_lengths(gpu_models.QUICK.pictures)) / gpu_models.QUICK.pictures
    mixed = figures["loop_mixed"]
    assert mixed["tokens_per_s"] / mixed["rows_per_s"] == pytest.approx(mean, rel=0.1)


def test_each_word_of_its_texts_is_a_token() -> None:
    tokenizer = gpu_models.word_pieces()
    assert len(tokenizer) == gpu_models.VOCABULARY
    ids = tokenizer(gpu_models.texts_of([gpu_models.TOKENS, 5]))["input_ids"]
    assert [len(row) for row in ids] == [gpu_models.TOKENS, 5]
    assert tokenizer.unk_token_id not in ids[0]


def test_operations_are_counted_with_attention() -> None:
    """open_clip gives 8.82 billion for an image through ViT-B/32 (`docs/model_profile.csv`)."""
    forward = gpu_models.CASES[0].forward("cpu", torch.float32, (1,), 0.01)
    assert forward.flops == pytest.approx(8.82e9, rel=0.01)
    assert {"ViT-B-32", "ViT-L-14", "DistilBERT"} <= {case.name for case in gpu_models.CASES}


def test_what_is_missing_is_named_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None if name in ("open_clip", "rq") else sys.modules["sys"])
    assert gpu.main(["--device", "cpu"]) == 2
    assert "open_clip_torch, rq" in capsys.readouterr().err


@pytest.mark.parametrize("bench", [gpu, gpu_profile])
def test_without_a_gpu_it_says_so(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device, and it would be measured")
    assert bench.main([]) == 2
    assert "torch sees none here" in capsys.readouterr().err


def test_unknown_models_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--quick", "--only", "tiny,huge"]) == 2
    assert "no such model: huge" in capsys.readouterr().err


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
    monkeypatch.setattr(gpu, "in_a_process", lambda *arguments: ("CPU", 1e9))
    assert gpu.main(["--device", "cpu", "--quick"]) == 0
    said = capsys.readouterr().out
    for case in gpu_models.TINY:
        assert f"{case.name}: no time was left" in said


def test_the_lock_is_held_by_threads_and_functions() -> None:
    raw = "thread (10): prepare_3;f (a.py:1);of (b.py:7) 30\nthread (11): prepare_11;of (b.py:9) 10\n"
    raw += "thread (9): embed 5\n"
    assert gpu_profile.lock_figures(raw, 90) == {
        "held": 0.5,
        "threads": {"prepare": 0.444, "embed": 0.056},
        "functions": {"of (b.py)": 0.444, "": 0.056},
    }
    assert gpu_profile.lock_figures("", 90) == {}


def test_the_cpu_time_of_threads_is_that_within_the_window() -> None:
    looks = [
        Look(at, {(1, "worker", 10): 2 * at, (1, "worker", 11): at, (2, "worker", 12): 9 * at})
        for at in (0.0, 1.0, 3.0, 9.0)
    ]
    found = gpu_profile.thread_figures(looks, 1, 0.5, 3.5, {10: "prepare_0"})
    assert found == {"seconds": 2.0, "cores": 3.0, "threads": {"prepare": 2.0, "no Python": 1.0}}
