"""Progress line of a training by open_clip, from the lines that it logs."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from embq.core.service.progress_line import PLAIN_EVERY_S, ProgressLine, duration
from embq.training.openclip.log import Iteration, iteration


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
        left = f", about {duration((total - done) / rate)} left" if rate and done < total else ""
        loss = "" if now.loss is None else f", loss {now.loss:.4f}"
        part = now.samples / now.samples_per_epoch
        return f"epoch {now.epoch + 1} of {self._epochs}: {now.samples:,} samples ({part:.0%}){speed}{loss}{left}"


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
def shown_progress(asked: bool) -> Iterator[None]:
    """Replace open_clip's log on the terminal by a progress line; its file stays as it is."""
    if not asked:
        yield
        return
    from open_clip_train import main

    from embq.training.openclip.open_clip_patches import replaced

    set_up, parse = main.setup_logging, main.parse_args
    before = logging.root.handlers[:]
    line = Line(Pace(1), sys.stderr)

    def parsed(flags: Any) -> Any:
        args = parse(flags)
        line.pace = Pace(args.epochs)
        return args

    def quiet(*args: Any, **options: Any) -> None:
        set_up(*args, **options)
        # Only its file, and neither its terminal nor what Ray or another launcher has put there.
        files = [one for one in logging.root.handlers if one not in before and isinstance(one, logging.FileHandler)]
        logging.root.handlers[:] = [*files, line]
        for name in logging.root.manager.loggerDict:  # of which open_clip has made all tell everything
            if name.partition(".")[0] == "torch":
                logging.getLogger(name).setLevel(logging.WARNING)

    try:
        with replaced(main, "setup_logging", quiet), replaced(main, "parse_args", parsed):
            yield
    finally:
        logging.root.handlers[:] = before
        line.close()
