"""Sixty wrong uses of the command line: one clear error each, the right exit status, and nothing written."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from embq.app.status.display import Display
from embq.app.status.run_monitor import RunMonitor
from tests.e2e.session import called, succeed, write_texts
from tests.support.outputs.build import build

RUN = "run texts.jsonl -o new -m stub:8"
WRONG: dict[str, tuple[int, str]] = {
    # --- no or unknown verbs and options
    "rum texts.jsonl": (2, "no verb 'rum'. Did you mean run?"),
    "back out": (2, "Did you mean embq serve?"),
    "build_index out": (2, "Missing option '--embeddings'"),
    "run": (2, "Missing argument 'INPUT...'"),
    "run texts.jsonl -m stub:8": (2, "Missing option '--output'"),
    "run texts.jsonl -o new": (2, "Missing option '--model'"),
    f"{RUN} --bacth-size 4": (2, "'--batch-size'"),
    f"{RUN} --out other": (2, "No such option '--out'"),
    f"{RUN} --workers-per-device 2": (2, "Did you mean '--workers'?"),
    "status out extra": (2, "unexpected extra argument (extra)"),
    # --- values of options
    f"{RUN} --batch-size many": (2, "'many' is not a whole number"),
    f"{RUN} --batch-size -1": (2, "0<=x<=1048576"),
    f"{RUN} --precision fp8": (2, "'fp8' is not one of"),
    f"{RUN} --dtype double": (2, "'double' is not one of"),
    f"{RUN} --output-format csv": (2, "'csv' is not one of"),
    f"{RUN} --unit-size 0": (2, "1<=x<=100000"),
    f"{RUN} --sample 2": (2, "0<x<=1"),
    f"{RUN} --priority 1000": (2, "1<=x<=100"),
    f"{RUN} --chunk-tokens 4": (2, "x>=16"),
    f"{RUN} --modality sound": (2, "unknown modality 'sound'"),
    f"{RUN} --devices gpu": (2, "unknown device 'gpu'"),
    f"{RUN} --log mlflow": (2, "'mlflow' is neither"),
    f"{RUN} --truncate-dim 9": (65, "vectors of stub:8 have 8 numbers"),
    f"{RUN} --similarity": (2, "this run embeds text"),
    f"{RUN} --broker http://localhost": (78, "must start with redis://"),
    f"{RUN} --broker redis://127.0.0.1:1": (69, "no broker answers at redis://127.0.0.1:1"),
    # --- models
    "run texts.jsonl -o new -m minilm2": (65, "unknown model 'minilm2'"),
    "run texts.jsonl -o new -m stub:x": (65, "positive number"),
    "run texts.jsonl -o new -m stub:8?colour=red": (65, "unknown parameter 'colour'"),
    "run texts.jsonl -o new -m stub:8?colour=red --dry-run": (65, "unknown parameter 'colour'"),
    "run texts.jsonl -o new -m minilm?batch_size=many --dry-run": (65, "batch_size must be a whole number"),
    "run texts.jsonl -o new -m open_clip:ViT-B-32/nosuch": (65, "has no weights 'nosuch'"),
    "run texts.jsonl -o new -m open_clip:ViT-B-32": (65, "needs the tag of its weights"),
    "run texts.jsonl -o new -m open_clip:ViT-Z-1/openai": (65, "no architecture 'ViT-Z-1'"),
    "run texts.jsonl -o new -m st:./nowhere": (65, "no model folder ./nowhere"),
    "run texts.jsonl -o new -m hf:org/absent?pooling=mean": (65, "is not in the cache"),
    "run texts.jsonl -o new -m stub:8 -m stub:8": (2, "2 models would be called 'stub'"),
    "run texts.jsonl -o new -m a=stub:8": (2, "the run has one model"),
    "run texts.jsonl -o new -m open_clip:ViT-B-32/openai?init=random": (65, "random weights have no tag 'openai'"),
    f"{RUN} --limit all": (2, "'all' is not a whole number"),
    f"{RUN} --batch-size 1.5": (2, "'1.5' is not a whole number"),
    f"{RUN} --overwrite": (2, "Nothing is overwritten"),
    f"{RUN} --resume": (2, "`embq resume OUT`"),
    "run s3:// -o new -m stub:8": (65, "names no bucket"),
    # --- inputs
    "run nowhere.jsonl -o new -m stub:8": (65, "nowhere.jsonl is not found"),
    "run 'no/*.tar' -o new -m stub:8": (65, "no file matches"),
    "run empty_folder -o new -m stub:8": (65, "nothing to embed in this folder"),
    "run notes.docx -o new -m stub:8": (65, "a file of this name is no input"),
    "run numbers.csv -o new -m stub:8": (65, "more than one column may hold the texts"),
    f"{RUN} --text-column txet": (65, "has a field 'txet'"),
    "run broken.parquet -o new -m stub:8": (65, "cannot be read as what its name says"),
    # --- outputs
    "run texts.jsonl -o taken -m stub:8": (65, "holds no embq run"),
    "run texts.jsonl -o texts.jsonl -m stub:8": (2, "is a file"),
    "run texts.jsonl -o out -m stub:4": (65, "stub:8 there, stub:4 asked for"),
    "run more.jsonl -o out -m stub:8": (2, "would be added to it"),
    "enqueue texts.jsonl -o new -m stub:8": (78, "no broker is configured"),
    # --- other verbs
    "status nowhere": (65, "is not a folder"),
    "resume nowhere": (65, "is not an embq output folder"),
    "failures taken": (65, "is not an embq output folder"),
    "verify nowhere": (65, "is not an embq output folder"),
    "gc taken": (65, "is not an embq output folder"),
    "gc out --older-than soon": (2, "'soon' is not a time"),
    "logs nowhere": (65, "does not exist"),
    "export out new": (2, "either --output-format or --to is needed"),
    "export nowhere new --output-format npy": (65, "is not an embq output folder"),
    "index nowhere": (65, "nowhere is not there"),
    "index out --recall 2": (2, "'2' is no recall target"),
    "index out --max-index-memory-usage lots": (2, "'lots' is no size"),
    "search nowhere hello": (65, "does not exist"),
    "serve nowhere": (65, "does not exist"),
    # --- folders that are no output or index, and parts of one
    "search empty_folder hello": (65, "holds neither a run nor an index"),
    "atlas empty_folder": (65, "holds neither a run nor an index"),
    "serve empty_folder": (65, "holds neither a run nor an index"),
    **{
        f"{verb} out/{name}": (65, "belongs to the output of the run")
        for verb in ("atlas", "serve", "index", "verify", "status", "failures")
        for name in ("parts", "commits")
    },
    "search out/parts hello": (65, "belongs to the output of the run"),
    "export out/parts new --output-format npy": (65, "belongs to the output of the run"),
    "search out hello --vector-name image": (65, "the run has no vectors of that name"),
    "ui nowhere --port 0": (65, "there is no folder"),
    "index biuld out": (2, "biuld does not exist. Did you mean the verb build?"),
    "index out other_model -o new": (65, "the one has vectors of stub:16, the other of stub:8"),
    "pause out": (65, "is done"),
    "cancel out": (65, "is done"),
    "cancel stopped": (78, "no `embq run` is at work"),
    # --- paths that the file system cannot follow
    **{
        f"{verb} {path}": (2, "cannot be used")
        for verb in ("run texts.jsonl -m stub:8 -q -o", "index out -o", "index", "serve", "verify", "status")
        for path in ("x" * 300,)
    },
    "index out -o loop/new": (2, "cannot be used"),
    "index out -o texts.jsonl/new": (2, "cannot be used"),
    "serve loop/new": (2, "cannot be used"),
    "verify loop/new": (2, "cannot be used"),
    "run texts.jsonl -m stub:8 -o s3://b/absent": (74, "s3://b/absent/run.json may not be written"),
    "worker": (78, "no broker is configured"),
    "health --url http://127.0.0.1:1/health": (69, "no service answers at"),
    "shards count nowhere.tar": (2, "no verb 'count'"),
}
"""Command -> exit status, and part of the message."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Inputs of several kinds, an output `out` with 20 rows, and `taken`, a folder of somebody else."""
    folder = tmp_path_factory.mktemp("wrong")
    write_texts(folder / "texts.jsonl", 20)
    write_texts(folder / "more.jsonl", 5, name="m")
    for name in ("empty_folder", "taken"):
        (folder / name).mkdir()
    (folder / "taken" / "mine.txt").write_text("mine")
    (folder / "notes.docx").write_text("notes")
    (folder / "numbers.csv").write_text("a,b\n1,2\n")
    (folder / "loop").symlink_to("loop")
    (folder / "broken.parquet").write_bytes(b"PAR1xxx")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("EMBQ_BROKER_URL", raising=False)
        patch.setenv("HF_HUB_OFFLINE", "1")
        succeed("run", "texts.jsonl", "-o", "out", "-m", "stub:8", "--quiet")
        succeed("index", "out", "--quiet")
        succeed("run", "texts.jsonl", "-o", "other_model", "-m", "stub:16", "--quiet")
        build(folder / "stopped", [folder / "texts.jsonl"], only=1)
        yield folder


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_use_is_one_clear_error_and_nothing_is_written(folder: Path, command: str) -> None:
    exits, says = WRONG[command]
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    status, out, said = called(*shlex.split(command))
    assert (status, out) == (exits, ""), said
    errors = [line for line in said.splitlines() if line.startswith(("error[", "Error: "))]
    assert len(errors) == 1, said
    assert says in errors[0], said
    if errors[0].startswith("error["):
        assert any(line.startswith("  next:  ") for line in said.splitlines()), said
    assert "Traceback" not in said
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    ("models", "next_step"),
    [
        ("a=stub:8", "-m stub:8"),
        ("a=b=stub:8", "-m stub:8"),
        ("minilm,stub:8", "did you mean -m minilm -m stub:8?"),
        ("open_clip:ViT-B-32/openai?init=random&seed=1", "open_clip:ViT-B-32?init=random&seed=1"),
    ],
)
def test_a_wrong_model_is_answered_with_the_right_one(folder: Path, models: str, next_step: str) -> None:
    _, _, said = called("run", "texts.jsonl", "-o", "new", "-m", models)
    assert f"  next:  {next_step}\n" in said


@pytest.mark.parametrize("option", ["--max-memory", "--current-memory-available"])
def test_the_memory_of_a_build_has_the_name_that_was_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    words = ["index", "out", "-o", "new", option, "1kb"]
    monkeypatch.setattr(sys, "argv", ["embq", *words])
    _, _, said = called(*words)
    assert f"{option} allows each" in said
    assert f"{option} 2" in said


def test_a_run_that_is_watched_in_a_log_is_shown_at_once(folder: Path) -> None:
    status, _, said = called("status", "out", "--watch")
    assert status == 0
    assert "state=done" in said


def test_the_first_state_of_a_run_is_logged_at_once(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    progress = RunMonitor(folder / "stopped", None).poll()
    with Display(says_first=True) as display:
        display.show(progress)
        display.show(progress)
    assert capsys.readouterr().err.count("units=1/") == 1
