"""The process behind `kit.strace.Zygote`: imports embq once, and forks one command after the other.

Each line on stdin is a request. The answers are two lines: the process id, and, when it has ended, the exit status.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys

import h5py  # noqa: F401 - imported here so that a command need not
import pyarrow as pa
import pyarrow.parquet as pq

import embq.writer.service  # noqa: F401 - imported here so that a command need not
from embq.app.cli.entry_point import run
from embq.core.process.children import die_with_parent


def child(request: dict[str, object]) -> int:
    """Run one command in this process, which has just been forked."""
    die_with_parent()
    os.environ.update(request["environment"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target, source in ((0, nothing), (1, log), (2, log)):
        os.dup2(source, target)
    os.kill(os.getpid(), signal.SIGSTOP)
    return run(request["arguments"])


def warm_up() -> None:
    """Let pyarrow import what it puts off, and start its threads in no process that is forked."""
    table = pa.table({"text": pa.array(["a"]), "numbers": pa.array([1.0])})
    file = io.BytesIO()
    pq.write_table(table, file)
    assert pq.read_table(file, use_threads=False).to_pylist() == table.to_pylist()


def answer(number: int) -> None:
    """One line on stdout."""
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def main() -> None:
    """Serve requests until stdin ends."""
    warm_up()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            sys.exit(child(json.loads(line)))
        answer(pid)
        answer(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
