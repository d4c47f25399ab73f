"""The options of `run` and `enqueue` as one request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import embq
from core.errors import UsageError
from core.models import MODALITIES, Chunking, ModelSpec
from core.rows.spec import INT8_RANGE, LEAST_RANGE, MOST_RANGE, RowSpec
from core.run.control import PRIORITY
from core.storage.paths import is_url, place
from embq.run_options import INPUT_FORMATS
from producer.enqueue import Request
from producer.selection import Selection
from sources.base import ReadOptions


def request_from(inputs: tuple[str, ...], options: dict[str, Any]) -> Request:
    """The request that the options of `embq.run_options` make; UsageError for an unknown modality."""
    modalities = tuple(part.strip() for part in options["modality"].split(",") if part.strip())
    for modality in modalities:
        if modality not in MODALITIES:
            raise UsageError(f"unknown modality {modality!r}", next_step="use --modality image, text or image,text")
    return Request(
        inputs=inputs,
        output=place(options["output"]) if is_url(options["output"]) else Path(options["output"]),
        models=_models(options["model"], options["prompt"], options["prompt_text"]),
        modalities=tuple(m for m in MODALITIES if m in modalities),
        precision=options["precision"],
        rows=_rows(options, modalities),
        format=options["output_format"],
        part_rows=options["write_batch_size"],
        options=ReadOptions(
            unit_samples=options["unit_size"],
            text_column=options["text_column"],
            id_column=options["id_column"],
            image_column=options["image_column"],
            metadata_columns=_parts(options["metadata_columns"]),
            image_keys=extensions(options["image_key"]),
            caption_keys=extensions(options["caption_key"]),
            kind=INPUT_FORMATS[options["input_format"]] if options["input_format"] else "",
        ),
        version=embq.__version__,
        selection=Selection(
            include=options["include"],
            exclude=options["exclude"],
            sample=options["sample"],
            limit=options["limit"],
        ),
        priority=options["priority"] or PRIORITY,
        chunking=_chunking(options["chunk_tokens"], options["chunk_overlap"]),
        decode=options["decode"],
    )


def _models(specs: tuple[str, ...], prompt: str | None, prompt_text: str | None) -> tuple[str, ...]:
    """The specs, with the prompt that is asked for in the one to which it belongs."""
    if prompt is None and prompt_text is None:
        return specs
    if prompt is not None and prompt_text is not None:
        raise UsageError(
            "--prompt names a prompt, and --prompt-text gives another one", next_step="leave out one of them"
        )
    if len(specs) > 1:
        raise UsageError(
            "--prompt and --prompt-text are for one model, and several are asked for",
            next_step="write it into the spec of each: --model NAME=st:FOLDER?prompt=query",
        )
    return (str(ModelSpec.parse(specs[0]).with_prompt(prompt, prompt_text)),)


def _rows(options: dict[str, Any], modalities: tuple[str, ...]) -> RowSpec:
    """What is stored of vectors; UsageError where the options do not go together."""
    dtype, truncate_dim, normalize = options["dtype"], options["truncate_dim"] or 0, options["normalize"]
    int8_range, similarity = options["int8_range"], options["similarity"]
    if int8_range is not None and dtype != "int8":
        raise UsageError("--int8-range needs --dtype int8", next_step="add it, or leave --int8-range out")
    if int8_range is not None and not LEAST_RANGE <= int8_range <= MOST_RANGE:  # which is also said of NaN
        raise UsageError(
            f"--int8-range {int8_range:g} is not between {LEAST_RANGE:g} and {MOST_RANGE:g}",
            next_step="give the largest number that the vectors hold; 1 is right for vectors of length 1",
        )
    if dtype == "int8" and normalize is False and int8_range is None:
        raise UsageError(
            "--dtype int8 --no-normalize needs --int8-range: how large the numbers of the vectors are, only you know",
            next_step="add --int8-range with the largest of them, or leave out --no-normalize",
        )
    if dtype == "binary" and truncate_dim % 8:
        raise UsageError(
            f"--dtype binary stores 8 numbers in a byte, and --truncate-dim {truncate_dim} leaves one half empty",
            next_step=f"use --truncate-dim {max(8, truncate_dim // 8 * 8)}",
        )
    if similarity and modalities and set(modalities) != set(MODALITIES):
        raise UsageError(
            f"--similarity compares a row's image with its text, and --modality {modalities[0]} embeds one of them",
            next_step="use --modality image,text, or leave out --similarity",
        )
    return RowSpec(
        dtype=dtype,
        truncate_dim=truncate_dim,
        normalize=normalize,
        int8_range=INT8_RANGE if int8_range is None else int8_range,
        similarity=similarity,
    )


def _chunking(tokens: int | None, overlap: int) -> Chunking | None:
    if tokens is None:
        if overlap:
            raise UsageError("--chunk-overlap needs --chunk-tokens", next_step="for example --chunk-tokens 256")
        return None
    if 2 * overlap > tokens:
        raise UsageError(
            f"--chunk-overlap {overlap} is more than half of --chunk-tokens {tokens}",
            next_step=f"use --chunk-overlap {tokens // 2} or less; a tenth of the chunk is usual",
        )
    return Chunking(tokens=tokens, overlap=overlap)


def _parts(text: str) -> tuple[str, ...]:
    """The names in a list with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def extensions(text: str) -> tuple[str, ...]:
    """The extensions in a list with commas or semicolons, as webdataset has it, in lower case and without dots."""
    return tuple(part.lower().lstrip(".") for part in _parts(text.replace(";", ",")))
