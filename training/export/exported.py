"""A checkpoint that has become a model in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.models import DECODES, ModelConfig

PROVENANCE = "embq_export.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A model in its folder.

    Attributes:
        folder: where it lies.
        spec: names it to the workers.
        provenance: what the folder tells of where it came from.
        weights_bytes: of the safetensors file.
        needs: what a worker needs beside the folder; "" for nothing.
    """

    folder: Path
    spec: str
    provenance: dict[str, Any]
    weights_bytes: int
    needs: str = ""

    @property
    def fingerprint(self) -> str:
        """Of a run of images in fp32, decoded as `embq run` does it; that of any other run is another one."""
        return str(self.provenance["fingerprint"])


def fingerprint_of(spec: str) -> str:
    """What a worker will find, see `Exported.fingerprint`; ModelError where none could load the model."""
    from worker.embedders.registry import load

    config = ModelConfig(spec=spec, modalities=("image",), precision="fp32", decode=DECODES[0])
    return load(config, "cpu").fingerprint
