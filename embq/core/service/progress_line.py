"""Progress on stderr: one line that is redrawn on a terminal, one line every 30 seconds in a log."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
import time
from typing import TextIO

PLAIN_EVERY_S = 30.0
REDRAWN_EVERY_S = 0.1


def duration(seconds: float) -> str:
    """Seconds for people: 45 s, 12 min, 3 h 20 min, 2.5 days."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 86400 * 2:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{hours} h {minutes} min"
    return f"{seconds / 86400:.1f} days"


def moment(at_s: float) -> str:
    """A time in seconds since the epoch for people, on pages and terminals: 2026-03-14 09:26 UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at_s))


def size_text(count: float) -> str:
    """Bytes for people, in powers of 1,000: 410 B, 1.3 kB, 5.6 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        text = f"{count:.0f}" if unit == "B" else f"{count:.1f}"
        if float(text) < 1000:
            return f"{text} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


_COMMAND = re.compile(r"`[^`\n]*`|(?<=: )embq .*")


def folded(text: str, *, err: bool = False) -> str:
    """A line of prose for stdout or stderr: on a terminal folded at its words, elsewhere unchanged.

    Commands in it stay whole, so that they paste back into a shell.
    """
    if not (sys.stderr if err else sys.stdout).isatty():
        return text
    joined = _COMMAND.sub(lambda match: match[0].replace(" ", "\0"), text)
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    lines = textwrap.fill(
        joined,
        shutil.get_terminal_size().columns,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace("\0", " ")


class ProgressLine:
    """A transient line and permanent lines on a stream.

    Args:
        quiet: write nothing.
        every_s: least time between two lines where the stream is no terminal.
        stream: stderr by default.
    """

    def __init__(self, *, quiet: bool = False, every_s: float = PLAIN_EVERY_S, stream: TextIO | None = None) -> None:
        self._quiet = quiet
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._every_s = REDRAWN_EVERY_S if self._terminal else every_s
        self._shown_at = float("-inf") if self._terminal else time.monotonic()
        self._drawn = False

    @property
    def due(self) -> bool:
        """True if `show` would write now."""
        return not self._quiet and time.monotonic() - self._shown_at >= self._every_s

    def show(self, text: str) -> None:
        """Replace the transient line, or write a line if one is due."""
        if not self.due:
            return
        self._shown_at = time.monotonic()
        self._drawn = self._terminal
        columns = shutil.get_terminal_size().columns
        self._write(f"\r\x1b[K{text[: columns - 1]}" if self._terminal else f"{text}\n")

    def say(self, text: str) -> None:
        """Write a line that stays, in place of the transient one."""
        if self._quiet:
            return
        if not self._terminal:
            self._shown_at = time.monotonic()
        self.close()
        self._write(f"{text}\n")

    def close(self) -> None:
        """Erase the transient line."""
        if self._drawn:
            self._drawn = False
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
