"""Trainings of a tiny network in processes of their own, that tests watch, stop and kill.

The processes are forks of a server that has imported torch and timm once: to do so takes most of the time of a short
training. Each process leads a process group, so that it can be killed with its loader workers.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from embq.training.launch.ssh_host import free_port
from tests.training.small_shards import CLASSES, write_shards

PRELOADED = [
    "timm",
    "torchvision",
    "webdataset",
    "safetensors.torch",
    "embq.training.classify.loop",
    "embq.training.data.epochs",
]

TINY = [
    "--model=timm:test_resnet",
    "--image-size=32",
    "--batch-size=4",
    "--epochs=2",
    "--workers=0",
    "--shuffle-buffer=10",
    "--lr=0.05",
    "--log-every=1",
    "--log-keys",
    "--device=cpu",
    "--checkpoint-minutes=0",
]
"""A training of seconds, of which every step is logged and kept."""


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a process of a training: its exit status, 128 + N by signal N, and what it said."""

    status: int
    out: str
    err: str


class Processes:
    """The processes of one training.

    Args:
        arguments: of `python -m embq.training.classify`; `{rank}` in them is the number of the process.
        world: how many.
        notes: where to write what each said.
        watched: whether each notes a digest of its weights and momenta after every step, see `digests`.
    """

    def __init__(self, arguments: Sequence[str], notes: Path, *, world: int = 1, watched: bool = False) -> None:
        notes.mkdir(parents=True, exist_ok=True)
        self._notes = notes
        port = str(free_port())
        self.members = []
        for rank in range(world):
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            given = ([one.replace("{rank}", str(rank)) for one in arguments], environment, str(notes), watched)
            process = server().Process(target=_member, args=given, name=f"rank {rank}")
            process.start()
            self.members.append(process)

    def kill(self) -> None:
        """SIGKILL to all of them and all that they started."""
        for process in self.members:
            _kill(process)
        for process in self.members:
            process.join()

    def stop(self) -> None:
        """SIGTERM to all of them and all that they started, as a launcher does it."""
        for process in self.members:
            assert process.pid is not None
            os.killpg(process.pid, signal.SIGTERM)

    def ended(self, deadline_s: float = 100.0) -> list[Ended]:
        """The end of each process, by rank; fails where one does not end in time."""
        for process in self.members:
            process.join(deadline_s)
        running = [process.name for process in self.members if process.exitcode is None]
        self.kill()
        assert not running, f"{running} did not end in {deadline_s} s: {self.said(0).err}"
        return [self.said(rank) for rank in range(len(self.members))]

    def said(self, rank: int) -> Ended:
        """The output of a process so far."""
        code = self.members[rank].exitcode
        out, err = (self._notes / f"{name}-{rank}" for name in ("out", "err"))
        texts = [path.read_text(encoding="utf-8") if path.exists() else "" for path in (out, err)]
        return Ended(-1 if code is None else code if code >= 0 else 128 - code, *texts)


def trained(arguments: Sequence[str], notes: Path, *, world: int = 1, watched: bool = False) -> list[Ended]:
    """Run a training to its end."""
    return Processes(arguments, notes, world=world, watched=watched).ended()


@cache
def server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _kill(process: BaseProcess) -> None:
    with suppress(ProcessLookupError, PermissionError):
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)


def _member(arguments: list[str], environment: Mapping[str, str], notes: str, watched: bool) -> None:
    """Runs in each process as `embq.training.launch.member` does, with errors written to files."""
    os.setpgid(0, 0)
    multiprocessing.set_start_method("fork", force=True)  # its loader workers, as those of `python -m` begin
    os.environ.update(environment)
    rank = int(environment["RANK"])
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(Path(notes) / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    import torch

    from embq.app.cli.entry_point import show_error
    from embq.training.launch.member import attempt

    torch.set_num_threads(1)
    if watched:
        _watch(Path(notes) / f"digests-{rank}")
    outcome = attempt("embq.training.classify", arguments, rank)
    if outcome.traceback:
        sys.stderr.write(outcome.traceback)
    elif outcome.message:
        show_error(outcome.error())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(outcome.status)


def _watch(path: Path) -> None:
    """From now on every step is followed by a line with the digest of weights and momenta."""
    from embq.training.classify.learner import Learner

    step = Learner.step

    def noted(learner: Learner, *args: Any, **kwargs: Any) -> Any:
        done = step(learner, *args, **kwargs)
        digest = hashlib.sha256()
        for parameter in learner.model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
            digest.update(learner.optimizer.state[parameter]["momentum_buffer"].numpy().tobytes())
        with open(path, "a") as file:
            file.write(f"{digest.hexdigest()}\n")
        return done

    Learner.step = noted  # type: ignore[method-assign]


def digests(notes: Path, rank: int) -> list[str]:
    """The state of a process after each of its steps, over all epochs."""
    return (notes / f"digests-{rank}").read_text().split()


def class_shards(
    folder: Path, counts: Sequence[int], changes: Mapping[int, Mapping[str, bytes | None]] | None = None
) -> Path:
    """Shards as `embq shards convert` leaves them, with the names of their classes."""
    write_shards(folder, counts, changes)
    (folder / "classes.json").write_text(json.dumps([f"class {number}" for number in range(CLASSES)]))
    return folder


def log_of(out: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind, without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    clock = {"samples_per_s", "data_s", "batch_s", "seconds"}
    return [{k: v for k, v in line.items() if k not in clock} for line in lines if line["kind"] == kind]


def keys_of(out: Path, rank: int) -> list[tuple[int, int, list[str]]]:
    """(epoch, step, keys) of every step of a process."""
    path = out / "keys" / f"rank-{rank:04d}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["epoch"], line["step"], line["keys"]) for line in lines]
