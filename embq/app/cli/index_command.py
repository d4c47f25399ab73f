"""Command class of `embq index`: arguments of `autofaiss build_index` and of `clip-retrieval index`."""

from __future__ import annotations

import inspect
from typing import Any

import click
from click.core import ParameterSource

from embq.app.cli.clip_retrieval import INPUTS, hyphens
from embq.app.cli.lazy_group import CommandWithVerbs
from embq.app.indexing.autofaiss import build_index
from embq.core.errors import UsageError

ONLY_THERE: dict[str, click.ParamType[Any]] = {
    "index-infos-path": click.STRING,
    "ids-path": click.STRING,
    "save-on-disk": click.BOOL,
    "index-param": click.STRING,
    "use-gpu": click.BOOL,
    "nb-cores": click.INT,
    "make-direct-map": click.BOOL,
    "should-be-memory-mappable": click.BOOL,
    "distributed": click.STRING,
    "temporary-indices-folder": click.STRING,
    "verbose": click.INT,
}
"""Arguments that `embq index` has not by itself; any of them, and `--embeddings`, asks for what autofaiss does."""

CLIP_INDEX = {
    "embeddings_folder": None,
    "index_folder": None,
    "image_subfolder": "img_emb",
    "text_subfolder": "text_emb",
    "copy_metadata": True,
}
"""Arguments of clip-retrieval's `index` that it does not share with autofaiss -> default."""

SHARED = frozenset({"max_index_memory_usage", "current_memory_available", "nb_cores", "embeddings", "distributed"})
"""Arguments of autofaiss that go with them."""

ARGUMENTS = frozenset(inspect.signature(build_index).parameters)
EVERYWHERE = frozenset({"sources", "broker", "overwrite", "as_json", "quiet"})
"""Parameters of `embq index` that go with those of autofaiss."""


class IndexCommand(CommandWithVerbs):
    """`embq index`: options in either spelling, and those of autofaiss and clip-retrieval.

    The parameter `autofaiss` holds the arguments of `build_index` where a name that only autofaiss has is given, else
    None; `clip_index` those of `CLIP_INDEX`, where one of its folders is given.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.context_settings["token_normalize_func"] = hyphens
        self.params.append(
            click.Option(["--embeddings"], multiple=True, hidden=True, expose_value=False, callback=_keep_inputs)
        )
        sources = click.Option(["--embeddings-folder", "--input-folder"], hidden=True, callback=_keep_input)
        others = [["--index-folder", "--output-folder"], ["--image-subfolder"], ["--text-subfolder"]]
        self.params += [sources, *(click.Option(names, hidden=True) for names in others)]
        self.params.append(
            click.Option(["--copy-metadata"], type=bool, is_flag=False, flag_value="true", hidden=True, default=None)
        )
        for name, type_ in ONLY_THERE.items():
            flag: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if type_ is click.BOOL else {}
            self.params.append(click.Option([f"--{name}"], type=type_, default=None, hidden=True, **flag))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, and collect the arguments of autofaiss."""
        rest = super().parse_args(ctx, [one for one in args if not _is_default(one)])
        own = {name.replace("-", "_"): ctx.params.pop(name.replace("-", "_")) for name in ONLY_THERE}
        arguments = {name: value for name, value in own.items() if value is not None}
        typed = {name: ctx.params.pop(name) for name in CLIP_INDEX}
        clip = CLIP_INDEX | {name: value for name, value in typed.items() if value is not None}
        ctx.params |= {"autofaiss": None, "clip_index": None}
        if arguments or ctx.meta.get(INPUTS):
            ctx.params["autofaiss"] = _all_arguments(ctx, arguments)
        if clip["embeddings_folder"] or clip["index_folder"]:
            ctx.params["clip_index"] = _both_folders(clip, ctx.params["autofaiss"] or {})
        return rest


def _is_default(argument: str) -> bool:
    """True for an argument of theirs with the value None, as Fire takes it."""
    name, _, value = argument.partition("=")
    known = name[:2] == "--" and name[2:].replace("-", "_") in ARGUMENTS | CLIP_INDEX.keys()
    return known and value == "None"


def _keep_input(ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    if value is not None:
        ctx.meta[INPUTS] = (value,)
    return value


def _both_folders(clip: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of clip-retrieval's `index`; UsageError where one of its folders is missing, or others stand beside."""
    if not (clip["embeddings_folder"] and clip["index_folder"]):
        raise UsageError(
            "--embeddings_folder and --index_folder belong together",
            next_step="give both, or `embq index OUT` for an index that grows, in OUT/index",
        )
    if further := sorted(arguments.keys() - SHARED):
        raise UsageError(
            f"--{further[0]} does not go with --embeddings_folder, whose indexes are image.index and text.index",
            next_step=f"for one index: --embeddings={clip['embeddings_folder']}/{clip['image_subfolder']} in its place",
        )
    return clip


def _keep_inputs(ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> None:
    if values:
        ctx.meta[INPUTS] = tuple(name for value in values for name in (_names(value) if value[:1] == "[" else [value]))


def _names(value: str) -> list[str]:
    """Names of a list as autofaiss takes it, or separated by commas."""
    return [name.strip(" '\"") for name in value.strip("[]() ").split(",") if name.strip(" '\"")]


def _all_arguments(ctx: click.Context, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `build_index`; UsageError where an option of embq stands beside them."""
    typed = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if further := [name for name in typed if name not in ARGUMENTS | EVERYWHERE]:
        first = hyphens(next(iter(arguments), "embeddings"))
        raise UsageError(
            f"--{hyphens(further[0])} is an option of embq, and --{first} asks for an index as autofaiss makes it",
            next_step="leave one of them out: `embq index OUT -o FOLDER --index-path FILE` has all options of embq",
        )
    if "distributed" in arguments:
        raise UsageError(
            f"--distributed={arguments['distributed']} is not supported",
            next_step="start `embq worker` on the machines, and give their broker: --broker redis://HOST:6379",
        )
    arguments |= {name: ctx.params[name] for name in typed if name in ARGUMENTS}
    if "id_columns" in arguments:
        arguments["id_columns"] = _names(arguments["id_columns"])
    return {**arguments, "embeddings": list(ctx.params["sources"]), "distributed": ctx.params["broker"] or None}
