"""The process group of a training: the place of this process in it, and its collectives outside of the steps."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from embq.core.errors import ConfigError, EmbqError, UnwellError

TIMEOUT = timedelta(minutes=5)
"""Timeout of a collective: longer than a slow read of one process; if a process hangs, the others end after it."""

_STOPPED = "embq/stopped"
_PLACE = re.compile(r"^\[[^\]]*:\d+\] ")
"""Source position at the start of gloo's messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """This process among those of the training.

    Attributes:
        rank: number of the process, from 0.
        world: number of processes.
        device: device of this process.
    """

    rank: int
    world: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """True if this process writes logs and checkpoints."""
        return self.rank == 0

    def totals(self, values: Sequence[float]) -> list[float]:
        """Sums over all processes. Collective."""
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        with explained(self):
            dist.all_reduce(tensor)
        return [float(value) for value in tensor.tolist()]

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, by rank. Collective."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        with explained(self):
            dist.all_gather_object(values, value)
        return values

    def from_rank(self, source: int, value: Any) -> Any:
        """The value of process `source`. Collective."""
        return self.gathered(value)[source]

    def say_stopped(self) -> None:
        """Tell the other processes that the leading one has stopped on request."""
        if self.world > 1:
            _store().set(_STOPPED, "1")

    def leader_stopped(self) -> bool:
        """True if the leading process has stopped, or the store that it serves is gone."""
        try:
            return self.world > 1 and bool(_store().check([_STOPPED]))
        except RuntimeError:
            return True


@contextmanager
def membership(device: str) -> Iterator[GroupMember]:
    """This process in a process group, which is destroyed after the block.

    A group that exists already, as under Ray, is used and left as it is. The place in the group comes from RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torchrun, Ray and users of Slurm set.
    """
    world, rank, local = (
        _number(name, default) for name, default in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0))
    )
    place = _device(device, local)
    creates = world > 1 and not dist.is_initialized()
    member = GroupMember(rank=rank, world=world, device=place)
    if creates:
        with explained(member):
            _meet(member)
    well = False
    try:
        yield member
        well = True
    finally:
        # After an error the others may be gone or wait in a collective, and destroying the group would wait for them.
        # They notice the end of this process.
        if creates and well:
            dist.destroy_process_group()


def _meet(member: GroupMember) -> None:
    """Initialise the process group.

    torchrun 2.15 gives restarted processes the store of the attempt before, with the addresses of processes that have
    ended. So each attempt has its own prefix in the store.
    """
    try:
        store, rank, world = next(rendezvous("env://", timeout=TIMEOUT))
    except ValueError as error:
        raise _incomplete(f"WORLD_SIZE is {member.world}, and {str(error).partition(': ')[2]}") from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    on_gpu = member.device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.PrefixStore(f"attempt-{attempt}", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
        timeout=TIMEOUT,
        device_id=member.device if on_gpu else None,
    )


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise _incomplete(f"{name} is {value!r}, which is no number")
    return int(value)


def _incomplete(what: str) -> ConfigError:
    """The error if the environment does not define the place of this process."""
    return ConfigError(
        f"{what}: so this process does not know its place among those of the training",
        next_step="unset WORLD_SIZE and RANK for a training of one process, or start all of them with torchrun",
    )


def _device(kind: str, local_rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda was asked for, and torch sees no GPU here",
            next_step="train with --device cpu, or look with `nvidia-smi` why there is none",
            code="no_device",
        )
    visible = torch.cuda.device_count()
    if local_rank >= visible > 1:
        raise ConfigError(
            f"process {local_rank} of this host has no GPU of its own: torch sees {visible} here",
            next_step=f"start {visible} processes on this host, or let CUDA_VISIBLE_DEVICES name more GPUs",
            code="no_device",
        )
    # Slurm and Ray may show each process only the GPU that is its own.
    place = torch.device("cuda", local_rank if visible > 1 else 0)
    torch.cuda.set_device(place)  # for calls that name no device, such as NCCL's exchange of objects
    return place


@contextmanager
def explained(member: GroupMember) -> Iterator[None]:
    """Translate what a collective raises when another process is gone."""
    try:
        yield
    except dist.DistError as error:
        raise peer_gone(member, error) from error
    except RuntimeError as error:
        if not _of_a_peer(error):
            raise
        raise peer_gone(member, error) from error


def peer_gone(member: GroupMember, error: Exception) -> EmbqError:
    """The error of a process whose peer has ended or hangs."""
    first = _PLACE.sub("", (str(error).strip() or type(error).__name__).splitlines()[0]).partition(". This")[0]
    return UnwellError(
        f"process {member.rank} of {member.world} lost another process of this training: {first}",
        next_step="see the error of the one that ended first; the same command goes on from the last checkpoint",
        code="peer_gone",
    )


def _of_a_peer(error: RuntimeError) -> bool:
    """True if a collective failed because of another process: gloo and NCCL raise RuntimeError with a text."""
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection closed by peer", "connection reset", "timed out"))


def _store() -> Any:
    return distributed_c10d._get_default_store()
