"""Allow-lists for the files of a model, which every load goes through before a library reads a file.

The libraries take more from a configuration than numbers: classes to import, code to run, other folders and
repositories to load. A configuration is taken where each of its values is a number, a boolean or a plain word, and each
key that decides what is loaded has a value of the lists here and in `config_keys`. Weights are safetensors.

No model library is imported here: queries and `embq doctor` look without them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from embq.core.errors import ModelError
from embq.core.run.layout import INPUTS
from embq.worker.embedders.config_keys import WORD, check_keys, check_plain, read_config, refused, shown

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

_OF_MODELS = frozenset({"add_pooling_layer", "attn_implementation", "dtype", "torch_dtype", "use_safetensors"})
_OF_CONFIGS = frozenset(
    {
        "attn_implementation",
        "dtype",
        "is_causal",
        "is_decoder",
        "num_labels",
        "torch_dtype",
        "use_bidirectional_attention",
    }
)
_OF_TOKENIZERS = frozenset(
    {
        "add_bos_token",
        "add_eos_token",
        "add_prefix_space",
        "do_lower_case",
        "max_pixels",
        "min_pixels",
        "model_max_length",
        "padding_side",
        "strip_accents",
        "tokenize_chinese_chars",
        "truncation_side",
        "use_fast",
    }
)
ARGUMENTS = {
    "model_args": _OF_MODELS,
    "model_kwargs": _OF_MODELS,
    "config_args": _OF_CONFIGS,
    "config_kwargs": _OF_CONFIGS,
    "tokenizer_args": _OF_TOKENIZERS,
    "processor_kwargs": _OF_TOKENIZERS,
}
"""Key of a configuration -> the arguments that sentence-transformers may hand to transformers from there.

Any other could name a file that is not looked at here, as `_configuration_file` does.
"""

TASK = "feature-extraction"
"""The only task of a transformer that gives states of tokens; `retrieval` takes any class that a folder names."""

METHOD = re.compile(r"forward|get_[a-z]+_features|encode|encode_[a-z]+")
"""Methods of a model that its configuration may have called."""

NAMED = {
    "Dense": {"activation_function": re.compile(r"torch\.nn\.(?:modules\.(?:activation|linear)\.)?[A-Z]\w*", re.ASCII)},
    "WordEmbeddings": {"tokenizer_class": re.compile(r"sentence_transformers(?:\.\w+)*\.\w+Tokenizer", re.ASCII)},
}
"""Module -> the keys that name a class, and what such a name is."""

MODULE = re.compile(r"sentence_transformers(?:\.\w+)*\.(\w+)", re.ASCII)
DENSE = frozenset(
    {
        "Asym",
        "BoW",
        "CLIPModel",
        "CNN",
        "Dense",
        "Dropout",
        "LayerNorm",
        "LSTM",
        "Normalize",
        "Pooling",
        "Router",
        "StaticEmbedding",
        "Transformer",
        "WeightedLayerPooling",
        "WordEmbeddings",
        "WordWeights",
    }
)
"""Modules of sentence-transformers that models of dense vectors are made of."""

OTHER_KINDS = {
    "LogitScore": "CrossEncoder",
    "MLMTransformer": "SparseEncoder",
    "SpladePooling": "SparseEncoder",
    "SparseAutoEncoder": "SparseEncoder",
    "CSRSparsity": "SparseEncoder",
    "SparseStaticEmbedding": "SparseEncoder",
    "MultiVectorMask": "MultiVectorEncoder",
    "HierarchicalTokenPooling": "MultiVectorEncoder",
    "LambdaTokenPooling": "MultiVectorEncoder",
}
"""Module -> the kind of model that has it."""

INSTEAD = {
    "CrossEncoder": "it scores pairs of texts and has no vector of one text",
    "SparseEncoder": "its vectors are sparse, one number for each token of the vocabulary",
    "MultiVectorEncoder": "it gives a text one vector for each token",
}
"""Kind of model of sentence-transformers -> why it embeds nothing here."""

TOKENIZER_ARGUMENTS: dict[str, Callable[[Any], bool]] = {
    "clean": lambda value: value in ("canonicalize", "lower", "whitespace"),
    "strip_sep_token": lambda value: isinstance(value, bool),
    "language": lambda value: isinstance(value, str) and WORD.fullmatch(value) is not None,
    "reduction_mask": lambda value: value in ("", "simple", "random", "shuffle", "syntax"),
    "additional_special_tokens": lambda value: (
        isinstance(value, list) and all(isinstance(token, str) for token in value)
    ),
}
"""Arguments that open_clip may hand to a tokeniser from a configuration -> whether a value is one."""

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
    """Raise ModelError where loading the model of a folder could run code, or give another kind of model.

    Args:
        model: what the user named, for messages.
        family: of `embq.core.models.FAMILIES`.
    """
    check_settings(folder, model, family)
    if family == "open_clip":
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pth"))
        if pickles and not any((folder / name).exists() for name in OPEN_CLIP_WEIGHTS):
            raise _pickle(model, pickles[0], OPEN_CLIP_WEIGHTS[0])
        _check_tensors(folder, [path.name for path in folder.glob("*.safetensors")], model)
        return
    # Of modules in one folder the first counts: those after it have no weights of their own.
    for part, kind in {"": "Transformer", **dict(reversed(_modules(folder, model, family)))}.items():
        _check_weights(folder / part, kind, folder, model)


def _check_weights(part: Path, kind: str, folder: Path, model: object) -> None:
    """The weights that the libraries take for a module: not a pickle, and no file of another folder."""
    names = [WEIGHTS] if (part / WEIGHTS).is_file() else []
    if not names and kind in OF_TRANSFORMERS and (index := read_config(part / INDEX, model, INDEX)) is not None:
        names = sorted({str(name) for name in _values(index, "weight_map")})
        if other := [name for name in names if not SHARD.fullmatch(name)]:
            raise refused(model, INDEX, f"names {shown(other[0])} for weights", "put the weights into the folder")
    pickles = sorted(path.name for path in part.glob("pytorch_model*.bin*"))
    if pickles and not names:
        raise _pickle(model, (part / pickles[0]).relative_to(folder).as_posix(), WEIGHTS)
    _check_tensors(part, names, model)


def _values(content: Any, key: str) -> list[Any]:
    found = content.get(key) if isinstance(content, dict) else None
    return list(found.values()) if isinstance(found, dict) else []


def _check_tensors(part: Path, names: list[str], model: object) -> None:
    """Raise ModelError where files are no safetensors, or hold more tensors than any model has."""
    total = 0
    for name in names:
        try:
            total += len(weights_header(part / name)[0])
        except (OSError, ValueError, RecursionError) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or str(error)
            raise refused(model, name, f"cannot be loaded: {why}", "copy the file again") from error
        if total > MOST_TENSORS:
            raise refused(model, name, f"makes it more than {MOST_TENSORS:,} tensors", "use another model")


def weights_header(path: Path) -> tuple[dict[str, Any], int]:
    """(name -> description of each tensor of a safetensors file and `__metadata__`, bytes before the numbers).

    The format: 8 bytes with the length of the header, little-endian; the header, JSON; the numbers. Raises OSError,
    ValueError or RecursionError where it is no such file.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MOST_HEADER_BYTES, path.stat().st_size - 8):
            raise ValueError(f"it is no safetensors file with a header of at most {MOST_HEADER_BYTES >> 20} MiB")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    return header, 8 + length


def weights_of(folder: Path, model: object, family: str) -> list[str]:
    """Patterns of the files of weights of a repository, of which the small files are in a folder."""
    parts = dict.fromkeys(["", *(path for path, _ in _modules(folder, model, family))])
    return [(PurePosixPath(part) / name).as_posix() for part in parts for name in (WEIGHTS, "model-*.safetensors")]


def check_place(folder: Path, model: object) -> None:
    """Raise ModelError where a folder holds what others may have uploaded, or what only looks like a file."""
    if INPUTS in folder.resolve().parts:
        raise ModelError(
            f"{model}: the folder is below {INPUTS}, where files lie that came with --upload; no model is loaded from "
            "there",
            next_step="copy the model to a folder that uploads do not write to, and name that",
        )
    _check_files(folder, model)


def _check_files(folder: Path, model: object) -> None:
    """Raise ModelError for a FIFO, a device or a socket, of which some are never read to their end."""
    for file in [*folder.glob("*"), *folder.glob("additional_chat_templates/*")]:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise refused(model, file.name, "is no regular file", "use the file as it was saved")


def check_settings(folder: Path, model: object, family: str) -> None:
    """The part of `check_model_folder` that looks at configurations alone, whatever the weights are."""
    check_place(folder, model)
    if (folder / "adapter_config.json").exists():
        raise refused(
            model,
            "adapter_config.json",
            "makes it an adapter of another model",
            "name that model, with ?lora=FOLDER of a LoRA adapter of texts; merge another kind into the model",
        )
    if family == "open_clip":
        _check_open_clip(folder, model)
    else:
        modules = _modules(folder, model, family)
        if family != "hf":
            _check_kind(folder, model, has_modules=bool(modules))
        if not modules and "pooling=" not in str(model):
            _check_network(folder, model)
        for path, kind in modules:
            _check_module(folder, path, kind, model)
    for name in SETTINGS:
        check_plain(without_own_code(read_config(folder / name, model, name)), name, model)
    _check_tokenizers(folder, "", model)


def _check_tokenizers(folder: Path, path: str, model: object) -> None:
    """The tokeniser of a folder, and further ones in folders below it, as processors have them."""
    for file in [folder / path / TOKENIZER, *(folder / path).glob(f"*/{TOKENIZER}")]:
        where = file.relative_to(folder).as_posix()
        check_keys(read_config(file, model, where), where, model)


def without_own_code(content: Any) -> Any:
    """A configuration without `auto_map` where transformers has its architecture built in.

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


def _check_open_clip(folder: Path, model: object) -> None:
    name = "open_clip_config.json"
    content = read_config(folder / name, model, name)
    if content is None:
        return
    settings = content.get("model_cfg") if isinstance(content, dict) else None
    towers = [settings.get(key, {}) for key in ("vision_cfg", "text_cfg", "multimodal_cfg")] if settings else []
    if not isinstance(settings, dict) or not all(isinstance(tower, dict) for tower in towers):
        raise refused(model, name, "has no model_cfg with a vision_cfg and a text_cfg", "use the file as it was saved")
    for tower in towers:
        arguments = tower.pop("tokenizer_kwargs", None) or {}
        if not isinstance(arguments, dict):
            raise refused(model, name, "has tokenizer_kwargs that are none", "take them out")
        for key, value in arguments.items():
            if key not in TOKENIZER_ARGUMENTS or not TOKENIZER_ARGUMENTS[key](value):
                raise refused(
                    model,
                    name,
                    f"sets {shown(key)} in tokenizer_kwargs",
                    f"leave it out; embq takes {', '.join(TOKENIZER_ARGUMENTS)}",
                )
        for key in ("hf_model_name", "hf_tokenizer_name"):
            value = tower.pop(key, None)
            if value and not (
                isinstance(value, str) and REPOSITORY.fullmatch(value) and not Path(value).expanduser().exists()
            ):
                raise refused(
                    model, name, f"names another folder in {key}: {shown(value)}", "name a repository of the hub there"
                )
    check_plain(settings, name, model)
    check_plain(content.get("preprocess_cfg"), name, model)


def towers_of_hub(folder: Path, model: object) -> list[str]:
    """Repositories of which open_clip reads the configuration for a folder that `check_settings` lets pass."""
    content = read_config(folder / "open_clip_config.json", model, "open_clip_config.json") or {"model_cfg": {}}
    towers = [content["model_cfg"].get(key, {}) for key in ("text_cfg", "multimodal_cfg")]
    return [tower["hf_model_name"] for tower in towers if tower.get("hf_model_name")]


def _check_kind(folder: Path, model: object, *, has_modules: bool) -> None:
    """Raise ModelError where sentence-transformers saved something else than a model of dense vectors."""
    name = "config_sentence_transformers.json"
    content = read_config(folder / name, model, name)
    kind = content.get("model_type", "SentenceTransformer") if isinstance(content, dict) else "SentenceTransformer"
    if kind != "SentenceTransformer":
        raise _other_kind(model, name, str(kind))
    config = read_config(folder / "config.json", model, "config.json")
    if has_modules or not isinstance(config, dict):
        return
    named = config.get("architectures")
    if isinstance(named, list) and any(str(one).endswith("ForSequenceClassification") for one in named):
        raise _other_kind(model, "config.json", "CrossEncoder")


def _check_network(folder: Path, model: object) -> None:
    """Raise ModelError where a network without modules.json is said to be SPLADE's, whose states mean nothing."""
    config = read_config(folder / "config.json", model, "config.json")
    named = config.get("_name_or_path") if isinstance(config, dict) else ""
    own = PurePosixPath(str(model).partition("?")[0]).name
    if "splade" in f"{own} {named} {_front_matter(folder / 'README.md')}".lower():
        raise _other_kind(model, "name or README.md", "SparseEncoder")


def _front_matter(readme: Path) -> str:
    """The lines between `---` at the beginning of a model card: its tags."""
    try:
        with readme.open("rb") as file:
            before, front, _ = file.read(MOST_CARD_BYTES).decode("utf-8", "replace").split("---", 2)
    except (OSError, ValueError):  # there is no card, or it has no such lines
        return ""
    return "" if before.strip() else front


def _modules(folder: Path, model: object, family: str) -> list[tuple[str, str]]:
    """(path below the folder, class) of each module of sentence-transformers; [] where there is no modules.json."""
    if family == "hf" or (content := read_config(folder / "modules.json", model, "modules.json")) is None:
        return []
    try:
        waiting = [(_below(one["path"]), _module(one["type"], "modules.json", model)) for one in content]
        found = []
        while waiting:
            path, kind = waiting.pop(0)
            found.append((path, kind))
            if kind in ("Router", "Asym"):
                waiting.extend(_routed(folder, path, model))
            if len(found) + len(waiting) > MOST_MODULES:
                raise ValueError("too many modules")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise refused(
            model, "modules.json", "does not list modules as sentence-transformers does", "use the file as it was saved"
        ) from error
    return found


def _routed(folder: Path, path: str, model: object) -> Iterator[tuple[str, str]]:
    """The checked modules that a router names: (folder, type)."""
    for name in ("router_config.json", "config.json"):
        where = (PurePosixPath(path) / name).as_posix()
        if content := read_config(folder / where, model, where):
            for part, kind in content["types"].items():
                yield _below((PurePosixPath(path) / part).as_posix()), _module(kind, where, model)
            return


def _below(path: str) -> str:
    """A path of a module; ValueError where it leads out of the folder."""
    if path.startswith("/") or "\\" in path or ".." in PurePosixPath(path).parts:
        raise ValueError("a path out of the folder")
    return path


def _module(named: str, file: str, model: object) -> str:
    """The class of a module, without its package."""
    found = MODULE.fullmatch(named)
    kind = found[1] if found else "MultiVectorMask" if named.startswith("pylate.") else ""
    if kind in OTHER_KINDS:
        raise _other_kind(model, file, OTHER_KINDS[kind])
    if kind not in DENSE:
        raise refused(
            model,
            file,
            f"names the module {shown(named)}, which is none of sentence-transformers' own for dense vectors",
            "use a model of built-in modules; embq runs no code from models",
        )
    return kind


def _check_module(folder: Path, path: str, kind: str, model: object) -> None:
    """The configurations in the folder of a module."""
    if path not in ("", ".") and (folder / path / "adapter_config.json").exists():
        raise refused(model, f"{path}/adapter_config.json", "makes it an adapter of another model", "merge it")
    _check_files(folder / path, model)
    for name in (*SETTINGS, *MODULE_SETTINGS):
        where = (PurePosixPath(path) / name).as_posix()
        content = read_config(folder / where, model, where)
        if not isinstance(content, dict):
            continue
        for key, pattern in NAMED.get(kind, {}).items():
            if key in content and not pattern.fullmatch(str(content[key])):
                raise refused(
                    model, where, f"names {shown(content[key])} as {key}", "use a model that names one of the library's"
                )
        for key, known in ARGUMENTS.items():
            arguments = content.get(key)
            for argument in arguments if isinstance(arguments, dict) else ():
                if argument not in known:
                    raise refused(
                        model,
                        where,
                        f"sets {shown(argument)} in {key}",
                        f"leave it out; embq takes {', '.join(sorted(known))}",
                    )
        if (task := content.get("transformer_task", TASK)) != TASK:
            raise refused(model, where, f"has the transformer_task {shown(task)}", f"use a model of {TASK}")
        modalities = content.get("modality_config")
        for parameters in modalities.values() if isinstance(modalities, dict) else ():
            method = parameters.get("method", "forward") if isinstance(parameters, dict) else "forward"
            if not METHOD.fullmatch(str(method)):
                raise refused(model, where, f"calls {shown(method)} of the model", "use a model that calls forward")
        check_plain(without_own_code(content), where, model)
    _check_tokenizers(folder, path, model)


def _other_kind(model: object, file: str, kind: str) -> ModelError:
    why = INSTEAD.get(kind, "embq knows models of dense vectors only")
    return ModelError(
        f"{model} is a {kind} by its {file}: {why}",
        next_step="use a model that gives a text one dense vector: a SentenceTransformer",
    )


def _pickle(model: object, file: str, instead: str) -> ModelError:
    return ModelError(
        f"{model}: its weights are a pickle, {file}, and embq reads no pickles from models",
        next_step=f"convert them to {instead}, or use a model that has them as safetensors",
    )
