"""The bottleneck of a run is told while it works and at its end: decoding where that is slow, or the device.

And limits of the machine, which end a run at once.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from embq.core.errors import Exit
from embq.worker.meter.bottleneck import verdict
from examples.demo.collect import photographs
from tests.e2e.session import Command, await_in, ended, started, succeed, write_texts


def large_photographs(folder: Path, count: int) -> Path:
    """A folder of photographs, each of which takes 10 ms or more to decode."""
    folder.mkdir()
    ((_, small),) = photographs(1, seed=0)
    first = folder / "00000.jpg"
    Image.open(io.BytesIO(small)).convert("RGB").resize((2400, 1800)).save(first, "JPEG", quality=90)
    for number in range(1, count):
        os.link(first, folder / f"{number:05d}.jpg")
    return folder


@pytest.mark.parametrize(
    ("ms_per_sample", "samples", "limit"),
    [(1, 1000, "decoding"), (200, 96, "device")],
)
@pytest.mark.slow
def test_status_and_the_account_say_what_limits_a_run(
    short_tmp: Path, ms_per_sample: int, samples: int, limit: str
) -> None:
    root, folder = short_tmp / "out", large_photographs(short_tmp / "in", samples)
    run = ["run", folder, "-o", root, "-m", f"stub:16?decode=1&batch_size=8&ms_per_sample={ms_per_sample}"]

    def now() -> dict[str, Any]:
        said = json.loads(succeed("status", root, "--json")) if (root / "run.json").exists() else {}
        if said.get("limit") != limit:
            return {}
        # In the first second both stages may be at work all the time, or no pass may be over yet.
        told = said["limit_detail"]["now"]
        device, prepare = told["stages"]["embed"], told["stages"]["prepare"]
        waits = device["busy"] > prepare["busy"] and prepare["blocked"] > prepare["starved"]
        return said if (waits if limit == "device" else told["cores_needed"]) else {}

    seen: list[dict[str, Any]] = []
    with started(*run, "--unit-size", "50", "--threads", "1", "--json") as command:
        await_in(command, lambda: seen.extend(filter(None, [now()])) or seen)
        assert command.wait() == 0, command.said
        done = json.loads(command.stdout)
    (worker,) = seen[0]["workers"]
    assert worker["limit"] == limit
    so_far = done["limit_detail"]["so_far"]
    assert done["limit"] == so_far["limit"] == verdict(so_far["causes"])
    # On a busy machine the device waits a tenth of so short a run for its first unit, which the verdict is to say.
    assert so_far["limit"] == limit or max(so_far["causes"], key=so_far["causes"].__getitem__) == limit == "device"
    for told in (seen[0]["limit_detail"]["now"], so_far):
        device, prepare = told["stages"]["embed"], told["stages"]["prepare"]
        assert sum(told["causes"].values()) == pytest.approx(1, abs=0.01)
        if limit == "device":
            assert device["busy"] > prepare["busy"]
            assert prepare["blocked"] > prepare["starved"]
            assert told["cores_needed"] is None
        else:
            assert prepare["busy"] > device["busy"]
            assert device["starved"] > device["blocked"]
            assert told["threads"] == 1 < told["cores_needed"]


SMALL_MACHINES = {
    "few_files": ("ulimit -n 64", Exit.EXHAUSTED, "may open 64 files here, and a run needs", "ulimit -n 4096"),
    "no_inodes": ("mount -t tmpfs -o nr_inodes=12 none .", Exit.OUTPUT, "no inode (a file system", "make room"),
    "little_shm": ("mount -t tmpfs -o size=64k none /dev/shm", Exit.DONE, "", ""),
}


@pytest.mark.parametrize("limit", SMALL_MACHINES)
def test_a_limit_of_the_machine_ends_a_run_with_one_sentence_or_does_not_hinder_it(short_tmp: Path, limit: str) -> None:
    script, status, message, next_step = SMALL_MACHINES[limit]
    source, room = short_tmp / "texts.jsonl", short_tmp / "room"
    write_texts(source, 5)
    room.mkdir()
    own: tuple[str, ...] = ()
    if "mount" in script:
        own = ("unshare", "--mount", "--map-root-user")
        if not shutil.which("unshare") or subprocess.run([*own, "sh", "-c", script], cwd=room).returncode:
            pytest.skip("no file system can be mounted here")
    command = Command(
        "run", source, "-o", room / "out", "-m", "stub:8", "--quiet",
        prefix=(*own, "sh", "-c", f'{script} && exec "$@"', "sh"), cwd=room,
    )  # fmt: skip
    try:
        assert command.wait() == status, command.said
        assert command.stderr.count("error[") == (status != Exit.DONE), command.said
        unfolded = " ".join(command.stderr.split())
        assert message in unfolded, command.said
        assert next_step in unfolded, command.said
    finally:
        command.close()


def test_a_socket_that_fits_neither_beside_the_output_nor_into_tmpdir_names_tmpdir(short_tmp: Path) -> None:
    deep = short_tmp / "/".join(["deep" * 10] * 3)
    deep.mkdir(parents=True)
    source = short_tmp / "texts.jsonl"
    write_texts(source, 5)
    command = ("run", source, "-o", deep / "out", "-m", "stub:8", "--quiet")
    status, _, stderr = ended(*command, environment={"TMPDIR": str(deep)})
    assert status == Exit.CONFIG, stderr
    assert stderr.count("error[") == 1, stderr
    assert "set TMPDIR to a folder with a short path" in " ".join(stderr.split())
    assert ended(*command, environment={"TMPDIR": str(short_tmp)})[0] == Exit.DONE
