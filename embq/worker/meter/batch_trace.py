"""Trace of the batches of a device: one line of JSON for each batch.

Written where EMBQ_TRACE names a folder: a file `<worker name>.jsonl` for each worker process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from embq.core.errors import ConfigError


class Trace:
    """Notes batches. Each line: `device`, `began` and `ended` (Unix seconds), `rows`, `tokens`, `units` (indices).

    The machine's clock is looked at once, so that times of one file are in order whatever becomes of that clock.

    Args:
        folder: where; "" notes nothing.
        worker: name of the process.
        device: "cpu", "cuda:N" or "sim:SPEED".
    """

    def __init__(self, folder: str = "", *, worker: str = "", device: str = "") -> None:
        self._device = device
        self._ended = 0.0
        self._unix_s = time.time() - time.monotonic()
        self._file: TextIO | None = None
        if folder:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
                self._file = (Path(folder) / f"{worker}.jsonl").open("a", encoding="utf-8", buffering=1)
            except OSError as error:
                raise ConfigError(
                    f"EMBQ_TRACE names {folder}, where nothing can be written: {error.strerror}",
                    next_step="name a folder that can be written, or unset EMBQ_TRACE",
                ) from error

    def batch(self, began: float, *, rows: int, tokens: int, units: Iterable[int]) -> None:
        """Note that the device has just ended a batch that it began at `began` (monotonic seconds), or after the last.

        Args:
            units: of each sample, or of each unit, its index; looked at only where batches are noted.
        """
        if self._file is None:
            return
        began, self._ended = max(began, self._ended), time.monotonic()
        line = {"device": self._device, "began": began + self._unix_s, "ended": self._ended + self._unix_s}
        self._file.write(
            json.dumps({**line, "rows": rows, "tokens": tokens, "units": list(dict.fromkeys(units))}) + "\n"
        )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
