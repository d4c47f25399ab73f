"""Entry point of `embq`: verbs, and the mapping of errors to messages and exit statuses."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from errno import ENOSPC
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from embq.app.cli.lazy_group import LazyGroup
from embq.app.cli.sections import NO_COLOR
from embq.app.cli.verb_table import FOREIGN_VERBS, GROUPS, UNLISTED, VERBS
from embq.core.errors import EmbqError, Exit, MissingPackageError, OutputError
from embq.core.extras import OF_VERB, of_import
from embq.core.plugins import missing_packages
from embq.core.process.current_folder import leave_out_current_folder
from embq.core.process.limits import exhausted
from embq.core.redaction import masked, printable
from embq.core.service.log import Events, is_json, warn_in_messages
from embq.core.service.progress_line import folded
from embq.core.service.stopping import discard_after_close
from embq.core.settings import settings_warnings, wants_json_logs

STARTED_AT_S = time.monotonic()
"""When this command started, but for the start of Python."""
HELP = ("-h", "--help")
WORDS = {"help": "--help", "version": "--version"}
"""First words that stand for an option, as in `embq help run`: many tools have verbs of these names."""

TELLING = {"config", "doctor", "completion"}
"""Verbs that list such variables themselves, or print a script."""

TABLES = {
    *("run", "enqueue", "resume", "retry", "producer", "writer", "verify", "failures", "index", "export"),
    *("atlas", "serve", "ui", "clip-retrieval", "autofaiss", *UNLISTED),
}
"""Verbs that make Arrow tables, for which pyarrow would import pandas first, see `embq.core.process.libraries`."""


class JoinedBash(BashComplete):
    """click's completion for bash, for words with ":" or "=" in them, such as `st:./model` and `--model=minilm`.

    bash splits words there and replaces only what follows (COMP_WORDBREAKS in its manual), so they are joined again.
    """

    _prefix = ""
    """Beginning of the value that is completed, which bash leaves in place."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the one to complete, and that one."""
        preceding, last = super().get_completion_args()
        words = [""]
        is_open = False
        for word in (*preceding, last):
            is_break = bool(word) and not word.strip(":=")
            if is_break or (is_open and word):
                words[-1] += word
            else:
                words.append(word)
            is_open = is_break
        prefix = words[-1] if is_open else words[-1].removesuffix(last)
        self._prefix = prefix.partition("=")[2] if prefix.startswith("-") else prefix
        return words[1:-1], words[-1]

    def format_completion(self, item: CompletionItem) -> str:
        """A completion as the function in bash reads it."""
        return f"{item.type},{item.value.removeprefix(self._prefix)}"

    def source(self) -> str:
        """The script. No space follows a value that goes on."""
        goes_on = '[[ "${COMPREPLY[0]}" == *[:/] ]] && compopt -o nospace'
        return super().source().replace("    return 0", f"    {goes_on}\n\n    return 0")


@click.group(
    cls=LazyGroup,
    later=VERBS,
    unlisted=UNLISTED,
    foreign=FOREIGN_VERBS,
    headings=GROUPS,
    extras=OF_VERB,
    context_settings={"help_option_names": list(HELP), "token_normalize_func": lambda name: name.replace("_", "-")},
    epilog="Example: embq run ./photos --output ./out --model open_clip:ViT-B-32/laion2b_s34b_b79k",
)
@click.version_option(None, "-V", "--version", package_name="embq", prog_name="embq")
def cli() -> None:
    """Embed images and texts, exactly once each, on any number of GPUs."""


cli.params.append(NO_COLOR)
add_completion_class(JoinedBash)


def main() -> NoReturn:
    """Entry point of the command `embq`."""
    open_standard_streams()
    os.environ["PYTHONSAFEPATH"] = "1"  # for processes that libraries start; see `embq.core.process.children.python`
    leave_out_current_folder()
    warn_in_messages()
    verb, of_server = sys.argv[1:2], any(argument.startswith(("http://", "https://")) for argument in sys.argv[2:])
    makes_tables = TABLES.intersection(verb) or (verb == ["search"] and not of_server)
    if makes_tables and not set(HELP).intersection(sys.argv):
        from embq.core.process.libraries import leave_out_pandas

        leave_out_pandas()
    if not sys.flags.safe_path:  # as processes that embq starts have it, whose parent has warned
        warn_of_settings(sys.argv[1:])
    sys.exit(run(sys.argv[1:]))


def warn_of_settings(arguments: list[str]) -> None:
    """Warn of EMBQ_* variables that are no settings, and of plug-ins that are not installed, before a verb runs."""
    if not VERBS.keys() - TELLING & {*arguments[:1]} or {*HELP, "--quiet", "-q"} & {*arguments} or wants_json_logs():
        return
    for warning in [*settings_warnings(), *map(_not_installed, missing_packages())]:
        click.echo(printable(f"warning: {warning}"), err=True)


def _not_installed(package: str) -> str:
    return f"EMBQ_PLUGINS names {package}, which is not installed here or has no plug-in of embq"


def open_standard_streams() -> None:
    """Open stdin, stdout and stderr that are closed, as some schedulers leave them, on /dev/null.

    Otherwise the next file that is opened has their number, and a child or a library writes into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.fstat(number)
                continue
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, number)
            if opened != number:
                os.close(opened)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    sys.stdout, sys.stderr = discard_after_close(sys.stdout), discard_after_close(sys.stderr)


def run(arguments: list[str]) -> int:
    """Run one command; returns its exit status. Every error becomes one message on stderr."""
    if arguments and (option := WORDS.get(arguments[0])):
        arguments = [*arguments[1:], option]
    try:
        result: Any = cli.main(arguments, prog_name="embq", standalone_mode=False)
        return int(result) if isinstance(result, int) else Exit.DONE
    except click.ClickException as error:
        error.show()
        return Exit.USAGE
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return Exit.INTERRUPTED
    except (BrokenPipeError, SystemExit):
        # The reader of stdout has gone. click makes a SystemExit of it, and of nothing else here.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE
    except EmbqError as error:
        if isinstance(error, MissingPackageError):
            error = of_import(error, arguments[0]) or error
        show_error(error)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the boundary to the user
        if (user_error := _environment_error(error, arguments[0] if arguments else "")) is not None:
            show_error(user_error)
            return user_error.exit_code
        details = masked(traceback.format_exc())
        with tempfile.NamedTemporaryFile("w", prefix="embq-bug-", suffix=".txt", delete=False) as report:
            report.write(details)
        if is_json():
            Events("embq").error("bug", report=report.name, traceback=details)
            return Exit.BUG
        click.echo(
            f"error[bug]: embq has a bug; the details are in {report.name}\n"
            f"  {details.strip().splitlines()[-1]}\n  next:  report it with that file",
            err=True,
        )
        return Exit.BUG


def _environment_error(error: Exception, verb: str) -> EmbqError | None:
    """The error for a user if disk, broker, memory or threads gave out, or a package of an extra is missing.

    None for any other.
    """
    if (user_error := exhausted(error)) is not None:
        return user_error
    if isinstance(error, ModuleNotFoundError):
        return of_import(error, verb)
    if isinstance(error, OSError) and (full := _refused_output(error)) is not None:
        return full
    if isinstance(error, OSError):
        from embq.core.storage.durable import (
            FAILING,
            NO_SPACE,
            NOT_WRITABLE,
            denied,
            is_unreadable,
            output_error,
            unusable,
        )
        from embq.core.storage.objects import ObjectPath
        from embq.core.storage.paths import is_url

        name = os.fsdecode(error.filename or "a file")
        path = ObjectPath(name) if is_url(name) else Path(name)
        if error.filename and (unnamed := unusable(error, name)) is not None:
            return unnamed
        is_read = isinstance(path, Path) and bool(error.filename) and is_unreadable(path)
        if is_read and (refused := denied(error, path)) is not None:
            return refused
        return output_error(error, path) if error.errno in NO_SPACE + NOT_WRITABLE + FAILING else None
    if isinstance(error, RuntimeError):
        from embq.core.storage.durable import unusable

        if (unnamed := unusable(error, str(error).partition(" from ")[2].strip("'"))) is not None:
            return unnamed
    if any(base.__module__.startswith("redis.") for base in type(error).__mro__):
        from redis.exceptions import RedisError

        from embq.core.broker.client import refusal

        return refusal(error) if isinstance(error, RedisError) else None
    return None


def _refused_output(error: OSError) -> OutputError | None:
    """The error if it is standard output that cannot be written: by `click.echo`, or a console of rich."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is click.echo.__code__:
            is_output = not frame.f_locals.get("err")
            break
        if frame.f_globals.get("__name__") == "rich.console":
            is_output = not getattr(frame.f_locals.get("self"), "stderr", True)
            break
    else:
        return None
    if not is_output:
        return None
    with suppress(OSError):  # what is left in its buffer would fail once more at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OutputError(
        f"standard output cannot be written: {error.strerror}",
        next_step="send it to a file with room, or to a terminal; what is in an output folder of embq is safe",
        code="no_space" if error.errno == ENOSPC else "output",
    )


def show_error(error: EmbqError) -> None:
    """Print an error: what happened, then what to do next; as an event if logs are JSON."""
    if is_json():
        Events("embq").error("stopped", code=error.code, why=error.message, next=error.next_step)
        return
    lines = f"error[{error.code}]: {error.message}".split("\n")
    if error.next_step:
        lines += f"  next:  {error.next_step}".split("\n")
    for line in lines:  # whose text may come from elsewhere
        click.echo(folded(printable(line), err=True), err=True)
