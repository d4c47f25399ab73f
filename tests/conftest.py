"""Fixtures of every test: a private broker, a run to work on, and a loud end for threads that fail."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
# Tests start hundreds of processes: where none may keep what it has compiled, each compiles all of embq again, which is
# a quarter of the processor time of a small run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Threads of torch and faiss spin while they wait for each other. Where more processes compute than there are cores,
# that takes four fifths of the processor time of a small model.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import atexit
import gc
import logging
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" not in os.environ:
    # Runs keep measured speeds there. Short, because sockets are below it.
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="embq-s")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

import embq.core.broker.embedded
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.queue.keys import RUNS, run_key
from embq.core.run.run_info import RunInfo
from embq.core.settings import cache_folder
from embq.core.storage.paths import Place

pytest.register_assert_rewrite("tests.support.outputs.run_case")
# A busy machine makes no test fail.
settings.register_profile("embq", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("embq")
# Half of the processor time of a collection is the compilation of the tests, in each process that runs them.
sys.dont_write_bytecode = False

from tests.support.durations import Limiter, Recorder, listed  # noqa: E402
from tests.support.fakes.clock import FakeClock  # noqa: E402
from tests.support.outputs.run_case import MakeRun, RunCase, make_case, unit_of, write_run  # noqa: E402
from tests.support.servers.storage import Server, gcs_server, s3_server  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the fault tests, and of those that need a container engine."""
    group = parser.getgroup("faults")
    group.addoption("--slow", action="store_true", help="also the tests that are marked slow")
    group.addoption("--all-faults", action="store_true", help="also the fault tests that take long")
    group.addoption("--faults-within", type=float, metavar="S", help="each fault once, then others for S s")
    group.addoption("--fault-table", metavar="FILE", help="write the table of faults as JSON")
    parser.addoption("--release", action="store_true", help="also the tests that build and install the package")
    parser.addoption("--compose", action="store_true", help="also the tests that start the stack on a container engine")
    parser.addoption("--quick", action="store_true", help="without the tests that tests/slower.txt lists")
    parser.addoption("--known-skips", action="store_true", help="fail for a skip that tests/known_skips.txt lacks")
    parser.addoption("--record-durations", metavar="FOLDER", help="write the processor time of each test there")


def pytest_configure(config: pytest.Config) -> None:
    """Record or limit the processor time of tests where that is wanted."""
    runs_tests = "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None)
    if runs_tests and (folder := config.getoption("--record-durations")):
        config.pluginmanager.register(Recorder(Path(folder)))
    elif config.getoption("--quick"):
        config.pluginmanager.register(Limiter())


LEFT_OUT = pytest.StashKey[Counter[str]]()

ON_BOTH_SERVERS = {
    *("test_broker", "test_control", "test_end_of_run", "test_feeder", "test_hints", "test_ledger", "test_publish")
}
"""Files about what a server does: its commands and our scripts. Tests of other files run on Redis with `--slow`."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what is marked slow to `--slow`, and what is listed as slower to runs without `--quick`."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        _mix(items)
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("server") == "redis" and item.path.stem not in ON_BOTH_SERVERS:
            item.add_marker("slow")
    if config.getoption("--quick"):
        names = listed()
        slower = [item for item in items if not names.isdisjoint({item.nodeid, item.nodeid.partition("[")[0]})]
        config.stash.setdefault(LEFT_OUT, Counter())["of over a quarter of a second each: make test-all"] += len(slower)
        left = {id(item) for item in slower}
        items[:] = [item for item in items if id(item) not in left]
    if config.getoption("--slow"):
        return

    def is_left(item: pytest.Item) -> bool:
        whole_matrix = item.get_closest_marker("fault") and config.getoption("--all-faults")
        return bool(item.get_closest_marker("slow")) and not whole_matrix

    left = [item for item in items if is_left(item)]
    items[:] = [item for item in items if not is_left(item)]
    if left:
        config.hook.pytest_deselected(items=left)


def _mix(items: list[pytest.Item]) -> None:
    """Order files so that some processes compute while others wait.

    End-to-end tests wait for services two thirds of their time. Side by side they leave the cores idle, and the files
    that compute, side by side, take them from each other: one of the former follows two of the latter.
    """
    waiting, computing = [], []
    for path in sorted({item.path for item in items}):
        (waiting if {"e2e", "faults"} & {*path.parts} else computing).append(path)
    place = {path: 2 * number for number, path in enumerate(waiting)}
    place |= {path: number for number, path in enumerate(computing)}
    items.sort(key=lambda item: (place[item.path], item.path))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what an option would run."""
    if not items:
        return
    left = items[0].config.stash.setdefault(LEFT_OUT, Counter())
    for item in items:
        if item.get_closest_marker("slow"):
            left["marked slow: --slow"] += 1
        elif item.get_closest_marker("fault"):
            left["in the whole fault matrix only: --all-faults"] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand what was left out here to the process that prints the summary; fail there for skips that are not known."""
    if _unknown_skips(session.config.pluginmanager.get_plugin("terminalreporter")):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left_out"] = dict(session.config.stash.get(LEFT_OUT, Counter()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take it from one of the processes that run the tests: all have collected the same."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what did not run and why, a line for each reason."""
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    reasons += config.stash.get(LEFT_OUT, Counter())
    if reasons:
        terminalreporter.section("not run")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:6,} {reason}")
    for reason in _unknown_skips(terminalreporter):
        terminalreporter.write_line(f"tests/known_skips.txt lacks: {reason}", red=True)


KNOWN_SKIPS = Path(__file__).parent / "known_skips.txt"
"""Reasons for which the tests of a release may be skipped, as patterns; # begins a comment."""


def _unknown_skips(terminalreporter: Any) -> list[str]:
    if terminalreporter is None or not terminalreporter.config.getoption("--known-skips"):
        return []
    known = [line for line in KNOWN_SKIPS.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    reasons = {_reason(report) for report in terminalreporter.stats.get("skipped", [])}
    return sorted(reason for reason in reasons if not any(fnmatchcase(reason, pattern) for pattern in known))


def _reason(report: Any) -> str:
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return why.removeprefix("Skipped: ").partition("\n")[0]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collection, which takes a third of the processor time to free 2 % of the memory.

    Imported modules and items are all that a collection makes, and they stay.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep what the collection made out of every later garbage collection.

    Thousands of items and the modules behind them are millions of objects, and each full collection passes over all of
    them: half of the processor time of small tests. They thaw at the very end, for extension modules report what they
    do not find then as leaked, and not before pytest has collected several times.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)
    # One thread for each of several processes that run tests; those that they start share the cores out themselves.
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


# --- devices ---


@pytest.fixture
def bf16_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any CPU may be asked for bf16: torch computes in it everywhere, slowly without instructions for it."""
    monkeypatch.setattr("embq.worker.embedders.device.placement.cpu_flags", lambda: frozenset({"avx512_bf16"}))


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What a worker logs."""
    with caplog.at_level(logging.INFO, logger="worker"):
        yield caplog


# --- brokers ---


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder whose path is short enough for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="embq-t") as folder:
        yield Path(folder)


@pytest.fixture(
    scope="session",
    params=[
        "valkey",
        pytest.param(
            "redis",
            marks=pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not on PATH"),
        ),
    ],
)
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """A server of the session. It is shared: leave its settings alone, and never flush it."""
    with tempfile.TemporaryDirectory(prefix="embq-t") as folder, ExitStack() as stack:
        # Only while it starts: servers that tests start for themselves are not to be others because of it.
        with pytest.MonkeyPatch.context() as patch:
            if request.param == "redis":
                patch.setattr(
                    embq.core.broker.embedded, "server_binary", lambda: Path(shutil.which("redis-server") or "")
                )
            server = stack.enter_context(EmbeddedServer(Path(folder) / "b"))
        yield server


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedServer]:
    """A server for a file of tests, to which runs can be handed that nobody works on."""
    with tempfile.TemporaryDirectory(prefix="embq-t") as folder, EmbeddedServer(Path(folder) / "b") as server:
        yield server


@pytest.fixture
def own_server(short_tmp: Path) -> Iterator[EmbeddedServer]:
    """A server of this test alone, to flush, configure or kill."""
    with EmbeddedServer(short_tmp / "b") as server:
        yield server


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    """A client of the session's server."""
    with connect(server.url) as client:
        yield client


@pytest.fixture
def own_client(own_server: EmbeddedServer) -> Iterator[redis.Redis]:
    """A client of this test's own server."""
    with connect(own_server.url) as client:
        yield client


# --- threads ---


@pytest.fixture(autouse=True)
def _no_log_to_the_stderr_of_an_earlier_test() -> Iterator[None]:
    """Take away the handlers of verbs that ran in this process: their stream is closed after the test."""
    before = logging.root.handlers[:]
    yield
    for handler in logging.root.handlers[:]:
        if handler not in before and type(handler) is logging.StreamHandler:
            logging.root.removeHandler(handler)


@pytest.fixture(autouse=True)
def _no_thread_dies_unseen() -> Iterator[None]:
    """Fail the test in which a thread ended by an exception."""
    died: list[threading.ExceptHookArgs] = []
    before, threading.excepthook = threading.excepthook, died.append
    yield
    threading.excepthook = before
    for args in died:
        name = args.thread.name if args.thread else "a thread"
        raise AssertionError(f"{name} ended by {args.exc_type.__name__}: {args.exc_value}") from args.exc_value


# --- files ---


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of cached indexes, in that of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder() / "indexes"


# --- time ---


@pytest.fixture
def clock() -> FakeClock:
    """A clock that stands still."""
    return FakeClock()


# --- a run and those who work on it ---


@pytest.fixture
def make_run(client: redis.Redis, tmp_path: Path) -> Iterator[MakeRun]:
    """Makes runs on the session's server, and removes what they left there."""
    made: list[RunCase] = []

    def make(units: int = 8, root: Place | None = None, **options: object) -> RunCase:
        case = make_case(client, root or tmp_path / f"out{len(made)}", units, **options)  # type: ignore[arg-type]
        made.append(case)
        return case

    yield make
    for case in made:
        case.queue.delete(delete_jobs=True)
        other = [run_key(case.info.run, part) for part in ("writer", "asked")]
        client.delete(*case.ledger.keys, *other, case.queue.intermediate_queue.key)
        client.hdel(RUNS, case.info.run)


@pytest.fixture
def run(make_run: MakeRun) -> RunCase:
    """A run of 8 units of 3 samples."""
    return make_run()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The endpoint of an S3 server with the bucket `bucket`, which this and other processes find in the environment."""
    import boto3

    with s3_server() as variables:
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield variables["AWS_ENDPOINT_URL"]


@pytest.fixture(scope="module")
def gcs() -> Iterator[Server]:
    """An emulator of Google Cloud Storage with the bucket `bucket`, which its clients find in the environment."""
    with gcs_server() as server:
        yield server


@pytest.fixture
def plain_run(tmp_path: Path) -> RunInfo:
    """A run of 8 units in the folder `out`, known to no broker."""
    return write_run(tmp_path / "out", [unit_of(number) for number in range(8)])
