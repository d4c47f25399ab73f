"""Folders of the files of a part, by the format of the run."""

from __future__ import annotations

from embq.core.errors import InputError
from embq.core.models import ModelConfig, VectorOutput
from embq.core.rows.results import embedding_columns
from embq.core.run.layout import Layout
from embq.core.run.run_info import RunInfo
from embq.core.storage.beneath import below
from embq.core.storage.paths import Place

METADATA = "metadata"
"""Folder of an npy run for what is not a vector."""

_SHORT = {"image": "img", "text": "text"}


def row_folders(layout: Layout, info: RunInfo) -> tuple[Place, ...]:
    """The folders of an output folder that hold nothing but rows; all are there once a writer is at work."""
    if info.format != "npy":
        return (layout.parts,)
    return tuple(below(layout.root, name) for name in (METADATA, *vector_folders(info.model).values()))


def vector_folders(model: ModelConfig) -> dict[str, str]:
    """Column of vectors -> the folder of its files in an npy run, called as clip-retrieval does: `img_emb`.

    Where several models embed the samples, a folder has the model's name in front: `b32_img_emb`.
    """
    columns = embedding_columns(model.output_names)
    return {column: _folder(output) for column, output in zip(columns, model.outputs, strict=True)}


def _folder(output: VectorOutput) -> str:
    name = output.name.removesuffix(output.modality).removesuffix("_")
    return "_".join(part for part in (name, _SHORT[output.modality], "emb") if part)


NPY_DTYPES = ("float16", "float32")
"""Types that clip-retrieval's readers support; see `embq.core.rows.spec.DTYPES`."""


def refuse_dtype(format_: str, dtype: str) -> None:
    """Raise InputError if the readers of a format do not know how vectors would be stored."""
    if format_ == "npy" and dtype not in NPY_DTYPES:
        raise InputError(
            f"--output-format npy cannot hold --dtype {dtype}: the programs that read it know floats only",
            next_step=f"use --dtype {' or '.join(NPY_DTYPES)}, or --output-format parquet, hdf5 or arrow",
            code="format_dtype",
        )
