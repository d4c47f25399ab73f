"""Forward passes beside each other on a CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from embq.core.errors import DeviceFullError
from embq.worker.embedders.device.network import Network, ParallelPasses
from tests.support.lazy import lazy

torch = lazy("torch")


WAIT_S = 20.0


def test_passes_are_computed_at_the_same_time_each_by_one_thread() -> None:
    meet = threading.Barrier(2)  # a pass alone would wait in vain
    threads = torch.get_num_threads()

    def computed(number: int) -> Callable[[], Mapping[str, np.ndarray]]:
        def run() -> Mapping[str, np.ndarray]:
            meet.wait(WAIT_S)
            return {"text": np.array([[number, torch.get_num_threads()]])}

        return run

    lanes = ParallelPasses(2)
    begun = [lanes.begin(["text"], computed(number)) for number in range(4)]
    assert [vectors["text"].tolist() for vectors in begun] == [[[number, 1]] for number in range(4)]
    assert {vectors.ahead for vectors in begun} == {2}
    assert torch.get_num_threads() == threads


def test_what_a_pass_raises_is_raised_where_its_vectors_are_asked_for() -> None:
    def run() -> Mapping[str, np.ndarray]:
        raise DeviceFullError("no room")

    begun = ParallelPasses(2).begin(["text"], run)
    with pytest.raises(DeviceFullError, match="no room"):
        dict(begun)


def test_weights_are_cast_only_when_no_pass_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    module = torch.nn.Linear(2, 2, bias=False)
    seen: list[torch.dtype] = []
    began, go_on = threading.Event(), threading.Event()

    def run(batch: list[int]) -> Mapping[str, torch.Tensor]:
        if batch == [1]:
            began.set()
            go_on.wait(WAIT_S)
        seen.append(module.weight.dtype)
        return {"text": torch.ones(len(batch), 2)}

    network: Network[int] = Network(module, run, device=torch.device("cpu"), dtype=torch.bfloat16, example=0)
    seen.clear()
    begun = network.embed([1])
    assert began.wait(WAIT_S)
    threading.Timer(0.2, go_on.set).start()
    network.embed_in_fp32([2])
    assert dict(begun)["text"].shape == (1, 2)
    assert seen == [torch.bfloat16, torch.float32]
    assert module.weight.dtype == torch.bfloat16
