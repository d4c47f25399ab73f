"""`embq train openclip`: what is checked, said and kept before a process of the training begins."""

from __future__ import annotations

import io
import json
import logging
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from embq.core.errors import ConfigError, EmbqError, InputError, ModelError, OutputError, TryLaterError, UsageError
from embq.training.launch.launch_options import Where
from embq.training.openclip.folder import begin, result_of
from embq.training.openclip.log import Line, Pace
from embq.training.openclip.models import initial_model
from embq.training.openclip.request import TrainingRequest
from embq.training.openclip.training_plan import TrainingPlan, count_usable, plan
from tests.support.models.clip import captioned_shards, tiny_clip
from tests.support.outputs.build import write_tar

CPU = Where(device="cpu")
LINE = (
    "Train Epoch: {epoch} [{samples}/90 (50%)] Data (t): 0.1 Batch (t): 0.5, 30.0/s, 30.0/s/gpu "
    "LR: 0.1 Logit Scale: 14.2 Contrastive_loss: 2.6 (2.6) Loss: 2.6250 (2.6)"
)


def asked(folder: Path, **options: Any) -> TrainingRequest:
    if not (folder / "shards").exists():
        captioned_shards(folder / "shards", [6, 6, 6])
        tiny_clip(folder / "tiny")
    plain: dict[str, Any] = {
        "shards": str(folder / "shards"),
        "model": str(folder / "tiny"),
        "out": folder / "out",
        "epochs": 2,
        "batch_size": 6,
        "loader_workers": 1,
        "lr": None,
        "warmup_steps": 1,
        "precision": "",
        "resampled": False,
        "exact": False,
        "epoch_samples": None,
        "log_every": 1,
        "further": (),
    }
    return TrainingRequest(**{**plain, **options})


def flag(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def refusal(kind: type[EmbqError], folder: Path, where: Where = CPU, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        plan(asked(folder, **options), where)
    assert caught.value.next_step
    return f"{caught.value.message} | {caught.value.next_step}"


def test_the_flags_say_what_open_clip_would_not_find_out(tmp_path: Path) -> None:
    arguments = plan(asked(tmp_path, further=("--local-loss",)), CPU).arguments()
    assert flag(arguments, "--train-data") == f"{tmp_path}/shards/train-{{000000..000002}}.tar"
    assert flag(arguments, "--train-num-samples") == "18"
    assert flag(arguments, "--precision") == "fp32"  # amp is slower on cores
    # Its folder's name has no "vit" in it.
    assert [flag(arguments, name) for name in ("--beta1", "--beta2", "--eps")] == ["0.9", "0.98", "1e-06"]
    assert {"--save-most-recent", "--local-loss", "--progress"} <= set(arguments)
    assert "--keys" not in arguments
    exact = plan(asked(tmp_path, exact=True, further=("--beta2", "0.95")), CPU)
    assert flag(exact.arguments(), "--keys") == str(tmp_path / "out" / "keys")
    assert exact.settings.beta2 == 0.95


def test_a_device_that_is_not_there_is_not_replaced_by_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "--device cpu" in refusal(ConfigError, tmp_path, Where(device="cuda"))


def test_flags_that_embq_says_itself_and_flags_that_are_none_are_refused(tmp_path: Path) -> None:
    assert "--batch-size is for embq to say" in refusal(UsageError, tmp_path, further=("--batch-size", "7"))
    assert "--batch-size is for embq to say" in refusal(UsageError, tmp_path, further=("--batch-s=7",))
    assert "--dataset-resampled" in refusal(UsageError, tmp_path, further=("--dataset-resampled",))
    assert "--log-local does not suit embq" in refusal(UsageError, tmp_path, further=("--log-local",))
    assert "unrecognized arguments: --nonsense" in refusal(UsageError, tmp_path, further=("--nonsense",))
    assert "exclude each other" in refusal(UsageError, tmp_path, exact=True, resampled=True)
    assert "--epoch-samples" in refusal(UsageError, tmp_path, exact=True, epoch_samples=17)


def test_a_secret_is_not_sent_to_wandb(tmp_path: Path) -> None:
    """open_clip gives wandb all its settings: the URLs of shards, with passwords and signatures."""
    report = ("--report-to", "wandb")
    for secret in ("http://me:s3cret@127.0.0.1:9/val.tar", "https://host/val.tar?X-Amz-Signature=s3cret"):
        further = ("--val-data", secret)
        told = refusal(UsageError, tmp_path, further=(*further, *report))
        assert "--val-data has a secret" in told
        assert "s3cret" not in told
        plan(asked(tmp_path, further=further), CPU)
    plan(asked(tmp_path, further=report), CPU)


def test_shards_that_do_not_suit_are_refused(tmp_path: Path) -> None:
    assert "3 shards are too few for 4 readers" in refusal(InputError, tmp_path, loader_workers=4)
    plan(asked(tmp_path, loader_workers=4, resampled=True), CPU)
    assert "--exact: each of" in refusal(InputError, tmp_path, exact=True, batch_size=4)
    # What is advised must not be refused by --exact.
    assert "--resampled" not in refusal(InputError, tmp_path, exact=True, loader_workers=4)
    assert "--resampled" not in refusal(InputError, tmp_path, exact=True, batch_size=19)
    accumulated = {"exact": True, "batch_size": 6, "further": ("--accum-freq", "2")}
    assert "leaves the last 1 without a step" in refusal(InputError, tmp_path, **accumulated)
    plan(asked(tmp_path, **{**accumulated, "batch_size": 9}), CPU)
    sizes = (tmp_path / "shards" / "sizes.json").read_text()
    (tmp_path / "shards" / "sizes.json").write_text(sizes.replace("6", "12", 1))
    assert "hold 18 samples" in refusal(InputError, tmp_path, exact=True)
    (tmp_path / "shards" / "sizes.json").unlink()
    assert "--epoch-samples N" in refusal(InputError, tmp_path)
    assert plan(asked(tmp_path, epoch_samples=18), CPU).samples == 18
    assert "too few" in refusal(InputError, tmp_path, epoch_samples=18, loader_workers=4)
    assert "sizes.json" in refusal(UsageError, tmp_path, epoch_samples=18, exact=True)


def shard(path: Path, names: list[str]) -> Path:
    return write_tar(path, [(name, b"") for name in names])


def test_samples_that_open_clip_leaves_out_in_silence_are_told_of(tmp_path: Path) -> None:
    names = ["a.jpg", "a.txt", "b.JPEG", "b.txt", "b.json", "c.jpg", "d.txt", "d.gif", "e.png", "f.webp", "f.txt"]
    looked = count_usable([str(shard(tmp_path / "odd.tar", names))])
    assert (looked.samples, looked.used, looked.without_caption, dict(looked.extensions)) == (6, 3, 2, {"gif": 1})
    assert looked.sentence().startswith("3 of 6 samples are left out by open_clip: 2 without a caption (.txt)")

    question = asked(tmp_path)
    shard(tmp_path / "shards" / "train-000000.tar", names)
    assert "3 of 6 samples are left out" in plan(question, CPU).notes[0]
    shard(tmp_path / "shards" / "train-000000.tar", ["a.jpg", "b.jpg"])
    assert "2 of 2 samples are left out" in refusal(InputError, tmp_path)
    captioned_shards(tmp_path / "shards", [6, 6, 6])
    shard(tmp_path / "shards" / "train-000002.tar", names)
    assert plan(question, CPU).notes == ()
    assert "in all shards, 3 of 18" in refusal(InputError, tmp_path, exact=True)


def test_a_model_is_found_by_what_it_is_and_not_by_letters_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vit = tiny_clip(tmp_path / "plain")
    assert initial_model(str(vit)).optimizer["beta2"] == 0.98
    described = json.loads((vit / "open_clip_config.json").read_text())
    described["model_cfg"]["vision_cfg"]["layers"] = [1, 1, 1, 1]
    resnet = tiny_clip(tmp_path / "vit-or-not")
    (resnet / "open_clip_config.json").write_text(json.dumps(described))
    assert initial_model(f"local-dir:{resnet}").optimizer["beta2"] == 0.999
    assert initial_model("ViT-B/32").name == "ViT-B/32"
    (vit / "open_clip_model.safetensors").touch()
    assert initial_model(str(vit)).weights == vit / "open_clip_model.safetensors"
    assert "ViT-B-32" in refusal(ModelError, tmp_path, model="VIT-B-32-x")
    (tmp_path / "ViT-B-32").mkdir()  # as the folder of a training may be called
    monkeypatch.chdir(tmp_path)
    assert initial_model("ViT-B-32").name == "ViT-B-32"
    assert "no folder of this name with open_clip_config.json" in refusal(ModelError, tmp_path, model="shards")
    assert "open_clip_config.json" in refusal(ModelError, tmp_path, model=str(tmp_path / "nowhere"))
    (vit / "open_clip_config.json").write_text("{}")
    assert "vision_cfg" in refusal(ModelError, tmp_path, model=str(vit))


def test_a_learning_rate_that_is_never_reached_is_told_of(tmp_path: Path) -> None:
    assert "never gets to --lr" in plan(asked(tmp_path, warmup_steps=None), CPU).notes[0]


# --- the folder ---


def checkpoints(made: TrainingPlan, *names: str) -> None:
    (made.request.out / "checkpoints").mkdir(exist_ok=True)
    for name in names:
        with zipfile.ZipFile(made.request.out / "checkpoints" / name, "w") as file:
            file.writestr("data.pkl", b"weights")


def test_the_same_command_goes_on_and_another_one_is_refused(tmp_path: Path) -> None:
    made = plan(asked(tmp_path), CPU)
    with begin(made) as begun:
        assert begun.epochs_done == 0
        with pytest.raises(TryLaterError), begin(made):
            pass
    checkpoints(made, "epoch_1.pt", "epoch_latest.pt")
    with begin(plan(asked(tmp_path, loader_workers=0, log_every=7), CPU)) as begun:
        assert begun.epochs_done == 1
    cut = made.request.out / "checkpoints" / "epoch_2.pt"
    checkpoints(made, cut.name)
    cut.write_bytes(cut.read_bytes()[:-1])
    with begin(made) as begun:
        assert begun.epochs_done == 1
    for other in ({"batch_size": 3}, {"lr": 0.1}, {"further": ("--siglip",)}, {"exact": True}):
        with pytest.raises(OutputError, match="other settings"), begin(plan(asked(tmp_path, **other), CPU)):
            pass
    captioned_shards(tmp_path / "shards", [6, 6, 12])
    with pytest.raises(OutputError, match="other shards"), begin(plan(asked(tmp_path), CPU)):
        pass


@pytest.mark.parametrize(
    ("harm", "goes_on_behind"), [("none", 2), ("cut", 1), ("one bit", 1), ("another epoch's", 1), ("no optimizer", 1)]
)
def test_a_training_goes_on_from_the_newest_checkpoint_that_is_whole(
    tmp_path: Path, harm: str, goes_on_behind: int
) -> None:
    import torch

    made = plan(asked(tmp_path, epochs=3), CPU)
    with begin(made):
        pass
    folder = made.request.out / "checkpoints"
    folder.mkdir()
    latest, newest = folder / "epoch_latest.pt", folder / "epoch_2.pt"
    for number, path in ((1, folder / "epoch_1.pt"), (1, latest), (2, newest)):  # and killed before the next
        state = {"epoch": number, "state_dict": {"a": torch.full((1000,), float(number))}, "optimizer": {}}
        if harm == "no optimizer" and path == newest:
            del state["optimizer"]
        torch.save({**state, "epoch": 1 if harm == "another epoch's" else number}, path)
        os.utime(path, (number, number))
    data = bytearray(newest.read_bytes())
    if harm == "one bit":
        data[data.index(torch.full((1000,), 2.0).numpy().tobytes()) + 2000] ^= 1
    newest.write_bytes(data[:-1] if harm == "cut" else data)
    with begin(made):
        assert torch.load(latest, weights_only=True)["epoch"] == goes_on_behind
    assert sorted(path.name for path in folder.iterdir()) == ["epoch_1.pt", "epoch_2.pt", "epoch_latest.pt"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    made = plan(asked(tmp_path), CPU)
    made.request.out.mkdir()
    (made.request.out / "letter.txt").touch()
    with pytest.raises(OutputError, match="holds files, and no training"), begin(made):
        pass
    assert [path.name for path in made.request.out.iterdir()] == ["letter.txt"]
    (made.request.out / "training.json").write_text("[")
    with pytest.raises(OutputError, match=r"training\.json is not what embq wrote"), begin(made):
        pass


def test_an_epoch_that_was_not_exact_is_found_by_its_keys(tmp_path: Path) -> None:
    made = plan(asked(tmp_path, exact=True), CPU)
    lines = [f"{tmp_path}/shards/train-{number // 6:06d}.tar\t{number:06d}\n" for number in range(18)]
    with begin(made) as begun:
        keys = made.request.out / "keys"
        keys.mkdir()
        (keys / "epoch-0-rank-0.txt").write_text("".join(lines[:9]))
        (keys / "epoch-0-rank-1.txt").write_text("".join(lines[9:]))
        (keys / "epoch-1-rank-0.txt").write_text("".join([*lines[:-1], lines[0]]))
        world = "2026-07-26,12:03:26 | INFO |   world_size: 3"
        log = [world, LINE.format(epoch=0, samples=6), LINE.format(epoch=0, samples=12)]
        (made.request.out / "out.log").write_text("\n".join(log))
        notes = made.request.out / "unreadable"
        notes.mkdir()
        (notes / "rank-0.txt").write_text("b.tar\t\na.tar\t000003.jpg\n")
        (notes / "rank-1.txt").write_text("a.tar\t000003.jpg\n")
        result = result_of(made, begun)
    assert result.inexact == (
        "epoch 2: 1 samples were not trained on, and 1 more than once; missing of train-000002.tar (1)",
    )
    unreadable = ("a.tar 000003.jpg", "b.tar")
    assert (result.samples_per_s, result.unreadable, result.unheard) == (30.0, unreadable, 1)

    checkpoints(made, "epoch_2.pt")
    with begin(made) as begun:  # the same command again, which has nothing left to do
        again = result_of(made, begun)
    assert (again.inexact, again.unreadable, again.unheard) == (result.inexact, unreadable, 1)


def test_a_log_on_another_machine_is_told(tmp_path: Path) -> None:
    made = plan(asked(tmp_path), CPU)
    with begin(made) as begun, pytest.raises(OutputError, match="the first host has another"):
        result_of(made, begun)


# --- the line of progress ---


def test_the_pace_is_told_from_the_second_iteration_on() -> None:
    now = [0.0]
    stream = io.StringIO()
    line = Line(Pace(2, lambda: now[0]), stream, every_s=0.0)
    for samples, at in ((15, 100.0), (30, 101.0)):
        now[0] = at
        line.emit(logging.LogRecord("root", logging.INFO, "", 0, LINE.format(epoch=0, samples=samples), (), None))
    line.emit(logging.LogRecord("root", logging.INFO, "", 0, "Start epoch 0", (), None))
    line.emit(logging.LogRecord("root", logging.WARNING, "", 0, "look at this", (), None))
    assert stream.getvalue().splitlines() == [
        "epoch 1 of 2: 15 samples (17%), loss 2.6250",
        "epoch 1 of 2: 30 samples (33%), 15.0 samples/s, loss 2.6250, about 10 s left",
        "look at this",
    ]
