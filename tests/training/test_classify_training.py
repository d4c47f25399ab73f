"""Trainings to their end, killed and gone on with: what was learnt, of which samples, and that all processes agree."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from tests.support.picture_files import encoded
from tests.support.waiting import wait_until
from tests.training.classifying import (
    TINY,
    Processes,
    class_shards,
    digests,
    keys_of,
    log_of,
    trained,
)
from tests.training.small_shards import key_of

COUNTS = [9, 5, 12, 7, 11]
"""Samples of shards: neither they nor their number divide by the processes."""

ALL = Counter(key_of(number) for number in range(sum(COUNTS)))


@dataclass(frozen=True, slots=True)
class Whole:
    """A training that nothing interrupted."""

    out: Path
    notes: Path
    arguments: list[str]


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_shards(tmp_path_factory.mktemp("classify") / "train", COUNTS)


@pytest.fixture(scope="session")
def validation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_shards(tmp_path_factory.mktemp("classify") / "validation", [8, 13])


@pytest.fixture(scope="session")
def exact_pair(shards: Path, validation: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Two processes over exact epochs."""
    folder = tmp_path_factory.mktemp("exact")
    arguments = [str(shards), "--validation", str(validation), "--splitshards", *TINY]
    ended = trained([*arguments, "--output", str(folder / "out")], folder / "notes", world=2, watched=True)
    assert [one.status for one in ended] == [0, 0], [one.err for one in ended]
    return Whole(folder / "out", folder / "notes", arguments)


def samples_of(out: Path, world: int, epoch: int) -> Counter[str]:
    """Number of times that each sample was trained on in an epoch."""
    steps = [step for rank in range(world) for step in keys_of(out, rank) if step[0] == epoch]
    return Counter(key for _, _, keys in steps for key in keys)


def steps_of(out: Path, rank: int, epoch: int) -> int:
    return len([step for step in keys_of(out, rank) if step[0] == epoch])


def test_an_exact_epoch_takes_each_sample_once_over_all_processes(exact_pair: Whole) -> None:
    assert steps_of(exact_pair.out, 0, 0) != steps_of(exact_pair.out, 1, 0)
    for epoch in (0, 1):
        assert samples_of(exact_pair.out, 2, epoch) == ALL
    assert [line["samples"] for line in log_of(exact_pair.out, "epoch")] == [sum(COUNTS)] * 2


def test_all_processes_have_the_same_weights_and_momenta_inside_the_second_epoch(exact_pair: Whole) -> None:
    first = [steps_of(exact_pair.out, rank, 0) for rank in (0, 1)]
    second = [digests(exact_pair.notes, rank)[first[rank] :] for rank in (0, 1)]
    common = min(map(len, second))
    assert common >= 3
    assert second[0][:common] == second[1][:common]
    assert len(set(second[0][:common])) == common


def test_each_validation_sample_is_counted_once(exact_pair: Whole) -> None:
    assert [(line["samples"], line["failed"]) for line in log_of(exact_pair.out, "validation")] == [(21, 0)] * 2


def same(out: Path, whole: Path, world: int) -> None:
    """A training that was interrupted has come to what the other one came to, bit for bit."""
    for kind in ("train", "epoch", "validation"):
        assert log_of(out, kind) == log_of(whole, kind)
    for rank in range(world):
        assert keys_of(out, rank) == keys_of(whole, rank)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def killed_at(arguments: list[str], out: Path, notes: Path, *, world: int, lines: int) -> None:
    """Train until the log has so many lines; then SIGKILL to all processes at once.

    Args:
        out: as rank 0 knows it.
    """
    given = [] if any(one.startswith("--output") for one in arguments) else ["--output", str(out)]
    processes = Processes([*arguments, *given], notes, world=world)

    def far_enough() -> bool:
        alive = processes.members[0].exitcode is None
        assert alive, processes.said(0).err
        return (out / "log.jsonl").exists() and (out / "log.jsonl").read_bytes().count(b"\n") >= lines

    try:
        wait_until(far_enough)
    finally:
        processes.kill()


def gone_on(arguments: list[str], out: Path, notes: Path, *, world: int) -> str:
    """Train on to the end; gives what the process that leads said."""
    ended = trained([*arguments, "--output", str(out)], notes, world=world)
    assert [one.status for one in ended] == [0] * world, [one.err for one in ended]
    return ended[0].err


def test_a_killed_training_of_two_processes_goes_on_as_if_nothing_had_been(exact_pair: Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed_at(exact_pair.arguments, out, tmp_path / "killed", world=2, lines=random.randint(2, 6))
    assert not (out / "model.safetensors").exists()
    said = gone_on(exact_pair.arguments, out, tmp_path / "resumed", world=2)
    assert re.search(r"goes on at epoch [12], step", said)  # the second where the kill came late
    same(out, exact_pair.out, 2)


def test_a_training_killed_in_its_validation_makes_up_for_that_first(exact_pair: Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(exact_pair.out, out)
    (out / "model.safetensors").unlink()
    noted = (out / "log.jsonl").read_text().splitlines(keepends=True)
    assert '"validation"' in noted[-1]
    (out / "log.jsonl").write_text("".join(noted[:-1]))
    assert "goes on at epoch 3, step 0" in gone_on(exact_pair.arguments, out, tmp_path / "resumed", world=2)
    same(out, exact_pair.out, 2)


@pytest.fixture(scope="session")
def resampled(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """One process with two loader workers over resampled epochs."""
    folder = tmp_path_factory.mktemp("resampled")
    arguments = [str(shards), *TINY, "--workers=2", "--label-smoothing=0.1", "--clip=1"]
    (ended,) = trained([*arguments, "--json", "--output", str(folder / "out")], folder / "notes")
    assert ended.status == 0, ended.err
    (folder / "notes" / "report.json").write_text(ended.out)
    return Whole(folder / "out", folder / "notes", arguments)


def test_a_training_that_is_asked_to_stop_keeps_what_it_has_learnt_and_goes_on(
    resampled: Whole, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    # No checkpoint but those that the request and the ends of epochs make.
    processes = Processes([*resampled.arguments, "--checkpoint-minutes=60", "--output", str(out)], tmp_path / "stopped")
    wait_until(lambda: (out / "log.jsonl").exists() and (out / "log.jsonl").read_bytes().count(b"\n") >= 3)
    processes.stop()
    (ended,) = processes.ended()
    assert ended.status == 130
    ((at, epoch),) = re.findall(r"stopped before step (\d+) of epoch (\d)", ended.err)
    assert f"goes on at epoch {epoch}, step {at}\n" in gone_on(resampled.arguments, out, tmp_path / "resumed", world=1)
    same(out, resampled.out, 1)


def test_a_resampled_epoch_has_full_batches_and_draws_again_in_the_next(resampled: Whole) -> None:
    keys = keys_of(resampled.out, 0)
    assert [(epoch, step) for epoch, step, _ in keys] == [(epoch, step) for epoch in (0, 1) for step in range(11)]
    assert all(len(taken) == 4 for _, _, taken in keys)
    drawn = [samples_of(resampled.out, 1, epoch) for epoch in (0, 1)]
    assert drawn[0] != drawn[1]
    assert all(set(one) <= set(ALL) for one in drawn)


def test_the_report_tells_every_epoch_as_the_log_does(resampled: Whole) -> None:
    report = json.loads((resampled.notes / "report.json").read_text())
    assert (report["samples"], report["failed"], report["processes"]) == (88, 0, 1)
    last = [line for line in log_of(resampled.out, "train") if line["step"] == 10]
    assert [epoch["loss"] for epoch in report["epochs"]] == [line["loss"] for line in last]


def test_a_finished_training_is_told_again_and_changes_nothing(exact_pair: Whole) -> None:
    before = (exact_pair.out / "model.safetensors").read_bytes()
    ended = trained([*exact_pair.arguments, "--output", str(exact_pair.out)], exact_pair.notes / "again", world=2)
    assert [one.status for one in ended] == [0, 0], ended[0].err
    assert "timm:test_resnet trained on 88 samples" in ended[0].out
    assert ended[1].out == ""
    assert (exact_pair.out / "model.safetensors").read_bytes() == before
    assert len(log_of(exact_pair.out, "validation")) == 2


def test_the_model_that_is_left_is_the_one_that_was_measured(exact_pair: Whole, validation: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from embq.training.classify.models import built
    from embq.training.data.batch import View
    from embq.training.data.epochs import validation_samples
    from embq.training.shards.shard_set import open_shards

    told = json.loads((exact_pair.out / "model.json").read_text())
    size = told["preprocessing"]["image_size"]
    model = built(told["arch"], classes=len(told["classes"]), image_size=size).eval()
    model.load_state_dict(load_file(exact_pair.out / "model.safetensors"))
    right = 0
    with torch.inference_mode():
        for batch in validation_samples(open_shards(str(validation)), View(batch_size=21, image_size=size)):
            right += int((model(batch.images).argmax(1) == batch.labels).sum())
    assert right / 21 == log_of(exact_pair.out, "validation")[-1]["top1"]


def test_a_network_learns_to_tell_classes_that_look_different(tmp_path: Path) -> None:
    colours = [(220, 40, 40), (40, 220, 40), (40, 40, 220), (220, 220, 40), (220, 40, 220), (40, 220, 220), (9, 9, 9)]
    pictures = {n: {"jpg": encoded(Image.new("RGB", (40, 32), colours[n % 7]), "JPEG")} for n in range(56)}
    shards = class_shards(tmp_path / "shards", [28, 28], pictures)
    arguments = [str(shards), f"--validation={shards}", *TINY, "--splitshards", "--batch-size=8", "--epochs=8"]
    (ended,) = trained([*arguments, "--checkpoint-minutes=9", f"--output={tmp_path / 'out'}"], tmp_path / "notes")
    assert ended.status == 0, ended.err
    measured = [line["top1"] for line in log_of(tmp_path / "out", "validation")]
    assert measured[0] < 0.5
    assert measured[-1] > 0.9


def test_the_others_end_with_a_message_when_one_process_dies(shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    endless = [str(shards), *TINY, "--epochs=1000", "--output", str(out)]
    processes = Processes(endless, tmp_path / "notes", world=2)
    wait_until(lambda: (out / "log.jsonl").exists() and (out / "log.jsonl").read_bytes().count(b"\n") >= 2)
    processes.members[1].kill()
    left = processes.ended(deadline_s=60)[0]
    assert left.status == 69
    assert "error[peer_gone]: process 0 of 2 lost another process of this training" in left.err
    assert "the same command goes on from the last checkpoint" in left.err


# --- the same, in other ways ---


@pytest.mark.slow
@pytest.mark.parametrize("counts", [[9, 5, 12, 7, 11], [13, 6]], ids=["five shards", "two shards"])
def test_three_processes_take_each_sample_once_even_where_one_has_no_shard(counts: list[int], tmp_path: Path) -> None:
    shards = class_shards(tmp_path / "shards", counts)
    out = tmp_path / "out"
    ended = trained([str(shards), *TINY, "--splitshards", "--output", str(out)], tmp_path / "n", world=3, watched=True)
    assert [one.status for one in ended] == [0] * 3, ended[0].err
    for epoch in (0, 1):
        assert samples_of(out, 3, epoch) == Counter(key_of(number) for number in range(sum(counts)))
    if len(counts) == 2:
        assert "process 2 trains on nothing" in ended[0].err
        return
    first = [steps_of(out, rank, 0) for rank in range(3)]
    second = [digests(tmp_path / "n", rank)[first[rank] :] for rank in range(3)]
    common = min(map(len, second))
    assert second[0][:common] == second[1][:common] == second[2][:common]


@pytest.mark.slow
def test_with_another_number_of_processes_the_interrupted_epoch_begins_anew(exact_pair: Whole, tmp_path: Path) -> None:
    out = tmp_path / "out"
    steps = len(log_of(exact_pair.out, "train")) // 2
    killed_at(exact_pair.arguments, out, tmp_path / "killed", world=2, lines=steps + 5)
    told = gone_on(exact_pair.arguments, out, tmp_path / "resumed", world=1)
    assert "begins epoch 2 anew" in told
    assert "it was begun with 2 processes, now 1" in told
    assert samples_of(out, 2, 1) == ALL


@pytest.mark.slow
def test_hosts_without_a_common_folder_go_on_as_well(exact_pair: Whole, tmp_path: Path) -> None:
    arguments = [*exact_pair.arguments, f"--output={tmp_path}/host-{{rank}}"]
    killed_at(arguments, tmp_path / "host-0", tmp_path / "killed", world=2, lines=5)
    ended = trained(arguments, tmp_path / "resumed", world=2)
    assert [one.status for one in ended] == [0, 0], ended[0].err
    assert "goes on at epoch 1, step" in ended[0].err
    (tmp_path / "host-1" / "keys" / "rank-0001.jsonl").rename(tmp_path / "host-0" / "keys" / "rank-0001.jsonl")
    same(tmp_path / "host-0", exact_pair.out, 2)
    assert not (tmp_path / "host-1" / "log.jsonl").exists()
