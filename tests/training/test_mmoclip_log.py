"""The lines of open_clip's log, of whole logs and of damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from embq.core.errors import InputError
from embq.training.mmoclip import folder, required
from embq.training.openclip import log
from tests.training.mmoclip_logs import PUBLISHED, line, whole

NOWHERE = Path("out.log")


def test_a_published_line_is_read_to_the_last_number() -> None:
    second = log.parse(NOWHERE, PUBLISHED.splitlines()).iterations[1]
    assert (second.at, second.epoch, second.samples, second.samples_per_epoch) == (2, 0, 32768, 3_200_000)
    assert (second.percent, second.data_s, second.batch_s) == (1, 0.029, 6.655)
    assert (second.per_s, second.per_gpu_s, second.loss) == (2461.78, 76.9308, 9.7031)


def test_the_published_lines_tell_processes_and_global_batch() -> None:
    found = log.parse(NOWHERE, PUBLISHED.splitlines())
    assert (found.world_size, found.global_batch, found.samples) == (32, 16384, 3_200_000)
    assert not found.restarts


@pytest.mark.parametrize(
    ("written", "rate"), [("1.23457e+06", 1_234_570.0), ("123457.", 123_457.0), ("2533.71", 2533.71)]
)
def test_a_rate_is_read_in_each_form_that_six_digits_take(written: str, rate: float) -> None:
    found = log.iteration(line(1, 6.5).replace(f"{16384 / 6.5:#g}/s,", f"{written}/s,"), 1)
    assert found is not None
    assert found.per_s == rate


def test_a_line_is_found_behind_what_a_launcher_puts_before_it() -> None:
    assert log.iteration("0: [rank0]: " + line(1, 6.5), 1) is not None


def test_a_line_that_is_cut_in_its_rates_is_none_and_is_told() -> None:
    full = line(3, 6.5)
    cut = full[: full.index("/s/gpu")]
    found = log.parse(NOWHERE, [line(1, 9.0), line(2, 6.5), cut])
    assert (len(found.iterations), found.broken) == (2, (3,))


def test_a_line_that_is_cut_behind_its_rates_counts_without_its_loss() -> None:
    full = line(2, 6.5)
    found = log.iteration(full[: full.index(" LR")], 1)
    assert found is not None
    assert found.loss is None


def test_where_the_samples_count_from_the_start_again_another_training_begins() -> None:
    lines = whole()[:5]
    assert log.parse(NOWHERE, [*lines, "in between", *lines[:2], *lines[:1]]).restarts == (7, 9)


def test_the_arguments_in_a_log_are_read() -> None:
    found = log.parse(NOWHERE, ["2026-01-02,03:04:05 | INFO |   batch_size: 512\n", "x | INFO | Params:\n"])
    assert found.settings == {"batch_size": "512"}


@pytest.mark.parametrize(
    ("samples", "world", "batch", "count"),
    [(3_200_000, 32, 512, 195), (3_200_000, 1024, 512, 6), (3_200_000, 16, 512, 390), (96, 2, 16, 3), (64, 1, 16, 4)],
)
def test_iterations_are_those_of_full_batches(samples: int, world: int, batch: int, count: int) -> None:
    assert required.iterations(samples, world, batch) == count


def test_a_log_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no log .*gone") as error:
        folder.find(tmp_path / "gone")
    assert error.value.next_step


def test_a_folder_with_several_logs_names_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "out.log").write_text("")
    with pytest.raises(InputError, match="2 logs: a, b"):
        folder.find(tmp_path)


def test_a_folder_without_a_log_says_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no out\.log"):
        folder.find(tmp_path)


def test_a_log_that_is_no_text_holds_no_iteration(tmp_path: Path) -> None:
    (tmp_path / "out.log").write_bytes(bytes(range(256)) * 40)
    assert not folder.find(tmp_path).log.iterations
