"""Names, dtypes and columns of clip-retrieval's layout, which its readers rely on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embq.core.formats.folders import vector_folders
from embq.core.models import ModelConfig, NamedModel
from embq.core.run.commit_log import CommitLog
from tests.contract.storing import COLUMNS, Output


def header(path: Path) -> tuple[tuple[int, int], tuple[int, ...], bool, np.dtype]:
    """Version, shape, whether it is in Fortran's order, dtype."""
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        return version, *np.lib.format.read_array_header_1_0(file)


@pytest.mark.parametrize(("dtype", "stored"), [("float16", "<f2"), ("float32", "<f4")])
def test_images_and_texts(tmp_path: Path, dtype: str, stored: str) -> None:
    output = Output(tmp_path / "out", "npy", modalities=("image", "text"), dtype=dtype)
    output.commit(7)
    output.commit(2, 1)
    (first, second) = [commit.files for commit in CommitLog(output.layout).read() if commit.kind == "data"]
    assert [file.path for file in first] == [
        "metadata/metadata_00000002.parquet",
        "text_emb/text_emb_00000002.npy",
        "img_emb/img_emb_00000002.npy",
    ]
    assert [(file.kind, file.column, file.rows, file.first_id) for file in second] == [
        ("rows", "", 3, 7),
        ("vectors", "text_embedding", 3, -1),
        ("vectors", "image_embedding", 3, -1),
    ]
    for file, dim in ((first[1], 4), (first[2], 3)):
        assert header(output.root / file.path) == ((1, 0), (7, dim), False, np.dtype(stored))
    names = [column.name for column in COLUMNS]
    parquet = pq.ParquetFile(output.root / first[0].path)
    schema = parquet.schema_arrow
    assert schema.names == ["image_path", "caption", *names, "id", "key", "unit_id", "ordinal", "metadata"]
    assert set(schema.types) <= {pa.string(), pa.int64(), pa.int32(), pa.float64(), pa.bool_()}
    assert b"pandas" not in schema.metadata
    assert parquet.metadata.row_group(0).column(0).compression == "SNAPPY"
    table = parquet.read()
    assert table["image_path"].to_pylist() == table["key"].to_pylist() == output.committed[0]["key"].to_pylist()


def test_texts_alone(tmp_path: Path) -> None:
    output = Output(tmp_path / "out", "npy", columns=())
    output.commit(3)
    assert {path.name for path in output.root.iterdir() if not path.name.startswith("_")} >= {"metadata", "text_emb"}
    assert not (output.root / "img_emb").exists()
    assert not (output.root / "parts").exists() or list((output.root / "parts").iterdir()) == []
    (table,) = [pq.read_table(path) for path in (output.root / "metadata").iterdir()]
    assert table.column_names == ["caption", "id", "key", "unit_id", "ordinal", "metadata"]


def test_several_models_have_folders_of_their_own() -> None:
    members = [
        NamedModel(name="b32", spec="stub:4", modalities=("image", "text")),
        NamedModel(name="mini", spec="stub:8", modalities=("text",)),
    ]
    model = ModelConfig.several(members, modalities=("image", "text"), precision="fp32")
    assert vector_folders(model) == {
        "b32_image_embedding": "b32_img_emb",
        "b32_text_embedding": "b32_text_emb",
        "mini_embedding": "mini_text_emb",
    }


def test_only_failures_make_no_empty_files(tmp_path: Path) -> None:
    output = Output(tmp_path / "out", "npy", columns=())
    output.committer.close({})
    assert output.files() == set()
