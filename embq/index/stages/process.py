"""A process that does index units: one JSON line for each on stdin, one JSON answer on stdout.

    python -m embq.index.stages.process --worker NAME --threads N --memory BYTES [--gpu]

It ends when stdin does. All output beside answers goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

import msgspec

from embq.core.errors import ConfigError, EmbqError, error_fields
from embq.core.process.children import STARTED, die_with_parent
from embq.core.process.libraries import leave_out_pandas
from embq.core.service.log import configure
from embq.index.plan.build_options import memory_option
from embq.index.stages.task import StageFunction, perform
from embq.index.stages.units import STAGE_MODULES, IndexUnit, Sidecar


def do(unit: IndexUnit, *, threads: int, memory_bytes: int, worker: str, on_gpu: bool = False) -> Sidecar:
    """Do one unit here; raises the EmbqError of a unit that cannot be done."""
    function: StageFunction = getattr(import_module(STAGE_MODULES[unit.stage]), unit.stage)
    return perform(unit, function, threads=threads, memory_bytes=memory_bytes, worker=worker, on_gpu=on_gpu)


def answer(line: str, do_unit: Callable[[IndexUnit], Sidecar]) -> dict[str, Any]:
    """Do the unit that a line describes; returns the answer."""
    try:
        return {"digest": do_unit(msgspec.convert(json.loads(line), IndexUnit)).digest, "ok": True}
    except EmbqError as error:
        return {"error": error_fields(error)}
    except MemoryError:
        full = ConfigError(
            "the machine has no memory left for this step of the index",
            next_step=f"give a smaller {memory_option()} or fewer --workers",
            code="out_of_memory",
        )
        return {"error": error_fields(full)}
    except Exception as error:  # noqa: BLE001 - process boundary
        with tempfile.NamedTemporaryFile("w", prefix="embq-bug-", suffix=".txt", delete=False) as report:
            traceback.print_exc(file=report)
        bug = EmbqError(
            f"embq has a bug, {error!r}; the details are in {report.name}", next_step="report it with that file"
        )
        return {"error": error_fields(bug)}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m embq.index.stages.process")
    parser.add_argument("--worker", default=f"pid-{os.getpid()}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", type=int, default=1 << 62)
    parser.add_argument("--gpu", action="store_true", help="use the first GPU that this process sees")
    options = parser.parse_args()
    die_with_parent()
    configure()
    leave_out_pandas()
    # What a library prints must not end up between answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    do_unit = partial(
        do, threads=options.threads, memory_bytes=options.memory, worker=options.worker, on_gpu=options.gpu
    )
    for line in sys.stdin:
        if (stage := json.loads(line).get("start")) is not None:
            with suppress(ImportError, KeyError):  # which the unit meets again, and answers
                import_module(STAGE_MODULES[stage])
            answers.write(STARTED.decode())
        else:
            answers.write(json.dumps(answer(line, do_unit)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
