"""Logging: events with fields, one line each, on stderr.

As text: `time level service event key=value ...`. With EMBQ_LOG=json an object: time, level, service, event, fields.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Mapping

from embq.core.redaction import cut, masked, printable
from embq.core.settings import log_format

FOREIGN = "message"
"""Event of the lines that other libraries log; the line is the field `text`."""


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        line = f"{stamp} {record.levelname.lower()} {record.name} {printable(cut(record.getMessage()))}"
        if record.exc_info:  # indented, so that no text in it looks like an event
            lines = self.formatException(record.exc_info).splitlines()
            line += "".join(f"\n  {printable(cut(text))}" for text in lines)
        return masked(line)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = getattr(record, "fields", None)
        event = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": record.name,
            "event": FOREIGN if fields is None else getattr(record, "event", FOREIGN),
        }
        values = {"text": record.getMessage()} if fields is None else dict(fields)
        if record.exc_info:
            values["traceback"] = self.formatException(record.exc_info)
        return json.dumps({**event, "fields": _plain(values)}, ensure_ascii=False)


class _MessageFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        if fields is None:
            return masked(record.getMessage())
        return masked(printable(f"warning: {fields.get('why') or record.getMessage()}"))


def warn_in_messages() -> None:
    """Print warnings as the messages of a command on stderr, and no log lines, until `configure` is called."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_MessageFormatter())
    logging.getLogger().handlers[:] = [handler]


class _Repeated(logging.Filter):
    """Limits the rate of repeated lines of other libraries, and of bugs, which a client can cause at will.

    Lines are compared by their place in the code, because the text may hold what the client sent.
    """

    MOST, WITHIN_S = 30, 60.0

    def __init__(self) -> None:
        super().__init__()
        self._counted: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "fields", None) is not None and getattr(record, "event", "") != "bug":
            return True
        place = (record.pathname, record.lineno)
        began, count = self._counted.get(place, (record.created, 0))
        if record.created - began >= self.WITHIN_S:
            began, count = record.created, 0
        self._counted[place] = began, count + 1
        if count == self.MOST - 1:
            record.msg, record.args = f"{record.getMessage()} (more of these are left out for a minute)", ()
        return count < self.MOST


def configure(level: str = "info") -> None:
    """Send every event at `level` and above to stderr, in the format of EMBQ_LOG; secrets are masked."""
    handler = logging.StreamHandler(sys.stderr)
    in_json = log_format() == "json"
    handler.addFilter(_Repeated())
    handler.setFormatter(_JsonFormatter() if in_json else _TextFormatter())
    logging.captureWarnings(in_json)  # which Python would print between the objects
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("rq", "rq.worker", "faiss.loader", "httpx", "urllib3", "sentence_transformers", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # It logs each of its attempts twice; the error that it raises at the end has the outcome.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def is_json() -> bool:
    """True if this process logs in JSON, so that its last message does too."""
    return any(isinstance(handler.formatter, _JsonFormatter) for handler in logging.getLogger().handlers)


class Events:
    """The event log of one service."""

    def __init__(self, service: str) -> None:
        self._logger = logging.getLogger(service)

    def info(self, event: str, **fields: object) -> None:
        """Log an expected event."""
        self._logger.info(_line(event, fields), extra={"event": event, "fields": fields})

    def warning(self, event: str, **fields: object) -> None:
        """Log an event that a user may want to look at; work goes on."""
        self._logger.warning(_line(event, fields), extra={"event": event, "fields": fields})

    def error(self, event: str, **fields: object) -> None:
        """Log an error that stops this process or this unit."""
        self._logger.error(_line(event, fields), extra={"event": event, "fields": fields})

    def bug(self, event: str, **fields: object) -> None:
        """Log an unexpected exception with its traceback."""
        self._logger.exception(_line(event, fields), extra={"event": event, "fields": fields})


def _line(event: str, fields: dict[str, object]) -> str:
    parts = [event]
    for name, value in fields.items():
        text = " ".join(cut(str(value)).split())
        parts.append(f"{name}={text!r}" if " " in text else f"{name}={text}")
    return " ".join(parts)


def _plain(value: object, name: str = "") -> object:
    """A value as JSON holds it, masked; also by its name, as that of a password is."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, name) for item in value]
    return masked(f"{name}={cut(str(value))}")[len(name) + 1 :]
