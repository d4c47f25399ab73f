"""Plain files behind URLs are one collection with their local copies, and are read in ranges."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.app.cli.entry_point import run
from embq.compat.autofaiss import build_index
from embq.core.errors import Exit, InputError, SourceError, UsageError
from embq.index.collection.opening import Collection, open_collection, rows_now
from embq.index.searcher import Searcher
from tests.indexer.collections_made import DIM, KINDS, wanted_vectors
from tests.support.servers.storage import HttpServer, http_server


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    with http_server(tmp_path_factory.mktemp("web")) as server:
        yield server


def uploaded(folder: Path, prefix: str) -> str:
    """Put all files of a folder into the bucket; gives the URL."""
    client = boto3.client("s3")
    for path in folder.rglob("*"):
        if path.is_file():
            client.put_object(Bucket="bucket", Key=f"{prefix}/{path.relative_to(folder)}", Body=path.read_bytes())
    return f"s3://bucket/{prefix}"


def read(collection: Collection) -> tuple[np.ndarray, pa.Table]:
    """(vectors, identities) of all rows."""
    vectors = [rows for _, rows in collection.read_vectors(0, collection.n)]
    return np.concatenate(vectors), pa.concat_tables(collection.read_identity(0, collection.n))


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [("npy", "s3"), ("npy", "http"), ("parquet", "s3"), ("clip-retrieval", "http")],
)
def test_rows_are_those_of_the_local_files(tmp_path: Path, s3: str, web: HttpServer, kind: str, scheme: str) -> None:
    root = KINDS[kind](web.folder / scheme / kind)
    (root / "_hidden").mkdir()
    (root / "_hidden/x.npy").write_bytes(b"")
    near = open_collection(root)
    vectors, rows = read(near)
    url = f"{web.url}/http/{kind}/plain/" if scheme == "http" else uploaded(root, tmp_path.name)
    far = open_collection(url)
    assert (far.root, far.n, far.empty) == (url.rstrip("/"), near.n, near.empty)
    assert [part.files[0].path for part in far.parts] == [part.files[0].path for part in near.parts]
    found, known = read(far)
    assert np.array_equal(found, vectors)
    assert known.equals(rows)
    ids = np.array([0, 11, 39])
    assert np.array_equal(far.read_rows_at(ids), vectors[ids])
    assert open_collection(url).digest == far.digest
    assert rows_now(far) is None


def test_files_and_folders_of_several_urls_follow_each_other(tmp_path: Path, s3: str) -> None:
    url = uploaded(KINDS["npy"](tmp_path), tmp_path.name)
    whole = open_collection(url)
    parts = open_collection(f"{url}/c.npy", f"{url}/a.npy", f"{url}/b")
    assert (parts.root, parts.folders) == (url, ("a.npy", "b", "c.npy"))
    assert np.array_equal(read(parts)[0], read(whole)[0])
    one = open_collection(f"{url}/b/part0.npy")
    assert (one.root, one.n) == (f"{url}/b", 1)


def test_ranges_alone_are_read(tmp_path: Path, web: HttpServer) -> None:
    folder = web.folder / "large"
    folder.mkdir()
    matrix = np.random.default_rng(0).standard_normal((120_000, 32), np.float32)  # 15 MB
    np.save(folder / "a.npy", matrix)
    table = pa.table({"embedding": pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), 32)})
    pq.write_table(table, folder / "a.parquet", row_group_size=10_000, compression="none", use_dictionary=False)
    for name, most in (("a.npy", 1 << 20), ("a.parquet", 9 << 20)):
        collection = open_collection(f"{web.url}/large/{name}")
        web.sent.clear()
        ((first, rows),) = collection.read_vectors(50_000, 51_000)
        assert np.array_equal(rows, matrix[first : first + 1_000])
        assert web.sent_of(name) < most


def test_a_large_file_of_a_server_without_ranges_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = np.random.default_rng(0).standard_normal((40_000, 32), np.float32)  # 5 MB
    np.save(tmp_path / "a.npy", matrix)
    monkeypatch.setattr("embq.sources.access.ranged_reads._WITHOUT_RANGES", set())
    with http_server(tmp_path) as server:
        server.ranges = False
        collection = open_collection(f"{server.url}/a.npy")
        assert np.array_equal(read(collection)[0], matrix)
        monkeypatch.setattr("embq.index.collection.remote.WHOLE_BYTES", 4 << 20)
        with pytest.raises(SourceError, match="sends no ranges") as refused:
            read(collection)
        assert "knows ranges" in refused.value.next_step


def test_an_object_that_changes_is_an_error(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = uploaded(KINDS["npy"](tmp_path), tmp_path.name)
    collection = open_collection(url)
    other = tmp_path / "other"
    other.mkdir()
    np.save(other / "a.npy", wanted_vectors(10, seed=9))
    batches = collection.read_vectors(0, collection.n, batch_rows=1)
    next(batches)
    uploaded(other, tmp_path.name)
    with pytest.raises(InputError, match=r"a\.npy") as caught:
        list(batches)
    assert caught.value.code == "part_damaged"
    with pytest.raises(InputError, match="written again") as caught:
        collection.check()
    assert caught.value.code == "part_changed"
    boto3.client("s3").delete_object(Bucket="bucket", Key=f"{tmp_path.name}/a.npy")
    with pytest.raises(InputError, match="is gone") as caught:
        collection.check()
    assert caught.value.code == "part_missing"


@pytest.mark.parametrize("kind", ["npy", "parquet"])
def test_storage_that_fails_is_no_damage(web: HttpServer, kind: str) -> None:
    KINDS[kind](web.folder / f"failing-{kind}")
    collection = open_collection(f"{web.url}/failing-{kind}/plain")
    web.suffer("denied", 1)
    with pytest.raises(SourceError) as caught:
        read(collection)
    assert caught.value.code == "source_denied"
    web.left = 0
    web.suffer("busy", 1)
    assert len(read(collection)[0]) == collection.n


def test_what_is_no_embeddings_is_refused(tmp_path: Path, s3: str, web: HttpServer) -> None:
    def refused(*urls: str) -> str:
        with pytest.raises((InputError, UsageError)) as caught:
            open_collection(*urls)
        return caught.value.message

    header = b"{'descr': '%s', 'fortran_order': False, 'shape': (9, 9), }\n"
    damaged = {
        "short.npy": b"\x93NUMPY\x01\x00\x3b\x00" + header % b"<f4",
        "pickle.npy": b"\x93NUMPY\x01\x00\x3a\x00" + header % b"|O",
        "text.npy": b"no array",
        "text.parquet": b"no table",
    }
    for name, data in damaged.items():
        (web.folder / name).write_bytes(data)
        assert "cannot be read" in refused(f"{web.url}/{name}")
    (web.folder / "run").mkdir()
    (web.folder / "run/run.json").write_bytes(b"{}")
    assert "not read over http" in refused(f"{web.url}/run")
    (web.folder / "a.h5").write_bytes(b"")
    assert "folders of this machine" in refused(f"{web.url}/a.h5")
    assert "is not there" in refused("s3://bucket/elsewhere")
    assert "is not there" in refused(f"{web.url}/elsewhere")
    assert "query" in refused(f"{web.url}/a.npy?signature=secret")
    assert "in no folder or bucket" in refused("s3://one/a", "https://other/a")


def test_the_verb_and_the_function_index_a_bucket(tmp_path: Path, s3: str, capfd: pytest.CaptureFixture[str]) -> None:
    url, to = uploaded(KINDS["parquet"](tmp_path), tmp_path.name), str(tmp_path / "index")
    assert run(["index", url, "--output", to, "--quiet"]) == Exit.DONE
    found = Searcher.open(Path(to)).search(wanted_vectors().astype(np.float32), 1)
    assert found.ids[:, 0].tolist() == list(range(40))
    more = pa.array(list(wanted_vectors(3, seed=8).astype(np.float32)), pa.list_(pa.float32(), DIM))
    pq.write_table(pa.table({"embedding": more, "url": ["a", "b", "c"]}), tmp_path / "more.parquet")
    boto3.client("s3").upload_file(str(tmp_path / "more.parquet"), "bucket", f"{tmp_path.name}/zz.parquet")
    assert run(["index", "add", url, "--output", to, "--quiet"]) == Exit.DONE
    assert Searcher.open(Path(to)).version.n == 43
    index, _ = build_index(
        url, file_format="parquet", save_on_disk=False, id_columns=["url"], ids_path=str(tmp_path / "ids"), verbose=50
    )
    assert index.ntotal == 43
