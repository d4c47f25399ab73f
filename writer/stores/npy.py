"""Parts in clip-retrieval's layout: a .npy file for each column of vectors, and a parquet file for the rest.

Row i of the files of one part is one sample. The parquet file comes first in the record, and is published first: who
sees vectors finds their metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from core.formats.files import METADATA, vector_folders
from core.formats.part import COLUMNS
from core.models import ModelConfig
from core.run.commits import CommittedFile
from core.run.layout import Layout
from core.run.reader import vectors
from writer.hashing import HashingFile
from writer.stores.base import Draft, PartName, whole_or_none
from writer.stores.parquet import ROW_GROUP_ROWS, with_notes, write_parquet

SLICE_ROWS = 16_384
"""Rows of vectors that are written at once."""

LAST = ("id", "key", "unit_id", "ordinal", "metadata", "document", "chunk", "chunks", "char_start", "char_end")
"""Columns that stand behind those which clip-retrieval writes."""


class NpyStore:
    """Rows as `metadata/metadata_N.parquet`, `img_emb/img_emb_N.npy`, ...; see `writer.stores.base.Store`.

    Args:
        model: of the run; its vectors have folders of their own.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._folders = vector_folders(model)
        self._images = "image" in model.modalities

    def write(self, table: pa.Table, name: PartName, notes: Mapping[str, str]) -> list[Draft]:
        """See `writer.stores.base.Store`. Texts' vectors come before those of images."""
        folders = sorted(self._folders.items(), key=lambda item: item[1], reverse=True)
        unfinished = {folder: name.unfinished(folder) for folder in (METADATA, *(folder for _, folder in folders))}
        with whole_or_none(list(unfinished.values()), name.layout.root / METADATA):
            drafts = [self._write_metadata(table, name, unfinished[METADATA], notes)]
            for column, folder in folders:
                drafts.append(
                    _write_vectors(table, column, f"{folder}/{folder}_{name.number:08d}.npy", unfinished[folder])
                )
        return drafts

    def _write_metadata(self, table: pa.Table, name: PartName, temporary: Path, notes: Mapping[str, str]) -> Draft:
        rest = table.drop_columns(list(self._folders))
        last = [column for column in LAST if column in rest.column_names]
        first = [column for column in rest.column_names if column not in last]
        ordered = rest.select([*first, *last])
        if self._images:
            ordered = ordered.add_column(0, "image_path", ordered["key"])
        names = json.dumps(table.column_names)
        options = {"compression": "snappy", "row_group_size": ROW_GROUP_ROWS, "use_dictionary": ["unit_id"]}
        path = f"{METADATA}/{METADATA}_{name.number:08d}.parquet"
        noted = with_notes(ordered, {**notes, COLUMNS: names})
        return write_parquet(noted, temporary, options, path=path, kind="rows", first_id=name.first_id)

    def join(self, layout: Layout, files: Iterable[CommittedFile]) -> None:
        """See `writer.stores.base.Store`; readers need nothing but the parts."""


def _write_vectors(table: pa.Table, column: str, path: str, temporary: Path) -> Draft:
    """Write a column of vectors as `numpy.save` writes a matrix in C order, a slice at a time; OSError."""
    type_ = table.schema.field(column).type
    dtype = np.dtype(type_.value_type.to_pandas_dtype()).newbyteorder("<")
    header = {"descr": dtype.str, "fortran_order": False, "shape": (table.num_rows, type_.list_size)}
    with open(temporary, "wb") as raw:
        file = HashingFile(raw)
        np.lib.format.write_array_header_1_0(file, header)
        for batch in table.select([column]).to_batches(max_chunksize=SLICE_ROWS):
            file.write(vectors(pa.Table.from_batches([batch]), column).data)
    said = CommittedFile(
        path=path, kind="vectors", rows=table.num_rows, bytes=file.size, sha256=file.hexdigest(), column=column
    )
    return Draft(temporary=temporary, file=said)
