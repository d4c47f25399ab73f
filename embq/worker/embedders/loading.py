"""Find the files of a model, and translate the errors of model libraries while they load."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import Handler, LogRecord
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from transformers import dynamic_module_utils
from transformers.utils import logging

from embq.core.errors import EmbqError, ModelError
from embq.core.models import ModelSpec
from embq.worker.embedders.device.errors import device_error
from embq.worker.embedders.lookup import named_folder, repositories
from embq.worker.embedders.model_files import (
    LOOKED_AT,
    SMALL_FILES,
    check_model_folder,
    check_settings,
    towers_of_hub,
    weights_of,
)
from embq.worker.embedders.sample_fields import is_panic


def model_source(spec: ModelSpec) -> str:
    """The folder of a model whose files `model_files` lets pass; one of the hub is fetched to the hub's cache first.

    The libraries get that folder, never the name: the hub could have other files for it by then.

    Raises ModelError if there is no such model, or its files say what embq does not take.
    """
    named = named_folder(spec)
    with translated_model_errors(spec, from_hub=named is None), no_progress_bars():
        folder = _snapshot(spec) if named is None else named.resolve()
        check_model_folder(folder, spec, spec.family)
    with translated_model_errors(spec, from_hub=True), no_progress_bars():
        for tower in towers_of_hub(folder, spec) if spec.family == "open_clip" else ():
            check_settings(Path(snapshot_download(tower, allow_patterns=list(LOOKED_AT))), f"{spec}: {tower}", "hf")
    return str(folder)


def _snapshot(spec: ModelSpec) -> Path:
    """The folder of the hub's cache with the files that a model is loaded from; raises as the hub's client does."""
    *candidates, last = repositories(spec)
    for repository in candidates:
        try:
            return _fetched(repository, spec)
        except (OSError, ValueError):
            continue  # which is also what is raised for a repository that is not there
    return _fetched(last, spec)


def _fetched(repository: str, spec: ModelSpec) -> Path:
    folder = Path(snapshot_download(repository, allow_patterns=list(SMALL_FILES)))
    check_settings(folder, spec, spec.family)
    patterns = [*SMALL_FILES, *weights_of(folder, spec, spec.family)]
    # Of the same commit, whose name the folder has.
    return Path(snapshot_download(repository, revision=folder.name, allow_patterns=patterns))


@contextmanager
def translated_model_errors(spec: ModelSpec, *, from_hub: bool) -> Iterator[None]:
    """Turn what transformers, sentence-transformers and open_clip raise for absent or damaged files into ModelError.

    Their exceptions have no common tree, and a folder decides what is raised: UnpicklingError, IndexError, and by
    tokenizers a plain Exception, or a panic.
    """
    try:
        with no_own_code():
            yield
    except (ImportError, MemoryError, EmbqError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if isinstance(error, Exception) and (problem := device_error(error)) is not None:
            raise problem from error
        reason = first_line(error)
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{spec} comes with its own code, and embq runs no code from models: {reason}",
                next_step="use a model of an architecture that the library has built in",
            ) from error
        if from_hub:
            offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
            remedy = (
                "unset HF_HUB_OFFLINE, so that it is downloaded once"
                if constants.HF_HUB_OFFLINE
                else "check the id and the way to the hub (HTTPS_PROXY, HF_ENDPOINT; HF_TOKEN for a gated model)"
            )
            raise ModelError(
                f"{spec} is not a folder here and cannot be had from the model hub{offline}: {reason}",
                next_step=f"{remedy}; or copy the cache (HF_HOME) of another machine, or name a folder",
            ) from error
        raise ModelError(
            f"{spec} cannot be loaded: {reason}",
            next_step="check that the folder holds a whole model of this family, with weights in safetensors",
        ) from error


_refusing = threading.local()
_run = dynamic_module_utils.get_class_in_module


def _run_or_refuse(class_name: str, *arguments: Any, **options: Any) -> Any:
    """In place of the function of transformers that runs code that comes with a model, for all libraries."""
    if getattr(_refusing, "depth", 0):
        raise ValueError(f"{class_name} is code of the model, which needs trust_remote_code")
    return _run(class_name, *arguments, **options)


@contextmanager
def no_own_code() -> Iterator[None]:
    """Have this thread run no code of a model, whatever its files say by now: they are read again after their check."""
    dynamic_module_utils.get_class_in_module = _run_or_refuse
    _refusing.depth = getattr(_refusing, "depth", 0) + 1
    try:
        yield
    finally:
        _refusing.depth -= 1


@contextmanager
def complete_weights(spec: ModelSpec) -> Iterator[None]:
    """Refuse a checkpoint that leaves part of a model random, which transformers tells of in its log only.

    For loads through sentence-transformers, which drops the account of `from_pretrained`. Weights of poolers may be
    absent: no module reads them.
    """
    listening = _MissingWeights()
    logger = logging.get_logger("transformers")
    logger.addHandler(listening)
    try:
        yield
    finally:
        logger.removeHandler(listening)
    if listening.names:
        raise lacks_weights(spec, listening.names)


class _MissingWeights(Handler):
    """Listens for transformers' report of a load, and keeps the names in its lines `name | MISSING | ...`."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: LogRecord) -> None:
        for line in record.getMessage().splitlines():
            name, _, status = (part.strip() for part in line.partition("|"))
            if status.startswith("MISSING") and "pooler." not in name:
                self.names.append(name)


def lacks_weights(spec: ModelSpec, names: Sequence[str]) -> ModelError:
    """The error for a checkpoint without the weights `names` of its model."""
    return ModelError(
        f"{spec}: the checkpoint lacks {len(names)} weights of the model, such as {names[0]}",
        next_step="use a checkpoint of the architecture that its config.json names",
    )


def read_model(kind: Any, source: str | Path, **where: Any) -> tuple[Any, Mapping[str, Any]]:
    """A model of transformers in float32, with its account of it: `missing_keys`, `mismatched_keys` and others.

    transformers does not log that account here: of a model without its head it reads like a fault.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with no_progress_bars():
            # The type is explicit, because the default is the type of the checkpoint.
            model, account = kind.from_pretrained(
                source, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **where
            )
    finally:
        logging.set_verbosity(verbosity)
    return model.eval(), account


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers' bar of loaded weights out of a worker's log."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def first_line(error: BaseException) -> str:
    """First line of a foreign exception, short enough for a terminal."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"[:300]
