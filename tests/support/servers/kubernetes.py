"""A stand-in for a Kubernetes cluster, for the real kubectl: no API server is to be had here.

It keeps Deployments and Secrets as they are applied, and runs the pod of each as a process of this machine, with its
command and its secret file. It admits and schedules everything, and knows nothing of volumes, images and networks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from embq.core.process.children import die_with_parent

Manifest = dict[str, Any]
RESOURCES = {
    "/api/v1": [("secrets", "Secret"), ("pods", "Pod")],
    "/apis/apps/v1": [("deployments", "Deployment"), ("deployments/scale", "Scale")],
}
KINDS = {"secrets": ("v1", "SecretList"), "pods": ("v1", "PodList"), "deployments": ("apps/v1", "DeploymentList")}
MESSAGE_BYTES = 2048
"""Of a log in the state of a container, as with FallbackToLogsOnError."""
_PATH = re.compile(r"/(?:api/v1|apis/apps/v1)/namespaces/[^/]+/(\w+)(?:/([^/]+))?(/scale)?")


class Pod:
    """The process of a pod; it is not started again.

    Attributes:
        deployment: name of its Deployment.
        stopped: whether it was told to end.
        over: set when it has ended.
    """

    def __init__(self, deployment: Manifest, secret: Manifest, folder: Path, environment: Mapping[str, str]) -> None:
        self.deployment = str(deployment["metadata"]["name"])
        self.stopped = False
        self.over = threading.Event()
        self.process: subprocess.Popen[bytes] | None = None
        self._deployment = deployment
        self._folder = folder
        self._environment = environment
        self._status: Manifest = {"phase": "Pending"}
        folder.mkdir()
        for name, text in secret["stringData"].items():
            (folder / name).write_text(text)
        threading.Thread(target=self._run, daemon=True).start()

    def manifest(self) -> Manifest:
        """The pod as an API server shows it."""
        metadata = {
            "name": f"{self.deployment}-{self._folder.name}",
            "labels": self._deployment["metadata"]["labels"],
            "creationTimestamp": f"2026-01-01T00:00:{self._folder.name:0>2}Z",
            **({"deletionTimestamp": "2026-01-01T00:01:00Z"} if self.stopped else {}),
        }
        spec = {"nodeName": "node1", "containers": []}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": self._status}

    def stop(self) -> None:
        """SIGTERM, once."""
        self.stopped = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to what is left."""
        self.stopped = True
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _run(self) -> None:
        (container,) = self._deployment["spec"]["template"]["spec"]["containers"]
        command = [word.replace("/run/embq", str(self._folder)) for word in container["command"]]
        log = self._folder / "log"
        with open(log, "wb") as written:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **self._environment},
                stdout=written,
                stderr=written,
                preexec_fn=die_with_parent,
            )
        self._status = {"phase": "Running"}
        if self.stopped:
            self.stop()
        code = self.process.wait()
        ended = {"exitCode": code, "message": log.read_text()[-MESSAGE_BYTES:]}
        self._status["containerStatuses"] = [{"name": container["name"], "state": {"terminated": ended}}]
        self.over.set()


class Cluster:
    """Objects and pods of the cluster.

    Attributes:
        objects: resource -> name -> manifest, as it was applied.
        calls: method and path of each request that changes something.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.objects: dict[str, dict[str, Manifest]] = {"secrets": {}, "deployments": {}}
        self.pods: list[Pod] = []
        self.calls: list[str] = []
        self._folder = folder
        self._environment = environment

    def answer(self, method: str, url: str, body: bytes) -> Manifest | None:
        """The answer to a request; None for 404."""
        parts = urlsplit(url)
        if method == "GET" and (found := _discovery(parts.path)):
            return found
        path = _PATH.fullmatch(parts.path)
        if path is None:
            return None
        kind, name, scale = path.groups()
        if method != "GET":
            self.calls.append(f"{method} {kind} {name}")
        chosen = [
            one
            for one in self._all(kind)
            if _matches(parse_qs(parts.query).get("labelSelector", [""])[0], one["metadata"]["labels"])
        ]
        if name is None:
            version, listed = KINDS[kind]
            return {"apiVersion": version, "kind": listed, "metadata": {"resourceVersion": "1"}, "items": chosen}
        if method == "PATCH" and not scale:
            self.objects[kind][name] = yaml.safe_load(body)
        one = next((one for one in self._all(kind) if one["metadata"]["name"] == name), None)
        if one is None:
            return None
        if scale:
            if method != "GET":
                one["spec"]["replicas"] = json.loads(body)["spec"]["replicas"]
            version = {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {"name": name}}
            one = version | {"spec": {"replicas": one["spec"]["replicas"]}, "status": {"replicas": 0}}
        if method == "DELETE":
            self.objects.get(kind, {}).pop(name, None)
        self._reconcile()
        return one

    def _all(self, kind: str) -> list[Manifest]:
        if kind == "pods":
            self.pods = [pod for pod in self.pods if not (pod.stopped and pod.over.is_set())]
            return [pod.manifest() for pod in self.pods]
        return list(self.objects[kind].values())

    def _reconcile(self) -> None:
        """Start the pods that are missing, and end those that are too many."""
        wanted = {name: one for name, one in self.objects["deployments"].items() if one["spec"]["replicas"]}
        for pod in self.pods:
            if pod.deployment not in wanted and not pod.stopped:
                pod.stop()
        for name, one in wanted.items():
            if not any(pod.deployment == name and not pod.stopped for pod in self.pods):
                secret = self.objects["secrets"][name]
                folder = self._folder / str(len(list(self._folder.iterdir())))
                self.pods.append(Pod(one, secret, folder, self._environment))


@contextmanager
def cluster(folder: Path, environment: Mapping[str, str]) -> Iterator[tuple[Cluster, Path]]:
    """A cluster, and the file for KUBECONFIG, until the block ends.

    Args:
        folder: for files of its pods.
        environment: of their processes, beside what the manifests say.
    """
    there = Cluster(folder / "pods", environment)
    (folder / "pods").mkdir()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                found = there.answer(self.command, self.path, body)
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            data = json.dumps(found or missing | {"message": f"{self.path} not found"}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PATCH = do_PUT = do_POST = do_DELETE = _any

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    name = "stand-in"
    configuration = folder / "kubeconfig"
    configuration.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": name,
                "clusters": [{"name": name, "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "ml"}}],
                "users": [{"name": name, "user": {}}],
            }
        )
    )
    try:
        yield there, configuration
    finally:
        for pod in there.pods:
            pod.kill()
        server.shutdown()
        server.server_close()


def _discovery(path: str) -> Manifest | None:
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        version = {"groupVersion": "apps/v1", "version": "v1"}
        group = {"name": "apps", "versions": [version], "preferredVersion": version}
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
    if path == "/openapi/v3":
        return {"paths": {one.strip("/"): {"serverRelativeURL": f"/openapi/v3{one}"} for one in RESOURCES}}
    if (of := path.removeprefix("/openapi/v3")) != path:
        return {"openapi": "3.0.0", "paths": dict(_patches(of))}
    if path not in RESOURCES:
        return None
    verbs = ["get", "list", "watch", "patch", "delete", "update"]
    listed = [{"name": name, "kind": kind, "namespaced": True, "verbs": verbs} for name, kind in RESOURCES[path]]
    return {"kind": "APIResourceList", "groupVersion": path.split("/", 2)[2], "resources": listed}


def _patches(path: str) -> Iterator[tuple[str, Manifest]]:
    """What kubectl looks for before it has a server validate fields."""
    *_, group, version = path.removeprefix("/apis").replace("/api", "/").split("/")
    for name, kind in RESOURCES[path]:
        of = {"group": group, "version": version, "kind": kind}
        parameters = [{"name": "fieldValidation", "in": "query"}]
        operation = {"x-kubernetes-group-version-kind": of, "parameters": parameters}
        yield f"{path}/namespaces/{{namespace}}/{name}/{{name}}", {"patch": operation}


def _matches(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether labels are those of `a=b,c in (d,e)`."""
    wanted = re.findall(r"([\w-]+)(?:=([\w-]+)| in \(([^)]*)\))", selector)
    return all(labels.get(name) in (one, *several.split(",")) for name, one, several in wanted)
