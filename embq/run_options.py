"""The options of a run: what is embedded, by which model, and what is stored of it."""

from __future__ import annotations

import click

from embq.options import decode_option, precision_option, stacked

INPUT_FORMATS = {
    "webdataset": "tar",
    "files": "files",
    "parquet": "parquet",
    "arrow": "arrow",
    "hdf5": "hdf5",
    "csv": "csv",
    "jsonl": "jsonl",
    "text": "lines",
}
"""--input-format, with clip-retrieval's words where it has one -> kind of input."""

run_options = stacked(
    click.option(
        "--output",
        "-o",
        required=True,
        type=click.Path(file_okay=False),
        help="Folder for the result, or s3://BUCKET/PREFIX.",
    ),
    click.option(
        "--model",
        "-m",
        required=True,
        multiple=True,
        metavar="[NAME=]SPEC",
        help="For example minilm or open_clip:ARCH/TAG; several embed each sample, which is decoded once.",
    ),
    click.option(
        "--modality",
        default="",
        metavar="LIST",
        help="image, text or image,text.  [what the inputs hold]",
    ),
    click.option(
        "--prompt",
        default=None,
        metavar="NAME",
        help="Prompt of an st: model before each text: query, document, or another name that the model has.  "
        "[the model's default]",
    ),
    click.option(
        "--prompt-text",
        default=None,
        metavar="TEXT",
        help="The prompt itself, for st: and hf: models, with the space at its end; '' for none.",
    ),
    precision_option,
    decode_option,
    click.option(
        "--dtype",
        type=click.Choice(["float16", "float32", "int8", "binary"]),
        default="float16",
        show_default=True,
        help="What is stored of a vector; binary is the signs of its numbers, eight in a byte.",
    ),
    click.option(
        "--truncate-dim",
        type=click.IntRange(min=1),
        default=None,
        metavar="N",
        help="Store the first N numbers of a vector, brought to length 1 again (matryoshka models).  [all]",
    ),
    click.option(
        "--normalize/--no-normalize",
        "normalize",
        default=None,
        help="Store vectors of length 1, or of the length that they have before the model changes it.  "
        "[as the model gives them; length 1 with int8 and --truncate-dim]",
    ),
    click.option(
        "--int8-range",
        type=float,
        default=None,
        metavar="X",
        help="int8 stores numbers from -X to X in equal steps, and those beyond as if they were X.  [1]",
    ),
    click.option(
        "--similarity",
        is_flag=True,
        help="A column image_text_similarity: the cosine of a row's image and text.",
    ),
    click.option(
        "--output-format",
        type=click.Choice(["parquet", "hdf5", "npy", "arrow"]),
        default="parquet",
        show_default=True,
        help="Format of the parts.",
    ),
    click.option(
        "--write-batch-size",
        type=click.IntRange(min=1),
        default=1_000_000,
        show_default=True,
        metavar="N",
        help="Most rows of one part.",
    ),
    click.option(
        "--unit-size",
        type=click.IntRange(min=1, max=100_000),
        default=1000,
        show_default=True,
        metavar="N",
        help="Samples per unit where the input is not sharded.",
    ),
    click.option(
        "--input-format",
        type=click.Choice(sorted(INPUT_FORMATS)),
        help="What the inputs are.  [what their names say]",
    ),
    click.option(
        "--image-key",
        default="",
        metavar="LIST",
        help="Extensions of images in shards and folders, the best first: 'jpg;png'.  [all that are known]",
    ),
    click.option(
        "--caption-key",
        default="",
        metavar="LIST",
        help="Extensions of captions in shards and folders.  [txt]",
    ),
    click.option(
        "--chunk-tokens",
        type=click.IntRange(min=16),
        default=None,
        metavar="N",
        help="Cut long texts into chunks of at most N tokens of the model, special ones included: a row for "
        "each.  [a text is one row, cut off at what the model reads]",
    ),
    click.option(
        "--chunk-overlap",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        metavar="M",
        help="At most M tokens of a chunk are repeated in the next one; M is at most half of N.",
    ),
    click.option("--text-column", default="", metavar="NAME", help="Column or field that holds the text."),
    click.option("--id-column", default="", metavar="NAME", help="Column or field that holds the key."),
    click.option(
        "--image-column", default="", metavar="NAME", help="Column of images, or of their paths in the folder."
    ),
    click.option(
        "--metadata-columns",
        default="",
        metavar="LIST",
        help="Columns kept as metadata: a,b, or * for all others.  [.jsonl and .csv: *]",
    ),
    click.option(
        "--include",
        multiple=True,
        metavar="PATTERN",
        help="Take only files whose path, or its end after a slash, matches; repeatable.",
    ),
    click.option("--exclude", multiple=True, metavar="PATTERN", help="Leave out such files; repeatable."),
    click.option(
        "--sample",
        type=click.FloatRange(min=0, max=1, min_open=True),
        default=1.0,
        metavar="FRACTION",
        help="Take this part of the images of a folder, else of the units; always the same ones.",
    ),
    click.option(
        "--limit",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Take N images of a folder, units of texts until they hold N, or N shards, from the first one on.",
    ),
)
"""What decides the content of a run: frozen in its run.json."""
