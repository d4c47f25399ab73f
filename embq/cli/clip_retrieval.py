"""The names of `clip-retrieval inference` on embq's command line: what each means here, or what embq has instead.

A command that was written for clip-retrieval is read with its own spelling (`--input_dataset`, `--noenable_text`,
`--use_jit=False`). What means the same is renamed. What embq has no need of is told in one line, and what would change
the result or the place of the work is refused with what to do instead. The table in docs/operations.md is this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Same:
    """The same thing under embq's name; "INPUT" is the argument of that name.

    Attributes:
        option: embq's name.
    """

    option: str


@dataclass(frozen=True, slots=True)
class Told:
    """Nothing here depends on it; one line says why, unless the value is one that asks for nothing."""

    why: str
    nothing: tuple[str, ...] = ("false", "none")


@dataclass(frozen=True, slots=True)
class Refused:
    """The result, or who does the work, would be another: refused, unless the value is what embq does anyway."""

    instead: str
    nothing: tuple[str, ...] = ("false", "none")


@dataclass(frozen=True, slots=True)
class Enabled:
    """A switch for one of the things that a row has: "image", "text" or "metadata"."""

    what: str


_SLURM = Refused("start `embq worker` in the job script, and `embq enqueue` from anywhere")
_PARTS = Told("nothing is partitioned in advance; --write-batch-size bounds the rows of a part")

NAMES: dict[str, Same | Told | Refused | Enabled] = {
    "input-dataset": Same("INPUT"),
    "output-folder": Same("--output"),
    "input-format": Same("--input-format"),
    "clip-model": Same("--model"),
    "enable-image": Enabled("image"),
    "enable-text": Enabled("text"),
    "enable-metadata": Enabled("metadata"),
    "wds-image-key": Same("--image-key"),
    "wds-caption-key": Same("--caption-key"),
    "write-batch-size": Same("--write-batch-size"),
    "batch-size": Same("--batch-size"),
    "num-prepro-workers": Same("--prepare-threads"),
    "cache-path": Told("shards are read into memory; nothing is cached on a disk"),
    "clip-cache-path": Refused("models are kept where the Hugging Face libraries keep them: set HF_HOME=FOLDER"),
    "use-jit": Told("models are not traced; the vectors are the same"),
    "use-mclip": Refused("make a run of its own for the texts: --model st:MULTILINGUAL-MODEL --modality text"),
    "mclip-model": Refused("make a run of its own for the texts: --model st:MULTILINGUAL-MODEL --modality text"),
    "wds-number-file-per-input-file": _PARTS,
    "output-partition-count": _PARTS,
    "distribution-strategy": Refused(
        "start `embq worker` on every machine, and `embq enqueue` once: workers take units as they can",
        nothing=("sequential", "none"),
    ),
    "enable-wandb": Told("nothing is sent to wandb; `embq status --watch` and --json tell how far a run is"),
    "wandb-project": Told("nothing is sent to wandb; `embq status --watch` and --json tell how far a run is"),
    "slurm-job-name": _SLURM,
    "slurm-partition": _SLURM,
    "slurm-nodes": _SLURM,
    "slurm-job-comment": _SLURM,
    "slurm-nodelist": _SLURM,
    "slurm-exclude": _SLURM,
    "slurm-job-timeout": _SLURM,
    "slurm-cache-path": _SLURM,
    "slurm-verbose-wait": _SLURM,
    "tasks": Refused("leave it out: workers take what is left to do, and `embq resume OUT` goes on with a run"),
}
"""Every option of clip-retrieval 2.45's `inference` and `inference.worker`, with hyphens -> what it is here."""

SWITCHES = ("enable-image", "enable-text", "enable-metadata", "use-jit", "use-mclip", "enable-wandb")
"""May stand without a value, and with "no" before them."""

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

_TRUE, _FALSE = ("true", "1"), ("false", "0")


@dataclass(slots=True)
class Translated:
    """A command line in embq's words.

    Attributes:
        arguments: what click can parse.
        notes: what the user should know, one line each.
        foreign: whether a name was used that only clip-retrieval has.
    """

    arguments: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    foreign: bool = False


def translate(arguments: Sequence[str], options: Mapping[str, bool]) -> Translated:
    """The command line with embq's names in place of clip-retrieval's, and hyphens in place of underscores.

    Args:
        arguments: as the user typed them, without the verb.
        options: each option of the verb as it is typed -> whether a value follows it.

    Raises UsageError for what embq does otherwise, with what it has instead.
    """
    done = Translated()
    enabled: dict[str, bool] = {}
    left = list(arguments)
    while left:
        token = left.pop(0)
        if token == "--":
            done.arguments += [token, *left]
            break
        if not token.startswith("--"):
            done.arguments.append(token)
            if options.get(token) and left:
                done.arguments.append(_spec(left.pop(0), done) if token == "-m" else left.pop(0))
            continue
        typed, given, value = token.partition("=")
        name = typed[2:].replace("_", "-")
        off = name.startswith("no") and name[2:] in SWITCHES
        meaning = NAMES.get(name[2:] if off else name)
        if meaning is None:
            _own(token, name, given, left, options, done)
            continue
        if off or name in SWITCHES:
            value = _switch(typed, given, value, left, off=off)
        elif not given:
            if not left:
                raise UsageError(f"{typed} needs a value", next_step="`embq run --help` lists the options")
            value = left.pop(0)
        if isinstance(meaning, Enabled):
            enabled[meaning.what] = value == "true"
            done.foreign = True
        else:
            _apply(typed, name, value, meaning, options, done)
    _add_modalities(enabled, done)
    return done


def _own(token: str, name: str, given: str, left: list[str], options: Mapping[str, bool], done: Translated) -> None:
    """An option of embq's own, in either spelling; what nobody knows is left as it is, for click to complain of."""
    option = f"--{name}"
    if option not in options:
        done.arguments.append(token)
        return
    if given:
        value = token.partition("=")[2]
        done.arguments.append(f"{option}={_spec(value, done) if name == 'model' else value}")
        return
    done.arguments.append(option)
    if options[option] and left:
        done.arguments.append(_spec(left.pop(0), done) if name == "model" else left.pop(0))


def _switch(typed: str, given: str, value: str, left: list[str], *, off: bool) -> str:
    """ "true" or "false", as clip-retrieval's command line has it: alone, with "no" before it, or with a value."""
    if not given and left and left[0].lower() in (*_TRUE, *_FALSE):
        given, value = "=", left.pop(0)
    if not given:
        return "false" if off else "true"
    if off or value.lower() not in (*_TRUE, *_FALSE):
        raise UsageError(f"{typed} {value}: this is True or False", next_step=f"for example {typed}=False")
    return "true" if value.lower() in _TRUE else "false"


def _apply(
    typed: str, name: str, value: str, meaning: Same | Told | Refused, options: Mapping[str, bool], done: Translated
) -> None:
    if isinstance(meaning, Same):
        done.foreign = done.foreign or meaning.option != f"--{name}"
        if meaning.option == "INPUT":
            done.arguments.append(value)
        elif meaning.option in options:
            done.arguments.append(f"{meaning.option}={_spec(value, done) if name == 'clip-model' else value}")
        else:
            raise UsageError(
                f"{typed} is chosen where the work is done, and not part of a run",
                next_step=f"start the workers with it: embq worker {meaning.option} {value}",
            )
        return
    done.foreign = True
    if value.lower() in meaning.nothing:
        return
    if isinstance(meaning, Refused):
        raise UsageError(f"{typed} {value}: embq has no such option", next_step=meaning.instead)
    done.notes.append(f"{typed} is of no effect: {meaning.why}")


def _add_modalities(enabled: dict[str, bool], done: Translated) -> None:
    """What `--enable_...` says, with clip-retrieval's defaults for what it leaves open."""
    named = {argument.partition("=")[0] for argument in done.arguments}
    if "metadata" in enabled and "--metadata-columns" not in named:
        if enabled.pop("metadata"):
            done.arguments.insert(0, "--metadata-columns=*")
        else:
            done.notes.append("the .json of an image is kept all the same, in the column `metadata`")
    enabled.pop("metadata", None)
    if not enabled:
        if done.foreign and "--modality" not in named:
            done.notes.append(
                "images are embedded where there are any, else texts; for images and captions as in clip-retrieval: "
                "--modality image,text"
            )
        return
    if "--modality" in named:
        raise UsageError("--modality and --enable_image or --enable_text say the same", next_step="leave one out")
    wanted = [modality for modality in ("image", "text") if enabled.get(modality, True)]
    if not wanted:
        raise UsageError("neither images nor texts are to be embedded", next_step="leave --enable_... out")
    done.arguments.insert(0, f"--modality={','.join(wanted)}")


def _spec(model: str, done: Translated) -> str:
    """embq's spec for a model as clip-retrieval names it, after a name that it may have; any other text as it is."""
    from producer.model_args import split_name  # imports redis, which no --help may wait for

    name, spec = split_name(model)
    if name is not None:
        return f"{name}={_spec(spec, done)}"
    bare = model.removeprefix("openai_clip:")
    if bare in OPENAI_MODELS:
        done.notes.append(f"{model} is {OPENAI_MODELS[bare]} here")
        return OPENAI_MODELS[bare]
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
