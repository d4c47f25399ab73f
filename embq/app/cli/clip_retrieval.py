"""Options of `clip-retrieval inference` on the command lines of `embq run` and `embq enqueue`.

What means the same is a second name of embq's option. What embq has no need of is noted in one line, and what would
change the result or the place of the work is refused with an alternative. docs/how-to/run/from-clip-retrieval.md has
the same table.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from embq.core.errors import UsageError
from embq.core.redaction import masked

SECOND_NAMES = {
    "--output": "--output-folder",
    "--model": "--clip-model",
    "--image-key": "--wds-image-key",
    "--caption-key": "--wds-caption-key",
    "--threads": "--num-prepro-workers",
}
"""embq's option -> its name there. `--input-format`, `--write-batch-size` and `--batch-size` have the same name, and
`--input-dataset` is the argument INPUT."""

ENABLED = ("enable-image", "enable-text", "enable-metadata")
"""Switches for the modalities and metadata of a row."""

_PARTS = "nothing is partitioned in advance; --write-batch-size bounds the rows of a part"

IGNORED = {
    "cache-path": "shards are read into memory; nothing is cached on a disk",
    "clip-cache-path": "models are kept where the Hugging Face libraries keep them; HF_HOME=FOLDER names another place",
    "distribution-strategy": "all devices of this machine share the units; for more machines `embq enqueue` once, and "
    "`embq worker` on each",
    "use-jit": "models are not traced; the vectors are the same",
    "wds-number-file-per-input-file": _PARTS,
    "output-partition-count": _PARTS,
}
"""Option without effect here -> why, as a note."""

_MCLIP = "make a run of its own for the texts: --model st:MULTILINGUAL-MODEL --modality text"
_SLURM = "start `embq worker` in the job script, and `embq enqueue` from anywhere"

REFUSED = {
    "use-mclip": _MCLIP,
    "mclip-model": _MCLIP,
    "subset-size": "take --limit N: the first N shards, or N images of a folder",
    "output-hdfs-folder": "name a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX with --output_folder",
    "slurm-jobs": _SLURM,
    "slurm-job-name": _SLURM,
    "slurm-partition": _SLURM,
    "slurm-nodes": _SLURM,
    "slurm-job-comment": _SLURM,
    "slurm-nodelist": _SLURM,
    "slurm-exclude": _SLURM,
    "slurm-job-timeout": _SLURM,
    "slurm-cache-path": _SLURM,
    "slurm-verbose-wait": _SLURM,
    "tasks": "leave it out: workers take what is left to do, and `embq resume OUT` goes on with a run",
}
"""Option that would change the result, or the place of the work -> what to do instead."""

NEUTRAL = ("false", "none")
"""Values of ignored and refused options that ask for nothing."""

SWITCHES = ("use-jit", "use-mclip", "enable-wandb", *ENABLED)
"""May stand without a value, and with "no" before them."""

WANDB = ("enable-wandb", "wandb-project")
"""Options that become `--log wandb:PROJECT`."""

NAMES = {"input-dataset", *(name[2:] for name in SECOND_NAMES.values()), *ENABLED, *WANDB, *IGNORED, *REFUSED}
"""Names of clip-retrieval 2.45's `inference` and `inference.worker` that embq's own options do not have, and two that
its documentation still has."""

DEFAULT_MODEL = "ViT-B/32"
DEFAULT_FORMAT = "npy"
"""Model and layout of a command in clip-retrieval's words that names none."""

QUIET_FLAGS = re.compile(r"--(quiet|only-show-errors|no-progress|silent|show-error|location|fail)|-[sSLfqm]+")
PIPES = re.compile(
    r"aws s3 cp (s3://\S+) -|gsutil (?:cat (gs://\S+)|cp (gs://\S+) -)|gcloud storage cat (gs://\S+)"
    r"|curl (https?://\S+)|wget (?:-O -|-q?O-) (https?://\S+)|(?:hdfs dfs|hadoop fs) -cat (hdfs://[^/\s]+/\S+)"
)
"""Commands that print one object, without flags that change nothing of it; the group is its URL."""

OPENAI_MODELS = {
    name: f"open_clip:{architecture}-quickgelu/openai"
    for name, architecture in {
        "RN50": "RN50",
        "RN101": "RN101",
        "RN50x4": "RN50x4",
        "RN50x16": "RN50x16",
        "RN50x64": "RN50x64",
        "ViT-B/32": "ViT-B-32",
        "ViT-B/16": "ViT-B-16",
        "ViT-L/14": "ViT-L-14",
        "ViT-L/14@336px": "ViT-L-14-336",
    }.items()
}
"""OpenAI's names of its models -> the same weights by open_clip, which tells GELU from QuickGELU by the name."""

_HF_TWINS = {
    "openai/clip-vit-base-patch32": OPENAI_MODELS["ViT-B/32"],
    "openai/clip-vit-base-patch16": OPENAI_MODELS["ViT-B/16"],
    "openai/clip-vit-large-patch14": OPENAI_MODELS["ViT-L/14"],
    "openai/clip-vit-large-patch14-336": OPENAI_MODELS["ViT-L/14@336px"],
}

INPUTS = f"{__name__}.inputs"
"""Values of `--input-dataset` in a context's `meta`."""

Callback = Callable[[click.Context, click.Parameter, Any], Any]


def note(text: str) -> None:
    """A line for the user on stderr."""
    click.echo(f"note: {text}", err=True)


def hyphens(token: str) -> str:
    """embq's spelling of an option."""
    return token.replace("_", "-")


def _names(arguments: Sequence[str]) -> set[str]:
    """The options of a command line, in embq's spelling without the hyphens in front."""
    return {hyphens(argument.partition("=")[0].removeprefix("--")) for argument in arguments if argument[:2] == "--"}


def drop_keys_of_shards(ctx: click.Context, arguments: Sequence[str]) -> None:
    """Take `--wds-image-key` and `--wds-caption-key` back for folders, which clip-retrieval reads without them."""
    for name in ("image_key", "caption_key"):
        if ctx.params.get("input_format") == "files" and f"wds-{hyphens(name)}" in _names(arguments):
            ctx.params[name] = ""
            note(f"--wds_{name} is of shards: it changes nothing for a folder, --{hyphens(name)} does")


def is_foreign(arguments: Sequence[str]) -> bool:
    """True if a command line has a name that only clip-retrieval has."""
    typed = _names(arguments)
    return bool(typed & NAMES) or any(name.removeprefix("no") in SWITCHES for name in typed if name.startswith("no"))


def hidden_options() -> list[click.Option]:
    """The options without a counterpart in embq, and `--input-dataset`."""
    options = [_hidden("input-dataset", _keep_inputs, multiple=True)]
    options += [_hidden(name, _note_ignored) for name in IGNORED]
    options += [_hidden(name, _refuse) for name in REFUSED]
    options += [_hidden(name, None, type=bool) for name in (*ENABLED, "enable-wandb")]
    options += [_hidden("wandb-project", None)]
    options += [_hidden(f"no{name}", None, switch=True, type=bool) for name in SWITCHES]
    return options


def _hidden(name: str, callback: Callback | None, *, switch: bool = False, **settings: Any) -> click.Option:
    if switch:
        settings |= {"is_flag": True}
    elif name in SWITCHES:
        settings |= {"is_flag": False, "flag_value": "true"}
    return click.Option(
        [f"--{name}"], hidden=True, expose_value=callback is None, callback=callback, default=None, **settings
    )


def _keep_inputs(ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> None:
    ctx.meta[INPUTS] = value


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
    if set("$`") & set(text) or (found := PIPES.fullmatch(" ".join(words))) is None:
        return text
    url: str = next(filter(None, found.groups()))
    note(f"the input is read by embq itself: {masked(url)}")
    return url


def _typed(param: click.Parameter) -> str:
    """An option as clip-retrieval spells it."""
    return f"--{param.name}"


def _is_neutral(name: str, value: str | None) -> bool:
    """True if an option is not given, or asks for nothing, or for what embq does anyway."""
    if value is None or value.lower() in NEUTRAL:
        return True
    return (name == "distribution-strategy" and value == "sequential") or (name in SWITCHES and value == "0")


def _note_ignored(_ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    name = param.opts[0][2:]
    if (name, value) == ("distribution-strategy", "slurm"):
        raise UsageError(f"{_typed(param)} {value}: embq starts no jobs", next_step=_SLURM)
    if not _is_neutral(name, value):
        note(f"{_typed(param)} is of no effect: {IGNORED[name]}")


def _refuse(_ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    name = param.opts[0][2:]
    if not _is_neutral(name, value):
        raise UsageError(f"{_typed(param)} {value}: embq has no such option", next_step=REFUSED[name])


def apply_switches(ctx: click.Context, *, foreign: bool) -> None:
    """Take `--enable-...` out of the parameters, and set the modality, metadata columns, layout and log by them.

    `as_held` is set too: whether the modalities are those of `modality` that the inputs have.

    Args:
        foreign: whether the user has typed a name of clip-retrieval.
    """
    enabled: dict[str, bool] = {}
    for switch in SWITCHES:
        off, on = ctx.params.pop(f"no{hyphens(switch)}".replace("-", "_")), None
        if switch in (*ENABLED, "enable-wandb"):
            on = ctx.params.pop(switch.replace("-", "_"))
        if off or on is not None:
            enabled[switch.removeprefix("enable-")] = bool(on) and not off
    project = ctx.params.pop("wandb_project") or "clip_retrieval"
    if enabled.get("wandb") and "log" in ctx.params:
        ctx.params["log"] = (*ctx.params["log"], f"wandb:{project}")
    elif enabled.get("wandb"):
        note(f"send the figures of the run from a machine that sees it: embq status OUT --watch --log wandb:{project}")
    if "metadata" in enabled and not _is_given(ctx, "metadata_columns"):
        if enabled["metadata"]:
            ctx.params["metadata_columns"] = "*"
        else:
            note("the .json of an image is kept all the same, in the column `metadata`")
    if foreign and not _is_given(ctx, "output_format") and ctx.params["dtype"].startswith("float"):
        ctx.params["output_format"] = DEFAULT_FORMAT
    modalities: Mapping[str, bool] = {name: enabled[name] for name in ("image", "text") if name in enabled}
    ctx.params["as_held"] = foreign and not _is_given(ctx, "modality") and not modalities.get("text")
    if not modalities and not ctx.params["as_held"]:
        return
    if modalities and _is_given(ctx, "modality"):
        raise UsageError("--modality and --enable_image or --enable_text say the same", next_step="leave one out")
    wanted = [modality for modality in ("image", "text") if modalities.get(modality, True)]
    if not wanted:
        raise UsageError("neither images nor texts are to be embedded", next_step="leave --enable_... out")
    if not modalities:
        note("captions are embedded as well, where there are any: --enable_text=False leaves them out")
    ctx.params["modality"] = ",".join(wanted)


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def model_specs(_ctx: click.Context, _param: click.Parameter, models: tuple[str, ...]) -> tuple[str, ...]:
    """Callback of `--model`: embq's specs for models as clip-retrieval names them."""
    return tuple(map(model_spec, models))


def model_spec(model: str) -> str:
    """embq's spec for a model as clip-retrieval names it, after a name that it may have; any other text as it is."""
    from embq.producer.model_args import split_name  # imports redis, which no --help may wait for

    own_name, spec = split_name(model)
    if own_name is not None:
        return f"{own_name}={model_spec(spec)}"
    bare = model.removeprefix("openai_clip:")
    if bare in OPENAI_MODELS:
        note(f"{model} is {OPENAI_MODELS[bare]} here")
        return OPENAI_MODELS[bare]
    if re.match(r"(ViT-|RN[0-9])", bare):
        raise UsageError(
            f"{model}: OpenAI has no model of this name",
            next_step=f"use one of {', '.join(OPENAI_MODELS)}, or another one's open_clip:ARCH/TAG",
        )
    family, _, name = model.partition(":")
    if family == "open_clip" and name and not set("/:?") & set(name):
        raise UsageError(
            f"{model}: the weights are not named",
            next_step=f"write open_clip:{name}/TAG, such as one of open_clip's list",
        )
    if family == "hf_clip":
        twin = _HF_TWINS.get(name)
        raise UsageError(
            f"{model}: CLIP models are loaded by open_clip here",
            next_step=f"the same weights: {twin}" if twin else "look for open_clip's name of it: open_clip:ARCH/TAG",
        )
    if family in ("nm", "ja_clip"):
        raise UsageError(
            f"{model}: models of this family are not read",
            next_step="choose an open_clip model, or for texts alone st:MODEL or hf:MODEL",
        )
    return model
