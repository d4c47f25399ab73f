"""`embq.embed`: vectors of a list, an iterator or a column of a table, in this process or by workers beside it."""

from __future__ import annotations

import itertools
import json
import tarfile
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from embq.app.embedding.bars import shown
from embq.app.embedding.items import is_one, of_one_kind
from embq.app.embedding.model import AUTO, Device, Model, OnError, device_name, not_embedded
from embq.app.embedding.tables import Table, table_of
from embq.core.arguments import check, python_errors, refuse_set
from embq.core.errors import UsageError
from embq.core.settings import spool_folder
from embq.core.storage.paths import place

SHARD_IMAGES = 1_000
"""Images in a shard that workers read; these are in memory together."""


@python_errors(devices="device")
def embed(
    data: Any,
    model: str | Model,
    *,
    text_column: str | None = None,
    image_column: str | None = None,
    output_column: str = "embedding",
    precision: str = AUTO,
    device: Device | Sequence[Device] = AUTO,
    on_error: OnError = "raise",
    progress: bool | None = None,
) -> Any:
    """See `embq.embed`."""
    several = device if isinstance(device, list | tuple) else [device]
    devices = ",".join(map(device_name, several)) or AUTO
    if on_error not in ("raise", "null"):
        raise UsageError(f"on_error is {on_error!r}", next_step="use 'raise' or 'null'")
    check(text_column=text_column, image_column=image_column, output_column=output_column, required=("output_column",))
    check(precision=precision, required=("precision",))
    table = table_of(data)
    if table is None:
        if text_column is not None or image_column is not None:
            raise UsageError(
                f"a column is named, and {type(data).__name__} is no table embq knows",
                next_step="leave it out; or give a DataFrame, a pyarrow.Table, a datasets.Dataset or a dict of columns",
            )
        if is_one(data) or not isinstance(data, Iterable):
            name = type(data).__name__
            raise UsageError(f"data is {name} and no list or table", next_step="give a list: embq.embed([item], ...)")
        refuse_set("data", data)
        return _checked(_vectors(data, "", model, precision, devices, progress), on_error)[0]
    name, modality = _column(table, text_column, image_column)
    if doubled := next((column for column in (name, output_column) if table.names.count(column) > 1), None):
        raise UsageError(f"the table has several columns {doubled!r}", next_step="rename or drop all but one")
    items = table.column(name)
    vectors, failures = _checked(_vectors(items, modality, model, precision, devices, progress), on_error)
    return table.with_vectors(output_column, vectors, [*failures])


def _column(table: Table, text: str | None, image: str | None) -> tuple[str, str]:
    if (text is None) == (image is None):
        raise UsageError(
            "a table is given, and " + ("no column of it" if text is None else "two columns of it"),
            next_step="name one: text_column='COLUMN' or image_column='COLUMN'",
        )
    name, modality = (text, "text") if text is not None else (str(image), "image")
    assert name is not None
    if name not in table.names:
        raise UsageError(f"the table has no column {name!r}", next_step=f"it has {', '.join(map(str, table.names))}")
    return name, modality


Found = tuple[np.ndarray, dict[int, tuple[str, str]]]
"""Vectors, float32 of shape (n, dim), NaN if there is none; and position -> (code, message)."""


def _checked(answer: Found, on_error: OnError) -> Found:
    if answer[1] and on_error == "raise":
        raise not_embedded(answer[1], len(answer[0]))
    return answer


def _vectors(
    items: Iterable[Any], modality: str, model: str | Model, precision: str, devices: str, progress: bool | None
) -> Found:
    if devices != "all" and "," not in devices:
        own = model if isinstance(model, Model) else Model(model, device=devices, precision=precision)
        try:
            return own.vectors(items, modality=modality, progress=progress)
        finally:
            if own is not model:
                own.close()
    if isinstance(model, Model):
        raise UsageError("a loaded model has one device", next_step="give the model's spec, or leave device out")
    return by_workers(items, modality, model, precision, "auto" if devices == "all" else devices, progress)


def by_workers(
    items: Iterable[Any], modality: str, spec: str, precision: str, devices: str, progress: bool | None
) -> Found:
    """Vectors by a run on devices of this machine, in a folder that is removed at the end."""
    from embq.app.embedding.runs import run
    from embq.core.run.reader import row_tables
    from embq.core.run.standing_failures import standing_failures

    with TemporaryDirectory(prefix="embq-embed-", dir=spool_folder()) as folder:
        kind, checked = of_one_kind(items, modality)
        total = len(items) if isinstance(items, Sequence) else None
        inputs, count, missing = _written(Path(folder), kind, shown(checked, total, enabled=progress))
        if not inputs:
            return np.empty((count, 0), np.float32), missing
        out = Path(folder) / "out"
        with run(
            inputs,
            out,
            model=spec,
            modality=kind,
            precision=precision,
            dtype="float32",
            devices=devices,
            keep_going=True,
        ) as job:
            job.wait(progress=progress)
        vectors, root = np.empty((count, 0), np.float32), place(str(out))
        for table in row_tables(root, ["key", "embedding"]):
            block = table["embedding"].combine_chunks()
            dim = block.type.list_size
            if vectors.shape[1] != dim:
                vectors = np.full((count, dim), np.nan, np.float32)
            vectors[table["key"].to_numpy().astype(np.int64)] = block.flatten().to_numpy().reshape(-1, dim)
        failures = {
            int(row["key"]): (row["code"], row["message"])
            for table in standing_failures(root)
            for row in table.to_pylist()
            if row["ordinal"] is not None
        }
    return vectors, missing | failures


def _written(folder: Path, kind: str, items: Iterable[Any]) -> tuple[list[str], int, dict[int, tuple[str, str]]]:
    """Inputs of a run with the items under their positions as keys, the number of items, and those that are none."""
    if kind == "image":
        return _shards(folder, items)
    count, missing = 0, {}
    path = folder / "texts.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for count, item in enumerate(items, start=1):
            if isinstance(item, tuple):
                missing[count - 1] = item
            else:
                file.write(json.dumps({"id": str(count - 1), "text": item}) + "\n")
    return [str(path)] if count > len(missing) else [], count, missing


def _shards(folder: Path, images: Iterable[Any]) -> tuple[list[str], int, dict[int, tuple[str, str]]]:
    paths: list[str] = []
    count, missing = 0, {}
    numbered = iter(enumerate(images))
    while part := list(itertools.islice(numbered, SHARD_IMAGES)):
        paths.append(str(folder / f"{len(paths):06d}.tar"))
        with tarfile.open(paths[-1], "w", format=tarfile.USTAR_FORMAT) as tar:
            for count, data in part:
                if isinstance(data, tuple):
                    missing[count] = data
                    continue
                member = tarfile.TarInfo(f"{count}.jpg")  # decoders look at the content
                member.size = len(data)
                tar.addfile(member, BytesIO(data))
        count += 1
    return paths, count, missing
