"""Checks that clip-retrieval's readers, which know neither commits nor ids, read an npy output correctly.

They list all files below a folder, sort them by name, and pair the i-th vector of all .npy files with the i-th row of
all .parquet files. So one file too many, or of another length, shifts every later row without an error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from embq.app.verify.findings import Findings
from embq.core.errors import InputError, OutputError
from embq.core.formats.folders import METADATA, vector_folders
from embq.core.run.commit_log import CommitLog
from embq.core.run.layout import Layout
from embq.core.run.run_info import RunInfo
from embq.core.storage.beneath import open_regular

MAGIC = b"\x93NUMPY\x01\x00"
NAME = re.compile(r"_(\d{8})\.(?:npy|parquet)$")


def check_clip_retrieval(layout: Layout, info: RunInfo, findings: Findings) -> None:
    """Check the folders; InputError if the output does not have that layout."""
    root = layout.root
    if info.format != "npy" or not isinstance(root, Path):
        raise InputError(
            f"clip-retrieval reads npy files in a local folder; the parts of {root} are {info.format}",
            next_step="give its readers what `embq export OUT DIR --output-format npy` makes",
        )
    folders = (METADATA, *vector_folders(info.model).values())
    by_folder = {folder: _seen_by_readers(root / folder) for folder in folders}
    committed = _committed_numbers(layout)
    for folder, paths in by_folder.items():
        numbers = [_number(path, folder) for path in paths]
        if numbers != committed:
            wrong = sorted({str(n) for n in {*numbers, *committed} if numbers.count(n) != committed.count(n)})
            findings.add("layout", folder, f"its files are not those of the commits; look at {', '.join(wrong[:3])}")
    schemas = {path.name: _schema(path, findings) for path in by_folder[METADATA]}
    if len({str(schema) for _, schema in schemas.values() if schema is not None}) > 1:
        findings.add("layout", METADATA, "its files have several schemas")
    rows = [count for count, _ in schemas.values()]
    for folder in folders[1:]:
        _check_vectors(folder, by_folder[folder], rows, findings)


def _seen_by_readers(folder: Path) -> list[Path]:
    """The files of a folder in the order of the readers."""
    return sorted((*folder.rglob("*.npy"), *folder.rglob("*.parquet")), key=str)


def _committed_numbers(layout: Layout) -> list[int]:
    return [commit.n for commit in CommitLog(layout).read() if any(file.of_rows for file in commit.files)]


def _number(path: Path, folder: str) -> int:
    """The number in a file's name; 0 for a file of another name or in another folder."""
    match = NAME.search(path.name)
    return int(match.group(1)) if match and path.parent.name == folder and path.name.startswith(f"{folder}_") else 0


def _schema(path: Path, findings: Findings) -> tuple[int, pa.Schema | None]:
    """Rows and columns of a parquet file; -1 and None if it cannot be read."""
    try:
        with pq.ParquetFile(path) as file:
            return file.metadata.num_rows, file.schema_arrow.remove_metadata()
    except (OSError, pa.ArrowException) as error:
        findings.add("layout", f"{METADATA}/{path.name}", f"it cannot be read: {error}")
        return -1, None


def _check_vectors(folder: str, paths: Sequence[Path], rows: Sequence[int], findings: Findings) -> None:
    """Check that each file has as many rows as its metadata file, and that all have one width and dtype."""
    if len(paths) != len(rows):
        findings.add("layout", folder, f"it has {len(paths)} files, {METADATA} has {len(rows)}")
    shapes: set[tuple[str, int]] = set()
    for path, expected in zip(paths, rows, strict=False):
        try:
            dtype, count, dim = _header(path)
        except (OSError, OutputError) as error:
            findings.add("layout", f"{folder}/{path.name}", f"its header cannot be used: {error}")
            continue
        shapes.add((dtype, dim))
        if count != expected:
            findings.add("layout", f"{folder}/{path.name}", f"it has {count} rows, its metadata has {expected}")
    if len(shapes) > 1:
        findings.add("layout", folder, f"its files differ in dtype or dimension: {sorted(shapes)}")


def _header(path: Path) -> tuple[str, int, int]:
    """dtype, rows and dimension by the first line of a file, which is all that the readers look at."""
    with open_regular(path) as file:
        line = file.readline(300)
    if not line.startswith(MAGIC) or not line.endswith(b"\n"):
        raise OutputError("it is not npy 1.0 with a header of one line below 300 bytes")
    try:
        header = ast.literal_eval(line[10:].decode("latin1").strip())
        dtype, (rows, dim), fortran = header["descr"], header["shape"], header["fortran_order"]
    except (ValueError, SyntaxError, KeyError, TypeError) as error:
        raise OutputError(f"{error}") from error
    if dtype not in ("<f2", "<f4") or fortran:
        raise OutputError(f"{dtype}, Fortran order {fortran}: only <f2 and <f4 in C order are known")
    if path.stat().st_size != len(line) + rows * dim * int(dtype[2]):
        raise OutputError("its size is not that of its vectors")
    return dtype, rows, dim
