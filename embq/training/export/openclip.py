"""Exports a checkpoint of open_clip to a folder for `open_clip:local-dir:FOLDER`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embq.core.errors import EmbqError, ModelError, UsageError
from embq.core.process.libraries import version_of
from embq.core.storage.durable import file_sha256
from embq.training.export.model_folder import PROVENANCE, Exported, check_target, fingerprint_of, new_folder
from embq.training.export.network import Network, model_failures
from embq.training.openclip.checkpoints import Arguments, Checkpoint, open_checkpoint
from embq.training.openclip.log import read
from embq.training.openclip.models import CONFIG, LOCAL, checked_model
from embq.training.run.folder import save_weights

if TYPE_CHECKING:
    import torch


TRIED = (
    "a photograph of a red bicycle against a wall",
    "Straße, naïve café — Ελληνικά, русский текст, 漢字, 🙂",
    "it's 100% “quoted” &amp; <b>bold</b>, don't",
    "word " * 200,
)
"""Texts by which two tokenisers are compared: signs, cases, entities, and one longer than any context."""


def tokenizer_of(arguments: Arguments) -> Any:
    """The tokeniser of a training; ModelError where its files are missing, or could run code."""
    import open_clip

    with model_failures(f"{arguments['model']} (its tokeniser)"):
        return open_clip.get_tokenizer(
            checked_model(arguments["model"], arguments["cache_dir"], weights=False),
            cache_dir=arguments["cache_dir"],
            context_length=arguments["force_context_length"],
        )


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokeniser's files to the folder; open_clip's own needs none.

    Raises ModelError where `open_clip.get_tokenizer` of the folder then gives other tokens.
    """
    import open_clip
    import torch

    with model_failures("the tokeniser"):
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(str(folder))
        found = open_clip.get_tokenizer(checked_model(f"{LOCAL}{folder}"))
        same = all(torch.equal(tokenizer([text]), found([text])) for text in TRIED)
    if not same:
        raise ModelError(
            f"the training's tokeniser ({type(tokenizer).__name__}) is not the one that open_clip finds by the "
            f"folder's files ({type(found).__name__}): texts would get other tokens",
            next_step='name the tokeniser in the configuration of the model: "hf_tokenizer_name" of its text_cfg',
        )


KEPT = ("name", "model", "pretrained", "precision", "epochs", "batch_size", "world_size", "lr", "seed", "train_data")
"""Arguments of the training in the provenance."""


def provenance_of(
    checkpoint: Checkpoint, arguments: Arguments, fingerprint: str, weights_sha256: str
) -> dict[str, Any]:
    """Content of `embq_export.json`: the same checkpoint gives the same text, without times.

    Args:
        fingerprint: see `embq.training.export.model_folder.Exported`.
        weights_sha256: of the safetensors file.
    """
    return {
        "schema": 1,
        "checkpoint": {
            "path": str(checkpoint.path),
            "bytes": checkpoint.path.stat().st_size,
            "sha256": file_sha256(checkpoint.path),
            "epoch": checkpoint.epoch,
        },
        "training": {name: arguments[name] for name in KEPT},
        "samples_seen": _samples_seen(checkpoint),
        "shards_digest": _shards_digest(arguments),
        "weights_sha256": weights_sha256,
        "fingerprint": fingerprint,
        "versions": versions("open_clip_torch"),
    }


def versions(library: str) -> dict[str, str]:
    """Versions of embq, torch and the model's library."""
    return {name: version_of(name) for name in ("embq", library, "torch")}


def _samples_seen(checkpoint: Checkpoint) -> int | None:
    """Samples of all steps up to the checkpoint, from the training's log; None where it lacks them."""
    log = None if checkpoint.params is None else checkpoint.params.with_name("out.log")
    if log is None or checkpoint.epoch is None or not log.is_file():
        return None
    of_epochs = {one.epoch: one.samples_per_epoch for one in read(log).iterations}
    seen = [of_epochs.get(epoch) for epoch in range(checkpoint.epoch)]
    return None if None in seen else sum(one or 0 for one in seen)


def _shards_digest(arguments: Arguments) -> str | None:
    """Digest of the training's shards; None where they are no longer there."""
    from embq.training.shards.shard_set import open_shards

    try:
        return open_shards(arguments["train_data"]).digest if arguments["train_data"] else None
    except EmbqError:
        return None


WEIGHTS = "open_clip_model.safetensors"


def export_openclip(given: Path, target: Path, *, model: str = "") -> Exported:
    """Write the checkpoint as a folder that the workers load, with equal outputs.

    Args:
        given: a checkpoint, or the folder of a training, of which the latest one is taken.
        target: a folder that is new or empty.
        model: what the training called its model, where no params.txt lies beside the checkpoint or its folder moved.

    Raises InputError and ModelError where there is no checkpoint, or it and the arguments of its training do not give a
    model; OutputError where the folder cannot be written.
    """
    check_target(target)
    checkpoint = open_checkpoint(given)
    arguments = _arguments(checkpoint, model)
    spec = f"open_clip:{LOCAL}{target.absolute()}"
    with new_folder(target) as folder:
        network = Network(arguments)
        trained = network.trained(checkpoint)
        (folder / CONFIG).write_text(json.dumps(network.config, indent=2) + "\n", encoding="utf-8")
        tokenizer = tokenizer_of(arguments)
        write_tokenizer(tokenizer, folder)
        save_weights(trained.state_dict(), folder / WEIGHTS)
        _check_equal(trained, tokenizer, folder)
        fingerprint = fingerprint_of(f"open_clip:{LOCAL}{folder}")
        provenance = provenance_of(checkpoint, arguments, fingerprint, file_sha256(folder / WEIGHTS))
        (folder / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
        size = (folder / WEIGHTS).stat().st_size
    hub = network.config["model_cfg"]["text_cfg"].get("hf_model_name", "")
    return Exported(
        folder=target,
        spec=spec,
        provenance=provenance,
        weights_bytes=size,
        needs=f"the configuration of {hub} from the model hub, or its cache (HF_HOME)" if hub else "",
    )


def _arguments(checkpoint: Checkpoint, model: str) -> Arguments:
    given = Arguments() if checkpoint.params is None else Arguments.read(checkpoint.params)
    if not given and not model:
        raise UsageError(
            f"{checkpoint.path}: no params.txt of its training lies above it, so nothing says what model it is of",
            next_step="put the checkpoint back where it was written, or say what the training was given: --model NAME",
        )
    if model:
        # A folder without it may only be called as an architecture is, such as that of its training.
        is_folder = (Path(model) / CONFIG).is_file()
        given["model"] = f"{LOCAL}{Path(model).absolute()}" if is_folder else model
    return given


def _check_equal(trained: Any, tokenizer: Any, folder: Path) -> None:
    """ModelError where the folder gives other weights, another preprocessing or another vector."""
    import open_clip
    import torch

    with model_failures(f"{LOCAL}{folder}"):
        found = open_clip.create_model(f"{LOCAL}{folder}", require_pretrained=True).eval()
    before, after = trained.state_dict(), found.state_dict()
    differing = [name for name in before if name not in after or not torch.equal(before[name], after[name])]
    prepared = [json.dumps(model.visual.preprocess_cfg, sort_keys=True) for model in (trained, found)]
    if prepared[0] != prepared[1]:
        differing.append("the preparation of images")
    given = _outputs(found, tokenizer)
    differing += [name for name, one in _outputs(trained, tokenizer).items() if not one.equal(given[name])]
    if differing:
        raise ModelError(
            f"the folder would not give the trained model back: {len(differing)} things differ, first {differing[0]}",
            next_step="report it with the params.txt of the training: a flag of it is not known to embq",
        )


def _outputs(model: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    """The outputs of both towers for a random image and a text."""
    import torch
    from open_clip.transform import PreprocessCfg

    size = PreprocessCfg(**model.visual.preprocess_cfg).input_size
    image = torch.randn(1, *size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return {
            "the vector of an image": model.encode_image(image),
            "the vector of a text": model.encode_text(tokenizer(["a photograph of a red bicycle"])),
        }
