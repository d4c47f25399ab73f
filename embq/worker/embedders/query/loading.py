"""Query models: the model that made the rows of a run, on the CPU.

Imports are light. Models that `embq.worker.embedders.query.sentence` knows need no torch; any other is loaded by
`embq.worker.embedders.registry`, once per process.

A fingerprint hashes what a library makes of a folder, which takes as long as loading it. So a model that needs no torch
is loaded by its library once; both implementations embed some texts, and where they agree, a note keeps the
fingerprint. Its name hashes what identifies the files: name, size and time of each, and the content of all but the
weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from embq.core.errors import ModelError, OutputError, SampleError
from embq.core.models import CPU_DECODES, REFERENCE, ModelConfig, ModelSpec, QueryConfig, VectorOutput
from embq.core.settings import cache_folder
from embq.core.storage.beneath import read_small
from embq.core.storage.durable import overwrite
from embq.core.units import Sample, content_hash
from embq.worker.embedders.lookup import named_folder
from embq.worker.embedders.model_files import check_model_folder

if TYPE_CHECKING:
    from embq.worker.embedders.base import Embedder
    from embq.worker.embedders.query.sentence import LightSentence

LIGHT_FAMILIES = ("minilm", "st")
"""Model families of which some models need no torch."""

QUERY_OF_DOCUMENT = "query"
"""The prompt of a query where the rows have the prompt `document`, as sentence-transformers pairs them."""

NOTE_VERSION = 1
"""Goes up when `LightSentence` computes in another way."""

CLOSE = 1e-5
"""Most by which a number of a vector may differ, for vectors of length 1; longer ones may differ by more."""

TEXTS = (
    "a",
    "How do I run several things at the same time?",
    "Straße, naïve café, Ελληνικά, русский текст, 漢字かな交じり文, العربية, עברית, हिन्दी, emoji 🙂🚀",
    "  white\tspace \n\n at all ends and a zero\u200bwidth one  ",
    "special [CLS] words [SEP] of [MASK] tokenisers </s> <s> [PAD]",
    "def mean(values):\n    return sum(values) / len(values)  # 12.5 % of 3,481 @ x_1",
    "a text that is longer than any model of this kind reads, " * 200,
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 8,
)
"""Texts that both implementations embed."""

READ_WHOLE = (".json", ".txt")
"""Files that are small and may be written anew with the same size at the same time, as a test does."""

NOT_COUNTED = ("batch_size", "tokens")
"""Parameters of a spec that change no vector."""


class QueryModel(Protocol):
    """Returns vectors of single texts or images, float32 of shape (dim,), as the model makes them."""

    def text(self, text: str) -> np.ndarray:
        """The vector of a text; SampleError if it has none."""
        ...

    def prepare_image(self, data: bytes) -> Any:
        """An encoded image as `image` takes it. Any number of threads may call it; SampleError if it has no vector."""
        ...

    def image(self, prepared: Any) -> np.ndarray:
        """The vector of a prepared image; SampleError if it has none."""
        ...


class TorchQueryModel:
    """A model of the registry."""

    def __init__(self, embedder: Embedder, modality: str) -> None:
        self._embedder = embedder
        self._modality = modality

    def text(self, text: str) -> np.ndarray:
        """See `QueryModel`."""
        return self._vector(self._prepared(Sample(ordinal=0, key="", text=text)))

    def prepare_image(self, data: bytes) -> Any:
        """See `QueryModel`."""
        return self._prepared(Sample(ordinal=0, key="", image=data))

    def image(self, prepared: Any) -> np.ndarray:
        """See `QueryModel`."""
        return self._vector(prepared)

    def _prepared(self, sample: Sample) -> Any:
        [prepared] = self._embedder.prepare([sample])
        if isinstance(prepared, SampleError):
            raise prepared
        return prepared

    def _vector(self, prepared: Any) -> np.ndarray:
        return np.array(self._embedder.embed([prepared])[self._modality][0], dtype=np.float32)


def open_query_model(
    rows: ModelConfig,
    output: VectorOutput,
    modality: str,
    *,
    prompt_name: str | None = None,
    prompt: str | None = None,
    spec: str | None = None,
    on_load: Callable[[str], None] | None = None,
    noted: bool = True,
) -> tuple[QueryModel, str]:
    """A model that embeds queries of a modality for the rows of an output, and its fingerprint as `rows`.

    Args:
        rows: the config of the run.
        output: one of `rows.outputs`.
        modality: what is asked: "text" or "image".
        prompt_name: name of the query's prompt; None for the prompt of the rows, or "query" if that is "document".
        prompt: the prompt itself.
        spec: where the model is on this machine, if not where the run had it.
        on_load: called with the spec before a model is loaded that takes long.
        noted: False looks at no note of an earlier load, which may have been that of another library version.

    Raises ModelError if the model cannot be loaded here, or does not embed this modality beside that of the rows.
    """
    check_modality(output, modality)
    here = query_spec(relocated_spec(ModelSpec.parse(output.spec), spec), prompt_name, prompt)
    if not rows.members:
        return _opened(rows, here, modality, on_load, noted)
    query_model: QueryModel | None = None
    fingerprints = []
    for named in rows.members:
        decode = rows.decode if "image" in named.modalities else REFERENCE
        config = ModelConfig(spec=named.spec, modalities=named.modalities, precision=rows.precision, decode=decode)
        is_asked = output in named.outputs.values()
        member_modality = modality if is_asked else named.modalities[0]
        member = here if is_asked else ModelSpec.parse(named.spec)
        model, fingerprint = _opened(config, member, member_modality, on_load, noted)
        query_model = model if is_asked else query_model
        fingerprints.append([named.name, fingerprint])
    assert query_model is not None
    from embq.worker.embedders.multi_model import EMBEDDER_VERSION

    return query_model, content_hash([EMBEDDER_VERSION, *fingerprints])


def check_modality(output: VectorOutput, modality: str) -> None:
    """Raise ModelError if a model does not bring a modality into the space of an output."""
    if modality == output.modality:
        return
    spec = ModelSpec.parse(output.spec)
    if modality not in spec.can_embed or spec.model_family.one_modality:
        raise ModelError(
            f"{spec} does not embed {modality}s, or not in one space with these {output.modality}s",
            next_step=f"ask by {output.modality}, or make the run with an open_clip model, which has both",
            code="other_modality",
        )


def relocated_spec(spec: ModelSpec, here: str | None) -> ModelSpec:
    """The spec of a model that is elsewhere on this machine, with the parameters of before; those of `here` win."""
    if here is None:
        return spec
    local = ModelSpec.parse(here)
    return replace(local, params=tuple(sorted({**dict(spec.params), **dict(local.params)}.items())))


def query_spec(spec: ModelSpec, prompt_name: str | None, prompt: str | None) -> ModelSpec:
    """The spec of a model for queries: that of the rows, with the query's prompt; ModelError as `with_prompt`."""
    params = dict(spec.params)
    if prompt_name is None and prompt is None:
        if params.get("prompt_name") != "document":
            return spec
        prompt_name = QUERY_OF_DOCUMENT
    return spec.without_prompt().with_prompt(prompt_name, prompt)


def _opened(
    rows: ModelConfig, spec: ModelSpec, modality: str, on_load: Callable[[str], None] | None, noted: bool
) -> tuple[QueryModel, str]:
    is_light = modality == "text" and spec.family in LIGHT_FAMILIES and not spec.param("lora", "")
    folder = folder_of(spec) if is_light else None
    if folder is None:
        model, fingerprint = _loaded(rows, spec, modality, on_load)
        return model, fingerprint
    from embq.worker.embedders.query.sentence import LightSentence

    check_model_folder(folder, spec, spec.family)
    light = None
    try:
        light = LightSentence(folder, spec)
        note = note_path(folder, rows, spec)
        verified = read_note(note) if noted else None
        if verified is not None:
            return light, verified
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, ModelError):
        light = None  # the library names what is wrong with the folder, if anything
    model, fingerprint = _loaded(rows, spec, modality, on_load)
    if light is not None:
        prove(light, model.text, note, fingerprint)
    return model, fingerprint


def note_path(folder: Path, rows: ModelConfig, spec: ModelSpec) -> Path:
    """Path of the note for the model of a folder, with its present files.

    Args:
        rows: the config whose fingerprint is noted.
        spec: that of the query, with its prompt.

    Raises OSError if the folder cannot be read.
    """
    files = []
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        if path.is_file():
            status = path.stat()
            content = read_small(path).decode("latin-1") if path.suffix in READ_WHOLE else ""
            files.append([str(path.relative_to(folder)), status.st_size, status.st_mtime_ns, status.st_ino, content])
    specs = [[pair for pair in own.params if pair[0] not in NOT_COUNTED] for own in (ModelSpec.parse(rows.spec), spec)]
    described = {name: value for name, value in rows.describe().items() if name != "spec"}
    name = content_hash([NOTE_VERSION, str(folder.resolve()), files, described, specs])
    return cache_folder() / "models" / f"{name[:32]}.json"


def read_note(note: Path) -> str | None:
    """The fingerprint of a note; None if there is none."""
    try:
        return str(json.loads(note.read_bytes())["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def prove(light: LightSentence, embed: Callable[[str], np.ndarray], note: Path, fingerprint: str) -> bool:
    """True if both ways give the same vectors; then it is noted, if the cache folder can be written.

    Args:
        embed: the library's way.
        fingerprint: that of the config of `note_path`.
    """
    for text in TEXTS:
        try:
            expected, given = embed(text), light.text(text)
        except SampleError:
            return False
        scale = max(1.0, float(np.linalg.norm(expected)))
        if expected.shape != given.shape or not np.abs(expected - given).max() <= CLOSE * scale:
            return False
    with suppress(OSError, OutputError):
        note.parent.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"fingerprint": fingerprint}).encode()
        overwrite(note, content)
    return True


def _loaded(
    rows: ModelConfig, spec: ModelSpec, modality: str, on_load: Callable[[str], None] | None
) -> tuple[QueryModel, str]:
    if on_load is not None and spec.family != "stub":
        on_load(str(spec))
    from embq.worker.embedders.registry import load

    decode = rows.decode if rows.decode in CPU_DECODES else CPU_DECODES[0]
    config = QueryConfig(
        spec=str(spec),
        modalities=(modality,),
        precision="fp32",
        chunking=rows.chunking,
        decode=decode if modality == "image" else REFERENCE,
        rows=rows,
    )
    embedder = load(config, "cpu")
    return TorchQueryModel(embedder, modality), embedder.fingerprint


def folder_of(spec: ModelSpec) -> Path | None:
    """The folder of a model that sentence-transformers loads; None if there is none on this machine yet."""
    try:
        folder = named_folder(spec)
    except (ImportError, ModelError):
        return None
    if folder is not None:
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(spec.name, "modules.json")
    except HFValidationError:
        return None
    return Path(file).parent if isinstance(file, str) else None
