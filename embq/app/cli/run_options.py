"""Options of a run, and the request that they make."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import embq
from embq.app.cli.sections import GENERAL, option, section
from embq.app.cli.shared_options import decode_option, model_option, option_group, precision_option
from embq.core import plugins
from embq.core.errors import UsageError
from embq.core.models import MODALITIES, Chunking, ModelSpec
from embq.sources.maps import identity_of
from embq.sources.reader_options import DECLARED, KINDS, ReadOptions, comma_list, format_of

if TYPE_CHECKING:
    from embq.core.rows.spec import RowSpec
    from embq.producer.enqueue import Request

INPUT_FORMATS = {format_of(kind): kind for kind in (*sorted(KINDS), *plugins.enabled(plugins.SOURCES))}
"""--input-format -> kind of input."""

_OPTIONS = (
    section("Output"),
    option(
        "--output", "-o", required=True, type=click.Path(file_okay=False), help="Output folder, or s3://BUCKET/PREFIX."
    ),
    option(
        "--output-format",
        type=click.Choice(["parquet", "hdf5", "npy", "arrow"]),
        default="parquet",
        help="Format of the output parts.",
    ),
    option(
        "--write-batch-size",
        type=click.IntRange(min=1),
        default=1_000_000,
        help="Maximum rows per part; a larger unit is a part of its own.",
    ),
    section("Model"),
    model_option(
        "Model, such as minilm or open_clip:ARCH/TAG; repeatable: each sample is decoded once for all.",
        required=True,
        multiple=True,
        metavar="[NAME=]SPEC",
    ),
    option(
        "--modality",
        default="",
        metavar="LIST",
        help="Modalities: image, text or image,text; all: images, and texts if there are any.  [by the inputs]",
    ),
    option(
        "--prompt-name",
        metavar="NAME",
        help="Name of an st: model's prompt before each text: query, document, or another of the model's.  "
        "[the model's default]",
    ),
    option(
        "--prompt",
        metavar="TEXT",
        help="Prompt text for st: and hf: models, including its final space; '' for none.",
    ),
    precision_option,
    decode_option,
    section("Vectors"),
    option(
        "--dtype",
        type=click.Choice(["float16", "float32", "int8", "binary"]),
        default="float16",
        help="Data type of stored vectors; binary: the signs, eight per byte.",
    ),
    option(
        "--truncate-dim",
        type=click.IntRange(min=1),
        help="Store the first N dimensions, normalised again (matryoshka models).  [all]",
    ),
    option(
        "--normalize/--no-normalize",
        "normalize",
        default=None,
        help="Store vectors of length 1, or of their length before the model's normalisation.  "
        "[as the model gives them; length 1 with int8 and --truncate-dim]",
    ),
    option(
        "--int8-range",
        type=float,
        metavar="X",
        help="Range of int8: -X to X in equal steps; larger values are clipped.  [1]",
    ),
    option(
        "--similarity", is_flag=True, help="Add the column image_text_similarity: the cosine of a row's image and text."
    ),
    section("Inputs"),
    option("--input-format", type=click.Choice(sorted(INPUT_FORMATS)), help="Format of the inputs.  [by their names]"),
    option(
        "--chunk-tokens",
        type=click.IntRange(min=16),
        help="Split long texts into chunks of at most N tokens, special tokens included, with a row each.  "
        "[one row per text, truncated to the model's limit]",
    ),
    option(
        "--chunk-overlap",
        type=click.IntRange(min=0),
        default=0,
        metavar="M",
        help="Maximum overlap of consecutive chunks in tokens; at most half of --chunk-tokens.",
    ),
    option(
        "--late-chunking",
        is_flag=True,
        help="Pool the chunks from one pass over their text, so that the vector of each depends on what surrounds it.",
    ),
    *(
        option(
            declared.flag,
            is_flag=declared.is_flag,
            type=click.Choice(declared.choices) if declared.choices else None,
            default=declared.choices[0] if declared.choices else False if declared.is_flag else "",
            metavar=None if declared.choices or declared.is_flag else declared.metavar,
            help=declared.help,
        )
        for declared in DECLARED
    ),
    option(
        "--unit-size",
        type=click.IntRange(min=1, max=100_000),
        default=1000,
        help="Samples per unit, of inputs that are not sharded.",
    ),
    section("Selection"),
    option(
        "--include",
        multiple=True,
        metavar="PATTERN",
        help="Only files whose path, or its end after a slash, matches; repeatable.",
    ),
    option("--exclude", multiple=True, metavar="PATTERN", help="Skip files that match; repeatable."),
    option(
        "--sample",
        type=click.FloatRange(min=0, max=1, min_open=True),
        default=1.0,
        metavar="FRACTION",
        help="Deterministic sample of a folder's images, else of units.",
    ),
    option(
        "--limit",
        type=click.IntRange(min=1),
        help="Only the first N samples.  [all]",
    ),
    section(GENERAL),
)
run_options = option_group(*_OPTIONS)
"""Content of a run, frozen in its run.json."""
content_options = option_group(_OPTIONS[0], *_OPTIONS[2:])
"""The same without the output folder."""


def request_from(inputs: tuple[str, ...], options: dict[str, Any]) -> Request:
    """The request that `run_options` describe; UsageError for options that contradict each other."""
    from embq.core.run.control import PRIORITY
    from embq.core.storage.paths import is_url, place
    from embq.producer.enqueue import Request
    from embq.producer.selection import Selection

    as_held = options["modality"] == "all"
    modalities = MODALITIES if as_held else comma_list(options["modality"])
    for modality in modalities:
        if modality not in MODALITIES:
            raise UsageError(
                f"unknown modality {modality!r}", next_step="use --modality image, text, image,text or all"
            )
    return Request(
        inputs=inputs,
        output=place(options["output"]) if is_url(options["output"]) else Path(options["output"]),
        models=_models(options["model"], options["prompt_name"], options["prompt"]),
        modalities=tuple(m for m in MODALITIES if m in modalities),
        as_held=as_held,
        precision=options["precision"],
        rows=_rows(options, modalities),
        format=options["output_format"],
        part_rows=options["write_batch_size"],
        options=ReadOptions.from_arguments(
            {**options, "map": identity_of(options["map"])},
            unit_samples=options["unit_size"],
            kind=INPUT_FORMATS[options["input_format"]] if options["input_format"] else "",
        ),
        version=embq.__version__,
        selection=Selection(
            include=options["include"],
            exclude=options["exclude"],
            sample=options["sample"],
            limit=options["limit"] or 0,
        ),
        priority=options["priority"] or PRIORITY,
        chunking=_chunking(options["chunk_tokens"], options["chunk_overlap"], late=options["late_chunking"]),
        decode=options["decode"],
    )


def _models(specs: tuple[str, ...], prompt_name: str | None, prompt: str | None) -> tuple[str, ...]:
    """The model specs, with the prompt of the options in its spec."""
    if prompt_name is None and prompt is None:
        return specs
    if prompt_name is not None and prompt is not None:
        raise UsageError(
            "--prompt-name names a prompt, and --prompt gives another one", next_step="leave out one of them"
        )
    if len(specs) > 1:
        raise UsageError(
            "--prompt-name and --prompt are for one model, and several are asked for",
            next_step="write it into the spec of each: --model NAME=st:FOLDER?prompt_name=query",
        )
    return (str(ModelSpec.given(specs[0]).with_prompt(prompt_name, prompt)),)


def _rows(options: dict[str, Any], modalities: tuple[str, ...]) -> RowSpec:
    """The stored form of vectors; UsageError if options contradict each other."""
    from embq.core.rows.spec import INT8_RANGE, LEAST_RANGE, MOST_RANGE, RowSpec

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


def _chunking(tokens: int | None, overlap: int, *, late: bool) -> Chunking | None:
    if tokens is None:
        if overlap or late:
            option = "--chunk-overlap" if overlap else "--late-chunking"
            raise UsageError(f"{option} needs --chunk-tokens", next_step="for example --chunk-tokens 256")
        return None
    if 2 * overlap > tokens:
        raise UsageError(
            f"--chunk-overlap {overlap} is more than half of --chunk-tokens {tokens}",
            next_step=f"use --chunk-overlap {tokens // 2} or less; a tenth of the chunk is usual",
        )
    return Chunking(tokens=tokens, overlap=overlap, late=late)
