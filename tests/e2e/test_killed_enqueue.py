"""`embq enqueue` is killed at random moments and repeated: the manifest has each input once, and none is missing."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.queue.keys import RUNS
from tests.e2e.check import _read_manifest
from tests.e2e.session import process_ended, run_of, started, succeed

KILLS = 5
"""For each of the two phases."""


@pytest.fixture
def broker() -> Iterator[EmbeddedServer]:
    """A server of which only this file's runs are known."""
    with tempfile.TemporaryDirectory(prefix="embq-t") as folder, EmbeddedServer(Path(folder) / "b") as server:
        yield server


def write(folder: Path, name: str, files: int) -> None:
    for number in range(files):
        (folder / f"{name}-{number:02d}.txt").write_text("".join(f"{name} {n}\n" for n in range(20 + number)))


def assert_each_input_once(root: Path, folder: Path) -> None:
    """Compare the units of a manifest with the files themselves: slices that follow each other, with all lines."""
    ids, ends = _read_manifest(root)
    assert ends[-1] == len(ids) == len(set(ids))
    slices: dict[Path, list[tuple[int, int, int]]] = defaultdict(list)
    for path in sorted((root / "manifest").glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            slices[Path(row["source"])].append((row["start"], row["stop"], row["samples"]))
    assert set(slices) == set(folder.iterdir())
    for path, found in slices.items():
        data = path.read_bytes()
        borders = [start for start, _, _ in found] + [len(data)]
        assert borders == [0] + [stop for _, stop, _ in found], path
        assert [data[start:stop].count(b"\n") for start, stop, _ in found] == [samples for _, _, samples in found]


@pytest.mark.slow  # unit/test_additions kills plans at random moments, and fault P1 the command at each of its calls
def test_an_enqueue_that_is_killed_at_ten_random_moments_and_repeated_is_exact(
    short_tmp: Path, broker: EmbeddedServer
) -> None:
    rng = random.Random(int(os.environ.get("EMBQ_TEST_SEED", "4")))
    folder, root = short_tmp / "in", short_tmp / "out"
    folder.mkdir()
    environment = {"EMBQ_BROKER_URL": broker.url}

    def command(output: Path) -> list[str]:
        return ["enqueue", f"{folder}/*.txt", "-o", str(output), "-m", "stub:4", "--unit-size", "3"]

    for name in ("first", "later"):
        write(folder, name, 20)
        began = time.monotonic()
        # A process, as those that are killed.
        assert process_ended(*command(short_tmp / f"undisturbed-{name}"), environment=environment)[0] == 0
        whole_s = time.monotonic() - began
        before = run_of(root)
        ends = []
        for n in range(KILLS):
            with started(*command(root), environment=environment) as enqueue:
                # The first at once, the others anywhere in their part of the time that it takes.
                after_s = 0 if n == 0 else (n + rng.random()) / KILLS * whole_s
                until = time.monotonic() + after_s
                while enqueue.process.poll() is None and time.monotonic() < until:
                    time.sleep(0.001)
                enqueue.signal(signal.SIGKILL)
                ends.append(enqueue.process.wait())
            assert not before or run_of(root) == before
            if run_of(root):
                _read_manifest(root)  # all that it names is there, each unit once
        assert set(ends) <= {0, -signal.SIGKILL}
        assert -signal.SIGKILL in ends

        succeed(*command(root), environment=environment)
        assert_each_input_once(root, folder)
        with connect(broker.url) as client:
            assert run_of(root).encode() in client.hkeys(RUNS)
        assert list((root / "_tmp").iterdir()) == []
