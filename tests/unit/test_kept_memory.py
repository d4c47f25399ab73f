"""Memory that a pass frees is there for the next one: the environment in which a worker process computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from embq.core.errors import Exit
from embq.worker.supervisor.slot import ALLOCATORS, KEPT_MEMORY, PathMemory, _child_env
from tests.support.fleet import fleet

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


def test_a_worker_on_the_cpu_does_not_have_its_memory_cleared_again_for_each_pass() -> None:
    environment = _child_env(fleet("cpu"), "cpu")
    done = subprocess.run(
        [sys.executable, "-c", PASSES], env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    # 20 layers of 50 MB are 246,000 pages; without these settings 30,640 of them are cleared again.
    assert int(done.stdout) < 2_000


@pytest.mark.parametrize("name", [*sorted(ALLOCATORS), ""])
def test_a_gpu_has_expandable_segments_where_nobody_has_set_its_allocator(name: str) -> None:
    environment = _child_env(fleet("cpu"), "cuda:0") | ({name: "max_split_size_mb:64"} if name else {})
    for given in ALLOCATORS - {name}:
        environment.pop(given, None)
    assert PathMemory().begin("cpu", environment) == environment
    expected = environment if name else environment | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert PathMemory().begin("cuda:0", environment) == expected


@pytest.mark.slow
def test_torch_understands_what_the_allocator_is_told() -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("this torch does not tell its settings")
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    environment = {name: value for name, value in _child_env(fleet("cpu"), "cuda:0").items() if name not in ALLOCATORS}
    environment = PathMemory().begin("cuda:0", environment)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("expandable_segments:True\n", "")


@pytest.mark.parametrize("path", ["/dev/dxg", "/dev/kfd"])
def test_where_expandable_segments_are_known_to_fail_there_are_none(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == path)
    assert PathMemory().begin("cuda:0", {}) == {}


def test_a_process_leaves_out_what_the_one_before_it_died_with() -> None:
    memory = PathMemory()

    def process(status: int, *paths: str) -> bool:
        """True where it had expandable segments."""
        environment = memory.begin("cuda:0", {})
        memory.record_paths([])
        memory.record_paths(paths)
        memory.record_end(status)
        return bool(environment)

    assert process(0, "flat")
    assert process(Exit.BUG, "flat")
    assert not memory.without
    assert process(Exit.DEVICE, "flat")
    assert memory.without == {"flat", "expandable_segments"}
    assert not process(-9, "graph")
    assert memory.without == {"flat", "expandable_segments"}
    assert not process(-6, "graph")
    assert memory.without == {"flat", "graph", "expandable_segments"}
    assert not process(Exit.DEVICE)
    assert not memory.without, "a process that had none of them died as well"
    assert process(Exit.DEVICE)
    assert memory.without == {"expandable_segments"}, "it fails at the first allocation where it is not supported"


def test_who_sets_the_allocator_has_the_last_word_and_other_devices_keep_its_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = next(iter(KEPT_MEMORY))
    monkeypatch.delenv(name, raising=False)
    assert name not in _child_env(fleet("cpu"), "cuda:0")
    monkeypatch.setenv(name, "7")
    assert _child_env(fleet("cpu"), "cpu")[name] == "7"
