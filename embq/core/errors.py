"""Errors that embq raises on purpose, with what the caller must do about each.

::

    EmbqError                 code, exit status and the next step for the user
    ├── UsageError            fix the command line                         exit 2
    ├── InputError            fix the input                                exit 65
    │   ├── MalformedError    bytes from outside are not of their form: a service skips them
    │   ├── SourceError       one unit cannot be read: it fails whole, the run goes on
    │   └── SampleError       one sample has no embedding: it becomes a failure, the unit goes on
    ├── BrokerError           wait for the broker, or repair it            exit 69
    │   └── LimitError        pass less in one call: nothing of it was done  exit 69
    ├── UnwellError           a service is not well: see its log           exit 69
    ├── ServerError           start the server of searches, or reach it    exit 69
    ├── DeviceError           replace this process: its device is broken   exit 71
    ├── ExhaustedError        give this process more memory or threads     exit 72
    ├── NoDeviceError         repair the driver, or choose another device  exit 69
    ├── DeviceFullError       embed fewer samples at once                  exit 71
    ├── OutputError           the output cannot be written: make room      exit 74
    │   ├── AwayError         its storage does not answer: wait, or repair it  exit 69
    │   └── OutsideError      a name in the folder leads out of it: do not trust the folder  exit 74
    ├── TryLaterError         another process holds what we need           exit 75
    ├── ConfigError           fix the configuration or the permission      exit 78
    │   └── MissingPackageError  install a package; a ModuleNotFoundError too  exit 78
    └── ModelError            name a model that exists and loads here      exit 65
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from embq.core.redaction import cut, masked


def command_line(*words: object) -> str:
    """A command line of embq that can be pasted into a shell: words with spaces and the like are quoted."""
    return f"embq {shlex.join(map(str, words))}"


class Exit(IntEnum):
    """The exit statuses of every embq command."""

    DONE = 0
    USAGE = 2
    SOME_FAILED = 3
    BAD_INPUT = 65
    UNAVAILABLE = 69
    BUG = 70
    DEVICE = 71
    EXHAUSTED = 72
    OUTPUT = 74
    TRY_LATER = 75
    CONFIG = 78
    INTERRUPTED = 130


class EmbqError(Exception):
    """An error that a user can understand and resolve.

    Secrets in its message are masked, because it goes into logs, records of failures and the broker, and libraries put
    signed URLs into their messages.

    Args:
        message: what happened, and to which object.
        next_step: what the user can do now; printed on a line of its own.
        code: stable name of the cause, the unit of grouping in `embq failures`.
    """

    exit_code: Exit = Exit.BUG
    default_code = "bug"

    def __init__(self, message: str, *, next_step: str = "", code: str = "") -> None:
        self.message = masked(cut(message))
        super().__init__(self.message)
        self.next_step = masked(cut(next_step))
        if self.next_step:
            self.add_note(f"next: {self.next_step}")  # which tracebacks and notebooks show
        self.code = code or self.default_code

    def reword(self, change: Callable[[str], str]) -> None:
        """Change the words of the message and of the next step, also in what tracebacks show."""
        self.message, self.next_step = change(self.message), change(self.next_step)
        self.args = (self.message,)
        self.__notes__ = [change(note) for note in getattr(self, "__notes__", ())]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all fields: an error made again from `args` would lack those given by keyword."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[EmbqError], args: tuple[Any, ...], fields: dict[str, Any]) -> EmbqError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


def error_fields(error: EmbqError) -> dict[str, Any]:
    """An error as JSON-ready values, for another process; `error_of` is the inverse."""
    fields = {"kind": type(error).__name__, "code": error.code, "message": error.message, "next_step": error.next_step}
    return {**fields, "transient": error.transient} if isinstance(error, SourceError) else fields


def error_of(fields: Mapping[str, Any]) -> EmbqError:
    """The error that `error_fields` described; a plain EmbqError if its class is not known."""
    kind: Any = globals().get(str(fields.get("kind")))
    if not (isinstance(kind, type) and issubclass(kind, EmbqError)):
        kind = EmbqError
    message, next_step, code = (str(fields.get(name, "")) for name in ("message", "next_step", "code"))
    if kind is SourceError:
        return SourceError(message, next_step=next_step, code=code, transient=fields.get("transient") is True)
    if kind is SampleError:
        return SampleError(code, message)
    error: EmbqError = kind(message, next_step=next_step, code=code)
    return error


class UsageError(EmbqError):
    """The command line cannot be understood."""

    exit_code = Exit.USAGE
    default_code = "usage"


class InputError(EmbqError):
    """The input is missing, unreadable or not what the run was made for."""

    exit_code = Exit.BAD_INPUT
    default_code = "bad_input"


class SourceError(InputError):
    """One unit's source cannot be read exactly, so no row of it may be written.

    `transient`: the same read may succeed later (unreachable storage), unlike that of a damaged shard.
    """

    def __init__(self, message: str, *, code: str, next_step: str = "", transient: bool = False) -> None:
        super().__init__(message, next_step=next_step, code=code)
        self.transient = transient


class SampleError(InputError):
    """One sample cannot be embedded. `code` is one of the codes listed in docs/reference/failure-codes.md."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message, code=code)


class MalformedError(InputError):
    """Bytes from the broker, a folder or the network are malformed: see `embq.core.wire`."""

    default_code = "malformed"


class BrokerError(EmbqError):
    """The broker is away, too old, or configured so that it would lose work."""

    exit_code = Exit.UNAVAILABLE
    default_code = "broker"


class LimitError(BrokerError):
    """A call of a script in the broker has more or longer arguments than the script takes. Nothing of it was done."""

    default_code = "broker_limit"


class UnwellError(EmbqError):
    """A service reports that it is unhealthy, or does not answer."""

    exit_code = Exit.UNAVAILABLE
    default_code = "unwell"


class ServerError(EmbqError):
    """No `embq serve` answers at an address, or something else does."""

    exit_code = Exit.UNAVAILABLE
    default_code = "server_away"


class DeviceError(EmbqError):
    """The device is broken for this process: leave, and let the supervisor start another one."""

    exit_code = Exit.DEVICE
    default_code = "device"


class ExhaustedError(EmbqError):
    """The memory, threads or processes that this process may have are used up; see `embq.core.process.limits`."""

    exit_code = Exit.EXHAUSTED
    default_code = "exhausted"


class NoDeviceError(EmbqError):
    """A kind of device was asked for that this machine does not have, or does not show."""

    exit_code = Exit.UNAVAILABLE
    default_code = "no_device"


class DeviceFullError(EmbqError):
    """The device's memory is too small for a forward pass: embed fewer samples at once. Nothing of it was embedded."""

    exit_code = Exit.DEVICE
    default_code = "out_of_memory"


class OutputError(EmbqError):
    """The output folder cannot be written, or holds something that embq did not write."""

    exit_code = Exit.OUTPUT
    default_code = "output"


class AwayError(OutputError):
    """The storage of the output does not answer; what is committed is safe, and the same may succeed later."""

    exit_code = Exit.UNAVAILABLE
    default_code = "storage_away"


class OutsideError(OutputError):
    """A name that was read from data leads out of the folder it belongs to: by `..`, an absolute part or a link."""

    default_code = "outside_root"


class TryLaterError(EmbqError):
    """Another live process holds this run or this folder."""

    exit_code = Exit.TRY_LATER
    default_code = "busy"


class ConfigError(EmbqError):
    """A setting, a permission or a version makes the work impossible here."""

    exit_code = Exit.CONFIG
    default_code = "config"


class MissingPackageError(ConfigError, ModuleNotFoundError):
    """A package is not installed here; see `embq.core.extras`."""

    default_code = "missing_package"


class ModelError(EmbqError):
    """The model spec is unknown, or its model cannot be loaded here."""

    exit_code = Exit.BAD_INPUT
    default_code = "model"
