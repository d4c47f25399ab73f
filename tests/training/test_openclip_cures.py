"""`python -m embq.training.openclip`: open_clip's training runs where it did not, and says so where it does not."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from tests.support.models.clip import captioned_shards, tiny_clip

ROOT = Path(__file__).resolve().parents[2]

COMMON = ["--device", "cpu", "--precision", "fp32", "--workers", "0", "--log-every-n-steps", "1", "--epochs", "1"]
SYNTHETIC = ["--dataset-type", "synthetic", "--train-num-samples", "32"]


def train(
    *flags: str, module: str = "embq.training.openclip", processes: int = 1, timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """One training to its end."""
    python = [sys.executable, "-m", module]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = python if processes == 1 else [*torchrun, "-m", "--", module]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [*command, *flags], capture_output=True, text=True, check=False, timeout=timeout_s, env=environment
    )


def flags_of(folder: Path, *flags: str) -> list[str]:
    model = tiny_clip(folder / "model")
    return ["--model", f"local-dir:{model}", "--logs", str(folder), "--name", "test", *COMMON, *flags]


def losses(folder: Path) -> list[float]:
    return [float(found) for found in re.findall(r" Loss: ([\d.]+)", (folder / "test" / "out.log").read_text())]


def test_a_module_on_cpus_may_be_distributed(tmp_path: Path) -> None:
    import torch
    from torch import distributed, nn

    from embq.training.openclip.open_clip_patches import distributed_on_cpus

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    try:
        given = {"device_ids": [torch.device("cpu")]}
        with distributed_on_cpus():
            assert nn.parallel.DistributedDataParallel(nn.Linear(2, 2), **given).device_ids is None
    finally:
        distributed.destroy_process_group()


def test_processes_that_have_a_group_train_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from open_clip_train.distributed import init_distributed_device_so
    from torch import distributed

    from embq.training.openclip.open_clip_patches import a_group_that_is_there

    monkeypatch.setenv("WORLD_SIZE", "2")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    try:
        with a_group_that_is_there():
            assert init_distributed_device_so("cpu")["world_size"] == 1
    finally:
        distributed.destroy_process_group()


def test_a_folder_that_holds_a_training_stops_it_with_a_message_and_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embq.core.errors import OutputError
    from embq.training.openclip.__main__ import main

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "out.log").write_text("of another training\n")
    with pytest.raises(OutputError, match="holds a training already") as caught:
        main(flags_of(tmp_path, *SYNTHETIC))
    assert "--resume latest" in caught.value.next_step
    assert caught.value.exit_code == 74
    assert (tmp_path / "test" / "out.log").read_text() == "of another training\n"


@pytest.mark.slow
def test_two_processes_train_on_cpus_and_none_trains_over_what_is_there(tmp_path: Path) -> None:
    flags = flags_of(tmp_path, *SYNTHETIC, "--batch-size", "8", "--local-loss", "--gather-with-grad")
    done = train(*flags, processes=2)
    assert done.returncode == 0, done.stderr
    found = losses(tmp_path)
    assert found == pytest.approx([math.log(16)] * 2, abs=0.01)  # of the global batch: both ranks took part

    # Without a stop for all of them, rank 1 waits for rank 0, and torchrun for it.
    began = time.monotonic()
    again = train(*flags, processes=2)
    assert again.returncode != 0
    assert "holds a training already" in again.stderr
    assert again.stderr.count("Traceback") <= 1  # torchrun's own
    assert time.monotonic() - began < 60
    assert losses(tmp_path) == found


@pytest.mark.slow
def test_training_goes_beyond_the_end_of_a_shard_and_tells_what_it_was_made_of(tmp_path: Path) -> None:
    shards = captioned_shards(tmp_path / "shards", [6, 6, 6])
    data = ["--dataset-type", "webdataset", "--train-data", f"{shards}/train-{{000000..000002}}.tar"]
    flags = flags_of(tmp_path, *data, "--batch-size", "9", "--keys", str(tmp_path / "keys"))
    done = train(*flags)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "keys" / "epoch-0-rank-0.txt").read_text().splitlines()
    expected = {f"{shards}/train-{number // 6:06d}.tar\t{number:06d}": 1 for number in range(18)}
    assert Counter(lines) == expected
    assert len(losses(tmp_path)) == 2


def test_a_sample_that_cannot_be_decoded_is_logged_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    from open_clip_train import data
    from webdataset.autodecode import DecodingError

    from embq.training.openclip.open_clip_patches import samples_by_name

    error = DecodingError(url="shards/a.tar", key="000006", k="jpg", sample={"jpg": b"much"})
    error.__cause__ = OSError("cut")
    with samples_by_name():
        assert data.log_and_continue(error) is True
        assert data.log_and_continue(ValueError("a shard", "b.tar")) is True
    assert caplog.messages == [
        "Handling webdataset error (shards/a.tar 000006.jpg: OSError). Ignoring.",
        "Handling webdataset error (ValueError('a shard', 'b.tar')). Ignoring.",
    ]


def test_loader_workers_note_the_shards_and_samples_that_they_cannot_read(tmp_path: Path) -> None:
    from open_clip_train import data
    from open_clip_train.params import parse_args

    from embq.training.openclip.folder import noted
    from embq.training.openclip.open_clip_patches import noted_failures, patched

    shards = captioned_shards(tmp_path / "shards", [6, 6])
    whole = (shards / "train-000000.tar").read_bytes()
    at = whole.index(b"\xff\xd8\xff")
    (shards / "train-000000.tar").write_bytes(whole[:at] + bytes(200) + whole[at + 200 :])
    (shards / "train-000001.tar").write_bytes(b"no archive")
    args = parse_args(["--train-data", f"{shards}/train-{{000000..000001}}.tar", "--train-num-samples", "5"])
    args.workers, args.batch_size, args.rank, args.world_size = 2, 2, 3, 1
    with patched(), noted_failures(tmp_path / "notes"):
        made = data.get_wds_dataset(args, lambda image: 0, True, tokenizer=lambda text: [0])
        assert noted(tmp_path / "notes") == (1, [])
        names = [(f"{shards}/train-000000.tar", "000000.jpg"), (f"{shards}/train-000001.tar", "")]
        for _ in range(20):  # samples are shuffled: the damaged one may come behind the two batches of an epoch
            assert len(list(islice(made.dataloader, 2))) == 2
            if noted(tmp_path / "notes") == (1, names):
                break
    assert noted(tmp_path / "notes") == (1, names)
    assert (tmp_path / "notes" / "rank-3.txt").exists()


def test_a_checkpoint_that_cannot_be_written_is_an_error_of_the_disk() -> None:
    import torch

    from embq.core.errors import OutputError
    from embq.training.openclip.open_clip_patches import checkpoints_that_fail

    with (
        checkpoints_that_fail(),
        pytest.raises(OutputError, match=r"/dev/full cannot be written") as caught,
    ):
        torch.save({"weights": torch.zeros(1_000_000)}, "/dev/full")
    assert "make room" in caught.value.next_step


def test_what_is_replaced_is_put_back() -> None:
    from open_clip_train import data, main
    from torch import nn

    from embq.training.openclip.open_clip_patches import patched

    before = (data.tar_file_expander, main.init_distributed_device, nn.parallel.DistributedDataParallel)
    with patched():
        within = (data.tar_file_expander, main.init_distributed_device, nn.parallel.DistributedDataParallel)
    assert all(one is not other for one, other in zip(before, within, strict=True))
    assert before == (data.tar_file_expander, main.init_distributed_device, nn.parallel.DistributedDataParallel)
