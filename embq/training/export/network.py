"""Rebuilds the network of a training by open_clip from its arguments."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embq.core.errors import EmbqError, ModelError
from embq.training.openclip.checkpoints import Arguments, Checkpoint
from embq.training.openclip.models import CONFIG, LOCAL, checked_model

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

        Raises ModelError where the weights are not those of this network, or are no numbers.
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
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _configured(name: str, arguments: Arguments) -> tuple[dict[str, Any], dict[str, Any]]:
    """(model configuration, preprocessing configuration) of a training; ModelError where they are missing."""
    import open_clip

    with model_failures(name):
        if name.startswith(LOCAL):
            folder = Path(name.removeprefix(LOCAL))
            if not (folder / CONFIG).is_file():
                raise ModelError(
                    f"the training's model {name}: {folder.resolve() / CONFIG} is not there (any more)",
                    next_step="put it back, or say where it is now: --model FOLDER",
                )
            described = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            return described["model_cfg"], dict(described.get("preprocess_cfg") or {})
    model = open_clip.get_model_config(name.replace("/", "-"))
    if model is None:
        raise ModelError(
            f"open_clip has no architecture {name!r}",
            next_step="give --model as it was given to the training: a name of open_clip's, or a folder",
        )
    tag = arguments["pretrained"] or ""
    known: Mapping[str, Any] = open_clip.get_pretrained_cfg(name.replace("/", "-"), tag) if tag else {}
    kept = {key: value for key, value in known.items() if key in KEPT_OF_PREPROCESS and value is not None}
    return copy.deepcopy(model), kept


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
    if bad := [name for name, one in given.items() if one.is_floating_point() and not torch.isfinite(one).all()]:
        raise ModelError(
            f"{checkpoint.path}: {len(bad)} weights are not finite, such as {bad[0]}: the training has diverged",
            next_step="export an earlier checkpoint; train with a smaller --lr, or --precision amp_bf16",
        )
    model.load_state_dict(given, strict=False)


@contextmanager
def model_failures(name: str) -> Iterator[None]:
    """Translate errors of open_clip for missing or damaged configurations to ModelError."""
    try:
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
