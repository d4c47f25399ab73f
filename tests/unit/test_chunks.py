"""The account of texts that are cut: through the stages of a worker, before the writer, and in `embq verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embq.app.cli.run_options import request_from
from embq.core.errors import InputError, UsageError
from embq.core.models import Chunking, ModelConfig
from embq.core.queue.hints import Hint
from embq.core.queue.keys import VERSION
from embq.core.queue.result_stream import Entry
from embq.core.queue.runs import RunRecord
from embq.core.rows.results import ResultDecoder, encode_batches, encode_result, failure_batch, row_schema
from embq.core.rows.spec import RowSpec
from embq.core.run.layout import Layout
from embq.core.units import Failure, Passage, Retry, Sample, Unit, key_without_chunks
from embq.producer.enqueue import Request, prepare
from embq.sources.formats import text_files
from embq.sources.kinds import SOURCES
from embq.sources.reader_options import ReadOptions
from embq.worker.claim.lease import LeasedUnit
from embq.worker.embedders.registry import load
from embq.worker.embedders.stub import stub_vector
from embq.worker.meter.meter import Meter
from embq.worker.stages.embed import EmbedStage
from embq.worker.stages.publish import PublishStage
from embq.worker.stages.read import Chunk, EndOfUnit, ReadStage
from embq.writer.accept import Accepted, Acceptor, Rejected
from tests.support.second_reader.checks import Words

DIM = 4
CHUNKING = Chunking(tokens=16, overlap=4)
MODEL = ModelConfig(spec=f"stub:{DIM}?batch_size=3", modalities=("text",), precision="fp32", chunking=CHUNKING)
FINGERPRINT = "f" * 32


def words(count: int, name: str = "w") -> str:
    return " ".join(f"{name}{number}" for number in range(count))


# --- keys ---


def test_keys_of_chunks_stay_apart_whatever_documents_are_called() -> None:
    documents = ["a", "a#", "a#0", "a#0#1", "#", "", "a#1#"]
    passages = [Passage(document=name, number=n, count=3, start=0, end=1) for name in documents for n in range(3)]
    keys = [passage.key for passage in passages] + [key_without_chunks(name) for name in documents]
    assert len(set(keys)) == len(keys)
    for passage in passages:
        document, _, number = passage.key.rpartition("#")
        assert (document, int(number)) == (passage.document, passage.number)


# --- the stages of a worker ---


class Harness:
    """Read, embed and publish without threads of their own; the ledger grants everything."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor, model: ModelConfig = MODEL) -> None:
        self.folder = folder
        self.embedder = load(model, "cpu")
        self.record = RunRecord(run="r", output="/nowhere", model=model, units=9)
        stats = Meter()
        self.finished: list[LeasedUnit] = []
        self.handed: list[Chunk | EndOfUnit] = []
        self.embed = EmbedStage(self.embedder, stats, hand_on=self.finished.append)
        self.read = ReadStage(self.embedder, pool, stats, roots=(), hand_on=self.handed.append)
        self.publish = PublishStage(stats, fingerprint=FINGERPRINT, dims={"text": DIM}, transport="payload")

    def unit(self, lines: list[str]) -> Unit:
        path = self.folder / "docs.txt"
        path.write_text("".join(f"{line}\n" for line in lines))
        (unit,) = SOURCES["lines"].split(str(path), ReadOptions())
        return unit

    def work(self, unit: Unit, *, poison: frozenset[int] = frozenset()) -> LeasedUnit:
        hint = Hint(run="r", gen="1-0", u=0, unit=unit)
        ledger: Any = SimpleNamespace(start=lambda held: set())
        return LeasedUnit(hint, self.record, ledger, "1-0:w:t", attempts=0, poison=poison)

    def drive(self, work: LeasedUnit) -> None:
        self.read.run(work)
        for item in self.handed:
            self.embed.add(item)
        self.handed.clear()
        self.embed.flush()

    def result(self, work: LeasedUnit) -> pa.Table:
        model, rows = work.record.model, work.record.rows
        schema = row_schema(model.output_names, self.publish.dims, rows, chunked=model.chunking is not None)
        return ResultDecoder(schema).decode(encode_batches(self.publish._rows(work), failure_batch(work.failures))).rows


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    with ThreadPoolExecutor(2) as pool:
        yield Harness(tmp_path, pool)


def test_each_text_becomes_its_chunks_or_one_failure(harness: Harness) -> None:
    lines = [words(100), "short", "   ", words(40, "é🙂"), *["x"] * 40]
    work = harness.work(harness.unit(lines))
    harness.drive(work)
    assert harness.finished == [work]
    assert work.handled == len(lines)
    assert [(f.ordinal, f.key, f.code) for f in work.failures] == [(2, "docs.txt:3#", "empty_text")]
    rows = harness.result(work).to_pylist()
    assert [(row["ordinal"], row["chunk"]) for row in rows] == sorted((row["ordinal"], row["chunk"]) for row in rows)
    for ordinal, line in enumerate(lines):
        of_line = [row for row in rows if row["ordinal"] == ordinal]
        count = 0 if not line.strip() else 1 + max(0, -(-(len(line.split()) - 16) // 12))
        assert [row["chunk"] for row in of_line] == list(range(count))
        for row in of_line:
            assert row["document"] == f"docs.txt:{ordinal + 1}"
            assert (row["key"], row["chunks"]) == (f"docs.txt:{ordinal + 1}#{row['chunk']}", count)
            assert row["caption"] == line[row["char_start"] : row["char_end"]]
            assert row["caption"].split() == line.split()[row["chunk"] * 12 : row["chunk"] * 12 + 16]
            assert row["embedding"] == stub_vector(row["caption"].encode(), DIM).tolist()


def test_the_same_unit_gives_the_same_chunks_again(harness: Harness) -> None:
    unit = harness.unit([words(300), words(7), words(99)])
    tables = []
    for _ in range(2):
        work = harness.work(unit)
        harness.drive(work)
        tables.append(harness.result(work))
    assert tables[0].equals(tables[1])


def test_a_text_that_ends_its_workers_is_left_out_whole(harness: Harness) -> None:
    work = harness.work(harness.unit([words(50), words(50), "last"]), poison=frozenset({1}))
    harness.drive(work)
    assert [(f.ordinal, f.key, f.code) for f in work.failures] == [(1, "docs.txt:2#", "crash")]
    assert {sample.ordinal for sample in work.samples} == {0, 2}
    assert harness.finished == [work]


def test_a_chunk_without_a_finite_vector_is_a_failure_of_its_own(harness: Harness) -> None:
    embed = harness.embedder.embed

    def one_is_nan(batch: Any) -> dict[str, np.ndarray]:
        vectors = embed(batch)
        vectors["text"][-1] = np.nan
        return vectors

    harness.embedder.embed = one_is_nan  # type: ignore[method-assign]
    harness.embedder.embed_in_fp32 = one_is_nan  # type: ignore[method-assign]
    work = harness.work(harness.unit([words(50)]))
    harness.drive(work)
    assert harness.finished == [work]
    # Four chunks in batches of three and one.
    assert [(f.ordinal, f.key, f.code) for f in work.failures] == [
        (0, "docs.txt:1#2", "non_finite"),
        (0, "docs.txt:1#3", "non_finite"),
    ]
    assert [sample.key for sample in work.samples] == ["docs.txt:1#0", "docs.txt:1#1"]


def test_a_long_text_takes_a_share_of_the_memory_that_its_chunks_will_take(harness: Harness) -> None:
    work = harness.work(harness.unit([words(40_000), *["short"] * 4]))
    harness.read.run(work)
    chunks = [item for item in harness.handed if isinstance(item, Chunk)]
    # The long one goes alone, so that a thread has it done soon.
    lines = [len({sample.ordinal for sample in chunk.prepared.result()[0]}) for chunk in chunks]
    assert lines == [1, 3, 1]
    assert chunks[0].size > 4 * len(words(40_000))


# --- what the writer takes ---


def a_chunk(ordinal: int, number: int, count: int) -> Sample:
    passage = Passage(document=f"d{ordinal}", number=number, count=count, start=number, end=number + 1)
    return Sample(ordinal=ordinal, key=passage.key, text="t", passage=passage)


def a_failure(ordinal: int, key: str) -> Failure:
    return Failure(ordinal=ordinal, key=key, code="empty_text", message="none")


WHOLE = [a_chunk(0, 0, 2), a_chunk(0, 1, 2), a_chunk(2, 0, 1), a_chunk(3, 1, 2)]
FAILED = [a_failure(1, "d1#"), a_failure(3, "d3#0")]


UNIT_ID = "0" * 32


def accept(
    folder: Path, samples: list[Sample], failures: list[Failure], *, retry: Retry | None = None, **changes: str
) -> Accepted:
    vectors = np.zeros((len(samples), DIM), dtype=np.float16)
    schema = row_schema(("text",), {"text": DIM}, RowSpec(), chunked=True)
    data = encode_result(samples, {"embedding": vectors}, failures, schema)
    fields: dict[str, Any] = {"v": VERSION, "u": 0, "token": "1", "unit_id": UNIT_ID, "fingerprint": FINGERPRINT}
    fields |= {"rows": len(samples), "failures": len(failures), "bytes": len(data), **changes}
    manifest: Any = SimpleNamespace(
        unit_id=lambda u: UNIT_ID,
        is_retry=lambda u: retry is not None,
        unit=lambda u: Unit(kind="lines", source="f", retry=retry),
    )
    model = SimpleNamespace(output_names=("text",), chunking=Chunking(tokens=16, overlap=0))
    info: Any = SimpleNamespace(model=model, rows=RowSpec(), format="parquet")
    acceptor = Acceptor(Layout(folder), manifest, info, fingerprint="", widths={})
    entry = Entry(id="0-1", fields={name: str(value).encode() for name, value in fields.items()} | {"data": data})
    return acceptor.accept(entry)


def test_a_unit_of_whole_texts_is_taken(tmp_path: Path) -> None:
    taken = accept(tmp_path, WHOLE, FAILED, truncated="3")
    assert (taken.rows.num_rows, taken.failures.num_rows, taken.truncated) == (4, 2, 3)
    assert accept(tmp_path, [], [a_failure(0, "d0#"), a_failure(1, "d1#0"), a_failure(1, "d1#1")]).rows.num_rows == 0
    assert accept(tmp_path, [], []).rows.num_rows == 0


def test_a_retry_has_the_texts_that_it_does_again_and_no_other(tmp_path: Path) -> None:
    retry = Retry(unit=0, failed=0, record=2, attempts=1, replaces=2, only="1,3")
    samples = [a_chunk(1, 0, 2), a_chunk(1, 1, 2)]
    taken = accept(tmp_path, samples, [a_failure(3, "d3#")], retry=retry)
    assert (taken.rows.num_rows, taken.failures.num_rows, taken.retry) == (2, 1, retry)
    for wrong in ([], [a_failure(2, "d2#")], [a_failure(2, "d2#"), a_failure(3, "d3#")]):
        with pytest.raises(Rejected, match="a text has neither rows nor a failure"):
            accept(tmp_path, samples, wrong, retry=retry)


@pytest.mark.parametrize(
    ("samples", "failures"),
    [
        (WHOLE[1:], FAILED),
        (WHOLE[:1] + WHOLE[2:], FAILED),
        (WHOLE, FAILED[:1]),
        (WHOLE, FAILED[1:]),
        ([*WHOLE, WHOLE[0]], FAILED),
        ([*WHOLE, a_chunk(0, 2, 2)], FAILED),
        (WHOLE[:2] + WHOLE[3:], FAILED),
        ([a_chunk(0, 0, 3), *WHOLE[1:]], FAILED),
        ([a_chunk(0, 0, 1), a_chunk(0, 0, 1), *WHOLE[2:]], FAILED),
        (WHOLE, [*FAILED, FAILED[0]]),
        (WHOLE, [*FAILED, a_failure(0, "d0#")]),
        (WHOLE, [*FAILED, a_failure(5, "d5#")]),
    ],
)
def test_a_unit_that_lacks_or_doubles_a_chunk_is_refused(
    tmp_path: Path, samples: list[Sample], failures: list[Failure]
) -> None:
    with pytest.raises(Rejected) as caught:
        accept(tmp_path, samples, failures)
    assert caught.value.code == "wrong_count"


# --- verification ---

TEXT = words(40)


@pytest.fixture
def rows(harness: Harness) -> pa.Table:
    work = harness.work(harness.unit([TEXT]))
    harness.drive(work)
    return harness.result(work)


NO_FAILURES = pa.table({"ordinal": pa.array([], pa.int32()), "key": pa.array([], pa.string())})


def put(column: str, at: int, change: Callable[[Any], Any]) -> Callable[[pa.Table], pa.Table]:
    def changed(rows: pa.Table) -> pa.Table:
        values = rows[column].to_pylist()
        values[at] = change(values[at])
        field = rows.schema.field(column)
        return rows.set_column(rows.schema.get_field_index(column), field, pa.array(values, field.type))

    return changed


def found(rows: pa.Table, chunking: Chunking | None = CHUNKING) -> str:
    return Words(rows, NO_FAILURES, chunking).check(0, "docs.txt:1", TEXT)


def test_what_a_worker_made_is_found_whole(rows: pa.Table) -> None:
    assert rows.num_rows == 3
    assert found(rows) == found(rows, None) == ""


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows: rows.slice(1),
        lambda rows: rows.slice(0, 2),
        lambda rows: rows.slice(0, 0),
        lambda rows: pa.concat_tables([rows, rows.slice(2)]),
        put("key", 1, lambda key: "docs.txt:1#2"),
        put("document", 1, lambda name: "docs.txt:2"),
        put("chunk", 2, lambda n: 1),
        put("chunks", 0, lambda n: 4),
        put("char_start", 1, lambda at: at + 1),
        put("char_end", 1, lambda at: at - 1),
        put("caption", 1, lambda text: text.upper()),
    ],
)
def test_rows_that_are_not_the_chunks_of_their_text_are_found(
    rows: pa.Table, damage: Callable[[pa.Table], pa.Table]
) -> None:
    assert found(damage(rows), None) != ""


def test_a_hole_between_two_chunks_is_found(rows: pa.Table) -> None:
    shorter = put("caption", 0, lambda text: "w0")(put("char_end", 0, lambda at: 2)(rows))
    assert "in no chunk" in found(shorter, None)
    assert "in no chunk" in found(put("chunks", 0, lambda n: 1)(rows.slice(0, 1)), None)


def test_other_windows_of_words_than_were_asked_for_are_found(rows: pa.Table) -> None:
    assert found(rows, replace(CHUNKING, overlap=3)) != ""
    assert found(rows, replace(CHUNKING, tokens=17)) != ""


# --- units ---


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.integers(1, 12), min_size=1, max_size=30),
    end=st.booleans(),
    most=st.integers(1, 9),
    most_bytes=st.integers(0, 40),
    block=st.integers(1, 25),
    kind=st.sampled_from(["lines", "csv"]),
)
def test_units_of_lines_end_with_the_line_that_reaches_the_bound(
    tmp_path: Path, lines: list[int], end: bool, most: int, most_bytes: int, block: int, kind: str
) -> None:
    head = "text,id\n" if kind == "csv" else ""
    path = tmp_path / f"{kind}.{'csv' if kind == 'csv' else 'txt'}"
    rows = ["x" * length + (f",{number}" if head else "") + "\n" for number, length in enumerate(lines)]
    path.write_text((head + "".join(rows)).removesuffix("" if end else "\n"))
    expected: list[int] = []
    count = size = 0
    for row in path.read_text().removeprefix(head).splitlines(keepends=True):
        count, size = count + 1, size + len(row)
        if count == most or (most_bytes and size >= most_bytes and (kind == "csv" or row.endswith("\n"))):
            expected.append(count)
            count = size = 0
    expected += [count] if count else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "_BLOCK", block)
        units = list(SOURCES[kind].split(str(path), ReadOptions(unit_samples=most, unit_bytes=most_bytes)))
    assert [unit.samples for unit in units] == expected
    assert [unit.first for unit in units] == [sum(expected[:n]) for n in range(len(expected))]
    texts = [sample.text for unit in units for sample in SOURCES[kind].read(unit)]
    assert texts == ["x" * length for length in lines]


# --- what is asked for ---


def request(folder: Path, source: Path, **changes: Any) -> Request:
    asked = Request(
        inputs=(str(source),),
        output=folder / "out",
        models=("stub:4",),
        modalities=(),
        precision="fp32",
        part_rows=100,
        options=ReadOptions(),
        version="test",
        chunking=CHUNKING,
    )
    return replace(asked, **changes)


def test_the_same_output_is_refused_to_other_chunks(tmp_path: Path) -> None:
    source, more = tmp_path / "a.txt", tmp_path / "b.txt"
    source.write_text("a text\n")
    more.write_text("another text\n")
    info = prepare(request(tmp_path, source)).info
    assert info.model.chunking == CHUNKING
    for chunking in (None, Chunking(tokens=16), Chunking(tokens=17, overlap=4)):
        with pytest.raises(InputError) as caught:
            prepare(request(tmp_path, more, chunking=chunking))
        assert caught.value.code == "other_run"
        assert "--chunk-tokens 16 --chunk-overlap 4 there" in caught.value.message
    assert prepare(request(tmp_path, more)).added == 1


def test_the_same_texts_without_chunks_are_another_run_on_another_queue(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("a text\n")
    cut, whole = (
        prepare(request(tmp_path, source)).info,
        prepare(request(tmp_path, source, chunking=None, output=tmp_path / "whole")).info,
    )
    assert cut.model.queue_key != whole.model.queue_key
    record = RunRecord(run="0123456789abcdef", output="/o", model=cut.model, units=1)
    assert RunRecord.from_json(record.to_json()) == record


def test_long_texts_make_smaller_units_where_they_are_cut(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    with source.open("w") as file:
        for _ in range(9):
            file.write("word " * 300_000 + "\n")
    assert prepare(request(tmp_path, source)).info.units == 3
    assert prepare(request(tmp_path, source, chunking=None, output=tmp_path / "whole")).info.units == 1


def test_images_are_not_cut(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(b"\xff\xd8")
    (folder / "a.txt").write_text("its caption")
    with pytest.raises(InputError) as caught:
        prepare(request(tmp_path, folder))
    assert caught.value.code == "chunks_of_images"
    assert "--modality text" in caught.value.next_step
    assert prepare(request(tmp_path, folder, modalities=("text",))).info.model.chunking == CHUNKING


@pytest.mark.parametrize(("tokens", "overlap"), [(None, 5), (20, 11)])
def test_an_overlap_needs_chunks_that_are_twice_as_long(tokens: int | None, overlap: int) -> None:
    from embq.app.verbs.run import run

    context = run.make_context(
        "run",
        ["in.txt", "-o", "out", "-m", "stub:4", "--chunk-overlap", str(overlap)]
        + (["--chunk-tokens", str(tokens)] if tokens else []),
    )
    with pytest.raises(UsageError, match="--chunk-overlap"):
        request_from(("in.txt",), context.params)
