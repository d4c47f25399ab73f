"""Allow-lists for the keys and values of a model's configurations: numbers, booleans and plain words.

`model_files` decides which file is checked by which rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from embq.core.errors import ModelError

MOST_BYTES = 16 << 20
"""Largest configuration that is read; large ones have the names of 21,000 classes, or some thousand added tokens."""

MOST_DEPTH = 100
"""Lists and objects within each other."""

WORD = re.compile(r"[\w.+\-, ]{0,200}", re.ASCII)
"""A plain word: no path, no URL, no id of a repository."""

FREE = frozenset(
    {
        "_name_or_path",
        "name_or_path",
        "adapters",
        "chat_template",
        "id2label",
        "label2id",
        "label_names",
        "license",
        "pretrained_cfg",
        "prompts",
        "sentence_transformers",
        "task_specific_params",
        "vocab",
        "word_weights",
    }
)
"""Keys whose values no library loads anything by."""

CODE = frozenset({"auto_map", "code_revision", "custom_generate", "custom_pipelines", "trust_remote_code"})
"""Keys by which a model brings code of its own."""

ELSEWHERE = frozenset(
    {
        "adapter_kwargs",
        "audio_tokenizer_name_or_path",
        "base_model_name_or_path",
        "checkpoint_path",
        "configuration_files",
        "gguf_file",
        "init_inputs",
        "pretrained_model_name_or_path",
        "processor_name",
        "tokenizer_name_or_path",
        "transformers_weights",
        "use_pretrained_backbone",
    }
)
"""Keys by which something else than the folder's own configurations and `model.safetensors` is loaded."""

READERS = frozenset(
    {"tokenizer_class", "processor_class", "image_processor_type", "feature_extractor_type", "video_processor_type"}
)
"""Keys that name the class that reads texts or images. transformers takes any name that it exports, models included."""

READER = re.compile(
    r"(?:sentence_transformers\.(?:\w+\.)*)?(?!Auto|Rag)[A-Z]\w*(?:Tokenizer(?:Fast)?|Processor(?:Fast|Pil)?|FeatureExtractor)"
    r"|(?:Tokenizers|Python|SentencePiece|MistralCommon)Backend",
    re.ASCII,
)
"""Those that load nothing but themselves: not `Auto...`, and not RAG's, whose parts lie in other folders."""

COUNTS = re.compile(r"(?!.*_(?:size|dim|id)$).*(?:layer|depth|block|stage|group|repeat|attends)")
"""Keys that say how many parts a network has; each is made before weights are read, and whether there are any."""

MOST_PARTS = 4_096
"""Layers, and items of a list, of which each may be a part of a network."""

ATTENTIONS = ("eager", "sdpa")
EXPERTS = ("eager", "batched_mm", "grouped_mm")
"""Other implementations are fetched from the hub and run, where the package `kernels` is installed."""


def read_config(path: Path, model: object, name: str) -> Any:
    """JSON content of a file, as the libraries read it; None where there is none.

    Not by `embq.core.wire`: numbers of more than 64 bits and Infinity are common in these files.
    """
    try:
        if path.exists() and not path.is_file():  # opening a FIFO would wait for ever
            raise ValueError("it is no regular file")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
        content = json.loads(data.decode("utf-8"))
        if _is_deep(content):
            raise ValueError("too many levels")
        return content
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        why = (error.strerror if isinstance(error, OSError) else "") or " ".join(str(error).split())[:200]
        raise refused(model, name, f"cannot be read: {why}", "use the file as it was saved") from error


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            one
            for above in level
            if isinstance(above, (dict, list))
            for one in (above.values() if isinstance(above, dict) else above)
        ]
        if not level:
            return False
    return True


def check_keys(content: Any, file: str, model: object) -> None:
    """Raise ModelError where any key decides what is loaded or run."""
    for key, value, _ in _pairs(content):
        _check_key(key, value, file, model)


def check_plain(content: Any, file: str, model: object) -> None:
    """Raise ModelError as `check_keys` does, and where a value is no plain word, number or boolean, or too many."""
    for key, value, is_free in _pairs(content):
        _check_key(key, value, file, model)
        is_list = isinstance(value, list) and not is_free
        count = len(value) if is_list else value if isinstance(value, int) and COUNTS.match(key) else 0
        if count > MOST_PARTS:
            raise refused(
                model,
                file,
                f"has {count} as {shown(key)}, and embq takes {MOST_PARTS} at most",
                "use the file as it was",
            )
        if isinstance(value, str) and not is_free and not WORD.fullmatch(value):
            raise refused(
                model,
                file,
                f"has {shown(value)} as {shown(key)}, where embq takes plain words and numbers",
                "take the key out of a copy of the folder if nothing needs it; no model is loaded from elsewhere",
            )


def _check_key(key: str, value: Any, file: str, model: object) -> None:
    if value in (None, False, "", [], {}):
        return
    if key in CODE:
        raise refused(
            model,
            file,
            f"has {key}: the model comes with its own code, and embq runs no code from models",
            "use a model of an architecture that the library has built in, or a copy without that key if it is one",
        )
    if key in ELSEWHERE:
        raise refused(model, file, f"has {key}, which loads something else", "put everything into the folder")
    if key in READERS and not READER.fullmatch(str(value)):
        raise refused(
            model, file, f"names {shown(value)} as {key}, which is no tokeniser or processor", "name the model's own"
        )
    if key == "quantization_config":
        raise refused(model, file, "says that the weights are quantised", "use the model in float32, bf16 or fp16")
    if key.endswith(("attn_implementation", "attn_implementation_internal")):
        _check_implementation(key, value, ATTENTIONS, file, model)
    if key.endswith(("experts_implementation", "experts_implementation_internal")):
        _check_implementation(key, value, EXPERTS, file, model)


def _check_implementation(key: str, value: Any, known: tuple[str, ...], file: str, model: object) -> None:
    for one in value.values() if isinstance(value, dict) else [value]:
        if one is not None and one not in known:
            raise refused(model, file, f"has {shown(one)} as {key}", f"use one of {', '.join(known)}")


def _pairs(value: Any, key: str = "", *, free: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """(key, value, whether the key or one above it is `FREE`) of each value; items have the key of their list."""
    yield key, value, free
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _pairs(one, name, free=free or name in FREE)
    elif isinstance(value, list):
        for one in value:
            yield from _pairs(one, key, free=free)


def shown(value: object) -> str:
    """A value for a message, cut to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def refused(model: object, file: str, why: str, next_step: str) -> ModelError:
    """The error for a file of a model that is not taken."""
    return ModelError(f"{model}: {file} {why}", next_step=next_step)
