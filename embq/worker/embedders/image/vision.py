"""Vision models of transformers: an encoder of images with its own image processor, and a pooling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.functional import normalize
from transformers import MODEL_MAPPING, AutoConfig, AutoImageProcessor

from embq.core.errors import ModelError, SampleError
from embq.core.model_params import unit_length, whole_number
from embq.core.models import REFERENCE, Chunking, ModelConfig, ModelSpec
from embq.core.service.log import Events
from embq.core.units import Sample
from embq.worker.embedders.base import Splitter, padded_tokens
from embq.worker.embedders.device.network import Network
from embq.worker.embedders.device.placement import device_of, dtype_of, sizes_of
from embq.worker.embedders.fingerprint import fingerprint
from embq.worker.embedders.image.buffer_pool import Row
from embq.worker.embedders.image.decoding import quiet_pillow
from embq.worker.embedders.image.forward import ImageForward
from embq.worker.embedders.image.pooling import Pooling, asked_pooling, given_by, has_joint_space, pooling_for
from embq.worker.embedders.image.preprocess import Preprocess
from embq.worker.embedders.image.processor import SAME, difference, of_image_processor
from embq.worker.embedders.image.upload import ImageBatcher, image_rows
from embq.worker.embedders.loading import lacks_weights, model_source, read_model, translated_model_errors
from embq.worker.embedders.text.splitting import no_splitter

EMBEDDER_VERSION = "vision 1"
"""Its number goes up when the same model and image give another vector."""

MASK = "mask_token"
"""Parameter of transformers for masked patches in training. It is not read here."""

SETTINGS_LEFT_OUT = ("processor_class", "_processor_class")
"""Keys of an image processor that do not affect pixels."""

log = Events("worker")


class VisionEmbedder:
    """Vectors of images; pooling and normalisation are computed in float32.

    Args:
        model: a vision encoder; or a model of images and texts, of which the text tower was taken away.
        settings: of its image processor.
        decode: the path that is taken; it may differ from the config's.
        identified_by: the path that the fingerprint names.
    """

    def __init__(
        self,
        model: Any,
        preprocess: Preprocess,
        config: ModelConfig,
        device: torch.device,
        *,
        settings: Mapping[str, Any],
        decode: str,
        identified_by: str,
        pooling: Pooling,
        unit_length: bool,
        batch_size: int,
    ) -> None:
        self._model = model
        self._unit_length = unit_length
        self._spec = config.spec
        self.images = ImageBatcher(preprocess, decode, device)
        self.image_bytes = self.images.row_bytes
        self._image_path = ImageForward(model, lambda numbers: pooling(given_by(model, numbers)))
        self.batch_size = self.window = batch_size
        self.token_budget = 0
        self.cost = padded_tokens
        self.fingerprint = fingerprint(
            config,
            EMBEDDER_VERSION,
            {name: tensor for name, tensor in model.state_dict().items() if is_read(name, pooling)},
            {
                "model": model.config.to_dict(),
                "processor": {name: value for name, value in settings.items() if name not in SETTINGS_LEFT_OUT},
                "pooling": [list(pooling.names), unit_length],
                **({} if identified_by == REFERENCE else {"decode": identified_by}),
            },
        )
        self._network: Network[Row] = Network(
            model, self._run, device=device, dtype=dtype_of(config, device), example=self.images.black()
        )
        self.dims: Mapping[str, int] = self._network.dims

    def prepare(self, samples: Sequence[Sample]) -> list[Row | SampleError]:
        """Pixels of each image."""
        return image_rows(samples, [self.images])[0]

    def with_image(self, sample: Sample, row: Row) -> Row:
        """See `embq.worker.embedders.base.ImageEmbedder`."""
        del sample
        return row

    def length(self, prepared: Row) -> int:
        """1: all images are alike."""
        del prepared
        return 1

    def embed(self, batch: Sequence[Row]) -> Mapping[str, np.ndarray]:
        """Pooled vectors of the batch."""
        return self._network.embed(batch)

    def embed_in_fp32(self, batch: Sequence[Row]) -> Mapping[str, np.ndarray]:
        """The same of the model in fp32."""
        return self._network.embed_in_fp32(batch)

    def choose_variant(self, *, compile_s: float) -> None:
        """See `embq.worker.embedders.base.HasVariants`. Only a CUDA device has more than one way."""
        self._image_path.try_with(
            self.images, self._network.dtype, rows=self.batch_size, compile_s=compile_s, model=self._spec
        )

    def splitter(self, chunking: Chunking) -> Splitter:
        """Raise ModelError: images are not split."""
        del chunking
        raise no_splitter(self._spec, "it embeds images")

    def _run(self, batch: Sequence[Row]) -> dict[str, torch.Tensor]:
        vectors = self._image_path(self.images.batch(batch, next(self._model.parameters()).dtype))
        return {"image": normalize(vectors, dim=1) if self._unit_length else vectors}


def load(spec: ModelSpec, config: ModelConfig, device: str) -> VisionEmbedder:
    """The model of an `hf:` spec for images; ModelError if it cannot be loaded here."""
    # Before anything else, or a model of texts would be refused for unknown parameters.
    kind = vision_class(spec)
    if kind is None:
        raise ModelError(
            f"{spec} does not embed images",
            next_step="add --modality text if it is a model of texts, or use an open_clip model",
        )
    spec.check_params("embeds", "pooling", "normalize", "batch_size")
    requested = asked_pooling(spec)
    to_unit_length = unit_length(spec, "false")
    if config.precision == "int8":
        raise ModelError(f"{spec}: only models of texts are computed in int8", next_step="use fp32 or bf16")
    place = device_of(device)
    dtype_of(config, place)
    quiet_pillow()
    source = model_source(spec)
    where = {"local_files_only": True, "trust_remote_code": False}
    with translated_model_errors(spec, from_hub=False):
        model, absent = _model(spec, kind, source, requested, **where)
        processor: Any = AutoImageProcessor.from_pretrained(source, **where)  # type: ignore[no-untyped-call]
    preprocess = of_image_processor(processor, str(spec))
    with translated_model_errors(spec, from_hub=False):
        size = (1, 3, preprocess.fit.height, preprocess.fit.width)
        noise = torch.randn(size, generator=torch.Generator().manual_seed(0))
        pooling = pooling_for(spec, model, requested, image=noise, absent=absent)
    if missing := [name for name in absent if is_read(name, pooling)]:
        raise lacks_weights(spec, missing)
    decode = _decode(spec, preprocess, config.decode)
    same = config.decode == config.identified_as.decode
    return VisionEmbedder(
        model,
        preprocess,
        config,
        place,
        settings=processor.to_dict(),
        decode=decode,
        identified_by=decode if same else _decode(spec, preprocess, config.identified_as.decode),
        pooling=pooling,
        unit_length=to_unit_length,
        batch_size=whole_number(spec, "batch_size", sizes_of(place).images),
    )


def _model(spec: ModelSpec, kind: Any, source: str, requested: Sequence[str], **where: bool) -> tuple[Any, list[str]]:
    """The part of the model that reads images, in float32, and the names of weights that the checkpoint lacks.

    Args:
        kind: its class, from `vision_class`.
        requested: from `asked_pooling`.
    """
    model, account = read_model(kind, source, **where)
    # What the checkpoint lacks, transformers has made up.
    absent = sorted(str(name) for name in {*account["missing_keys"], *account["mismatched_keys"]})
    if not has_joint_space(kind):
        return model, absent
    if requested and requested != ("projection",):
        tower = getattr(model, "vision_model", None)
        if tower is None:
            raise ModelError(f"{spec}: no pooling but the projection is known", next_step="leave pooling out")
        return tower, [name.removeprefix("vision_model.") for name in absent if name.startswith("vision_model.")]
    for name in ("text_model", "text_projection"):
        if getattr(model, name, None) is not None:
            setattr(model, name, None)
    return model, [name for name in absent if not name.startswith(("text_model.", "text_projection"))]


def vision_class(spec: ModelSpec) -> Any:
    """The class of a model that embeds images, None of any other; ModelError if its configuration is not there."""
    source = model_source(spec)
    with translated_model_errors(spec, from_hub=False):
        return _class_of(AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False))


def _class_of(config: Any) -> Any:
    named = (config.architectures or [""])[0]
    if named.endswith("VisionModelWithProjection"):
        return getattr(transformers, named)
    # Some configs have several classes; the first is the model without a head.
    match = MODEL_MAPPING.get(type(config), None)
    kind = match[0] if isinstance(match, (list, tuple)) else match
    reads = getattr(kind, "main_input_name", "") == "pixel_values" and not hasattr(config, "text_config")
    decodes = bool(getattr(config, "is_encoder_decoder", False))
    return kind if (reads or has_joint_space(kind)) and not decodes else None


def is_read(weights: str, pooling: Pooling) -> bool:
    """Whether weights of this name decide any vector; if not, a checkpoint need not have them."""
    return MASK not in weights and ("pooler" in pooling.names or not weights.startswith("pooler."))


def _decode(spec: ModelSpec, preprocess: Preprocess, requested: str) -> str:
    """The path that is taken: the one that is asked for where its pixels are those of the image processor."""
    if requested == REFERENCE:
        return requested
    steps = difference(preprocess)
    if steps <= SAME:
        return requested
    log.warning("decode_by_reference", model=spec, asked=requested, steps_of_255=steps)
    return REFERENCE
