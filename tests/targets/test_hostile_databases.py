"""Folders of databases that others have made: `embq export --to` runs nothing of them, and stays within them."""

from __future__ import annotations

import json
import os
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import embq
from embq.app.cli.entry_point import run
from embq.app.export.targets import target_of
from embq.app.export.targets.target import TargetRows, copy_rows
from embq.core.errors import InputError
from tests.support.outputs.build import build, write_jsonl
from tests.targets.test_targets import NEEDED, postgres

__all__ = ["postgres"]  # the fixture

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the clients of the databases
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    source = write_jsonl(folder / "t.jsonl", [{"id": f"k{n}", "text": f"text {n}"} for n in range(20)])
    return build(folder / "out", [source], model="stub:16")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user that is none of the database's."""
    path = tmp_path / "home" / "data" / "thesis.txt"
    path.parent.mkdir(parents=True)
    path.write_text("x")
    return path


def written(kind: str, out: Path, folder: Path) -> Path:
    """A database with the rows of the run, as this embq writes it."""
    pytest.importorskip(NEEDED[kind])
    copy_rows(embq.open(out), target_of(kind, str(folder), "embq"))
    return folder


def refused(kind: str, out: Path, folder: Path, capfd: pytest.CaptureFixture[str], code: str = "foreign") -> str:
    capfd.readouterr()
    assert run(["export", str(out), str(folder), "--to", kind]) == 65
    told = capfd.readouterr().err
    assert f"error[{code}_" in told or f"error[other_{code}" in told, told
    assert len(told) < 2_000
    return told


class Command:
    """Runs a command where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self._marker}",))


@pytest.mark.parametrize("where", ["among the rows", "in a collection beside them", "in a folder without a record"])
def test_points_of_qdrant_run_nothing(where: str, out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its embedded mode unpickles all points of a folder that it opens."""
    folder, marker = written("qdrant", out, tmp_path / "db"), tmp_path / "ran"
    own = folder / "collection" / "embq" / "storage.sqlite"
    if where == "in a collection beside them":
        record = json.loads((folder / "meta.json").read_text())
        record["collections"]["other"] = record["collections"]["embq"]
        (folder / "meta.json").write_text(json.dumps(record))
        own = own.parents[1] / "other" / own.name
        own.parent.mkdir()
    elif where == "in a folder without a record":
        (folder / "meta.json").unlink()
    with sqlite3.connect(own) as database:
        database.execute("CREATE TABLE IF NOT EXISTS points (id TEXT PRIMARY KEY, point BLOB)")
        database.execute("INSERT INTO points VALUES ('x', ?)", (pickle.dumps(Command(marker)),))
    database.close()
    assert "name posix.system" in refused("qdrant", out, folder, capfd)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["PointStruct.__init__", "__builtins__", "datetime", "Optional", "nothing"])
def test_only_records_of_the_library_are_unpickled(name: str) -> None:
    pytest.importorskip("qdrant_client")
    from qdrant_client.http.models import models

    from embq.app.export.targets.local_database import PointsOnly

    points = PointsOnly(models, "folder")
    point = models.PointStruct(id=1, vector={"a": models.SparseVector(indices=[1], values=[0.5])}, payload={"a": [1]})
    assert points.loads(pickle.dumps(point)) == point
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (models.__name__, name))
    for data, why in (
        (b"\x80\x04%b\x93." % words, f"its rows name .*{name}"),
        (b"\x80\x04K\x01.", "no record"),
        (b"", "Ran out of input"),
    ):
        with pytest.raises(InputError, match=why):
            points.loads(data)


def test_collections_of_others_in_the_same_folder_stay(out: Path, tmp_path: Path) -> None:
    qdrant_client = pytest.importorskip("qdrant_client")
    models = qdrant_client.models
    client = qdrant_client.QdrantClient(path=str(tmp_path / "db"))
    sizes = {"dense": models.VectorParams(size=2, distance=models.Distance.DOT)}
    client.create_collection("mine", vectors_config=sizes, sparse_vectors_config={"s": models.SparseVectorParams()})
    vector = {"dense": [1.0, 2.0], "s": models.SparseVector(indices=[3], values=[1.0])}
    client.upsert("mine", [models.PointStruct(id=7, vector=vector, payload={"deep": [{"a": None}]})])
    client.close()
    written("qdrant", out, tmp_path / "db")
    client = qdrant_client.QdrantClient(path=str(tmp_path / "db"))
    (point,) = client.retrieve("mine", [7], with_vectors=True)
    assert (point.payload, point.vector["s"].indices) == ({"deep": [{"a": None}]}, [3])
    assert client.count("embq").count == 20
    client.close()


def test_a_table_of_lance_loads_no_model(out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its notes name models, with `trust_remote_code`, which the library loads when rows are added."""
    lancedb = pytest.importorskip("lancedb")
    from lancedb.embeddings import TextEmbeddingFunction, register

    made = []

    @register("noted")
    class Noted(TextEmbeddingFunction):
        def __init__(self, **settings: Any) -> None:
            made.append(settings)
            super().__init__(**settings)

        def ndims(self) -> int:
            return 16

        def generate_embeddings(self, texts: Any) -> Any:
            raise AssertionError

    schema = lancedb.connect(written("lance", out, tmp_path / "own")).open_table("embq").schema
    function = {"name": "noted", "model": {"name": "/evil"}, "source_column": "key", "vector_column": "embedding"}
    notes = {**schema.metadata, b"embedding_functions": json.dumps([function]).encode()}
    lancedb.connect(tmp_path / "db").create_table("embq", schema=schema.with_metadata(notes))
    assert "holds rows of another tool" in refused("lance", out, tmp_path / "db", capfd, "rows")
    assert made == []


@pytest.mark.parametrize("kind", ["lance", "qdrant", "milvus"])
@pytest.mark.parametrize("entry", ["link", "dangling link", "pipe"])
def test_a_database_with_a_link_is_not_opened(
    kind: str, entry: str, out: Path, victim: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Milvus Lite deleted all files behind such a link when it was opened, and Qdrant created one."""
    folder = written(kind, out, tmp_path / "target.db")
    deepest = max((path for path in folder.rglob("*") if path.is_dir()), key=lambda path: len(path.parts))
    path = {"milvus": folder / "collections/embq/partitions"}.get(kind, deepest) / "p"
    if entry == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(victim.parents[1] if entry == "link" else tmp_path / "nowhere")
    assert "is a link, or no regular file" in refused(kind, out, folder, capfd)
    assert victim.read_text() == "x"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("file", ["manifest.json", "aliases.json", "snapshot.json", "deep.json"])
@pytest.mark.parametrize("name", ["../../../../../home", "/home", "a/../../x", "..\\x"])
def test_names_in_a_database_of_milvus_stay_below_it(
    file: str, name: str, out: Path, victim: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = written("milvus", out, tmp_path / "target.db") if file == "manifest.json" else tmp_path / "target.db"
    (folder / "collections" / "embq" / "snapshots").mkdir(parents=True, exist_ok=True)
    if file == "manifest.json":
        path = folder / "collections" / "embq" / file
        content = json.loads(path.read_text())
        content["partitions"][name] = {"data_files": [name], "delta_files": []}
        path.write_text(json.dumps(content))
    elif file == "aliases.json":
        (folder / file).write_text(json.dumps({"embq": name}))
    elif file == "snapshot.json":
        (folder / "collections" / "embq" / "snapshots" / file).write_text(json.dumps([{"data_files": {"p": [name]}}]))
    else:
        (folder / file).write_text("[" * 100_000)
    pytest.importorskip("milvus_lite")
    refused("milvus", out, folder, capfd)
    assert victim.read_text() == "x"


NAMES = ('x"; DROP TABLE victim; --', "%s", "{table}", "a b", "n\n", "select", "ctid", "a\0b", "é" * 40, "x" * 64)


@pytest.mark.parametrize("where", ["column", "vectors", "table", "model"])
def test_names_are_no_sql(where: str, postgres: str) -> None:
    """Each is a name, or one short error: of those that PostgreSQL cuts or has for itself."""
    import psycopg

    from embq.app.export.targets.pgvector import PgVector

    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS victim ()")
        for name in NAMES:
            dim, column = name if where == "vectors" else "v", name if where == "column" else "n"
            vector = pa.list_(pa.float32(), 1)
            schema = pa.schema({"id": pa.int64(), "key": pa.string(), dim: vector, column: pa.string()})
            rows = TargetRows(
                run="r1", model=name if where == "model" else "m", schema=schema, dims={dim: 1}, json=frozenset()
            )
            connection.execute("DROP TABLE IF EXISTS t")
            target = PgVector(postgres, name if where == "table" else "t")
            with closing(target):
                try:
                    assert target.open(rows) == "r1"
                    target.write(pa.table([[0], ["'"], pa.array([[1.0]], vector), ["\\N\t"]], schema=schema))
                    assert [ids.tolist() for ids in target.ids()] == [[0]]
                except (InputError, *target.errors):
                    assert name in NAMES[6:], name
            assert connection.execute("SELECT to_regclass('victim')").fetchone() == ("victim",)


def test_ids_of_another_type_are_one_error(out: Path, postgres: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A table that says that it holds the run, but was not made by embq."""
    import psycopg

    run_id = json.loads((out / "run.json").read_text())["run"]
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS embq")
        connection.execute("CREATE TABLE embq (id text, key text, embedding text, caption text)")
        connection.execute("INSERT INTO embq VALUES ('x'), (repeat('9', 40))")
        connection.execute(f"COMMENT ON TABLE embq IS 'embq run {run_id}, x'")
    status = run(["export", str(out), postgres, "--to", "pgvector", "--columns", "caption"])
    assert (status, "error[target_failed]" in capfd.readouterr().err) == (74, True)
