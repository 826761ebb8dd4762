"""What runs a job on clusters: batch scripts of Slurm and JobSets of Kubernetes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any, TypeAlias

from jaxstrategy._src.cluster.resolvers.cluster_spec import host_and_port
from jaxstrategy._src.launch.options import (
    JobTask,
    Options,
    job_tasks,
    tf_config,
)
from jaxstrategy._src.processes.exit_codes import ExitCode
from jaxstrategy._src.processes.secret import HOW_TO_MAKE_ONE, VARIABLE as SECRET

Yaml: TypeAlias = Any

# Slurm.

_MAKE_SECRET = f"""\
# By this the processes know each other. Made here, it is in no file, on no command line
# and not in what Slurm keeps of a job; it travels in the environment of the tasks.
{SECRET}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export {SECRET}
"""

# After the script, whose exit code is `$code`.
_END = """\
  if [ "$code" -eq {always:d} ]; then  # the state is saved: go on when there is room
    scontrol requeue "$SLURM_JOB_ID"
    exit "$code"
  fi
  if [ "$code" -eq 0 ] || [ "$code" -eq {never:d} ] || [ "$restarts" -eq 0 ]; then
    exit "$code"
  fi
  restarts=$((restarts - 1))
"""

_LONGEST_JOB_NAME = 64  # characters, to be read in `squeue`
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
    parts = {
        "name": job_name(options.name),
        "nodes": options.nodes,
        "make_secret": _MAKE_SECRET,
        "max_restarts": options.max_restarts,
        "command": shlex.join(["python", *options.program]),
        "end": _END.format(always=ExitCode.PREEMPTED, never=ExitCode.NO_RESTART),
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
    return letters.strip("-")[:_LONGEST_JOB_NAME].strip("-") or "job"


# Kubernetes.

_PORT = 2222
# Characters; Kubernetes puts up to 22 behind it, and has room for 63.
_LONGEST_NAME = 40
_INDEX = "batch.kubernetes.io/job-completion-index"

_JOBSET = """\
# Needs the JobSet controller (https://jobset.sigs.k8s.io). One pod is one process.
# Put your image where it says IMAGE. Make the secret by which the processes know each
# other, once, so that it is in no file and on no command line:
#   {how_to_make_one} |
#     kubectl create secret generic {name}-cluster-secret --from-file=secret=/dev/stdin
# Then `kubectl apply -f` this file. A pod that fails starts all of them again, up to
# maxRestarts times; after exit code {never:d} starting again would not mend it, and
# after {always:d} the state is saved, so that a new pod goes on.{manifest}
"""


def manifest(options: Options) -> str:
    """A JobSet in YAML, with a pod for each process of the job."""
    name = dns_name(options.name)
    kinds = job_tasks(options)
    every = [task for tasks in kinds.values() for task in tasks]
    hosts = {t: f"{name}-{t.job}-0-{t.index}.{name}:{_PORT}" for t in every}
    fails = {"name": "no-restart", "action": "FailJobSet"}
    fails["onJobFailureReasons"] = "[PodFailurePolicy]"
    spec: dict[str, Yaml] = {
        "failurePolicy": {"maxRestarts": options.max_restarts, "rules": [fails]},
        "replicatedJobs": [_job(options, name, hosts, of) for of in kinds.values()],
    }
    if options.workers is not None:  # it is over when the script is
        spec["successPolicy"] = {"operator": "All", "targetReplicatedJobs": "[chief]"}
    head = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return _JOBSET.format(
        how_to_make_one=HOW_TO_MAKE_ONE,
        name=name,
        never=ExitCode.NO_RESTART,
        always=ExitCode.PREEMPTED,
        manifest=_yaml({**head, "metadata": {"name": _quoted(name)}, "spec": spec}),
    )


def _job(
    options: Options, name: str, hosts: dict[JobTask, str], tasks: Sequence[JobTask]
) -> Yaml:
    """The pods of one kind."""
    task, port = tasks[0], _PORT
    if task.job == "process":
        coordinator = options.coordinator or hosts[task]
        port = host_and_port(coordinator)[1]
        environment = {
            "JAXSTRATEGY_COORDINATOR": _value(coordinator),
            "JAXSTRATEGY_NUM_PROCESSES": _value(str(len(tasks))),
            "JAXSTRATEGY_LOCAL_RANK": _value("0"),
            "JAXSTRATEGY_PROCESS_ID": _annotation(_INDEX),
            "JAXSTRATEGY_ATTEMPT": _annotation("jobset.sigs.k8s.io/restart-attempt"),
        }
    else:
        # Kubernetes puts the index in; it is no text there.
        config = tf_config(hosts, task).replace('"index": 0}', '"index": $(INDEX)}')
        environment = {
            "INDEX": _annotation(_INDEX),
            "TF_CONFIG": {"value": _quoted(config)},
        }
    variables = task.variables(options).items()
    environment |= {key: _value(text) for key, text in variables}
    key = {"name": _quoted(f"{name}-cluster-secret"), "key": "secret"}
    environment[SECRET] = {"valueFrom": {"secretKeyRef": key}}
    command = map(_literal, ("python", *task.program(options)))
    container: dict[str, Yaml] = {
        "name": "main",
        "image": "IMAGE",
        "command": f"[{', '.join(command)}]",
        "ports": [{"containerPort": port}],
        "env": [{"name": key, **source} for key, source in environment.items()],
    }
    if gpus := task.gpus(options):
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    job: dict[str, Yaml] = {
        "completionMode": "Indexed",
        "completions": len(tasks),
        "parallelism": len(tasks),
    }
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 120}
    if task.job in ("process", "chief"):
        actions = {"FailJob": ExitCode.NO_RESTART, "Ignore": ExitCode.PREEMPTED}
        rules = [
            {"action": action, "onExitCodes": f"{{operator: In, values: [{code:d}]}}"}
            for action, code in actions.items()
        ]
        job |= {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}
    else:  # it is started again by itself, whenever it ends
        job["backoffLimit"] = 1000000
        pod = {"restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 10}
    job["template"] = {"spec": {**pod, "containers": [container]}}
    return {"name": task.job, "replicas": 1, "template": {"spec": job}}


def _yaml(value: Yaml, line: str = "\n") -> str:
    """It in YAML, where text stands as it is; `line` begins a line."""
    deeper = f"{line}  "
    if isinstance(value, dict):
        return "".join(f"{line}{k}:{_yaml(each, deeper)}" for k, each in value.items())
    if isinstance(value, list):
        return "".join(f"{line}- {_yaml(each, deeper).lstrip()}" for each in value)
    return f" {value}"


def _value(text: str) -> Yaml:
    return {"value": _literal(text)}


def _annotation(name: str) -> Yaml:
    path = _quoted(f"metadata.annotations['{name}']")
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def _literal(text: str) -> str:
    """A string in which Kubernetes finds no variables."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{text!r} has bytes that are not UTF-8, which a manifest cannot carry. "
            "Rename the file, or give the argument in another way"
        ) from None
    # It replaces `$(NAME)` in commands and environments, and takes `$$` for `$`.
    return _quoted(text.replace("$", "$$"))


def _quoted(text: str) -> str:
    """Text that stays text in YAML, whatever it is."""
    plain = set(map(chr, range(0x20, 0x7F))) - {'"', "\\"}
    escaped = (c if c in plain else rf"\U{ord(c):08x}" for c in text)
    return f'"{"".join(escaped)}"'


def dns_name(name: str) -> str:
    """`name` in the letters that Kubernetes allows."""
    letters = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not letters[:1].isalpha():
        letters = f"job-{letters}"
    return letters[:_LONGEST_NAME].strip("-")
