"""`pytest --compose` starts the stack on an engine; its account goes to compose.json, beside results of benchmarks."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.report import RESULTS
from tests.compose.engine import CPU, IMAGES, Stack, checkout, compose_command, docker, image_of

HERE = Path(__file__).parent
ACCOUNT = RESULTS / "compose.json"
LISTED = 8
"""So many of the largest packages of an image are named."""
SITE = "python -c 'import click, os; print(os.path.dirname(os.path.dirname(click.__file__)))'"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs an engine unless it was asked for; then it takes minutes, and an engine has to be there."""
    asked = config.getoption("--compose")
    if not asked:
        reason = "starts containers: make test-compose, or --compose"
    elif not compose_command():
        reason = (
            "no Docker engine with Compose answers here: start one, and see `docker info` and `docker compose version`"
        )
    else:
        reason = ""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(3600))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def account() -> Iterator[dict[str, Any]]:
    """Measurements of the tests; written and printed at the end."""
    found: dict[str, Any] = {}
    yield found
    text = json.dumps(found, indent=2)
    ACCOUNT.parent.mkdir(parents=True, exist_ok=True)
    ACCOUNT.write_text(f"{text}\n", encoding="utf-8")
    sys.stdout.write(f"\n{text}\n-> {ACCOUNT}\n")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, account: dict[str, Any]) -> Path:
    """A checkout whose images have been built; with the times and sizes in the account."""
    folder = checkout(tmp_path_factory.mktemp("built"))
    stack = Stack(folder)
    account["engine"] = docker("version", "--format", "{{.Server.Version}}")
    account["compose"] = stack.compose("version").splitlines()[0]
    account["build_with_what_the_engine_had_s"] = {role: _build_s(stack, role) for role in IMAGES}
    # What is built on top of the packages is the same for all.
    with (folder / "embq" / "__init__.py").open("a") as source:
        source.write("# changed\n")
    account["rebuild_after_a_change_of_the_sources_s"] = {role: _build_s(stack, role) for role in IMAGES}
    # The others are the same layers under other names.
    stack.compose("--profile", "tools", "build", timeout_s=3600)
    base = stack.environment.get("EMBQ_PYTHON_IMAGE", "python:3.11-slim-bookworm")
    account["image_mb"] = {"python": _mb(base), **{role: _mb(image_of(role)) for role in IMAGES}}
    account["on_top_of_python_mb"] = {
        role: round(account["image_mb"][role] - account["image_mb"]["python"], 1) for role in IMAGES
    }
    account["largest_packages_mb"] = {role: _largest(image_of(role)) for role in IMAGES}
    return folder


def _build_s(stack: Stack, role: str) -> float:
    began = time.monotonic()
    stack.compose("build", role, timeout_s=3600)
    return round(time.monotonic() - began, 1)


def _mb(image: str) -> float:
    return round(int(docker("image", "inspect", "--format", "{{.Size}}", image)) / 1e6, 1)


def _largest(image: str) -> dict[str, int]:
    """Folder of a package -> MiB, of the largest ones."""
    told = docker(
        "run", "--rm", "--entrypoint", "sh", image, "-c", f"cd $({SITE}) && du -sm * | sort -rn | head -{LISTED}"
    )
    return {name: int(size) for size, name in (line.split("\t") for line in told.splitlines())}


@pytest.fixture(scope="module")
def stack(built: Path, tmp_path_factory: pytest.TempPathFactory, account: dict[str, Any]) -> Iterator[Stack]:
    """The stack without GPUs, up and healthy; taken down with all that it made."""
    stack = Stack(checkout(tmp_path_factory.mktemp("box")), files=CPU)
    try:
        began = time.monotonic()
        stack.compose("up", "--detach", "--no-build")
        stack.wait_for_health("broker", "producer", "writer", "worker", "ui")
        account["up_and_healthy_s"] = round(time.monotonic() - began, 1)
        yield stack
    finally:
        stack.take_down()
