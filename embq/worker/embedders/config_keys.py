"""Allow-lists for the keys, values and modules of a model's configurations: numbers, booleans and plain words.

`model_files` decides which file is checked by which rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embq.core.errors import ModelError
from embq.core.storage.beneath import read_small

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

IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
"""End of a key -> its values. Others are fetched from the hub and run if the package `kernels` is installed."""

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
"""The only task of a transformer that returns states of tokens; `retrieval` takes any class that a folder names."""

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


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The configurations of a model's folder, and the errors for what is not taken.

    Args:
        model: as the user named it, for messages.
    """

    folder: Path
    model: object

    def read(self, name: str) -> Any:
        """JSON content of a file, as the libraries read it; None if there is no such file.

        Not by `embq.core.wire`: numbers of more than 64 bits and Infinity are common in these files.
        """
        path = self.folder / name
        try:
            content = json.loads(read_small(path, most_bytes=MOST_BYTES).decode("utf-8"))
            if _is_deep(content):
                raise ValueError("too many levels")
            return content
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            why = (error.strerror if isinstance(error, OSError) else "") or " ".join(str(error).split())[:200]
            raise self.refused(name, f"cannot be read: {why}", "use the file as it was saved") from error

    def read_object(self, name: str) -> dict[str, Any]:
        """The same; {} if the content is no object."""
        content = self.read(name)
        return content if isinstance(content, dict) else {}

    def refused(self, file: str, why: str, next_step: str) -> ModelError:
        """The error for a file that is not taken."""
        return ModelError(f"{self.model}: {file} {why}", next_step=next_step)

    def check_keys(self, file: str, content: Any) -> None:
        """Raise ModelError if any key decides what is loaded or run."""
        for key, value, _ in _pairs(content):
            if value not in (None, False, "", [], {}) and (why := _reason(key, value)):
                raise self.refused(file, *why)

    def check_plain(self, file: str, content: Any) -> None:
        """Raise ModelError as `check_keys` does, and if a value is no plain word, number or boolean, or too many."""
        self.check_keys(file, content)
        for key, value, is_free in _pairs(content):
            is_list = isinstance(value, list) and not is_free
            count = len(value) if is_list else value if isinstance(value, int) and COUNTS.match(key) else 0
            if count > MOST_PARTS:
                why = f"has {count} as {shown(key)}, and embq takes {MOST_PARTS} at most"
                raise self.refused(file, why, "use the file as it was")
            if isinstance(value, str) and not is_free and not WORD.fullmatch(value):
                raise self.refused(
                    file,
                    f"has {shown(value)} as {shown(key)}, where embq takes plain words and numbers",
                    "take the key out of a copy of the folder if nothing needs it; no model is loaded from elsewhere",
                )


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [
            item
            for above in level
            if isinstance(above, (dict, list))
            for item in (above.values() if isinstance(above, dict) else above)
        ]
        if not level:
            return False
    return True


def _reason(key: str, value: Any) -> tuple[str, str] | None:
    """(why a key with a value is not taken, next step); None if it is taken."""
    if key in CODE:
        return (
            f"has {key}: the model comes with its own code, and embq runs no code from models",
            "use a model of an architecture that the library has built in, or a copy without that key if it is one",
        )
    if key in ELSEWHERE:
        return f"has {key}, which loads something else", "put everything into the folder"
    if key in READERS and not READER.fullmatch(str(value)):
        return f"names {shown(value)} as {key}, which is no tokeniser or processor", "name the model's own"
    if key == "quantization_config":
        return "says that the weights are quantised", "use the model in float32, bf16 or fp16"
    for kind, allowed in IMPLEMENTATIONS.items():
        if key.endswith((kind, f"{kind}_internal")):
            for name in value.values() if isinstance(value, dict) else [value]:
                if name is not None and name not in allowed:
                    return f"has {shown(name)} as {key}", f"use one of {', '.join(allowed)}"
    return None


def _pairs(value: Any, key: str = "", *, free: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """(key, value, whether the key or one above it is `FREE`) of each value; items have the key of their list."""
    yield key, value, free
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _pairs(item, name, free=free or name in FREE)
    elif isinstance(value, list):
        for item in value:
            yield from _pairs(item, key, free=free)


def shown(value: object) -> str:
    """A value for a message, cut to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
