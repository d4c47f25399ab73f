"""clip-retrieval's command line, by tables that turn its arguments into those of `embq run` and `embq enqueue`.

What embq has no need of is noted in one line, and what would change the result or the place of the work is refused with
what to do instead. docs/how-to/run/from-clip-retrieval.md has the same tables.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

import click

from embq.app.cli.lazy_group import LazyGroup
from embq.app.cli.sections import option
from embq.app.cli.shared_options import json_option, quiet_option
from embq.app.cli.verb_table import FOREIGN_VERBS
from embq.compat.fire import FireCommand, FireOption, fire_option, names_of, note, run_verb
from embq.core.errors import UsageError

RENAMED = {
    "output_folder": "--output",
    "input_format": "--input-format",
    "wds_image_key": "--image-key",
    "wds_caption_key": "--caption-key",
    "write_batch_size": "--write-batch-size",
    "batch_size": "--batch-size",
    "num_prepro_workers": "--threads",
}
"""Option of `clip-retrieval inference` -> embq's, which takes the same values."""

SWITCHES = {
    "enable_image": "Embed images, with --modality.  [on]",
    "enable_text": "Embed captions, with --modality.  [on, if there are any]",
    "enable_metadata": "Keep all metadata: --metadata-columns '*'.",
    "enable_wandb": "Send figures of the run: --log wandb:PROJECT.",
}
"""Switch -> what it does."""

_PARTS = "nothing is partitioned in advance; --write-batch-size bounds the rows of a part"

IGNORED = {
    "cache_path": "shards are read into memory; nothing is cached on a disk",
    "clip_cache_path": "models are kept where the Hugging Face libraries keep them; HF_HOME=FOLDER names another place",
    "distribution_strategy": "all devices of this machine share the units; for more machines add --enqueue, and start "
    "`embq worker` on each",
    "use_jit": "models are not traced; the vectors are the same",
    "wds_number_file_per_input_file": _PARTS,
    "output_partition_count": _PARTS,
}
"""Option without effect here -> why."""

_MCLIP = "make a run of its own for the texts: --model st:MULTILINGUAL-MODEL --modality text"
_SLURM = "start `embq worker` in the job script, and add --enqueue to this command anywhere"

REFUSED = {
    "use_mclip": _MCLIP,
    "mclip_model": _MCLIP,
    "subset_size": "take --limit N: the first N shards, or N images of a folder",
    "output_hdfs_folder": "name a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX with --output_folder",
    **{
        f"slurm_{name}": _SLURM
        for name in (
            *("jobs", "job_name", "partition", "nodes", "job_comment", "nodelist", "exclude", "job_timeout"),
            *("cache_path", "verbose_wait"),
        )
    },
    "tasks": "leave it out: workers take what is left to do, and `embq resume OUT` goes on with a run",
}
"""Option that would change the result, or the place of the work -> what to do instead."""

NEUTRAL = ("false", "none", "0", "sequential")
"""Values of ignored and refused options that ask for nothing, or for what embq does anyway."""

WITHOUT_VALUE = ("use_jit", "use_mclip")
"""Ignored and refused options that are switches."""

QUIET_FLAGS = re.compile(r"--(quiet|only-show-errors|no-progress|silent|show-error|location|fail)|-[sSLfqm]+")
PIPES = re.compile(
    r"aws s3 cp (s3://\S+) -|gsutil (?:cat (gs://\S+)|cp (gs://\S+) -)|gcloud storage cat (gs://\S+)"
    r"|curl (https?://\S+)|wget (?:-O -|-q?O-) (https?://\S+)|(?:hdfs dfs|hadoop fs) -cat (hdfs://[^/\s]+/\S+)"
)
"""Commands that print one object, without flags that change nothing of it; the group is its URL."""

MODELS = {
    name: f"open_clip:{name.replace('/', '-').replace('@336px', '-336')}-quickgelu/openai"
    for name in (
        *("RN50", "RN101", "RN50x4", "RN50x16", "RN50x64"),
        *("ViT-B/32", "ViT-B/16", "ViT-L/14", "ViT-L/14@336px"),
    )
}
"""OpenAI's names of its models -> the same weights by open_clip, which tells GELU from QuickGELU by the name."""

TWINS = {
    "base-patch32": "ViT-B/32",
    "base-patch16": "ViT-B/16",
    "large-patch14": "ViT-L/14",
    "large-patch14-336": "ViT-L/14@336px",
}
"""openai/clip-vit-... on the model hub -> OpenAI's name."""


def model_spec(model: str) -> str:
    """embq's spec for a model as clip-retrieval names it; any other text as it is."""
    bare = model.removeprefix("openai_clip:")
    bare = TWINS.get(bare.removeprefix("hf_clip:openai/clip-vit-"), bare)
    if bare in MODELS:
        return MODELS[bare]
    if re.match(r"(ViT-|RN[0-9])", bare):
        raise UsageError(
            f"{model}: OpenAI has no model of this name",
            next_step=f"use one of {', '.join(MODELS)}, or another one's open_clip:ARCH/TAG",
        )
    if model.partition(":")[0] in ("hf_clip", "nm", "ja_clip"):
        raise UsageError(
            f"{model}: models of this family are not read",
            next_step="look for open_clip's name of it: open_clip:ARCH/TAG; for texts alone take st:MODEL or hf:MODEL",
        )
    return model


def location(text: str) -> str:
    """The path or URL of an input: of `file:///PATH`, and of a `pipe:` that prints one object; else the text itself.

    Nothing is executed. A command of another shape, or with operators or variables of a shell, stays as it is, for
    `embq.sources.access.urls.check_source` to refuse.
    """
    if text.startswith("file:///"):
        return text.removeprefix("file://")
    if not text.startswith("pipe:"):
        return text
    parser = shlex.shlex(text.removeprefix("pipe:"), posix=True, punctuation_chars=True)
    parser.commenters, parser.whitespace_split = "", True
    try:
        words = [word for word in parser if not QUIET_FLAGS.fullmatch(word)]
    except ValueError:  # a quotation mark without its second one
        return text
    if set("$`") & set(text) or (match := PIPES.fullmatch(" ".join(words))) is None:
        return text
    return str(next(filter(None, match.groups())))


def translated(theirs: Mapping[str, Any], *, enqueue: bool) -> list[str]:
    """Arguments of `embq run` or `embq enqueue` for the options of `clip-retrieval inference`.

    Raises UsageError for what embq does not do.
    """
    for name in (*REFUSED, *IGNORED):
        value = theirs[name]
        if value is None or value.lower() in NEUTRAL:
            continue
        if name in REFUSED or (name, value) == ("distribution_strategy", "slurm"):
            raise UsageError(f"--{name} {value}: embq has no such option", next_step=REFUSED.get(name, _SLURM))
        note(f"--{name} is of no effect: {IGNORED[name]}")
    given = {name: theirs[name] for name in RENAMED if theirs[name] is not None}
    for name in ("wds_image_key", "wds_caption_key"):
        if given.get("input_format") == "files" and given.pop(name, None):  # which clip-retrieval reads without them
            note(f"--{name} is of shards: it changes nothing for a folder, {RENAMED[name]} does")
    image, text = theirs["enable_image"], theirs["enable_text"]
    if image is False and text is False:
        raise UsageError("neither images nor texts are to be embedded", next_step="leave --enable_... out")
    modality = "image" if text is False else "text" if image is False else "image,text" if text else "all"
    arguments = [location(name) for value in theirs["input_dataset"] for name in names_of(value)]
    arguments += [f"--model={model_spec(model)}" for model in theirs["model"] or [theirs["clip_model"]]]
    arguments += [f"{RENAMED[name]}={value}" for name, value in given.items()]
    arguments += [f"--modality={modality}", "--output-format=npy"]
    arguments += ["--metadata-columns=*"] if theirs["enable_metadata"] else []
    target = f"wandb:{theirs['wandb_project']}"
    if theirs["enable_wandb"] and enqueue:
        note(f"send the figures of the run from a machine that sees it: embq status OUT --watch --log {target}")
    elif theirs["enable_wandb"]:
        arguments.append(f"--log={target}")
    return arguments


OPTIONS: list[click.Parameter] = [
    FireOption(["--input_dataset"], multiple=True, help="Path, pattern or URL, as INPUT; a list of them in brackets."),
    FireOption(["--clip_model"], default="ViT-B/32", help="Model of OpenAI, or as of --model."),
    FireOption(["--model", "-m"], multiple=True, help="Model in place of --clip_model, as of embq run; repeatable."),
    *(FireOption([f"--{name}"], help=f"The same as {ours}.") for name, ours in RENAMED.items()),
    *(FireOption([f"--{name}"], switch=True, type=bool, help=line) for name, line in SWITCHES.items()),
    FireOption(["--wandb_project"], default="clip_retrieval", help="PROJECT of --enable_wandb."),
    *(
        FireOption([f"--{name}"], switch=name in WITHOUT_VALUE, section=heading, help=f"{why}.")
        for heading, table in (("Without effect", IGNORED), ("Refused", REFUSED))
        for name, why in table.items()
    ),
]
"""Options of clip-retrieval 2.45's `inference` and `inference.worker`, and two that its documentation still has."""


@click.group(
    "clip-retrieval",
    cls=LazyGroup,
    later={},
    foreign=FOREIGN_VERBS,
    epilog="Example: embq clip-retrieval inference --input_dataset photos --output_folder out",
)
def command() -> None:
    """Run commands of clip-retrieval by embq, as they are published.

    `embq inference` is `embq clip-retrieval inference`. In place of other verbs: end2end by `embq run`, back by `embq
    serve`, filter by `embq search`.
    """


@command.command(
    "inference",
    cls=FireCommand,
    params=[*OPTIONS],
    context_settings={"ignore_unknown_options": True},
    epilog="Example: embq clip-retrieval inference --input_dataset photos --output_folder out --enable_text False",
)
@option("--enqueue", is_flag=True, help="Hand the run to resident workers: embq enqueue in place of embq run.")
@click.argument("further", metavar="[INPUT|OPTION]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def inference(ctx: click.Context, /, enqueue: bool, further: tuple[str, ...], **theirs: Any) -> Any:
    """Embed what `clip-retrieval inference` would, with its defaults and in its layout.

    Inputs and options of embq may follow, as of `embq run`.
    """
    return run_verb(
        ctx, "enqueue" if enqueue else "run", [*translated(theirs, enqueue=enqueue), *map(location, further)]
    )


@command.command(
    "index",
    cls=FireCommand,
    epilog="Example: embq clip-retrieval index --embeddings_folder out --index_folder index",
)
@fire_option(
    "--embeddings_folder", "--input_folder", required=True, help="Output of clip-retrieval, or of a run in its layout."
)
@fire_option(
    "--index_folder", "--output_folder", required=True, help="Folder for image.index, text.index and metadata."
)
@fire_option("--max_index_memory_usage", default="4G", help="Memory limit of each index.")
@fire_option("--current_memory_available", default="16G", help="Memory limit of building.")
@fire_option("--copy_metadata", type=bool, switch=True, default=True, help="Copy the metadata.")
@fire_option("--image_subfolder", default="img_emb", help="Folder of the images' embeddings.")
@fire_option("--text_subfolder", default="text_emb", help="Folder of the texts' embeddings.")
@fire_option("--nb_cores", type=int, help="Threads.  [all cores]")
@json_option
@quiet_option
def index(**options: Any) -> int:
    """Build the indexes that `clip-retrieval index` would, as files of faiss, and copy the metadata."""
    from embq.compat.clip_index import build_indexes

    return build_indexes(**options)
