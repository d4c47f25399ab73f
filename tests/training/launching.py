"""Starting `launched` as a verb would, in a process of its own that a test can signal and kill."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from tests.support.waiting import has_ended, wait_until

HERE = Path(__file__).resolve().parent


def environment(**changes: str) -> dict[str, str]:
    """In which `launched` is found; without what the test's own user may have set."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    }
    paths = [str(HERE.parents[1]), str(HERE), kept.get("PYTHONPATH", "")]
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in paths if path), **changes}


@contextmanager
def started(*arguments: str, **changes: str) -> Iterator[subprocess.Popen[str]]:
    """The command line below, with pipes; killed where a test leaves it before its end."""
    command, pipe = [sys.executable, __file__, *arguments], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment(**changes)) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def finished(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """The command line below, to its end."""
    with started(*arguments, **changes) as process:
        out, errors = process.communicate(timeout=200)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def ranks(folder: Path, world: int) -> dict[int, list[str]]:
    """Reports of the processes, once all have reported: pid, world, sum, threads."""
    names = [folder / str(rank) for rank in range(world)]
    wait_until(lambda: all(name.exists() for name in names))
    return {rank: name.read_text(encoding="utf-8").split(" ") for rank, name in enumerate(names)}


def alive(pids: list[int]) -> list[int]:
    """The processes that still run; a zombie does not."""
    return [pid for pid in pids if not has_ended(pid)]


def descendants(pid: int) -> list[int]:
    """A process and all that come from it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [pid, *(found for child in children for found in descendants(int(child)))]


if __name__ == "__main__":
    from embq.app.cli.entry_point import show_error
    from embq.core.errors import EmbqError
    from embq.training.launch.launch_options import Where, launch_options
    from embq.training.launch.launcher import launch

    @click.command()
    @launch_options
    @click.option("--input", "inputs", multiple=True)
    @click.argument("rest", nargs=-1)
    def go(where: Where, inputs: tuple[str, ...], rest: tuple[str, ...]) -> int:
        """Launch `launched`."""
        return launch("launched", rest, where, inputs=inputs)

    try:
        sys.exit(go.main(standalone_mode=False))
    except EmbqError as error:
        show_error(error)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
