"""Commands on the nodes of a Slurm cluster."""

from __future__ import annotations

from collections.abc import Sequence


def srun(command: Sequence[str], *, nodes: int, tasks: int, cpus: int | None = None) -> list[str]:
    """Slurm's srun of a command.

    Args:
        tasks: on each node.
        cpus: cores of each task; None leaves that to the partition.
    """
    options = ["srun", "--nodes", str(nodes), "--ntasks-per-node", str(tasks)]
    return [*options, *(["--cpus-per-task", str(cpus)] if cpus else []), *command]
