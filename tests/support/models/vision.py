"""Tiny vision models with random weights, in folders as transformers saves them, each with its image processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.lazy import lazy

torch = lazy("torch")
transformers = lazy("transformers")


WIDTH = 32
"""Hidden size of all encoders."""

SIDE = 64
"""Side of the images that they read, in pixels."""

SMALL = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": SIDE,
    "patch_size": 16,
}
SQUARE = {"height": SIDE, "width": SIDE}
CUT = {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE}


def _tower(**more: Any) -> dict[str, Any]:
    return {**SMALL, "projection_dim": 24, **more}


def _words(**more: Any) -> dict[str, Any]:
    size = {key: SMALL[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
    ids = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return {**size, **ids, "max_position_embeddings": 16, "projection_dim": 24, **more}


def _of(model: str, config: str, settings: dict[str, Any], processor: str, asked: dict[str, Any]) -> Callable[[], Any]:
    def make() -> Any:
        made = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made, getattr(transformers, processor)(**asked)

    return make


MODELS: dict[str, Callable[[], Any]] = {
    "vit": _of("ViTModel", "ViTConfig", SMALL, "ViTImageProcessor", {"size": SQUARE}),
    "vit classifier": _of(
        "ViTForImageClassification", "ViTConfig", SMALL, "ViTImageProcessor", {"size": SQUARE, "do_convert_rgb": True}
    ),
    # DINOv2 was trained on larger images than it is usually given, and stretches its positions.
    "dinov2": _of(
        "Dinov2Model",
        "Dinov2Config",
        {**SMALL, "image_size": 80},
        "BitImageProcessor",
        {"size": {"shortest_edge": 73}, "crop_size": SQUARE},
    ),
    "dinov2 with registers": _of(
        "Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", SMALL, "BitImageProcessor", CUT
    ),
    "dinov3": _of(
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        {**SMALL, "num_register_tokens": 2},
        "DINOv3ViTImageProcessor",
        {"size": SQUARE},
    ),
    "deit": _of(
        "DeiTModel",
        "DeiTConfig",
        SMALL,
        "DeiTImageProcessor",
        {"size": {"height": 73, "width": 73}, "crop_size": SQUARE},
    ),
    "beit": _of("BeitModel", "BeitConfig", SMALL, "BeitImageProcessor", {"size": SQUARE}),
    "swin": _of(
        "SwinModel",
        "SwinConfig",
        {"image_size": SIDE, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        "ViTImageProcessor",
        {"size": SQUARE, "resample": 3},
    ),
    "convnext": _of(
        "ConvNextModel",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 24, WIDTH], "depths": [1, 1, 1, 1]},
        "ConvNextImageProcessor",
        {"size": {"shortest_edge": SIDE}},
    ),
    "clip": _of(
        "CLIPModel",
        "CLIPConfig",
        {"vision_config": _tower(), "text_config": _words(), "projection_dim": 24},
        "CLIPImageProcessor",
        CUT,
    ),
    "clip tower": _of("CLIPVisionModel", "CLIPVisionConfig", _tower(), "CLIPImageProcessor", CUT),
    "clip projection": _of("CLIPVisionModelWithProjection", "CLIPVisionConfig", _tower(), "CLIPImageProcessor", CUT),
    "siglip": _of(
        "SiglipModel",
        "SiglipConfig",
        {"vision_config": SMALL, "text_config": _words(projection_size=WIDTH)},
        "SiglipImageProcessor",
        {"size": SQUARE},
    ),
    "siglip tower": _of("SiglipVisionModel", "SiglipVisionConfig", SMALL, "SiglipImageProcessor", {"size": SQUARE}),
}
"""Kind -> a model with random weights and its image processor."""


def save_vision(folder: Path, kind: str, *, seed: int = 0, **processing: Any) -> Path:
    """A folder as transformers saves it.

    Args:
        processing: settings of the image processor in place of the kind's own.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, processor = MODELS[kind]()
        _widen(model)
    for name, value in processing.items():
        setattr(processor, name, value)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _widen(model: Any) -> None:
    """Larger weights than those a training begins with, by which all images would have nearly the same vector."""
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim == 2 and "layer_scale" not in name:
                weights.copy_(torch.randn(weights.shape) * 0.2)
            elif name.endswith("lambda1") or "layer_scale" in name:
                weights.fill_(1.0)
