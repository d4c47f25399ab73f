"""Sums over all processes, and ends in whatever way a test asks for."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from embq.core.errors import InputError


def main(arguments: Sequence[str]) -> int:
    """Write `<rank>` into the folder; its content is "pid world sum threads"."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sum", action="store_true", help="over all processes, by gloo")
    parser.add_argument("--keep", action="store_true", help="the group in which they sum")
    parser.add_argument("--fail", type=int, nargs="*", default=[], help="ranks that raise an error of embq's")
    parser.add_argument("--once", action="store_true", help="let them raise it at the first start only")
    parser.add_argument("--crash", type=int, nargs="*", default=[], help="ranks that raise any other")
    parser.add_argument("--die", type=int, nargs="*", default=[], help="ranks that SIGKILL ends")
    parser.add_argument("--wait", action="store_true", help="stay until a file `go` is there")
    parser.add_argument("--stubborn", action="store_true", help="do not heed SIGTERM and SIGINT")
    parser.add_argument("--status", type=int, default=0)
    given = parser.parse_args(arguments)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if given.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    failed = given.folder / "failed"
    again = given.once and failed.exists()  # asked before the sum, behind which another process may fail at once
    total = summed(rank, keep=given.keep) if given.sum else 0
    told = f"{os.getpid()} {world} {total} {os.environ.get('OMP_NUM_THREADS', '')}"
    (given.folder / f".{rank}").write_text(told, encoding="utf-8")
    (given.folder / f".{rank}").rename(given.folder / str(rank))
    sys.stdout.write(f"here is {rank} of {world}\n")
    sys.stdout.flush()
    sys.stderr.write(f"warning of {rank}\n")
    if again:
        (given.folder / "go").touch()
    if rank in given.fail and not again:
        failed.touch()
        raise InputError(f"process {rank} cannot read it", next_step="mend it", code="not_there")
    if rank in given.crash:
        raise RuntimeError("never heard of")
    if rank in given.die:
        os.kill(os.getpid(), signal.SIGKILL)
    while given.wait and not (given.folder / "go").exists():
        time.sleep(0.02)
    return given.status


def summed(rank: int, *, keep: bool) -> int:
    """The sum of rank + 1 over all processes.

    Args:
        keep: the group of the processes, and the store in which they met.
    """
    import torch
    from torch import distributed

    mine = not distributed.is_initialized()
    if mine:
        distributed.init_process_group("gloo")
    value = torch.tensor([rank + 1])
    distributed.all_reduce(value)
    if mine and not keep:
        distributed.destroy_process_group()
    return int(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
