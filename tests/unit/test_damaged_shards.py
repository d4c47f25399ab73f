"""`--damaged keep`: samples before the damage are rows, one failure stands for the rest, and a retry adds it."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from embq.core.errors import InputError, SourceError
from embq.core.run.standing_failures import standing_failures
from embq.core.units import DAMAGED_REST, Retry, Sample, Unit
from embq.producer.retry import FailureFilter, retry
from embq.sources.damaged import digest_in, with_samples
from embq.sources.formats.tar import TarSource
from embq.sources.formats.tar_headers import BLOCK, parse_members
from embq.sources.reader_options import ReadOptions
from embq.writer.accept import Rejected
from tests.support.archives import tar_of
from tests.support.outputs.build import build, go_on
from tests.support.second_reader.checks import verify
from tests.support.second_reader.samples import reread
from tests.unit.test_tar import block

KEEP = ReadOptions(damaged="keep")
MEMBERS = [
    ("a.jpg", b"A" * 600),
    ("a.txt", b"first"),
    ("b.jpg", b""),
    ("readme", b"no key"),
    ("c.jpg", b"C" * 512),
    ("c.json", b'{"n": 1}'),
    ("d.jpg", b"D"),
]
DATA = tar_of(MEMBERS)


def read_kept(path: Path, data: bytes) -> tuple[list[Sample], Sample | str]:
    """The kept samples, and the failure for the rest, "" for none, or the code of the shard's failure."""
    path.write_bytes(data)
    (unit,) = TarSource().split(str(path), KEEP)
    try:
        samples = list(TarSource().read(unit))
    except SourceError as error:
        return [], error.code
    if samples and samples[-1].error is not None and samples[-1].error[0] == DAMAGED_REST:
        return samples[:-1], samples[-1]
    return samples, ""


def ended_before(length: int) -> int:
    """Samples of DATA of which the first `length` bytes tell that they ended, counted from the headers."""
    starts = {member.name: member.at for member in parse_members(DATA, "s.tar")}
    firsts = [starts[name] for name in ("b.jpg", "c.jpg", "d.jpg")]
    end = len(DATA) - 2 * BLOCK
    return 4 if length >= end + BLOCK else sum(first + BLOCK <= length for first in firsts)


def test_a_shard_cut_at_any_byte_keeps_what_ended_before_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    whole, _ = read_kept(path, DATA)
    assert [sample.key for sample in whole] == list("abcd")
    step = [*range(0, len(DATA), 37), *(at + more for at in range(0, len(DATA), BLOCK) for more in (-1, 0, 1) if at)]
    for length in sorted(set(step)):
        kept, rest = read_kept(path, DATA[:length])
        count = ended_before(length)
        if length in (len(DATA) - BLOCK, len(DATA)):
            assert (len(kept), rest) == (4, "")
            continue
        assert kept == whole[:count], length
        if not count:
            assert rest in ("shard_truncated", "shard_no_end_marker")
            continue
        assert isinstance(rest, Sample)
        assert rest.ordinal == count
        start, stop, _ = re.fullmatch(r"s\.tar:bytes ([0-9]+)-([0-9]+):([0-9a-f]{32})", rest.key).groups()  # type: ignore[union-attr]
        assert int(stop) == length
        assert rest.error is not None
        assert f"{length - int(start):,} bytes are not read" in rest.error[1]
        second = list(islice(reread(unit_of(path), images=True), count))
        assert [(one.key, one.image, one.text) for one in second] == [(s.key, s.image, s.text) for s in kept]


def unit_of(path: Path) -> Unit:
    (unit,) = TarSource().split(str(path), KEEP)
    return unit


def damaged(position: int, change: Callable[[bytes], bytes] = lambda byte: bytes([byte[0] ^ 0x40])) -> bytes:
    return DATA[:position] + change(DATA[position : position + 1]) + DATA[position + 1 :]


@pytest.mark.parametrize(
    ("data", "keys", "rest"),
    [
        (damaged(parse_members(DATA, "")[4].at), "a", True),  # the header of c.jpg: b may have had more members
        (damaged(parse_members(DATA, "")[5].at + 3), "ab", True),  # of c.json
        (damaged(parse_members(DATA, "")[0].at), "", False),
        (DATA[: -2 * BLOCK] + bytes(BLOCK) + b"x" * BLOCK, "abc", True),  # a header of zeros may have been d's next
        (DATA + bytes(100), "abcd", True),
        (DATA[:-100], "abcd", True),
        (tar_of([("a.jpg", b"1"), ("b.jpg", b"2"), ("a.txt", b"t" * 600)])[: -3 * BLOCK], "", False),  # a is cut
        (tar_of([("a.jpg", b"1"), ("b.jpg", b"2"), ("a.txt", b"t")])[: -2 * BLOCK], "", False),
        (tar_of([("a.jpg", b"1"), ("a.jpg", b"2"), ("b.txt", b"t" * 600)])[: -3 * BLOCK], "aa", True),
        (tar_of([("a.jpg", b"1")])[: -2 * BLOCK] + block("x", b"x", b"9 path=b\n")[:-1], "", False),
    ],
)
def test_damage_elsewhere_keeps_the_samples_of_which_no_member_can_be_missing(
    tmp_path: Path, data: bytes, keys: str, rest: bool
) -> None:
    kept, failure = read_kept(tmp_path / "s.tar", data)
    assert "".join(sample.key for sample in kept) == keys
    assert isinstance(failure, Sample) == rest


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_shard_that_is_cut_keeps_what_comes_out_and_one_with_a_wrong_checksum_nothing(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    content = tar_of([(f"{n:03}.jpg", bytes((n * n + k * 31) % 256 for k in range(997))) for n in range(400)])
    packed, path = compress(content), tmp_path / "s.tar.gz"
    kept, rest = read_kept(path, packed[:-3])
    assert len(kept) in (399, 400) or compress is bz2.compress
    kept, rest = read_kept(path, packed[: len(packed) // 2])
    if kept:  # bzip2 and xz give nothing before a block is whole
        assert isinstance(rest, Sample)
        assert re.fullmatch(r"s\.tar\.gz:bytes [0-9]+-:[0-9a-f]{32}", rest.key)
        second = list(islice(reread(unit_of(path), images=True), len(kept)))
        assert [(one.key, one.image) for one in second] == [(sample.key, sample.image) for sample in kept]
    assert kept or compress is not gzip.compress
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 0x10
    kept, code = read_kept(path, bytes(flipped))
    assert not kept
    assert code in ("source_damaged", "source_truncated")


def test_without_the_option_a_damaged_shard_fails_whole_and_its_unit_is_as_it_always_was(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(DATA[: -BLOCK - 1])
    (unit,) = TarSource().split(str(path), ReadOptions())
    assert unit.options == ()
    assert "damaged" not in ReadOptions().record()
    with pytest.raises(SourceError) as caught:
        list(TarSource().read(unit))
    assert caught.value.code == "shard_truncated"
    assert KEEP.record()["damaged"] == "keep"
    assert ReadOptions.from_record(tuple(KEEP.record().items())) == KEEP


# --- runs ---


def run_of(folder: Path, data: bytes) -> tuple[Path, Path]:
    shard = folder / "s.tar"
    shard.write_bytes(data)
    return build(folder / "out", [shard], modalities=("image",), damaged="keep"), shard


def state_of(root: Path) -> tuple[int, int, list[tuple[int | None, str]]]:
    """Rows, failures, and (ordinal, code) of those that stand; the run is verified."""
    report = verify(root)
    assert not report.violations, report.violations
    tables = list(standing_failures(root))
    found = [(row["ordinal"], row["code"]) for table in tables for row in table.to_pylist()]
    return report.rows, report.failures, found


def retried(root: Path) -> None:
    retry(root, FailureFilter(), version="0")
    go_on(root)


CUT = parse_members(DATA, "")[5].at + 600
"""In c.json: a and b are kept."""


def test_the_kept_samples_are_rows_and_a_retry_of_the_mended_shard_adds_the_rest_once(tmp_path: Path) -> None:
    root, shard = run_of(tmp_path, DATA[:CUT])
    assert state_of(root) == (2, 1, [(2, DAMAGED_REST)])

    retried(root)  # as damaged as before
    assert state_of(root) == (2, 1, [(2, DAMAGED_REST)])

    shard.write_bytes(DATA[: parse_members(DATA, "")[6].at + BLOCK])  # c is whole now, d is cut
    retried(root)
    assert state_of(root) == (3, 1, [(3, DAMAGED_REST)])

    shard.write_bytes(DATA[: CUT - BLOCK])  # worse than it was
    retried(root)
    assert state_of_without_source(root) == (3, 1, [(3, DAMAGED_REST)])

    shard.unlink()
    with pytest.raises(InputError, match="not there"):
        retry(root, FailureFilter(), version="0")

    shard.write_bytes(DATA)
    retried(root)
    assert state_of(root) == (4, 0, [])
    assert retry(root, FailureFilter(), version="0").units == 0


def state_of_without_source(root: Path) -> tuple[int, int, list[tuple[int | None, str]]]:
    """As `state_of`, where the second reading cannot give the rows that were kept of an earlier version."""
    report = verify(root)
    found = [(row["ordinal"], row["code"]) for table in standing_failures(root) for row in table.to_pylist()]
    return report.rows, report.failures, found


@pytest.mark.parametrize(
    "other",
    [
        tar_of([("a.jpg", b"other" * 120), *MEMBERS[1:]]),
        tar_of([*MEMBERS, ("b.txt", b"late")]),  # one that was kept goes on behind the damage
        tar_of(MEMBERS[:2]),
    ],
)
def test_a_shard_whose_kept_samples_are_others_now_is_not_mixed_with_them(tmp_path: Path, other: bytes) -> None:
    root, shard = run_of(tmp_path, DATA[:CUT])
    shard.write_bytes(other)
    retried(root)
    assert state_of_without_source(root) == (2, 1, [(2, "source_changed")])

    shard.write_bytes(DATA)  # the failure of a retry that failed as a whole is retried as that rest again
    retried(root)
    assert state_of(root) == (4, 0, [])


def test_single_samples_and_the_rest_are_retried_apart(tmp_path: Path) -> None:
    members = [("a.txt", b"1"), ("b.txt", b"\xff"), ("c.txt", b"3"), ("d.txt", b"\xfe"), ("e.txt", b"5")]
    data = tar_of(members)
    shard = tmp_path / "s.tar"
    shard.write_bytes(data[: parse_members(data, "")[3].at + BLOCK])
    root = build(tmp_path / "out", [shard], modalities=("text",), damaged="keep")
    assert state_of(root) == (2, 2, [(1, "text_not_utf8"), (3, DAMAGED_REST)])

    shard.write_bytes(data)
    retry(root, FailureFilter(codes=(DAMAGED_REST,)), version="0")
    go_on(root)
    assert state_of(root) == (3, 2, [(1, "text_not_utf8"), (3, "text_not_utf8")])

    shard.write_bytes(tar_of([(name, b"m" if name in ("b.txt", "d.txt") else one) for name, one in members]))
    retried(root)
    assert state_of(root) == (5, 0, [])


def test_the_rest_of_a_shard_is_described_and_other_text_is_refused() -> None:
    again = Retry(unit=0, failed=0, record=1, attempts=1, replaces=1, only="12+", keys="a" * 32)
    unit = Unit(kind="tar", source="s.tar", retry=again)
    assert Unit.from_description(unit.describe()) == unit
    assert (unit.first_ordinal, unit.selected, unit.expected, again.ordinals, again.lifts) == (12, None, None, [12], 0)
    for text in ("1-2+", "+", "1,2+", "1++", "-1+"):
        with pytest.raises(ValueError, match=r"."):
            replace(again, only=text)
    assert digest_in("s.tar:bytes 1-2:" + "ab" * 16 + "#") == "ab" * 16
    assert not digest_in("s.tar:bytes 1-2:xy")


@pytest.mark.parametrize("ordinals", [(2, 3), (3, 2), (2, 2)])
def test_the_writer_refuses_a_result_with_samples_behind_its_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ordinals: tuple[int, int]
) -> None:
    root, _ = run_of(tmp_path, DATA[:CUT])
    retry(root, FailureFilter(), version="0")
    rest = Sample(ordinal=ordinals[0], key="rest", error=(DAMAGED_REST, "cut"))
    other = Sample(ordinal=ordinals[1], key="d", image=b"D")
    monkeypatch.setattr("tests.support.outputs.build.read", lambda unit, roots, texts: iter([rest, other]))
    if ordinals == (3, 2):
        go_on(root)
        return
    with pytest.raises(Rejected, match="behind the damage"):
        go_on(root)


@pytest.mark.parametrize(
    ("name", "content", "samples"),
    [
        ("s_stats.json", '{"count": 9, "successes": 4, "status_dict": {}}', "4"),
        ("sizes.json", '{"s.tar": 10000, "t.tar": 1}', "10,000"),
        ("s.idx", "v1.2 4\njpg 512 600 a.jpg\n", "4"),
        ("s.idx", "512 600", ""),
        ("s_stats.json", '{"successes": -1}', ""),
        ("s_stats.json", "x" * 100, ""),
        ("sizes.json", '{"t.tar": 1}', ""),
    ],
)
def test_a_failure_of_a_shard_has_the_samples_that_a_file_beside_it_tells(
    tmp_path: Path, name: str, content: str, samples: str
) -> None:
    (tmp_path / name).write_text(content)
    told = f"; {name} says that it has {samples} samples" if samples else ""
    _, rest = read_kept(tmp_path / "s.tar", DATA[:CUT])
    assert isinstance(rest, Sample)
    assert rest.error is not None
    assert f"whole members){told}; 2 samples" in rest.error[1]
    (unit,) = TarSource().split(str(tmp_path / "s.tar"), ReadOptions())
    with pytest.raises(SourceError) as caught:
        list(TarSource().read(unit))
    assert caught.value.message.endswith(told or "whole members)")
    (tmp_path / "s.tar").unlink()
    with pytest.raises(SourceError) as caught:
        list(TarSource().read(unit))
    assert (caught.value.code, caught.value.message.endswith(told)) == ("source_missing", True)


def test_sizes_of_a_folder_are_read_once_for_all_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def beside(folder: str, name: str) -> bytes:
        asked.append(name)
        if name != "sizes.json":
            raise SourceError("it is not there", code="source_missing")
        return b'{"a.tar": 3, "b.tar": 4}'

    monkeypatch.setattr("embq.sources.damaged._beside", beside)
    told = [with_samples(SourceError("cut", code="shard_truncated"), f"https://host/once/{one}.tar") for one in "ab"]
    assert [one.message.rpartition(" that it has ")[2] for one in told] == ["3 samples", "4 samples"]
    assert asked == ["a_stats.json", "sizes.json", "b_stats.json"]


def test_files_beside_a_url_are_asked_for_without_its_query(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def missing(folder: str, name: str) -> bytes:
        asked.append(folder + name)
        raise SourceError("it is not there", code="source_missing")

    monkeypatch.setattr("embq.sources.damaged._beside", missing)
    error = SourceError("cut", code="shard_truncated")
    assert with_samples(error, "https://host/d/s.tar?download=1").message == "cut"
    assert asked == [f"https://host/d/{name}" for name in ("s_stats.json", "sizes.json", "s.idx")]
