"""`embq train openclip` with its processes: what it trained on, what it could not read, and what a kill leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from embq.app.cli import entry_point
from tests.support.models.clip import captioned_shards, hub_commit, tiny_clip
from tests.support.waiting import wait_until

TRAIN = ("--device", "cpu", "--warmup-steps", "2", "--log-every", "1", "--json")


def command(root: Path, *options: str) -> list[str]:
    model, out = str(root / "tiny"), str(root / "out")
    return ["train", "openclip", str(root / "shards"), "--model", model, "--output", out, *TRAIN, *options]


def trained(root: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """(exit status, what --json says, stderr)."""
    tiny_clip(root / "tiny")
    done = subprocess.run(
        [sys.executable, "-m", "embq", *command(root, *options)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def keys_of(root: Path, epoch: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for path in (root / "out" / "keys").glob(f"epoch-{epoch}-rank-*.txt"):
        seen.update(line.partition("\t")[2] for line in path.read_text().splitlines())
    return seen


def test_a_dry_run_says_the_command_and_makes_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captioned_shards(tmp_path / "shards", [4, 4])
    tiny_clip(tmp_path / "tiny")
    arguments = command(tmp_path, "--batch-size", "4", "--workers", "1", "--dry-run", "--", "--local-loss")
    assert entry_point.run(arguments) == 0
    said = capsys.readouterr().out
    assert "embq.training.openclip" in said
    assert "--local-loss" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_two_processes_with_two_loader_workers_each_see_every_sample_once_in_every_epoch(tmp_path: Path) -> None:
    captioned_shards(tmp_path / "shards", [6] * 8)
    exact = ("--exact", "--num-devices", "2", "--workers", "2", "--batch-size", "4", "--epochs", "2")
    status, said, stderr = trained(tmp_path, *exact, "--", "--local-loss", "--gather-with-grad")
    assert (status, said["exact"]) == (0, True), stderr
    assert len(list((tmp_path / "out" / "keys").iterdir())) == 4
    everything = {f"{number:06d}": 1 for number in range(48)}
    assert keys_of(tmp_path, 0) == keys_of(tmp_path, 1) == everything


@pytest.mark.slow
def test_workers_of_ray_train_in_the_group_that_ray_has_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="pip install 'embq[ray]'")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    captioned_shards(tmp_path / "shards", [6] * 4)
    exact = ("--exact", "--workers", "1", "--batch-size", "4", "--epochs", "1")
    status, said, stderr = trained(tmp_path, *exact, "--num-devices", "2", "--ray-address", "local")
    assert (status, said["exact"]) == (0, True), stderr
    assert keys_of(tmp_path, 0) == {f"{number:06d}": 1 for number in range(24)}
    assert "Params:" not in stderr  # open_clip's log is in its file
    assert "world_size: 2" in (tmp_path / "out" / "out.log").read_text()


@pytest.mark.slow
def test_an_image_that_cannot_be_decoded_is_told_of_whichever_process_met_it(tmp_path: Path) -> None:
    shards = captioned_shards(tmp_path / "shards", [6, 6])
    for damaged in (shards / "train-000000.tar", shards / "train-000001.tar"):
        data = bytearray(damaged.read_bytes())
        at = data.index(b"\xff\xd8\xff")
        data[at : at + 200] = bytes(200)
        damaged.write_bytes(data)
    exact = ("--exact", "--num-devices", "2", "--workers", "1", "--batch-size", "3", "--epochs", "1")
    status, said, stderr = trained(tmp_path, *exact)
    assert status == 3, stderr
    assert said["exact"] is False
    # What open_clip cannot read leaves its last batch without a sample, so each process begins its shard again.
    assert "train-000001.tar" in said["inexact"][0]
    both = [f"{shards}/train-000000.tar 000000.jpg", f"{shards}/train-000001.tar 000006.jpg"]
    assert (said["unreadable"], said["unreadable_names"], said["unreadable_not_known_of"]) == (2, both, 0)
    log = (tmp_path / "out" / "out.log").read_text()
    assert [f"({name}: " in log for name in both].count(True) == 1  # of process 0 alone
    seen = keys_of(tmp_path, 0)
    assert seen.total() == 12
    assert not {"000000", "000006"} & seen.keys()
    again, said_again, _ = trained(tmp_path, *exact)  # nothing is left to do, and nothing was mended
    assert (again, said_again["inexact"], said_again["unreadable_names"]) == (3, said["inexact"], both)


@pytest.mark.slow
def test_a_training_from_the_hub_goes_on_with_the_commit_it_was_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere the cache has another path, and the repository has changed by then."""
    captioned_shards(tmp_path / "shards", [8] * 2)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "one"))
    hub_commit(tmp_path / "one" / "hub", "a" * 40, seed=1)
    options = ("--model", "hf-hub:org/tiny", "--workers", "1", "--batch-size", "4", "--epochs", "2")
    status, _, stderr = trained(tmp_path, *options)
    assert status == 0, stderr
    out = tmp_path / "out"
    assert f"model: hf-hub:org/tiny@{'a' * 40}\n" in (out / "params.txt").read_text()
    for name in ("params.txt", "training.json"):
        assert str(tmp_path / "one") not in (out / name).read_text()

    (out / "checkpoints" / "epoch_2.pt").unlink()
    shutil.copyfile(out / "checkpoints" / "epoch_1.pt", out / "checkpoints" / "epoch_latest.pt")
    shutil.move(tmp_path / "one", tmp_path / "two")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "two"))
    hub_commit(tmp_path / "two" / "hub", "b" * 40, seed=2)
    before = len((out / "out.log").read_text())
    status, said, stderr = trained(tmp_path, *options)
    assert (status, said["epochs"]) == (0, 2), stderr
    log = (out / "out.log").read_text()[before:]
    assert "=> resuming checkpoint" in log
    assert f"two/hub/models--org--tiny/snapshots/{'a' * 40}/open_clip_model.safetensors" in log
    assert "b" * 40 not in log


@pytest.mark.slow
def test_a_training_that_was_killed_goes_on_behind_its_last_epoch(tmp_path: Path) -> None:
    captioned_shards(tmp_path / "shards", [8] * 6)
    tiny_clip(tmp_path / "tiny")
    options = ("--exact", "--workers", "1", "--batch-size", "4", "--epochs", "3")
    latest = tmp_path / "out" / "checkpoints" / "epoch_latest.pt"
    with subprocess.Popen(
        [sys.executable, "-m", "embq", *command(tmp_path, *options)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        wait_until(lambda: latest.exists() or process.poll() is not None, 120)
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    status, said, stderr = trained(tmp_path, *options)
    assert (status, said["exact"], said["epochs"]) == (0, True, 3), stderr
    assert ", going on from its epoch_latest.pt" in stderr
    log = (tmp_path / "out" / "out.log").read_text()
    assert "=> resuming checkpoint" in log
    assert log.count("Start epoch 0") == 1
