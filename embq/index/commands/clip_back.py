"""Folder that clip-retrieval's back end serves: `embq index export --output-format clip-back`.

```
DIR/image.index  DIR/text.index       files of faiss
DIR/metadata/metadata_00000000.parquet  row of each id, deleted ones too: the back end finds a row by its position
DIR/indices_paths.json                options of `clip-retrieval back`
```
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from embq.core.errors import InputError
from embq.core.formats.npy import clip_retrieval_columns
from embq.core.formats.parquet import ROW_GROUP_ROWS
from embq.core.formats.part import Cursor
from embq.core.storage.durable import fsync_file
from embq.core.storage.new_folder import new_folder
from embq.index.faiss_file import FaissExport, write_faiss_file
from embq.index.index_files.identity import Identity
from embq.index.index_files.version import Version, indexes_below, read_current, resolve_index

INDICES = "indices_paths.json"

FILE_ROWS = 1 << 18
"""Rows of one file of metadata, which are in memory while it is written."""

HIDDEN = ("id", "similarity", "source", "unit_id")
"""Columns that the back end sets itself, or that tell its users nothing."""


def write_clip_back(
    source: Path, folder: Path, *, output: str | None, refine: bool | None
) -> tuple[list[FaissExport], list[str]]:
    """Write a new folder for clip-retrieval's back end; returns the exports of its indexes and notes for the user.

    Args:
        source: output folder of a run, whose indexes of images and of texts are taken, or one index.
        output: of the run; None for all.
        refine: see `write_faiss_file`; None for True.

    Raises InputError if there is no index, or two of one modality, or where `folder` is in use.
    """
    indexes = _indexes(source, output)
    done: dict[str, FaissExport] = {}
    with new_folder(folder) as unfinished:
        for modality, index in indexes.items():
            done[modality] = write_faiss_file(index, unfinished / f"{modality}.index", refine=refine is not False)
        versions = [export.version for export in done.values()]
        if len({version.collection.root for version in versions}) > 1:
            raise InputError(
                f"the indexes of {source} are of different rows", next_step="add --output", code="which_index"
            )
        columns = _write_metadata(
            max(versions, key=lambda version: version.next_id), unfinished / "metadata", images="image" in done
        )
        options, notes = _options(folder, versions[0], columns)
        path = unfinished / INDICES
        path.write_text(json.dumps({source.name: options}, indent=1) + "\n", encoding="utf-8")
        fsync_file(path)
    placed = [
        replace(export, files=tuple(replace(file, path=folder / file.path.name) for file in export.files))
        for export in done.values()
    ]
    notes += [
        f"{modality}.index answers with squared distances, which the back end shows as similarity: 2 - 2 cosine"
        for modality, export in done.items()
        if export.distance == "squared distance"
    ]
    return placed, notes


def _indexes(source: Path, output: str | None) -> dict[str, Path]:
    """Modality -> index."""
    indexes = list(indexes_below(source).values()) if output is None else []
    by_modality: dict[str, Path] = {}
    for index in indexes or [resolve_index(source, output)]:
        modality = "text" if "text" in read_current(index).collection.output else "image"
        if modality in by_modality:
            raise InputError(
                f"{source} has two indexes of {modality}s, {by_modality[modality].name} and {index.name}",
                next_step=f"add --vector-name {index.name}",
                code="which_index",
            )
        by_modality[modality] = index
    return by_modality


def _write_metadata(version: Version, folder: Path, *, images: bool) -> list[str]:
    """Write the identity of all ids as parquet files; returns the names of the columns."""
    identity = Identity.open([(file.check(version.index), file.first_id, file.rows) for file in version.identity])
    folder.mkdir()
    cursor, names = Cursor(identity.tables()), []
    while (table := cursor.read(FILE_ROWS)).num_rows:
        ordered = clip_retrieval_columns(table, images=images)
        path = folder / f"metadata_{table['id'][0].as_py() // FILE_ROWS:08d}.parquet"
        pq.write_table(ordered, path, compression="snappy", row_group_size=ROW_GROUP_ROWS)
        fsync_file(path)
        names = ordered.column_names
    return names


def _options(folder: Path, version: Version, columns: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Options of the back end for this folder, and notes for the user."""
    options = {
        "indice_folder": str(folder),
        "columns_to_return": [name for name in columns if name not in HIDDEN],
        "enable_faiss_memory_mapping": True,
        # On by default there, and for two models only.
        "use_jit": False,
        "enable_mclip_option": False,
        "provide_aesthetic_embeddings": False,
    }
    model = "" if version.collection.model is None else str(version.collection.model["output"]["spec"])
    if model.startswith("open_clip:") and "?" not in model and "local-dir" not in model:
        return {**options, "clip_model": model}, []
    return options, [
        f"the rows are of {model or 'an unknown model'}, with which the back end cannot embed queries: ask it by "
        "embedding_input only"
    ]
