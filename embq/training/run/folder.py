"""The folder of a training: one training at a time writes there, and each file is complete and durable or absent."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embq.core.errors import OutputError, TryLaterError
from embq.core.storage.beneath import open_appending, read_small
from embq.core.storage.durable import drop, output_error, overwrite, publish, try_lock

if TYPE_CHECKING:
    import torch

LOCK = ".lock"
_NEXT_STEPS = {
    "not_writable": "give write permission, or name another --output",
    "no_space": "make room, then start the same command again: it goes on from the last checkpoint",
    "output": "mend the storage, or name another --output; the same command goes on from the last checkpoint",
}


class RunFolder:
    """The folder of a training, with a JSON record of the settings that it was started with.

    Args:
        root: the folder; `locked` creates it.
        record: file name of the record.
    """

    def __init__(self, root: Path, record: str) -> None:
        self.root = root
        self.record = root / record

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and hold it. OutputError if that fails, TryLaterError if another process holds it."""
        held = ExitStack()
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            held.enter_context(
                exclusive(
                    self.root / LOCK, f"another process trains in {self.root}", "wait for it, or name another --output"
                )
            )
        with held:
            yield

    def read_record(self) -> dict[str, Any] | None:
        """The record; None in a new or empty folder. OutputError if something else than a training is there."""
        if self.root.exists() and not self.root.is_dir():
            raise OutputError(f"{self.root} is a file", next_step="name a folder for --output")
        try:
            content = json.loads(read_small(self.record).decode())
        except FileNotFoundError:
            if self.root.is_dir() and any(not path.name.startswith(".") for path in self.root.iterdir()):
                raise OutputError(
                    f"--output {self.root} holds files, and no training", next_step="name a folder that is new or empty"
                ) from None
            return None
        except (OSError, ValueError, RecursionError):
            content = None
        if not isinstance(content, dict):
            raise OutputError(f"{self.record} is not what embq wrote", next_step="name a folder that is new or empty")
        return content

    def write_record(self, content: Mapping[str, Any]) -> None:
        """Replace the record."""
        write_json(self.record, content)


@contextmanager
def exclusive(path: Path, busy: str, next_step: str) -> Iterator[None]:
    """Hold a lock file, which is removed afterwards; TryLaterError with the message `busy` if another process does.

    The kernel releases the lock when its process ends in any way. Raises OSError if the file cannot be opened.
    """
    while True:
        with open(open_appending(path), "a") as lock:
            if not try_lock(lock):
                raise TryLaterError(busy, next_step=next_step)
            if not _is_open_file(path, lock.fileno()):
                continue  # its last holder has just removed it
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_open_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def writing(path: Path, kinds: tuple[type[Exception], ...] = (OSError,)) -> Iterator[None]:
    """Raise OutputError if `path` cannot be written within the block.

    Args:
        kinds: exceptions that mean so. One that is no OSError is taken for a full disk.
    """
    try:
        yield
    except kinds as error:
        reason = error if isinstance(error, OSError) else OSError(errno.ENOSPC, str(error))
        code = output_error(reason, path).code
        why = getattr(error, "strerror", None) or error
        raise OutputError(f"{path} cannot be written: {why}", next_step=_NEXT_STEPS[code], code=code) from error


@contextmanager
def replacing(path: Path, kinds: tuple[type[Exception], ...] = (OSError,)) -> Iterator[Path]:
    """A file to write within the block, which then becomes `path`, complete and durable; raises as `writing` does."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with writing(path, kinds):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield temporary
            publish(temporary, path)
    finally:
        drop(temporary)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file, complete and durable."""
    with writing(path):
        overwrite(path, json.dumps(value, indent=2).encode() + b"\n")


def save_weights(weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write named tensors as safetensors; OSError if the disk refuses them."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Copies, because safetensors refuses tensors that share memory.
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    try:
        save_file(own, path, {"format": "pt"})
    except SafetensorError as error:
        # safetensors is written in Rust and passes the system's error on as text.
        if match := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(match[1]), os.strerror(int(match[1])), str(path)) from error
        raise
