"""Options of functions for type checkers: those of the command line, with underscores; None is one left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

Listed = str | Sequence[str]
"""A list, or its text as on the command line, with commas."""


class PlanOptions(TypedDict, total=False):
    """Of `embq.run` and `embq.enqueue`."""

    modality: Listed | None
    prompt_name: str | None
    prompt: str | None
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8"] | None
    decode: Literal["cpu-exact", "cpu-fast", "reference", "gpu"] | None
    dtype: Literal["float16", "float32", "int8", "binary"] | None
    truncate_dim: int | None
    normalize: bool | None
    int8_range: float | None
    similarity: bool | None
    output_format: Literal["parquet", "hdf5", "npy", "arrow"] | None
    write_batch_size: int | None
    unit_size: int | None
    input_format: Literal["arrow", "csv", "files", "jsonl", "parquet", "text", "webdataset"] | None
    chunk_tokens: int | None
    chunk_overlap: int | None
    late_chunking: bool | None
    image_key: str | None
    caption_key: str | None
    text_column: str | None
    id_column: str | None
    image_column: str | None
    metadata_columns: Listed | None
    delimiter: str | None
    no_header: bool | None
    quotes: Literal["auto", "enclose", "none"] | None
    damaged: Literal["fail", "keep"] | None
    map: str | None
    include: Listed | None
    exclude: Listed | None
    sample: float | None
    limit: int | None
    priority: int | None
    batch_size: int | None
    threads: int | None
    broker: str | None


class RunOptions(PlanOptions, total=False):
    """Of `embq.run` alone as well."""

    add: bool | None
    keep_going: bool | None
    devices: Listed | None
    workers: int | None
    prefetch: int | None
    transport: Literal["auto", "payload", "staging"] | None
    drain_timeout: float | None
    log: Listed | None


class EnqueueOptions(PlanOptions, total=False):
    """Of `embq.enqueue` alone as well."""

    upload: bool | None
    inline: bool | None


class AddOptions(TypedDict, total=False):
    """Of `embq.add_to_index`, and of `embq.build_index` as well."""

    vector_name: str | None
    drop_invalid: bool | None
    current_memory_available: str | int | None
    workers: int | None
    broker: str | None


class IndexOptions(AddOptions, total=False):
    """Of `embq.build_index` alone as well."""

    overwrite: bool | None
    max_index_memory_usage: str | int | None
    max_index_query_time_ms: float | None
    metric_type: Literal["ip", "l2"] | None
    index_key: str | None
    nb_indices_to_keep: int | None
    min_nearest_neighbors_to_retrieve: int | None
    refine: Literal["auto", "none", "fp16"] | None
    queries: Listed | None
    seed: int | None
    file_format: Literal["npy", "parquet", "hdf5"] | None
    embedding_column_name: str | None
    id_columns: Listed | None
    index_path: str | None
