"""The command line itself: help, what it imports, what goes to stdout, and how it takes a closed pipe."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
import redis
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.requirements import requirements
from embq.app.cli.verb_table import VERBS
from embq.core.broker.embedded import EmbeddedServer
from tests.e2e.session import Command, await_in, called, closed, started, write_texts
from tests.e2e.session import process_ended as ended
from tests.support.outputs.build import build
from tests.support.outputs.run_case import make_case

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def finished() -> Iterator[Path]:
    """The output folder of a finished run."""
    with tempfile.TemporaryDirectory(prefix="embq-t") as folder:
        write_texts(Path(folder) / "texts.jsonl", 20)
        yield build(Path(folder) / "out", [Path(folder) / "texts.jsonl"])


def succeed(*arguments: str | Path, **options: Any) -> str:
    """Run a command, as a process, that must exit with 0; gives its stdout."""
    status, stdout, stderr = ended(*arguments, **options)
    assert status == 0, stderr
    return stdout


LISTING = """
import atexit, os, sys
atexit.register(lambda: open(os.path.join(os.environ["LISTED"], str(os.getpid())), "w").write(" ".join(sys.modules)))
"""


@pytest.mark.slow
def test_no_process_of_a_run_imports_pandas_for_its_tables(tmp_path: Path) -> None:
    if importlib.util.find_spec("pandas") is None:
        pytest.skip("pandas is not installed")
    (tmp_path / "sitecustomize.py").write_text(LISTING)
    write_texts(tmp_path / "texts.jsonl", 20)
    listed = tmp_path / "listed"
    listed.mkdir()

    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"LISTED": str(listed), "PYTHONPATH": path}
    succeed("run", tmp_path / "texts.jsonl", "-o", tmp_path / "out", "-m", "stub:8", "--quiet", environment=environment)

    modules = [set(one.read_text().split()) for one in listed.iterdir()]
    assert sum("pyarrow" in those for those in modules) >= 4, "command, producer, writer and worker process"
    assert not any("pandas" in those for those in modules)


LACKING = """
import sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Lacking())
NAMES = """


def distributions(requirements: list[str]) -> set[str]:
    """The distributions that these bring, by normal name; what is not installed here is left out."""
    found: set[str] = set()
    left = [(Requirement(line), "") for line in requirements]
    while left:
        one, extra = left.pop()
        name = canonicalize_name(one.name)
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            continue
        with suppress(PackageNotFoundError):
            if name not in found:
                left += [(Requirement(line), extra) for line in requires(name) or () for extra in ("", *one.extras)]
            found.add(name)
    return found


@pytest.fixture
def with_the_packages_of(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """By the extras of an image: an environment in which nothing else can be imported."""
    modules = packages_distributions()

    def of(extras: str) -> dict[str, str]:
        installed = {"embq", *distributions(requirements(ROOT / "pyproject.toml", extras.split()))}
        lacking = {name for name, by in modules.items() if not installed & set(map(canonicalize_name, by))}
        folder = tmp_path / f"with {extras}"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(f"{LACKING}{lacking!r}")
        return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}

    return of


def test_each_role_does_its_work_with_what_its_image_holds(
    tmp_path: Path, broker: EmbeddedServer, with_the_packages_of: Callable[[str], dict[str, str]]
) -> None:
    url = {"EMBQ_BROKER_URL": broker.url}
    extras = re.findall(r"requirements\.py (.+) > requirements", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    of_producer, of_writer, of_worker = (line.replace('"$FAISS" ${EXTRAS}', "index") for line in extras)
    laptop, producer, writer, worker = (
        url | with_the_packages_of(one) for one in ("", of_producer, f"{of_producer} {of_writer}", of_worker)
    )
    write_texts(tmp_path / "texts.jsonl", 20)
    output = ["-o", str(tmp_path / "out")]
    assert ended("enqueue", tmp_path / "texts.jsonl", *output, "-m", "stub:8", environment=laptop)[0] == 0
    with (
        started("producer", environment=producer) as feeding,
        started("writer", environment=writer),
        started("worker", "--devices", "cpu", environment=worker),
    ):
        await_in(feeding, lambda: closed(tmp_path / "out"))
    assert ended("status", tmp_path / "out", environment=laptop)[0] == 0


def test_help_lists_every_verb_with_one_line() -> None:
    for help_ in (succeed("--help"), called("-h")[1]):
        for verb, (_, line) in VERBS.items():
            assert verb in help_
            assert line in help_


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    status, help_, said = called(verb, "--help")
    assert (status, said) == (0, "")
    assert help_.startswith(f"Usage: embq {verb} ")
    assert f"embq {verb}" in help_.partition("Example")[2], "there is no example"
    assert "--help" in help_


def test_stdout_holds_data_and_nothing_else(short_tmp: Path, finished: Path, broker: EmbeddedServer) -> None:
    (status,) = succeed("status", finished, "--json").splitlines()
    assert json.loads(status)["state"] == "done"
    (verified,) = succeed("verify", finished, "--json").splitlines()
    assert json.loads(verified)["ok"] is True
    assert json.loads(verified)["violations"] == []
    (failures,) = succeed("failures", finished, "--json").splitlines()
    assert json.loads(failures)["groups"] == []
    (again,) = succeed("resume", finished, "--json").splitlines()
    assert json.loads(again)["rows"] == 20
    environment = {"EMBQ_BROKER_URL": broker.url}
    write_texts(short_tmp / "texts.jsonl", 20)
    command = ["enqueue", short_tmp / "texts.jsonl", "-o", short_tmp / "out", "-m", "stub:8", "--json"]
    (enqueued,) = succeed(*command, environment=environment).splitlines()
    assert json.loads(enqueued)["units"] == 1
    (runs,) = succeed("status", "--json", environment=environment).splitlines()
    assert json.loads(enqueued)["run"] in {run["run"] for run in json.loads(runs)["runs"]}
    (short_tmp / "out" / "_logs").mkdir()
    (short_tmp / "out" / "_logs" / "writer.log").write_text("2026-01-01T00:00:00Z info writer started\n")
    logs = succeed("logs", json.loads(enqueued)["run"], environment=environment)
    assert logs == "2026-01-01T00:00:00Z info writer started\n"


def test_what_people_read_on_stdout_is_the_account(finished: Path) -> None:
    status, stdout, stderr = ended("resume", finished)
    assert status == 0
    assert stdout.startswith("in 20 = rows 20 + failures 0\n")
    assert str(finished / "parts") in stdout
    assert stderr == f"nothing is left to do: {finished} holds the finished run {_run(finished)}\n"


def _run(root: Path) -> str:
    return str(json.loads((root / "run.json").read_text())["run"])


def test_status_lists_the_runs_below_a_folder(finished: Path, tmp_path: Path) -> None:
    told = json.loads(succeed("status", finished.parent, "--json"))
    assert [(run["output"], run["state"]) for run in told["runs"]] == [(str(finished), "done")]
    assert told["runs"][0]["created"] == json.loads((finished / "run.json").read_text())["created"]
    assert told == json.loads(called("status", "--json", environment={}, cwd=finished.parent)[1])
    _, stdout, _ = called("status", environment={}, cwd=finished.parent)
    header, row = stdout.splitlines()
    assert header.split() == ["output", "run", "state", "done", "rows/s", "left", "failures", "age", "rows", "model"]
    assert re.match(rf"{finished.name} +{_run(finished)} +done +100.0% .* \d+ (s|min) +20 of 20  ", row)
    assert str(finished) in succeed("status", finished.parent)
    status, _, stderr = called("status", tmp_path)
    assert status == 65
    assert f"there is no run in or below {tmp_path}" in stderr
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    assert f"warning: {tmp_path}/damaged/run.json cannot be read" in succeed("status", tmp_path)


@pytest.mark.parametrize("arguments", [["--help"], ["status", "--json"], ["status"], ["failures"], ["verify"]])
def test_a_pipe_that_nobody_reads_ends_a_command_quietly(finished: Path, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    if arguments != ["--help"]:
        arguments = [*arguments, str(finished)]
    try:
        command = Command(*arguments, stdout=writer)
        try:
            assert command.wait() == 0, command.said
            assert command.stderr == ""
        finally:
            command.close()
    finally:
        os.close(writer)


def test_an_interrupted_command_says_so_and_nothing_else(short_tmp: Path, broker: EmbeddedServer) -> None:
    write_texts(short_tmp / "texts.jsonl", 20)
    environment = {"EMBQ_BROKER_URL": broker.url}
    command = ["enqueue", short_tmp / "texts.jsonl", "-o", short_tmp / "out", "-m", "stub:8"]
    succeed(*command, environment=environment)
    with started("status", short_tmp / "out", "--watch", "--json", environment=environment) as watching:
        await_in(watching, lambda: watching.stdout.count("\n") >= 2)
        watching.signal(signal.SIGINT)
        assert watching.wait() == 130
        assert watching.stderr.strip() == "interrupted"
        assert all(json.loads(line)["schema"] == 1 for line in watching.stdout.splitlines())


@pytest.mark.parametrize(
    ("failed", "state", "status"), [((), "", 0), ((0, 2), "", 3), ((0, 1, 2), "", 3), ((0,), "cancelled", 130)]
)
def test_who_waits_for_a_run_gets_the_status_of_its_end(
    own_server: EmbeddedServer,
    own_client: redis.Redis,
    short_tmp: Path,
    failed: tuple[int, ...],
    state: str,
    status: int,
) -> None:
    case = make_case(own_client, short_tmp / "out", 2)
    writer = case.writer()
    for u in range(1 if state else 2):
        case.work_one(u, failed if u == 0 else ())
    if state:
        case.ledger.request({"state": state})
    writer.drain()
    environment = {"EMBQ_BROKER_URL": own_server.url}
    assert called("status", case.layout.root, "--watch", "--json", environment=environment)[0] == status
    assert called("status", case.layout.root, environment=environment)[0] == 0
