"""The folder of an exported model: written completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embq.core.errors import OutputError, UsageError
from embq.core.models import DECODES, ModelConfig
from embq.core.storage.durable import NO_SPACE, NOT_WRITABLE, fsync_file, fsync_folder, output_error
from embq.training.run.scratch import scratch

PROVENANCE = "embq_export.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An exported model.

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
        """Fingerprint of a run on images in fp32 with default decoding; other runs have other fingerprints."""
        return str(self.provenance["fingerprint"])


def fingerprint_of(spec: str) -> str:
    """The fingerprint that a worker will find; ModelError if no worker can load the model."""
    from embq.worker.embedders.registry import load

    config = ModelConfig(spec=spec, modalities=("image",), precision="fp32", decode=DECODES[0])
    return load(config, "cpu").fingerprint


_NEXT_STEPS = {
    "no_space": "make room, or name another folder",
    "not_writable": "give write permission, or name another folder",
}


def check_target(target: Path) -> None:
    """UsageError or OutputError if no model can be written there."""
    if "?" in str(target.absolute()):
        raise UsageError(
            f"{target}: the spec of a model could not name it, in which parameters follow a question mark",
            next_step="take another name",
        )
    if target.is_dir() and any(target.iterdir()):
        raise OutputError(
            f"{target} is not empty, and an export replaces nothing", next_step="name a folder that is new, or empty"
        )
    if target.exists() and not target.is_dir():
        raise OutputError(f"{target} is a file", next_step="name a folder that is new, or empty")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `target` after the block, or is removed if that fails.

    What an export to the same target that was killed has left is removed.

    Raises OutputError if it cannot be written.
    """
    check_target(target)
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch(target.parent, f".{target.name}.export-") as temporary:
            yield temporary
            for path in sorted(temporary.iterdir()):
                fsync_file(path)
            fsync_folder(temporary)
            os.rename(temporary, target)  # an empty folder is replaced
            fsync_folder(target.parent)
    except OSError as error:
        if error.errno not in NO_SPACE + NOT_WRITABLE:
            raise
        raise output_error(error, target, next_steps=_NEXT_STEPS) from error
