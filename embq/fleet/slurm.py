"""The launcher of a fleet on a Slurm cluster: a job array, a machine for each task."""

from __future__ import annotations

import getpass
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from embq.app.doctor.check import Check
from embq.app.remote.slurm import srun
from embq.core.errors import UsageError
from embq.core.process.children import python
from embq.core.settings import child_environment
from embq.fleet.launcher import GRACE_S, FleetMember, answer_in, called, late, log_end, rows_of
from embq.fleet.member import fleet_folder, remove_files

NEEDS = "call embq fleet on a login node of the cluster, with Slurm's commands on PATH"
WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")
RUNS = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING")
MOST_BYTES = 128_000
"""Of one variable of an environment (MAX_ARG_STRLEN of Linux): some 600 machines."""
END_S = 120.0
"""From scancel to the end of a job: Slurm's KillWait is 30 s by default, and nodes clean up behind a job."""

_JOB = re.compile(r"(?P<job>[0-9]{1,12}_(?P<task>[0-9]{1,9}))\|(?P<state>[A-Z_]{1,32})\|(?P<place>.{0,1000})")
"""A line of squeue."""

SCRIPT = """#!/bin/bash
machine=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" <<< "$EMBQ_FLEET_MACHINES")
order="$EMBQ_FLEET"$'\\n'"$machine"
unset EMBQ_FLEET EMBQ_FLEET_MACHINES
# srun takes this from sbatch by itself only before Slurm 22.05.
[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
exec {srun} <<< "$order"
"""
"""The batch script. Secrets come in its environment, which sbatch hands on and only root and Slurm can read."""


class SlurmLauncher:
    """Workers as tasks of job arrays; a task that is queued again begins as a new worker. See `Launcher`.

    Args:
        options: of sbatch, such as the partition.
        executable: Python with embq on the nodes.
    """

    def __init__(self, fleet: str, options: Sequence[str], executable: str) -> None:
        self._fleet = fleet
        self._options = options
        self._python = executable

    def start(self, members: Sequence[FleetMember]) -> Iterable[Check]:
        """Submit an array of those that have no job."""
        active = self._active([member.name for member in members])
        lines = {_index(member.name): _own(member) for member in members if member.name not in active}
        if not lines:
            return ()
        # All in one variable of the environment; what is the same for all is sent once.
        each = "\n".join(lines.get(index, "") for index in range(max(lines) + 1))
        if len(each) > MOST_BYTES:
            many = f"{len(lines)} machines are too many for one fleet on Slurm"
            raise UsageError(many, next_step="start several, each with a --fleet-name")
        folder = fleet_folder(self._fleet)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = srun(python("-m", "embq.fleet.member", "run", executable=self._python), nodes=1, tasks=1)
        _called(
            [
                *("sbatch", "--job-name", f"embq-{self._fleet}", "--array", ",".join(map(str, lines))),
                *("--nodes", "1", "--ntasks-per-node", "1", "--requeue", "--open-mode", "append"),
                *("--output", f"{folder}/{self._fleet}-%a.log"),
                # At the time limit the steps get SIGTERM this early, and the workers drain.
                *("--signal", f"TERM@{round(members[0].drain_s + GRACE_S)}", *self._options),
            ],
            environment=child_environment(EMBQ_FLEET=members[0].order().strip(), EMBQ_FLEET_MACHINES=each),
            stdin=SCRIPT.format(srun=shlex.join(command)),
        )
        return ()

    def states(self, names: Sequence[str]) -> Mapping[str, Check]:
        """States of the jobs; Slurm forgets an ended one after its MinJobAge."""
        return {name: self._row(name, state, place) for name, (_, state, place) in self._jobs(names).items()}

    def drain(self, names: Sequence[str], drain_s: float) -> Iterable[Check]:
        """Signal the running jobs, cancel the waiting."""
        self._cancel(self._active(names, WAITS))
        self._cancel(self._active(names, RUNS), "--signal", "TERM")
        return late("job", lambda: self._active(names), drain_s + GRACE_S, "scancel")

    def remove(self, names: Sequence[str]) -> Iterator[Check]:
        """Cancel the jobs, and remove their logs."""
        self._cancel(self._active(names))
        yield from late("job", lambda: self._active(names), END_S, "scancel")
        remove_files(self._fleet, names)

    def _cancel(self, jobs: Mapping[str, str], *options: str) -> None:
        if jobs:
            _called(["scancel", *options, *jobs.values()])

    def _active(self, names: Sequence[str], states: Sequence[str] = (*WAITS, *RUNS)) -> dict[str, str]:
        """Machine -> id of its job, of those in such a state."""
        return {name: job for name, (job, state, _) in self._jobs(names).items() if state in states}

    def _jobs(self, names: Sequence[str]) -> dict[str, tuple[str, str, str]]:
        """Machine -> (id, state, nodes or reason) of its last job."""
        whose = ("--user", getpass.getuser(), "--name", f"embq-{self._fleet}", "--states", "all")
        form = ("--array", "--noheader", "--sort", "i", "--format", "%F_%K|%T|%R")
        jobs, by_index = {}, {str(_index(name)): name for name in names}
        for line in _called(["squeue", *whose, *form]).splitlines():
            # Ids become arguments of scancel, where one that begins with a hyphen would be an option.
            if (match := _JOB.fullmatch(line.strip())) and (name := by_index.get(match["task"])):
                jobs[name] = (match["job"], match["state"], match["place"])
        return jobs

    def _row(self, name: str, state: str, place: str) -> Check:
        if state in RUNS:
            return Check(name, "ok", f"{state.lower()} on {place}")
        if state in WAITS:
            return Check(name, "warn", f"{state.lower()}: {place}", "squeue shows when its job begins")
        log = fleet_folder(self._fleet) / f"{name}.log"
        if (answer := answer_in(log_end(log))) and answer.failed:
            return rows_of(name, answer)[0]
        return Check(name, "fail", f"its job is over: {state.lower()}", f"its log is {log}, of the node where it ran")


def _called(command: Sequence[str], *, environment: Mapping[str, str] | None = None, stdin: str = "") -> str:
    return called(command, needs=NEEDS, see="see `sinfo`, and --sbatch", environment=environment, stdin=stdin)


def _own(member: FleetMember) -> str:
    return json.dumps({"name": member.name, "url": member.url, "password": member.password})


def _index(name: str) -> int:
    """The task of the array that is the machine NAME-N."""
    return int(name.rpartition("-")[2])
