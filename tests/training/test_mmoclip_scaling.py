"""Several logs beside each other: efficiency against the smallest, and no figure of a training without a total."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embq.app.cli.entry_point import run
from embq.core.errors import Exit, InputError
from embq.training.mmoclip import folder, scaling
from embq.training.mmoclip.judgement import Judgement, judge
from tests.training.mmoclip_logs import params, whole, write

STEPS = {8: 6.30, 16: 6.40, 32: 6.46}
"""Processes -> seconds of an iteration."""


def series(place: Path, lacking: int = 0) -> list[Judgement]:
    """Trainings of 32, 16 and 8 processes; the smallest lacks so many of its last lines."""
    found = []
    for world in sorted(STEPS, reverse=True):
        lines = whole(world=world, next_s=STEPS[world])
        kept = lines[: len(lines) - lacking] if world == min(STEPS) else lines
        found.append(folder.find(write(place / str(world), kept, params(world=world))))
    return [judge(one, gpu="A100") for one in found]


def test_efficiency_is_the_rate_of_a_gpu_over_that_of_the_smallest(tmp_path: Path) -> None:
    compared = scaling.compare(series(tmp_path))
    assert [point.judgement.figures.world_size for point in compared.points] == [8, 16, 32]
    assert [point.efficiency for point in compared.points] == pytest.approx([1, 6.30 / 6.40, 6.30 / 6.46])
    assert compared.exit == Exit.DONE


def test_without_a_total_of_the_smallest_there_is_no_efficiency(tmp_path: Path) -> None:
    compared = scaling.compare(series(tmp_path, lacking=1))
    assert [point.efficiency for point in compared.points] == [None] * 3
    assert compared.exit == Exit.BAD_INPUT
    assert any("no total: unfinished, 780 of 781 iterations" in line for line in compared.lines())


@pytest.mark.parametrize(
    ("gpu", "device", "on"), [("A100", "cuda", " on A100"), ("", "cuda", ""), ("", "cpu", " on the CPU")]
)
def test_the_picture_says_on_what_it_was_trained_where_that_is_known(
    tmp_path: Path, gpu: str, device: str, on: str
) -> None:
    one = judge(folder.find(write(tmp_path, whole(), params(device=device))), gpu=gpu)
    assert scaling.title(one) == f"MMoCLIP: ViT-L-14{on}"


@pytest.mark.parametrize(("name", "value"), [("model", "ViT-B-32"), ("precision", "amp_bf16")])
def test_trainings_of_different_work_are_no_series(tmp_path: Path, name: str, value: str) -> None:
    other = judge(folder.find(write(tmp_path / "other", whole(world=4), params(world=4, **{name: value}))))
    with pytest.raises(InputError, match=f"{name} is .* and") as error:
        scaling.compare([*series(tmp_path), other])
    assert error.value.next_step


def test_the_verb_prints_the_table_and_keeps_figures_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    series(tmp_path)
    logs = [str(tmp_path / str(world)) for world in STEPS]
    assert run(["bench", "mmoclip", *logs, "--gpu", "A100", "--output", str(tmp_path / "kept")]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert "total_time_secs | processes | samples/s per GPU | efficiency" in head
    assert [row.split(" | ")[-1].strip(" |") for row in rows[:3]] == ["1.000", "0.984", "0.975"]
    kept = json.loads((tmp_path / "kept" / "scaling.json").read_text())
    assert [one["verdict"] for one in kept["trainings"]] == ["not comparable", "not comparable", "PASS"]
    assert (tmp_path / "kept" / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_one_log_keeps_its_figures_and_its_picture_where_it_is_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "one", whole()[:30], params())
    assert run(["bench", "mmoclip", str(log / "out.log"), "--json", "--output", str(tmp_path / "kept")]) == 65
    told = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "kept" / "result.json").read_text()) == told
    assert told["total_time_secs"] is None
    assert (tmp_path / "kept" / "throughput.png").read_bytes().startswith(b"\x89PNG")


def test_options_of_a_training_are_refused_beside_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "mmoclip", str(tmp_path), "--batch-size", "256"]) == 2
    assert "--batch-size is for a training" in capsys.readouterr().err
