"""Judgement of a log: the benchmark's figures, no total where anything is missing, and what is comparable."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from embq.app.cli.entry_point import run
from embq.core.errors import Exit
from embq.training.mmoclip import folder, required, table
from embq.training.mmoclip.judgement import (
    FAIL,
    NOT_COMPARABLE,
    PASS,
    UNFINISHED,
    UNSOUND,
    Judgement,
    judge,
)
from tests.training.mmoclip_logs import FIRST_S, NEXT_S, PUBLISHED, line, params, whole, write

A100 = "NVIDIA A100-SXM4-40GB"


def judged(
    place: Path, lines: list[str], settings: dict[str, str] | None = None, *, nodes: int | None = 8, gpu: str = A100
) -> Judgement:
    """The judgement of a training with these lines."""
    return judge(folder.find(write(place, lines, settings)), nodes=nodes, gpu=gpu)


def test_the_published_lines_give_13_121_s_for_two_iterations_and_no_total(tmp_path: Path) -> None:
    one = judged(tmp_path, PUBLISHED.splitlines(), nodes=None, gpu="")
    figures = one.figures
    assert (figures.counted_secs, figures.counted_iterations, figures.first_iteration_s) == (13.121, 2, 137.606)
    assert (figures.iterations, figures.iterations_expected) == (3, 195)
    assert figures.total_time_secs is None
    assert figures.estimated_total_secs == pytest.approx(13.121 / 2 * 194, abs=0.001)
    assert (figures.world_size, figures.batch_size, figures.done_percent_last) == (32, 512, 2)
    assert one.verdict == UNFINISHED
    assert one.faults == ("unfinished, 3 of 195 iterations",)
    assert one.exit == Exit.BAD_INPUT


def test_a_whole_log_of_32_a100_gives_the_columns_of_the_benchmark(tmp_path: Path) -> None:
    one = judged(tmp_path, whole(), params())
    figures = one.figures
    assert one.verdict == PASS
    assert one.exit == Exit.DONE
    assert not one.reasons
    assert figures.total_time_secs == pytest.approx(194 * NEXT_S)
    assert (figures.nodes, figures.n_gpu, figures.model, figures.batch_size) == (8, 4, "ViT-L-14", 512)
    assert figures.done_percent_last == 100
    # The means take the first iteration in, the total does not.
    rates = [16384 / FIRST_S, *[16384 / NEXT_S] * 194]
    assert figures.throughput_avg == pytest.approx(sum(rates) / 195, rel=1e-5)
    assert figures.time_per_iteration_secs_avg == pytest.approx((FIRST_S + 194 * NEXT_S) / 195)
    assert figures.samples_per_s_per_gpu == pytest.approx(512 / NEXT_S)
    assert figures.loss == pytest.approx(9.7041)
    assert one.describe()["total_time_secs"] == figures.total_time_secs


def test_the_published_result_follows_from_its_iterations(tmp_path: Path) -> None:
    one = judged(tmp_path, whole(next_s=1253.51 / 194), params())
    head, _, row, *_ = table.lines(one)
    cells = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    found = {name.strip(" |"): value.strip(" |") for name, value in cells.items()}
    assert found["done_percent_last"] == "100.0"
    assert float(found["total_time_secs"]) == pytest.approx(1253.51, abs=0.1)
    assert float(found["time_per_iteration_secs_avg"]) == pytest.approx(6.94, abs=0.01)
    assert one.figures.samples_per_s_per_gpu == pytest.approx(required.PUBLISHED_PER_GPU_S, abs=0.05)


def test_slower_than_the_baseline_fails(tmp_path: Path) -> None:
    assert judged(tmp_path, whole(next_s=6.495), params()).verdict == FAIL


def test_exactly_the_baseline_passes(tmp_path: Path) -> None:
    lines = [*whole(next_s=6.495)[:-1], line(195, 1260 - 193 * 6.495)]
    one = judged(tmp_path, lines, params())
    assert (one.figures.total_time_secs, one.verdict) == (1260.0, PASS)


@pytest.mark.parametrize("kept", [194, 100, 1])
def test_a_log_that_lacks_lines_has_no_total(tmp_path: Path, kept: int) -> None:
    one = judged(tmp_path, whole()[:kept], params())
    assert one.figures.total_time_secs is None
    assert one.faults == (f"unfinished, {kept} of 195 iterations",)
    assert "no total" in "\n".join(table.lines(one))


def test_a_log_that_already_shows_100_percent_may_lack_its_last_line(tmp_path: Path) -> None:
    lines = whole(samples=64 * 300, world=2, batch=32)
    assert "(100%)" in lines[298]
    one = judged(tmp_path, lines[:299], params(world=2, batch=32, train_num_samples=str(64 * 300)))
    assert one.figures.done_percent_last == 100
    assert one.faults == ("unfinished, 299 of 300 iterations",)
    assert one.figures.total_time_secs is None


def test_a_cut_last_line_is_told(tmp_path: Path) -> None:
    lines = whole()
    one = judged(tmp_path, [*lines[:-1], lines[-1][:70]], params())
    assert one.faults == ("unfinished, 194 of 195 iterations; line 196 is cut",)


def test_a_log_without_its_middle_has_no_total(tmp_path: Path) -> None:
    lines = whole()
    one = judged(tmp_path, [*lines[:50], *lines[60:]], params())
    assert one.verdict == UNFINISHED
    assert one.figures.total_time_secs is None


def test_two_trainings_in_one_log_have_no_total(tmp_path: Path) -> None:
    one = judged(tmp_path, [*whole(), *whole()], params())
    assert one.verdict == UNSOUND
    assert "holds 2 trainings: another begins at line 197" in one.faults[0]
    assert one.figures.total_time_secs is one.extrapolated_secs is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (params(world=16), "world_size is 16, but its rates are those of 32"),
        (params(batch=256), "batch_size is 256, but its lines are as far apart as with 512"),
        (params(train_num_samples="1600000"), "train_num_samples is 1600000, but its lines count to 3200000"),
    ],
)
def test_a_log_of_another_training_than_its_params_has_no_total(
    tmp_path: Path, settings: dict[str, str], said: str
) -> None:
    one = judged(tmp_path, whole(), settings)
    assert one.verdict == UNSOUND
    assert said in one.faults[0]
    assert one.figures.total_time_secs is None


def test_a_loss_of_other_processes_is_noticed(tmp_path: Path) -> None:
    one = judged(tmp_path, [one.replace("9.7041", "9.0110") for one in whole()], params())
    assert one.verdict == UNSOUND
    assert "this loss is of 8,193 pairs" in one.faults[0]


def test_a_loss_that_is_no_number_is_noticed(tmp_path: Path) -> None:
    lines = whole()
    broken = [*lines[:9], *[one.replace("9.7041", "nan") for one in lines[9:]]]
    assert judged(tmp_path, broken, params()).faults == ("the loss is no number from line 11 on: the training broke",)


def test_the_loss_of_half_precision_is_as_good(tmp_path: Path) -> None:
    assert judged(tmp_path, [one.replace("9.7041", "9.7031") for one in whole()], params()).verdict == PASS


def test_arguments_in_the_log_that_contradict_params_are_noticed(tmp_path: Path) -> None:
    lines = ["2026-01-02,03:04:05 | INFO |   precision: fp32", *whole()]
    one = judged(tmp_path, lines, params())
    assert one.faults == ("params.txt is of another training: precision is amp there and fp32 in the log",)


def test_without_params_the_arguments_in_the_log_are_taken(tmp_path: Path) -> None:
    lines = [f"2026-01-02,03:04:05 | INFO |   {name}: {value}" for name, value in params().items()]
    assert judged(tmp_path, [*lines, *whole()]).verdict == PASS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "ViT-B-32"),
        ("local_loss", "False"),
        ("gather_with_grad", "False"),
        ("dataset_type", "csv"),
        ("force_image_size", "112"),
        ("force_patch_dropout", "0.5"),
        ("force_context_length", "16"),
        ("lock_image", "True"),
        ("lock_text", "True"),
        ("siglip", "True"),
        ("use_bnb_linear", "SwitchBackLinearGlobal"),
    ],
)
def test_what_changes_the_work_is_not_comparable(tmp_path: Path, name: str, value: str) -> None:
    one = judged(tmp_path, whole(), params(**{name: value}))
    assert one.verdict == NOT_COMPARABLE
    (reason,) = one.reasons
    assert reason.startswith(f"{name} is {value}")
    assert one.figures.total_time_secs == pytest.approx(194 * NEXT_S)
    assert one.exit == Exit.DONE


def test_fewer_lines_than_iterations_because_not_each_was_logged_has_no_total(tmp_path: Path) -> None:
    one = judged(tmp_path, whole()[9::10], params(log_every_n_steps="10"))
    assert "a line for every 10 iterations" in one.faults[0]
    assert one.figures.total_time_secs is None


def test_a_missing_argument_is_a_reason(tmp_path: Path) -> None:
    settings = params()
    del settings["local_loss"]
    assert judged(tmp_path, whole(), settings).reasons == ("local_loss is not known: True is required",)


def test_another_number_of_gpus_gets_an_extrapolation_that_is_named_as_one(tmp_path: Path) -> None:
    one = judged(tmp_path, whole(world=16), params(world=16), nodes=4, gpu="A100")
    assert one.verdict == NOT_COMPARABLE
    assert one.reasons == ("16 processes of A100: the baseline is that of 32 A100",)
    assert one.extrapolated_secs == pytest.approx(194 * NEXT_S, abs=0.01)
    text = "\n".join(table.lines(one))
    assert "extrapolation, and no result" in text
    assert PASS not in text


@pytest.mark.parametrize("gpu", ["", "NVIDIA H100 80GB HBM3", "NVIDIA RTX A1000", "NVIDIA A100-SXM4-40GB, NVIDIA H100"])
def test_another_kind_of_gpu_is_not_comparable(tmp_path: Path, gpu: str) -> None:
    one = judged(tmp_path, whole(), params(), gpu=gpu)
    assert one.verdict == NOT_COMPARABLE
    assert "32 A100" in one.reasons[0]


def test_another_model_is_not_extrapolated(tmp_path: Path) -> None:
    one = judged(tmp_path, whole(), params(model="ViT-B-32"))
    assert one.extrapolated_secs is None


def test_an_empty_log_is_unfinished(tmp_path: Path) -> None:
    one = judged(tmp_path, [], params())
    assert one.faults == ("unfinished, no iteration is in the log",)
    assert one.figures.iterations_expected == 195
    assert "| - |" in table.lines(one)[2].replace("  ", "")


def test_the_page_shows_what_the_verb_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "train" / "mmoclip.md").read_text()
    (shown,) = re.findall(r"^```\n\$ embq bench mmoclip three\.log\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "three.log").write_text(PUBLISHED)
    assert run(["bench", "mmoclip", str(tmp_path / "three.log")]) == Exit.BAD_INPUT
    assert capsys.readouterr().out.startswith(shown)
