"""The experiments: statistics, what is said of figures, how far they are, and pictures."""

from __future__ import annotations

import io
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from embq.core import benchmark_record
from embq.core.errors import InputError, OutputError, UsageError
from embq.core.service.progress_line import ProgressLine
from embq.lab import conduct, experiments
from embq.lab.outcomes import (
    Condition,
    ConditionOutcome,
    ExperimentResult,
    Replicate,
    WorkerShare,
    condition_figures,
    time_text,
)
from embq.lab.services import Setup, memory_mb, share_of, write_records
from embq.lab.statistics import Measured, days_for, number, together, unit_cost
from embq.lab.texts import texts_for
from embq.lab.trials import Progress, check_records
from tests.support.fakes.nvml import Card, fake_nvml

CORPUS = 20_648_877


def outcome(condition: Condition, rates: Sequence[float], *, memory_mb: float = 100.0) -> ConditionOutcome:
    """An outcome in which every device did as much as every other."""
    worker_set = condition.worker_set
    shares = [
        WorkerShare(device=d, rows=600, tokens=6000, busy_s=3.0)
        for d in worker_set.devices
        for _ in range(worker_set.per_device)
    ]
    records, memory = 600 * worker_set.size, memory_mb * worker_set.size
    runs = [
        Replicate(records=records, failures=0, seconds=records / rate, shares=tuple(shares), memory_mb=memory)
        for rate in rates
    ]
    return ConditionOutcome(condition=condition, replicates=tuple(runs), load_s=0.5, device_names={})


def worker_outcomes(*rates: Sequence[float]) -> list[ConditionOutcome]:
    conditions = experiments.worker_conditions(["cpu"], [1, 2, 4, 8][: len(rates)], 16)
    return [outcome(one, values) for one, values in zip(conditions, rates, strict=True)]


def unit_outcomes(rates: dict[int, Sequence[float]]) -> list[ConditionOutcome]:
    return [outcome(one, rates[one.unit_size]) for one in experiments.unit_size_conditions(["cpu"], list(rates))]


def fleet_outcomes(fast: float, slow: float, fleet: Sequence[float]) -> list[ConditionOutcome]:
    conditions = experiments.device_conditions(["sim:10", "sim:1", "sim:1"], 16)
    rates = [[fast * x for x in (0.99, 1.0, 1.01)], [slow * x for x in (0.99, 1.0, 1.01)], fleet]
    return [outcome(one, values) for one, values in zip(conditions, rates, strict=True)]


# --- statistics ---


def test_a_figure_is_the_mean_with_the_deviation_of_its_replicates() -> None:
    measured = Measured.of([9.0, 10.0, 11.0])
    assert (measured.mean, measured.sd, measured.n) == (10.0, 1.0, 3)
    assert str(measured) == "10.0 ± 1.0"
    assert str(Measured.of([7.0])) == "7.00"


def test_relative_deviations_of_a_quotient_add_as_squares() -> None:
    quotient = Measured(mean=30.0, sd=0.9, n=3).over(Measured(mean=10.0, sd=0.4, n=5))
    assert quotient.mean == 3.0
    assert quotient.sd == pytest.approx(3.0 * 0.05)
    assert quotient.n == 3


def test_a_sum_has_the_deviation_of_its_parts_together() -> None:
    total = together([Measured(mean=1.0, sd=3.0, n=3), Measured(mean=2.0, sd=4.0, n=4)])
    assert (total.mean, total.sd, total.n) == (3.0, 5.0, 3)


def test_figures_differ_only_where_their_deviations_do_not_meet() -> None:
    assert Measured(mean=10.0, sd=0.4, n=3).differs(Measured(mean=11.0, sd=0.5, n=3))
    assert not Measured(mean=10.0, sd=0.5, n=3).differs(Measured(mean=11.0, sd=0.6, n=3))


def test_the_days_for_a_corpus_follow_from_the_rate() -> None:
    days = days_for(8_640_000, Measured(mean=100.0, sd=10.0, n=3))
    assert (days.mean, days.sd) == (pytest.approx(1.0), pytest.approx(0.1))
    assert time_text(days) == "1.00 ± 0.10 days"
    assert time_text(days.scaled(0.5)) == "12.0 ± 1.2 hours"
    assert time_text(days.scaled(0.01)) == "14.4 ± 1.4 minutes"


@pytest.mark.parametrize(
    ("value", "deviation", "text"),
    [
        (1234.5, 12.0, "1,234"),
        (0.98765, 0.0123, "0.988"),
        (5.0, 0.0, "5.00"),
        (0.0, 0.0, "0"),
        (1e-9, 1e-9, "0.000000"),
    ],
)
def test_a_figure_shows_the_digits_that_its_deviation_leaves(value: float, deviation: float, text: str) -> None:
    assert number(value, deviation) == text


def test_the_cost_of_a_unit_is_found_again() -> None:
    chance = random.Random(1)
    noisy = [(u, u / ((0.004 + 0.010 * u) * chance.gauss(1, 0.01))) for u in (1, 10, 100, 1000) for _ in range(3)]
    cost = unit_cost(noisy)
    assert cost is not None
    assert cost.t0_s == pytest.approx(0.004, rel=0.1)
    assert cost.t1_s == pytest.approx(0.010, rel=0.02)
    assert cost.is_seen
    assert cost.size_for(0.9) == 4
    assert cost.rate(1000) == pytest.approx(1000 / 10.004, rel=0.02)


def test_a_cost_that_is_not_there_is_not_seen() -> None:
    chance = random.Random(2)
    cost = unit_cost([(u, 100 * chance.gauss(1, 0.02)) for u in (1, 10, 100, 1000) for _ in range(3)])
    assert cost is not None
    assert not cost.is_seen


def test_one_size_tells_nothing_of_what_a_unit_costs() -> None:
    assert unit_cost([(10, 5.0), (10, 5.1), (10, 4.9)]) is None


# --- findings ---


def test_workers_that_bring_nothing_are_said_to_bring_nothing() -> None:
    said = experiments.worker_result(worker_outcomes([100, 101, 99], [101, 100, 102]), CORPUS).findings
    assert said[0] == (
        "2 workers on cpu give 1.010 ± 0.014 times the speed of 1 worker, which is no difference beyond the "
        "deviations; they take 2.00 times the memory."
    )
    assert said[1] == "The fewest workers that are not told apart from the best: 1."
    assert said[2].startswith(
        "At the rate of 1 worker, 100.0 ± 1.0 records/s, 20,648,877 records take 2.390 ± 0.024 days"
    )


def test_workers_that_bring_something_are_said_to_bring_it() -> None:
    outcomes = worker_outcomes([100, 101, 99], [200, 201, 199])
    said = experiments.worker_result(outcomes, CORPUS).findings
    without_corpus = experiments.worker_result(outcomes, None)
    assert without_corpus.findings == said[:-1]
    figures = [condition_figures(one, None) for one in outcomes]
    assert "days" not in json.dumps(figures) + str(list(without_corpus.columns))
    assert said[0].startswith("2 workers on cpu give 2.000 ± 0.022 times the speed of 1 worker; they take")
    assert said[1].endswith(": 2.")
    assert said[2].startswith("At the rate of 2 workers,")


def test_workers_that_slow_each_other_down_are_said_to_do_so() -> None:
    outcomes = worker_outcomes([100, 101, 99], [90, 91, 89], [50, 51, 49])
    result = experiments.worker_result(outcomes, CORPUS)
    assert result.findings[1].startswith("4 workers on cpu give 0.500 ± 0.011 times the speed of 1 worker; they take")
    assert result.findings[2].endswith(": 1.")
    assert f"{result.title}." == result.findings[1], "no number of workers gains, so the plot is named after the last"


def test_a_fleet_is_compared_with_the_sum_of_its_devices_and_with_an_equal_split() -> None:
    outcomes = fleet_outcomes(1000.0, 100.0, [1190, 1200, 1210])
    said = experiments.device_result(outcomes, CORPUS).findings
    assert said[0].startswith("3 devices together embed 1,200 ± 10 records/s, 1.000 ± 0.012 times the sum")
    assert "no difference" in said[0]
    assert "4.000 ± 0.052 times as fast" in said[1]
    # Every device of `outcome` did a third; the fast one has 10 of 12 parts of the rates.
    assert "within 50.0 percentage points" in said[2]


def test_a_fleet_that_waits_for_its_slowest_device_is_not_called_equal() -> None:
    said = experiments.device_result(fleet_outcomes(1000.0, 100.0, [299, 300, 301]), CORPUS).findings
    assert "0.2500 ± 0.0023 times the sum" in said[0]
    assert "no difference" not in said[0]


def test_sizes_that_are_not_told_apart_are_named() -> None:
    said = experiments.unit_size_result(
        unit_outcomes({1: [80, 81, 79], 10: [99, 100, 101], 100: [100, 101, 99]}), CORPUS
    ).findings
    assert said[0] == "Units of 1 reach 80.0 ± 1.3 % of the best speed, that of units of 10."
    assert said[1] == "Units of 10 and 100 are not told apart."
    assert said[2].startswith("A unit costs 2.62 ± 0.13 ms, and each record 9.86 ms more, so 90% of")


def test_the_smallest_units_may_be_as_good_as_any() -> None:
    said = experiments.unit_size_result(unit_outcomes({1: [99, 100, 101], 10: [100, 101, 99.5]}), CORPUS).findings
    assert "which is no difference beyond the deviations" in said[0]
    assert said[2].startswith("A cost of the units themselves is not seen")


# --- conditions ---


def setup_of(records: int) -> Setup:
    return Setup(model="stub:8", precision="fp32", texts=["a"], records=records, seconds=1.0, replicates=2, seed=0)


def test_all_conditions_of_workers_have_as_many_records() -> None:
    assert {one.least for one in experiments.worker_conditions(["cpu"], [1, 2, 8], 16)} == {2 * 16 * 8}


def test_units_of_every_size_divide_the_records_evenly_between_the_workers() -> None:
    assert {one.least for one in experiments.unit_size_conditions(["sim:1", "sim:1"], [1, 1000])} == {2000}


def test_a_device_that_is_there_twice_is_measured_alone_once() -> None:
    names = [one.name for one in experiments.device_conditions(["sim:10", "sim:1", "sim:1"], 16)]
    assert names == ["sim:10 alone", "sim:1 alone", "all together"]


def test_too_few_records_are_refused_with_the_number_that_is_needed() -> None:
    conditions = experiments.unit_size_conditions(["cpu"], [1, 1000])
    with pytest.raises(UsageError, match="only from 1,000 records on"):
        check_records(conditions, setup_of(999))
    check_records(conditions, setup_of(1000))
    check_records(conditions, setup_of(0))


def test_one_device_is_no_fleet_and_several_are_not_one() -> None:
    with pytest.raises(UsageError, match="two devices or more"):
        experiments.device_conditions(["cpu"], 16)
    with pytest.raises(UsageError, match="all workers on one device"):
        experiments.worker_conditions(["sim:1", "sim:2"], [1], 16)


def test_one_device_is_complemented_by_simulated_ones_unless_a_real_model_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert conduct.on_several("auto", "") == (experiments.SIMULATED, experiments.STUB)
    assert conduct.on_several("auto", "minilm") == (("cpu",), "minilm")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(Card(uuid="GPU-1"), Card(uuid="GPU-2")))
    assert conduct.on_several("auto", "minilm") == (("cuda:0", "cuda:1"), "minilm")
    assert conduct.on_one("auto", "minilm") == (("cuda:0",), "minilm")
    assert conduct.on_one("sim:3", "") == (("sim:3",), experiments.STUB)


# --- texts and traces ---


def test_the_built_in_texts_have_another_order_with_another_seed_only() -> None:
    texts = texts_for("", seed=1)
    assert len(texts) == 2000
    assert texts == texts_for("", seed=1)
    assert texts != texts_for("", seed=2)
    assert sorted(texts) == sorted(texts_for("", seed=2))


def test_a_users_texts_are_read_as_a_run_reads_them(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("one\ntwo\n\nthree\n")
    assert sorted(texts_for(str(tmp_path / "mine.txt"), seed=0)) == ["one", "three", "two"]
    with pytest.raises(InputError):
        texts_for(str(tmp_path / "none.txt"), seed=0)


def test_texts_are_repeated_under_keys_of_their_own(tmp_path: Path) -> None:
    lines = [json.loads(line) for line in write_records(tmp_path, ["a", "b"], 5).read_text().splitlines()]
    assert [line["text"] for line in lines] == ["a", "b", "a", "b", "a"]
    assert len({line["id"] for line in lines}) == 5


def test_a_share_counts_the_complete_batches_of_its_run(tmp_path: Path) -> None:
    def line(began: float, rows: int) -> str:
        return (
            json.dumps({"device": "cpu", "began": began, "ended": began + 0.5, "rows": rows, "tokens": 2 * rows}) + "\n"
        )

    file = tmp_path / "w.jsonl"
    assert share_of(file, "cpu", since=10.5).rows == 0
    file.write_text(line(10.0, 1) + line(11.0, 2) + '{"half of a li')
    assert share_of(file, "cpu", since=10.5) == WorkerShare(device="cpu", rows=2, tokens=4, busy_s=0.5)


def test_memory_is_known_of_processes_that_are_there() -> None:
    import os

    here = memory_mb([os.getpid()])
    assert here is not None
    assert here > 1
    assert memory_mb([os.getpid(), 2**22 + 1]) is None


# --- how far it is ---


def test_the_time_left_follows_from_the_runs_so_far() -> None:
    now, out = [0.0], io.StringIO()
    progress = Progress(ProgressLine(every_s=math.inf, stream=out), 4, clock=lambda: now[0])
    for step in ("loading", "run", "run", "loading", "run", "run"):
        if step == "loading":
            progress.begins("loading the model into 1 worker process")
            now[0] += 20
            continue
        progress.begins_run("one")
        now[0] += 5
        progress.ended(100.0)
    assert out.getvalue().splitlines() == [
        "one, run 1 of 4: 100.0 records/s; about 75 s left",
        "one, run 2 of 4: 100.0 records/s; about 30 s left",
        "one, run 3 of 4: 100.0 records/s; about 18 s left",
        "one, run 4 of 4: 100.0 records/s",
    ]


# --- files and pictures ---


def accounts() -> list[ExperimentResult]:
    return [
        experiments.worker_result(worker_outcomes([100, 101, 99], [101, 100, 102], [99, 98, 97], [80, 85, 90]), CORPUS),
        experiments.device_result(fleet_outcomes(1000.0, 100.0, [1170, 1200, 1190]), CORPUS),
        experiments.unit_size_result(
            unit_outcomes({1: [90, 92, 88], 10: [99, 100, 101], 1000: [100, 101, 99]}), CORPUS
        ),
    ]


@pytest.mark.parametrize("account", accounts(), ids=lambda account: account.name)
def test_every_experiment_has_a_table_figures_and_a_picture(account: ExperimentResult, tmp_path: Path) -> None:
    assert len({len(cells) for cells in account.columns.values()}) == 1
    path = benchmark_record.write(tmp_path / "it.json", benchmark_record.described(account.name, account.figures))
    data = json.loads(path.read_text())
    assert {"benchmark", "figures", "machine", "versions", "commit", "at"} == set(data)
    assert conduct.draw(account, tmp_path, model="stub:8, fp32") == [tmp_path / f"{account.name}.png"]
    assert (tmp_path / f"{account.name}.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_line_says_how_to_get_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "embq.lab.plots", raising=False)
    assert conduct.draw(accounts()[0], tmp_path, model="stub:8, fp32") == []
    assert "pip install 'embq[bench]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as caught:
        benchmark_record.make_folder(tmp_path / "file" / "below")
    assert caught.value.code == "not_writable"
    benchmark_record.make_folder(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
