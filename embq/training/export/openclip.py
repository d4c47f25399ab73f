"""Exports a checkpoint of open_clip to a folder for `open_clip:local-dir:FOLDER`."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embq.core.errors import EmbqError, ModelError, UsageError
from embq.core.process.libraries import version_of
from embq.core.storage.beneath import read_small
from embq.core.storage.durable import file_sha256
from embq.training.export.model_folder import PROVENANCE, Exported, check_target, fingerprint_of, new_folder
from embq.training.openclip.checkpoints import Arguments, Checkpoint, open_checkpoint
from embq.training.openclip.log import read
from embq.training.openclip.models import CONFIG, LOCAL, checked_model
from embq.training.run.folder import save_weights

if TYPE_CHECKING:
    import torch


IN_VISION = {"force_patch_dropout": "patch_dropout", "force_image_size": "image_size"}
IN_TEXT = {"force_context_length": "context_length"}
IN_MODEL = {"force_quick_gelu": "quick_gelu", "force_custom_text": "custom_text"}
"""Flag of a training -> the setting that it changes, in the part of the configuration for the image tower, for the
text tower, and for both."""

OF_PREPROCESS = {
    "image_mean": "mean",
    "image_std": "std",
    "image_interpolation": "interpolation",
    "image_resize_mode": "resize_mode",
}
KEPT_OF_PREPROCESS = ("mean", "std", "interpolation", "resize_mode", "fill_color")
"""Settings that are written; the image size belongs to the image tower."""

SIGLIP = {"init_logit_scale": math.log(10), "init_logit_bias": -10}
"""Initial values of --siglip, whose bias is an additional parameter."""


class Network:
    """The network of a training.

    Attributes:
        config: for `open_clip_config.json`; it builds the network without any flag.
    """

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self.name: str = arguments["model"]
        with model_failures(self.name):
            self._source = checked_model(self.name, arguments["cache_dir"], weights=False)
        model, self._preprocess = _configured(self._source, arguments)
        for part, settings in ((model["vision_cfg"], IN_VISION), (model["text_cfg"], IN_TEXT), (model, IN_MODEL)):
            part.update({key: arguments[flag] for flag, key in settings.items() if arguments[flag]})
        if arguments["siglip"]:
            model.update(SIGLIP)
        if arguments["use_bnb_linear"]:
            raise ModelError(
                "the training had layers of bitsandbytes (--use-bnb-linear), which no worker loads",
                next_step="train without the flag to have a model to embed with",
            )
        overrides = {key: arguments[flag] for flag, key in OF_PREPROCESS.items() if arguments[flag] is not None}
        self._preprocess |= overrides
        self.config: dict[str, Any] = {"model_cfg": model}

    def trained(self, checkpoint: Checkpoint) -> Any:
        """The trained model in float32, built as the training built it; also completes `config`.

        Raises ModelError if the weights are not those of this network, or are no numbers.
        """
        import open_clip

        flags = self._arguments
        with model_failures(self.name), _quiet():
            model = open_clip.create_model(
                self._source,
                load_weights=False,
                pretrained_text=False,
                force_quick_gelu=bool(flags["force_quick_gelu"]),
                force_custom_text=bool(flags["force_custom_text"]),
                force_patch_dropout=flags["force_patch_dropout"],
                force_image_size=flags["force_image_size"],
                force_context_length=flags["force_context_length"],
                force_preprocess_cfg=self._preprocess,
                cache_dir=flags["cache_dir"],
                **(SIGLIP if flags["siglip"] else {}),
            )
            _fill(model, checkpoint)
        preprocess = model.visual.preprocess_cfg
        self.config["preprocess_cfg"] = {key: preprocess[key] for key in KEPT_OF_PREPROCESS if preprocess.get(key)}
        return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence open_clip's warning of random weights, which are replaced at once."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)


def _configured(name: str, arguments: Arguments) -> tuple[dict[str, Any], dict[str, Any]]:
    """(model configuration, preprocessing configuration) of a training; ModelError if they are missing."""
    import open_clip

    with model_failures(name):
        if name.startswith(LOCAL):
            folder = Path(name.removeprefix(LOCAL))
            if not (folder / CONFIG).is_file():
                raise ModelError(
                    f"the training's model {name}: {folder.resolve() / CONFIG} is not there (any more)",
                    next_step="put it back, or say where it is now: --model FOLDER",
                )
            described = json.loads(read_small(folder / CONFIG))
            return described["model_cfg"], dict(described.get("preprocess_cfg") or {})
    model = open_clip.get_model_config(name.replace("/", "-"))
    if model is None:
        raise ModelError(
            f"open_clip has no architecture {name!r}",
            next_step="give --model as it was given to the training: a name of open_clip's, or a folder",
        )
    tag = arguments["pretrained"] or ""
    pretrained: Mapping[str, Any] = open_clip.get_pretrained_cfg(name.replace("/", "-"), tag) if tag else {}
    preprocess = {key: value for key, value in pretrained.items() if key in KEPT_OF_PREPROCESS and value is not None}
    return copy.deepcopy(model), preprocess


def _fill(model: Any, checkpoint: Checkpoint) -> None:
    import torch

    own = model.state_dict()
    given = checkpoint.weights
    unlike = sorted(
        {name for name in own.keys() | given.keys() if name not in own or name not in given}
        | {name for name in own.keys() & given.keys() if own[name].shape != given[name].shape}
    )
    # Buffers that layers with frozen statistics do without are no weights.
    unlike = [name for name in unlike if not name.endswith("num_batches_tracked")]
    if unlike:
        raise ModelError(
            f"{checkpoint.path}: {len(unlike)} weights are not those of the network that the training's arguments "
            f"describe, such as {unlike[0]}",
            next_step="give the checkpoint with the params.txt of its own training, or the right --model",
        )
    if bad := [name for name, value in given.items() if value.is_floating_point() and not torch.isfinite(value).all()]:
        raise ModelError(
            f"{checkpoint.path}: {len(bad)} weights are not finite, such as {bad[0]}: the training has diverged",
            next_step="export an earlier checkpoint; train with a smaller --lr, or --precision amp_bf16",
        )
    model.load_state_dict(given, strict=False)


@contextmanager
def model_failures(name: str) -> Iterator[None]:
    """Translate errors of open_clip for missing or damaged configurations to ModelError, and run no code of models."""
    from embq.worker.embedders.loading import no_own_code

    try:
        with no_own_code():
            yield
    except EmbqError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        first_line = (str(error).strip().splitlines() or [""])[0][:300]
        raise ModelError(
            f"the training's model {name} cannot be built: {type(error).__name__}: {first_line}",
            next_step="check that its folder is whole; a model of the hub has to be in the cache of this machine "
            "(HF_HOME), or the hub to be reached",
        ) from error


TRIED = (
    "a photograph of a red bicycle against a wall",
    "Straße, naïve café — Ελληνικά, русский текст, 漢字, 🙂",
    "it's 100% “quoted” &amp; <b>bold</b>, don't",
    "word " * 200,
)
"""Texts by which two tokenisers are compared: signs, cases, entities, and one longer than any context."""


def tokenizer_of(arguments: Arguments) -> Any:
    """The tokeniser of a training; ModelError if its files are missing, or could run code."""
    import open_clip

    with model_failures(f"{arguments['model']} (its tokeniser)"):
        return open_clip.get_tokenizer(
            checked_model(arguments["model"], arguments["cache_dir"], weights=False),
            cache_dir=arguments["cache_dir"],
            context_length=arguments["force_context_length"],
        )


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokeniser's files to the folder; open_clip's own needs none.

    Raises ModelError if `open_clip.get_tokenizer` of the folder then gives other tokens.
    """
    import open_clip
    import torch

    with model_failures("the tokeniser"):
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(str(folder))
        reopened = open_clip.get_tokenizer(checked_model(f"{LOCAL}{folder}"))
        same = all(torch.equal(tokenizer([text]), reopened([text])) for text in TRIED)
    if not same:
        raise ModelError(
            f"the training's tokeniser ({type(tokenizer).__name__}) is not the one that open_clip finds by the "
            f"folder's files ({type(reopened).__name__}): texts would get other tokens",
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
    """Samples of all steps up to the checkpoint, from the training's log; None if it lacks them."""
    log = None if checkpoint.params is None else checkpoint.params.with_name("out.log")
    if log is None or checkpoint.epoch is None or not log.is_file():
        return None
    of_epochs = {iteration.epoch: iteration.samples_per_epoch for iteration in read(log).iterations}
    samples = [of_epochs.get(epoch) for epoch in range(checkpoint.epoch)]
    return None if None in samples else sum(count or 0 for count in samples)


def _shards_digest(arguments: Arguments) -> str | None:
    """Digest of the training's shards; None if they are no longer there."""
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
        model: what the training called its model, if no params.txt lies beside the checkpoint or its folder moved.

    Raises InputError and ModelError if there is no checkpoint, or it and the arguments of its training do not give a
    model; OutputError if the folder cannot be written.
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
    """ModelError if the folder gives other weights, another preprocessing or another vector."""
    import open_clip
    import torch

    with model_failures(f"{LOCAL}{folder}"):
        loaded = open_clip.create_model(f"{LOCAL}{folder}", require_pretrained=True).eval()
    weights, after = trained.state_dict(), loaded.state_dict()
    differing = [name for name in weights if name not in after or not torch.equal(weights[name], after[name])]
    prepared = [json.dumps(model.visual.preprocess_cfg, sort_keys=True) for model in (trained, loaded)]
    if prepared[0] != prepared[1]:
        differing.append("the preparation of images")
    given = _outputs(loaded, tokenizer)
    differing += [name for name, output in _outputs(trained, tokenizer).items() if not output.equal(given[name])]
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
