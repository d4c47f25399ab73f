"""Where things stand in an output folder, and the run's immutable description `run.json`."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.durable import output_error, write_new
from core.errors import InputError, OutputError
from core.models import ModelConfig
from core.units import content_hash

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of one output folder. `_staging`, `_tmp`, `_writer` and `_broker` are nobody's to read but embq's own."""

    root: Path

    @property
    def run_json(self) -> Path:
        """Written last when a run is made: where it is, the manifest is complete."""
        return self.root / "run.json"

    @property
    def manifest(self) -> Path:
        """Folder of the manifest's segments."""
        return self.root / "manifest"

    @property
    def commits(self) -> Path:
        """Folder of the commit records, the truth."""
        return self.root / "commits"

    @property
    def parts(self) -> Path:
        """Folder of the committed rows."""
        return self.root / "parts"

    @property
    def failures(self) -> Path:
        """Folder of the committed failures."""
        return self.root / "failures"

    @property
    def staging(self) -> Path:
        """Results on their way from workers to the writer."""
        return self.root / "_staging"

    @property
    def temporary(self) -> Path:
        """Unfinished files."""
        return self.root / "_tmp"

    @property
    def writer(self) -> Path:
        """Epochs that writers took."""
        return self.root / "_writer"

    @property
    def broker(self) -> Path:
        """State of the embedded server."""
        return self.root / "_broker"

    @property
    def logs(self) -> Path:
        """Logs of the processes that `embq run` started."""
        return self.root / "_logs"

    def make(self) -> None:
        """Create the folders; OutputError where that is not possible."""
        folders = (self.manifest, self.commits, self.parts, self.failures)
        for folder in (self.root, *folders, self.staging, self.temporary, self.writer):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise output_error(error, folder) from error


def record_number(name: str) -> int:
    """The number of the commit record that a file was written for, by its name; 0 for files of no record."""
    kind, _, rest = name.partition("-")
    digits = rest.partition(".")[0]
    return int(digits) if kind in ("part", "failures", "commit", "checkpoint") and digits.isdigit() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a run is; frozen when it is planned.

    Attributes:
        run: run id, 16 hex digits.
        inputs: as the user gave them.
        options: reader options that shaped the units.
        model: what computes the vectors.
        dtype: what is stored.
        part_rows: most rows of one part.
        units: number of units in the manifest.
        samples: number of samples, or None where only reading tells.
        manifest_digest: hash over all unit ids in order.
        version: embq version that planned the run.
        created: UTC time, ISO 8601; information only.
    """

    run: str
    inputs: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    model: ModelConfig
    dtype: str
    part_rows: int
    units: int
    samples: int | None
    manifest_digest: str
    version: str
    created: str

    def identity(self) -> dict[str, Any]:
        """What makes two runs the same run, for comparing and for telling a user the difference."""
        return {
            "inputs (units)": self.manifest_digest,
            "model": self.model.spec,
            "modality": ",".join(self.model.modalities),
            "precision": self.model.precision,
            "dtype": self.dtype,
        }

    def publish(self, layout: Layout) -> None:
        """Write run.json; a run becomes real by this."""
        data = json.dumps(
            {
                "schema": SCHEMA,
                "run": self.run,
                "inputs": list(self.inputs),
                "options": dict(self.options),
                "model": {
                    "spec": self.model.spec,
                    "modalities": list(self.model.modalities),
                    "precision": self.model.precision,
                },
                "dtype": self.dtype,
                "part_rows": self.part_rows,
                "units": self.units,
                "samples": self.samples,
                "manifest_digest": self.manifest_digest,
                "version": self.version,
                "created": self.created,
            },
            indent=1,
        )
        # A name of its own: a leftover of a killed process must not look like another process at the same time.
        temporary = layout.temporary / f"run-{self.run}.{secrets.token_hex(4)}.json"
        try:
            write_new(layout.run_json, data.encode() + b"\n", temporary=temporary)
        except FileExistsError as error:
            raise OutputError(f"{layout.run_json} was written by another process at the same time") from error
        except OSError as error:
            raise output_error(error, layout.run_json) from error


def run_id(identity: dict[str, Any], output: Path) -> str:
    """Run id: 16 hex digits over what the run is and where it goes, so that planning again finds the same run."""
    return content_hash([identity, str(output)])[:16]


def load_run(root: Path) -> RunInfo:
    """The run of an output folder; InputError where the folder holds none."""
    layout = Layout(root)
    try:
        data = json.loads(layout.run_json.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            f"{root} is not an embq output folder: it has no run.json",
            next_step="give the folder that `embq run --output` or `embq enqueue --output` made",
        ) from error
    except (OSError, ValueError) as error:
        raise OutputError(f"{layout.run_json} cannot be read: {error}") from error
    if data.get("schema") != SCHEMA:
        raise OutputError(
            f"{layout.run_json} has schema {data.get('schema')}, this embq reads {SCHEMA}",
            next_step="use the embq version that made the run",
        )
    model = data["model"]
    return RunInfo(
        run=data["run"],
        inputs=tuple(data["inputs"]),
        options=tuple(sorted(data["options"].items())),
        model=ModelConfig(spec=model["spec"], modalities=tuple(model["modalities"]), precision=model["precision"]),
        dtype=data["dtype"],
        part_rows=data["part_rows"],
        units=data["units"],
        samples=data["samples"],
        manifest_digest=data["manifest_digest"],
        version=data["version"],
        created=data["created"],
    )
