"""Failed samples are retried: each kind of input is mended in its place and accounted for to the last key."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from embq.app.status.run_monitor import RunMonitor
from embq.core.errors import InputError, TryLaterError, UsageError
from embq.core.models import Chunking
from embq.core.queue.result_stream import Entry
from embq.core.rows.results import failure_batch
from embq.core.run.checkpoint import committed
from embq.core.run.commit_log import CommitLog
from embq.core.run.control import Control, save_control
from embq.core.run.layout import Layout
from embq.core.run.manifest import Manifest
from embq.core.run.reader import row_tables
from embq.core.run.run_info import load_run
from embq.core.run.standing_failures import standing_failures
from embq.core.units import UNIT_SPEC_MAX_BYTES, Failure, Unit, key_digest
from embq.producer.additions import PlanRecord, append_generation
from embq.producer.enqueue import Planned, prepare
from embq.producer.retry import FailureFilter, RetryResult, preview, retry
from embq.sources.kinds import SOURCES, kind_of
from embq.writer.accept import Accepted, Acceptor
from embq.writer.commit import Committer
from tests.support.outputs.build import build, go_on, request_of, rewrite, write_folder, write_tar
from tests.support.picture_files import encoded
from tests.support.second_reader.checks import verify

BAD = frozenset({1, 4, 5, 9})
"""Samples that cannot be used until they are mended, of ten in units of three or four."""

SAMPLES = 10


def picture(number: int) -> bytes:
    """A tiny image of its own."""
    return encoded(Image.new("RGB", (2, 2), (number, 7, 9)), "PNG")


def folder(root: Path, bad: frozenset[int]) -> Path:
    content = {f"p{n}.png": b"no image" if n in bad else picture(n) for n in range(SAMPLES)}
    return write_folder(root / "photos", content)


def shard(root: Path, bad: frozenset[int]) -> Path:
    members = [(f"s{n}.png", b"no image" if n in bad else picture(n)) for n in range(SAMPLES)]
    return write_tar(root / "shard.tar", members)


def jsonl(root: Path, bad: frozenset[int]) -> Path:
    """One of the bad lines is blank, so that its id is not known until it is mended."""
    good = [json.dumps({"id": f"k{n}", "text": f"text {n}"}) for n in range(SAMPLES)]
    cut = [json.dumps({"id": f"k{n}"}) if n != 4 else "" for n in range(SAMPLES)]
    (root / "t.jsonl").write_text("".join(f"{cut[n] if n in bad else good[n]}\n" for n in range(SAMPLES)))
    return root / "t.jsonl"


def lines(root: Path, bad: frozenset[int]) -> Path:
    (root / "t.txt").write_text("".join("\n" if n in bad else f"text {n}\n" for n in range(SAMPLES)))
    return root / "t.txt"


def delimited(root: Path, bad: frozenset[int]) -> Path:
    with open(root / "t.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["id", "text"])
        table.writerows([f"k{n}"] if n in bad else [f"k{n}", f"text {n}"] for n in range(SAMPLES))
    return root / "t.csv"


def parquet(root: Path, bad: frozenset[int]) -> Path:
    texts = ["" if n in bad else f"text {n}" for n in range(SAMPLES)]
    pq.write_table(pa.table({"id": [f"k{n}" for n in range(SAMPLES)], "text": texts}), root / "t.parquet")
    return root / "t.parquet"


def packed(root: Path, bad: frozenset[int]) -> Path:
    path = root / "t.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl(root, bad).read_bytes()))
    return path


Write = Callable[[Path, frozenset[int]], Path]
KINDS: list[Write] = [folder, shard, jsonl, lines, delimited, parquet, packed]


def test_every_kind_of_input_is_mended_but_arrow_which_is_read_as_parquet_is(tmp_path: Path) -> None:
    assert {kind_of(str(write(tmp_path, BAD))) or "files" for write in KINDS} == set(SOURCES) - {"arrow"}


def made(root: Path, source: Path, **options: object) -> Path:
    """A finished run."""
    image = source.is_dir() or source.suffix == ".tar"
    return build(
        root / "out",
        [source],
        model="stub:8?decode=1",
        modalities=("image",) if image else ("text",),
        **options,  # type: ignore[arg-type]
    )


def again(root: Path, *, codes: tuple[str, ...] = ()) -> RetryResult:
    return retry(root, FailureFilter(codes=codes), version="0")


def retried(root: Path) -> RetryResult:
    """Retry every failure, to the end of the run."""
    planned = again(root)
    go_on(root)
    return planned


def standing(root: Path) -> list[dict[str, object]]:
    return [row for table in standing_failures(root) for row in table.to_pylist()]


def keys(root: Path) -> list[str]:
    return [key for table in row_tables(root, ["key"]) for key in table["key"].to_pylist()]


def account(root: Path) -> tuple[int, int, int]:
    """Rows, failures and quarantined units by the log, by its last record, and by a watch, which agree."""
    _, state = committed(root)
    totals = list(CommitLog(Layout(root)).read())[-1].totals
    preview = RunMonitor(root, None).poll()
    assert (preview.rows, preview.failures, preview.quarantined) == (state.rows, state.failures, state.quarantined)
    assert totals == state.totals()
    return state.rows, state.failures, state.quarantined


def assert_verified(root: Path) -> None:
    report = verify(root)
    assert report.violations == ()
    assert (report.rows, report.failures, report.quarantined) == account(root)
    assert report.samples_checked >= report.rows
    assert report.vectors_recomputed == report.rows
    assert verify(root, mode="quick").violations == ()


def enqueued(root: Path, source: Path) -> Planned:
    """The same inputs planned for the same output once more."""
    info = load_run(root)
    return prepare(request_of(root, source, models=(info.model.spec,), modalities=info.model.modalities))


# --- mended and done again ---


@pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__)
def test_what_was_mended_in_its_place_becomes_rows_and_nothing_else_is_done_again(tmp_path: Path, write: Write) -> None:
    out = made(tmp_path, write(tmp_path, BAD))
    assert account(out) == (6, 4, 0)
    before = keys(out)

    source = write(tmp_path, frozenset())
    planned = retried(out)

    assert planned.failures == 4
    assert account(out) == (SAMPLES, 0, 0)
    assert keys(out)[:6] == before
    assert len(set(keys(out))) == SAMPLES
    assert standing(out) == []
    assert_verified(out)
    assert (load_run(out).samples or SAMPLES) == SAMPLES
    assert enqueued(out, source).added == 0


@pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__)
def test_what_is_mended_bit_by_bit_is_retried_as_often_as_it_takes(tmp_path: Path, write: Write) -> None:
    out = made(tmp_path, write(tmp_path, BAD))
    for attempt, left in enumerate((BAD, frozenset({4, 9}), frozenset({9}), frozenset()), start=2):
        source = write(tmp_path, left)
        retried(out)
        assert account(out) == (SAMPLES - len(left), len(left), 0)
        assert [row["attempt"] for row in standing(out)] == [attempt] * len(left)
        assert_verified(out)
        assert enqueued(out, source).added == 0
    assert again(out).units == 0


def test_two_samples_of_one_unit_may_be_at_different_attempts(tmp_path: Path) -> None:
    out = made(tmp_path, jsonl(tmp_path, BAD))
    assert again(out, codes=("missing_text",)).samples == {"missing_text": 3}
    go_on(out)
    assert Counter(row["attempt"] for row in standing(out)) == {1: 1, 2: 3}
    jsonl(tmp_path, frozenset())
    retried(out)
    assert account(out) == (SAMPLES, 0, 0)
    assert_verified(out)


def test_a_source_that_was_not_mended_gives_the_same_failures_once_more(tmp_path: Path) -> None:
    out = made(tmp_path, shard(tmp_path, BAD))
    first = [(row["key"], row["code"], row["message"]) for row in standing(out)]
    retried(out)
    assert [(row["key"], row["code"], row["message"]) for row in standing(out)] == first
    assert {row["attempt"] for row in standing(out)} == {2}
    assert account(out) == (6, 4, 0)
    assert_verified(out)


@pytest.mark.parametrize("format_", ["hdf5", "npy", "arrow"])
def test_rows_of_a_retry_stand_in_parts_of_every_format(tmp_path: Path, format_: str) -> None:
    out = made(tmp_path, shard(tmp_path, BAD), format=format_)
    shard(tmp_path, frozenset())
    retried(out)
    assert account(out) == (SAMPLES, 0, 0)
    assert_verified(out)


def test_failures_of_before_attempts_were_counted_are_first_attempts(tmp_path: Path) -> None:
    out = made(tmp_path, shard(tmp_path, BAD))
    rewrite(out, lambda table: table.drop_columns(["attempt"]), "failures")
    assert {row["attempt"] for row in standing(out)} == {1}
    retried(out)
    assert {row["attempt"] for row in standing(out)} == {2}
    assert_verified(out)


# --- what is chosen ---


def test_repeating_the_command_adds_nothing_for_what_is_under_way(tmp_path: Path) -> None:
    out = made(tmp_path, folder(tmp_path, BAD))
    units = load_run(out).units
    assert preview(out, FailureFilter()).failures == 4
    assert load_run(out).units == units
    first = again(out)
    second = again(out)
    assert (second.failures, second.under_way, second.units) == (0, 4, 0)
    assert load_run(out).units == units + first.units
    assert account(out) == (6, 4, 0), "planning alone changes no count"
    go_on(out)
    assert again(out).under_way == 0


def test_only_the_codes_and_units_that_are_named_are_done_again(tmp_path: Path) -> None:
    out = made(tmp_path, jsonl(tmp_path, BAD))
    unit = Manifest(Layout(out)).unit_id(1)
    assert preview(out, FailureFilter(codes=("empty_text",))).samples == {"empty_text": 1}
    assert preview(out, FailureFilter(units=(unit,))).samples == {"empty_text": 1, "missing_text": 1}
    assert preview(out, FailureFilter(units=(unit,), codes=("missing_text",))).samples == {"missing_text": 1}
    assert again(out, codes=("crash",)).units == 0
    with pytest.raises(UsageError, match="has no unit abc"):
        retry(out, FailureFilter(units=("abc",)), version="0")


@pytest.mark.parametrize("state", ["paused", "cancelled"])
def test_a_run_that_rests_is_not_woken_by_a_retry(tmp_path: Path, state: str) -> None:
    out = made(tmp_path, folder(tmp_path, BAD), only=2)
    save_control(Layout(out), Control(state=state))
    with pytest.raises(TryLaterError, match=f"is {state}; nothing was added") as error:
        again(out)
    assert "embq resume" in error.value.next_step


def test_failures_of_a_run_that_is_not_finished_are_retried_with_the_rest_of_it(tmp_path: Path) -> None:
    out = made(tmp_path, folder(tmp_path, BAD), only=2)
    folder(tmp_path, BAD - {1})
    assert again(out).failures == 3
    go_on(out)
    assert account(out) == (7, 3, 0)
    assert_verified(out)


# --- whole units ---


def test_a_shard_that_was_cut_is_read_as_a_whole_once_it_was_copied_again(tmp_path: Path) -> None:
    path = shard(tmp_path, BAD)
    content = path.read_bytes()
    path.write_bytes(content[:3000])
    out = made(tmp_path, path)
    assert account(out) == (0, 1, 1)

    assert again(out).whole_units == {"shard_truncated": 1}
    go_on(out)
    assert account(out) == (0, 1, 1), "it was not mended"
    assert [row["attempt"] for row in standing(out)] == [2]
    assert_verified(out)

    path.write_bytes(content)
    retried(out)
    assert account(out) == (6, 4, 0)
    assert_verified(out)

    shard(tmp_path, frozenset())
    assert again(out).samples == {"unidentified": 4}
    go_on(out)
    assert account(out) == (SAMPLES, 0, 0)
    assert_verified(out)
    assert enqueued(out, path).added == 0


def test_a_table_that_could_not_be_cut_into_units_becomes_the_units_that_it_would_have_been(tmp_path: Path) -> None:
    good = parquet(tmp_path, frozenset()).rename(tmp_path / "good.parquet")
    path = parquet(tmp_path, frozenset({7}))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    out = build(tmp_path / "out", [good, path], modalities=("text",))
    assert account(out) == (SAMPLES, 1, 1)

    path.write_bytes(content)
    planned = retried(out)
    assert (planned.units, planned.whole_units) == (4, {"table_damaged": 1})
    assert account(out) == (2 * SAMPLES - 1, 1, 0)
    assert_verified(out)

    parquet(tmp_path, frozenset())
    retried(out)
    assert account(out) == (2 * SAMPLES, 0, 0)
    assert_verified(out)
    assert enqueued(out, path).added == 0


def test_a_folder_that_was_away_is_done_as_a_whole(tmp_path: Path) -> None:
    source = folder(tmp_path, BAD)
    out = made(tmp_path, source, only=0)
    source.rename(tmp_path / "elsewhere")
    go_on(out)
    assert account(out) == (0, 4, 4)
    with pytest.raises(InputError, match=r"not there any more: .*photos; nothing was added"):
        again(out)
    (tmp_path / "elsewhere").rename(source)
    assert again(out).whole_units == {"source_missing": 4}
    go_on(out)
    assert account(out) == (6, 4, 0)
    assert_verified(out)


# --- what was not mended but changed ---


def test_a_shard_whose_members_moved_gives_no_row_and_a_failure_for_each_key(tmp_path: Path) -> None:
    out = made(tmp_path, shard(tmp_path, BAD))
    moved = [(f"s{n}.png", picture(n)) for n in (0, 2, 1, *range(3, SAMPLES))]
    write_tar(tmp_path / "shard.tar", moved)
    retried(out)
    assert account(out) == (6, 4, 0)
    assert sorted((row["key"], row["code"], row["attempt"]) for row in standing(out)) == [
        (f"s{n}.png".removesuffix(".png"), "source_changed", 2) for n in sorted(BAD)
    ]
    shard(tmp_path, frozenset())
    retried(out)
    assert account(out) == (SAMPLES, 0, 0)
    assert_verified(out)


def test_a_shard_that_has_more_samples_than_before_was_not_mended(tmp_path: Path) -> None:
    out = made(tmp_path, shard(tmp_path, BAD))
    write_tar(tmp_path / "shard.tar", [(f"s{n}.png", picture(n)) for n in range(SAMPLES + 1)])
    retried(out)
    assert {row["code"] for row in standing(out)} == {"source_changed"}
    assert account(out) == (6, 4, 0)


def test_a_file_with_fewer_lines_is_refused_and_nothing_is_added(tmp_path: Path) -> None:
    out = made(tmp_path, lines(tmp_path, BAD))
    units = load_run(out).units
    (tmp_path / "t.txt").write_text("text\n" * 7)
    with pytest.raises(InputError, match=r"t\.txt \(samples 10 to 10 are no unit of it any more\); nothing was added"):
        again(out)
    assert load_run(out).units == units
    assert list(Layout(out).manifest.glob("gen-*")) == []


def test_files_that_are_gone_are_named_and_the_others_are_retried(tmp_path: Path) -> None:
    out = made(tmp_path, folder(tmp_path, BAD))
    folder(tmp_path, frozenset())
    (tmp_path / "photos/p4.png").unlink()
    planned = again(out)
    assert planned.missing == (str(tmp_path / "photos/p4.png"),)
    go_on(out)
    assert account(out) == (9, 1, 0)
    assert [(row["key"], row["attempt"]) for row in standing(out)] == [("p4.png", 1)]


def test_a_mended_source_that_changes_again_is_refused_as_an_input(tmp_path: Path) -> None:
    out = made(tmp_path, lines(tmp_path, BAD))
    source = lines(tmp_path, frozenset())
    retried(out)
    source.write_text("another text\n" * SAMPLES)
    with pytest.raises(InputError, match="inputs are not what was planned"):
        enqueued(out, source)


# --- units and texts of odd sizes ---


def test_more_ordinals_than_one_description_holds_make_several_units(tmp_path: Path) -> None:
    count = 24_000
    (tmp_path / "t.txt").write_text("text\n\n" * (count // 2))
    out = build(tmp_path / "out", [tmp_path / "t.txt"], unit_samples=count)
    (tmp_path / "t.txt").write_text("text\nmore\n" * (count // 2))
    planned = again(out)
    assert planned.units == 2
    for _, unit in Manifest(Layout(out)).retries():
        assert len(json.dumps(unit.describe())) <= UNIT_SPEC_MAX_BYTES
    go_on(out)
    assert account(out) == (count, 0, 0)
    assert_verified(out)


def test_a_text_that_failed_as_a_whole_is_cut_again_and_a_single_chunk_is_left_alone(tmp_path: Path) -> None:
    out, path = tmp_path / "out", jsonl(tmp_path, frozenset())
    info = prepare(request_of(out, path, modalities=("text",), chunking=Chunking(tokens=16, overlap=0))).info
    log = CommitLog(Layout(out))
    committer = Committer(Layout(out), info, log, log.replay(info.units), writer="w", version="0")
    committer.take_epoch()
    whole, *chunks = [
        Failure(ordinal=n, key=key, code="empty_text", message="m") for n, key in ((0, "k0#"), (1, "k1#0"), (1, "k1#1"))
    ]
    failures = pa.Table.from_batches([failure_batch([whole, *chunks])])
    unit_id = Manifest(Layout(out)).unit_id(0)
    committer.commit(
        [
            Accepted(
                entry="0-1",
                u=0,
                unit_id=unit_id,
                token="t",
                rows=pa.table({}),
                failures=failures,
                quarantined="",
                staged="",
                bytes=0,
            )
        ]
    )

    planned = again(out)

    assert (planned.failures, planned.chunks) == (1, 2)
    ((_, unit),) = Manifest(Layout(out)).retries()
    assert unit.retry is not None
    assert (unit.retry.only, unit.retry.keys) == ("0", key_digest(["k0"]))


# --- the record, and what a verification makes of it ---


def test_a_retry_that_its_workers_gave_up_is_a_failure_of_each_key(tmp_path: Path) -> None:
    out = made(tmp_path, shard(tmp_path, BAD))
    again(out)
    manifest = Manifest(Layout(out))
    u, unit = next(manifest.retries())
    fields = {"u": u, "token": "quarantine", "v": 4, "code": "crash", "message": "gone", "attempts": 3}
    acceptor = Acceptor(Layout(out), manifest, load_run(out), fingerprint="", widths={})

    result = acceptor.accept(Entry("1-1", {name: str(value).encode() for name, value in fields.items()}))

    assert result.quarantined == ""
    assert result.retry == unit.retry
    assert [(row["ordinal"], row["key"], row["code"], row["attempt"]) for row in result.failures.to_pylist()] == [
        (n, f"s{n}", "crash", 4) for n in sorted(BAD)
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda unit: replace(unit, retry=replace(unit.retry, record=99)), "record 99 holds no failure of sample 1"),
        (lambda unit: replace(unit, retry=replace(unit.retry, replaces=3)), "4 samples replace 3 failures"),
    ],
)
def test_a_retry_that_takes_the_place_of_what_did_not_fail_is_found(
    tmp_path: Path, change: Callable[[Unit], Unit], said: str
) -> None:
    out = made(tmp_path, shard(tmp_path, BAD))
    shard(tmp_path, frozenset())
    again(out)
    ((_, unit),) = Manifest(Layout(out)).retries()
    for path in Layout(out).manifest.glob("gen-*"):
        path.unlink()
    append_generation(
        Layout(out),
        load_run(out),
        PlanRecord(inputs=(), options=(), version="0"),
        [change(unit)],
        check=lambda _: None,
    )
    go_on(out)
    found = [one.message for one in verify(out).violations if one.invariant == "supersedes"]
    assert any(said in message for message in found), found


def test_the_same_failures_retried_by_two_units_are_found(tmp_path: Path) -> None:
    out = made(tmp_path, shard(tmp_path, BAD))
    again(out)
    ((_, unit),) = Manifest(Layout(out)).retries()
    assert unit.retry is not None
    twice = replace(unit, retry=replace(unit.retry, attempts=7))
    append_generation(
        Layout(out), load_run(out), PlanRecord(inputs=(), options=(), version="0"), [twice], check=lambda _: None
    )
    go_on(out)
    found = [one.message for one in verify(out).violations if one.invariant == "supersedes"]
    assert found == ["4 failures of unit 0 were retried before it"]
