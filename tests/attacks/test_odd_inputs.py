"""Texts, shards and pictures that users really have, and that were refused, misnamed, or failed their verification."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import save_file

from embq.app.verify.findings import Findings
from embq.app.verify.manifest import Coverage
from embq.core.errors import ModelError, SampleError, SourceError
from embq.core.models import ModelConfig
from embq.core.units import Sample, Unit
from embq.producer.enqueue import prepare
from embq.producer.retry import FailureFilter, retry
from embq.sources.kinds import SOURCES, kind_of
from embq.sources.reader_options import ReadOptions
from embq.worker.embedders.base import Embedder
from embq.worker.embedders.registry import load
from tests.support.archives import zstd
from tests.support.lazy import lazy
from tests.support.models.text import word_pieces
from tests.support.outputs.build import build, go_on, request_of
from tests.support.second_reader.checks import verify
from tests.support.second_reader.samples import reread

open_clip = lazy("open_clip")


DIM = 8
MODEL = f"stub:{DIM}"

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd.compress,
}


def lines(start: int, stop: int) -> bytes:
    return b"".join(json.dumps({"id": f"k{n}", "text": f"text {n}"}).encode() + b"\n" for n in range(start, stop))


def units_of(path: Path, options: ReadOptions | None = None) -> list[Unit]:
    kind = kind_of(str(path))
    assert kind is not None
    return list(SOURCES[kind].split(str(path), options or ReadOptions()))


def read_twice(path: Path) -> list[Sample]:
    """The samples of a file, which a second reading by other code finds as well."""
    found: list[Sample] = []
    for unit in units_of(path):
        samples, second = list(SOURCES[unit.kind].read(unit)), list(reread(unit, images=True))
        assert len(samples) == len(second)
        for sample, other in zip(samples, second, strict=True):
            assert sample.key == other.key
            assert sample.error or (sample.image, sample.text) == (other.image, other.text)
        found += samples
    return found


def refusal_of(path: Path) -> SourceError:
    """Error of a file that fails as a whole."""
    (unit,) = units_of(path)
    with pytest.raises(SourceError) as caught:
        list(SOURCES[unit.kind].read(unit))
    return caught.value


# --- what `embq verify` took for wrong ---


def test_texts_that_are_damaged_from_their_start_and_fail_whole_pass_their_verification(tmp_path: Path) -> None:
    """`verify` said that their units end at byte 0, and that the file is longer."""
    paths = []
    for suffix, compress in COMPRESS.items():
        paths.append(tmp_path / f"damaged.jsonl{suffix}")
        paths[-1].write_bytes(bytes(16) + compress(lines(0, 50))[16:])
    report = verify(build(tmp_path / "out", paths))
    assert (report.violations, report.quarantined) == ((), 4)


def as_csv(start: int, stop: int) -> bytes:
    return b"id,text\n" + b"".join(b"k%d,text %d\n" % (n, n) for n in range(start, stop))


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.csv"])
def test_what_was_mended_and_got_more_lines_passes_its_verification(name: str, tmp_path: Path) -> None:
    """After a retry plus added lines `verify` said that the coverage starts at a byte that is not 0."""
    path, out = tmp_path / name, tmp_path / "out"
    packed = COMPRESS.get(path.suffix, bytes)
    whole, more = (as_csv(0, stop) if path.suffix == ".csv" else lines(0, stop) for stop in (9, 15))
    path.write_bytes(packed(whole.replace(b"text 4", b"\xff")))
    build(out, [path])
    path.write_bytes(packed(more))
    assert retry(out, FailureFilter(), version="0").failures == 1
    go_on(out)
    assert prepare(request_of(out, path, models=(MODEL,))).added == 2
    go_on(out)
    report = verify(out)
    assert (report.violations, report.failures, report.rows) == ((), 0, 15)


def test_a_text_that_lost_its_beginning_and_was_mended_passes_its_verification(tmp_path: Path) -> None:
    path, out = tmp_path / "t.jsonl.gz", tmp_path / "out"
    path.write_bytes(bytes(9) + gzip.compress(lines(0, 9))[9:])
    build(out, [path])
    path.write_bytes(gzip.compress(lines(0, 9)))
    assert retry(out, FailureFilter(), version="0").units == 3
    go_on(out)
    report = verify(out)
    assert (report.violations, report.failures, report.rows) == ((), 0, 9)


def test_a_gap_before_lines_that_were_added_is_named(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(lines(0, 30))
    units = units_of(path, ReadOptions(unit_samples=10))

    def gaps_before(added: Unit) -> int:
        coverage = Coverage(findings := Findings(), {str(path)}, is_complete=True)
        for u, unit in enumerate(units[:2]):
            coverage.check_unit(u, replace(unit, etag="1-" + str(units[1].stop)))
        coverage.next_generation()
        coverage.check_unit(2, added)
        coverage.end()
        return findings.count

    assert gaps_before(units[2]) == 0
    assert gaps_before(replace(units[2], start=units[2].start + 1)) == 1
    assert gaps_before(replace(units[2], first=21)) == 1
    assert gaps_before(units[0]) > 0


def test_padding_between_the_streams_of_an_xz_file_is_no_end_of_it(tmp_path: Path) -> None:
    """The second reading of `verify` found fewer lines, and fewer members of a shard."""
    texts, shard = tmp_path / "t.jsonl.xz", tmp_path / "s.tar.xz"
    texts.write_bytes(lzma.compress(lines(0, 20)) + bytes(512) + lzma.compress(lines(20, 30)) + bytes(4))
    assert [s.key for s in read_twice(texts)] == [f"k{n}" for n in range(30)]
    data = archive(member(b"a.jpg", b"a") + member(b"b.jpg", b"b"))
    shard.write_bytes(lzma.compress(data[:700]) + bytes(8) + lzma.compress(data[700:]) + bytes(4))
    assert [s.key for s in read_twice(shard)] == ["a", "b"]


def test_a_slice_of_an_xz_file_is_read_a_second_time_from_anywhere_in_it(tmp_path: Path) -> None:
    """The reader that knows padding goes forwards and backwards as the others do."""
    path = tmp_path / "t.jsonl.xz"
    path.write_bytes(lzma.compress(lines(0, 20)) + bytes(512) + lzma.compress(lines(20, 60)))
    units = units_of(path, ReadOptions(unit_samples=25))
    for unit in (units[2], units[0], units[1], units[0]):
        keys = [found.key for found in reread(unit, images=False)]
        assert keys == [f"k{n}" for n in range(unit.first, unit.first + (unit.samples or 0))]


# --- shards ---


def member(
    name: bytes, data: bytes, *, magic: bytes = b"ustar\x0000", prefix: bytes = b"", flag: bytes = b"0"
) -> bytes:
    """A member as other programs write it: header with a checksum, content, and padding."""
    header = bytearray(512)
    fields = {
        0: name,
        100: b"0000644",
        124: b"%011o" % len(data),
        136: b"%011o" % 0,
        156: flag,
        257: magic,
        345: prefix,
    }
    for at, value in fields.items():
        header[at : at + len(value)] = value
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data + bytes(-len(data) % 512)


def archive(members: bytes) -> bytes:
    return members + bytes(1024)


def pax(flag: bytes, keyword: bytes, value: bytes = b"") -> bytes:
    record = b" %b=%b\n" % (keyword, value)
    length = len(record) + (1 if len(record) < 9 else 2)
    return member(b"pax", b"%d" % length + record, flag=flag)


def test_members_are_named_as_their_headers_say(tmp_path: Path) -> None:
    """`verify` read GNU tar's times, and what stands in old headers, as the beginning of names."""
    path = tmp_path / "s.tar"
    jpeg = {"gnu": b"ustar  \0", "v7": b""}
    for name, magic in jpeg.items():
        path.write_bytes(archive(member(b"a.jpg", name.encode(), magic=magic, prefix=b"15300764123")))
        assert [(s.key, s.image) for s in read_twice(path)] == [("a", name.encode())]
    path.write_bytes(archive(member(b"a.jpg", b"posix", prefix=b"folder")))
    assert [s.key for s in read_twice(path)] == ["folder/a"]


@pytest.mark.parametrize("keyword", [b"path", b"size"])
def test_an_empty_pax_record_withdraws_what_a_record_before_it_says(keyword: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(archive(pax(b"x", keyword) + member(b"a.jpg", b"first") + member(b"b.jpg", b"second")))
    assert [(s.key, s.image) for s in read_twice(path)] == [("a", b"first"), ("b", b"second")]
    path.write_bytes(archive(pax(b"g", b"path", b"all.jpg") + pax(b"x", b"path") + member(b"a.jpg", b"first")))
    assert [(s.key, s.image) for s in read_twice(path)] == [("a", b"first")]


@pytest.mark.skipif(shutil.which("tar") is None, reason="GNU tar is not on PATH")
@pytest.mark.parametrize("form", ["gnu", "oldgnu", "pax", "ustar", "v7"])
def test_what_gnu_tar_writes_passes_its_verification(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "in" / "photos"
    folder.mkdir(parents=True)
    for n in range(3):
        (folder / f"k{n}.jpg").write_bytes(b"picture %d" % n)
        (folder / f"k{n}.txt").write_bytes(b"caption %d" % n)
    shard = tmp_path / "s.tar"
    incremental = [f"--listed-incremental={tmp_path / 'snapshot'}"] if form in ("gnu", "oldgnu") else []
    subprocess.run(["tar", f"--format={form}", *incremental, "-C", folder.parent, "-cf", shard, "photos"], check=True)
    report = verify(build(tmp_path / "out", [shard]))
    assert (report.violations, report.rows, report.vectors_recomputed) == ((), 3, 3)


# --- zstd of several frames ---


def skippable(content: bytes, number: int = 0) -> bytes:
    return struct.pack("<II", 0x184D2A50 + number, len(content)) + content


FIRST, SECOND, NOTHING = (zstd.compress(data) for data in (lines(0, 20), lines(20, 30), b""))

FRAMES = {
    "pzstd": skippable(struct.pack("<I", len(FIRST))) + FIRST + skippable(struct.pack("<I", len(SECOND))) + SECOND,
    "seekable": FIRST + SECOND + skippable(b"a table of where each frame begins" + b"\xb1\xea\x92\x8f", 14),
    "between": FIRST + skippable(b"x" * 300_000, 15) + skippable(b"", 7) + SECOND,
    "empty frames": NOTHING + FIRST + NOTHING + NOTHING + SECOND + NOTHING,
}


@pytest.mark.parametrize("kind", FRAMES)
def test_zstd_of_several_frames_is_read_as_zstd_reads_it(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(FRAMES[kind])
    assert [s.key for s in read_twice(path)] == [f"k{n}" for n in range(30)]
    if shutil.which("zstd"):
        said = subprocess.run(["zstd", "-dcq", path], check=True, capture_output=True).stdout
        assert said == lines(0, 30)


@pytest.mark.skipif(shutil.which("pzstd") is None, reason="pzstd is not on PATH")
def test_texts_and_shards_that_pzstd_compresses_pass_their_verification(tmp_path: Path) -> None:
    """Pzstd begins with a skippable frame."""
    for name, data in {"t.jsonl": lines(0, 1000), "s.tar": archive(member(b"a.jpg", b"a"))}.items():
        (tmp_path / name).write_bytes(data)
        subprocess.run(["pzstd", "-q", "--rm", "-p", "4", tmp_path / name], check=True, capture_output=True)
        report = verify(build(tmp_path / f"out-{name}", [tmp_path / f"{name}.zst"]))
        assert (report.violations, report.failures) == ((), 0)
        assert report.rows == (1000 if name == "t.jsonl" else 1)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (FIRST + skippable(b"x" * 90)[:50], "source_truncated"),
        (skippable(b"x" * 90)[:50], "source_truncated"),
        (FIRST + b"PK junk", "source_damaged"),
        (skippable(b"x") + b"junk junk", "source_damaged"),
    ],
    ids=["cut after a frame", "cut", "junk after a frame", "junk"],
)
def test_zstd_that_is_cut_or_followed_by_junk_fails_whole(data: bytes, code: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.zst"
    path.write_bytes(data)
    assert refusal_of(path).code == code


# --- what was called cut ---


@pytest.mark.parametrize("name", ["t.jsonl.xz", "t.csv.xz", "t.txt", "s.tar.xz", "s.tar"])
def test_lzma_alone_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    data = archive(member(b"a.jpg", b"a")) if ".tar" in name else b"text\n" * 500
    path.write_bytes(lzma.compress(data, format=lzma.FORMAT_ALONE))
    error = refusal_of(path)
    assert error.code == "unsupported_compression"
    assert "LZMA-alone" in error.message
    assert "xz" in error.next_step


@pytest.mark.parametrize(
    ("zeros", "code"), [(1024 + 100, "shard_trailing_data"), (10_239, "shard_trailing_data"), (700, "shard_truncated")]
)
def test_odd_padding_of_a_shard_is_named(zeros: int, code: str, tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    path.write_bytes(member(b"a.jpg", b"a") + bytes(zeros))
    error = refusal_of(path)
    assert error.code == code
    assert "end-of-archive marker" in error.message


# --- byte order marks ---

MARK = "\ufeff".encode()


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_a_byte_order_mark_is_removed_at_the_start_of_a_text_only(suffix: str, tmp_path: Path) -> None:
    packed = COMPRESS.get(suffix, bytes)
    plain, table = tmp_path / f"t.txt{suffix}", tmp_path / f"t.jsonl{suffix}"
    plain.write_bytes(packed(MARK + b"first\n" + MARK + b"second\n" + MARK))
    assert [s.text for s in read_twice(plain)] == ["first", "\ufeffsecond", "\ufeff"]
    table.write_bytes(packed(MARK + lines(0, 1) + MARK + lines(1, 2) + b'{"text": "' + MARK + b'in it"}\n'))
    assert [(s.text, s.error and s.error[0]) for s in read_twice(table)] == [
        ("text 0", None),
        (None, "bad_json"),
        ("\ufeffin it", None),
    ]


def test_a_slice_that_does_not_begin_its_file_keeps_a_byte_order_mark(tmp_path: Path) -> None:
    """The first line of a unit is the first of the file in the first unit alone."""
    path = tmp_path / "t.txt"
    path.write_bytes((MARK + b"line\n") * 4)
    read = [[s.text for s in SOURCES["lines"].read(unit)] for unit in units_of(path, ReadOptions(unit_samples=2))]
    assert read == [["line", "\ufeffline"], ["\ufeffline", "\ufeffline"]]


def test_a_byte_order_mark_in_a_table_is_part_of_its_value(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(MARK + b'"id","text"\n' + MARK + b"a," + MARK + b"one\n")
    assert [(s.key, s.text) for s in read_twice(path)] == [("\ufeffa", "\ufeffone")]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"id": ["\ufeffa"], "text": ["\ufeffone"]}), path)
    assert [(s.key, s.text) for s in read_twice(path)] == [("\ufeffa", "\ufeffone")]


def test_captions_and_metadata_of_shards_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Each is a file of its own."""
    path = tmp_path / "s.tar"
    members = member(b"a.jpg", b"a") + member(b"a.txt", MARK + b"caption") + member(b"a.json", MARK + b'{"n": 1}')
    path.write_bytes(archive(members))
    assert [(s.text, s.metadata) for s in read_twice(path)] == [("caption", '{"n":1}')]


# --- the codes of the documentation ---


def loaded_clip(folder: Path, **text: object) -> Embedder:
    """An open_clip model of texts, whose tokeniser may make other ids than it has vectors for."""
    folder.mkdir(exist_ok=True)
    text |= {"context_length": 16, "width": 32, "heads": 2, "layers": 1}
    vision = {"image_size": 32, "patch_size": 16, "head_width": 16, "layers": 1, "width": 32}
    described = {"embed_dim": 24, "vision_cfg": vision, "text_cfg": text, "custom_text": True}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": described, "preprocess_cfg": {}}))
    model = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return load(ModelConfig(spec=f"open_clip:local-dir:{folder}", modalities=("text",), precision="fp32"), "cpu")


def test_a_token_that_a_clip_model_has_no_vector_for_fails_its_text_alone(tmp_path: Path) -> None:
    tokenizer = word_pieces()
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(tmp_path)
    embedder = loaded_clip(tmp_path, hf_tokenizer_name="words", vocab_size=len(tokenizer) - 1, pool_type="first")
    texts = ["fox", "a zebra", "half \ud800 a pair"]
    good, beyond, half = embedder.prepare([Sample(ordinal=n, key=str(n), text=text) for n, text in enumerate(texts)])
    assert isinstance(beyond, SampleError)
    assert isinstance(half, SampleError)
    assert (beyond.code, half.code) == ("unknown_token", "text_not_utf8")
    assert np.isfinite(embedder.embed([good])["text"]).all()


def test_a_clip_model_that_knows_no_token_of_its_tokeniser_is_refused(tmp_path: Path) -> None:
    """Each text would fail, as the ids that begin and end it are the highest ones of the tokeniser."""
    with pytest.raises(ModelError, match="tokeniser"):
        loaded_clip(tmp_path, vocab_size=1000)
