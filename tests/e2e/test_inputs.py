"""Every kind of input from the command to the exact check, against a reading of it by somebody else's library."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from embq.app.cli import entry_point
from embq.core.broker.embedded import EmbeddedServer
from tests.e2e.check import check_complete
from tests.e2e.odd_inputs import ODD, Odd
from tests.e2e.session import Command, await_in, closed, picture, started, write_shards, write_texts
from tests.support.archives import zstd
from tests.support.servers.storage import http_server

DIM = 16
SAMPLES = 30
UNIT = 10

Expected = dict[str, bytes]
"""Key -> what is embedded."""


def texts_table() -> pa.Table:
    numbers = range(SAMPLES)
    return pa.table({"id": [f"k{n}" for n in numbers], "text": [f"text of {n} \u00e4" for n in numbers]})


def read_rows(rows: list[dict[str, object]]) -> Expected:
    return {str(row["id"]): str(row["text"]).encode() for row in rows}


def tar(folder: Path, pack: Callable[[bytes], bytes] = bytes, suffix: str = "") -> tuple[Path, Expected]:
    write_shards(folder / "plain", 3, UNIT, captions=True)
    expected: Expected = {}
    packed = folder / "shards"
    packed.mkdir()
    for path in sorted((folder / "plain").iterdir()):
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member)
                if member.name.endswith(".jpg") and content is not None:
                    expected[member.name.removesuffix(".jpg")] = content.read()
        (packed / f"{path.name}{suffix}").write_bytes(pack(path.read_bytes()))
    return packed, expected


def images(folder: Path) -> tuple[Path, Expected]:
    root = folder / "photos"
    for n in range(SAMPLES):
        path = root / f"{n % 3}" / f"{n:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(str(n)))
        path.with_suffix(".txt").write_text(f"caption {n}")
        path.with_suffix(".json").write_text(json.dumps({"n": n}))
    return root, {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.jpg")}


def parquet(folder: Path) -> tuple[Path, Expected]:
    root = folder / "tables"
    root.mkdir()
    for n in range(3):
        pq.write_table(texts_table().slice(n * UNIT, UNIT), root / f"{n}.parquet", row_group_size=4)
    return root, read_rows([row for path in sorted(root.iterdir()) for row in pq.read_table(path).to_pylist()])


def parquet_of_images(folder: Path) -> tuple[Path, Expected]:
    path = folder / "images.parquet"
    table = pa.table({"image": [picture(str(n)) for n in range(SAMPLES)], "n": list(range(SAMPLES))})
    pq.write_table(table, path, row_group_size=7)
    rows = pq.read_table(path).to_pylist()
    return path, {f"images.parquet:{number}": row["image"] for number, row in enumerate(rows, 1)}


def arrow(folder: Path) -> tuple[Path, Expected]:
    path = folder / "texts.feather"
    feather.write_feather(texts_table(), str(path), chunksize=7)
    return path, read_rows(feather.read_table(path).to_pylist())


def saved_dataset(folder: Path) -> tuple[Path, Expected]:
    root = folder / "dataset"
    root.mkdir()
    names = [f"data-{n:05d}-of-00003.arrow" for n in range(3)]
    for n, name in enumerate(names):
        table = texts_table().slice(n * UNIT, UNIT)
        with pa.ipc.new_stream(str(root / name), table.schema) as stream:
            stream.write_table(table)
    (root / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (root / "dataset_info.json").write_text("{}")
    return root, read_rows([row for name in names for row in pa.ipc.open_stream(root / name).read_all().to_pylist()])


def jsonl(folder: Path, pack: Callable[[bytes], bytes] = bytes, suffix: str = "") -> tuple[Path, Expected]:
    plain, path = folder / "plain", folder / f"texts.jsonl{suffix}"
    write_texts(plain, SAMPLES)
    path.write_bytes(pack(plain.read_bytes()))
    return path, read_rows([json.loads(line) for line in plain.read_text().splitlines()])


def table_of_commas(folder: Path) -> tuple[Path, Expected]:
    path = folder / "texts.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text", "note"])
        writer.writerows([f"k{n}", f'a "quoted", text\nof two lines {n}', str(n)] for n in range(SAMPLES))
    with open(path, newline="") as file:
        return path, read_rows(list(csv.DictReader(file)))


def lines(folder: Path) -> tuple[Path, Expected]:
    path = folder / "texts.txt"
    path.write_text("".join(f"line {n}\n" for n in range(SAMPLES)))
    return path, {f"texts.txt:{n}": line.encode() for n, line in enumerate(path.read_text().splitlines(), 1)}


CASES: dict[str, Callable[[Path], tuple[Path, Expected]]] = {
    "tar": tar,
    "tar.gz": lambda folder: tar(folder, gzip.compress, ".gz"),
    "tar.zst": lambda folder: tar(folder, zstd.compress, ".zst"),
    "images": images,
    "parquet": parquet,
    "parquet of images": parquet_of_images,
    "feather": arrow,
    "saved dataset": saved_dataset,
    "jsonl": jsonl,
    "jsonl.bz2": lambda folder: jsonl(folder, bz2.compress, ".bz2"),
    "jsonl.xz": lambda folder: jsonl(folder, lzma.compress, ".xz"),
    "csv": table_of_commas,
    "txt": lines,
}


@pytest.fixture(scope="module")
def services() -> Iterator[Command]:
    """A server with a producer, a writer and a worker for all inputs; its URL is in the environment."""
    with tempfile.TemporaryDirectory(prefix="embq-t") as folder, ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(Path(folder) / "b"))
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("EMBQ_BROKER_URL", server.url)
        environment = {"EMBQ_BROKER_URL": server.url, "EMBQ_PRIVATE_HOSTS": "127.0.0.1"}
        commands = [["producer"], ["writer"], ["worker", "--devices", "cpu"]]
        yield [stack.enter_context(started(*command, environment=environment)) for command in commands][-1]


def said(*arguments: object) -> str:
    """The stdout of a command that runs in this process."""
    with redirect_stdout(io.StringIO()) as out:
        assert entry_point.run([str(argument) for argument in arguments]) == 0, out.getvalue()
    return out.getvalue()


@pytest.mark.parametrize("case", CASES)
def test_an_input_ends_as_exactly_its_rows(case: str, short_tmp: Path, services: Command) -> None:
    source, expected = CASES[case](short_tmp)
    root = short_tmp / "out"
    assert len(expected) >= SAMPLES
    said("enqueue", source, "-o", root, "-m", f"stub:{DIM}", "--unit-size", UNIT)
    await_in(services, lambda: closed(root))
    units = len(pq.read_table(root / "manifest" / "00000.parquet"))
    assert units >= (1 if case.endswith(("bz2", "xz")) else 3)
    check_complete(root, expected, units=units, dim=DIM)
    assert json.loads(said("verify", root, "--json"))["ok"]


# --- with something wrong in them ---


@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_an_input_with_something_wrong_in_it_ends_as_rows_and_one_failure_each(
    make: Callable[[Path], Odd],
    short_tmp: Path,
    services: Command,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    odd = make(short_tmp)
    root = short_tmp / "out"
    said("enqueue", odd.source, "-o", root, "-m", f"stub:{DIM}")
    told = capfd.readouterr().err + caplog.text
    assert odd.warns in told
    assert "Traceback" not in told
    await_in(services, lambda: closed(root))
    check_complete(root, odd.rows, units=odd.units, dim=DIM, failures=odd.failures)
    assert json.loads(said("verify", root, "--json"))["ok"]
    assert "Traceback" not in services.stderr


def test_urls_that_cannot_be_had_are_one_failure_each(short_tmp: Path, services: Command) -> None:
    web, root = short_tmp / "web", short_tmp / "out"
    web.mkdir()
    for name in ("good", "denied", "busy"):
        (web / f"{name}.jpg").write_bytes(picture(name))
    with http_server(web) as server:
        server.denied = {"denied.jpg"}
        server.suffer("cut", 1)  # once is no reason to give up
        names = ["good", "denied", "gone", "busy"]
        urls = [f"{server.url}/{name}.jpg" for name in names]
        pq.write_table(pa.table({"id": names, "url": urls}), short_tmp / "t.parquet")
        said("enqueue", short_tmp / "t.parquet", "-o", root, "-m", f"stub:{DIM}", "--image-column", "url")
        await_in(services, lambda: closed(root))
    rows = {name: picture(name) for name in ("good", "busy")}
    failures = {"denied": "source_denied", "gone": "source_missing"}
    check_complete(root, rows, units=1, dim=DIM, failures=failures)
    assert server.left == 0
