"""Inputs that cannot be trained on, or not like that: one message each, with what to do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from embq.core.errors import (
    ConfigError,
    DeviceFullError,
    EmbqError,
    InputError,
    ModelError,
    OutputError,
    TryLaterError,
    UsageError,
)
from embq.training.classify.checkpoint import Folder, Moment, found_start, moments, save
from embq.training.classify.config import Config
from embq.training.classify.inputs import check_spread, planned
from embq.training.classify.learner import Precision, device_faults
from embq.training.classify.models import built, full_name, load_weights
from embq.training.classify.process_group import GroupMember, membership
from tests.training.classifying import TINY, class_shards, trained
from tests.training.small_shards import key_of


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_shards(tmp_path_factory.mktemp("input"), [6, 6])


def config(shards: Path, **changes: object) -> Config:
    return replace(Config(shards=str(shards), out="out"), **changes)  # type: ignore[arg-type]


def refused(error: type[EmbqError], said: str, next_step: str, call: object) -> None:
    """The call raises this error, which says what, and what to do next."""
    with pytest.raises(error) as raised:
        call()  # type: ignore[operator]
    assert said in raised.value.message
    assert next_step in raised.value.next_step


# --- shards and classes ---


def test_the_samples_of_an_epoch_are_those_of_sizes_json(shards: Path) -> None:
    assert planned(config(shards)).epoch_samples == 12
    assert planned(config(shards, epoch_samples=5)).epoch_samples == 5


def test_an_exact_epoch_of_another_number_of_samples_is_refused(shards: Path) -> None:
    asked = config(shards, epoch_samples=5, splitshards=True)
    refused(
        UsageError, "--epoch-samples 5, and the shards hold 12", "leave out --epoch-samples", lambda: planned(asked)
    )


def test_shards_of_unknown_sizes_need_a_number(tmp_path: Path) -> None:
    unknown = class_shards(tmp_path / "s", [3])
    (unknown / "sizes.json").unlink()
    one = config(unknown / "s-000.tar")
    refused(InputError, "no sizes.json beside them", "--epoch-samples N", lambda: planned(one))
    assert planned(replace(one, epoch_samples=3)).epoch_samples == 3


def test_shards_without_classes_need_a_list(tmp_path: Path) -> None:
    nameless = class_shards(tmp_path / "s", [3])
    (nameless / "classes.json").rename(tmp_path / "names.json")
    refused(InputError, "there is no classes.json", "--classes FILE", lambda: planned(config(nameless)))
    assert len(planned(config(nameless, classes=str(tmp_path / "names.json"))).classes) == 7
    (tmp_path / "names.json").write_text('{"a": 1}')
    wrong = config(nameless, classes=str(tmp_path / "names.json"))
    refused(
        InputError,
        "is no list of names",
        'it is a JSON list of names, the first of class 0: ["ant"',
        lambda: planned(wrong),
    )


def test_validation_on_other_classes_is_refused(shards: Path, tmp_path: Path) -> None:
    others = class_shards(tmp_path / "s", [3])
    names = json.loads((others / "classes.json").read_text())
    (others / "classes.json").write_text(json.dumps([*names[:2], "other", *names[3:]]))
    asked = config(shards, validation=str(others))
    said = "class 2 is 'other' there, and 'class 2' in the training set"
    refused(InputError, said, "convert the validation pictures", lambda: planned(asked))
    (others / "classes.json").write_text(json.dumps(names[:2]))
    refused(InputError, "2 classes instead of 7", "convert the validation pictures", lambda: planned(asked))


def test_processes_that_will_have_nothing_to_read_are_named(shards: Path) -> None:
    asked = config(shards, splitshards=True, loader_workers=1)
    plan = planned(asked)
    assert check_spread(asked, plan, 2) == ""
    assert "2 shards for 4 processes" in check_spread(asked, plan, 4)
    assert "processes 2, 3 train on nothing" in check_spread(asked, plan, 4)
    assert "some loader workers read nothing" in check_spread(replace(asked, loader_workers=4), plan, 2)
    assert check_spread(config(shards), plan, 4) == ""


# --- architectures ---


def test_a_bare_name_is_looked_for_in_timm_first() -> None:
    assert full_name("resnet18") == "timm:resnet18"
    assert full_name("torchvision:resnet18") == "torchvision:resnet18"
    assert full_name("shufflenet_v2_x1_0") == "torchvision:shufflenet_v2_x1_0"


def test_an_unknown_name_is_told_with_near_ones() -> None:
    refused(
        ModelError,
        "timm has no architecture 'resnet81'",
        "did you mean timm:resnet",
        lambda: full_name("timm:resnet81"),
    )
    refused(ModelError, "timm and torchvision have no", "did you mean timm:", lambda: full_name("resnet81"))
    refused(ModelError, "'keras' is no library", "torchvision:NAME", lambda: full_name("keras:vgg"))
    refused(ModelError, "no architecture", "timm.list_models()", lambda: full_name("__import__('os')"))


@pytest.mark.parametrize("name", ["timm:test_vit", "timm:test_resnet", "torchvision:squeezenet1_1"])
def test_an_architecture_is_built_for_the_classes_and_the_size(name: str) -> None:
    model = built(name, classes=5, image_size=64).eval()
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 5)


def test_a_size_that_an_architecture_cannot_have_is_refused() -> None:
    refused(
        ModelError,
        "cannot be built for 5 classes",
        "another --image-size",
        lambda: built("torchvision:squeezenet1_1", classes=5, image_size=8),
    )


def test_weights_of_other_classes_are_taken_but_for_the_last_layer(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "w.safetensors"
    before = built("timm:test_resnet", classes=5, image_size=32)
    save_file(before.state_dict(), path)
    after = built("timm:test_resnet", classes=3, image_size=32)
    assert load_weights(after, path) == ["fc.weight", "fc.bias"]
    for name, tensor in after.state_dict().items():
        assert name.startswith("fc.") or torch.equal(tensor, before.state_dict()[name])
    other = built("timm:test_vit", classes=5, image_size=32)
    refused(InputError, "is of another architecture", "--model", lambda: load_weights(other, path))
    path.write_bytes(b"no tensors")
    refused(InputError, "cannot be read as safetensors", ".safetensors", lambda: load_weights(after, path))


def test_a_precision_that_the_device_has_not_is_refused() -> None:
    cpu = torch.device("cpu")
    refused(ConfigError, "fp16 needs a GPU", "bf16", lambda: Precision.chosen("fp16", cpu))
    assert Precision.chosen("", cpu).name == "fp32"


def test_a_device_that_is_full_is_told_with_what_takes_less() -> None:
    def step() -> None:
        with device_faults():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    refused(DeviceFullError, "CUDA out of memory", "--batch-size", step)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, and environment variable RANK expected, but not set"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE is 2, and environment variable MASTER_ADDR expected"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which is no number"),
    ],
)
def test_an_environment_that_tells_half_of_a_place_is_refused(
    told: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    refused(ConfigError, said, "unset WORLD_SIZE and RANK", membership("cpu").__enter__)


# --- folders and checkpoints ---


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    refused(OutputError, "holds files, and no training", "new or empty", Folder(tmp_path).read_config)
    (tmp_path / "config.json").write_text('{"format": "parquet"}')
    refused(OutputError, "is not that of a training", "new or empty", Folder(tmp_path).read_config)


def test_a_folder_without_a_checkpoint_is_free_for_other_flags(shards: Path, tmp_path: Path) -> None:
    member = GroupMember(rank=0, world=1, device=torch.device("cpu"))
    folder, asked = Folder(tmp_path), config(shards)
    plan = planned(asked)
    found_start(folder, asked, plan, member)
    other = replace(asked, arch="resnet50")
    assert found_start(folder, other, plan, member).note == "there is no checkpoint yet: it begins anew"
    save(folder.checkpoints, Moment(epoch=1, step=0), {"weights": torch.ones(1)})
    assert found_start(folder, other, plan, member).note == "goes on at epoch 2, step 0"
    refused(
        InputError,
        '--model "resnet50", now "resnet18"',
        "another --output",
        lambda: found_start(folder, asked, plan, member),
    )


def test_a_step_that_a_process_does_not_know_of_is_not_gone_on_from(shards: Path, tmp_path: Path) -> None:
    member = GroupMember(rank=0, world=1, device=torch.device("cpu"))
    folder, asked = Folder(tmp_path), config(shards)
    plan = planned(asked)
    found_start(folder, asked, plan, member)
    for step in (0, 3, 5):
        save(folder.checkpoints, Moment(epoch=1, step=step), {"weights": torch.ones(1)})
    with open(folder.taken(0), "w") as file:
        file.writelines(f'{{"epoch": {epoch}, "step": {step}}}\n' for epoch, step in [(0, 4), (1, 0), (1, 1), (1, 2)])
        file.write('{"epoch": 1, "step": 4')  # cut off by a crash of the machine
    assert found_start(folder, asked, plan, member).moment == Moment(epoch=1, step=3)
    assert len(moments(folder.checkpoints)) == 2
    folder.taken(0).unlink()
    start = found_start(folder, asked, plan, member)
    assert start.moment == Moment(epoch=1, step=0)
    assert start.note == (
        "begins epoch 2 anew, and drops the checkpoint at step 3: a process does not know how far it was then"
    )


def test_an_epoch_that_other_processes_began_is_begun_anew_and_left_for_good(shards: Path, tmp_path: Path) -> None:
    member = GroupMember(rank=0, world=1, device=torch.device("cpu"))
    folder, asked = Folder(tmp_path), config(shards)
    plan = planned(asked)
    found_start(folder, asked, plan, member)
    for step in (0, 3):
        save(folder.checkpoints, Moment(epoch=1, step=step), {"weights": torch.ones(1)})
    with open(folder.taken(0), "w") as file:
        file.writelines(f'{{"epoch": 1, "step": {step}}}\n' for step in range(8))
    other = replace(asked, loader_workers=0)
    start = found_start(folder, other, plan, member)
    assert start.moment == Moment(epoch=1, step=0)
    assert "it was begun with --workers 4, now 0" in start.note
    # What is written from now on is of other samples than those of the steps of that checkpoint.
    assert found_start(folder, other, plan, member).moment == Moment(epoch=1, step=0)


def test_an_exact_epoch_whose_shards_were_dealt_in_turn_is_begun_anew(shards: Path, tmp_path: Path) -> None:
    member = GroupMember(rank=0, world=1, device=torch.device("cpu"))
    for splitshards, step in ((True, 0), (False, 3)):
        folder, asked = Folder(tmp_path / str(splitshards)), config(shards, splitshards=splitshards)
        folder.root.mkdir()
        plan = planned(asked)
        found_start(folder, asked, plan, member)
        said = json.loads(folder.record.read_text())
        del said["dealing"]  # as before shards were dealt by size
        folder.record.write_text(json.dumps(said))
        for at in (0, 3):
            save(folder.checkpoints, Moment(epoch=1, step=at), {"weights": torch.ones(1)})
        with open(folder.taken(0), "w") as file:
            file.writelines(f'{{"epoch": 1, "step": {at}}}\n' for at in range(8))
        start = found_start(folder, asked, plan, member)
        assert start.moment == Moment(epoch=1, step=step)
        assert ("it was begun with shards dealt out in turn, now by size" in start.note) == splitshards


def test_a_finished_training_without_checkpoints_is_not_written_over(shards: Path, tmp_path: Path) -> None:
    member = GroupMember(rank=0, world=1, device=torch.device("cpu"))
    folder, asked = Folder(tmp_path), config(shards)
    plan = planned(asked)
    found_start(folder, asked, plan, member)
    folder.weights.touch()
    other = replace(asked, lr=0.7)
    refused(InputError, "--lr 0.1, now 0.7", "another --output", lambda: found_start(folder, other, plan, member))


def test_two_trainings_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    with Folder(tmp_path).locked():
        refused(TryLaterError, "another process trains in", "another --output", Folder(tmp_path).locked().__enter__)


# --- whole trainings ---


@pytest.mark.slow
def test_unreadable_pictures_are_listed_or_stop_the_training(tmp_path: Path) -> None:
    shards = class_shards(tmp_path / "s", [6, 6], {3: {"jpg": b"no picture"}, 8: {"cls": b"99"}})
    arguments = [str(shards), *TINY, "--splitshards", "--output", str(tmp_path / "out")]
    (ended,) = trained(arguments, tmp_path / "refused")
    assert ended.status == 65
    assert "samples of an epoch cannot be used, more than --max-failures 0.01" in ended.err
    assert "s-00" in ended.err
    assert "failures.jsonl; convert these pictures again" in ended.err
    (ended,) = trained([*arguments, "--max-failures=0.5"], tmp_path / "taken")
    assert ended.status == 3, ended.err
    assert "2 samples could not be read" in ended.out
    listed = [json.loads(line) for line in (tmp_path / "out" / "failures.jsonl").read_text().splitlines()]
    assert sorted(one["key"] for one in listed) == [key_of(3), key_of(8)]
    assert {one["code"] for one in listed} == {"unidentified", "bad_label"}
    (ended,) = trained(
        [*arguments[:-1], str(tmp_path / "wild"), "--max-failures=0.5", "--lr=1e30"], tmp_path / "wild-notes"
    )
    assert ended.status == 65
    assert "error[diverged]: the loss at epoch 1" in ended.err
    assert "lower --lr" in ended.err
