"""The strict tar reader: a shard gives all of its samples, or an error that says where it is damaged."""

from __future__ import annotations

import bz2
import gzip
import logging
import lzma
import os
import random
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest

from embq.core.errors import SampleError, SourceError
from embq.core.units import Sample, Unit
from embq.sources.access.files import PIECE_BYTES
from embq.sources.formats.tar import TarSource, split_name
from embq.sources.formats.tar_headers import BLOCK, parse_members
from embq.sources.reader_options import ReadOptions
from embq.worker.embedders.sample_fields import image_of
from tests.support.archives import outcome_of, tar_of, zstd
from tests.support.second_reader.samples import reread

TAR = TarSource()
SAMPLES = [
    ("a.jpg", b"\xff\xd8" * 350),
    ("a.txt", b"first"),
    ("b.jpg", b""),
    ("b.json", b'{"n": 1}'),
    ("c.png", b"p" * 512),
    ("c.txt", "dritte \u00e4".encode()),
]


def block(name: str, flag: bytes, content: bytes = b"", **fields: object) -> bytes:
    """One member of any type flag: header, content and padding."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.type = flag
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % BLOCK)


END = bytes(2 * BLOCK)


def read(folder: Path, data: bytes) -> list[Sample]:
    path = folder / "shard.tar"
    path.write_bytes(data)
    (unit,) = TAR.split(str(path), ReadOptions())
    return list(TAR.read(unit))


def unit_of(folder: Path) -> Unit:
    (unit,) = TAR.split(str(folder / "shard.tar"), ReadOptions())
    return unit


def code_of(folder: Path, data: bytes) -> str:
    with pytest.raises(SourceError) as caught:
        read(folder, data)
    assert str(folder / "shard.tar") in caught.value.message
    return caught.value.code


def test_a_shard_gives_its_samples_with_caption_and_metadata(tmp_path: Path) -> None:
    a, b, c = read(tmp_path, tar_of(SAMPLES))
    assert (a.key, a.image, a.text, a.metadata) == ("a", b"\xff\xd8" * 350, "first", None)
    assert (b.key, b.image, b.text, b.metadata) == ("b", b"", None, '{"n":1}')
    assert (c.key, c.image, c.text, c.ordinal) == ("c", b"p" * 512, "dritte \u00e4", 2)


@pytest.mark.parametrize("pad", [False, True])
def test_a_shard_cut_anywhere_is_an_error_and_never_a_shorter_shard(pad: bool) -> None:
    data = tar_of(SAMPLES, pad=pad)
    whole = parse_members(data, "s.tar")
    last_data = len(tar_of(SAMPLES)) - 2 * BLOCK
    codes = set()
    for length in range(0, len(data), 64):
        if length > last_data and length % BLOCK == 0:
            assert parse_members(data[:length], "s.tar") == whole  # only zero blocks are gone
            continue
        with pytest.raises(SourceError) as caught:
            parse_members(data[:length], "s.tar")
        codes.add(caught.value.code)
        assert "byte" in caught.value.message
    assert codes == {"shard_truncated", "shard_no_end_marker", *(["shard_trailing_data"] if pad else [])}


@pytest.mark.parametrize("bit", [0x01, 0x40, 0x80])
def test_a_flipped_bit_in_any_header_byte_is_seen_or_harmless(bit: int) -> None:
    data = tar_of(SAMPLES)
    whole = parse_members(data, "s.tar")
    at = whole[2].at
    harmless = []
    for position in range(at, at + BLOCK):
        damaged = bytearray(data)
        damaged[position] ^= bit
        outcome = outcome_of(bytes(damaged))
        if outcome == whole:
            harmless.append(position - at)
        else:
            assert outcome == "shard_bad_header", position - at
    assert set(harmless) <= {154, 155}, "only the two bytes that end the checksum field may say anything"


@pytest.mark.parametrize("end", [b"", END])
def test_two_archives_in_one_file_are_an_error(tmp_path: Path, end: bytes) -> None:
    first, second = tar_of(SAMPLES[:2])[: -2 * BLOCK], tar_of(SAMPLES[2:])
    if end:
        assert code_of(tmp_path, first + end + second) == "shard_trailing_data"
    else:
        assert len(read(tmp_path, first + second)) == 3


def test_one_zero_block_at_the_end_is_enough_and_before_data_it_is_not(tmp_path: Path) -> None:
    data = tar_of(SAMPLES)
    assert len(read(tmp_path, data[:-BLOCK])) == 3
    lost = data[:-BLOCK] + tar_of([("d.jpg", b"d")])
    assert code_of(tmp_path, lost) == "shard_trailing_data"


def test_an_empty_archive_has_no_samples(tmp_path: Path) -> None:
    assert read(tmp_path, tar_of([], pad=True)) == []
    assert read(tmp_path, block("folder/", b"5") + END) == []


def test_members_without_a_key_belong_to_no_sample_and_alone_they_are_an_error(tmp_path: Path) -> None:
    odd = [("README", b"r"), (".hidden", b"h"), ("__index__.json", b"{}"), ("__meta__/a.json", b"{}")]
    odd += [("__meta__", b""), ("._a.jpg", b"\0"), ("d/._a.jpg", b"\0")]
    assert [s.key for s in read(tmp_path, tar_of([*odd, ("a.jpg", b"a")]))] == ["a"]
    assert [s.key for s in read(tmp_path, tar_of([("__a.jpg", b"a"), ("d/__b__.jpg", b"a")]))] == ["__a", "d/__b__"]
    assert code_of(tmp_path, tar_of(odd)) == "shard_no_keys"


@pytest.mark.parametrize(
    ("name", "key", "extension"),
    [
        ("a.b.jpg", "a", "b.jpg"),
        ("d.x/0001.JPG", "d.x/0001", "jpg"),
        ("./a.jpg", "./a", "jpg"),
        ("d/.jpg", "d/", "jpg"),
        ("d.x/.jpg", "", ""),
        ("d.x/0001", "", ""),
        ("0001", "", ""),
        (".hidden", "", ""),
    ],
)
def test_names_split_as_webdataset_splits_them(name: str, key: str, extension: str) -> None:
    from webdataset.tariterators import base_plus_ext

    assert split_name(name) == (key, extension)
    theirs = base_plus_ext(name)
    assert (theirs[0] or "", (theirs[1] or "").lower()) == (key, extension)


def test_interleaved_members_make_whole_samples_in_order_of_their_first(tmp_path: Path) -> None:
    names = ["a.jpg", "b.jpg", "b.txt", "a.txt"]
    samples = read(tmp_path, tar_of([(name, name.encode()) for name in names]))
    assert [(s.key, s.image, s.text) for s in samples] == [("a", b"a.jpg", "a.txt"), ("b", b"b.jpg", "b.txt")]


def test_the_first_of_equal_images_wins_and_each_later_one_is_a_failure(tmp_path: Path) -> None:
    names = ["a.jpg", "a.txt", "b.jpg", "a.jpg", "a.txt", "a.JPG", "c.txt", "c.txt"]
    samples = read(tmp_path, tar_of([(name, b"%d" % at) for at, name in enumerate(names)]))
    assert [(s.key, s.error and s.error[0]) for s in samples] == [
        ("a", None),
        ("b", None),
        ("a", "duplicate_key"),
        ("a", "duplicate_key"),
        ("c", None),
        ("c", "duplicate_key"),
    ]
    assert (samples[0].image, samples[0].text) == (b"0", "1")


def test_of_several_image_formats_the_first_in_the_list_is_taken(tmp_path: Path) -> None:
    (sample,) = read(tmp_path, tar_of([("a.webp", b"w"), ("a.png", b"p"), ("a.gif", b"g")]))
    assert sample.image == b"p"


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("a.json", b"{", "bad_metadata"),
        ("a.json", b"[1]", "bad_metadata"),
        ("a.json", b"\xff", "bad_metadata"),
        ("a.json", b"[" * 100_000, "bad_metadata"),
    ],
)
def test_metadata_that_cannot_be_read_cost_no_sample(tmp_path: Path, name: str, content: bytes, code: str) -> None:
    a, b = read(tmp_path, tar_of([("a.jpg", b"a"), (name, content), ("b.jpg", b"b")]))
    assert (a.error, b.error, b.unread, bytes(a.image or b"")) == (None, None, None, b"a")
    assert a.unread is not None
    assert a.unread[0] == code


def test_metadata_survives_nan_and_half_surrogates(tmp_path: Path) -> None:
    (a,) = read(tmp_path, tar_of([("a.jpg", b"a"), ("a.json", b'{"x": NaN, "z": 1e999, "y": "\\ud800"}')]))
    assert a.metadata == '{"x":null,"z":null,"y":"\\ud800"}'


@pytest.mark.parametrize("flag", [b"1", b"2", b"3", b"4", b"6", b"S", b"Z"])
def test_links_devices_and_unknown_types_are_failures_and_never_followed(tmp_path: Path, flag: bytes) -> None:
    data = block("a.jpg", flag, linkname="/etc/passwd") + tar_of([("b.jpg", b"b")])
    a, b = read(tmp_path, data)
    assert (a.image, a.error and a.error[0]) == (None, "unsupported_member")
    assert (b.image, b.error) == (b"b", None)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_format_that_tarfile_writes_is_read(tmp_path: Path, form: int) -> None:
    names = ["a.jpg", "folder/" + "f" * 90 + "/" + "n" * 90 + ".jpg", "sub.dir/b.png"]
    names += [] if form == tarfile.USTAR_FORMAT else ["x" * 300 + ".jpg", "\u00fc" * 200 + ".jpg", "\udcff.jpg"]
    data = tar_of([(name, os.fsencode(name)) for name in names], form, uname="user", mtime=1.5)
    assert [(s.key, s.image) for s in read(tmp_path, data)] == [
        (name.rpartition(".")[0], os.fsencode(name)) for name in names
    ]


def test_pax_values_may_hold_newlines_and_pax_sizes_count(tmp_path: Path) -> None:
    def record(keyword: str, value: str) -> bytes:
        body = f" {keyword}={value}\n".encode()
        length = next(n for n in range(len(body), len(body) + 9) if n == len(body) + len(str(n)))
        return str(length).encode() + body

    extension = record("comment", "one\n25 path=wrong.jpg\n") + record("path", "right.jpg") + record("size", "3")
    info = tarfile.TarInfo("short.jpg")
    data = block("pax", b"x", extension) + info.tobuf() + b"abc" + bytes(BLOCK - 3) + END
    (sample,) = read(tmp_path, data)
    assert (sample.key, sample.image) == ("right", b"abc")


BAD_RECORDS = (b"8 path=a\n", b"path=a\n", b"99 path=a.jpg\n", b"14 size=1_000\n", b"0 a=b\n", bytes(20))
BAD_NAMES = (bytes(8), b"a\0.jpg\0", b"")


@pytest.mark.parametrize(
    ("flag", "extension"), [*((b"x", record) for record in BAD_RECORDS), *((b"L", name) for name in BAD_NAMES)]
)
def test_a_damaged_pax_record_or_long_name_fails_the_shard(tmp_path: Path, flag: bytes, extension: bytes) -> None:
    """Falling back on the short name in the header would give the sample another key."""
    assert code_of(tmp_path, block("extension", flag, extension) + tar_of([("a.jpg", b"a")])) == "shard_bad_header"


def test_an_extension_without_its_member_fails_the_shard(tmp_path: Path) -> None:
    assert code_of(tmp_path, block("long", b"L", b"name.jpg\0") + END) == "shard_bad_header"


def test_base_256_sizes_and_signed_checksums_are_read(tmp_path: Path) -> None:
    header = bytearray(block("\u00e9.jpg", b"0")[:BLOCK])
    header[124:136] = b"\x80" + (5).to_bytes(11, "big")
    header[148:156] = b" " * 8
    signed = sum(byte - 256 * (byte > 127) for byte in header)
    header[148:156] = b"%06o\0 " % signed
    (sample,) = read(tmp_path, bytes(header) + b"hello" + bytes(BLOCK - 5) + END)
    assert sample.image == b"hello"


def packed(data: bytes, how: str) -> bytes:
    if how == "zstd":
        return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})
    return {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}[how](data)


COMPRESSIONS = ("gzip", "zstd", "bzip2", "xz")


@pytest.mark.parametrize("how", COMPRESSIONS)
def test_a_compressed_shard_gives_the_same_samples(tmp_path: Path, how: str) -> None:
    plain = tar_of(SAMPLES)
    wanted = read(tmp_path, plain)
    assert read(tmp_path, packed(plain, how)) == wanted
    assert [found.key for found in reread(unit_of(tmp_path), images=True)] == [sample.key for sample in wanted]


def test_a_shard_in_several_gzip_members_is_read_to_its_end(tmp_path: Path) -> None:
    plain = tar_of(SAMPLES)
    cut = 3 * BLOCK
    assert read(tmp_path, packed(plain[:cut], "gzip") + packed(plain[cut:], "gzip")) == read(tmp_path, plain)


@pytest.mark.parametrize("how", COMPRESSIONS)
def test_a_compressed_shard_that_is_cut_or_altered_is_never_short(tmp_path: Path, how: str) -> None:
    plain = tar_of([(f"{n}.jpg", random.Random(n).randbytes(900)) for n in range(8)])
    data = packed(plain, how)
    wanted = read(tmp_path, plain)
    chance = random.Random(0)
    for at in [*range(8, 40), *(chance.randrange(8, len(data)) for _ in range(40)), len(data) - 1]:
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]):
            with suppress(SourceError):  # else all of it is there
                assert read(tmp_path, damaged) == wanted, at
    assert code_of(tmp_path, data + b"more of it") == "source_damaged"
    assert code_of(tmp_path, data[:-20]) in ("source_truncated", "source_damaged")


def test_a_compressed_shard_may_not_hold_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("embq.core.process.limits.DECODED_MOST_BYTES", 1 << 20)
    assert code_of(tmp_path, packed(tar_of([("a.jpg", bytes(2 << 20))]), "gzip")) == "too_large"
    assert code_of(tmp_path, tar_of([("a.jpg", bytes(2 << 20))])) == "too_large"
    assert code_of(tmp_path, tar_of([(f"{n}.jpg", b"") for n in range(700)])) == "too_large"


def test_a_shard_written_by_webdataset_is_read_whole(tmp_path: Path) -> None:
    import webdataset

    path = tmp_path / "w.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(20):
            writer.write({"__key__": f"{number:04d}", "jpg": b"%d" % number, "txt": f"t{number}", "json": {"n": 1}})
    samples = read(tmp_path, path.read_bytes())
    assert [(s.key, s.image, s.text, s.metadata) for s in samples] == [
        (f"{n:04d}", b"%d" % n, f"t{n}", '{"n":1}') for n in range(20)
    ]


# --- damage that is only on the way ---


class Storage:
    """A shard whose bytes are exchanged, as by a bad cable, whenever a reader has fetched it; its version stays.

    Args:
        versions: content for each reading, all of one length; the last one stays.
    """

    def __init__(self, folder: Path, *versions: bytes) -> None:
        self.path = folder / "shard.tar"
        self.versions = list(versions)
        self.path.write_bytes(self.versions[0])
        self._status = self.path.stat()
        (self.unit,) = TAR.split(str(self.path), ReadOptions())
        self.readings = 0

    def moved(self) -> None:
        self.readings += 1
        if self.versions[1:]:
            self.versions.pop(0)
            with open(self.path, "r+b") as file:
                file.write(self.versions[0])
            os.utime(self.path, ns=(self._status.st_atime_ns, self._status.st_mtime_ns))

    def read(self) -> list[Sample]:
        return list(TAR.read(self.unit, self.moved))


WHOLE = tar_of(SAMPLES)


def damaged_at(*offsets: int) -> bytes:
    data = bytearray(WHOLE)
    for offset in offsets:
        data[offset] ^= 0xFF
    return bytes(data)


def test_a_shard_that_was_damaged_on_the_way_is_read_again(tmp_path: Path) -> None:
    storage = Storage(tmp_path, damaged_at(0), WHOLE)
    assert [sample.key for sample in storage.read()] == ["a", "b", "c"]
    assert storage.readings == 2


def test_damage_that_two_readings_agree_on_is_believed(tmp_path: Path) -> None:
    storage = Storage(tmp_path, damaged_at(0))
    with pytest.raises(SourceError) as caught:
        storage.read()
    assert (caught.value.code, caught.value.transient) == ("shard_bad_header", False)
    assert storage.readings == 2


def test_readings_that_differ_are_the_storages_fault(tmp_path: Path) -> None:
    storage = Storage(tmp_path, damaged_at(0), damaged_at(BLOCK * 3))
    with pytest.raises(SourceError, match="two reads of it differ") as caught:
        storage.read()
    assert (caught.value.code, caught.value.transient) == ("source_unreadable", True)
    storage.versions.append(WHOLE)
    storage.moved()
    assert len(storage.read()) == 3


def test_a_large_shard_tells_of_each_piece(tmp_path: Path) -> None:
    storage = Storage(tmp_path, tar_of([("a.jpg", b"x" * 5 * PIECE_BYTES), ("b.jpg", b"y")]))
    assert [len(sample.image or b"") for sample in storage.read()] == [5 * PIECE_BYTES, 1]
    assert storage.readings >= 5


def test_extensions_of_images_and_captions_can_be_named(tmp_path: Path) -> None:
    members = [
        ("a.jpg", b"a jpg"),
        ("a.png", b"a png"),
        ("a.cap", b"a cap"),
        ("a.txt", b"a txt"),
        ("b.jpg", b"b jpg"),
        ("b.txt", b"b txt"),
        ("b.cap", b"b cap"),
        ("b.cap", b"b again"),
        ("c.cap", b"c cap"),
        ("c.cap", b"c again"),
        ("d.PNG", b"d png"),
        ("d.PNG", b"d again"),
    ]
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of(members))
    options = ReadOptions(image_keys=("png", "jpg"), caption_keys=("cap",))
    (unit,) = TarSource().split(str(path), options)
    assert unit.options == (("caption_keys", "cap"), ("image_keys", "png;jpg"))
    assert [(s.key, s.image, s.text, s.error is None) for s in TarSource().read(unit)] == [
        ("a", b"a png", "a cap", True),
        ("b", b"b jpg", "b cap", True),
        ("c", None, "c cap", True),
        ("c", None, None, False),
        ("d", b"d png", None, True),
        ("d", None, None, False),
    ]
    assert [found.key for found in reread(unit, images=True)] == ["a", "b", "c", "c", "d", "d"]
    assert [found.text for found in reread(unit, images=True)][:3] == ["a cap", "b cap", "c cap"]
    assert [found.image for found in reread(unit, images=True)][:2] == [b"a png", b"b jpg"]
    (plain,) = TarSource().split(str(path), ReadOptions())
    assert plain.options == ()


@pytest.mark.parametrize(
    ("names", "endings"),
    [
        (["s0.input.jpg", "s0.txt", "s1.input.jpg", "s1.txt"], "input.jpg, txt"),
        ([f"Track 2.0 no. {n}.jpg" for n in range(4)], "0 no. 0.jpg, 0 no. 1.jpg, 0 no. 2.jpg, 0 no. 3.jpg"),
    ],
)
def test_a_key_without_an_image_names_its_endings_and_is_told_before_the_run(
    tmp_path: Path, names: list[str], endings: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = read(tmp_path, tar_of([(name, b"content") for name in names]))[0]
    with pytest.raises(SampleError, match=f"no image; its members end in {endings}: --image-key"):
        image_of(first)
    (shard,) = tmp_path.glob("*.tar")
    with caplog.at_level(logging.WARNING):
        TarSource().holds(str(shard), ReadOptions())
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith("images_not_taken ")
    assert endings.partition(",")[0] in warning
    assert "--image-key" in warning
    caplog.clear()
    TarSource().holds(str(shard), ReadOptions(image_keys=(endings.partition(",")[0],)))
    shard.write_bytes(tar_of([("a.jpg", b"x"), ("a.mask.png", b"y"), ("b.txt", b"z")]))
    TarSource().holds(str(shard), ReadOptions())
    assert not caplog.records
