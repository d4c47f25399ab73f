"""A server of indices as a child process, and how to ask it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.session import Command
from tests.support.waiting import wait_until


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)


@dataclass(frozen=True, slots=True)
class Server:
    command: Command
    url: str

    def ask(self, path: str, body: object = None, *, data: bytes | None = None, **headers: str) -> Answer:
        """GET, or POST where there is a body: as JSON, of which nothing is said, as the client does it."""
        data = json.dumps(body).encode() if body is not None else data
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "", **named} if data else named)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Answer(status=answer.status, headers=dict(answer.headers), data=answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(status=error.code, headers=dict(error.headers), data=error.read())

    def knn(self, **body: object) -> Any:
        answer = self.ask("/knn-service", body)
        assert answer.status == 200, answer.data
        return answer.json


@contextmanager
def served(*arguments: str | Path, verb: str = "serve", **changes: str | None) -> Iterator[Server]:
    """`embq serve`, or `embq ui`, with these arguments, on a free port, until the block ends.

    Args:
        changes: of the environment.
    """
    command = Command(verb, *arguments, "--port", "0", environment=changes)
    try:
        wait_until(lambda: "http://" in command.stdout or command.process.poll() is not None)
        assert command.process.poll() is None, command.said
        yield Server(command, next(word for word in command.stdout.split() if word.startswith("http://")))
    finally:
        command.close()
