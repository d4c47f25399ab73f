"""Every epoch, exact or resampled, with loader workers and without: batches, their order, and resuming."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embq.training.data import epochs
from embq.training.data.batch import EPOCH_START, Batch, EpochPosition, View
from embq.training.data.epochs import exact_epoch, resampled_epoch
from embq.training.data.loader import WorkerBatch
from embq.training.shards.shard_set import Shards
from tests.support.waiting import wait_until
from tests.training.small_shards import CLASSES, label_of, write_shards

COUNTS = [7, 18, 1, 30, 12]
"""Samples of shards that divide by nothing."""

VIEW = View(batch_size=4, image_size=16, seed=11, shuffle_buffer=10, classes=CLASSES)

Epoch = Callable[..., Iterator[Batch]]
KINDS: list[Epoch] = [exact_epoch, partial(resampled_epoch, batches=9)]
kinds = pytest.mark.parametrize("kind", KINDS, ids=["exact", "resampled"])
workers = pytest.mark.parametrize("loader_workers", [0, 1, 2])


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    # A corrupt picture, one without a label, and a shard that is cut: places in a stream and samples of a batch differ.
    bad: dict[int, Mapping[str, bytes | None]] = {3: {"jpg": b"no picture"}, 40: {"cls": None}}
    shards = write_shards(tmp_path_factory.mktemp("shards"), COUNTS, bad)
    cut = Path(shards.urls[3])
    cut.write_bytes(cut.read_bytes()[:50_000])
    return shards


def told(batches: Iterator[Batch] | list[Batch]) -> list[tuple[object, ...]]:
    """All that a training can see of batches, in a form that can be compared."""
    return [
        (batch.keys, batch.shards, batch.labels.tolist(), batch.images.numpy().tobytes(), batch.failed)
        for batch in batches
    ]


@kinds
@workers
def test_a_batch_holds_normalised_pictures_and_the_labels_of_its_keys(
    kind: Epoch, loader_workers: int, shards: Shards
) -> None:
    for batch in kind(shards, replace(VIEW, loader_workers=loader_workers), epoch=0):
        assert batch.pixels.shape == batch.images.shape == (len(batch), 3, 16, 16)
        assert batch.pixels.dtype == torch.uint8
        assert batch.pixels.is_contiguous(memory_format=torch.channels_last)
        assert batch.images.dtype == torch.float32
        assert batch.images.is_contiguous()
        assert -2.2 < batch.images.min() < -1 < 1 < batch.images.max() < 2.7
        assert batch.labels.dtype == torch.int64
        assert batch.labels.tolist() == [label_of(key) for key in batch.keys]
        assert set(batch.shards) <= set(shards.urls)


@kinds
@workers
def test_an_epoch_is_the_same_whenever_it_is_made(kind: Epoch, loader_workers: int, shards: Shards) -> None:
    view = replace(VIEW, loader_workers=loader_workers)
    assert told(kind(shards, view, epoch=2)) == told(kind(shards, view, epoch=2))


@kinds
def test_other_epochs_and_other_seeds_have_another_order(kind: Epoch, shards: Shards) -> None:
    views = [(VIEW, 0), (VIEW, 1), (VIEW, 2), (replace(VIEW, seed=12), 0), (replace(VIEW, seed=12), 1)]
    orders = [[batch.keys for batch in kind(shards, view, epoch=epoch)] for view, epoch in views]
    assert all(one != other for at, one in enumerate(orders) for other in orders[:at])


@kinds
def test_one_loader_worker_gives_what_the_process_itself_would_give(kind: Epoch, shards: Shards) -> None:
    own, fetched = (told(kind(shards, replace(VIEW, loader_workers=n), epoch=0)) for n in (0, 1))
    assert own == fetched


@kinds
def test_what_is_seen_of_a_picture_follows_from_seed_epoch_and_key_alone(kind: Epoch, shards: Shards) -> None:
    def seen(view: View, epoch: int) -> dict[str, bytes]:
        batches = kind(shards, view, epoch=epoch)
        return {key: image.numpy().tobytes() for b in batches for key, image in zip(b.keys, b.images, strict=True)}

    one = seen(VIEW, 0)
    other = seen(replace(VIEW, loader_workers=2, batch_size=5, world=2, rank=1, shuffle_buffer=0), 0)
    both = one.keys() & other.keys()
    assert len(both) > 5
    assert all(one[key] == other[key] for key in both)
    assert not set(one.values()) & set(seen(VIEW, 1).values())
    assert not set(one.values()) & set(seen(replace(VIEW, seed=12), 0).values())


@kinds
@pytest.mark.parametrize("loader_workers", [1, 2, 3])
def test_an_epoch_goes_on_where_it_stopped_with_loader_workers(
    kind: Epoch, loader_workers: int, shards: Shards
) -> None:
    view = replace(VIEW, loader_workers=loader_workers)
    assert_goes_on(partial(kind, shards, view, epoch=1), every=5)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    st.sets(st.integers(0, 30)),
    st.integers(1, 5),
    st.integers(0, 9),
    st.integers(1, 2),
)
def test_an_epoch_goes_on_where_it_stopped(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], bad: set[int], batch: int, buffer: int, world: int
) -> None:
    changes = {number: {"jpg": b""} for number in bad if number}
    shards = write_shards(tmp_path_factory.mktemp("drawn"), [1, *counts], changes)
    view = replace(VIEW, batch_size=batch, shuffle_buffer=buffer, world=world)
    for kind in KINDS:
        assert_goes_on(partial(kind, shards, view, epoch=0), every=1)


def assert_goes_on(epoch: Callable[..., Iterator[Batch]], every: int) -> None:
    """After each of the first batches, and of the last ones, a new epoch gives all that are left."""
    unbroken = list(epoch())
    taken = EPOCH_START
    for number, batch in enumerate(unbroken, 1):
        taken = EpochPosition.from_json(json.loads(json.dumps(asdict(taken.after(batch)))))
        if number % every == 0 or number > len(unbroken) - 4:
            assert told(epoch(taken=taken)) == told(unbroken[number:])
    assert taken.batches == len(unbroken)
    assert taken.samples == sum(map(len, unbroken))
    assert taken.failed == sum(failure.samples for batch in unbroken for failure in batch.failed)


def test_what_is_taken_is_not_decoded_again(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    monkeypatch.setattr(epochs, "training_pixels", partial(noting, decoded))
    taken = EPOCH_START
    for batch in exact_epoch(shards, VIEW, epoch=0):
        if taken.batches == 10:
            break
        taken = taken.after(batch)
    decoded.clear()
    rest = list(exact_epoch(shards, VIEW, epoch=0, taken=taken))
    assert sorted(decoded) == sorted(key for batch in rest for key in batch.keys)


def noting(decoded: list[str], _picture: object, key: str, *, size: int, **_rest: int) -> torch.Tensor:
    decoded.append(key)
    return torch.zeros(3, size, size, dtype=torch.uint8)


@kinds
def test_loader_workers_may_be_started_anew_instead_of_forked(
    kind: Epoch, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start workers as Python 3.14 does: what they run has to go through a pickle."""
    run: list[object] = []

    def loaded(stages: list[object], _view: View) -> Iterator[WorkerBatch]:
        run.extend(stages)
        return iter(())

    monkeypatch.setattr(epochs, "loaded", loaded)
    list(kind(shards, VIEW, epoch=0))
    assert len(pickle.loads(pickle.dumps(run))) == len(run) > 3


@kinds
def test_ranks_and_workers_of_other_programs_are_not_taken_for_ours(
    kind: Epoch, shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_before = told(kind(shards, VIEW, epoch=0))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "WORKER": "3", "NUM_WORKERS": "5"}.items():
        monkeypatch.setenv(name, value)
    assert told(kind(shards, VIEW, epoch=0)) == told_before


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 9), st.booleans(), st.integers(1, 3))
def test_the_account_adds_up_also_if_a_shard_comes_or_goes_while_an_epoch_is_interrupted(
    tmp_path_factory: pytest.TempPathFactory, stopped_after: int, there_first: bool, batch_size: int
) -> None:
    shards = write_shards(tmp_path_factory.mktemp("drawn"), [5, 7, 4])
    view = replace(VIEW, batch_size=batch_size, shuffle_buffer=3)
    shard = Path(shards.urls[1])
    away = shard.rename(shard.with_suffix(".away"))
    taken = EPOCH_START
    for there in (there_first, not there_first):
        if there:
            away.rename(shard)
        elif shard.exists():
            shard.rename(away)
        for batch in exact_epoch(shards, view, epoch=0, taken=taken):
            if there == there_first and taken.batches == stopped_after:
                break
            taken = taken.after(batch)
    assert taken.samples + taken.failed == shards.samples


KILLED = """
import json, signal, sys
from dataclasses import asdict
from functools import partial
from embq.training.data.epochs import exact_epoch, resampled_epoch
from embq.training.data.batch import EPOCH_START
from embq.training.data.batch import View
from embq.training.shards.shard_set import open_shards

signal.signal(signal.SIGTERM, lambda *_: None)
taken = EPOCH_START
for batch in {kind}(open_shards(sys.argv[1]), {view!r}, epoch=0):
    taken = taken.after(batch)
    print(json.dumps(asdict(taken)), flush=True)
    if taken.batches in (2, 8):
        sys.stdin.readline()
"""
"""Takes two batches, then six more, which is more than its loader workers make ahead, and waits each time."""


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        pytest.param(KINDS[0], "exact_epoch", id="exact"),
        pytest.param(KINDS[1], "partial(resampled_epoch, batches=9)", id="resampled", marks=pytest.mark.slow),
    ],
)
def test_loader_workers_outlive_a_request_to_stop_and_end_with_a_sigkill_after_which_the_next_batch_comes_next(
    kind: Epoch, written: str, shards: Shards
) -> None:
    view = replace(VIEW, loader_workers=2)
    command = [sys.executable, "-c", KILLED.format(kind=written, view=view), str(Path(shards.urls[0]).parent)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, process_group=0) as training:  # type: ignore[call-overload]
        lines = [training.stdout.readline() for _ in range(2)]
        os.killpg(training.pid, signal.SIGTERM)  # as `embq.training.launch.child_process` does it
        training.stdin.write("\n")
        training.stdin.flush()
        lines += [training.stdout.readline() for _ in range(6)]
        left = children_of(training.pid)
        training.send_signal(signal.SIGKILL)
    assert len(left) == 2
    wait_until(lambda: not any(is_running(pid) for pid in left), deadline_s=2)
    unbroken = list(kind(shards, view, epoch=0))
    taken = EpochPosition.from_json(json.loads(lines[-1]))
    assert told(kind(shards, view, epoch=0, taken=taken)) == told(unbroken[8:])


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
