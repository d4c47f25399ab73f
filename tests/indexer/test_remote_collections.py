"""Plain files in buckets are one collection with their local copies, and are read in ranges."""

from __future__ import annotations

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
from embq.sources.access import ranged_reads
from embq.sources.access.filesystems import bare, filesystem
from tests.indexer.collections_made import DIM, KINDS, wanted_vectors
from tests.support.servers.storage import Server


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


@pytest.mark.parametrize("kind", ["npy", "parquet", "clip-retrieval"])
def test_rows_are_those_of_the_local_files(tmp_path: Path, s3: str, kind: str) -> None:
    root = KINDS[kind](tmp_path)
    (root / "_hidden").mkdir()
    (root / "_hidden/x.npy").write_bytes(b"")
    near = open_collection(root)
    vectors, rows = read(near)
    url = uploaded(root, tmp_path.name)
    far = open_collection(f"{url}/")
    assert (far.root, far.n, far.empty) == (url, near.n, near.empty)
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


def test_ranges_alone_are_read(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    matrix = np.random.default_rng(0).standard_normal((120_000, 32), np.float32)  # 15 MB
    np.save(folder / "a.npy", matrix)
    table = pa.table({"embedding": pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), 32)})
    pq.write_table(table, folder / "a.parquet", row_group_size=10_000, compression="none", use_dictionary=False)
    url, read_range, sent = uploaded(folder, tmp_path.name), ranged_reads.read_range, []

    def counted(url: str, start: int, stop: int) -> bytes:
        sent.append(len(data := read_range(url, start, stop)))
        return data

    monkeypatch.setattr(ranged_reads, "read_range", counted)
    for name, most in (("a.npy", 1 << 20), ("a.parquet", 9 << 20)):
        collection = open_collection(f"{url}/{name}")
        sent.clear()
        ((first, rows),) = collection.read_vectors(50_000, 51_000)
        assert np.array_equal(rows, matrix[first : first + 1_000])
        assert 0 < sum(sent) < most


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
def test_storage_that_fails_is_no_damage(tmp_path: Path, gcs: Server, kind: str) -> None:
    root, url = KINDS[kind](tmp_path), f"{gcs.url}/{tmp_path.name}"
    for path in root.rglob(f"*.{kind}"):
        filesystem(url).pipe_file(bare(f"{url}/{path.relative_to(root)}"), path.read_bytes())
    collection = open_collection(url)
    gcs.suffer("denied", 1)
    with pytest.raises(SourceError) as caught:
        read(collection)
    assert caught.value.code == "source_denied"
    gcs.suffer("busy", 1)
    assert len(read(collection)[0]) == collection.n


def test_what_is_no_embeddings_is_refused(tmp_path: Path, s3: str) -> None:
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
        (tmp_path / name).write_bytes(data)
    (tmp_path / "a.h5").write_bytes(b"")
    url = uploaded(tmp_path, tmp_path.name)
    for name in damaged:
        assert "cannot be read" in refused(f"{url}/{name}")
    assert "folders of this machine" in refused(f"{url}/a.h5")
    assert "is not there" in refused("s3://bucket/elsewhere")
    assert "in no folder or bucket" in refused("s3://one/a", "gs://other/a")


@pytest.mark.parametrize("scheme", ["http", "HTTPS", "hdfs", "abfs"])
def test_files_behind_other_urls_have_to_be_copied(tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}://host/embeddings"
    for ask in (lambda: open_collection(str(tmp_path), url), lambda: build_index(url, save_on_disk=False)):
        with pytest.raises(UsageError, match=f"not over {scheme.lower()}://") as caught:
            ask()
        assert "copy the files to a folder" in (caught.value.next_step or "")


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
