"""Allow-lists for the files of a model, which every load goes through before a library reads a file.

The libraries take more from a configuration than numbers: classes to import, code to run, other folders and
repositories to load. A configuration is taken where each of its values is a number, a boolean or a plain word, and each
key that decides what is loaded has a value of the lists here and in `config_keys`. Weights are safetensors.

No model library is imported here: queries and `embq doctor` look without them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from embq.core.errors import ModelError
from embq.core.run.layout import INPUTS
from embq.core.storage.beneath import open_regular
from embq.worker.embedders import config_keys
from embq.worker.embedders.config_keys import ModelFiles, shown

MOST_MODULES = 64
"""Modules of a sentence-transformers model, those within routers included."""

SETTINGS = (
    "config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
    "audio_tokenizer_config.json",
)
"""Configurations of transformers. Words and numbers alone stand in them, but for the keys of `config_keys.FREE`."""

TOKENIZER = "tokenizer_config.json"
"""Holds tokens, which are any text."""

MODULE_SETTINGS = (
    *(f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert")),
    *(f"sentence_{kind}_config.json" for kind in ("xlm-roberta", "xlnet")),
    "router_config.json",
    "wordembedding_config.json",
    "cnn_config.json",
    "lstm_config.json",
)
"""Configurations of sentence-transformers' modules, beside `SETTINGS`."""

LOOKED_AT = ("modules.json", "*config*.json")
"""Patterns of the files of a repository that are read here."""

SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.codes", "README.md")
"""Patterns of the files of a repository that a model is loaded from, but for its weights: no code and no pickles."""

MOST_CARD_BYTES = 64 * 1024
"""Beginning of a model card that is looked at."""

REPOSITORY = re.compile(r"(?:\w[\w.\-]*/)?\w[\w.\-]*", re.ASCII)
"""Id of a repository at the hub."""

ADAPTER, OPEN_CLIP = "adapter_config.json", "open_clip_config.json"
OPEN_CLIP_WEIGHTS = ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors")
"""Files that open_clip takes before any other."""

WEIGHTS = "model.safetensors"
"""File that transformers and sentence-transformers take before any other."""

INDEX = f"{WEIGHTS}.index.json"
"""Names the files of weights where these are several; only transformers reads it."""

SHARD = re.compile(r"[\w.\-]+\.safetensors", re.ASCII)
OF_TRANSFORMERS = ("Transformer", "CLIPModel")

MOST_HEADER_BYTES = 16 << 20
"""Largest JSON header of a safetensors file; a large model has some hundred kilobytes."""

MOST_TENSORS = 100_000
"""Tensors of one module; the largest models with experts have 90,000."""


def check_model_folder(folder: Path, model: object, family: str) -> None:
    """Raise ModelError if loading the model of a folder could run code, or result in another kind of model.

    Args:
        model: as the user named it, for messages.
        family: of `embq.core.models.FAMILIES`.
    """
    check_settings(folder, model, family)
    files = ModelFiles(folder, model)
    if family == "open_clip":
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pth"))
        if pickles and not any((folder / name).exists() for name in OPEN_CLIP_WEIGHTS):
            raise _pickle(model, pickles[0], OPEN_CLIP_WEIGHTS[0])
        _check_tensors(files, [path.name for path in folder.glob("*.safetensors")])
        return
    # Of modules in one folder the first counts: those after it have no weights of their own.
    for part, kind in {"": "Transformer", **dict(reversed(_modules(files, family)))}.items():
        _check_weights(files, PurePosixPath(part), kind)


def _check_weights(files: ModelFiles, part: PurePosixPath, kind: str) -> None:
    """The weights that the libraries take for a module: not a pickle, and no file of another folder."""
    folder = files.folder / part
    names = [WEIGHTS] if (folder / WEIGHTS).is_file() else []
    if not names and kind in OF_TRANSFORMERS:
        weight_map = files.read_object((part / INDEX).as_posix()).get("weight_map")
        names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else []
        if other := [name for name in names if not SHARD.fullmatch(name)]:
            raise files.refused(INDEX, f"names {shown(other[0])} for weights", "put the weights into the folder")
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin*"))
    if pickles and not names:
        raise _pickle(files.model, (part / pickles[0]).as_posix(), WEIGHTS)
    _check_tensors(files, [(part / name).as_posix() for name in names])
    if kind == "Dense":
        _check_dense(files, part)


def _check_dense(files: ModelFiles, part: PurePosixPath) -> None:
    """Raise ModelError if a dense layer is larger than its weights: it is made before they are read."""
    config, shape = files.read_object((part / "config.json").as_posix()), None
    if (path := files.folder / part / WEIGHTS).is_file():
        linear = weights_header(path)[0].get("linear.weight")
        shape = linear.get("shape") if isinstance(linear, dict) else None
    if shape != [config.get("out_features"), config.get("in_features")]:
        why = f"has no weights of {shown(config.get('in_features'))} to {shown(config.get('out_features'))} features"
        raise files.refused((part / WEIGHTS).as_posix(), why, "use the files as they were saved")


def _check_tensors(files: ModelFiles, names: Sequence[str]) -> None:
    """Raise ModelError if files are no safetensors, or hold more tensors together than any model has."""
    total = 0
    for name in names:
        try:
            total += len(weights_header(files.folder / name)[0])
        except (OSError, ValueError, RecursionError) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or str(error)
            raise files.refused(name, f"cannot be loaded: {why}", "copy the file again") from error
        if total > MOST_TENSORS:
            raise files.refused(name, f"makes it more than {MOST_TENSORS:,} tensors", "use another model")


def weights_header(path: Path) -> tuple[dict[str, Any], int]:
    """(name -> description of each tensor of a safetensors file and `__metadata__`, bytes before the numbers).

    The format: 8 bytes with the length of the header, little-endian; the header, JSON; the numbers. Raises OSError,
    ValueError or RecursionError if it is no such file.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MOST_HEADER_BYTES, path.stat().st_size - 8):
            raise ValueError(f"it is no safetensors file with a header of at most {MOST_HEADER_BYTES >> 20} MiB")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    return header, 8 + length


def weights_of(folder: Path, model: object, family: str) -> list[str]:
    """Patterns of the files of weights of a repository, of which the small files are in a folder."""
    parts = dict.fromkeys(["", *(path for path, _ in _modules(ModelFiles(folder, model), family))])
    return [(PurePosixPath(part) / name).as_posix() for part in parts for name in (WEIGHTS, "model-*.safetensors")]


def check_place(folder: Path, model: object) -> None:
    """Raise ModelError if a folder holds what others may have uploaded, or what only looks like a file."""
    if INPUTS in folder.resolve().parts:
        raise ModelError(
            f"{model}: the folder is below {INPUTS}, where files lie that came with --upload; no model is loaded from "
            "there",
            next_step="copy the model to a folder that uploads do not write to, and name that",
        )
    _check_regular(ModelFiles(folder, model))


def _check_regular(files: ModelFiles, path: str = "") -> None:
    """Raise ModelError for a FIFO, a device or a socket, of which some are never read to their end."""
    folder = files.folder / path
    for file in [*folder.glob("*"), *folder.glob("additional_chat_templates/*")]:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise files.refused(file.name, "is no regular file", "use the file as it was saved")


def check_settings(folder: Path, model: object, family: str) -> None:
    """The part of `check_model_folder` that looks at configurations alone, whatever the weights are."""
    check_place(folder, model)
    files = ModelFiles(folder, model)
    if (folder / ADAPTER).exists():
        next_step = "name that model, with ?lora=FOLDER of a LoRA adapter of texts; merge another kind into the model"
        raise files.refused(ADAPTER, "makes it an adapter of another model", next_step)
    if family == "open_clip":
        _check_open_clip(files)
    else:
        modules = _modules(files, family)
        if family != "hf":
            _check_kind(files, has_modules=bool(modules))
        if not modules and "pooling=" not in str(model):
            _check_network(files)
        for path, kind in modules:
            _check_module(files, path, kind)
    for name in SETTINGS:
        files.check_plain(name, without_own_code(files.read(name)))
    _check_tokenizers(files)


def _check_tokenizers(files: ModelFiles, path: str = "") -> None:
    """The tokeniser of a folder, and further ones in folders below it, as processors have them."""
    for file in [files.folder / path / TOKENIZER, *(files.folder / path).glob(f"*/{TOKENIZER}")]:
        name = file.relative_to(files.folder).as_posix()
        files.check_keys(name, files.read(name))


def without_own_code(content: Any) -> Any:
    """A configuration without `auto_map` if transformers has its architecture built in.

    Many models kept the key when their architecture went into transformers. As every load here says
    `trust_remote_code=False`, the class that is built in is taken, and nothing the key names is read.
    """
    if not isinstance(content, dict) or not content.get("auto_map") or not _is_built_in(content.get("model_type")):
        return content
    return {key: value for key, value in content.items() if key != "auto_map"}


def _is_built_in(architecture: object) -> bool:
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return False
    return isinstance(architecture, str) and architecture in CONFIG_MAPPING


def _check_open_clip(files: ModelFiles) -> None:
    content = files.read(OPEN_CLIP)
    if content is None:
        return
    settings = content.get("model_cfg") if isinstance(content, dict) else None
    towers = [settings.get(key, {}) for key in ("vision_cfg", "text_cfg", "multimodal_cfg")] if settings else []
    if not isinstance(settings, dict) or not all(isinstance(tower, dict) for tower in towers):
        why = "has no model_cfg with a vision_cfg and a text_cfg"
        raise files.refused(OPEN_CLIP, why, "use the file as it was saved")
    for tower in towers:
        arguments = tower.pop("tokenizer_kwargs", None) or {}
        if not isinstance(arguments, dict):
            raise files.refused(OPEN_CLIP, "has tokenizer_kwargs that are none", "take them out")
        for key, value in arguments.items():
            if key not in config_keys.TOKENIZER_ARGUMENTS or not config_keys.TOKENIZER_ARGUMENTS[key](value):
                next_step = f"leave it out; embq takes {', '.join(config_keys.TOKENIZER_ARGUMENTS)}"
                raise files.refused(OPEN_CLIP, f"sets {shown(key)} in tokenizer_kwargs", next_step)
        for key in ("hf_model_name", "hf_tokenizer_name"):
            value = tower.pop(key, None)
            is_id = isinstance(value, str) and REPOSITORY.fullmatch(value) and not Path(value).expanduser().exists()
            if value and not is_id:
                why = f"names another folder in {key}: {shown(value)}"
                raise files.refused(OPEN_CLIP, why, "name a repository of the hub there")
    files.check_plain(OPEN_CLIP, settings)
    files.check_plain(OPEN_CLIP, content.get("preprocess_cfg"))


def towers_of_hub(folder: Path, model: object) -> list[str]:
    """Repositories of which open_clip reads the configuration for a folder that `check_settings` lets pass."""
    settings = ModelFiles(folder, model).read_object(OPEN_CLIP).get("model_cfg", {})
    towers = [settings.get(key, {}) for key in ("text_cfg", "multimodal_cfg")]
    return [tower["hf_model_name"] for tower in towers if tower.get("hf_model_name")]


def _check_kind(files: ModelFiles, *, has_modules: bool) -> None:
    """Raise ModelError if sentence-transformers saved something else than a model of dense vectors."""
    name = "config_sentence_transformers.json"
    kind = files.read_object(name).get("model_type", "SentenceTransformer")
    if kind != "SentenceTransformer":
        raise _other_kind(files, name, str(kind))
    classes = files.read_object("config.json").get("architectures")
    is_classifier = isinstance(classes, list) and any(
        str(name).endswith("ForSequenceClassification") for name in classes
    )
    if is_classifier and not has_modules:
        raise _other_kind(files, "config.json", "CrossEncoder")


def _check_network(files: ModelFiles) -> None:
    """Raise ModelError if a network without modules.json is said to be SPLADE's, whose states mean nothing."""
    origin = files.read_object("config.json").get("_name_or_path")
    own = PurePosixPath(str(files.model).partition("?")[0]).name
    if "splade" in f"{own} {origin} {_front_matter(files.folder / 'README.md')}".lower():
        raise _other_kind(files, "name or README.md", "SparseEncoder")


def _front_matter(readme: Path) -> str:
    """The lines between `---` at the beginning of a model card: its tags."""
    try:
        with open_regular(readme) as file:
            head, front, _ = file.read(MOST_CARD_BYTES).decode("utf-8", "replace").split("---", 2)
    except (OSError, ValueError):  # there is no card, or it has no such lines
        return ""
    return "" if head.strip() else front


def _modules(files: ModelFiles, family: str) -> list[tuple[str, str]]:
    """(path below the folder, class) of each module of sentence-transformers; [] if there is no modules.json."""
    name = "modules.json"
    if family == "hf" or (content := files.read(name)) is None:
        return []
    try:
        waiting = [(_below(module["path"]), _class_of(module["type"], name, files)) for module in content]
        modules = []
        while waiting:
            path, kind = waiting.pop(0)
            modules.append((path, kind))
            if kind in ("Router", "Asym"):
                waiting.extend(_routed(files, PurePosixPath(path)))
            if len(modules) + len(waiting) > MOST_MODULES:
                raise ValueError("too many modules")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = "does not list modules as sentence-transformers does"
        raise files.refused(name, why, "use the file as it was saved") from error
    return modules


def _routed(files: ModelFiles, path: PurePosixPath) -> Iterator[tuple[str, str]]:
    """The checked modules that a router names: (folder, type)."""
    for name in ("router_config.json", "config.json"):
        file = (path / name).as_posix()
        if content := files.read(file):
            for part, kind in content["types"].items():
                yield _below((path / part).as_posix()), _class_of(kind, file, files)
            return


def _below(path: str) -> str:
    """A path of a module; ValueError if it leads out of the folder."""
    if path.startswith("/") or "\\" in path or ".." in PurePosixPath(path).parts:
        raise ValueError("a path out of the folder")
    return path


def _class_of(type_: str, file: str, files: ModelFiles) -> str:
    """The class of a module, without its package."""
    match = config_keys.MODULE.fullmatch(type_)
    kind = match[1] if match else "MultiVectorMask" if type_.startswith("pylate.") else ""
    if kind in config_keys.OTHER_KINDS:
        raise _other_kind(files, file, config_keys.OTHER_KINDS[kind])
    if kind not in config_keys.DENSE:
        raise files.refused(
            file,
            f"names the module {shown(type_)}, which is none of sentence-transformers' own for dense vectors",
            "use a model of built-in modules; embq runs no code from models",
        )
    return kind


def _check_module(files: ModelFiles, path: str, kind: str) -> None:
    """The configurations in the folder of a module."""
    if path not in ("", ".") and (files.folder / path / ADAPTER).exists():
        raise files.refused(f"{path}/{ADAPTER}", "makes it an adapter of another model", "merge it")
    _check_regular(files, path)
    for name in (*SETTINGS, *MODULE_SETTINGS):
        _check_module_settings(files, (PurePosixPath(path) / name).as_posix(), kind)
    _check_tokenizers(files, path)


def _check_module_settings(files: ModelFiles, file: str, kind: str) -> None:
    content = files.read_object(file)
    for key, pattern in config_keys.NAMED.get(kind, {}).items():
        if key in content and not pattern.fullmatch(str(content[key])):
            why = f"names {shown(content[key])} as {key}"
            raise files.refused(file, why, "use a model that names one of the library's")
    for key, allowed in config_keys.ARGUMENTS.items():
        arguments = content.get(key)
        for argument in arguments if isinstance(arguments, dict) else ():
            if argument not in allowed:
                next_step = f"leave it out; embq takes {', '.join(sorted(allowed))}"
                raise files.refused(file, f"sets {shown(argument)} in {key}", next_step)
    if (task := content.get("transformer_task", config_keys.TASK)) != config_keys.TASK:
        raise files.refused(file, f"has the transformer_task {shown(task)}", f"use a model of {config_keys.TASK}")
    modalities = content.get("modality_config")
    for parameters in modalities.values() if isinstance(modalities, dict) else ():
        method = parameters.get("method", "forward") if isinstance(parameters, dict) else "forward"
        if not config_keys.METHOD.fullmatch(str(method)):
            raise files.refused(file, f"calls {shown(method)} of the model", "use a model that calls forward")
    files.check_plain(file, without_own_code(content))


def _other_kind(files: ModelFiles, file: str, kind: str) -> ModelError:
    why = config_keys.INSTEAD.get(kind, "embq knows models of dense vectors only")
    return ModelError(
        f"{files.model} is a {kind} by its {file}: {why}",
        next_step="use a model that gives a text one dense vector: a SentenceTransformer",
    )


def _pickle(model: object, file: str, instead: str) -> ModelError:
    return ModelError(
        f"{model}: its weights are a pickle, {file}, and embq reads no pickles from models",
        next_step=f"convert them to {instead}, or use a model that has them as safetensors",
    )
