"""Parser of the lines that open_clip's training writes to `out.log`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from embq.core.errors import InputError

MARK = "Train Epoch: "
"""Part of every line of an iteration, also of an incomplete one."""

_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"
"""Rates have six significant digits: 2533.71, but also `123457.` and `1.23457e+06`."""
_LINE = re.compile(
    rf"Train Epoch: (\d+) \[\s*(\d+)/(\d+) \((\d+)%\)\] Data \(t\): {_NUMBER} "
    rf"Batch \(t\): {_NUMBER}, {_NUMBER}/s, {_NUMBER}/s/gpu"
)
_LOSS = re.compile(r" Loss: (\d+\.\d*|nan|inf) ")
_SETTING = re.compile(r"\| INFO \|   (\w+): (.*)$")
"""open_clip logs each argument of a training, as it writes them to `params.txt`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One line: an optimiser step of all processes, as rank 0 measured it."""

    at: int
    """Number of the line in the file, from 1."""
    epoch: int
    samples: int
    """Samples of all processes, up to and with this iteration."""
    samples_per_epoch: int
    percent: int
    """Part of the iterations, rounded: 100 stands before the last line where there are 200 or more."""
    data_s: float
    """Seconds of waiting for data."""
    batch_s: float
    """Seconds from the end of the iteration before to the end of this one."""
    per_s: float
    """Samples a second of all processes."""
    per_gpu_s: float
    """Samples a second of one."""
    loss: float | None
    """None where the line ends before it; nan of a training that broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Content of a log."""

    path: Path
    iterations: tuple[Iteration, ...]
    settings: Mapping[str, str]
    """The training's arguments as open_clip logs them; empty where it does not, as in the benchmark's own example."""
    broken: tuple[int, ...]
    """Numbers of lines that begin as an iteration and cannot be read."""

    @property
    def restarts(self) -> tuple[int, ...]:
        """Numbers of the lines at which the samples count from the start again."""
        return tuple(
            after.at
            for before, after in pairwise(self.iterations)
            if (after.epoch, after.samples) <= (before.epoch, before.samples)
        )

    @property
    def world_size(self) -> int | None:
        """Number of processes: the rate of all over the rate of one; None without lines."""
        if not self.iterations or not self.iterations[0].per_gpu_s:
            return None
        return max(1, round(self.iterations[0].per_s / self.iterations[0].per_gpu_s))

    @property
    def global_batch(self) -> int | None:
        """Samples of one iteration: the least distance of two lines; None without lines."""
        if not self.iterations:
            return None
        samples = [0, *(one.samples for one in self.iterations)]
        return min((after - before for before, after in pairwise(samples) if after > before), default=None)

    @property
    def samples(self) -> int | None:
        """Samples of an epoch, as asked for; None without lines."""
        return self.iterations[0].samples_per_epoch if self.iterations else None

    @property
    def losses(self) -> tuple[float, ...]:
        """The finite losses."""
        return tuple(one.loss for one in self.iterations if one.loss is not None and math.isfinite(one.loss))


def read(path: Path) -> Log:
    """Read a log. InputError where the file cannot be read; a log without any iteration is a log."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return parse(path, lines)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}",
            next_step="name a log that is there, or the folder in which the training wrote it",
        ) from error


def parse(path: Path, lines: Iterable[str]) -> Log:
    """Parse the lines of a log."""
    iterations: list[Iteration] = []
    settings: dict[str, str] = {}
    broken: list[int] = []
    for at, line in enumerate(lines, start=1):
        if MARK in line:
            found = iteration(line, at)
            if found is None:
                broken.append(at)
            else:
                iterations.append(found)
        elif (setting := _SETTING.search(line.rstrip("\n"))) is not None:
            settings[setting[1]] = setting[2]
    return Log(path=path, iterations=tuple(iterations), settings=settings, broken=tuple(broken))


def iteration(line: str, at: int) -> Iteration | None:
    """Parse the line of an iteration; None for any other, or an incomplete one."""
    found = _LINE.search(line)
    if found is None:
        return None
    loss = _LOSS.search(line, found.end())
    return Iteration(
        at=at,
        epoch=int(found[1]),
        samples=int(found[2]),
        samples_per_epoch=int(found[3]),
        percent=int(found[4]),
        data_s=float(found[5]),
        batch_s=float(found[6]),
        per_s=float(found[7]),
        per_gpu_s=float(found[8]),
        loss=float(loss[1]) if loss else None,
    )
