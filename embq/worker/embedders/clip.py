"""Models of open_clip: images, texts, or both in one space."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
from PIL import Image
from torch.nn.functional import normalize
from transformers import dynamic_module_utils

from embq.core.errors import ModelError, SampleError
from embq.core.model_params import CLIP, choice, unit_length, whole_number
from embq.core.models import REFERENCE, Chunking, ModelConfig, ModelSpec
from embq.core.service.log import Events
from embq.core.units import Sample
from embq.worker.embedders.base import Truncated, padded_tokens
from embq.worker.embedders.device.network import Network
from embq.worker.embedders.device.placement import device_of, dtype_of, on_device, sizes_of
from embq.worker.embedders.fingerprint import fingerprint
from embq.worker.embedders.image.buffer_pool import Row
from embq.worker.embedders.image.decoding import quiet_pillow
from embq.worker.embedders.image.forward import ImageForward
from embq.worker.embedders.image.preprocess import of_open_clip
from embq.worker.embedders.image.upload import ImageBatcher, image_rows, with_images
from embq.worker.embedders.loading import model_source, translated_model_errors
from embq.worker.embedders.lookup import check_architecture, check_open_clip, open_clip_parts
from embq.worker.embedders.sample_fields import check_modalities, prepare_each, text_of
from embq.worker.embedders.text.clip_tokens import ClipTokens, clip_tokenizer_content
from embq.worker.embedders.text.clip_tower import causal_tower, tower_vocabulary
from embq.worker.embedders.text.splitting import TokenSplitter

log = Events("worker")


def model_factory(spec: ModelSpec) -> tuple[Callable[[], tuple[Any, Any, Any]], str]:
    """A function that makes (model, training transform, evaluation transform), and the name of the tokeniser."""
    create = open_clip.create_model_and_transforms
    if spec.name.startswith("local-dir:"):
        spec.check_params("batch_size", "tokens", "normalize")
        folder = model_source(spec)
        # Without weights in the folder, open_clip would go on with random ones.
        if not any(file.suffix in (".safetensors", ".bin", ".pth") for file in Path(folder).iterdir()):
            raise ModelError(f"{spec}: the folder holds no weights", next_step="add open_clip_model.safetensors")
        name = f"local-dir:{folder}"
        return (lambda: create(name, weights_only=True)), name
    if spec.param("init", ""):
        spec.check_params(*CLIP)
        choice(spec, "init", "random", ("random",))
        arch, seed = spec.name.replace("/", "-"), whole_number(spec, "seed", 0, least=0)
        check_architecture(spec, arch, open_clip.list_models())
        return (lambda: _random_model(spec, arch, seed)), arch
    spec.check_params("batch_size", "tokens", "normalize")
    arch, tag = open_clip_parts(spec)
    check_open_clip(spec, open_clip.list_models(), open_clip.list_pretrained_tags_by_model(arch))
    _check_tag(spec, arch, tag)
    return (lambda: create(arch, pretrained=tag, weights_only=True)), arch


def _random_model(spec: ModelSpec, arch: str, seed: int) -> tuple[Any, Any, Any]:
    """A model with random weights that depend on the seed only; the process's random state stays as it is."""
    log.warning("model_weights_are_random", model=spec)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed, which would seed the CUDA devices too.
        torch.default_generator.manual_seed(seed)
        created: tuple[Any, Any, Any] = open_clip.create_model_and_transforms(
            arch, pretrained=None, pretrained_image=False, pretrained_text=False
        )
    return created


def _check_tag(spec: ModelSpec, arch: str, tag: str) -> None:
    """Refuse weights that were trained with another activation, of which open_clip only warns."""
    made_with = bool(open_clip.get_pretrained_cfg(arch, tag).get("quick_gelu", False))
    built_with = bool((open_clip.get_model_config(arch) or {}).get("quick_gelu", False))
    if made_with != built_with:
        other = f"{arch}-quickgelu" if made_with else arch.removesuffix("-quickgelu")
        raise ModelError(
            f"{spec}: QuickGELU is {'on' if made_with else 'off'} in these weights, but not so in {arch}",
            next_step=f"use open_clip:{other}/{tag}",
        )


EMBEDDER_VERSION = "clip 1"
"""Its number goes up when the same model and sample give another vector."""

LAYER_SETTINGS = (
    "eps",
    "num_heads",
    "pool_type",
    "final_ln_after_pool",
    "text_pool_type",
    "text_eos_id",
    "eos_id",
    "pad_id",
)
"""Settings of layers that decide vectors beside the weights. A fixed list, because all attributes of a layer differ by
torch version."""

Ready = dict[str, Any]
"""One sample: "image" a `Row` of uint8 (height, width, 3); "text" int64 of shape (context,)."""


class ClipEmbedder:
    """Unit vectors of an open_clip model, with open_clip's own tokeniser, and images as its evaluation transform or a
    faster path to the same pixels prepares them.

    Args:
        unit_length: False leaves the vectors as the towers give them.
    """

    def __init__(
        self,
        model: Any,
        transform: Callable[[Image.Image], torch.Tensor],
        tokenizer: Any,
        config: ModelConfig,
        device: torch.device,
        *,
        batch_size: int,
        token_budget: int,
        unit_length: bool = True,
    ) -> None:
        self._modalities = config.modalities
        self._unit_length = unit_length
        self._device = device
        self.image_bytes = 0
        self.images: ImageBatcher | None = None
        if "image" in config.modalities:
            preprocess = of_open_clip(transform, model.visual.preprocess_cfg, config.spec)
            self.images = ImageBatcher(preprocess, config.decode, device)
            self.image_bytes = self.images.row_bytes
            self._image_path = ImageForward(model.visual, lambda numbers: model.encode_image(numbers, normalize=False))
        self._spec = config.spec
        self._tokens = ClipTokens(tokenizer, tower_vocabulary(model) if tokenizer is not None else None)
        self._text_tower = causal_tower(model) if "text" in config.modalities else None
        # Every image is as large as every other, and weighs more than its text.
        self._costs_tokens = "image" not in config.modalities
        self.batch_size = batch_size
        self.window = sizes_of(device).window if self._costs_tokens else batch_size
        self.token_budget = token_budget
        self.cost = padded_tokens
        identity = config.identified_as
        content: dict[str, Any] = {
            "preprocess": dict(model.visual.preprocess_cfg) if "image" in identity.modalities else {},
            **({"decode": identity.decode} if "image" in identity.modalities and identity.decode != REFERENCE else {}),
            "tokenizer": clip_tokenizer_content(tokenizer) if "text" in identity.modalities else {},
            "layers": _layers(model),
            **({} if unit_length else {"unit_length": False}),
        }
        self.fingerprint = fingerprint(config, EMBEDDER_VERSION, model.state_dict(), content)
        self._model = model
        try:
            example: Ready = {} if self.images is None else {"image": self.images.black()}
            if "text" in config.modalities:
                example["text"], _ = self._tokens.row("a")
        except SampleError as error:
            raise ModelError(
                f"{config.spec}: its tokeniser is not that of its text tower: {error.message}",
                next_step="check tokenizer and vocab_size in open_clip_config.json",
            ) from error
        dtype = dtype_of(config, device)
        self._network: Network[Ready] = Network(model, self._run, device=device, dtype=dtype, example=example)
        self.dims: Mapping[str, int] = self._network.dims

    def prepare(self, samples: Sequence[Sample]) -> list[Ready | SampleError]:
        """Pixels and token ids of each sample."""
        if self.images is None:
            return prepare_each(samples, lambda sample: self._with_text({}, sample))
        return with_images(samples, image_rows(samples, [self.images])[0], self.with_image)

    def with_image(self, sample: Sample, row: Row) -> Ready:
        """See `embq.worker.embedders.base.ImageEmbedder`."""
        ready: Ready = {"image": row}
        return self._with_text(ready, sample) if "text" in self._modalities else ready

    def _with_text(self, ready: Ready, sample: Sample) -> Ready:
        ready["text"], is_cut = self._tokens.row(text_of(sample))
        return Truncated(ready) if is_cut else ready

    def length(self, prepared: Ready) -> int:
        """The tokens of a text that the tower reads; 1 of a sample with an image."""
        if not self._costs_tokens:
            return 1
        ids = prepared["text"]
        return len(ids) if self._text_tower is None else self._text_tower.end(ids) + 1

    def embed(self, batch: Sequence[Ready]) -> Mapping[str, np.ndarray]:
        """Vectors of the batch, normalised in float32 unless the spec says not to."""
        return self._network.embed(batch)

    def embed_in_fp32(self, batch: Sequence[Ready]) -> Mapping[str, np.ndarray]:
        """The same of the towers in fp32."""
        return self._network.embed_in_fp32(batch)

    def choose_variant(self, *, compile_s: float) -> None:
        """See `embq.worker.embedders.base.HasVariants`. Only images of a CUDA device have more than one way."""
        if self.images is not None:
            self._image_path.try_with(
                self.images, self._network.dtype, rows=self.batch_size, compile_s=compile_s, model=self._spec
            )

    def splitter(self, chunking: Chunking) -> TokenSplitter:
        """The splitter by the model's tokeniser."""
        return self._tokens.splitter(chunking, self._spec)

    def _run(self, batch: Sequence[Ready]) -> dict[str, torch.Tensor]:
        vectors = {}
        for modality in self._modalities:
            rows = [ready[modality] for ready in batch]
            if modality == "image":
                assert self.images is not None
                encoded = self._image_path(self.images.batch(rows, self._model.logit_scale.dtype))
            elif self._text_tower is None:
                encoded = self._model.encode_text(
                    on_device(torch.from_numpy(np.stack(rows)), self._device), normalize=False
                )
            else:
                encoded = self._text_tower.encode(rows, self._device)
            # In float32 even for a bf16 model: there, a vector of length 1 would be off by up to 0.4 %.
            vectors[modality] = normalize(encoded.float(), dim=-1) if self._unit_length else encoded.float()
        return vectors


def load(spec: ModelSpec, config: ModelConfig, device: str) -> ClipEmbedder:
    """The model of an `open_clip:` spec; ModelError if it cannot be loaded here."""
    to_unit_length = unit_length(spec, "true")
    check_modalities(config, *spec.model_family.embeds)
    place = device_of(device)
    dtype_of(config, place)
    quiet_pillow()
    # For good: open_clip leaves it to transformers, which asks at a terminal, whether a model's own code may run.
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
    make, name = model_factory(spec)
    with translated_model_errors(spec, from_hub=not name.startswith("local-dir:")):
        model, _, transform = make()
        # Images need no tokeniser, and some tokenisers have to be fetched.
        reads_text = "text" in (*config.modalities, *config.identified_as.modalities)
        tokenizer = open_clip.get_tokenizer(name) if reads_text else None
    has_images = "image" in config.modalities
    usual = sizes_of(place)
    return ClipEmbedder(
        model,
        transform,
        tokenizer,
        config,
        place,
        batch_size=whole_number(spec, "batch_size", usual.images if has_images else usual.texts),
        token_budget=0 if has_images else whole_number(spec, "tokens", usual.tokens),
        unit_length=to_unit_length,
    )


def _layers(model: Any) -> list[list[str]]:
    """Kind and settings of each layer: two models can have equal weights and another activation or pooling."""
    return [
        [
            name,
            type(module).__name__,
            *(f"{key}={getattr(module, key)}" for key in LAYER_SETTINGS if hasattr(module, key)),
        ]
        for name, module in model.named_modules()
    ]
