"""Files of a training: whole lines, of its own steps only, and an error where the storage refuses them."""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from embq.core.errors import InputError, OutputError
from embq.training.classify.checkpoint import Folder, Moment, key_journal, moments, save
from embq.training.classify.config import Config
from embq.training.classify.failures import FailureList, _listed
from embq.training.classify.log import StepMeter
from embq.training.classify.process_group import GroupMember
from embq.training.classify.report import EpochRow, TrainingReport
from embq.training.data.batch import Failure
from embq.training.run.journal import Journal, append, lines
from tests.training.small_shards import key_of


def failure(number: int) -> Failure:
    return Failure(shard="s.tar", key=key_of(number), code="truncated", message="it is cut")


# --- what the storage refuses ---


def test_a_full_disk_is_told_with_what_to_do(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._file.fileno())
    os.close(full)
    with pytest.raises(OutputError, match="journal cannot be written: No space left") as refused:
        journal.add(0, 0, {})
    journal.close()
    assert refused.value.code == "no_space"
    assert "goes on from the last checkpoint" in refused.value.next_step


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file/out cannot be written: Not a directory") as refused:
        Folder(tmp_path / "file" / "out").locked().__enter__()
    assert "another --output" in refused.value.next_step
    with pytest.raises(OutputError, match="cannot be written: No such file") as refused:
        Folder(Path("/proc/none")).locked().__enter__()
    assert "mend the storage" in refused.value.next_step


def test_what_failed_is_told_by_shard_and_key() -> None:
    whole = replace(failure(1), key="", message="it is not there")
    assert _listed([failure(1), whole]) == "s.tar 00001: it is cut; s.tar: it is not there"
    with pytest.raises(
        InputError, match=r"2 of 9 samples of the validation cannot be used, .*: s\.tar: it is not there"
    ):
        FailureList(Path("none.jsonl"), 0.1).check([whole], 2, 9, of="the validation")


def test_a_checkpoint_that_cannot_be_written_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_state: object, path: Path) -> None:
        path.write_bytes(b"a part of it")
        raise RuntimeError("[enforce fail at inline_container.cc:815] . PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        OutputError, match=r"epoch-0000-step-00000003\.pt cannot be written: .*failed writing file"
    ) as refused:
        save(tmp_path, Moment(epoch=0, step=3), {})
    assert refused.value.code == "no_space"
    assert not moments(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_line_of_which_the_disk_takes_a_part_is_an_error() -> None:
    class NearlyFull(io.FileIO):
        def write(self, data: object) -> int:
            return 3

    with NearlyFull("/dev/null", "ab") as file, pytest.raises(OSError, match="No space left"):
        append(file, b"a line\n")


def test_what_was_cut_off_hides_nothing_that_comes_after_it(tmp_path: Path) -> None:
    path = tmp_path / "failures.jsonl"
    FailureList(path, 1).add([failure(1)])
    with open(path, "ab") as file:
        file.write(b'{"shard": "s.t')
    known = FailureList(path, 1)
    known.add([failure(1), failure(2)])
    known.add([failure(3)])
    assert [line["key"] for line in lines(path)] == [key_of(1), key_of(2), key_of(3)]
    assert FailureList(path, 1).samples == 3


# --- what is written ---


def test_what_processes_that_are_no_more_noted_of_steps_made_anew_is_taken_back(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for rank in range(4):
        noted = Journal(folder.keys(rank))
        for epoch, step in [(0, 0), (0, 1), (1, 0), (1, 1)]:
            noted.add(epoch, step, {"keys": []})
        noted.close()
    two = [GroupMember(rank=rank, world=2, device=torch.device("cpu")) for rank in (1, 0)]
    for member, log_keys in zip(two, (True, False), strict=True):
        config = Config(shards="s", out="o", log_keys=log_keys)
        journal = key_journal(config, folder, member, Moment(epoch=1, step=0))
        assert (journal is not None) == log_keys
        if journal is not None:
            journal.close()
    for rank in range(4):
        assert [line["epoch"] for line in lines(folder.keys(rank))] == [0, 0], rank


def test_a_rate_over_a_checkpoint_is_that_of_all_its_steps() -> None:
    before = StepMeter()
    for _ in range(3):
        before.add(torch.tensor(1.5), torch.tensor(2), 4)
        before.timed(0.25, 0.5)
    after = StepMeter(**json.loads(json.dumps(before.state())))
    assert after.samples_per_s == before.samples_per_s == 8
    assert (after.mean_loss, after.accuracy, after.data_s) == (1.5, 0.5, 0.75)


def test_an_epoch_in_which_the_process_that_leads_made_no_step_has_no_loss() -> None:
    row = EpochRow(
        epoch=1,
        loss=None,
        accuracy=None,
        top1=None,
        top5=None,
        samples=0,
        failed=4,
        seconds=1.0,
        samples_per_s=0.0,
    )
    report = TrainingReport(
        out="o", arch="timm:a", processes=1, samples=0, failed=4, failures="o/failures.jsonl", epochs=[row]
    )
    assert json.loads(json.dumps(asdict(report), allow_nan=False))["epochs"][0]["loss"] is None
    assert "4 samples could not be read: o/failures.jsonl" in report.text()
