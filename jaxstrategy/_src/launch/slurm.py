"""Batch scripts of Slurm that run the job: `script`."""

from __future__ import annotations

import re
import shlex

from jaxstrategy._src.launch.options import Options
from jaxstrategy._src.launch.tasks import (
    ALWAYS_AGAIN,
    NEVER_AGAIN,
    JobTask,
    job_tasks,
)
from jaxstrategy._src.processes.exit_codes import ExitCode
from jaxstrategy._src.processes.secret import VARIABLE as SECRET

_MAKE_SECRET = f"""\
# By this the processes know each other. Made here, it is in no file, on no command line
# and not in what Slurm keeps of a job; it travels in the environment of the tasks.
{SECRET}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export {SECRET}
"""

# After the script, whose exit code is `$code`.
_END = """\
  if {is_preempted}; then  # the state is saved: go on when there is room
    scontrol requeue "$SLURM_JOB_ID"
    exit "$code"
  fi
  if [ "$code" -eq 0 ] || {is_final} || [ "$restarts" -eq 0 ]; then
    exit "$code"
  fi
  restarts=$((restarts - 1))
"""

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
{make_secret}
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
{end}  attempt=$((attempt + 1))
done
"""

_ROLES = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks={total}
{gpus}# Add what your cluster wants: --partition, --account, --time, --cpus-per-task.
#SBATCH --requeue
# 2 minutes before the time is over, ask the script to save.
#SBATCH --signal=B:TERM@120
set -euo pipefail

{make_secret}
port=$((20000 + SLURM_JOB_ID % 20000))
cluster="\\"chief\\": [\\"$SLURMD_NODENAME:$port\\"]"
others=()

place() {{  # job, number of its tasks, options of srun: the addresses that they get
  local job=$1 count=$2 list="" host
  shift 2
  while read -r host; do
    port=$((port + 1))
    list+="${{list:+, }}\\"$host:$port\\""
  done < <(srun --overlap --label --ntasks="$count" "$@" \\
    bash -c 'echo "$SLURMD_NODENAME"' | sort -n | sed 's/^ *[0-9]*: *//')
  cluster+=", \\"$job\\": [$list]"
}}

run() {{  # job, number of its tasks, options of srun: they run until the script ends
  local job=$1 count=$2
  shift 2
  CLUSTER="{{$cluster}}" JOB=$job srun --overlap --label --ntasks="$count" "$@" \\
    bash -c '
    task="{{\\"type\\": \\"$JOB\\", \\"index\\": $SLURM_PROCID}}"
    export TF_CONFIG="{{\\"cluster\\": $CLUSTER, \\"task\\": $task}}"
    [ "$JOB" = evaluator ] || set -- python -m jaxstrategy.parameter_servers
    while true; do  # whoever ends is started again
      code=0; "$@" || code=$?
      if [ "$JOB" = evaluator ] && [ "$code" -eq 0 ]; then sleep infinity; fi
      sleep 1
    done' bash {command} &
  others+=($!)
}}

{place}
{run}
trap '[ -z "${{chief:-}}" ] || kill -TERM "$chief"' TERM
trap 'kill "${{others[@]}}" 2> /dev/null || true' EXIT
task="{{\\"type\\": \\"chief\\", \\"index\\": 0}}"
export TF_CONFIG="{{\\"cluster\\": {{$cluster}}, \\"task\\": $task}}"
restarts={max_restarts}
while true; do
  srun --overlap --label --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" \\
    {chief} {command} &
  chief=$! code=0
  while kill -0 "$chief" 2> /dev/null; do  # a signal ends `wait`, and not the script
    code=0; wait "$chief" || code=$?
  done
{end}done
"""


def script(options: Options) -> str:
    """A batch script for `sbatch`, whose `srun` starts what the launcher would."""

    def one_of(codes: list[ExitCode]) -> str:
        return " || ".join(f'[ "$code" -eq {code.value} ]' for code in codes)

    parts = {
        "name": job_name(options.name),
        "nodes": options.nodes,
        "make_secret": _MAKE_SECRET,
        "max_restarts": options.max_restarts,
        "command": shlex.join(["python", *options.program]),
        "end": _END.format(
            is_preempted=one_of(ALWAYS_AGAIN), is_final=one_of(NEVER_AGAIN)
        ),
    }
    if options.workers is not None:
        return _role_script(options, parts)
    gpus = options.gpus_per_process
    coordinator = options.coordinator
    return _SCRIPT.format(
        **parts,
        processes=options.processes,
        total=options.total,
        gpus=f"#SBATCH --gpus-per-task={gpus}\n" if gpus else "",
        srun_gpus=f"--gpus-per-task={gpus} " if gpus else "",
        # JAX's own rule for Slurm: jobs that share a node get different ports.
        coordinator='"$first:$((61440 + SLURM_JOB_ID % 4096))"'
        if coordinator is None
        else shlex.quote(coordinator),
        environment="".join(
            f"export {name}={shlex.quote(value)}\n"
            for name, value in JobTask("process", 0).variables(options).items()
        ),
    )


def _role_script(options: Options, parts: dict[str, object]) -> str:
    jobs = job_tasks(options)
    gpus = (options.gpus_per_process or 0) * (options.workers or 0)

    def srun(task: JobTask) -> str:
        """Options of `srun` for the tasks of a job."""
        own = task.gpus(options)
        variables = task.variables(options).items()
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in variables)])
        return f"{f'--gpus-per-task={own} ' if own else ''}--export={exported}"

    def called(function: str) -> str:
        return "\n".join(
            f"{function} {job} {len(tasks)} {srun(tasks[0])}"
            for job, tasks in jobs.items()
            if job != "chief"
        )

    return _ROLES.format(
        **parts,
        total=sum(map(len, jobs.values())),
        gpus=f"#SBATCH --gpus={gpus}\n" if gpus else "",
        place=called("place"),
        run=called("run"),
        chief=srun(jobs["chief"][0]),
    )


def job_name(name: str) -> str:
    """`name` in letters that mean nothing to `sbatch`, which reads its own lines."""
    letters = re.sub(r"[^A-Za-z0-9_.+-]+", "-", name)
    return letters.strip("-")[:_LONGEST_NAME].strip("-") or "job"
