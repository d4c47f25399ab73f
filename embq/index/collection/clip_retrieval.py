"""Collections in the layout of clip-retrieval: img_emb/, text_emb/ and metadata/, aligned by file number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from embq.core.errors import InputError
from embq.index.collection.columns import find_columns
from embq.index.collection.listing import Listing, Shape, file_ref, noted, same_shape
from embq.index.collection.npy import inspect_file
from embq.index.collection.parquet import opened
from embq.index.collection.parts import no_embeddings
from embq.index.collection.remote import FilePath, each

FOLDERS = {"image": "img_emb", "text": "text_emb"}
"""Modality -> folder of its vectors, whose name is also that of their column."""
METADATA = "metadata"


def is_layout(root: FilePath) -> bool:
    """True for a folder with this layout."""
    return any((root / folder).is_dir() for folder in FOLDERS.values())


def describe_layout(
    folder: FilePath, roots: Sequence[FilePath], *, output: str | None, id_columns: Sequence[str]
) -> dict[str, Any]:
    """The fields of the collection that such folders are, see `Collection`.

    Args:
        folder: that the paths of the parts' files are relative to.
        output: "image" or "text"; None for images, if there are any.
        id_columns: columns of metadata; () for all.

    Raises InputError `misaligned` if files that belong together are missing or have not as many rows as each other,
    and what `embq.index.collection.npy.open_matrix` raises.
    """
    layouts = [_layout(root, output) for root in roots]
    layout, listing = layouts[0], Listing()
    for root, other in zip(roots, layouts, strict=True):
        if (set(other.vectors), other.metadata is None) != (set(layout.vectors), layout.metadata is None):
            raise InputError(
                f"{root} and {roots[0]} have not the same of {', '.join([*FOLDERS.values(), METADATA])}",
                next_step="bring back what is missing, or index them apart",
                code="mixed_embeddings",
            )
    schemas: list[tuple[FilePath, pa.Schema]] = []
    shapes: dict[str, Shape] = {}
    remote = not isinstance(folder, Path)
    vectors = [path for folder_layout in layouts for files in folder_layout.vectors.values() for path in files.values()]
    summaries = dict(zip(vectors, each(inspect_file, vectors, remote=remote), strict=True))
    metadata = [path for folder_layout in layouts for path in (folder_layout.metadata or {}).values()]
    footers = dict(zip(metadata, each(_footer, metadata, remote=remote), strict=True))
    for folder_layout, number, first in _files(layouts):
        rows, refs = summaries[first].rows, []
        for name, files in folder_layout.vectors.items():
            path = files[number]
            summary = summaries[path]
            _same_rows(first, rows, path, summary.rows)
            if summary.shape is not None:
                shapes[name] = same_shape(shapes.get(name), summary.shape)
            refs.append(file_ref(folder, path, kind="vectors", column=FOLDERS[name]))
        if folder_layout.metadata is not None:
            path = folder_layout.metadata[number]
            count, schema = footers[path]
            _same_rows(first, rows, path, count)
            schemas.append((path, schema))
            notes = noted(schema.metadata or {})
            shapes[METADATA] = same_shape(shapes.get(METADATA), Shape(path=path, dim=0, dtype="", **notes))
            refs.append(file_ref(folder, path))
        listing.add(rows, *refs)
    if layout.output not in shapes:
        count = len(layout.vectors[layout.output])
        raise no_embeddings(f"{roots[0]} holds no rows: its {count} .npy files are empty", "name another folder")
    dim = shapes[layout.output].dim
    return {
        "kind": "clip-retrieval",
        "column": FOLDERS[layout.output],
        "output": layout.output,
        "dim": dim,
        "fingerprint": (shapes[METADATA].fingerprint or None) if layout.metadata is not None else None,
        "query_columns": {name: FOLDERS[name] for name in layout.partners if shapes[name].dim == dim},
        **find_columns(schemas, id_columns or None, ()).fields(),
        **listing.fields(),
    }


def _files(layouts: Sequence[_Layout]) -> Iterator[tuple[_Layout, str, FilePath]]:
    return ((layout, *file) for layout in layouts for file in layout.vectors[layout.output].items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The files of such a folder, each by its number as it is written; all have the same numbers.

    Attributes:
        output: whose vectors are indexed: "image" or "text".
        vectors: files of these, and after them of the other modality, if there are any.
        metadata: files of metadata; None if there is no such folder.
    """

    output: str
    vectors: dict[str, dict[str, FilePath]]
    metadata: dict[str, FilePath] | None

    @property
    def partners(self) -> list[str]:
        """The other modality, by whose vectors these can be asked for."""
        return [name for name in self.vectors if name != self.output]


def _layout(root: FilePath, output: str | None) -> _Layout:
    """Files of the folders; InputError if the requested output is missing, or a file lacks its partner."""
    by_output = {name: _numbered(root / folder, ".npy") for name, folder in FOLDERS.items() if (root / folder).is_dir()}
    if output is not None and output not in by_output:
        raise InputError(
            f"{root} has no vectors of {output!r}", next_step=f"it has {' and '.join(by_output)}", code="which_output"
        )
    chosen = output or next(name for name in FOLDERS if by_output.get(name) or list(by_output) == [name])
    if not by_output[chosen]:
        raise no_embeddings(f"{root / FOLDERS[chosen]} holds no .npy files", "name another folder")
    metadata = _numbered(root / METADATA, ".parquet") if (root / METADATA).is_dir() else None
    partners = {name: files for name, files in by_output.items() if name != chosen and files}
    beside = {} if metadata is None else {root / METADATA: metadata}
    beside |= {root / FOLDERS[name]: files for name, files in partners.items()}
    _pair(root / FOLDERS[chosen], by_output[chosen], beside)
    return _Layout(output=chosen, vectors={chosen: by_output[chosen], **partners}, metadata=metadata)


def _footer(path: FilePath) -> tuple[int, pa.Schema]:
    """Rows and columns of a file of metadata."""
    with opened(path) as file:
        return file.metadata.num_rows, file.schema_arrow


def _numbered(folder: FilePath, suffix: str) -> dict[str, FilePath]:
    """Number, as it is written -> file, in the order of their names."""
    by_number: dict[str, FilePath] = {}
    values: dict[int, FilePath] = {}
    files: Iterator[FilePath] = folder.glob(f"[!.]*{suffix}")
    for path in sorted(files, key=str):
        match = re.search(r"(?<!\d)(\d{1,18})\Z", path.stem)
        number = match[1] if match else path.stem
        if match and (twin := values.setdefault(int(number), path)) != path:
            raise InputError(
                f"{twin.name} and {path.name} have one number: two runs wrote into {folder}",
                next_step="take the files of one of them away",
                code="misaligned",
            )
        by_number[number] = path
    return by_number


def _pair(folder: FilePath, files: dict[str, FilePath], partners: dict[FilePath, dict[str, FilePath]]) -> None:
    """Raise InputError if a file of one folder has none with its number in another."""
    for other, theirs in partners.items():
        for have, lack, where in ((files, theirs, other), (theirs, files, folder)):
            if unpaired := next((number for number in have if number not in lack), None):
                raise InputError(
                    f"{have[unpaired]} belongs to a file with the same number in {where}, which is not there",
                    next_step="bring the other file back, or take this one away",
                    code="misaligned",
                )


def _same_rows(path: FilePath, rows: int, other: FilePath, count: int) -> None:
    if count != rows:
        raise InputError(
            f"{path} has {rows:,} rows and {other} has {count:,}: they do not belong together",
            next_step="bring back the files that were written together",
            code="misaligned",
        )
