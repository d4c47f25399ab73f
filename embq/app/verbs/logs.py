"""`embq logs`: logs of the services that an `embq run` started."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click

from embq.app.cli.sections import SectionedCommand, option
from embq.app.cli.shared_options import broker_option
from embq.core.errors import InputError
from embq.core.redaction import masked, printable
from embq.core.run.layout import Layout
from embq.core.storage.beneath import open_file
from embq.core.storage.paths import is_folder, place

SERVICES = ("producer", "worker", "writer")
POLL_S = 0.2
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ")


@click.command("logs", cls=SectionedCommand, epilog="Examples: embq logs out | embq logs out --service worker -f")
@click.argument("run", type=click.Path(readable=False))
@option("-f", "--follow", is_flag=True, help="Print new lines as they are written, until Ctrl-C.")
@option(
    "--service",
    "services",
    type=click.Choice(SERVICES),
    multiple=True,
    default=SERVICES,
    help="Only the log of this service; repeatable.  [all]",
)
@option("-n", "lines", type=click.IntRange(min=0), default=100, metavar="LINES", help="Last lines only.")
@broker_option
def command(run: str, follow: bool, services: tuple[str, ...], lines: int, broker: str) -> None:
    """Print the service logs of RUN: a run id or its output folder.

    `embq run` writes the logs of its services to OUT/_logs. Resident services log to stderr. Lines are in the order of
    their time.
    """
    logs = [ServiceLog(_home(run, broker), service) for service in dict.fromkeys(services)]
    if not any(log.exists() for log in logs):
        raise InputError(
            f"{run} has no log of {' or '.join(log.service for log in logs)} on this machine",
            next_step="`embq run` writes logs to OUT/_logs; of resident services: docker compose logs, or journalctl",
        )
    for line in _merged(logs, lines):
        click.echo(line)
    while follow:
        for line in _merged(logs):
            click.echo(line)
        time.sleep(POLL_S)


def _home(run: str, broker: str) -> Path:
    """The folder on this machine with the local files of the run."""
    if is_folder(run):
        from embq.core.run.run_info import load_run

        load_run(place(run))  # raises where this is no output folder
        return Layout(place(run)).home
    from embq.app.status.resolve_run import resolve_run

    record, _ = resolve_run(run, broker).registered()
    return Layout(place(record.output)).home


class ServiceLog:
    """The log of one service, read from where the last reading ended."""

    def __init__(self, home: Path, service: str) -> None:
        self.service = service
        self._home = home
        self._at = 0
        self._stamp = ""

    def exists(self) -> bool:
        """True if there is such a log."""
        try:
            os.close(self._open())
        except FileNotFoundError:
            return False
        return True

    def new_lines(self, most: int | None = None) -> list[tuple[str, str]]:
        """(time, line) of each complete line since the last call, the last `most` of them, as a terminal may show it.

        A line without a time, as of a traceback, has that of the line before it.
        """
        with suppress(FileNotFoundError), open(self._open(), "rb") as file:
            file.seek(self._at)
            return list(deque(self._complete(file), maxlen=most))
        return []

    def _open(self) -> int:
        return open_file(self._home, f"_logs/{self.service}.log", os.O_RDONLY)

    def _complete(self, file: Iterator[bytes]) -> Iterator[tuple[str, str]]:
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            self._at += len(raw)
            line = raw[:-1].decode("utf-8", "replace")
            if found := STAMP.match(line):
                self._stamp = found[0]
            yield self._stamp, masked(printable(line))


def _merged(logs: list[ServiceLog], most: int | None = None) -> list[str]:
    """New lines of all logs in the order of their time, the last `most` of them."""
    found = sorted((line for log in logs for line in log.new_lines(most)), key=lambda line: line[0])
    return [text for _, text in (found if most is None else found[max(0, len(found) - most) :])]
