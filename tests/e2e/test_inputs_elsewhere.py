"""Machines that share no storage: who lacks the input of a unit leaves it to those who may have it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from embq.core.broker.embedded import EmbeddedServer
from embq.core.run.layout import Layout
from embq.core.run.reader import row_tables
from tests.e2e.services import DIM, SAMPLES, Services
from tests.e2e.session import Command, closed, run_of, started

NAMESPACES = ("unshare", "--mount", "--uts", "sh", "-c")
FILES = 30
HERE = socket.gethostname()


def _may_have_namespaces() -> bool:
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, check=False) if shutil.which("unshare") else None
    return tried is not None and tried.returncode == 0


pytestmark = pytest.mark.skipif(not _may_have_namespaces(), reason="needs root and unshare, for a machine of its own")


@pytest.fixture
def inputs(short_tmp: Path) -> Path:
    folder = short_tmp / "in"
    folder.mkdir()
    for name in range(FILES):
        lines = (json.dumps({"id": f"{name}-{n}", "text": f"text {name} {n}"}) for n in range(SAMPLES))
        (folder / f"{name:02d}.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def far_worker(stack: ExitStack, services: Services, *, hidden: Path | None = None, **environment: str) -> Command:
    """A worker on a machine called far, for which the folder `hidden` is empty."""
    hide = f"mount -t tmpfs none {hidden} && " if hidden is not None else ""
    prefix = (*NAMESPACES, f'hostname far && {hide}exec "$0" "$@"')
    changes = {**services.environment, **environment}
    return stack.enter_context(started("worker", "--devices", "cpu", prefix=prefix, environment=changes))


def machines(services: Services) -> set[str]:
    told = json.loads(services.call("status", "--json"))
    return {one["host"] for one in told["services"] if one["role"] == "worker"}


def enqueue(services: Services, inputs: Path, root: Path) -> None:
    services.call("enqueue", inputs / "*.jsonl", "-o", root, "-m", f"stub:{DIM}?ms_per_sample=20")


def keys_of(root: Path) -> list[str]:
    return sorted(key for table in row_tables(Layout(root).root) for key in table["key"].to_pylist())


@pytest.mark.parametrize("lacks", ["file", pytest.param("root", marks=pytest.mark.slow)])
def test_units_are_left_to_the_machine_that_has_their_input(
    own_server: EmbeddedServer, short_tmp: Path, inputs: Path, lacks: str
) -> None:
    root = short_tmp / "out"
    with ExitStack() as stack:
        services = Services(stack, own_server, start=("writer", "producer"), workers=1)
        # The far one is there first, and idle: whoever fails at once would soon have all of it.
        if lacks == "file":
            far = far_worker(stack, services, hidden=inputs)
        else:
            far = far_worker(stack, services, EMBQ_ROOTS="/nowhere")
        services.start("worker")
        services.until(lambda: machines(services) == {"far", HERE})
        enqueue(services, inputs, root)
        services.until(lambda: " inputs_not_here " in far.stderr)
        told: set[str] = set()

        def is_told() -> bool:
            told.update(services.call("status", run_of(root)).splitlines())
            return any(line.startswith(f"warning: far has no {inputs}/") for line in told) or closed(root)

        services.until(is_told)
        services.until(lambda: closed(root))
        assert f"left_to={HERE}" in far.stderr
        assert any(line.startswith(f"warning: far has no {inputs}/") for line in told)
        assert json.loads(services.call("failures", root, "--json"))["groups"] == []
    assert keys_of(root) == sorted(f"{name}-{n}" for name in range(FILES) for n in range(SAMPLES))


def test_what_no_machine_has_becomes_a_failure_and_the_run_ends(
    own_server: EmbeddedServer, short_tmp: Path, inputs: Path
) -> None:
    root = short_tmp / "out"
    with ExitStack() as stack:
        services = Services(stack, own_server, start=("writer", "producer"), workers=1)
        enqueue(services, inputs, root)
        for path in sorted(inputs.iterdir())[3:]:
            path.unlink()
        far_worker(stack, services, hidden=inputs)
        services.start("worker")
        services.until(lambda: closed(root))
        (group,) = json.loads(services.call("failures", root, "--json"))["groups"]
    assert (group["code"], group["count"]) == ("source_missing", FILES - 3)
    assert keys_of(root) == sorted(f"{name}-{n}" for name in range(3) for n in range(SAMPLES))
