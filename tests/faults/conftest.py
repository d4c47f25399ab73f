"""Fault tests: which of them run, what they are given, and the table at the end."""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import embq.core.broker.embedded
from tests.faults.kit.cluster import SABOTAGE, SEED, SERVER, Cluster, MakeCluster, server_program, server_version
from tests.faults.kit.indexes import STAGES, Building, MakeBuilding, write_collection
from tests.faults.kit.strace import Zygote, zygote_in
from tests.faults.kit.table import Note, Outcome, Recovery, Table

FOLDER = Path(__file__).parent
TABLE = Table()
REQUIRED = pytest.StashKey[bool]()
"""The test that is run of an id of a fault, however long it takes."""
RECOVERY = pytest.StashKey[Recovery]()
BEGAN = time.monotonic()
BUSY_SLACK = 6.0


@pytest.hookimpl(trylast=True)  # behind the order by files of several processes
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long ones to `--all-faults`; every test here says which fault it injects."""
    kept, left = [], []
    for item in items:
        if FOLDER in item.path.parents:
            marker = item.get_closest_marker("fault")
            if marker is None:
                raise pytest.UsageError(f"{item.nodeid} has no @pytest.mark.fault(id, sentence, gate=...)")
            if not marker.kwargs.get("gate", False) and not config.getoption("--all-faults"):
                left.append(item)
                continue
        kept.append(item)
    items[:] = kept if config.getoption("--faults-within") is None else _drawn(kept)
    if left:
        config.hook.pytest_deselected(items=left)


def _drawn(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests in an order that the seed draws, first one of each id of a fault."""
    order = sorted(items, key=lambda item: item.nodeid)
    random.Random(SEED).shuffle(order)
    first: dict[str, pytest.Item] = {}
    for item in order:
        if (marker := item.get_closest_marker("fault")) is not None:
            first.setdefault(marker.args[0], item)
    for item in first.values():
        item.stash[REQUIRED] = True
    return [*first.values(), *(item for item in order if REQUIRED not in item.stash)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no further fault once the time of `--faults-within` is over."""
    most_s = item.config.getoption("--faults-within")
    if most_s is not None and REQUIRED not in item.stash and time.monotonic() - BEGAN > most_s:
        pytest.skip("after the time of --faults-within")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Say in the report what was injected and measured; a report travels, where several processes run the tests."""
    report = yield
    if (marker := item.get_closest_marker("fault")) is not None:
        recovery = item.stash.get(RECOVERY, Recovery())
        notes = [(note.what, note.seconds, note.bar) for note in recovery.notes]
        report.user_properties.append(("fault", [*marker.args, recovery.faults, notes]))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep how each test ended."""
    told = dict(report.user_properties).get("fault")
    if told is None:
        return
    fault, sentence, faults, notes = told
    outcome = TABLE.outcomes.setdefault(report.nodeid, Outcome(fault, sentence, report.nodeid))
    outcome.seconds += report.duration
    outcome.recovery = Recovery(faults, [Note(*note) for note in notes])
    if report.failed:
        outcome.result = "FAIL"
    elif report.skipped and outcome.result == "pass":
        outcome.result = "skip"
        outcome.reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table."""
    table = TABLE
    if not table.outcomes:
        return
    seconds = time.monotonic() - BEGAN
    footer = f"seed {SEED}, {server_version()}, Python {platform.python_version()}, {seconds:.0f} s"
    terminalreporter.section("faults")
    terminalreporter.write_line(table.render(footer))
    if path := config.getoption("--fault-table"):
        table.write(Path(path), seed=SEED, server=server_version(), seconds=round(seconds))


@pytest.fixture(scope="session", autouse=True)
def _on_the_server_under_test() -> Iterator[None]:
    """Let `embq run` and in-process servers start Debian's redis-server where that one is tested."""
    with pytest.MonkeyPatch.context() as patch:
        if SERVER == "redis":
            program = server_program()
            patch.setattr(embq.core.broker.embedded, "server_binary", lambda: program)
            patch.setenv("PYTHONPATH", str(SABOTAGE), prepend=os.pathsep)
            patch.setenv("EMBQ_SABOTAGE", json.dumps([{"server": str(program)}]))
        yield


@pytest.fixture
def recovery(request: pytest.FixtureRequest) -> Recovery:
    """Counts the faults of this test, and measures how soon they are mended."""
    slack = 1.0 if request.config.getoption("--all-faults") else BUSY_SLACK
    return request.node.stash.setdefault(RECOVERY, Recovery(slack=slack))


@pytest.fixture
def random_(request: pytest.FixtureRequest) -> random.Random:
    """Chance that repeats itself: the same for the same EMBQ_TEST_SEED and test."""
    return random.Random(f"{SEED}:{request.node.name}")


@pytest.fixture
def make_cluster(short_tmp: Path, recovery: Recovery) -> Iterator[MakeCluster]:
    """Makes a cluster with a broker of its own; the arguments are those of `Broker`."""
    made: list[Cluster] = []

    def make(**broker: object) -> Cluster:
        cluster = Cluster(short_tmp / f"c{len(made)}", recovery, **broker)  # type: ignore[arg-type]
        made.append(cluster)
        return cluster

    try:
        yield make
    finally:
        for cluster in made:
            cluster.close()


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Cluster:
    """A cluster with a running broker; start services in it as on several machines."""
    return make_cluster()


@pytest.fixture
def needs() -> object:
    """Skips the test where a program is not on PATH."""

    def check(program: str) -> str:
        path = shutil.which(program)
        if path is None:
            pytest.skip(f"{program} is not on PATH")
        return path

    return check


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A process of which each sweep forks its commands."""
    with zygote_in(tmp_path_factory.mktemp("zygote")) as zygote:
        yield zygote


@pytest.fixture(scope="session")
def vectors_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection to build indexes of."""
    return write_collection(tmp_path_factory.mktemp("collection") / "vectors")


@pytest.fixture(scope="session")
def undisturbed(vectors_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Building:
    """An index that nothing happened to."""
    building = Building(vectors_folder, tmp_path_factory.mktemp("undisturbed"), Recovery())
    try:
        building.run()
    finally:
        building.close()
    building.assert_published()
    assert building.begun() == STAGES
    return building


@pytest.fixture
def make_building(vectors_folder: Path, tmp_path: Path, recovery: Recovery) -> Iterator[MakeBuilding]:
    """Makes indexes of their own of the same collection."""
    made: list[Building] = []

    def make(**options: object) -> Building:
        folder = tmp_path / f"b{len(made)}"
        folder.mkdir()
        made.append(Building(**{"source": vectors_folder, "folder": folder, "recovery": recovery, **options}))
        return made[-1]

    yield make
    for building in made:
        building.close()
