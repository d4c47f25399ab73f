"""The Helm chart: what it makes is what Kubernetes, embq and the compose stack take."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import embq
from embq.app.cli.entry_point import cli
from embq.core.process.children import die_with_parent
from embq.core.service.metrics import METRICS
from tests.e2e.session import called
from tests.kubernetes.tools import CHART, ROOT, VERSIONS, Manifest, check_schema, containers, helm, needs_helm, rendered
from tests.support.servers.tls import free_ports, needs_tls_server
from tests.support.waiting import wait_until

pytestmark = needs_helm

TWO_CLASSES: dict[str, Any] = {
    "image": {"registry": "registry.example.org/team/", "tag": "1.2.3", "pullSecrets": [{"name": "pull"}]},
    "secrets": {"storage": "buckets"},
    "storage": {"data": {"existingClaim": "inputs"}, "staging": {"existingClaim": "staging"}},
    "keda": {"enabled": True},
    "env": {"HF_HUB_OFFLINE": "1"},
    "workers": [
        {"name": "h100", "gpus": 8, "nodeSelector": {"gpu": "h100"}, "scaling": {"max": 4}},
        {
            "name": "cpu",
            "image": "embq-worker-cpu",
            "devices": "cpu",
            "gpus": 0,
            "drainSeconds": 10,
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "scaling": {"seconds": 60},
        },
    ],
}
ELSEWHERE = {
    "broker": {"external": "rediss://10.0.0.5:6380", "ca": ""},
    "storage": {"out": {"enabled": False}},
    "outputs": ["s3://bucket/out"],
    "ui": {"enabled": False},
    "networkPolicy": {"brokerFrom": [{"podSelector": {}}]},
}
PLAIN = {
    "broker": {"tls": False, "storageClass": "fast", "tolerations": [{"operator": "Exists"}]},
    "secrets": {"create": {"embq-worker": {"password": "x"}}},
    "networkPolicy": {"enabled": False},
}
VALUES = {"defaults": {}, "two-classes": TWO_CLASSES, "elsewhere": ELSEWHERE, "plain": PLAIN}
every_value = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)


def of_kind(manifests: list[Manifest], *kinds: str) -> dict[str, Manifest]:
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] in kinds}


def workloads(values: object) -> dict[str, Manifest]:
    return of_kind(rendered(values), "Deployment", "StatefulSet")


def environment(manifest: Manifest) -> dict[str, str]:
    return {one["name"]: one["value"] for one in containers(manifest)[0].get("env", [])}


@every_value
def test_helm_finds_no_fault(values: object) -> None:
    done = helm("lint", "--strict", CHART, values=values)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
@every_value
def test_kubernetes_takes_the_manifests(values: object, version: str) -> None:
    manifests = rendered(values, version=version)
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    assert len(set(names)) == len(names)
    check_schema(manifests, version)


@pytest.mark.parametrize(
    "values",
    [
        {"worker": []},
        {"user": 0},
        {"broker": {"external": "rediss://worker:secret@10.0.0.5:6380"}},
        {"env": {"MILVUS_TOKEN": "x"}},
        {"workers": [{"name": "a", "gpu": 1}]},
    ],
    ids=lambda values: next(iter(values)),
)
def test_values_that_mean_nothing_or_would_show_a_secret_are_refused(values: object) -> None:
    done = helm("template", CHART, "--kube-version", "1.32.0", values=values)
    assert done.returncode != 0
    assert "schema" in done.stderr


@every_value
def test_pods_are_not_root_and_write_where_their_work_is(values: object) -> None:
    found = workloads(values)
    assert found
    for name, manifest in found.items():
        pod = manifest["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 1000
        assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
        for container in containers(manifest):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in container["resources"]["limits"]
            mounts = {one["mountPath"] for one in container["volumeMounts"] if not one.get("readOnly")}
            assert mounts <= {"/tmp", "/state", "/out", "/staging", "/models", "/broker", "/dev/shm"}, name
            assert "/out" not in mounts or name in ("embq-producer", "embq-writer")


@every_value
def test_a_password_is_a_file_of_a_secret_that_the_chart_makes_only_when_asked(values: dict[str, Any]) -> None:
    made = of_kind(rendered(values), "Secret")
    assert made.keys() == values.get("secrets", {}).get("create", {}).keys()
    users = {"producer": "writer", "writer": "writer", "worker": "worker", "ui": "monitor"}
    for name, manifest in workloads(values).items():
        if name == "embq-broker":
            continue
        user, told = users[name.split("-")[1]], environment(manifest)
        assert told["EMBQ_BROKER_URL"].split("://")[1].startswith(f"{user}@")
        assert told["EMBQ_BROKER_PASSWORD_FILE"] == "/run/secrets/embq/password"
        volumes = {one["name"]: one for one in manifest["spec"]["template"]["spec"]["volumes"]}
        assert volumes["broker-user"]["secret"]["secretName"] == f"embq-{user}"


@every_value
def test_embq_knows_the_commands_and_the_variables(values: object) -> None:
    settings = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    for name, manifest in workloads(values).items():
        if name == "embq-broker":
            continue
        verb, *options = containers(manifest)[0]["args"]
        command = cli.get_command(click.Context(cli), verb)
        assert command is not None, verb
        parsed = command.make_context(verb, list(options)).params
        grace = manifest["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace >= parsed.get("drain_timeout", 0) + 20, "a worker that drains is not killed"
        assert {key for key in environment(manifest) if "EMBQ" in key and f"| `{key}` |" not in settings} == set()


def test_classes_of_gpus_scale_apart_from_zero_by_the_seconds_of_work_that_are_left() -> None:
    manifests = rendered(TWO_CLASSES)
    scaled, deployments = of_kind(manifests, "ScaledObject"), of_kind(manifests, "Deployment")
    classes = {"embq-worker-h100", "embq-worker-cpu"}
    assert scaled.keys() == of_kind(manifests, "PodDisruptionBudget").keys() == classes
    ports = of_kind(manifests, "Service")["embq-producer"]["spec"]["ports"]
    for name, one in scaled.items():
        assert one["spec"]["scaleTargetRef"]["name"] == name
        assert one["spec"]["minReplicaCount"] == 0
        assert "replicas" not in deployments[name]["spec"], "an upgrade would undo what KEDA has done"
        (trigger,) = one["spec"]["triggers"]
        assert all(isinstance(value, str) for value in trigger["metadata"].values())
        assert trigger["metadata"]["url"] == f"http://embq-producer.ml.svc:{ports[0]['port']}/metrics"
        told = {metric.name: metric.labels for metric in METRICS["producer"]}
        assert told[trigger["metadata"]["valueLocation"]] == (), "KEDA takes one sample"
    spec = scaled["embq-worker-h100"]["spec"]
    assert (spec["maxReplicaCount"], spec["triggers"][0]["metadata"]["targetValue"]) == (4, "4800")
    spec = scaled["embq-worker-cpu"]["spec"]
    assert (spec["maxReplicaCount"], spec["triggers"][0]["metadata"]["targetValue"]) == (8, "60")
    limits = {name: containers(deployments[name])[0]["resources"]["limits"] for name in classes}
    assert limits["embq-worker-h100"]["nvidia.com/gpu"] == 8
    assert "nvidia.com/gpu" not in limits["embq-worker-cpu"]
    assert deployments["embq-worker-cpu"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 40
    assert containers(deployments["embq-worker-cpu"])[0]["image"] == "registry.example.org/team/embq-worker-cpu:1.2.3"


def test_nobody_reaches_the_broker_but_the_release_and_it_calls_nobody() -> None:
    policies = of_kind(rendered({}), "NetworkPolicy")
    broker = policies["embq-broker"]["spec"]
    (rule,) = broker["ingress"]
    assert rule["ports"] == [{"port": 6380}]
    assert [list(peer) for peer in rule["from"]] == [["podSelector"]]
    assert (broker["policyTypes"], broker.get("egress")) == (["Ingress", "Egress"], None)
    assert policies["embq"]["spec"]["podSelector"]["matchLabels"].keys() == {
        "app.kubernetes.io/name",
        "app.kubernetes.io/instance",
    }, "all pods of the release"


def test_the_images_are_those_of_the_compose_stack_and_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == embq.__version__
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    for name, manifest in workloads({}).items():
        image, _, tag = containers(manifest)[0]["image"].partition(":")
        assert f"{image}:" in compose, name
        assert tag == (embq.__version__ if image.startswith("embq-") else "9")


@needs_tls_server
def test_the_broker_of_the_chart_lets_its_services_in_by_tls_alone(tmp_path: Path) -> None:
    """Debian's redis-server for valkey-server, with the paths of the pod below a folder of the test."""
    manifests = rendered({})
    pod = of_kind(manifests, "StatefulSet")["embq-broker"]
    (container,) = containers(pod)
    secrets, port = tmp_path / "secrets", str(free_ports(1)[0])
    status, _, said = called("broker", "init", secrets, "--server-name", "embq-broker")
    assert status == 0, said
    sources = {"broker": secrets / "broker", "monitor": secrets / "monitor"}
    for volume in pod["spec"]["template"]["spec"]["volumes"]:
        for item in volume.get("secret", {}).get("items", []):
            (source,) = sources["broker"].rglob(item["key"])
            target = tmp_path / "users" / item["path"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    for folder in ("broker", "etc"):
        (tmp_path / folder).mkdir()

    def here(text: str) -> str:
        for there, folder in (
            ("/run/secrets/embq", f"{tmp_path}/users"),
            ("/run/secrets/monitor", str(sources["monitor"])),
            ("/etc/embq", f"{tmp_path}/etc"),
            ("dir /broker", f"dir {tmp_path}/broker"),
            ("valkey-", "redis-"),
            ("6380", port),
        ):
            text = text.replace(there, folder)
        return text

    configuration = of_kind(manifests, "ConfigMap")["embq-broker"]["data"]["valkey.conf"]
    (tmp_path / "etc" / "valkey.conf").write_text(here(configuration).replace("bind * -::*", "bind 127.0.0.1"))
    command = [here(word).replace("redis.conf", "valkey.conf") for word in container["command"]]
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent)
    try:
        probe = [here(word) for word in container["readinessProbe"]["exec"]["command"]]
        wait_until(lambda: subprocess.run(probe, capture_output=True, check=False).returncode == 0, 20)
        told = environment(of_kind(manifests, "Deployment")["embq-producer"])
        user = {
            "EMBQ_BROKER_URL": here(told["EMBQ_BROKER_URL"]).replace("embq-broker", "localhost"),
            "EMBQ_BROKER_PASSWORD_FILE": f"{secrets}/writer/password",
            "EMBQ_BROKER_CA": f"{secrets}/writer/ca.crt",
        }
        status, text, said = called("status", "--json", environment=user)
        assert status == 0, said
        assert json.loads(text)
        plain = user | {"EMBQ_BROKER_URL": user["EMBQ_BROKER_URL"].replace("rediss", "redis")}
        assert called("status", environment=plain)[0] != 0
    finally:
        server.kill()
        server.wait()
