"""The read and embed stages of a worker, with the stub embedder and a ledger that only answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from embq.core.errors import SourceError
from embq.core.models import Chunking, ModelConfig, NamedModel
from embq.core.queue.hints import Hint
from embq.core.queue.runs import RunRecord
from embq.core.units import Sample, Unit
from embq.sources.kinds import SOURCES
from embq.sources.reader_options import ReadOptions
from embq.worker.claim.lease import LeasedUnit, Leases
from embq.worker.embedders.registry import load
from embq.worker.embedders.stub import stub_vector
from embq.worker.meter.meter import Meter
from embq.worker.meter.progress_board import ProgressBoard, Span
from embq.worker.stages import read as read_module
from embq.worker.stages.embed import EmbedStage
from embq.worker.stages.read import Chunk, EncodedAhead, EndOfUnit, ReadStage
from tests.e2e.session import write_tar
from tests.support.waiting import wait_until

MODEL = ModelConfig(spec="stub:8?batch_size=4", modalities=("text",), precision="fp32")


class AnsweringLedger:
    """Records what a stage asks of the ledger; `lost` names the tokens whose lease is gone."""

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.started: list[str] = []
        self.released: list[tuple[str, tuple[str, str] | None]] = []

    def start(self, held: Any) -> set[str]:
        tokens = {token for _, token in held}
        self.started.extend(tokens)
        return tokens & self.lost

    def release(self, u: int, token: str, *, failed: tuple[str, str] | None = None) -> bool:
        self.released.append((token, failed))
        return True


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[SimpleNamespace]:
    embedder = load(MODEL, "cpu")
    board = ProgressBoard()
    ledger, leases, stats = AnsweringLedger(), Leases(), Meter(board=board)
    finished: list[LeasedUnit] = []
    handed: list[Chunk | EndOfUnit] = []
    with ThreadPoolExecutor(2) as pool:
        embed = EmbedStage(embedder, stats, hand_on=finished.append)
        read = ReadStage(embedder, pool, stats, roots=(), hand_on=handed.append)
        yield SimpleNamespace(
            embed=embed,
            read=read,
            board=board,
            ledger=ledger,
            leases=leases,
            finished=finished,
            handed=handed,
            folder=tmp_path,
        )


def make_work(
    stages: SimpleNamespace, unit: Unit, token: str, *, attempts: int = 0, poison: frozenset[int] = frozenset()
) -> LeasedUnit:
    record = RunRecord(run="r", output="/nowhere", model=MODEL, units=9)
    hint = Hint(run="r", gen="1-0", u=0, unit=unit)
    work = LeasedUnit(hint, record, stages.ledger, token, attempts=attempts, poison=poison)
    stages.leases.add(work)
    return work


def texts(stages: SimpleNamespace, name: str, lines: list[str]) -> Unit:
    path = stages.folder / name
    path.write_text("".join(f"{line}\n" for line in lines))
    (unit,) = SOURCES["lines"].split(str(path), ReadOptions())
    return unit


def drive(stages: SimpleNamespace, *works: LeasedUnit) -> None:
    for work in works:
        stages.read.run(work)
    for item in stages.handed:
        stages.embed.add(item)
    stages.handed.clear()
    stages.embed.flush()


def test_samples_whose_metadata_cannot_be_read_are_rows_and_are_counted(
    stages: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    path = stages.folder / "t.csv"
    fields = [b"caf\xe9" if n % 10 == 3 else b"plain" for n in range(400)]
    path.write_bytes(b"text,n\n" + b"".join(b"%d,%s\n" % pair for pair in enumerate(fields)))
    (unit,) = SOURCES["csv"].split(str(path), ReadOptions())
    work = make_work(stages, unit, "t1")
    drive(stages, work)
    assert (len(work.samples), work.failures, work.unread) == (400, [], 40)
    (told,) = [record.message for record in caplog.records if record.message.startswith("metadata_unread")]
    assert "samples=40" in told
    assert "first=t.csv:4" in told


def test_a_batch_spans_units_and_each_unit_gets_its_own_rows(stages: SimpleNamespace) -> None:
    first = make_work(stages, texts(stages, "a.txt", ["one", "two", "three"]), "t1")
    second = make_work(stages, texts(stages, "b.txt", ["four", "five", "six"]), "t2")
    drive(stages, first, second)
    assert stages.finished == [first, second]
    for work, words in ((first, ["one", "two", "three"]), (second, ["four", "five", "six"])):
        rows = np.concatenate(work.vectors["text"])
        assert [sample.text for sample in work.samples] == words
        assert np.array_equal(rows, np.stack([stub_vector(w.encode(), 8) for w in words]).astype(np.float16))


def test_a_chunk_ends_with_so_many_bytes_of_images_and_none_of_them_waits_for_the_device(
    stages: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_module, "CHUNK_IMAGE_BYTES", 100)
    stages.read.embedder = load(replace(MODEL, modalities=("image",)), "cpu")
    drive_read(stages, images(stages, 5, 60))
    *chunks, end = stages.handed
    assert isinstance(end, EndOfUnit)
    assert end.samples == 5
    assert [chunk.expected for chunk in chunks] == [2, 2, 1]
    waiting = [sample for chunk in chunks for sample in chunk.prepared.result()[0]]
    assert [(sample.key, sample.image) for sample in waiting] == [(str(n), None) for n in range(5)]
    wait_until(lambda: stages.read.encoded.held_bytes == 0)


def test_no_more_encoded_images_are_read_than_decoders_have_room_for(stages: SimpleNamespace) -> None:
    gate = threading.Event()
    decoding = load(replace(MODEL, modalities=("image",)), "cpu")
    stages.read.embedder = SimpleNamespace(
        prepare=lambda samples: gate.wait() and decoding.prepare(samples), batch_size=1
    )
    stages.read.encoded = EncodedAhead(150)
    reader = threading.Thread(target=drive_read, args=(stages, images(stages, 5, 60)))
    reader.start()
    wait_until(lambda: stages.read.encoded.held_bytes == 120)
    assert len(stages.handed) <= 2
    gate.set()
    reader.join()
    assert len(stages.handed) == 6
    wait_until(lambda: stages.read.encoded.held_bytes == 0)


def test_an_image_that_is_larger_than_the_room_passes_alone() -> None:
    encoded = EncodedAhead(100)
    encoded.acquire(1000)
    waits = threading.Thread(target=encoded.acquire, args=(1,))
    waits.start()
    assert encoded.held_bytes == 1000
    encoded.give_back(1000)
    waits.join()
    assert encoded.held_bytes == 1


def images(stages: SimpleNamespace, count: int, size: int) -> Unit:
    path = stages.folder / "a.tar"
    write_tar(path, [(f"{n}.jpg", bytes([n]) * size) for n in range(count)])
    (unit,) = SOURCES["tar"].split(str(path), ReadOptions())
    return unit


def drive_read(stages: SimpleNamespace, unit: Unit) -> None:
    stages.read.run(make_work(stages, unit, "t1"))


def test_a_chunk_counts_what_each_model_makes_of_its_images(stages: SimpleNamespace) -> None:
    work = make_work(stages, texts(stages, "a.txt", ["one"]), "t1")
    members = [
        NamedModel(name=name, spec=spec, modalities=modalities)
        for name, spec, modalities in (
            ("a", "stub:8?pixels=32", ("image",)),
            ("b", "stub:8?pixels=64", ("image", "text")),
            ("c", "stub:8", ("text",)),
        )
    ]
    joint = ModelConfig.several(members, modalities=("image", "text"), precision="fp32")
    embedder = load(joint, "cpu")
    read = ReadStage(embedder, stages.read.pool, Meter(), roots=(), hand_on=stages.handed.append)
    chunk = Chunk(
        work,
        [Sample(ordinal=0, key="a", image=b"1234", text="five"), Sample(ordinal=1, key="b", text="six")],
        Future(),
        image_bytes=read.image_bytes,
    )
    assert chunk.size == 4 + 3 + 3 * (32**2 + 64**2)


def test_a_chunk_of_texts_that_are_cut_counts_as_what_they_are_cut_into(stages: SimpleNamespace) -> None:
    work = make_work(stages, texts(stages, "a.txt", ["one"]), "t1")
    samples = [Sample(ordinal=n, key="a", text="long" * 10_000) for n in range(2)]
    assert Chunk(work, samples, Future()).expected == 2
    work.record = replace(work.record, model=replace(MODEL, chunking=Chunking(tokens=100)))
    assert Chunk(work, samples, Future()).expected == 200
    assert Chunk(work, [Sample(ordinal=0, key="a", text="short")], Future()).expected == 1


def test_a_unit_is_charged_before_its_source_is_looked_at(stages: SimpleNamespace) -> None:
    unit = Unit(kind="lines", source=str(stages.folder / "gone.txt"), stop=5, samples=1)
    work = make_work(stages, unit, "t1")
    drive(stages, work)
    assert stages.ledger.started == ["t1"]
    assert [(f.ordinal, f.code) for f in work.failures] == [(None, "source_missing")]


def test_a_unit_whose_lease_is_gone_is_neither_read_nor_published(stages: SimpleNamespace) -> None:
    stages.ledger.lost = {"t1"}
    work = make_work(stages, texts(stages, "a.txt", ["one"]), "t1")
    drive(stages, work)
    assert stages.finished == []
    assert stages.leases.snapshot() == []


def test_a_source_that_may_not_be_read_fails_the_unit_and_not_the_worker(stages: SimpleNamespace) -> None:
    work = make_work(stages, Unit(kind="tar", source="pipe:cat /etc/passwd", stop=1), "t1")
    drive(stages, work)
    assert [f.code for f in work.failures] == ["shard_scheme_denied"]
    assert stages.finished == [work]


def test_storage_that_comes_back_is_waited_for(stages: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    work = make_work(stages, texts(stages, "a.txt", ["one", "two"]), "t1")
    real, tries = read_module.read, []

    def sometimes(unit: Unit, roots: Any, **watched: Any) -> Iterator[Sample]:
        tries.append(unit)
        if len(tries) < 3:
            raise SourceError("storage is away", code="source_unreadable", transient=True)
        return real(unit, roots, **watched)

    monkeypatch.setattr(read_module, "read", sometimes)
    monkeypatch.setattr(read_module, "PAUSES_S", (0.0, 0.0, 0.0))
    drive(stages, work)
    assert len(tries) == 3
    assert [sample.text for sample in work.samples] == ["one", "two"]
    assert stages.ledger.released == []


def test_storage_that_stays_away_gives_the_unit_back_charged(
    stages: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = make_work(stages, texts(stages, "a.txt", ["one"]), "t1")

    def never(unit: Unit, roots: Any, **watched: Any) -> Iterator[Sample]:
        raise SourceError("storage is away", code="source_unreadable", transient=True)

    monkeypatch.setattr(read_module, "read", never)
    monkeypatch.setattr(read_module, "PAUSES_S", (0.0,))
    drive(stages, work)
    assert stages.ledger.released == [("t1", ("source_unreadable", "storage is away"))]
    assert stages.finished == []


def test_a_source_that_breaks_after_some_samples_leaves_no_row(
    stages: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = make_work(stages, texts(stages, "a.txt", ["x"] * 70), "t1")
    real = read_module.read

    def breaking(unit: Unit, roots: Any, **watched: Any) -> Iterator[Sample]:
        for number, sample in enumerate(real(unit, roots, **watched)):
            if number == 50:
                raise SourceError("cut", code="shard_truncated")
            yield sample

    monkeypatch.setattr(read_module, "read", breaking)
    drive(stages, work)
    assert work.samples == []
    assert [(f.ordinal, f.code) for f in work.failures] == [(None, "shard_truncated")]
    assert stages.finished == [work]


def test_a_vector_that_is_not_finite_is_a_failure_and_its_neighbours_are_rows(
    stages: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = stages.embed.embedder.embed

    def spoiled(batch: Any) -> dict[str, np.ndarray]:
        vectors = real(batch)
        vectors["text"][1] = [np.nan] + [0.0] * 7
        vectors["text"][2] = 1e9  # does not fit float16
        return vectors

    def still(batch: Any) -> dict[str, np.ndarray]:
        return {"text": np.full((len(batch), 8), np.inf, dtype=np.float32)}

    monkeypatch.setattr(stages.embed.embedder, "embed", spoiled)
    monkeypatch.setattr(stages.embed.embedder, "embed_in_fp32", still)
    work = make_work(stages, texts(stages, "a.txt", ["one", "two", "three", "four"]), "t1")
    drive(stages, work)
    assert [sample.text for sample in work.samples] == ["one", "four"]
    assert [(f.ordinal, f.code) for f in work.failures] == [(1, "non_finite"), (2, "beyond_float16")]


def test_of_several_models_the_first_whose_vector_is_not_finite_is_named(
    stages: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [NamedModel(name=name, spec="stub:8", modalities=("text",)) for name in ("a", "b")]
    model = ModelConfig.several(members, modalities=("text",), precision="fp32")
    embedder = load(model, "cpu")
    real = embedder.embed

    def spoiled(batch: Any) -> dict[str, np.ndarray]:
        vectors = real(batch)
        vectors["b"][:2] = np.nan
        vectors["a"][1:2] = np.inf
        return vectors

    monkeypatch.setattr(embedder, "embed", spoiled)
    again = {"a": np.array([[0.5] * 8, [np.inf] * 8]), "b": np.full((2, 8), np.nan)}
    monkeypatch.setattr(embedder, "embed_in_fp32", lambda batch: again)
    stages.read.embedder = embedder
    stages.embed = EmbedStage(embedder, Meter(), hand_on=stages.finished.append)
    work = make_work(stages, texts(stages, "a.txt", ["one", "two", "three"]), "t1")
    work.record = replace(work.record, model=model)
    drive(stages, work)
    assert [sample.text for sample in work.samples] == ["three"]
    assert {name: len(blocks[0]) for name, blocks in work.vectors.items()} == {"a": 1, "b": 1}
    assert [(f.ordinal, f.message.partition(":")[0]) for f in work.failures] == [(0, "b"), (1, "a")]


def test_the_last_attempt_goes_sample_by_sample_and_leaves_out_what_ended_a_worker(
    stages: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["one", "two", "three", "four"]
    work = make_work(stages, texts(stages, "a.txt", words), "t1", attempts=2, poison=frozenset({1}))
    in_hand: list[tuple[str, tuple[Span, ...]]] = []
    embedder = stages.embed.embedder
    for stage in ("prepare", "embed"):
        real = getattr(embedder, stage)

        def seen(batch: Any, real: Any = real) -> Any:
            in_hand.extend((step.stage, step.units) for step in stages.board.in_hand())
            return real(batch)

        monkeypatch.setattr(embedder, stage, seen)
    stages.read.hand_on = stages.embed.add  # the reader waits for each sample to be dealt with
    stages.read.run(work)
    assert stages.finished == [work]
    assert [sample.text for sample in work.samples] == ["one", "three", "four"]
    assert [(failure.ordinal, failure.code) for failure in work.failures] == [(1, "crash")]
    steps = [(stage, (Span("t1", 0, n, n),)) for n in (0, 2, 3) for stage in ("prepare", "embed")]
    assert in_hand == steps
