"""Logs are events with fields, one line each, on stderr: `time level service event key=value ...`."""

from __future__ import annotations

import logging
import sys
import time

from core.masking import masked


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        line = f"{stamp} {record.levelname.lower()} {record.name} {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return masked(line)


def configure(level: str = "info") -> None:
    """Send every event at `level` and above to stderr; secrets are masked, see `core.masking`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("rq", "rq.worker", "faiss.loader", "httpx", "urllib3", "sentence_transformers", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class Events:
    """The event log of one service."""

    def __init__(self, service: str) -> None:
        self._logger = logging.getLogger(service)

    def info(self, event: str, **fields: object) -> None:
        """Something that is expected happened."""
        self._logger.info(_line(event, fields))

    def warning(self, event: str, **fields: object) -> None:
        """Something that a user may want to look at happened; work goes on."""
        self._logger.warning(_line(event, fields))

    def error(self, event: str, **fields: object) -> None:
        """Something went wrong that stops this process or this unit."""
        self._logger.error(_line(event, fields))

    def bug(self, event: str, **fields: object) -> None:
        """An exception that embq does not know; the traceback goes into the log."""
        self._logger.exception(_line(event, fields))


def _line(event: str, fields: dict[str, object]) -> str:
    parts = [event]
    for name, value in fields.items():
        text = " ".join(str(value).split())
        parts.append(f"{name}={text!r}" if " " in text else f"{name}={text}")
    return " ".join(parts)
