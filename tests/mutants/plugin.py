"""Plugin of pytest that runs the collected tests in forks, each with another mutant.

It takes mutants from the socket whose descriptor stands in EMBQ_TEST_MUTANTS and answers each with a verdict, both as
lines of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import psutil
import pytest

from tests.mutants.executed import Executed
from tests.mutants.mutations import Mutant
from tests.mutants.nearness import Nearness
from tests.support.durations import listed

STALL_S = 60.0
"""Seconds of one test after which it counts as hanging."""

TEARDOWN_S = 10.0
"""Seconds that fixtures of the session have to end after the last test; then their processes are killed."""

Functions = dict[tuple[str, str, int], list[FunctionType]]


def functions_below(root: Path) -> Functions:
    """The Python functions that exist, by file, qualified name and first line; wrapped ones too."""
    found: Functions = defaultdict(list)
    for it in gc.get_objects():
        if type(it) is FunctionType and it.__code__.co_filename.startswith(f"{root}{os.sep}"):
            found[_place(it.__code__)].append(it)
    return found


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def swap(functions: Functions, path: Path, source: bytes, places: Sequence[Sequence[Any]]) -> int:
    """Give functions the code of a mutated source; places are the `functions` of the mutant. Returns their number."""
    changed = 0
    wanted = {(str(path), name, line) for name, line in places}
    waiting = [compile(source, str(path), "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        waiting += [it for it in code.co_consts if isinstance(it, CodeType)]
        for function in functions.get(_place(code), []) if _place(code) in wanted else []:
            free = function.__code__.co_freevars
            # A mutant may need fewer variables of what is around, such as the class of a removed `super()`.
            if code.co_freevars in ((), free):
                function.__code__ = code if code.co_freevars else code.replace(co_freevars=free)
                changed += 1
    return changed


@dataclass(kw_only=True)
class Outcome:
    """What a fork did: tests that ran, the place of that which failed in the list, and how."""

    ran: int = 0
    failed: int | None = None
    how: str = ""


class Forks:
    """Runs mutants in forks of this process, which has collected the tests."""

    def __init__(self, session: pytest.Session) -> None:
        self.session = session
        self.root = session.config.rootpath
        self._ran = 0
        self._how = ""
        self._numbers = count(1)
        self._nearness = Nearness(self.root)
        executed = os.environ.pop("EMBQ_TEST_EXECUTED", "")
        self._executed = Executed(self.root, Path(executed) if executed else None)
        self._items: dict[Path, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            self._items[item.path].append(item)
        slower = listed()
        self._slower = {item.nodeid for item in session.items if not _is_quick(item.nodeid, slower)}
        gc.unfreeze()
        self._functions = functions_below(self.root / "embq")
        gc.freeze()
        self._flaky: set[str] = set()
        session.config.pluginmanager.register(self)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the tests, and keep the last line of a failure."""
        self._ran += report.when == "call"
        if report.failed:
            self._how = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))[:200]

    def judge(self, mutant: Mutant, limit_s: float) -> dict[str, Any]:
        """Run the tests of a mutant until one fails that passes without it.

        The quick ones that execute its line are first, then the nearest.
        """
        began, ran = time.monotonic(), 0
        verdict: dict[str, Any] = {"verdict": "survived"}
        nearest = self._nearness.nearest(mutant.path, mutant.line)
        items = [it for path in nearest for it in self._items[path] if it.nodeid not in self._flaky]
        first = self._executed.tests(mutant.path, mutant.line) - self._slower
        items.sort(key=lambda it: it.nodeid not in first)
        while items and (rest_s := began + limit_s - time.monotonic()) > 0:
            outcome = self.run(items, limit_s=rest_s, mutant=mutant)
            ran += outcome.ran
            if outcome.failed is None:
                break
            killer = items[outcome.failed]
            if self.run([killer], limit_s=STALL_S).failed is None:
                verdict = {"verdict": "killed", "by": killer.nodeid, "how": outcome.how}
                verdict["quick"] = killer.nodeid not in self._slower
                break
            self._flaky.add(killer.nodeid)
            items = items[outcome.failed + 1 :]
        verdict["executed"] = len(first)
        return {**verdict, "tests": ran, "seconds": round(time.monotonic() - began, 1), "flaky": sorted(self._flaky)}

    def run(self, items: Sequence[pytest.Item], *, limit_s: float, mutant: Mutant | None = None) -> Outcome:
        """Run tests in a fork until the first failure or the limit. Each process that they started ends with it."""
        sys.stdout.flush()
        folder = tempfile.mkdtemp(prefix="m")
        reader, writer = os.pipe()
        with self._on_disk(mutant) as source:
            pid = os.fork()
            if not pid:
                try:
                    os.close(reader)
                    self._begin(Path(folder))
                    if mutant:
                        swap(self._functions, self.root / mutant.path, source, mutant.functions)
                    self._run_here(items, time.monotonic() + limit_s, writer)
                except BaseException:  # noqa: BLE001 - a fork must not return into the loop of pytest
                    traceback.print_exc(file=sys.__stderr__)
                finally:
                    os._exit(0)
            try:
                os.close(writer)
                return _followed(reader)
            finally:
                os.close(reader)
                _end(pid, folder)
                shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _on_disk(self, mutant: Mutant | None) -> Iterator[bytes]:
        """Have the mutant in its file, for processes that tests start.

        Each has a time of change of its own, in whole seconds: by it Python tells whether compiled code is of a source.
        """
        if not mutant:
            yield b""
            return
        path = self.root / mutant.path
        original, changed_at = path.read_bytes(), path.stat().st_mtime
        try:
            path.write_bytes(mutant.applied(original))
            os.utime(path, (changed_at, changed_at + next(self._numbers)))
            yield mutant.applied(original)
        finally:
            path.write_bytes(original)
            os.utime(path, (changed_at, changed_at))

    def _begin(self, folder: Path) -> None:
        """Give this fork a session and temporary folders of its own."""
        os.setsid()
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        os.environ["XDG_STATE_HOME"] = str(folder / "s")
        self.session.config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]

    def _run_here(self, items: Sequence[pytest.Item], deadline: float, writer: int) -> None:
        for number, item in enumerate(items):
            if time.monotonic() > deadline:
                break
            _send(writer, at=number, ran=self._ran)
            following = items[number + 1] if number + 1 < len(items) else None
            self.session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.session.testsfailed:
                _send(writer, ran=self._ran, failed=number, how=self._how)
                break
        if not self.session.testsfailed:
            _send(writer, ran=self._ran, failed=None, how="")
        self.session._setupstate.teardown_exact(None)


def _is_quick(name: str, slower: Set[str]) -> bool:
    """Whether `make test` runs a test; its folders are QUICK of the Makefile."""
    folders = {"unit", "contract", "indexer", "output", "embedding", "e2e"}
    return name.split("/")[1] in folders and slower.isdisjoint({name, name.partition("[")[0]})


def _send(writer: int, **fields: Any) -> None:
    os.write(writer, f"{json.dumps(fields)}\n".encode())


def _followed(reader: int) -> Outcome:
    """Read what a fork says of its tests until it ends or hangs."""
    outcome, text = Outcome(how="the process of the test ended"), b""
    while select.select([reader], [], [], STALL_S)[0]:
        if not (data := os.read(reader, 1 << 16)):
            break
        *lines, text = (text + data).split(b"\n")
        for said in map(json.loads, lines):
            if "failed" in said:
                select.select([reader], [], [], TEARDOWN_S)
                return Outcome(**said)
            outcome.ran, outcome.failed = said["ran"], said["at"]
    else:
        outcome.how = f"no end within {STALL_S:.0f} s"
    if outcome.failed is None:
        raise RuntimeError("a fork ended before its first test")
    return outcome


def _end(group: int, folder: str) -> None:
    """End a fork and what it started, also that which left its session: it has the fork's folder in its environment."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    os.kill(group, signal.SIGKILL)
    os.waitpid(group, 0)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == folder:
                process.kill()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Judge mutants instead of running the tests."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tool runs in the background
    with (
        socket.socket(fileno=int(os.environ.pop("EMBQ_TEST_MUTANTS"))) as connection,
        connection.makefile("rw") as lines,
    ):
        forks = Forks(session)
        first = [item for item in session.items if "unit" in item.path.parts][:20]
        if session.testsfailed or (outcome := forks.run(first, limit_s=STALL_S)).failed is not None:
            raise pytest.UsageError("tests fail without a mutant" if session.testsfailed else outcome.how)
        for line in lines:
            task = json.loads(line)
            print(json.dumps(forks.judge(Mutant(**task["mutant"]), task["limit_s"])), file=lines, flush=True)
    return True
