"""Models of transformers: a text encoder or a vision encoder, as the run asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from embq.core.errors import ModelError
from embq.core.model_params import choice
from embq.core.models import ModelConfig, ModelSpec
from embq.worker.embedders.sample_fields import check_modalities

if TYPE_CHECKING:
    from embq.worker.embedders.image.vision import VisionEmbedder
    from embq.worker.embedders.text.transformer import TransformerEmbedder


def own_modality(spec: ModelSpec) -> str:
    """Modality of the model: that of its spec, else "image" for a vision model, else "text".

    Raises ModelError if its configuration is not there.
    """
    if len(spec.can_embed) == 1:
        return spec.can_embed[0]
    from embq.worker.embedders.image.vision import vision_class

    return "text" if vision_class(spec) is None else "image"


def load(spec: ModelSpec, config: ModelConfig, device: str) -> TransformerEmbedder | VisionEmbedder:
    """The model of an `hf:` spec; ModelError if it cannot be loaded here."""
    check_modalities(config, *spec.model_family.embeds)
    modality = ", ".join(config.modalities)
    if len(config.modalities) > 1:
        raise ModelError(
            f"{spec} embeds images or texts, and the run both",
            next_step="add --modality image or --modality text, or use an open_clip model, which has both",
        )
    if choice(spec, "embeds", modality, spec.model_family.embeds) != modality:
        raise ModelError(f"{spec}: the run embeds {modality}s", next_step="leave out embeds=, or add --modality")
    # Imported here, because each needs packages of its own.
    if modality == "image":
        from embq.worker.embedders.image.vision import load as load_images

        return load_images(spec, config, device)
    from embq.worker.embedders.text.transformer import load as load_texts

    return load_texts(spec, config, device)
