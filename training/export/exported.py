"""A checkpoint that has become a model in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.models import DECODES, REFERENCE, ModelConfig

PROVENANCE = "embq_export.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A model in its folder.

    Attributes:
        folder: where it lies.
        spec: names it to the workers.
        provenance: what the folder tells of where it came from, with its fingerprints: modalities, as `--modality`
            takes them, -> fingerprint in fp32, images decoded as `embq run` does.
        weights_bytes: of the safetensors file.
        needs: what a worker needs beside the folder; "" for nothing.
    """

    folder: Path
    spec: str
    provenance: dict[str, Any]
    weights_bytes: int
    needs: str = ""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Those of the provenance."""
        found: dict[str, str] = self.provenance["fingerprints"]
        return found


def fingerprints_of(spec: str, embedded: Sequence[tuple[str, ...]]) -> dict[str, str]:
    """What the workers will find, for each set of modalities; ModelError where they could not load the model."""
    from worker.embedders.registry import load

    found = {}
    for modalities in embedded:
        decode = DECODES[0] if "image" in modalities else REFERENCE
        config = ModelConfig(spec=spec, modalities=modalities, precision="fp32", decode=decode)
        found[",".join(modalities)] = load(config, "cpu").fingerprint
    return found
