"""Reads an output folder as another program does, in that program's own environment. Nothing of embq is imported here.

    python look.py READER FOLDER

prints one JSON object: what was found, as lists in the order in which the program has them.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np


def embedding_reader_npy(root):
    """A folder of vectors alone, as autofaiss and `clip-retrieval index` read it."""
    from embedding_reader import EmbeddingReader

    reader = EmbeddingReader(embeddings_folder=str(root), file_format="npy")
    blocks = [block for block, _ in reader(batch_size=128, show_progress=False)]
    return {"vectors": np.concatenate(blocks).tolist(), "count": int(reader.count), "dimension": int(reader.dimension)}


def embedding_reader_parquet_npy(root):
    """Vectors with the columns beside them: both lists of files sorted, and paired by position."""
    from embedding_reader import EmbeddingReader

    folder = next(path for path in (root / "img_emb", root / "text_emb") if path.exists())
    reader = EmbeddingReader(
        embeddings_folder=str(folder),
        metadata_folder=str(root / "metadata"),
        file_format="parquet_npy",
        meta_columns=["key", "id"],
    )
    return _pairs(reader)


def embedding_reader_parquet(root):
    """Vectors in a column of parquet files."""
    from embedding_reader import EmbeddingReader

    reader = EmbeddingReader(
        embeddings_folder=str(root / "parts"),
        file_format="parquet",
        embedding_column="embedding",
        meta_columns=["key", "id"],
    )
    return _pairs(reader)


def _pairs(reader):
    found = {"vectors": [], "keys": [], "ids": []}
    for block, table in reader(batch_size=128, show_progress=False):
        found["vectors"] += block.tolist()
        found["keys"] += list(table["key"])
        found["ids"] += [int(number) for number in table["id"]]
    return found


def autofaiss_npy(root):
    """An index over a folder of .npy files; the nearest neighbour of each vector."""
    vectors = np.concatenate([np.load(path) for path in sorted(root.glob("*.npy"))]).astype("float32")
    return {"neighbours": _neighbours(vectors, embeddings=str(root), file_format="npy")}


def autofaiss_parquet(root):
    """An index over a column of parquet files; the nearest neighbour of each vector."""
    import pyarrow.parquet as pq

    columns = [pq.read_table(path)["embedding"].to_pylist() for path in sorted((root / "parts").glob("*.parquet"))]
    vectors = np.array([vector for column in columns for vector in column], "float32")
    options = {"file_format": "parquet", "embedding_column_name": "embedding"}
    return {"neighbours": _neighbours(vectors, embeddings=str(root / "parts"), **options)}


def _neighbours(vectors, **options):
    from autofaiss import build_index

    with tempfile.TemporaryDirectory() as folder:
        index, _ = build_index(
            index_path=f"{folder}/knn.index",
            index_infos_path=f"{folder}/infos.json",
            index_key="Flat",
            metric_type="l2",
            current_memory_available="2G",
            max_index_memory_usage="1G",
            **options,
        )
        assert index is not None
        return [int(row[0]) for row in index.search(vectors, 1)[1]]


def autofaiss_build_index(root):
    """Answers of autofaiss' own index of an array."""
    from autofaiss import build_index

    index, infos = build_index(np.load(root / "vectors.npy"), save_on_disk=False, current_memory_available="32G")
    scores, ids = index.search(np.load(root / "queries.npy"), 10)
    return {"ids": ids.tolist(), "scores": scores.tolist(), "infos": list(infos)}


def clip_back(root):
    """The rules of the clip-retrieval back end: `metadata/*.parquet`, sorted, concatenated; a number is a row of it."""
    import pandas as pd
    import pyarrow.parquet as pq

    files = sorted((root / "metadata").glob("*.parquet"))
    frame = pd.concat([pd.read_parquet(path) for path in files])
    schemas = [pq.read_schema(path) for path in files]
    return {
        "keys": list(frame["key"]),
        "ids": [int(number) for number in frame["id"]],
        "columns": list(frame.columns),
        "image_paths": list(frame["image_path"]) if "image_path" in frame else None,
        "captions": list(frame["caption"]),
        "one_schema": all(schema.remove_metadata().equals(schemas[0].remove_metadata()) for schema in schemas),
        "unnamed": [name for name in frame.columns if name.startswith("__index")],
    }


def faiss_file(root):
    """An exported index: ids of the nearest rows, loaded and memory-mapped."""
    import faiss

    vectors = np.load(root / "queries.npy")
    flags = {"ids": 0, "mapped": faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY}
    path = str(root / "knn.index")
    return {name: faiss.read_index(path, flag).search(vectors, 10)[1].tolist() for name, flag in flags.items()}


def index_combiner(root):
    """Exported shards, merged by clip-retrieval: ids of the nearest rows."""
    import faiss
    from clip_server import leave_out_models

    leave_out_models()
    from clip_retrieval.clip_back_prepro.index_combiner import index_combiner as combine

    combine(str(root / "shards"), str(root / "combined"))
    index = faiss.read_index(str(root / "combined" / "populated.index"))
    return {"ids": index.search(np.load(root / "queries.npy"), 10)[1].tolist(), "rows": index.ntotal}


def autofaiss_score(root):
    """Scores of an exported index over the vectors that it was made of."""
    from autofaiss import score_index

    infos = score_index(
        str(root / "knn.index"), str(root / "embeddings"), save_on_disk=False, current_memory_available="1G"
    )
    return {"scores": {name: float(value) for name, value in infos.items() if isinstance(value, (int, float))}}


def duckdb_parquet(root):
    """A query over all parts."""
    import duckdb

    rows = duckdb.sql(f"SELECT id, key, embedding FROM '{root}/parts/*.parquet' ORDER BY id").fetchall()
    ids, keys, vectors = zip(*rows, strict=True)
    return {"ids": list(ids), "keys": list(keys), "vectors": [list(map(float, vector)) for vector in vectors]}


def duckdb_parts_of_workers(root):
    """The query of docs/reference/output-folder.md."""
    import duckdb

    rows = duckdb.sql(
        "SELECT coalesce(id, regexp_extract(filename, '\\.(\\d+)\\.parquet$', 1)::BIGINT + file_row_number) AS id, key "
        f"FROM read_parquet('{root}/parts/*.parquet', union_by_name = true, filename = true, file_row_number = true) "
        "ORDER BY id"
    ).fetchall()
    return {"rows": rows}


def pandas_parquet(root):
    """A data frame of all parts."""
    import pandas as pd

    frame = pd.read_parquet(root / "parts")
    vectors = [list(map(float, vector)) for vector in frame["embedding"]]
    return {"ids": [int(number) for number in frame["id"]], "keys": list(frame["key"]), "vectors": vectors}


if __name__ == "__main__":
    reader, folder = sys.argv[1:]
    answer = globals()[reader](Path(folder))
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # Arrow's threads may abort a process that ends (apache/arrow issues 34314 and 39862)
