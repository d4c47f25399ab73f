"""D: inputs are cut, damaged, empty, doubled or rewritten; every sample is a row or a failure, and none just vanishes.

What an input holds is counted here by other code than embq's: GNU tar, or a few lines that take a tar apart with
`struct`. Damaged inputs always stand among healthy ones, and nothing may happen to those.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
import tarfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.e2e.check import Output, read_output, stub
from tests.e2e.session import ended, picture, succeed, write_tar
from tests.faults.kit.cluster import DIM, Cluster
from tests.faults.kit.table import Recovery
from tests.support.archives import tar_of
from tests.support.picture_files import encoded

BLOCK = 512
MODEL = f"stub:{DIM}"
DAMAGE = frozenset({"shard_truncated", "shard_no_end_marker", "shard_bad_header", "shard_trailing_data"})


# --- what an input holds, counted without embq ---


@dataclass(slots=True, kw_only=True)
class Truth:
    """Expected rows and failures of one input.

    Attributes:
        rows: key -> bytes that its row is computed from.
        failures: (key, code) of each sample that is a failure.
        whole: codes under which the input may fail as a whole instead, or, where `must_fail`, does.
    """

    rows: dict[str, bytes] = field(default_factory=dict)
    failures: list[tuple[str, str]] = field(default_factory=list)
    whole: frozenset[str] = frozenset()
    must_fail: bool = False


def taken_apart(data: bytes) -> dict[str, bytes] | None:
    """Name -> content of an archive of plain members, taken apart with `struct`; None where anything is not as it was.

    As strict as can be: checksum, magic, whole blocks, and nothing but zeros from the first zero block on.
    """
    found: dict[str, bytes] = {}
    at = 0
    while at < len(data):
        header = data[at : at + BLOCK]
        if not any(header):
            return found if not any(data[at:]) and len(data) % BLOCK == 0 else None
        if len(header) < BLOCK:
            return None
        name, size, checksum, flag, magic = struct.unpack("100s24x12s12x8s1s100x8s247x", header)
        numbers = size.rstrip(b"\0 "), checksum.rstrip(b"\0 ")
        if (
            magic != b"ustar\x0000"
            or flag != b"0"
            or any(number.strip(b"01234567") or not number for number in numbers)
        ):
            return None
        length, said = (int(number, 8) for number in numbers)
        if sum(header) - sum(header[148:156]) + 8 * ord(" ") != said:
            return None
        content = data[at + BLOCK : at + BLOCK + length]
        if len(content) < length:
            return None
        found[name.rstrip(b"\0").decode()] = content
        at += BLOCK + length + -length % BLOCK
    return None


def listed(path: Path) -> list[str]:
    """The names of an archive's members by GNU tar."""
    done = subprocess.run(["tar", "--list", "--file", path], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.splitlines()


def images_of(members: dict[str, bytes]) -> dict[str, bytes]:
    """Key -> image, of members that are all images with different keys."""
    return {name.removesuffix(".jpg"): content for name, content in members.items()}


def outcomes(root: Path) -> tuple[Output, dict[str, list[tuple[str, object]]], dict[str, list[tuple[str, str]]]]:
    """The output, and by source: (key, vector) of its rows, and (key, code) of its failures."""
    output = read_output(root)
    manifest = [pq.read_table(path) for path in sorted((root / "manifest").glob("*.parquet"))]
    source = {id_: name for table in manifest for id_, name in zip(*_columns(table, "unit_id", "source"), strict=True)}
    rows: dict[str, list[tuple[str, object]]] = defaultdict(list)
    failures: dict[str, list[tuple[str, str]]] = defaultdict(list)
    if output.rows is not None:
        for unit, key, vector in zip(*_columns(output.rows, "unit_id", "key", "embedding"), strict=True):
            rows[source[unit]].append((key, vector))
    for unit, ordinal, key, code in output.failures:
        failures[source[unit]].append((key if ordinal is not None else "*", code))
    return output, rows, failures


def _columns(table: object, *names: str) -> list[list[object]]:
    return [table[name].to_pylist() for name in names]  # type: ignore[index]


def check_inputs(root: Path, truths: dict[Path, Truth], *, closed: bool = True) -> Counter[str]:
    """Assert that each input became exactly what it must; gives how many failed under which code, "" for the others."""
    output, rows, failures = outcomes(root)
    if closed:
        assert output.records[-1]["kind"] == "close"
        assert sorted(output.tokens) == sorted(output.manifest), "a unit is missing"
    assert set(rows) | set(failures) <= {str(path) for path in truths}
    ended_as: Counter[str] = Counter()
    for path, truth in truths.items():
        there, failed = rows[str(path)], failures[str(path)]
        if [key for key, _ in failed] == ["*"]:
            assert failed[0][1] in truth.whole, f"{path} failed as {failed[0][1]}"
            assert not there, f"{path} failed as a whole and has rows"
            ended_as[failed[0][1]] += 1
            continue
        assert not truth.must_fail, f"{path}: SILENT: {len(there)} rows, {len(failed)} failures of a damaged input"
        assert Counter(failed) == Counter(truth.failures), path
        assert Counter(key for key, _ in there) == Counter(list(truth.rows)), path
        wrong = [key for key, vector in there if vector != stub(truth.rows[key], len(vector))]  # type: ignore[arg-type]
        assert not wrong, f"{path}: rows that are not those of their bytes: {wrong[:3]}"
        ended_as[""] += 1
    totals = output.records[-1]["totals"]
    assert totals["rows"] == sum(map(len, rows.values()))
    assert totals["failures"] == sum(map(len, failures.values()))
    return ended_as


# --- inputs ---


def pictures(prefix: str, count: int, size: int = 0) -> list[tuple[str, bytes]]:
    """Members that are different made-up images, of `size` bytes or short ones."""
    made = [(f"{prefix}{n:03d}", picture(f"{prefix}{n:03d}")) for n in range(count)]
    return [(f"{key}.jpg", data.ljust(size, b".")) for key, data in made]


@dataclass(slots=True)
class Inputs:
    """A folder of inputs in the making, with what must become of each."""

    folder: Path
    truths: dict[Path, Truth] = field(default_factory=dict)

    def add(self, name: str, data: bytes, truth: Truth) -> Path:
        """A file."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / name
        path.write_bytes(data)
        self.truths[path] = truth
        return path

    def add_healthy(self, shards: int, samples: int = 8) -> None:
        """Whole shards, before, among and behind the others in order of their names."""
        for n in range(shards):
            name = f"{'amz'[n % 3]}-healthy-{n:02d}"
            members = pictures(f"{name}-", samples)
            path = self.add(f"{name}.tar", tar_of(members), Truth(rows=images_of(dict(members))))
            assert listed(path) == [member for member, _ in members]


@contextmanager
def at_work(cluster: Cluster, inputs: Inputs, *options: str, model: str = MODEL) -> Iterator[None]:
    """A run over all inputs with two workers, up to its last commit."""
    cluster.input, cluster.units = inputs.folder, len(inputs.truths)
    cluster.enqueue(model, *options)
    cluster.writer()
    cluster.producer()
    yield
    cluster.until_closed()


def assert_verified(cluster: Cluster) -> None:
    """`embq verify` agrees, and nothing in a log is a bug."""
    status, stdout, stderr = ended("verify", cluster.root)
    assert status == 0, stdout + stderr
    for service in cluster.services:
        assert "Traceback (most recent call last)" not in service.log, service.said


@pytest.fixture
def inputs(short_tmp: Path) -> Inputs:
    """A folder of inputs."""
    return Inputs(short_tmp / "in")


# --- D1, D2: damaged shards ---


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(
            BLOCK, marks=pytest.mark.fault("D1", "a shard is cut at each of its 120 block boundaries", gate=True)
        ),
        pytest.param(64, marks=pytest.mark.fault("D1", "a shard is cut after every 64 bytes of its 61,440")),
    ],
)
def test_a_shard_that_is_cut_is_never_silently_short(
    cluster: Cluster, recovery: Recovery, inputs: Inputs, step: int
) -> None:
    inputs.add_healthy(6)
    complete = 0
    for cut in range(0, 120 * BLOCK, step):
        members = pictures(f"{cut:05d}-", 29, 3 * BLOCK)
        data = tar_of(members).ljust(120 * BLOCK, b"\0")
        assert len(data) == 120 * BLOCK
        found = taken_apart(data[:cut])
        # A cut inside of the zeros at the end takes nothing away, as long as one whole block of them is left.
        assert found is None or found == dict(members)
        complete += found is not None
        truth = Truth(rows=images_of(found or {}), whole=DAMAGE, must_fail=found is None)
        inputs.add(f"cut-{cut:05d}.tar", data[:cut], truth)
        recovery.injected()

    with at_work(cluster, inputs):
        cluster.workers(count=2)

    ended_as = check_inputs(cluster.root, inputs.truths)
    assert ended_as[""] == 6 + complete
    assert ended_as.total() == 6 + 120 * BLOCK // step
    assert_verified(cluster)


def zeroed(data: bytes, member: int, members: Sequence[tuple[str, bytes]]) -> bytes:
    """`data` with the header of one member gone."""
    at = sum(BLOCK + len(content) + -len(content) % BLOCK for _, content in members[:member])
    return data[:at] + bytes(BLOCK) + data[at + BLOCK :]


def resized(data: bytes, change: int) -> bytes:
    """`data` whose first member says another size under a checksum that is right."""
    header = bytearray(data[:BLOCK])
    header[124:136] = f"{int(header[124:135], 8) + change:011o}\0".encode()
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header) + data[BLOCK:]


@pytest.mark.fault("D2", "a header is zeroed, a size lies, archives are joined, compressed or no archives", gate=True)
def test_an_archive_with_other_damage_fails_whole(cluster: Cluster, recovery: Recovery, inputs: Inputs) -> None:
    inputs.add_healthy(6)
    members = pictures("x-", 5, 700)
    data = tar_of(members)
    damaged = {
        **{f"header-{n}-gone": zeroed(data, n, members) for n in range(5)},
        "a-block-too-short": resized(data, -BLOCK),
        "a-block-too-long": resized(data, BLOCK),
        "longer-than-the-file": resized(data, 10**9),
        "two-archives": data + data,
        "a-tail": data + b"more",
        "one-block-missing": data[: 2 * BLOCK] + data[3 * BLOCK :],
        "two-blocks-swapped": data[:BLOCK] + data[2 * BLOCK : 3 * BLOCK] + data[BLOCK : 2 * BLOCK] + data[3 * BLOCK :],
        "noise": random.Random(0).randbytes(20 * BLOCK),
        "text": b"this is no archive\n" * 100,
    }
    for name, content in damaged.items():
        harmless = taken_apart(content)
        if name == "two-blocks-swapped":
            # Contents have no checksum: which bytes stand there is what the shard says.
            assert harmless is not None
        else:
            assert harmless is None, name
        truth = Truth(rows=images_of(harmless or {}), whole=DAMAGE, must_fail=harmless is None)
        inputs.add(f"{name}.tar", content, truth)
        recovery.injected()
    for magic in (b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"BZh9", b"\xfd7zXZ\0"):
        whole = DAMAGE | {"source_damaged", "source_truncated"}
        inputs.add(f"magic-{magic.hex()}.tar", magic + data, Truth(whole=whole, must_fail=True))
        recovery.injected()

    with at_work(cluster, inputs):
        cluster.workers(count=2)

    ended_as = check_inputs(cluster.root, inputs.truths)
    assert ended_as[""] == 6 + 1
    assert_verified(cluster)


@pytest.mark.fault("D2", "the system gives fewer bytes of a shard than it says there are", gate=False)
def test_a_file_whose_length_lies_fails_whole_after_three_attempts(
    cluster: Cluster, recovery: Recovery, inputs: Inputs, needs: Callable[[str], str]
) -> None:
    strace = needs("strace")
    inputs.add_healthy(4)
    members = pictures("x-", 5, 700)
    lies = inputs.add("lies.tar", tar_of(members), Truth(whole=frozenset({"shard_length_mismatch"}), must_fail=True))
    # Every read ends at once: as with a share that lost the content, and still tells the old size.
    cut = ["-P", lies, "-e", "trace=read", "-e", "inject=read:retval=0"]
    prefix = [strace, "-f", "-qq", "-e", "signal=none", "-o", "/dev/null", *map(str, cut), "--"]

    with at_work(cluster, inputs):
        # It is asked for a minute whether the storage comes back, in each attempt; that has its own tests.
        cluster.workers(prefix=prefix, sabotage={"set": "embq.worker.stages.read:PAUSES_S", "to": []})
        recovery.injected(3)

    assert check_inputs(cluster.root, inputs.truths)["shard_length_mismatch"] == 1
    assert_verified(cluster)


# --- D3: images ---


def zoo() -> tuple[dict[str, bytes], dict[str, tuple[str, bytes]]]:
    """Images that open, and (code, bytes) of those that do not, by file name."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, size=(60, 80, 3), dtype=np.uint8)
    noise = Image.fromarray(pixels)

    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    frames = [Image.fromarray(np.full((40, 40), shade, np.uint8)).convert("P") for shade in (10, 200)]
    jpeg, png = encoded(noise, "JPEG"), encoded(noise, "PNG")
    good = {
        "rgb.jpg": jpeg,
        "progressive.jpg": encoded(noise, "JPEG", progressive=True),
        "grey.jpg": encoded(noise.convert("L"), "JPEG"),
        "cmyk.jpg": encoded(noise.convert("CMYK"), "JPEG"),
        "turned.jpg": encoded(noise, "JPEG", exif=exif),
        "rgba.png": encoded(noise.convert("RGBA"), "PNG"),
        "grey-alpha.png": encoded(noise.convert("LA"), "PNG"),
        "palette.png": encoded(noise.convert("P"), "PNG"),
        "palette-transparent.png": encoded(noise.convert("P"), "PNG", transparency=3),
        "bilevel.png": encoded(noise.convert("1"), "PNG"),
        "sixteen-bit.png": encoded(Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257), "PNG"),
        "animated.gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "lossy.webp": encoded(noise, "WEBP"),
        "plain.bmp": encoded(noise, "BMP"),
        "fax.tif": encoded(noise.convert("1"), "TIFF", compression="group4"),
        "pages.tiff": encoded(noise, "TIFF", save_all=True, append_images=frames),
        "small.avif": encoded(noise, "AVIF", speed=10),
        "a-jpeg-called.png": jpeg,
        "dot.png": encoded(noise.crop((0, 0, 1, 1)), "PNG"),
    }
    header = b"IHDR" + struct.pack(">II5B", 60_000, 60_000, 8, 2, 0, 0, 0)
    bits = jpeg.index(b"\xff\xc0") + 4
    bad = {
        "nothing.jpg": ("unidentified", b""),
        "a-page.jpg": ("unidentified", b"<!DOCTYPE html><title>404</title>"),
        "other-format.jpg": ("unidentified", encoded(noise, "PPM")),
        "half-a-jpeg.jpg": ("truncated", jpeg[: len(jpeg) // 2]),
        "half-a-tiff.tiff": ("truncated", encoded(noise, "TIFF")[:5000]),
        "half-an-avif.avif": ("truncated", encoded(noise, "AVIF", speed=10)[:2000]),
        "half-a-png.png": ("truncated", png[: len(png) // 2]),
        "only-a-header.jpg": ("truncated", jpeg[:4]),
        "damaged.png": ("corrupt", png[:200] + bytes(64) + png[264:]),
        "huge.png": ("too_large", png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]),
        "a-strip.png": ("bad_aspect", encoded(noise.resize((600, 4)), "PNG")),
        "twelve-bit.jpg": ("unsupported_mode", jpeg[:bits] + bytes([12]) + jpeg[bits + 1 :]),
    }
    return good, bad


@pytest.mark.fault(
    "D3", "images are empty, cut, corrupt, huge, of odd modes, animated or turned: each a row or a failure with a code"
)
def test_every_image_is_a_row_or_a_failure(
    cluster: Cluster, recovery: Recovery, inputs: Inputs, short_tmp: Path
) -> None:
    pytest.importorskip("torch")
    from embq.core.models import DECODES, ModelConfig
    from embq.core.units import Sample
    from embq.worker.embedders.registry import load
    from tests.contract.test_embedders import make_clip

    spec = f"open_clip:local-dir:{make_clip(short_tmp / 'clip', seed=3)}"
    good, bad = zoo()
    images = {**good, **{name: data for name, (_, data) in bad.items()}}
    mixed = sorted(images, key=lambda name: name[::-1])
    inputs.folder.mkdir()
    shard, loose = inputs.folder / "zoo.tar", inputs.folder / "loose"
    write_tar(shard, [(name, images[name]) for name in mixed])
    assert listed(shard) == mixed
    loose.mkdir()
    for name in mixed:
        (loose / name).write_bytes(images[name])
    healthy = [inputs.folder / f"healthy-{n}.tar" for n in range(3)]
    for path in healthy:
        write_tar(path, [(f"rgb-{path.stem}-{n}.jpg", good["rgb.jpg"]) for n in range(10)])
    recovery.injected(2 * len(bad))

    given = [str(path) for path in (healthy[0], shard, healthy[1], loose, healthy[2])]
    enqueue(cluster, given, spec, "--dtype", "float32", "--unit-size", "7")
    cluster.writer()
    cluster.producer()
    cluster.workers(count=2)
    cluster.until_closed()

    _, rows, failures = outcomes(cluster.root)
    stem_of = {name.split(".")[0]: name for name in images}
    for source, name_of in ((shard, stem_of), (loose, {name: name for name in images})):
        failed, there = failures[str(source)], rows[str(source)]
        assert len(failed) + len(there) == len(images)
        assert {name_of[key]: code for key, code in failed} == {name: code for name, (code, _) in bad.items()}
        assert {name_of[key] for key, _ in there} == set(good)
    # Through the model alone, one at a time: so no row has the vector of its neighbour.
    embedder = load(ModelConfig(spec=spec, modalities=("image",), precision="fp32", decode=DECODES[0]), "cpu")
    alone = {}
    for name, data in good.items():
        (prepared,) = embedder.prepare([Sample(ordinal=0, key=name, image=data)])
        alone[name.split(".")[0]] = embedder.embed([prepared])["image"][0]
    for source, there in rows.items():
        for key, vector in there:
            expected = alone["rgb" if "healthy" in source else key.split(".")[0]]
            np.testing.assert_allclose(np.array(vector), expected, atol=1e-5, err_msg=f"{source}: {key}")
    assert sum(map(len, rows.values())) == 30 + 2 * len(good)
    assert_verified(cluster)


DECODER = "embq.worker.embedders.image.pixels:prepared"
"""What decodes a chunk, in one of the threads that prepare."""


@pytest.mark.parametrize(
    "do",
    [
        pytest.param(
            "segfault",
            marks=pytest.mark.fault("W6", "an image makes its decoder read what is not its own: SIGSEGV"),
        ),
        pytest.param("abort", marks=pytest.mark.fault("W6", "an image makes its decoder end the process: abort()")),
        pytest.param("hang", marks=pytest.mark.fault("W6", "a decoder never comes back from an image")),
        pytest.param(
            "hang_gil", marks=pytest.mark.fault("W6", "a decoder never comes back, and no other thread runs meanwhile")
        ),
    ],
)
def test_an_image_that_ends_its_decoder(cluster: Cluster, recovery: Recovery, inputs: Inputs, do: str) -> None:
    from PIL import Image

    inputs.folder.mkdir()
    random_ = np.random.default_rng(0)
    truths = {}
    for shard in range(4):
        members = []
        for n in range(30):
            name = "poison" if (shard, n) == (2, 17) else "a picture"
            noise = Image.fromarray(random_.integers(0, 256, size=(40, 50, 3), dtype=np.uint8))
            members.append((f"{shard}-{n:02d}.jpg", encoded(noise, "JPEG", comment=name)))
        path = inputs.folder / f"{shard}.tar"
        write_tar(path, members)
        rows = images_of(dict(members))
        failures = [(key, "crash") for key in list(rows) if b"poison" in rows[key]]
        for key, _ in failures:
            del rows[key]
        truths[path] = Truth(rows=rows, failures=failures)

    enqueue(cluster, list(truths), f"stub:{DIM}?pixels=224")
    cluster.writer()
    cluster.producer()
    machine = cluster.workers(
        count=2,
        environment={"EMBQ_STALL_S": "3"},
        sabotage={"at": DECODER, "match": "poison", "every": True, "do": do},
    )
    cluster.until_closed(deadline_s=120)
    recovery.injected(machine.said_times("worker_died"))
    assert machine.said_times("worker_died") == 3
    assert check_inputs(cluster.root, truths) == {"": 4}
    assert_verified(cluster)


def enqueue(cluster: Cluster, given: Sequence[str | Path], model: str, *options: str) -> None:
    """`embq enqueue` of several inputs."""
    succeed(
        *("enqueue", *given, "-o", cluster.root, "-m", model, *options),
        environment={"EMBQ_BROKER_URL": cluster.broker.url},
    )


# --- D4, D5: odd contents ---


@pytest.mark.fault("D4", "shards are empty, hold no keys, or nothing that can be embedded", gate=False)
def test_shards_without_samples(cluster: Cluster, recovery: Recovery, inputs: Inputs) -> None:
    inputs.add_healthy(3)
    nothing = {"no-members": tar_of([]), "one-zero-block": bytes(BLOCK), "many-zero-blocks": bytes(40 * BLOCK)}
    for name, data in nothing.items():
        inputs.add(f"{name}.tar", data, Truth())
    folder = tarfile.TarInfo("a-folder/")
    folder.type = tarfile.DIRTYPE
    inputs.add("only-a-folder.tar", folder.tobuf(tarfile.USTAR_FORMAT) + bytes(2 * BLOCK), Truth())
    inputs.add("no-bytes.tar", b"", Truth(whole=DAMAGE, must_fail=True))
    keyless = tar_of([("README", b"text"), ("folder/LICENSE", b"text")])
    inputs.add("no-keys.tar", keyless, Truth(whole=frozenset({"shard_no_keys"}), must_fail=True))
    others = [(f"{n}.{extension}", b"{}") for n in range(3) for extension in ("json", "cls", "npy")]
    imageless = inputs.add(
        "no-images.tar", tar_of(others), Truth(failures=[(str(n), "missing_member") for n in range(3)])
    )
    assert len({name.split(".")[0] for name in listed(imageless)}) == 3
    recovery.injected(len(inputs.truths) - 3)

    with at_work(cluster, inputs):
        cluster.workers(count=2)

    assert check_inputs(cluster.root, inputs.truths) == {"": 8, "shard_no_end_marker": 1, "shard_no_keys": 1}
    assert_verified(cluster)
    # Nothing is wrong with them, and still somebody may want to know.
    assert "4 units hold no sample" in succeed("verify", cluster.root)
    alone = succeed("run", inputs.folder / "no-members.tar", "-o", cluster.folder / "alone", "-m", MODEL, "--quiet")
    assert "the inputs hold no sample" in alone


@pytest.mark.fault("D5", "keys are doubled in and across shards, members interleaved, names full of dots", gate=False)
def test_odd_keys(cluster: Cluster, recovery: Recovery, inputs: Inputs) -> None:
    inputs.add_healthy(3)
    interleaved = [("x.jpg", b"x"), ("y.jpg", b"y"), ("x.txt", b"of x"), ("z.txt", b"of z"), ("y.txt", b"of y")]
    cases = {
        "doubled": (
            [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.jpg", b"3"), ("a.jpg", b"4"), ("c.png", b"5")],
            Truth(rows={"a": b"1", "b": b"2", "c": b"5"}, failures=[("a", "duplicate_key")] * 2),
        ),
        "doubled-elsewhere": ([("a.jpg", b"6"), ("b.jpg", b"2")], Truth(rows={"a": b"6", "b": b"2"})),
        "interleaved": ([*interleaved, ("z.jpg", b"z")], Truth(rows={"x": b"x", "y": b"y", "z": b"z"})),
        # The key ends at the first dot of the name, as in webdataset: what is behind it is no image's extension.
        "dots": (
            [("v1.2/a.jpg", b"7"), ("v1.2/b.c.jpg", b"8"), ("..d/e.png", b"9"), ("f..jpg", b"10")],
            Truth(
                rows={"v1.2/a": b"7", "..d/e": b"9"}, failures=[("v1.2/b", "missing_member"), ("f", "missing_member")]
            ),
        ),
        "cases": ([("A.JPG", b"11"), ("a.jpg", b"12"), ("a.JPEG", b"13")], Truth(rows={"A": b"11", "a": b"12"})),
        "not-ascii": (
            [("stra\u00dfe.jpg", b"14"), ("stra\u0308\u00dfe.jpg", b"15"), ("\U0001f600.jpg", b"16")],
            Truth(rows={"stra\u00dfe": b"14", "stra\u0308\u00dfe": b"15", "\U0001f600": b"16"}),
        ),
    }
    for name, (members, truth) in cases.items():
        path = inputs.add(f"{name}.tar", tar_of(members), truth)
        assert len(listed(path)) == len(members)
        recovery.injected()

    with at_work(cluster, inputs):
        cluster.workers(count=2)

    assert check_inputs(cluster.root, inputs.truths).total() == 3 + len(cases)
    output = read_output(cluster.root)
    assert output.rows is not None
    captions = dict(zip(output.keys, output.rows["caption"].to_pylist(), strict=True))
    assert {key: captions[key] for key in "xyz"} == {key: f"of {key}" for key in "xyz"}
    assert_verified(cluster)


# --- D6: inputs that change ---


Change = Callable[[Path, bytes], object]
"""Does something to a file; the bytes are another version of it, of the same length."""


def rewrite(path: Path, other: bytes) -> None:
    """In place, so that who has it open reads the new bytes."""
    with path.open("r+b") as file:
        file.write(other)


def replace(path: Path, other: bytes) -> None:
    """By a new file under the old name."""
    new = path.with_suffix(".new")
    new.write_bytes(other)
    new.replace(path)


def lengthen(path: Path, _other: bytes) -> None:
    """By one more block."""
    with path.open("ab") as file:
        file.write(bytes(BLOCK))


def shard_of(name: str, size: int = 0) -> tuple[bytes, Truth, bytes]:
    """A shard, what must become of it as planned, and another one of the same length under the same names."""
    members = pictures(f"{name}-", 6, size)
    other = tar_of([(key, data[:2] + data[:1:-1]) for key, data in members])
    data = tar_of(members)
    assert len(other) == len(data)
    assert other != data
    return data, Truth(rows=images_of(dict(members)), whole=frozenset({"shard_changed"})), other


@pytest.mark.fault("D6", "a shard is rewritten, cut, replaced or removed while it is being read", gate=True)
def test_a_shard_that_changes_while_it_is_read_is_of_one_version_or_fails_whole(
    cluster: Cluster, recovery: Recovery, inputs: Inputs, short_tmp: Path
) -> None:
    inputs.add_healthy(3)
    changes: dict[str, Change] = {
        "rewritten": rewrite,
        "cut": lambda path, _other: os.truncate(path, 3 * BLOCK),
        "longer": lengthen,
        "replaced": replace,
        "removed": lambda path, _other: path.unlink(),
    }
    others, planned = {}, {}
    for name in changes:
        data, truth, others[name] = shard_of(name, 400_000)
        # Who has a file open keeps what it was where another takes its name; only then are there rows.
        truth.must_fail = name not in ("replaced", "removed")
        path = inputs.add(f"{name}.tar", data, truth)
        if not truth.must_fail:
            truth.whole = frozenset()
            planned[path] = short_tmp / f"{name}.planned"
            os.link(path, planned[path])
    waiting = {name: short_tmp / name for name in changes}
    sabotage = [
        {
            "at": "embq.sources.access.files:WatchedFile.readinto",
            "match": f"{name}.tar",
            "count": 2,
            "do": "gate",
            "gate": gate,
        }
        for name, gate in waiting.items()
    ]

    def being_read() -> list[str]:
        return [name for name, gate in waiting.items() if Path(f"{gate}.reached").exists()]

    with at_work(cluster, inputs):
        cluster.workers(sabotage=sabotage)
        while waiting:
            cluster.until(being_read)
            for name in being_read():
                changes[name](inputs.folder / f"{name}.tar", others[name])
                recovery.injected()
                Path(f"{waiting.pop(name)}.open").touch()

    ended_as = check_inputs(cluster.root, inputs.truths)
    assert ended_as == {"": 3 + 2, "shard_changed": 3}
    for path, kept in planned.items():
        kept.replace(path)
    assert_verified(cluster)


@pytest.mark.fault("D6", "a file of texts is rewritten in mid-run")
def test_a_text_file_that_is_rewritten_in_mid_run(cluster: Cluster, recovery: Recovery) -> None:
    cluster.begin(200, f"stub:{DIM}?ms_per_sample=3&batch_size=8")
    cluster.workers(count=2)
    cluster.until_finished(15)
    planned, modified_ns = cluster.input.read_bytes(), cluster.input.stat().st_mtime_ns
    cluster.input.write_bytes(planned.replace(b"the text", b"not text"))
    recovery.injected()
    cluster.until_closed()

    output = read_output(cluster.root)
    assert output.rows is not None
    rows: dict[str, dict[str, object]] = defaultdict(dict)
    for unit, key, vector in zip(*_columns(output.rows, "unit_id", "key", "embedding"), strict=True):
        rows[unit][key] = vector
    failed = {unit: (ordinal, code) for unit, ordinal, _, code in output.failures}
    for n, unit in enumerate(output.manifest):
        if unit in failed:
            assert failed[unit] == (None, "source_changed")
            assert unit not in rows
        else:
            expected = {f"k{i}": stub(cluster.expected[f"k{i}"], DIM) for i in range(10 * n, 10 * n + 10)}
            assert rows[unit] == expected, f"unit {n}"
    assert len(rows) >= 15
    assert len(failed) == 200 - len(rows) > 0
    # The rows are those of the planned file: with it in place, all can be compared.
    cluster.input.write_bytes(planned)
    os.utime(cluster.input, ns=(modified_ns, modified_ns))
    assert_verified(cluster)
