"""Where everything of a training lies, and that one training at a time writes there."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import InputError, OutputError, TryLaterError
from core.storage.durable import drop, output_error, overwrite

if TYPE_CHECKING:
    import torch


_OF_THE_SYSTEM = re.compile(r"\(os error (\d+)\)")
"""How safetensors, which is written in Rust, says why a file could not be written."""


def save(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors by their names; OSError where the disk does not take them."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Each on its own, because safetensors refuses tensors that share memory.
    own = {name: one.detach().cpu().contiguous().clone() for name, one in weights.items()}
    try:
        save_file(own, path, {"format": "pt"})
    except SafetensorError as error:
        if found := _OF_THE_SYSTEM.search(str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
        raise


@contextmanager
def writing(path: Path, kinds: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """OutputError where `path` cannot be written within the block.

    Args:
        kinds: of errors that tell so.
    """
    try:
        yield
    except kinds as error:
        # Of what else than a full disk would a library tell?
        code = output_error(error if isinstance(error, OSError) else OSError(errno.ENOSPC, str(error)), path).code
        why = getattr(error, "strerror", None) or error
        raise OutputError(f"{path} cannot be written: {why}", next_step=_NEXT_STEPS[code], code=code) from error


_NEXT_STEPS = {
    "not_writable": "give write permission, or name another --out",
    "no_space": "make room, then start the same command again: it goes on from the last checkpoint",
    "output": "mend the storage, or name another --out; the same command goes on from the last checkpoint",
}


def append(file: io.FileIO, data: bytes) -> None:
    """Hand bytes to the kernel in one write; OSError where it takes only a part, as a disk that gets full does."""
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Folder:
    """The folder that `--out` names."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.json"
        self.log = root / "log.jsonl"
        self.failures = root / "failures.jsonl"
        self.checkpoints = root / "checkpoints"
        self.weights = root / "model.safetensors"
        self.model = root / "model.json"
        self.curve = root / "curve.png"

    def taken(self, rank: int) -> Path:
        """What a process has taken of its epoch."""
        return self.checkpoints / f"taken-{rank:04d}.jsonl"

    def keys(self, rank: int) -> Path:
        """The samples that a process trained on, where they are noted."""
        return self.root / "keys" / f"rank-{rank:04d}.jsonl"

    def read_config(self) -> dict[str, Any] | None:
        """What `write_config` wrote; None in a new folder. InputError where the folder is something else."""
        try:
            said: dict[str, Any] = json.loads(self.config.read_text(encoding="utf-8"))
            assert said["format"] == FORMAT
        except FileNotFoundError:
            if self.root.is_dir() and any(path for path in self.root.iterdir() if not path.name.startswith(".")):
                raise InputError(
                    f"--out {self.root} holds files, and no training", next_step="name a folder that is new or empty"
                ) from None
            return None
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise InputError(
                f"{self.config} is not that of a training with `embq train classify`",
                next_step="name a folder that is new or empty",
            ) from error
        return said

    def write_config(self, said: Mapping[str, Any]) -> None:
        """Keep what this training is."""
        write_json(self.config, {"format": FORMAT, **said})

    @contextmanager
    def held(self) -> Iterator[None]:
        """For the length of the block nobody else trains into this folder; TryLaterError where somebody does."""
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            lock = open(self.root / ".lock", "w")  # noqa: SIM115 - closed below
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TryLaterError(
                    f"another process trains into {self.root}", next_step="wait for it, or name another --out"
                ) from error
            yield


FORMAT = "embq-classify-1"
"""What config.json says of itself."""


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON file, complete and durable, in place of what was there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    drop(temporary)
    with writing(path):
        overwrite(path, json.dumps(value, indent=2).encode() + b"\n", temporary=temporary)
