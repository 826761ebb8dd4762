"""A batch script of Slurm for a script with workers and parameter servers."""

from __future__ import annotations

import shlex

from jaxstrategy.launch import _job_tasks
from jaxstrategy.launch._environment import of_cache
from jaxstrategy.launch._job_tasks import JobTask
from jaxstrategy.launch._launch_options import Options
from jaxstrategy.launch._slurm_script import is_one_of, job_name
from jaxstrategy.processes._exit_codes import ExitCode, Restart
from jaxstrategy.processes._secret import VARIABLE as SECRET

_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks={total}
{gpus}# Add what your cluster wants: --partition, --account, --time, --cpus-per-task.
#SBATCH --requeue
# 2 minutes before the time is over, ask the script to save.
#SBATCH --signal=B:TERM@120
set -euo pipefail

# By this the processes know each other. Made here, it is in no file, on no command line
# and not in what Slurm keeps of a job; it travels in the environment of the tasks.
{secret}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export {secret}
export PYTHONUNBUFFERED=1

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
  if {is_preempted}; then  # the state is saved: go on when there is room
    scontrol requeue "$SLURM_JOB_ID"
    exit "$code"
  fi
  if [ "$code" -eq 0 ] || {is_final} || [ "$restarts" -eq 0 ]; then
    exit "$code"
  fi
  restarts=$((restarts - 1))
done
"""


def role_script(options: Options) -> str:
    """A batch script for `sbatch`, whose `srun` starts what the launcher would."""
    tasks = _job_tasks.job_tasks(options)
    gpus = (options.gpus_per_process or 0) * (options.workers or 0)
    served = [task for task in tasks if task.job != "chief" and task.index == 0]
    counts = {task.job: _count(tasks, task.job) for task in served}

    def called(function: str) -> str:
        return "\n".join(
            f"{function} {task.job} {counts[task.job]} {_srun(options, task)}"
            for task in served
        )

    return _SCRIPT.format(
        name=job_name(options.name),
        nodes=options.nodes,
        total=len(tasks),
        gpus=f"#SBATCH --gpus={gpus}\n" if gpus else "",
        secret=SECRET,
        place=called("place"),
        run=called("run"),
        chief=_srun(options, JobTask("chief", 0)),
        max_restarts=options.max_restarts,
        is_preempted=is_one_of(ExitCode.that_restart(Restart.UNCOUNTED)),
        is_final=is_one_of(ExitCode.that_restart(Restart.NEVER)),
        command=shlex.join(["python", *options.program]),
    )


def _count(tasks: list[JobTask], job: str) -> int:
    return sum(task.job == job for task in tasks)


def _srun(options: Options, task: JobTask) -> str:
    """Options of `srun` for the tasks of a job."""
    given = []
    if task.job == "worker" and options.gpus_per_process:
        given.append(f"--gpus-per-task={options.gpus_per_process}")
    variables = _job_tasks.simulated(options, task) | of_cache(options)
    exported = ",".join(["ALL", *(f"{k}={v}" for k, v in variables.items())])
    return " ".join([*given, f"--export={exported}"])
