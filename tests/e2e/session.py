"""Commands of embq as child processes, with all the processes that they start, and inputs whose content is known."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from embq.app.cli import entry_point
from embq.core.broker.client import connect
from embq.core.broker.embedded import EmbeddedServer
from embq.core.process.children import die_with_parent
from tests.support.outputs.build import write_tar
from tests.support.second_reader import checks

LOOK_S = 0.05
"""Between two looks: each takes milliseconds from the processes that are looked at."""
DESCENDANTS_S = 0.25
"""Between two lists of the processes below a command: each reads all of /proc, which takes 2 to 5 ms."""
DEADLINE_S = 150.0
"""For what takes seconds: only a test that fails takes so long, and a machine that is busy with others may."""


def _as_from_a_terminal() -> None:
    """Let Ctrl-C reach the command, also where the tests themselves were started with SIGINT ignored (nohup, `&`)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent()


class Command:
    """One `embq` command and its descendants. Only these are ever signalled, each by its own id.

    Args:
        arguments: of `embq`.
        environment: changes to the environment; None for a value removes the variable.
        prefix: a program that ends by running the command in its place.
    """

    def __init__(
        self,
        *arguments: str | Path,
        environment: Mapping[str, str | None] | None = None,
        prefix: Sequence[str] = (),
        **popen: Any,
    ) -> None:
        self.arguments = [str(argument) for argument in arguments]
        self._stdout, self._stderr = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 - `close` does it
        env = {name: value for name, value in {**os.environ, **_changes(environment)}.items() if value is not None}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "embq", *self.arguments],
            stdin=subprocess.DEVNULL,
            env=env,
            process_group=0,
            preexec_fn=_as_from_a_terminal,
            **{"stdout": self._stdout, "stderr": self._stderr, **popen},
        )
        self._own = psutil.Process(self.process.pid)
        self._seen: set[psutil.Process] = set()

    def __repr__(self) -> str:
        return f"embq {' '.join(self.arguments)}"

    # --- what it says ---

    @property
    def stdout(self) -> str:
        """Everything on stdout so far."""
        return _content(self._stdout)

    @property
    def stderr(self) -> str:
        """Everything on stderr so far."""
        return _content(self._stderr)

    @property
    def said(self) -> str:
        """Both, for the text of a failed assertion."""
        text = f"{self!r} -> {self.process.poll()}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        for option, folder in pairwise(self.arguments):
            if option == "-o":
                text += f"\n--- logs\n{logs(Path(folder))[-6000:]}"
        return text

    # --- its processes ---

    def descendants(self) -> list[psutil.Process]:
        """The processes below it, now."""
        try:
            found = self._own.children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self._seen.update(found)
        return found

    def workers(self) -> list[psutil.Process]:
        """Worker processes, the children of the supervisor."""
        return [process for process in self.descendants() if "embq.worker.process" in _command_line(process)]

    def service(self, verb: str) -> psutil.Process | None:
        """The writer, the producer or the supervisor of `embq run`, or None where it is not alive."""
        for process in self.descendants():
            if _command_line(process)[1:5] == ["-P", "-m", "embq", verb]:
                return process
        return None

    def broker(self) -> psutil.Process | None:
        """The embedded server, or None where it is not alive."""
        for process in self.descendants():
            program, *rest = [*_command_line(process), ""]
            if "server.conf" in " ".join(rest) or Path(program).name.startswith(("valkey", "redis")):
                return process
        return None

    # --- its end ---

    def signal(self, number: int) -> None:
        """Send a signal to the command itself."""
        self.process.send_signal(number)

    def kill_all(self) -> None:
        """SIGKILL for the command and everything below it, all stopped first so that none sees another die."""
        self._kill()
        self._assert_gone()

    def _kill(self) -> None:
        # Who is stopped starts nobody; whoever was started before that is found by a second look.
        _send(self._own, signal.SIGSTOP)
        for process in [*self.descendants(), *self.descendants()]:
            _send(process, signal.SIGSTOP)
        for process in [*self.descendants(), *self._seen, self._own]:
            _send(process, signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Its exit status; fails the test where it takes longer, or leaves a process behind."""
        end = time.monotonic() + deadline_s
        while True:
            self.descendants()
            try:
                status = self.process.wait(DESCENDANTS_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() > end:
                    raise AssertionError(f"did not end within {deadline_s} s: {self.said}") from None
            else:
                self._assert_gone()
                return status

    def _assert_gone(self) -> None:
        _, alive = psutil.wait_procs(self._seen, timeout=DEADLINE_S)
        assert not alive, f"{self!r} left {alive}"

    def close(self) -> None:
        """End what is left of it."""
        self._kill()
        psutil.wait_procs(self._seen, timeout=DEADLINE_S)
        self._stdout.close()
        self._stderr.close()


def _content(file: Any) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode("utf-8", "replace")


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _send(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


@contextmanager
def started(*arguments: str | Path, **options: Any) -> Iterator[Command]:
    """A running command; whatever is left of it at the end is killed."""
    command = Command(*arguments, **options)
    try:
        yield command
    finally:
        command.close()


def ended(*arguments: str | Path, deadline_s: float = DEADLINE_S, **options: Any) -> tuple[int, str, str]:
    """Run a command to its end, in this process if it is a short one: (exit status, stdout, stderr)."""
    if arguments and (arguments[0] in SHORT or "--dry-run" in arguments) and not options.keys() - {"environment"}:
        environment = options.get("environment") or {}
        if not environment.keys() - {"EMBQ_BROKER_URL"}:
            return called(*arguments, environment=environment)
    return process_ended(*arguments, deadline_s=deadline_s, **options)


def process_ended(*arguments: str | Path, deadline_s: float = DEADLINE_S, **options: Any) -> tuple[int, str, str]:
    """Run a command as a process of its own: (exit status, stdout, stderr)."""
    with started(*arguments, **options) as command:
        status = command.wait(deadline_s)
        return status, command.stdout, command.stderr


SHORT = ("cancel", "enqueue", "export", "failures", "pause", "status", "verify")
"""Verbs that start no service and take no signals: they are called in this process, for a new one would do little more
than import them. `test_cli` starts them as users do."""


def called(
    *arguments: str | Path, environment: Mapping[str, str | None] | None = None, cwd: Path | None = None
) -> tuple[int, str, str]:
    """Call a command in this process, one of the short ones or one that is refused before it starts anything.

    For the main thread only: environment, stdout, stderr and handlers of signals, which it changes meanwhile, belong to
    the whole process.
    """
    assert threading.current_thread() is threading.main_thread(), "another thread would see this command's environment"
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        if cwd is not None:
            patch.chdir(cwd)
        if arguments[:1] == ("verify",):
            patch.setattr("embq.app.verify.verification.verify", checks.verify)
        for name, value in _changes(environment).items():
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, value)
        try:
            status = entry_point.run([str(argument) for argument in arguments])
        finally:
            for number, action in before.items():
                signal.signal(number, action)
    return status, out.getvalue(), err.getvalue()


def _changes(environment: Mapping[str, str | None] | None) -> dict[str, str | None]:
    """Changes to the environment of a command; None for a variable that it does not have."""
    return {"EMBQ_BROKER_URL": None, "COLUMNS": "200", **(environment or {})}


def succeed(*arguments: str | Path, **options: Any) -> str:
    """Run a command that must exit with 0; gives its stdout."""
    status, stdout, stderr = ended(*arguments, **options)
    assert status == 0, f"embq {' '.join(map(str, arguments))} -> {status}\n{stdout}\n{stderr}"
    return stdout


def await_in(command: Command, predicate: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Wait until `predicate()` is true; a command that ends before that fails the test."""
    end = time.monotonic() + deadline_s
    while True:
        # Asked first: what came true with the last thing that the command did is true.
        over = command.process.poll() is not None
        if predicate():
            return
        assert not over, f"ended too early: {command.said}"
        if time.monotonic() > end:
            raise AssertionError(f"nothing came of it in {deadline_s} s: {command.said}")
        time.sleep(LOOK_S)


# --- looking at a run from outside ---


def run_of(root: Path) -> str:
    """The run id of an output folder, or "" where it holds no run yet."""
    try:
        return str(json.loads((root / "run.json").read_text())["run"])
    except FileNotFoundError:
        return ""


def committed(root: Path) -> list[str]:
    """The unit ids that the commit records name, in order."""
    records = [json.loads(path.read_bytes()) for path in sorted((root / "commits").glob("*.json"))]
    return [unit["unit_id"] for record in records for unit in record["units"]]


def closed(root: Path) -> bool:
    """True where the last record says that nothing is left, and its writer has cleaned up behind it."""
    names = sorted((root / "commits").glob("*.json"))
    if not names or json.loads(names[-1].read_bytes())["kind"] != "close":
        return False
    return {path.name for folder in ("_tmp", "_staging") for path in root.glob(f"{folder}/*")} <= {".shared"}


def logs(root: Path) -> str:
    """All logs of the services that `embq run` started."""
    return "\n".join(path.read_text(errors="replace") for path in sorted((root / "_logs").glob("*.log")))


class Ledger:
    """The state of a run at the broker of `embq run` (or another one), read key by key."""

    def __init__(self, root: Path, url: str = "") -> None:
        self.root = root
        self._url = url
        self._client: redis.Redis | None = None

    def client(self) -> redis.Redis | None:
        """A client, or None while no server answers."""
        if self._client is not None and not self._url:
            try:
                self._client.ping()
            except redis.exceptions.RedisError:
                self.close()
        if self._client is None:
            url = self._url or EmbeddedServer.find(self.root / "_broker")
            self._client = connect(url) if url else None
        return self._client

    def key(self, part: str) -> str:
        return f"embq:{{{run_of(self.root)}}}:{part}"

    def finished(self) -> int:
        """Units whose result is published or committed, as the broker knows it; 0 while it does not answer."""
        try:
            client = self.client()
            return client.hlen(self.key("pub")) + client.bitcount(self.key("done")) if client is not None else 0
        except redis.exceptions.RedisError:
            return 0

    def begun(self) -> int:
        """Units that a worker has begun; 0 while the broker does not answer."""
        try:
            client = self.client()
            return int(client.hlen(self.key("busy"))) if client is not None else 0
        except redis.exceptions.RedisError:
            return 0

    def held_by(self, worker: str) -> list[str]:
        """The units whose lease a worker has."""
        client = self.client()
        owners = client.hgetall(self.key("owner")) if client is not None else {}
        return [u.decode() for u, token in owners.items() if f":{worker}:" in token.decode()]

    def workers(self) -> dict[int, dict[str, Any]]:
        """Process id -> what each worker last said of itself."""
        try:
            client = self.client()
            if client is None:
                return {}
            names = [name.decode() for name in client.zrange("embq:workers", 0, -1)]
            said = [client.get(f"embq:worker:{name}") for name in names]
        except redis.exceptions.RedisError:
            return {}
        found = [json.loads(text) for text in said if text is not None]
        return {int(one["pid"]): one for one in found}

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


# --- inputs ---


def write_texts(path: Path, samples: int, *, name: str = "k") -> dict[str, bytes]:
    """A .jsonl file of different texts; gives key -> bytes that the stub embeds."""
    texts = {f"{name}{number}": f"{name}: the text with the number {number}" for number in range(samples)}
    path.write_text("".join(json.dumps({"id": key, "text": text}) + "\n" for key, text in texts.items()))
    return {key: text.encode() for key, text in texts.items()}


def picture(name: str) -> bytes:
    """Bytes that the stub takes for an image; different for each name."""
    return b"\xff\xd8" + name.encode() * 7


def write_shards(folder: Path, shards: int, samples: int, *, captions: bool = False) -> dict[str, bytes]:
    """Tar shards of made-up images; gives key -> image bytes. The caption of key K is "caption of K"."""
    folder.mkdir(parents=True, exist_ok=True)
    expected = {}
    for shard in range(shards):
        members = []
        for number in range(samples):
            key = f"{shard:03d}-{number:04d}"
            expected[key] = picture(key)
            members.append((f"{key}.jpg", picture(key)))
            if captions:
                members.append((f"{key}.txt", f"caption of {key}".encode()))
        write_tar(folder / f"{shard:05d}.tar", members)
    return expected
