"""`embq.Model`: a model in the calling process, with the signature of sentence-transformers' `encode`."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from embq.app.embedding.bars import shown, somebody_looks, tqdm_of_place
from embq.app.embedding.in_process import InProcess, rows_and_failures, samples_of
from embq.core.errors import InputError, ModelError, UsageError
from embq.core.models import ModelSpec
from embq.core.settings import Settings, change_environment, child_environment

OnError = Literal["raise", "null"]

AUTO = "auto"


class Model:
    """A model on one device of this machine, loaded when it is first used.

    Args:
        spec: as `embq run --model` takes it, such as "minilm" or "open_clip:ViT-B-32/laion2b_s34b_b79k".
        device: "auto" (the first GPU, or the CPU), "cpu", "cuda", "cuda:1".
        precision: as `--precision`; "auto" for the fastest that the device computes well.
        batch_size: most samples of a pass; 0 for what suits the device.
        threads: that decode and tokenise; 0 for one per core.

    Raises `embq.core.errors.EmbqError` with a code and a next step, when it is made or first used.
    """

    def __init__(
        self, spec: str, *, device: str = AUTO, precision: str = AUTO, batch_size: int = 0, threads: int = 0
    ) -> None:
        self.spec = ModelSpec.parse(spec)
        self._device, self._precision = device, precision
        self._batch_size, self._threads = batch_size, threads
        self._loaded: dict[tuple[str, str], InProcess] = {}

    def __repr__(self) -> str:
        return f"embq.Model({str(self.spec)!r})"

    def encode(
        self,
        sentences: Any,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 0,
        show_progress_bar: bool | None = None,
        output_value: str = "sentence_embedding",
        precision: str = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: str | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
    ) -> Any:
        """Vectors of texts or images: float32 of shape (n, dim) in the order given; of one item, (dim,).

        The arguments are those of sentence-transformers' `encode`. `batch_size` and `device` are those of the model:
        passes are formed by length, for its device.

        Args:
            sentences: texts; or images as paths (`pathlib.Path`), encoded bytes or PIL images. One or several.
            prompt_name, prompt: the prompt before each text: its name in the model, or the prompt itself.
            show_progress_bar: None shows one for much input, in a terminal or a notebook.
            convert_to_tensor: give a torch tensor on the CPU in place of an array.
            normalize_embeddings: scale the vectors to length 1.
            truncate_dim: keep the first dimensions.

        Raises InputError `not_embedded` for an item without a vector, such as an empty text.
        """
        if output_value != "sentence_embedding" or precision != "float32":
            raise UsageError(
                f"encode gives vectors of float32, and {output_value} in {precision} is asked for",
                next_step="leave output_value and precision out; `embq run --dtype` stores vectors in other types",
            )
        one = isinstance(sentences, str | bytes | Path) or is_picture(sentences)
        items = [sentences] if one else list(sentences)
        vectors, failures = self.vectors(items, prompt_name=prompt_name, prompt=prompt, progress=show_progress_bar)
        if failures:
            raise not_embedded(failures, len(items))
        vectors = vectors[:, :truncate_dim]
        if normalize_embeddings:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
        answer: Any = vectors[0] if one else vectors
        if convert_to_tensor:
            import torch

            return torch.from_numpy(answer)
        return answer if convert_to_numpy or one else list(answer)

    def encode_query(self, sentences: Any, **options: Any) -> Any:
        """`encode` with the model's prompt "query", where it has one."""
        return self._prompted("query", sentences, options)

    def encode_document(self, sentences: Any, **options: Any) -> Any:
        """`encode` with the model's prompt "document", where it has one."""
        return self._prompted("document", sentences, options)

    def similarity(self, first: Any, second: Any) -> np.ndarray:
        """Cosines: float32 of shape (n, m) for vectors of shape (n, dim) and (m, dim)."""
        blocks = [np.atleast_2d(np.asarray(one, np.float32)) for one in (first, second)]
        a, b = (one / np.maximum(np.linalg.norm(one, axis=1, keepdims=True), np.float32(1e-12)) for one in blocks)
        cosines: np.ndarray = a @ b.T
        return cosines

    @property
    def dim(self) -> int:
        """Length of a vector; loads the model."""
        return next(iter(self._engine(self.spec.can_embed[-1]).embedder.dims.values()))

    def get_sentence_embedding_dimension(self) -> int:
        """`dim`, as sentence-transformers calls it."""
        return self.dim

    def vectors(
        self,
        items: Iterable[Any],
        *,
        modality: str = "",
        prompt_name: str | None = None,
        prompt: str | None = None,
        progress: bool | None = None,
        total: int | None = None,
    ) -> tuple[np.ndarray, dict[int, tuple[str, str]]]:
        """Vectors of items: float32 of shape (n, dim), NaN for an item without one; and position -> (code, message).

        Args:
            items: as for `encode`; None is an item without a vector.
            modality: "text" or "image"; "" for that of the first item.
            progress: see `show_progress_bar` of `encode`.
            total: number of items, where `items` has no length.
        """
        total = len(items) if isinstance(items, Sequence) else total
        kind, checked = of_one_kind(items, modality)
        engine = self._engine(kind, prompt_name, prompt)
        dim = engine.embedder.dims[kind]
        units = engine.embed(samples_of(shown(checked, total, wanted=progress)))
        vectors, failures = rows_and_failures(units, kind, dim)
        return vectors, {place: (one.code, one.message) for place, one in failures.items()}

    def close(self) -> None:
        """Free the models."""
        while self._loaded:
            self._loaded.popitem()[1].close()

    def _prompted(self, name: str, sentences: Any, options: dict[str, Any]) -> Any:
        try:
            self._engine("text", name)
        except ModelError:  # it has no such prompt
            return self.encode(sentences, **options)
        return self.encode(sentences, prompt_name=name, **options)

    def _engine(self, modality: str, prompt_name: str | None = None, prompt: str | None = None) -> InProcess:
        spec = self.spec.with_prompt(prompt_name, prompt) if prompt_name or prompt is not None else self.spec
        name = (modality, str(spec))
        if name not in self._loaded:
            self._loaded[name] = loaded(
                spec,
                modality,
                device=self._device,
                precision=self._precision,
                batch_size=self._batch_size,
                threads=self._threads,
            )
        return self._loaded[name]


def loaded(
    spec: ModelSpec,
    modality: str,
    *,
    device: str,
    precision: str,
    **options: int,
) -> InProcess:
    """A model for one modality, with the precision that `embq run` would choose for the device.

    Args:
        options: as `InProcess` takes them.

    Raises ModelError also where the model does not embed the modality, NoDeviceError where there is no such device.
    """
    from embq.producer.model_args import NamedSpec, choose_precision, config_of
    from embq.worker.supervisor.devices import find_devices
    from embq.worker.supervisor.machine import described

    if somebody_looks():
        tqdm_of_place()
    if modality not in spec.can_embed:
        raise ModelError(
            f"{spec} embeds {' and '.join(spec.can_embed)}s, and {modality}s are given",
            next_step=(
                "give texts as str; for images use an open_clip: model, or hf: with a model of images"
                if modality == "image"
                else "give images as paths, bytes or PIL images; for texts use an open_clip:, st: or hf: model"
            ),
        )
    visible = Settings.from_environment().cuda_visible
    found = find_devices(device, visible)[:1]
    if precision == AUTO:
        precision = choose_precision(list(described(found, visible).values())).precision
    # Threads tokenise side by side; each with a pool of its own would be too many.
    if "TOKENIZERS_PARALLELISM" not in child_environment():
        change_environment({"TOKENIZERS_PARALLELISM": "false"})
    config = config_of([NamedSpec(name="", spec=spec)], modalities=(modality,), precision=precision, chunking=None)
    return InProcess(config, found[0], **options)


def not_embedded(failures: dict[int, tuple[str, str]], total: int) -> InputError:
    """The error for items without a vector."""
    place, (code, message) = min(failures.items())
    return InputError(
        f"{len(failures):,} of {total:,} items have no vector, such as item {place}: {message} ({code})",
        next_step="leave them out; or use embq.embed with on_error='null', which gives NaN or null for them",
        code="not_embedded",
    )


# --- items ---


def is_picture(item: Any) -> bool:
    """True for an image of PIL, which is not imported for this."""
    return any(base.__module__.partition(".")[0] == "PIL" for base in type(item).__mro__)


def of_one_kind(items: Iterable[Any], modality: str = "") -> tuple[str, Iterable[Any]]:
    """The modality of items, and the items as `samples_of` takes them: texts, encoded images, or why there is none.

    Args:
        modality: "text" or "image"; "" for that of the first item, and "text" where there is none.
    """
    iterator = iter(items)
    first = list(_first(iterator))
    kind = modality or _kind(first[-1] if first else "")
    read = _image if kind == "image" else _text

    def checked() -> Iterable[Any]:
        for number, item in enumerate(_chained(first, iterator)):
            yield read(item, number)

    return kind, checked()


def _first(iterator: Any) -> Iterable[Any]:
    """The items up to the first that is not None."""
    for item in iterator:
        yield item
        if item is not None:
            return


def _chained(first: Sequence[Any], rest: Iterable[Any]) -> Iterable[Any]:
    yield from first
    yield from rest


def _kind(item: Any) -> str:
    return "image" if isinstance(item, bytes | Path | dict) or is_picture(item) else "text"


MISSING = ("missing_text", "the item is None")


def _text(item: Any, number: int) -> Any:
    if item is None:
        return MISSING
    if not isinstance(item, str):
        raise UsageError(
            f"item {number} is of type {type(item).__name__}, and the items are texts",
            next_step="give texts as str; images as pathlib.Path, bytes or PIL images",
        )
    return item


def _image(item: Any, number: int) -> Any:
    """The encoded bytes of an image, or (code, message)."""
    if isinstance(item, dict):  # as datasets gives images that are not decoded
        item = item.get("bytes") or item.get("path")
    if item is None:
        return ("missing_member", "the item is None")
    if isinstance(item, bytes):
        return item
    if isinstance(item, str | Path):
        try:
            return Path(item).read_bytes()
        except OSError as error:
            return ("source_unreadable", f"{item} cannot be read: {error.strerror or error}")
    if not is_picture(item):
        raise UsageError(
            f"item {number} is of type {type(item).__name__}, and the items are images",
            next_step="give images as paths, bytes or PIL images",
        )
    buffer = io.BytesIO()
    item.save(buffer, "PNG")  # without loss
    return buffer.getvalue()
