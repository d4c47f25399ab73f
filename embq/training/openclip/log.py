"""The lines that open_clip's training writes to `out.log`: parsed, and shown as progress while it trains."""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

from embq.core.errors import InputError
from embq.core.service.progress_line import PLAIN_EVERY_S, ProgressLine, duration
from embq.core.storage.beneath import open_regular

MARK = "Train Epoch: "
"""Part of every line of an iteration, also of an incomplete one."""

_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)"
"""Rates have six significant digits: 2533.71, but also `123457.` and `1.23457e+06`."""
_LINE = re.compile(
    rf"Train Epoch: (\d+) \[\s*(\d+)/(\d+) \((\d+)%\)\] Data \(t\): {_NUMBER} "
    rf"Batch \(t\): {_NUMBER}, {_NUMBER}/s, {_NUMBER}/s/gpu"
)
_LOSS = re.compile(r" Loss: (\d+\.\d*|nan|inf) ")
_SETTING = re.compile(r"\| INFO \|   (\w+): (.*)")
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
    """Part of the iterations, rounded: 100 stands before the last line if there are 200 or more."""
    data_s: float
    """Seconds of waiting for data."""
    batch_s: float
    """Seconds from the end of the iteration before to the end of this one."""
    per_s: float
    """Samples a second of all processes."""
    per_gpu_s: float
    """Samples a second of one."""
    loss: float | None
    """None if the line ends before it; nan of a training that broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenClipLog:
    """Content of a log."""

    path: Path
    iterations: tuple[Iteration, ...]
    settings: Mapping[str, str]
    """The training's arguments as open_clip logs them; empty if it does not, as in the benchmark's own example."""
    broken: tuple[int, ...]
    """Numbers of lines that begin as an iteration and cannot be read."""

    @property
    def restarts(self) -> tuple[int, ...]:
        """Numbers of the lines at which the samples count from the start again."""
        return tuple(
            after.at
            for previous, after in pairwise(self.iterations)
            if (after.epoch, after.samples) <= (previous.epoch, previous.samples)
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
        samples = [0, *(line.samples for line in self.iterations)]
        return min((after - previous for previous, after in pairwise(samples) if after > previous), default=None)

    @property
    def samples(self) -> int | None:
        """Samples of an epoch, as asked for; None without lines."""
        return self.iterations[0].samples_per_epoch if self.iterations else None

    @property
    def losses(self) -> tuple[float, ...]:
        """The finite losses."""
        return tuple(line.loss for line in self.iterations if line.loss is not None and math.isfinite(line.loss))


def read(path: Path) -> OpenClipLog:
    """Read a log. InputError if the file cannot be read; a log without any iteration is a log."""
    try:
        with open_regular(path) as file, TextIOWrapper(file, encoding="utf-8", errors="replace") as lines:
            return parse(path, lines)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}",
            next_step="name a log that is there, or the folder in which the training wrote it",
        ) from error


def parse(path: Path, lines: Iterable[str]) -> OpenClipLog:
    """Parse the lines of a log."""
    iterations: list[Iteration] = []
    settings: dict[str, str] = {}
    broken: list[int] = []
    for at, line in enumerate(lines, start=1):
        if MARK in line:
            parsed = iteration(line, at)
            if parsed is None:
                broken.append(at)
            else:
                iterations.append(parsed)
        elif (setting := _SETTING.search(line.rstrip("\n"))) is not None:
            settings[setting[1]] = setting[2]
    return OpenClipLog(path=path, iterations=tuple(iterations), settings=settings, broken=tuple(broken))


def iteration(line: str, at: int) -> Iteration | None:
    """Parse the line of an iteration; None for any other, or an incomplete one."""
    match = _LINE.search(line)
    if match is None:
        return None
    loss = _LOSS.search(line, match.end())
    return Iteration(
        at=at,
        epoch=int(match[1]),
        samples=int(match[2]),
        samples_per_epoch=int(match[3]),
        percent=int(match[4]),
        data_s=float(match[5]),
        batch_s=float(match[6]),
        per_s=float(match[7]),
        per_gpu_s=float(match[8]),
        loss=float(loss[1]) if loss else None,
    )


class Pace:
    """Rate and time left, from the iterations of a process.

    Args:
        epochs: of the whole training.
        clock: seconds, of any beginning.
    """

    def __init__(self, epochs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._epochs = epochs
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def line(self, now: Iteration) -> str:
        """The progress line; with time left from the second iteration on, because the first is slow."""
        total = self._epochs * now.samples_per_epoch
        done = now.epoch * now.samples_per_epoch + now.samples
        at = self._clock()
        if self._first is None:
            self._first = (done, at)
        since, began = self._first
        rate = (done - since) / (at - began) if at > began else 0.0
        speed = f", {rate:,.1f} samples/s" if rate else ""
        remaining = f", about {duration((total - done) / rate)} left" if rate and done < total else ""
        loss = "" if now.loss is None else f", loss {now.loss:.4f}"
        part = now.samples / now.samples_per_epoch
        return f"epoch {now.epoch + 1} of {self._epochs}: {now.samples:,} samples ({part:.0%}){speed}{loss}{remaining}"


class Line(logging.Handler):
    """Log handler that shows progress in place of open_clip's log, and warnings as they are.

    On a terminal one line is redrawn, elsewhere one is written every 30 seconds.
    """

    def __init__(self, pace: Pace, stream: TextIO, *, every_s: float = PLAIN_EVERY_S) -> None:
        super().__init__()
        self.pace = pace
        self._line = ProgressLine(stream=stream, every_s=every_s)

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record."""
        message = record.getMessage()
        if record.levelno >= logging.WARNING:
            self._line.say(message)
        elif (now := iteration(message, 0)) is not None:
            self._line.show(self.pace.line(now))

    def close(self) -> None:
        """End the line."""
        self._line.close()
        super().close()


@contextmanager
def shown_progress(enabled: bool) -> Iterator[None]:
    """Replace open_clip's log on the terminal by a progress line; its file stays as it is."""
    if not enabled:
        yield
        return
    from open_clip_train import main

    set_up, parse = main.setup_logging, main.parse_args
    former = logging.root.handlers[:]
    line = Line(Pace(1), sys.stderr)

    def parsed(flags: Any) -> Any:
        args = parse(flags)
        line.pace = Pace(args.epochs)
        return args

    def quiet(*args: Any, **options: Any) -> None:
        set_up(*args, **options)
        # Only its file, and neither its terminal nor what Ray or another launcher has put there.
        files = [item for item in logging.root.handlers if item not in former and isinstance(item, logging.FileHandler)]
        logging.root.handlers[:] = [*files, line]
        for name in logging.root.manager.loggerDict:  # of which open_clip has made all tell everything
            if name.partition(".")[0] == "torch":
                logging.getLogger(name).setLevel(logging.WARNING)

    try:
        with mock.patch.multiple(main, setup_logging=quiet, parse_args=parsed):
            yield
    finally:
        logging.root.handlers[:] = former
        line.close()
