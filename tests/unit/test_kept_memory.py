"""What a pass frees is there for the next one: the environment in which a worker process computes on the CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.settings import Settings
from worker.slot import KEPT_MEMORY, Fleet, _child_env

PASSES = """
import resource, threading
import numpy as np

def layers(count):
    for _ in range(count):
        held = [np.ones(12_600_000, np.uint8) for _ in range(4)]
        del held

def work():
    layers(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    layers(20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def fleet() -> Fleet:
    return Fleet(
        devices=("cpu",),
        run="",
        prefetch=2,
        threads=1,
        batch_size=0,
        transport="auto",
        drain_s=1.0,
        version="test",
        settings=Settings.from_environment(),
    )


def test_a_worker_on_the_cpu_does_not_have_its_memory_cleared_again_for_each_pass() -> None:
    environment = _child_env(fleet(), "cpu")
    done = subprocess.run(
        [sys.executable, "-c", PASSES], env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    # 20 layers of 50 MB are 246,000 pages; without these settings 30,640 of them are cleared again.
    assert int(done.stdout) < 2_000


def test_who_sets_the_allocator_has_the_last_word_and_other_devices_keep_its_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = next(iter(KEPT_MEMORY))
    monkeypatch.delenv(name, raising=False)
    assert name not in _child_env(fleet(), "cuda:0")
    monkeypatch.setenv(name, "7")
    assert _child_env(fleet(), "cpu")[name] == "7"
