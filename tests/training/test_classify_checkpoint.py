"""Checkpoints: which are kept, what a damaged one is told by, and how people are told of a moment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embq.core.errors import OutputError
from embq.training.classify.checkpoint import Moment, load, moments, save


def damaged(folder: Path, moment: Moment) -> None:
    """The checkpoint cannot be read, which is told with what to do next."""
    with pytest.raises(OutputError, match="cannot be read") as raised:
        load(folder, moment)
    assert "remove it" in raised.value.next_step


def test_the_last_two_checkpoints_are_kept_and_the_last_beginning_of_an_epoch(tmp_path: Path) -> None:
    for epoch, step in [(1, 0), (1, 10), (2, 0), (2, 10), (2, 20), (2, 30)]:
        save(tmp_path, Moment(epoch=epoch, step=step), {"weights": torch.ones(2)})
    assert [(one.epoch, one.step) for one in moments(tmp_path)] == [(2, 30), (2, 20), (2, 0)]
    assert torch.equal(load(tmp_path, moments(tmp_path)[0])["weights"], torch.ones(2))


def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    moment = Moment(epoch=0, step=4)
    save(tmp_path, moment, {"weights": torch.ones(1000)})
    path = tmp_path / moment.name
    path.write_bytes(path.read_bytes()[:2000])
    damaged(tmp_path, moment)


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> object:
            return (Path.touch, (tmp_path / "sprung",))

    torch.save({"model": Trap()}, tmp_path / Moment(epoch=0, step=1).name)
    damaged(tmp_path, Moment(epoch=0, step=1))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("epoch", "step", "told"),
    [(0, 0, "before the first step"), (0, 7, "before step 7 of epoch 1"), (3, 0, "after epoch 3")],
)
def test_no_moment_is_told_by_an_epoch_that_there_is_not(epoch: int, step: int, told: str) -> None:
    assert str(Moment(epoch=epoch, step=step)) == told
