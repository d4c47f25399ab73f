"""Exact epochs under every launcher of several machines: each sample once in every epoch, by its key."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.training.classifying import TINY, class_shards, keys_of, log_of
from tests.training.launching import environment
from tests.training.ray_cluster import QUIET, ray_cluster
from tests.training.ssh_hosts import ssh_hosts

COUNTS = [9, 5, 12]
"""Three shards for two processes: one of them has more samples than the other."""


def trained(folder: Path, *where: str) -> None:
    """Train with two processes, and see that every key was trained on once in each of the two epochs."""
    shards, out = class_shards(folder / "s", COUNTS), folder / "out"
    command = [
        sys.executable,
        "-m",
        "embq",
        "train",
        "classify",
        str(shards),
        *TINY,
        "--splitshards",
        f"--output={out}",
    ]
    # Two hosts that are one machine would each take all of its cores.
    around = environment(**QUIET, OMP_NUM_THREADS="1")
    done = subprocess.run(
        [*command, "--json", *where], capture_output=True, text=True, check=False, env=around, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["samples"] == 2 * sum(COUNTS)
    taken = [keys_of(out, rank) for rank in range(2)]
    assert all(taken), "both processes have trained"
    for epoch in (0, 1):
        keys = Counter(key for rank in taken for at, _, keys in rank if at == epoch for key in keys)
        assert len(keys) == sum(COUNTS)
        assert set(keys.values()) == {1}
    assert [line["samples"] for line in log_of(out, "epoch")] == [sum(COUNTS)] * 2


@pytest.mark.slow
def test_over_two_hosts_of_torchrun(tmp_path: Path) -> None:
    (tmp_path / "ssh").mkdir()
    with ssh_hosts(tmp_path / "ssh") as hosts:
        trained(tmp_path, "--hosts", "one,two", *hosts.options)


@pytest.mark.slow
def test_over_two_workers_of_a_ray_cluster(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is an extra of its own: pip install 'embq[ray]'")
    with ray_cluster(2) as address:
        trained(tmp_path, "--ray-address", address, "--num-devices", "2")
