"""A batch script of Slurm that runs the job."""

from __future__ import annotations

import re
import shlex

from jaxstrategy.launch._environment import common
from jaxstrategy.launch._launch_options import Options
from jaxstrategy.processes._exit_codes import ExitCode, Restart
from jaxstrategy.processes._secret import VARIABLE as SECRET

_LONGEST_NAME = 64  # characters, to be read in `squeue`
_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={processes}
{gpus}# Add what your cluster wants: --partition, --account, --time, --cpus-per-task.
#SBATCH --requeue
# 2 minutes before the time is over, ask the processes to save.
#SBATCH --signal=TERM@120
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export JAXSTRATEGY_COORDINATOR={coordinator}
export JAXSTRATEGY_NUM_PROCESSES={total}
{environment}
# By this the processes know each other. Made here, it is in no file, on no command line
# and not in what Slurm keeps of a job; it travels in the environment of the tasks.
{secret}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export {secret}

attempt=${{SLURM_RESTART_COUNT:-0}}
restarts={max_restarts}
while true; do
  export JAXSTRATEGY_ATTEMPT=$attempt
  code=0
  # --label puts the rank before each line. --wait: once a task has ended, the others
  # have that many seconds to end, by themselves or at last by force.
  srun --label --wait=60 --export=ALL {srun_gpus}bash -c '
    export JAXSTRATEGY_PROCESS_ID=$SLURM_PROCID
    export JAXSTRATEGY_LOCAL_RANK=$SLURM_LOCALID
    exec "$@"' bash {command} || code=$?
  if {is_preempted}; then  # the state is saved: go on when there is room
    scontrol requeue "$SLURM_JOB_ID"
    exit "$code"
  fi
  if [ "$code" -eq 0 ] || {is_final} || [ "$restarts" -eq 0 ]; then
    exit "$code"
  fi
  restarts=$((restarts - 1))
  attempt=$((attempt + 1))
done
"""


def script(options: Options) -> str:
    """A batch script for `sbatch`, whose `srun` starts what the launcher would."""
    gpus = options.gpus_per_process
    return _SCRIPT.format(
        name=job_name(options.name),
        nodes=options.nodes,
        processes=options.processes,
        total=options.total,
        gpus=f"#SBATCH --gpus-per-task={gpus}\n" if gpus else "",
        srun_gpus=f"--gpus-per-task={gpus} " if gpus else "",
        secret=SECRET,
        coordinator=_coordinator(options),
        environment="".join(
            f"export {name}={shlex.quote(value)}\n"
            for name, value in common(options, {}).items()
        ),
        max_restarts=options.max_restarts,
        is_preempted=is_one_of(ExitCode.that_restart(Restart.UNCOUNTED)),
        is_final=is_one_of(ExitCode.that_restart(Restart.NEVER)),
        command=shlex.join(["python", *options.program]),
    )


def _coordinator(options: Options) -> str:
    if options.coordinator is not None:
        return shlex.quote(options.coordinator)
    # JAX's own rule for Slurm: jobs that share a node get different ports.
    return '"$first:$((61440 + SLURM_JOB_ID % 4096))"'


def is_one_of(codes: list[ExitCode]) -> str:
    """A condition of bash."""
    return " || ".join(f'[ "$code" -eq {code.value} ]' for code in codes)


def job_name(name: str) -> str:
    """`name` in letters that mean nothing to `sbatch`, which reads its own lines.

    >>> job_name("train v2\\n#SBATCH --uid=0"), job_name("☃")
    ('train-v2-SBATCH---uid-0', 'job')
    """
    letters = re.sub(r"[^A-Za-z0-9_.+-]+", "-", name)
    return letters.strip("-")[:_LONGEST_NAME].strip("-") or "job"
