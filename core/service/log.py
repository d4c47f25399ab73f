"""Logs are events with fields, one line each, on stderr.

As text: `time level service event key=value ...`. With EMBQ_LOG=json an object: time, level, service, event, fields.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Mapping

from core.redaction import masked, printable
from core.settings import log_format

FOREIGN = "message"
"""The event of a line that another library logs; its text is the field `text`."""


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        line = f"{stamp} {record.levelname.lower()} {record.name} {printable(record.getMessage())}"
        if record.exc_info:  # indented, so that no text in it looks like an event
            line += "".join(f"\n  {printable(one)}" for one in self.formatException(record.exc_info).splitlines())
        return masked(line)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = getattr(record, "fields", None)
        said = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": record.name,
            "event": FOREIGN if fields is None else getattr(record, "event", FOREIGN),
        }
        told = {"text": record.getMessage()} if fields is None else dict(fields)
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps({**said, "fields": _plain(told)}, ensure_ascii=False)


class _Repeated(logging.Filter):
    """Leaves out lines that repeat: a client can cause those of other libraries, and bugs, as often as it asks.

    By the place in the code that logs, because the text may hold what the client sent.
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
    """Send every event at `level` and above to stderr, as EMBQ_LOG says; secrets are masked, see `redaction`."""
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
    # It tells of each of its attempts twice; what became of them is in the error that it raises at the end.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def is_json() -> bool:
    """Whether this process logs in JSON, so that whatever it says last belongs there too."""
    return any(isinstance(handler.formatter, _JsonFormatter) for handler in logging.getLogger().handlers)


class Events:
    """The event log of one service."""

    def __init__(self, service: str) -> None:
        self._logger = logging.getLogger(service)

    def info(self, event: str, **fields: object) -> None:
        """Something that is expected happened."""
        self._logger.info(_line(event, fields), extra={"event": event, "fields": fields})

    def warning(self, event: str, **fields: object) -> None:
        """Something that a user may want to look at happened; work goes on."""
        self._logger.warning(_line(event, fields), extra={"event": event, "fields": fields})

    def error(self, event: str, **fields: object) -> None:
        """Something went wrong that stops this process or this unit."""
        self._logger.error(_line(event, fields), extra={"event": event, "fields": fields})

    def bug(self, event: str, **fields: object) -> None:
        """An exception that embq does not know; the traceback goes into the log."""
        self._logger.exception(_line(event, fields), extra={"event": event, "fields": fields})


def _line(event: str, fields: dict[str, object]) -> str:
    parts = [event]
    for name, value in fields.items():
        text = " ".join(str(value).split())
        parts.append(f"{name}={text!r}" if " " in text else f"{name}={text}")
    return " ".join(parts)


def _plain(value: object, name: str = "") -> object:
    """A value that JSON can hold, masked. Its name counts: what is called a password is one."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one, name) for one in value]
    return masked(f"{name}={value}")[len(name) + 1 :]
