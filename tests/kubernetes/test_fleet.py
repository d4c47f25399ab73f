"""`embq fleet` on Kubernetes: the real kubectl against a stand-in whose pods are processes of this machine."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from embq.core.errors import Exit
from embq.core.process.children import MARK
from embq.fleet.kubernetes import KubernetesLauncher
from tests.e2e.check import check_complete
from tests.e2e.session import await_in, closed, committed, process_ended
from tests.e2e.test_fleet_launchers import DIM, QUICK, UNITS, Box, box
from tests.kubernetes.tools import VERSIONS, Manifest, check_schema
from tests.support.servers.kubernetes import Cluster, cluster
from tests.support.servers.tls import needs_tls_server

__all__ = ["box"]  # the fixture

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not on PATH; Debian: kubernetes-client"
)

LONG_S = 600.0
"""Checks of several pods side by side take minutes where other tests run too."""
PATCH = """
spec:
  template:
    spec:
      nodeSelector: {gpu: l4}
      volumes: [{name: data, persistentVolumeClaim: {claimName: inputs}}]
      containers: [{name: worker, resources: {limits: {memory: 16Gi}}, volumeMounts: [{name: data, mountPath: /data}]}]
"""


@pytest.fixture
def there(tmp_path: Path) -> Iterator[tuple[Cluster, tuple[str, ...]]]:
    """A cluster, and the options of a fleet on it."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    with cluster(folder, QUICK) as (made, configuration):
        kubectl = f"kubectl --kubeconfig {configuration} --request-timeout=60s"
        yield made, ("--launcher", "kubernetes", "--kubectl", kubectl, "--remote-python", sys.executable)


@pytest.mark.timeout(3 * LONG_S)
@needs_kubectl
@needs_tls_server
def test_machines_join_drain_and_go_and_a_secret_is_on_no_command_line(
    box: Box, there: tuple[Cluster, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, where = there
    calls = _noted_calls(tmp_path, monkeypatch)
    expected, out, writer = box.enqueue(ms_per_sample=40)
    before = box.traces()
    machines = ("--machines", "2", "--gpus-per-machine", "0", "--wait", str(LONG_S))
    status, rows = box.fleet("up", *where, *machines, "--", "--devices", "sim:1", deadline_s=2 * LONG_S)
    assert (status, {name: row["state"] for name, row in rows.items()}) == (0, {"fleet-0": "ok", "fleet-1": "ok"}), rows
    assert "sim:1" in rows["fleet-0"]["detail"], "the broker hears of its devices"
    await_in(writer, lambda: len(committed(out)) > 3)
    status, rows = box.fleet("drain", "fleet-1", *where)
    assert (status, list(rows)) == (0, ["fleet-1"]), rows
    status, rows = box.fleet("status", *where)
    assert [rows[name]["state"] for name in ("fleet-0", "fleet-1")] == ["ok", "fail"], rows
    await_in(writer, lambda: closed(out))
    check_complete(out, expected, units=UNITS, dim=DIM)
    passwords = [(box.server.secrets / f"worker-fleet.fleet-{n}" / "password").read_text().strip() for n in (0, 1)]
    told = calls.read_text()
    assert "apply" in told
    assert not [password for password in passwords if password in told]
    status, rows = box.fleet("down", *where)
    assert (status, len(rows)) == (0, 2), rows
    assert made.objects == {"secrets": {}, "deployments": {}}
    assert box.traces() == before


@pytest.mark.timeout(3 * LONG_S)
@needs_kubectl
@needs_tls_server
def test_a_machine_that_fails_its_check_says_why_and_keeps_nothing(
    box: Box, there: tuple[Cluster, tuple[str, ...]]
) -> None:
    made, where = there
    before = box.traces()
    status, rows = box.fleet("up", *where, "--machines", "1", "--", "--devices", "cuda", deadline_s=2 * LONG_S)
    assert status == Exit.UNAVAILABLE
    assert rows["fleet-0"]["state"] == "fail"
    assert rows["fleet-0"]["detail"].startswith("devices: "), rows
    assert rows["fleet-0"]["fix"]
    assert made.objects == {"secrets": {}, "deployments": {}}
    assert box.traces() == before


@needs_kubectl
@needs_tls_server
@pytest.mark.parametrize("version", VERSIONS)
def test_printed_manifests_are_those_of_kubernetes_with_the_users_patch(box: Box, tmp_path: Path, version: str) -> None:
    patch = tmp_path / "patch.yaml"
    patch.write_text(PATCH)
    where = ("--broker", box.server.url("worker"), "--secrets", box.server.secrets, "--launcher", "kubernetes")
    asked = (
        "--machines",
        "2",
        "--gpus-per-machine",
        "4",
        "--pod-image",
        "registry/embq-worker:1",
        "--patch",
        patch,
        "--print",
    )
    status, text, said = process_ended(
        *("fleet", "up", *where, *asked, "--", "--drain-timeout", "20"),
        environment={**QUICK, "EMBQ_BROKER_CA": box.server.ca},
    )
    assert status == 0, said
    manifests: list[dict[str, Any]] = list(yaml.safe_load_all(text))
    assert [one["kind"] for one in manifests] == ["Secret", "Deployment"] * 2
    password = (box.server.secrets / "worker-fleet.fleet-1" / "password").read_text().strip()
    assert json.loads(manifests[2]["stringData"]["order"])["password"] == password
    pod = manifests[3]["spec"]["template"]["spec"]
    assert (pod["terminationGracePeriodSeconds"], pod["nodeSelector"]) == (50, {"gpu": "l4"})
    assert pod["securityContext"]["runAsNonRoot"] is True
    (worker,) = pod["containers"]
    assert worker["image"] == "registry/embq-worker:1"
    assert worker["resources"]["limits"] == {"memory": "16Gi", "nvidia.com/gpu": 4}
    assert worker["securityContext"]["readOnlyRootFilesystem"] is True
    assert password not in json.dumps(manifests[3])
    check_schema(manifests, version)


NO_ROOM = {
    "type": "PodScheduled",
    "status": "False",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}
NO_QUOTA = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}
NO_CARD = {"embq": "0", "failed": [{"name": "devices", "detail": "no CUDA device", "fix": "nvidia-smi"}]}
CHECKED = f"log\n{MARK}{json.dumps(NO_CARD)}\n"
WELL = f"{MARK}{json.dumps(NO_CARD | {'failed': []})}\nerror[config]: no broker\n"
AGAIN = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}


def _of_worker(**state: object) -> Manifest:
    return {"phase": "Running", "containerStatuses": [{"name": "worker", **state}]}


@pytest.mark.parametrize(
    ("replicas", "conditions", "status", "row"),
    [
        (0, [], None, ("fail", "drained")),
        (1, [], None, ("warn", "it has no pod yet")),
        (1, [NO_QUOTA], None, ("warn", "exceeded quota")),
        (1, [], {"phase": "Pending", "conditions": [NO_ROOM]}, ("warn", NO_ROOM["message"])),
        (1, [], {"phase": "Pending"}, ("warn", "pending")),
        (1, [], _of_worker(state={"running": {}}), ("ok", "running on n1")),
        (1, [], _of_worker(state={"waiting": {"reason": "ContainerCreating"}}), ("ok", "running on n1")),
        (
            1,
            [],
            _of_worker(state={"waiting": {"reason": "ErrImagePull", "message": "no such image"}}),
            ("fail", "no such image"),
        ),
        (
            1,
            [],
            _of_worker(state={"terminated": {"exitCode": 69, "message": CHECKED}}),
            ("fail", "devices: no CUDA device"),
        ),
        (
            1,
            [],
            _of_worker(state=AGAIN, lastState={"terminated": {"exitCode": 69, "message": CHECKED}}),
            ("fail", "devices: no CUDA device"),
        ),
        (
            1,
            [],
            _of_worker(state={"terminated": {"exitCode": 78, "message": WELL}}),
            ("fail", "error[config]: no broker"),
        ),
        (1, [], _of_worker(state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}), ("fail", "OOMKilled")),
    ],
)
def test_a_row_tells_what_keeps_a_pod_from_working(
    replicas: int, conditions: list[object], status: Manifest | None, row: tuple[str, str], tmp_path: Path
) -> None:
    """States as the API of Kubernetes has them."""
    metadata = {
        "name": "embq-fleet-0",
        "labels": {"embq-machine": "fleet-0"},
        "creationTimestamp": "2026-01-02T00:00:00Z",
    }
    deployment = {"kind": "Deployment", "metadata": metadata, "spec": {"replicas": replicas}}
    items: list[Manifest] = [deployment | {"status": {"conditions": conditions}}]
    if status is not None:
        old = metadata | {"creationTimestamp": "2026-01-01T00:00:00Z"}
        items += [
            {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": "n1"}, "status": status},
            {"kind": "Pod", "metadata": old, "spec": {}, "status": {"phase": "Failed"}},
        ]
    listed = tmp_path / "listed.json"
    listed.write_text(json.dumps({"items": items}))
    launcher = KubernetesLauncher(
        fleet="fleet", kubectl=("sh", "-c", f"cat {listed}"), image="", python="python", gpus=1, patch=None
    )
    found = launcher.states(["fleet-0", "fleet-1"])
    assert list(found) == ["fleet-0"]
    assert (found["fleet-0"].state, found["fleet-0"].detail) == row


def _noted_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the command lines of kubectl from now on."""
    notes, before = folder / "calls", shutil.which("kubectl")
    (folder / "bin").mkdir()
    noting = folder / "bin" / "kubectl"
    noting.write_text(f'#!/bin/sh\necho "$@" >> {notes}\nexec {before} "$@"\n')
    noting.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")
    return notes
