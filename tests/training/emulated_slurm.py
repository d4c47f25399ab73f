"""Slurm's commands as far as a job of one node needs them: tasks with ranks, a queue that returns at once."""

from __future__ import annotations

from pathlib import Path

_SBATCH = """#!/bin/bash
# A job starts when it likes; sbatch only tells its number.
if [ -e "{folder}/held" ]; then echo "$PWD" >> "{folder}/held"; echo "Submitted batch job 1"; exit 0; fi
export SLURM_JOB_ID=1 SLURM_JOB_NODELIST=localhost
nohup bash "$1" > job.out 2> job.err < /dev/null &
echo "Submitted batch job 1"
"""
_SCONTROL = """#!/bin/bash
[ "$1 $2" = "show hostnames" ] && echo localhost
"""
_SRUN = """#!/bin/bash
tasks=1
while [[ "$1" == --* ]]; do
    case "$1" in
        --ntasks-per-node=*) tasks="${1#*=}"; shift ;;
        --ntasks-per-node) tasks="$2"; shift 2 ;;
        --*=*) shift ;;
        *) shift 2 ;;
    esac
done
ids=()
for ((i = 0; i < tasks; i++)); do
    SLURM_NTASKS=$tasks SLURM_PROCID=$i SLURM_LOCALID=$i OMP_NUM_THREADS=1 "$@" &
    ids+=($!)
done
status=0
for id in "${ids[@]}"; do wait "$id" || status=$?; done
exit $status
"""


def commands(folder: Path) -> Path:
    """Write sbatch, srun and scontrol to a folder, to be put on PATH; a file `held` in it holds all jobs back."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("sbatch", _SBATCH.replace("{folder}", str(folder))), ("srun", _SRUN), ("scontrol", _SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder
