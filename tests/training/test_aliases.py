"""`run-local` and `run-ray`: the flags of the webdataset ImageNet kit, and what they mean here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from embq.app.cli.entry_point import cli
from embq.core.errors import InputError, UsageError
from tests.training.classifying import class_shards

IMAGENET = Path(__file__).resolve().parents[2] / "examples" / "imagenet"
sys.path.append(str(IMAGENET))

from imagenet_kit import called, local_command, ray_command  # noqa: E402 - after the path


def meant(command: click.Command, *arguments: str) -> list[str]:
    found = command.main(list(arguments), standalone_mode=False)
    assert isinstance(found, list)
    return found


def parsed(arguments: list[str]) -> dict[str, object]:
    """The parameters that `embq train classify` makes of it."""
    group = cli.get_command(click.Context(cli), arguments[0])
    assert isinstance(group, click.Group)
    command = group.get_command(click.Context(group), arguments[1])
    assert command is not None
    return command.make_context(arguments[1], arguments[2:]).params


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with shards where the kit has them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shards").mkdir()
    for name in ("train-000000", "train-000001", "val-000000"):
        (tmp_path / "shards" / f"imagenet-{name}.tar").touch()
    (tmp_path / "shards" / "sizes.json").write_text('{"imagenet-train-000000.tar": 3, "imagenet-train-000001.tar": 4}')
    return tmp_path


def test_run_local_without_flags_trains_as_the_kit_did(kit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = parsed(meant(local_command))
    assert said["shards"] == "./shards/imagenet-train-*.tar"
    assert said["validation"] == "./shards/imagenet-val-*.tar"
    given = {name: said[name] for name in ("arch", "epochs", "batch_size", "loader_workers", "splitshards", "device")}
    assert given == {
        "arch": "torchvision:resnet18",
        "epochs": 300,
        "batch_size": 32,
        "loader_workers": 4,
        "splitshards": False,
        "device": "cuda",
    }
    assert said["out"] == "./resnet18"
    assert capsys.readouterr().err == "note: checkpoints and the log are in ./resnet18; --output names another folder\n"


def test_every_flag_that_was_kept_reaches_the_training(kit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = "--bucket http://h:8080/ --shards a-{0..3}.tar --valshards b.tar --batchsize 8 --mname resnet50 --nepochs 2"
    more = "--workers 1 --ntrain 100 --device cpu --backend gloo --onelog --verbose --output=o --precision bf16"
    said = parsed(meant(local_command, *kept.split(), *more.split()))
    assert said["shards"] == "http://h:8080/a-{0..3}.tar"
    assert said["validation"] == "http://h:8080/b.tar"
    names = ("arch", "epochs", "batch_size", "loader_workers", "epoch_samples", "device", "out", "precision")
    assert [said[name] for name in names] == ["torchvision:resnet50", 2, 8, 1, 100, "cpu", "o", "bf16"]
    assert capsys.readouterr().err == ""


def test_flags_of_no_effect_are_told_with_what_is_there_instead(kit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meant(local_command, "--output=o", "--loginterval=5", "--nval=10", "--cache-dir=/x", "--backend=gloo", "--showopen")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" is of no effect: ")[0] for line in lines] == [
        "note: --loginterval",
        "note: --cache-dir",
        "note: --nval",
        "note: --backend",
        "note: --showopen",
    ]


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--amplevel=O1", "--precision bf16"),
        ("--apexddp", "DistributedDataParallel"),
        ("--distributed=x", "--hosts a,b"),
        ("--bucket=gs:", "mount or copy them"),
        ("--bucket=ais:", "mount or copy them"),
        ("--bucket=pipe:cat /etc/passwd", "mount or copy them"),
        ("--mname=trivial", "--mname resnet18"),
        ("--device=cuda:1", "CUDA_VISIBLE_DEVICES=1"),
        ("--device=tpu", "--device cpu"),
    ],
)
def test_what_embq_has_no_counterpart_of_is_refused_with_what_to_do(kit: Path, flag: str, instead: str) -> None:
    with pytest.raises(UsageError) as refused:
        meant(local_command, flag)
    assert instead in refused.value.next_step


def test_an_exact_epoch_has_the_samples_of_the_shards(kit: Path) -> None:
    assert "--splitshards" in meant(local_command, "--splitshards", "--ntrain=7")
    with pytest.raises(InputError, match="--ntrain 8 and --splitshards: the shards have 7 samples") as refused:
        meant(local_command, "--splitshards", "--ntrain=8")
    assert refused.value.exit_code == 65


def test_run_ray_takes_a_cluster_that_is_there_and_as_many_workers_as_asked(kit: Path) -> None:
    assert meant(ray_command)[-1] == "--ray-address=auto"
    assert meant(ray_command, "--wsize=-1")[-1] == "--ray-address=auto"
    some = meant(ray_command, "--wsize=3", "--ray-address=h:26379", "--device=cuda:0")
    assert some[-2:] == ["--ray-address=h:26379", "--num-devices=3"]
    assert parsed(some)["processes"] == 3
    assert parsed(some)["device"] == "cuda"


def test_without_shards_to_measure_on_that_is_told(kit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kit / "shards" / "imagenet-val-000000.tar").unlink()
    assert parsed(meant(local_command))["validation"] == ""
    assert "./shards has no imagenet-val-*.tar" in capsys.readouterr().err


def test_an_error_is_told_as_embq_tells_it(kit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(local_command, ["--apexddp"]) == 2
    told = "error[usage]: --apexddp: embq has no such flag\n  next:  apex is not used"
    assert capsys.readouterr().err.startswith(told)
    assert called(local_command, ["--nepochs=x"]) == 2


@pytest.mark.slow
def test_run_local_trains(tmp_path: Path) -> None:
    class_shards(tmp_path / "shards", [5, 3])
    names = "--shards=*.tar --batchsize=4 --workers=0 --nepochs=1 --device=cpu --splitshards --ntrain=8"
    done = subprocess.run(
        [str(IMAGENET / "run-local"), *names.split(), "--image-size=32", "--output=out"],
        cwd=tmp_path,
        env={**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
