"""Starts a training where it was asked for, and gives its outcome."""

from __future__ import annotations

from collections.abc import Sequence

from training.launch.options import Where


def launch(module: str, arguments: Sequence[str], where: Where, *, inputs: Sequence[str] = ()) -> int:
    """Run `main(arguments)` of `module.__main__` in every process of a training.

    Args:
        module: such as "training.classify".
        inputs: folders, files and URLs that every host has to reach; checked before a start on other hosts.

    Returns the exit status of the training: 0, or 3 where samples failed. Raises the error that one of its processes
    raised, with its own exit status; ConfigError where the devices are not there; KeyboardInterrupt after it was asked
    to stop and has.
    """
    if where.launcher == "local":
        from training.launch.local import launch_local

        return launch_local(module, arguments, where)
    if where.launcher == "ssh":
        from training.launch.ssh import launch_ssh

        return launch_ssh(module, arguments, where, inputs)
    from training.launch.ray import launch_ray

    return launch_ray(module, arguments, where)
