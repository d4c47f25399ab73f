"""helm, and manifests against the schemas of Kubernetes; skips where they are absent."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "embq"
VERSIONS = ("1.25", "1.32", "1.37")
"""Of Kubernetes: the oldest that the chart takes, and two later ones."""

Manifest = dict[str, Any]

needs_helm = pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not on PATH: make test-kubernetes")


def helm(*arguments: str | Path, values: object = None) -> subprocess.CompletedProcess[str]:
    """A call of helm, with values as its standard input."""
    text = "" if values is None else yaml.safe_dump(values)
    options = [] if values is None else ["--values", "-"]
    return subprocess.run(["helm", *arguments, *options], input=text, capture_output=True, text=True, check=False)


def rendered(values: object = None, *, release: str = "embq", version: str = "1.32") -> list[Manifest]:
    """The manifests of the chart."""
    done = helm("template", release, CHART, "--namespace", "ml", "--kube-version", f"{version}.0", values=values or {})
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def check_schema(manifests: Iterable[Manifest], version: str) -> None:
    """Fail where a manifest does not have the shape that an API server of this version takes."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make test-kubernetes installs it")
    for manifest in manifests:
        if not manifest["apiVersion"].startswith("keda.sh/"):
            kubernetes_validate.validate(manifest, version, strict=True)


def containers(manifest: Manifest) -> list[dict[str, Any]]:
    """The containers of a workload."""
    return list(manifest["spec"]["template"]["spec"]["containers"])
