"""Embeds queries with the model of an index, in the form in which its rows are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embq.core.errors import InputError, ModelError, SampleError
from embq.core.models import ModelConfig, ModelSpec, VectorOutput
from embq.core.rows.spec import RowSpec
from embq.core.rows.vectors import stored

if TYPE_CHECKING:
    from embq.worker.embedders.query.loading import QueryModel


class QueryEmbedder:
    """Embeds texts and images with the model that made the rows, checked by fingerprint. One thread at a time.

    Args:
        config: of the model that made the rows.
        output: the indexed output of the model.
        rows: the stored form of vectors.
        fingerprint: that of the rows; None if it is not known, which skips the comparison.
        prompt_name: name of the prompt before a text; None for that of the rows, or "query" if that is "document".
        prompt: the prompt itself.
        spec: of the model on this machine, if not that of the run.
        on_load: called with a model's spec before it is loaded, if that takes long.
    """

    def __init__(
        self,
        config: ModelConfig,
        output: VectorOutput,
        rows: RowSpec,
        fingerprint: str | None,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        spec: str | None = None,
        on_load: Callable[[str], None] | None = None,
    ) -> None:
        self._config, self._output, self._rows, self._fingerprint = config, output, rows, fingerprint
        self._options: dict[str, Any] = {
            "prompt_name": prompt_name,
            "prompt": prompt,
            "spec": spec,
            "on_load": on_load,
        }
        self._models: dict[str, QueryModel] = {}

    @classmethod
    def open(
        cls, model: Mapping[str, Any] | None, rows_spec: Mapping[str, Any], fingerprint: str | None, **options: Any
    ) -> QueryEmbedder:
        """From the record of an index; InputError `no_model` if it names no model.

        Args:
            model: `ModelConfig.describe()` with the output that is indexed under "output".
            rows_spec: `RowSpec.describe()`.
            options: as this class takes them.
        """
        if model is None:
            raise InputError(
                "the index does not say which model made its vectors, so texts and images cannot be embedded for it",
                next_step="search by --vector or --id, or index the output of an embq run",
                code="no_model",
            )
        output = VectorOutput(**{name: model["output"][name] for name in ("name", "spec", "modality")})
        rows = RowSpec.from_description(rows_spec)
        return cls(ModelConfig.from_description(model), output, rows, fingerprint, **options)

    @property
    def modalities(self) -> tuple[str, ...]:
        """The modalities of queries that it embeds, in the order of `embq.core.models.MODALITIES`."""
        from embq.core.models import MODALITIES
        from embq.worker.embedders.query.loading import check_modality

        embeddable = []
        for modality in MODALITIES:
            try:
                check_modality(self._output, modality)
            except ModelError:
                continue
            embeddable.append(modality)
        return tuple(embeddable)

    def load(self, modality: str) -> None:
        """Load the model of a modality, once; `text` and `image` call it.

        Raises ModelError if the model cannot be loaded here, `other_modality` if it does not embed this
        modality, `other_model` if it is not the model of the rows.
        """
        if modality in self._models:
            return
        from embq.worker.embedders.query.loading import TorchQueryModel

        model, fingerprint = self._opened(modality)
        if fingerprint != self._fingerprint and self._fingerprint is not None:
            if not isinstance(model, TorchQueryModel) or self._config.members:
                # The cached fingerprint may be older than an upgrade of a library.
                model, fingerprint = self._opened(modality, noted=False)
            if fingerprint != self._fingerprint:
                raise ModelError(
                    f"the rows were embedded with {self._config.spec}, fingerprint {self._fingerprint[:12]}; the model "
                    f"that {self._options['spec'] or self._output.spec} is here has {fingerprint[:12]}",
                    next_step="use the files of the run's model (--model says where they are) and its versions of the "
                    "model libraries, or embed and index again",
                    code="other_model",
                )
        self._models[modality] = model

    def text(self, text: str) -> np.ndarray:
        """float32 (d,) of a text, in the form of rows. Raises as `load`; SampleError if it cannot be embedded."""
        self.load("text")
        return self._as_stored(self._models["text"].text(text))

    def image(self, data: bytes) -> np.ndarray:
        """float32 (d,) of an encoded image, in the form of rows. Raises as `text`."""
        return self.prepared_image(self.prepare_image(data))

    def prepare_image(self, data: bytes) -> Any:
        """An encoded image as `prepared_image` takes it; from any thread once the model is loaded. Raises as `text`."""
        self.load("image")
        return self._models["image"].prepare_image(data)

    def prepared_image(self, prepared: Any) -> np.ndarray:
        """float32 (d,) of an image of `prepare_image`, in the form of rows. Raises as `text`."""
        return self._as_stored(self._models["image"].image(prepared))

    def _opened(self, modality: str, *, noted: bool = True) -> tuple[QueryModel, str]:
        from embq.worker.embedders.query.loading import open_query_model

        try:
            return open_query_model(self._config, self._output, modality, noted=noted, **self._options)
        except ModelError as error:
            name = ModelSpec.parse(self._output.spec).name.removeprefix("local-dir:")
            is_gone = name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir()
            if not is_gone or self._options["spec"]:
                raise
            raise ModelError(
                error.message, next_step="give its location on this machine with --model, such as --model st:./folder"
            ) from error

    def _as_stored(self, vector: np.ndarray) -> np.ndarray:
        """Truncated and normalised as rows are, but in float32."""
        in_floats = replace(self._rows, dtype="float32", normalize=self._rows.unit_length)
        values, faults = stored(vector[None], in_floats)
        for fault in faults.values():
            raise SampleError(fault.code, fault.message)
        return np.asarray(values[0], dtype=np.float32)
