"""The memory of a writer that does nothing else, in a process of its own; started by `bench.storing`.

    python -m bench.storing_memory OUT BROKER_URL

Opens the run in OUT, then waits for a line on stdin, then writes until the run is closed, and prints two numbers of
bytes: the resident memory before the first result was read, and the highest while it wrote. The first is Python,
pyarrow and what else was imported; it is there however small the parts are, so it is taken off.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from embq.core.broker.client import connect
from embq.core.queue.runs import RunRecord
from embq.core.run.run_info import load_run
from embq.writer.run_writer import RunWriter


def main() -> None:
    """Write one run."""
    root, url = Path(sys.argv[1]), sys.argv[2]
    info = load_run(root)
    record = RunRecord(run=info.run, output=str(root), model=info.model, units=info.units)
    writer = RunWriter(connect(url, patient=True), record, version="bench")
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest until now
    print("ready", flush=True)
    sys.stdin.readline()
    while not writer.finished:
        if not writer.step():
            time.sleep(0.005)
    print(before, _status("VmHWM"), flush=True)


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


if __name__ == "__main__":
    main()
