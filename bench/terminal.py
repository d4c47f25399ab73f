"""Recording of `embq run` in a terminal: a real run, stopped by Ctrl-C and resumed, as an animated SVG.

    python -m bench.terminal [--columns 80] [--texts 4000] [-o docs/pictures/terminal.svg] [--frames FOLDER]

The command runs in a pseudo-terminal whose screen pyte keeps. `--frames` keeps every screen as a picture and as text.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import select
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import pyte

from embq.lab.texts import docstrings

ROWS = 24
CELL_W, CELL_H, MARGIN = 8.4, 18, 12
COLOURS = {
    "default": "#d4d4d4",
    "dim": "#7d8590",
    "red": "#f47067",
    "green": "#57ab5a",
    "brown": "#c69026",
    "cyan": "#39c5cf",
}
"""Colour of pyte -> of the picture; "brown" is its name of yellow."""
EVERY_S, WHOLE_S = 0.25, 0.02
"""Seconds between two screens, and after which one is taken to be drawn to its end."""
SHOWN_S, LAST_S = 0.7, 4.0
"""Seconds that the animation shows a screen, and the last one."""
PER_STATE = 4
"""Screens of each state in the animation."""
STOP_AT = 0.2
"""Committed share at which Ctrl-C is pressed."""
CTRL_C = b"\x03"

Line = tuple[tuple[str, str, bool], ...]
"""Pieces of a line: text, colour, bold."""


class Screen(pyte.Screen):
    """A screen that knows faint text, as a colour."""

    def select_graphic_rendition(self, *attrs: int, **kwargs: Any) -> None:
        """Set the style of what follows."""
        super().select_graphic_rendition(*(attr for attr in attrs if attr != 2), **kwargs)
        if 2 in attrs:
            self.cursor.attrs = self.cursor.attrs._replace(fg="dim")


@dataclass
class Recording:
    """Screens of commands in one terminal."""

    columns: int
    screens: list[tuple[Line, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._screen = Screen(self.columns, ROWS)
        self._stream = pyte.ByteStream(self._screen)

    def run(self, command: Sequence[str], *, folder: Path, stop: Callable[[str], bool] = lambda _: False) -> int:
        """Run a command on a clear screen; gives its exit status.

        Args:
            stop: of the text on the screen; Ctrl-C is pressed once it is true.
        """
        self._stream.feed(f"\x1b[2J\x1b[H$ {' '.join(command)}\r\n".encode())
        process, terminal = pty.fork()
        if process == 0:
            os.chdir(folder)
            os.environ["TERM"] = "xterm-256color"
            embq = Path(sys.executable).with_name("embq")
            os.execv(embq, [str(embq), *command[1:]])
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, self.columns, 0, 0))
        pressed, looked_at = False, 0.0
        while self._read(terminal):
            if time.monotonic() - looked_at < EVERY_S:
                continue
            looked_at = time.monotonic()
            self._keep()
            if not pressed and stop("\n".join(self._screen.display)):
                pressed = True
                os.write(terminal, CTRL_C)
        os.close(terminal)
        self._keep()
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    def _read(self, terminal: int) -> bool:
        """Read what the command writes until it pauses; False at its end."""
        wait_s = EVERY_S
        while select.select([terminal], [], [], wait_s)[0]:
            try:
                self._stream.feed(os.read(terminal, 65536))
            except OSError:  # Linux's end of a pseudo-terminal
                return False
            wait_s = WHOLE_S
        return True

    def _keep(self) -> None:
        lines = tuple(self._line(row) for row in range(ROWS))
        while lines and not lines[-1]:
            lines = lines[:-1]
        if lines and (not self.screens or self.screens[-1] != lines):
            self.screens.append(lines)

    def _line(self, row: int) -> Line:
        cells = [self._screen.buffer[row][column] for column in range(self.columns)]
        pieces = [
            ("".join(cell.data for cell in run), *style)
            for style, run in groupby(cells, key=lambda cell: (cell.fg, cell.bold))
        ]
        while pieces and not pieces[-1][0].strip():
            pieces.pop()
        return tuple(pieces)


def text_of(screen: Sequence[Line]) -> str:
    """The text of a screen."""
    return "\n".join("".join(piece for piece, *_ in line).rstrip() for line in screen)


def state_of(screen: Sequence[Line]) -> str:
    """State that a screen shows: that of the last panel, "" where there is none."""
    found = re.findall(r"^run [0-9a-f]+  \S+  (\w+)", text_of(screen), re.MULTILINE)
    return str(found[-1]) if found else ""


def chosen(screens: Sequence[tuple[Line, ...]]) -> list[tuple[Line, ...]]:
    """Screens for the animation: some of each state, its last one among them."""
    kept = []
    for _, group in groupby(screens, key=state_of):
        of_state = list(group)
        steps = min(PER_STATE, len(of_state))
        kept += [of_state[(n + 1) * len(of_state) // steps - 1] for n in range(steps)]
    return kept


NO_BREAK = "\u00a0"
"""Space that SVG viewers keep."""


def svg(screens: Sequence[Sequence[Line]], columns: int) -> str:
    """Screens as one picture that shows them in turn; the last one where pictures do not move."""
    width = columns * CELL_W + 2 * MARGIN
    height = max(len(screen) for screen in screens) * CELL_H + 2 * MARGIN
    whole_s = SHOWN_S * (len(screens) - 1) + LAST_S
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="14">',
        '<rect width="100%" height="100%" rx="8" fill="#1c2128"/>',
    ]
    for number, screen in enumerate(screens):
        last = number == len(screens) - 1
        begin = number * SHOWN_S / whole_s
        times = [begin, 1.0 if last else (number + 1) * SHOWN_S / whole_s]
        parts.append(f'<g visibility="{"visible" if last else "hidden"}">')
        if len(screens) > 1:
            parts.append(
                '<animate attributeName="visibility" calcMode="discrete" repeatCount="indefinite" '
                f'dur="{whole_s:.1f}s" values="hidden;visible;hidden" keyTimes="0;{times[0]:.4f};{times[1]:.4f}"/>'
            )
        parts += [_text(line, row) for row, line in enumerate(screen) if line]
        parts.append("</g>")
    return "\n".join([*parts, "</svg>\n"])


def _text(line: Line, row: int) -> str:
    column, spans = 0, []
    for whole, colour, bold in line:
        if piece := whole.rstrip().replace(" ", NO_BREAK):
            weight = ' font-weight="bold"' if bold else ""
            spans.append(
                f'<tspan x="{MARGIN + column * CELL_W:.1f}" textLength="{len(piece) * CELL_W:.1f}" '
                f'fill="{COLOURS.get(colour, COLOURS["default"])}"{weight}>{escape(piece)}</tspan>'
            )
        column += len(whole)
    return f'<text y="{MARGIN + row * CELL_H + 14}">{"".join(spans)}</text>'


def record(folder: Path, *, columns: int, texts: int) -> Recording:
    """A run of docstrings of the standard library: begun, stopped by Ctrl-C, resumed and done."""
    lines = [json.dumps({"id": key, "text": text}) for key, text in docstrings(texts)]
    (folder / "texts.jsonl").write_text("\n".join(lines) + "\n")
    recording = Recording(columns)

    def stop(text: str) -> bool:
        return any(float(share) >= 100 * STOP_AT for share in re.findall(r"([0-9.]+)%", text)[:1])

    recording.run(["embq", "run", "texts.jsonl", "-o", "out", "-m", "minilm"], folder=folder, stop=stop)
    status = recording.run(["embq", "resume", "out"], folder=folder)
    if status:
        raise SystemExit(f"`embq resume` ended with {status}:\n{text_of(recording.screens[-1])}")
    return recording


def main() -> None:
    """Record, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/pictures/terminal.svg"))
    parser.add_argument("--frames", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="embq-") as folder:
        recording = record(Path(folder), columns=options.columns, texts=options.texts)
    if options.frames:
        options.frames.mkdir(parents=True, exist_ok=True)
        for number, screen in enumerate(recording.screens):
            path = options.frames / f"{number:03d}-{state_of(screen) or 'text'}"
            path.with_suffix(".svg").write_text(svg([screen], options.columns))
            path.with_suffix(".txt").write_text(text_of(screen) + "\n")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(svg(chosen(recording.screens), options.columns))
    states = [state for state, _ in groupby(map(state_of, recording.screens))]
    print(f"{len(recording.screens)} screens ({', '.join(filter(None, states))}) -> {options.output}")


if __name__ == "__main__":
    main()
