"""`embq.Model`: a model in the calling process, with the signature of sentence-transformers' `encode`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from embq.app.embedding.bars import shown, somebody_looks, tqdm_of_place
from embq.app.embedding.in_process import InProcess, check_not_forked, rows_and_failures, samples_of
from embq.app.embedding.items import is_one, of_one_kind
from embq.app.embedding.tables import table_of
from embq.core.arguments import check, python_errors, refuse_set, refused, whole_number
from embq.core.errors import InputError, ModelError, UsageError
from embq.core.models import ModelSpec
from embq.core.settings import Settings, change_environment, child_environment

if TYPE_CHECKING:
    import torch

OnError = Literal["raise", "null"]

Device: TypeAlias = "str | int | torch.device | None"
"""Names of a device that callers have: embq's and torch's own, the number of a GPU, or None for "auto"."""

AUTO = "auto"
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


class Model:
    """A model on one device of this machine, loaded when it is first used.

    Args:
        spec: as `embq run --model` takes it, such as "minilm" or "open_clip:ViT-B-32/laion2b_s34b_b79k".
        device: "auto" or None (the first GPU, or the CPU), "cpu", "cuda", "cuda:1", a `torch.device`,
            or the number of a GPU.
        precision: as `--precision`; "auto" for the fastest that the device computes well.
        batch_size: most samples of a pass; 0 for what suits the device.
        threads: that decode and tokenise; 0 for one per core.

    Raises `embq.core.errors.EmbqError` with a code and a next step, when it is made or first used.
    """

    @python_errors(devices="device")
    def __init__(
        self, spec: str, *, device: Device = AUTO, precision: str = AUTO, batch_size: int = 0, threads: int = 0
    ) -> None:
        if not isinstance(spec, str):
            raise _unsupported(f"a {type(spec).__name__} as a model", 'give its spec, such as "st:FOLDER"')
        self.spec = ModelSpec.given(spec)
        check(precision=precision, required=("precision",))
        sizes = {
            "batch_size": whole_number("batch_size", batch_size, 0),
            "threads": whole_number("threads", threads, 0),
        }
        self._options: dict[str, Any] = {"device": device_name(device), "precision": precision, **sizes}
        self._loaded: dict[str, InProcess] = {}
        self._similarity = ""

    def __repr__(self) -> str:
        return f"embq.Model({str(self.spec)!r})"

    @python_errors(devices="device")
    def encode(
        self,
        inputs: Any = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 0,
        show_progress_bar: bool | None = None,
        output_value: str | None = "sentence_embedding",
        precision: str | None = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Device = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        *,
        task: str | None = None,
        **options: Any,
    ) -> Any:
        """Vectors of texts or images: float32 of shape (n, dim) in the order given; of one item, (dim,).

        The arguments are those of sentence-transformers' `encode`. `batch_size` and `device` are those of the model:
        passes are formed by length, for its device.

        Args:
            inputs: texts; or images as paths (`pathlib.Path`), encoded bytes or PIL images. One or several. `sentences`
                is another name of it.
            prompt_name, prompt: the prompt before each text: its name in the model, or the prompt itself, which
                precedes the name. Calls with different prompts take turns.
            show_progress_bar: None shows one for much input, in a terminal or a notebook.
            precision: "int8", "uint8" (both scaled by these vectors, several), "binary" and "ubinary" (8 dimensions in
                a byte) give vectors of another type, by `sentence_transformers.quantize_embeddings`.
            convert_to_numpy: False for a list of torch tensors, of one item a tensor.
            convert_to_tensor: return a torch tensor on the CPU in place of an array.
            normalize_embeddings: scale the vectors to length 1.
            truncate_dim: keep the first dimensions.
            task: "query" or "document", by which some models choose their modules.

        Raises InputError `not_embedded` for an item without a vector, such as an empty text, and UsageError for an
        argument that is not supported.
        """
        inputs = options.pop("sentences", inputs)
        _refuse_options(output_value, precision, device, options)
        whole_number("batch_size", batch_size, 0)
        dimensions = None if truncate_dim is None else whole_number("truncate_dim", truncate_dim, 1)
        is_single = is_one(inputs)
        if not is_single and (not isinstance(inputs, Iterable) or table_of(inputs) is not None):
            raise _unsupported(
                f"inputs of type {type(inputs).__name__}", "give an item, a list of items, or use embq.embed"
            )
        refuse_set("inputs", inputs)
        items = [inputs] if is_single else list(inputs)
        if precision in ("int8", "uint8") and len(items) == 1:
            raise _unsupported(f"precision={precision!r} of one vector, which is scaled by the others", "use binary")
        vectors, failures = self.vectors(
            items, prompt_name=prompt_name, prompt=prompt, task=task or "", progress=show_progress_bar
        )
        if failures:
            raise not_embedded(failures, len(items))
        vectors = vectors[:, :dimensions]
        if normalize_embeddings:
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
        if precision not in (None, "float32"):
            from embq.worker.embedders.text.sentence import quantize_embeddings

            quantize: Any = quantize_embeddings
            vectors = quantize(vectors, precision=precision)
        answer: Any = vectors[0] if is_single else vectors
        if convert_to_numpy and not convert_to_tensor:
            return answer
        import torch

        tensor = torch.from_numpy(answer)
        return tensor if convert_to_tensor or is_single else list(tensor)

    def encode_query(
        self, inputs: Any = None, prompt_name: str | None = None, prompt: str | None = None, *rest: Any, **options: Any
    ) -> Any:
        """`encode` for queries: with the model's prompt "query", if it has one and no other is given."""
        return self.encode(inputs, prompt_name, prompt, *rest, **{"task": "query", **options})

    def encode_document(
        self, inputs: Any = None, prompt_name: str | None = None, prompt: str | None = None, *rest: Any, **options: Any
    ) -> Any:
        """`encode` for documents: with the model's prompt "document", if it has one and no other is given."""
        return self.encode(inputs, prompt_name, prompt, *rest, **{"task": "document", **options})

    @property
    def similarity_fn_name(self) -> str:
        """The model's own similarity, or the one that was set: "cosine", "dot", "euclidean" or "manhattan"."""
        if self._similarity or self.spec.family not in ("minilm", "st"):
            return self._similarity or "cosine"
        return str(getattr(self._engine("text").embedder, "similarity_fn_name", "cosine"))

    @similarity_fn_name.setter
    def similarity_fn_name(self, name: Any) -> None:
        value = getattr(name, "value", name)
        if value not in SIMILARITIES:
            raise UsageError(f"similarity_fn_name is {value!r}", next_step=f"use {', '.join(SIMILARITIES)}")
        self._similarity = value

    def similarity(self, first: Any, second: Any) -> Any:
        """`similarity_fn_name` of each with each: a torch tensor of shape (n, m) for (n, dim) and (m, dim)."""
        from embq.worker.embedders.text.sentence import SimilarityFunction

        pair = _tensors(first, second)
        return SimilarityFunction.to_similarity_fn(self.similarity_fn_name)(*pair)

    def similarity_pairwise(self, first: Any, second: Any) -> Any:
        """`similarity_fn_name` of each with its counterpart: a torch tensor of shape (n,) for twice (n, dim)."""
        from embq.worker.embedders.text.sentence import SimilarityFunction

        pair = _tensors(first, second)
        if pair[0].shape != pair[1].shape:
            raise UsageError(
                f"first has the shape {tuple(pair[0].shape)} and second {tuple(pair[1].shape)}",
                next_step="give as many vectors in both; similarity compares each with each",
            )
        return SimilarityFunction.to_similarity_pairwise_fn(self.similarity_fn_name)(*pair)

    def start_multi_process_pool(self, *_: Any, **__: Any) -> Any:
        """Raise UsageError: `embq.embed` with `device="all"` starts a process on each device by itself."""
        raise _unsupported("a pool of processes", NO_POOL)

    encode_multi_process = start_multi_process_pool

    @property
    def dim(self) -> int:
        """Length of a vector; loads the model."""
        return next(iter(self._engine(self.spec.can_embed[-1]).embedder.dims.values()))

    def get_sentence_embedding_dimension(self) -> int:
        """`dim`, as sentence-transformers called it."""
        return self.dim

    get_embedding_dimension = get_sentence_embedding_dimension

    @python_errors(devices="device")
    def vectors(
        self,
        items: Iterable[Any],
        *,
        modality: str = "",
        prompt_name: str | None = None,
        prompt: str | None = None,
        task: str = "",
        progress: bool | None = None,
        total: int | None = None,
    ) -> tuple[np.ndarray, dict[int, tuple[str, str]]]:
        """Vectors of items: float32 of shape (n, dim), NaN for an item without one; and position -> (code, message).

        Args:
            items: as for `encode`; None is an item without a vector.
            modality: "text" or "image"; "" for that of the first item.
            prompt_name, prompt, task: see `encode`.
            progress: see `show_progress_bar` of `encode`.
            total: number of items, if `items` has no length.
        """
        check(modality=modality, prompt_name=prompt_name, prompt=prompt, task=task)
        refuse_set("items", items)
        if not isinstance(items, Iterable):
            raise refused("items", items, "a list of texts or images")
        total = len(items) if isinstance(items, Sequence) else total
        kind, checked = of_one_kind(items, modality)
        engine = self._engine(kind)
        dim = engine.embedder.dims[kind]
        with engine.prompted(*self._prompted(prompt_name, prompt, task)):
            units = engine.embed(samples_of(shown(checked, total, enabled=progress)))
            vectors, failures = rows_and_failures(units, kind, dim)
        return vectors, {place: (failure.code, failure.message) for place, failure in failures.items()}

    def close(self) -> None:
        """Free the model."""
        while self._loaded:
            self._loaded.popitem()[1].close()

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or another process, loads the model anew."""
        return {**self.__dict__, "_loaded": {}}

    def _prompted(self, name: str | None, text: str | None, task: str) -> tuple[ModelSpec, str]:
        """The spec with the prompt of a call in place of its own, or of a task if it has none; and the task."""
        params = self.spec.model_family.prompts
        task = task if "prompt_name" in params else ""
        if name is None and text is None:
            if not task or {param for param, _ in self.spec.params} & {*params}:
                return self.spec, ""
            name = task
        return self.spec.without_prompt().with_prompt(name if text is None else None, text), task

    def _engine(self, modality: str) -> InProcess:
        check_not_forked()
        with _LOADING:
            if modality not in self._loaded:
                self._loaded[modality] = loaded(self.spec, modality, **self._options)
            return self._loaded[modality]


def _tensors(first: Any, second: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors as tensors of floats; UsageError, which names the argument, for anything else and for unequal lengths."""
    import torch

    tensors = []
    for name, given in (("first", first), ("second", second)):
        try:
            is_list_of_tensors = isinstance(given, list | tuple) and any(isinstance(row, torch.Tensor) for row in given)
            tensor = torch.stack([*given]) if is_list_of_tensors else torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError) as error:
            why = str(error).partition("\n")[0]
            raise UsageError(f"{name} is no array of numbers: {why}", next_step=SHAPES) from error
        if tensor.ndim not in (1, 2) or tensor.shape[-1] == 0:
            raise UsageError(f"{name} has the shape {tuple(tensor.shape)}", next_step=SHAPES)
        tensors.append(tensor if tensor.is_floating_point() else tensor.float())
    if tensors[0].shape[-1] != tensors[1].shape[-1]:
        raise UsageError(
            f"vectors of first have {tensors[0].shape[-1]} numbers, and those of second {tensors[1].shape[-1]}",
            next_step="give vectors of one model",
        )
    return tensors[0], tensors[1]


SHAPES = "give vectors of shape (dim,) or (n, dim)"

_LOADING = threading.Lock()
"""Held while a model is loaded, so that threads do not load it twice."""


NO_POOL = 'use embq.embed(items, "MODEL", device="all"), which starts a process on each device'


def device_name(device: Device) -> str:
    """The device as `--devices` names it; UsageError if it is none of `Device`."""
    if device is None:
        return AUTO
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return f"cuda:{device}"
    if isinstance(device, str) or (type(device).__module__, type(device).__name__) == ("torch", "device"):
        return str(device)
    raise UsageError(
        f"unknown device {device!r}", next_step='use "auto", "cpu", "cuda", "cuda:1" or the number of a GPU'
    )


def _unsupported(what: str, instead: str) -> UsageError:
    return UsageError(f"embq.Model does not support {what}", next_step=instead)


def _refuse_options(output_value: str | None, precision: str | None, device: Any, options: Mapping[str, Any]) -> None:
    """Raise UsageError for what `encode` of sentence-transformers takes, or nobody does, and embq does not."""
    if output_value != "sentence_embedding":
        raise _unsupported(f"output_value={output_value!r}", "leave it out: embq gives one vector per item")
    if precision not in (None, "float32", "int8", "uint8", "binary", "ubinary"):
        raise _unsupported(f"precision={precision!r}", "use float32, int8, uint8, binary or ubinary")
    if isinstance(device, list | tuple) or options.get("pool") is not None:
        raise _unsupported("several processes in one call", NO_POOL)
    if unknown := [name for name in options if name not in ("pool", "chunk_size")]:
        raise _unsupported(f"the argument {unknown[0]!r} of encode", "leave it out")


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

    Raises ModelError also if the model does not embed the modality, NoDeviceError if there is no such device.
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
    devices = find_devices(device, visible)[:1]
    if precision == AUTO:
        precision = choose_precision(list(described(devices, visible).values())).precision
    # Threads tokenise side by side; each with a pool of its own would be too many.
    if "TOKENIZERS_PARALLELISM" not in child_environment():
        change_environment({"TOKENIZERS_PARALLELISM": "false"})
    config = config_of([NamedSpec(name="", spec=spec)], modalities=(modality,), precision=precision, chunking=None)
    return InProcess(config, devices[0], **options)


def not_embedded(failures: dict[int, tuple[str, str]], total: int) -> InputError:
    """The error for items without a vector."""
    place, (code, message) = min(failures.items())
    return InputError(
        f"{len(failures):,} of {total:,} items have no vector, such as item {place}: {message} ({code})",
        next_step="leave them out; or use embq.embed with on_error='null', which gives NaN or null for them",
        code="not_embedded",
    )
