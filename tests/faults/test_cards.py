"""W9: a card of a machine cannot serve. The others go on, and a sentence names it and what to do."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.session import ended
from tests.faults.kit.cluster import Cluster, Service, let_go, sabotaged
from tests.faults.kit.table import Recovery

QUICK = "stub:16?ms_per_sample=5&batch_size=10"
EMBED = "embq.worker.embedders.stub:StubEmbedder.embed"
PREPARE = "embq.worker.embedders.stub:StubEmbedder.prepare"
LOAD = "embq.worker.embedders.stub:load"
FOLDER = Path(__file__).parent / "kit" / "cards"

H100 = {"name": "NVIDIA H100", "uuid": "GPU-1111", "capability": [9, 0]}
L4 = {"name": "NVIDIA L4", "uuid": "GPU-2222", "capability": [8, 9]}
GTX1070 = {"name": "NVIDIA GeForce GTX 1070", "uuid": "GPU-3333", "capability": [6, 1]}
K80 = {"name": "Tesla K80", "uuid": "GPU-4444", "capability": [3, 7]}
SOON = {"set": "embq.worker.model_service:FULL_PAUSE_S", "to": 0.1}


class Cards:
    """The GPUs of a machine; some may disappear later."""

    def __init__(self, file: Path, *cards: dict[str, Any]) -> None:
        self.file = file
        self._cards = list(cards)
        self._write()

    def lose(self, number: int) -> None:
        """Have a card fall off the bus."""
        self._cards[number] = {**self._cards[number], "gone": True}
        self._write()

    def _write(self) -> None:
        self.file.write_text(json.dumps(self._cards))

    def machine(
        self, cluster: Cluster, *arguments: str, sabotage: list[dict[str, Any]] | None = None, count: int = 1
    ) -> Service:
        """A machine that has these cards and works with all of them, with `count` processes each; 0: by its cores."""
        changed = sabotaged(sabotage or [])
        paths = [str(FOLDER), changed["PYTHONPATH"]]
        environment = {**changed, "EMBQ_CARDS": str(self.file), "PYTHONPATH": os.pathsep.join(paths)}
        return cluster.workers(
            "--devices", "cuda", *arguments, count=count, environment={"CUDA_VISIBLE_DEVICES": None, **environment}
        )


def devices(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Device -> what `embq status --json` tells of it."""
    _, told, _ = ended("status", "--json", environment={"EMBQ_BROKER_URL": cluster.broker.url})
    return {
        device["device"]: device
        for service in json.loads(told)["services"]
        if service["role"] == "worker"
        for device in service["devices"]
    }


def assert_given_up_alone(cluster: Cluster, machine: Service, card: str, *words: str) -> None:
    """One card is given up, with these words; the other one has done all of the run."""
    given_up = re.findall(r"device_given_up .*", machine.log)
    assert len(given_up) == 1, machine.log
    for word in (card, *words):
        assert word in given_up[0]
    cluster.assert_completes()
    assert len(machine.processes()) == 1


@pytest.mark.fault("W9", "a GTX 1070 and a K80 beside a new card, which torch has no code for: not used")
def test_cards_that_torch_has_no_code_for(cluster: Cluster, recovery: Recovery, tmp_path: Path) -> None:
    cluster.begin(20, QUICK)
    machine = Cards(tmp_path / "cards", GTX1070, H100, K80).machine(cluster)
    cluster.until(lambda: machine.said_times("device_given_up") == 2)
    recovery.injected(2)
    cluster.assert_completes()
    # A machine reports itself every 5 s.
    cluster.until(lambda: {devices(cluster)[device]["state"] for device in ("cuda:0", "cuda:2")} == {"given_up"})
    told = devices(cluster)
    assert "6.1" in told["cuda:0"]["why"]
    assert "whl/cu126" in told["cuda:0"]["why"]
    assert "3.7" in told["cuda:2"]["why"]
    assert (told["cuda:1"]["name"], told["cuda:1"]["why"]) == ("NVIDIA H100", "")
    _, text, _ = ended("status", environment={"EMBQ_BROKER_URL": cluster.broker.url})
    assert "has given up cuda:0 (NVIDIA GeForce GTX 1070)" in text
    assert machine.said_times("worker_died") == 2  # each only once: starting it again mends nothing
    assert len(machine.processes()) == 1


@pytest.mark.fault("W9", "a card has no room for the model, at load or in the warm-up: given up alone")
@pytest.mark.parametrize("at", [LOAD, EMBED])
def test_a_card_that_is_full(cluster: Cluster, recovery: Recovery, tmp_path: Path, at: str) -> None:
    cluster.begin(100, QUICK)  # so that the other card is there before it is over
    fault = {"at": at, "do": "raise_full", "every": True, "device": "cuda:1"}
    machine = Cards(tmp_path / "cards", H100, L4).machine(cluster, "--run", cluster.run(), sabotage=[fault, SOON])
    cluster.until(lambda: machine.said_times("device_given_up"))
    recovery.injected(machine.said_times("device_full") + 1)
    assert_given_up_alone_in_its_run(cluster, machine)
    assert machine.said_times("device_full") == 2
    assert re.search(r"device_given_up device=cuda:1 name='NVIDIA L4' .*does not fit on the device", machine.log)


def assert_given_up_alone_in_its_run(cluster: Cluster, machine: Service) -> None:
    """The machine ends with the run, as if nothing had been."""
    cluster.until_closed()
    assert machine.wait() == 0, machine.log
    cluster.assert_exact()
    assert machine.said_times("device_given_up") == 1


@pytest.mark.fault("W9", "a card is full while another process leaves it: the model is loaded all the same")
def test_a_card_that_is_full_for_a_moment(cluster: Cluster, recovery: Recovery, tmp_path: Path) -> None:
    cluster.begin(20, QUICK)
    fault = {"at": LOAD, "do": "raise_full", "marker": str(tmp_path / "m"), "times": 2, "every": True}
    machine = Cards(tmp_path / "cards", H100).machine(cluster, sabotage=[fault, SOON])
    cluster.until_closed()
    recovery.injected(2)
    cluster.assert_exact()
    assert (machine.said_times("device_full"), machine.said_times("worker_died")) == (2, 0)


@pytest.mark.fault("W9", "a model is too large for a card of a resident machine: the card serves the other models")
def test_a_card_that_is_too_small_for_one_model(cluster: Cluster, recovery: Recovery, tmp_path: Path) -> None:
    cluster.begin(20, "stub:24?ms_per_sample=5&batch_size=10")
    fault = {"at": LOAD, "do": "raise_full", "every": True, "match": "stub:24", "device": "cuda:0"}
    machine = Cards(tmp_path / "cards", L4).machine(cluster, sabotage=[fault, SOON])
    cluster.until(lambda: machine.said_times("model_refused"))
    recovery.injected(3)
    other = cluster.another("small")
    other.begin(20, QUICK)
    other.until_closed()
    other.assert_exact()
    told = re.compile(r"stub:24\S* cannot be loaded on .*: cuda:0 \(NVIDIA L4\): .* does not fit on the device")
    # A machine reports itself every few seconds.
    cluster.until(lambda: told.search(ended("status", environment={"EMBQ_BROKER_URL": cluster.broker.url})[1]))
    assert (machine.said_times("worker_died"), machine.said_times("device_given_up")) == (0, 0)
    cluster.workers()
    cluster.assert_completes(dim=24)


@pytest.mark.fault("W9", "no kernel image at load; errors that stay, in the preparing and in the embedding thread")
@pytest.mark.parametrize(("at", "count"), [(LOAD, 1), (PREPARE, 3), (EMBED, 4)])
def test_a_card_that_fails_for_good(cluster: Cluster, recovery: Recovery, tmp_path: Path, at: str, count: int) -> None:
    cluster.begin(100, "stub:16?ms_per_sample=20&batch_size=10")
    fault = {"at": at, "do": "raise_device", "count": count, "every": True, "device": "cuda:0"}
    machine = Cards(tmp_path / "cards", H100, L4).machine(cluster, sabotage=[fault])
    cluster.until(lambda: machine.said_times("device_given_up"))
    recovery.injected(machine.said_times("worker_died"))
    assert_given_up_alone(
        cluster, machine, "device=cuda:0 name='NVIDIA H100'", "the device failed: CUDA error", "dmesg"
    )
    assert 3 <= machine.said_times("worker_died") <= 6


@pytest.mark.fault("W9", "a card falls off the bus between two passes: the other card does its units")
def test_a_card_that_disappears(cluster: Cluster, recovery: Recovery, tmp_path: Path) -> None:
    cluster.begin(60, QUICK)
    cards = Cards(tmp_path / "cards", H100, L4)
    lost = {"at": EMBED, "do": "raise_device", "count": 6, "device": "cuda:1"}
    wait = {"at": EMBED, "do": "gate", "count": 6, "device": "cuda:1", "gate": str(tmp_path / "gate")}
    # The other one does not do all the work before.
    other = {**wait, "count": 1, "device": "cuda:0", "gate": str(tmp_path / "other")}
    machine = cards.machine(cluster, sabotage=[lost, wait, other])
    cluster.until((tmp_path / "gate.reached").exists)
    cards.lose(1)
    recovery.injected()
    let_go(tmp_path / "gate")
    seconds = cluster.until(lambda: machine.said_times("device_given_up"))
    recovery.note("given up", seconds)
    let_go(tmp_path / "other")
    assert_given_up_alone(cluster, machine, "device=cuda:1 name='NVIDIA L4'", "does not see the device", "nvidia-smi")


@pytest.mark.fault("W9", "no card of a machine can serve: it ends, and says what is wrong with each")
def test_no_card_is_left(cluster: Cluster, recovery: Recovery, tmp_path: Path) -> None:
    cluster.begin(20, QUICK)
    machine = Cards(tmp_path / "cards", GTX1070, K80).machine(cluster)
    assert machine.wait() == 78, machine.log
    recovery.injected(2)
    last = machine.log[machine.log.index("no device is left") :]
    assert "cuda:0 (NVIDIA GeForce GTX 1070)" in last
    assert "cuda:1 (Tesla K80)" in last
    cluster.workers()
    cluster.assert_completes()
