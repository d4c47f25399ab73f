"""The launcher of a fleet on Kubernetes: a Deployment and a Secret for each machine, by kubectl."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from embq.app.doctor.check import Check
from embq.core import wire
from embq.core.process.children import MARK, python
from embq.fleet.launcher import ENGINE_BYTES, GRACE_S, FleetMember, answer_in, called, late, rows_of

NEEDS = "install kubectl, and name the cluster with --kubectl 'kubectl --context NAME --namespace NAME'"
FORCE = "kubectl delete pod --grace-period=0 --force"
END_S, KILL_S = 120.0, 10
NO_ROOT = {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
CONFINED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
_MISSING = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CrashLoopBackOff")
"""Reasons for which a container waits until somebody mends its cause."""

Manifest = dict[str, Any]

ObjectName = Annotated[str, Meta(pattern=r"\A[a-z0-9][a-z0-9.-]{0,252}\Z")]
"""Name of an object; it becomes an argument of kubectl, also in commands that are shown."""


# What is read of the API's objects (https://kubernetes.io/docs/reference/kubernetes-api).


class _Metadata(Struct, frozen=True):
    name: ObjectName
    labels: dict[str, str] = {}
    created: wire.ShortText = field(name="creationTimestamp", default="")
    deleted: wire.ShortText | None = field(name="deletionTimestamp", default=None)


class _Reason(Struct, frozen=True):
    reason: wire.ShortText = ""
    message: str = ""


class _State(Struct, frozen=True):
    waiting: _Reason | None = None
    terminated: _Reason | None = None


class _Container(Struct, frozen=True):
    state: _State = _State()
    last: _State = field(name="lastState", default=_State())


class _Condition(Struct, frozen=True):
    type: str
    status: str
    message: str = ""


class _Status(Struct, frozen=True):
    phase: wire.ShortText = ""
    containers: tuple[_Container, ...] = field(name="containerStatuses", default=())
    conditions: tuple[_Condition, ...] = ()


class _Spec(Struct, frozen=True):
    replicas: int = 1
    node: wire.ShortText = field(name="nodeName", default="a node")


class _Object(Struct, frozen=True):
    kind: str
    metadata: _Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()

    @property
    def machine(self) -> str:
        return self.metadata.labels.get("embq-machine", "")


class _Objects(Struct, frozen=True):
    items: tuple[_Object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesLauncher:
    """Workers as pods; a pod that is lost begins as a new worker of the same machine. See `Launcher`.

    Attributes:
        fleet: its name, small letters, digits and hyphens.
        kubectl: kubectl with its options, such as the namespace.
        image: of the pods.
        python: Python with embq in it.
        gpus: of each machine, NVIDIA's; 0 for none.
        patch: strategic merge patch of the Deployments, a file for `kubectl patch --local`; None for none.
    """

    fleet: str
    kubectl: Sequence[str]
    image: str
    python: str
    gpus: int
    patch: Path | None

    def start(self, members: Sequence[FleetMember]) -> Iterable[Check]:
        """Apply the manifests; pods check themselves before their workers start."""
        self._called("apply", "--server-side", "--force-conflicts", "--filename", "-", stdin=self.manifests(members))
        return ()

    def manifests(self, members: Sequence[FleetMember]) -> str:
        """Secrets and Deployments as a stream of YAML, each in JSON; the Secrets hold passwords."""
        items = []
        for member in members:
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": self._metadata(member)}
            secret["stringData"] = {"order": member.order()}
            items += [secret, self._deployment(member)]
        return "".join(f"---\n{json.dumps(item, indent=1)}\n" for item in items)

    def states(self, names: Sequence[str]) -> Mapping[str, Check]:
        """States of the Deployments and their pods; for a pod that failed, the end of its log."""
        items = self._objects()
        pods = [item for item in items if item.kind == "Pod" and item.metadata.deleted is None]
        newest = {pod.machine: pod for pod in sorted(pods, key=lambda pod: pod.metadata.created)}
        deployments = {item.machine: item for item in items if item.kind == "Deployment"}
        return {name: _row(name, deployments[name], newest.get(name)) for name in names if name in deployments}

    def drain(self, names: Sequence[str], drain_s: float) -> Iterable[Check]:
        """Scale to zero, which signals the workers, and wait."""
        deployed = list(self.states(names))
        if deployed:
            self._called("scale", "--replicas=0", *(f"deployment/embq-{name}" for name in deployed))
        return late("pod", lambda: self._pods(deployed), drain_s + GRACE_S, FORCE)

    def remove(self, names: Sequence[str]) -> Iterable[Check]:
        """Delete all objects of machines."""
        if not names:
            return ()
        chosen = ("--selector", f"embq-fleet={self.fleet},embq-machine in ({','.join(names)})")
        self._called("delete", "deployments,secrets", *chosen)
        self._called("delete", "pods", *chosen, f"--grace-period={KILL_S}", "--wait=false")
        return late("pod", lambda: self._pods(names), END_S, FORCE)

    def _objects(self) -> Sequence[_Object]:
        listed = self._called("get", "deployments,pods", "--selector", f"embq-fleet={self.fleet}", "--output", "json")
        return wire.read(_Objects, listed, what="the answer of Kubernetes", most_bytes=ENGINE_BYTES).items

    def _pods(self, names: Sequence[str]) -> dict[str, str]:
        """Machine -> its pod, of those that have one."""
        pods = {item.machine: item.metadata.name for item in self._objects() if item.kind == "Pod"}
        return {name: pod for name, pod in pods.items() if name in names}

    def _called(self, *arguments: str, stdin: str = "") -> str:
        command = [*self.kubectl, *arguments]
        return called(command, needs=NEEDS, see="see `kubectl get events`, and --kubectl", stdin=stdin)

    def _deployment(self, member: FleetMember) -> Manifest:
        labels = self._metadata(member)["labels"]
        pod = {"metadata": {"labels": labels}, "spec": self._pod(member)}
        spec = {"replicas": 1, "strategy": {"type": "Recreate"}, "selector": {"matchLabels": labels}, "template": pod}
        deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": self._metadata(member), "spec": spec}
        if self.patch is None:
            return deployment
        options = ("--local", "--type=strategic", "--patch-file", str(self.patch), "--output", "json", "-f", "-")
        patched: Manifest = json.loads(self._called("patch", *options, stdin=json.dumps(deployment)))
        return patched

    def _metadata(self, member: FleetMember) -> Manifest:
        labels = {"app.kubernetes.io/name": "embq", "embq-fleet": self.fleet, "embq-machine": member.name}
        return {"name": f"embq-{member.name}", "labels": labels}

    def _pod(self, member: FleetMember) -> Manifest:
        secret = {"secret": {"secretName": f"embq-{member.name}", "defaultMode": 0o440}}
        volumes: dict[str, tuple[str, Manifest]] = {
            "tmp": ("/tmp", {"emptyDir": {}}),
            "models": ("/models", {"emptyDir": {}}),
            "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}),
            "order": ("/run/embq", secret),
        }
        run = shlex.join(python("-m", "embq.fleet.member", "run", executable=self.python))
        container = {
            "name": "worker",
            "image": self.image,
            "command": ["sh", "-c", f"exec {run} < /run/embq/order"],
            "resources": {"limits": {"nvidia.com/gpu": self.gpus}} if self.gpus else {},
            "securityContext": CONFINED,
            "terminationMessagePolicy": "FallbackToLogsOnError",  # a check that fails stands in the pod's state
            "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
        }
        return {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # variables of services would look like settings of embq
            "shareProcessNamespace": True,
            "securityContext": NO_ROOT,
            "terminationGracePeriodSeconds": round(member.drain_s + GRACE_S),
            "containers": [container],
            "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
        }


def _row(name: str, deployment: _Object, pod: _Object | None) -> Check:
    """The row of a machine, by its Deployment and its newest pod."""
    if not deployment.spec.replicas:
        return Check(name, "fail", "drained", "embq fleet up starts it again")
    if pod is None:
        return Check(name, "warn", _blocked(deployment) or "it has no pod yet", "kubectl get events")
    for container in pod.status.containers:
        waiting, ended = container.state.waiting, container.state.terminated
        if ended or (waiting is not None and waiting.reason in _MISSING):
            why = ended or container.last.terminated or waiting
            assert why is not None
            message = why.message or why.reason
            if (answer := answer_in(message)) and answer.failed:
                return rows_of(name, answer)[0]
            after = " ".join(message.rpartition(MARK)[2].partition("}\n")[2].split() if answer else message.split())
            return Check(name, "fail", after[-500:], f"kubectl logs {shlex.quote(pod.metadata.name)}")
    if pod.status.phase == "Running":
        return Check(name, "ok", f"running on {pod.spec.node}")
    return Check(name, "warn", _blocked(pod) or (pod.status.phase or "Pending").lower(), "kubectl get events")


def _blocked(item: _Object) -> str:
    """What the conditions of an object say of its delay."""
    kinds = (("PodScheduled", "False"), ("ReplicaFailure", "True"))
    delays = [condition for condition in item.status.conditions if (condition.type, condition.status) in kinds]
    return " ".join(condition.message for condition in delays)[:500]
