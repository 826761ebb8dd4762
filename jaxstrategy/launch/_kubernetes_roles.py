"""A JobSet of Kubernetes for a script with workers and parameter servers."""

from __future__ import annotations

from collections import Counter

from jaxstrategy.launch import _job_tasks
from jaxstrategy.launch._environment import of_cache
from jaxstrategy.launch._job_tasks import JobTask
from jaxstrategy.launch._kubernetes_manifest import (
    CONSTANT,
    FROM_FIELD,
    FROM_SECRET,
    PORT,
    RESOURCES,
    dns_name,
    listed_codes,
    literal,
    quoted,
    secret_of,
)
from jaxstrategy.launch._launch_options import Options
from jaxstrategy.processes._exit_codes import ExitCode, Restart
from jaxstrategy.processes._secret import HOW_TO_MAKE_ONE
from jaxstrategy.processes._secret import VARIABLE as SECRET

_MANIFEST = """\
# Needs the JobSet controller (https://jobset.sigs.k8s.io). One pod is one process.
# Put your image where it says IMAGE. Make the secret by which the processes know each
# other, once, so that it is in no file and on no command line:
#   {make_secret} |
#     kubectl create secret generic {secret_name} --from-file=secret=/dev/stdin
# Then `kubectl apply -f` this file.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {quoted_name}
spec:
  successPolicy:  # the job is over when the script is
    operator: All
    targetReplicatedJobs: [chief]
  failurePolicy:
    maxRestarts: {max_restarts}  # a script that fails starts all of them again
    rules:
    - name: no-restart
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
{jobs}"""

_JOB = """\
  - name: {job}
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        completions: {count}
        parallelism: {count}
{failures}        template:
          spec:
            restartPolicy: {restart}
            terminationGracePeriodSeconds: {grace}
            containers:
            - name: main
              image: IMAGE
              command: {command}
              env:
{environment}
              ports:
              - containerPort: {port}
{resources}"""

_SCRIPT_FAILURES = """\
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob  # exit code {no_restart}: starting again would not mend it
            onExitCodes:
              operator: In
              values: [{no_restart}]
          - action: Ignore  # exit code {preempted}: saved, so a new pod goes on
            onExitCodes:
              operator: In
              values: [{preempted}]
"""
_OTHER_FAILURES = """\
        backoffLimit: 1000000  # whoever ends is started again, by itself
"""


def role_manifest(options: Options) -> str:
    """A JobSet in YAML, with a pod for the script and for each that it calls.

    Raises:
      ValueError: an argument is no text, which YAML cannot say.
    """
    name = dns_name(options.name)
    tasks = _job_tasks.job_tasks(options)
    hosts = {task: f"{name}-{task.job}-0-{task.index}.{name}:{PORT}" for task in tasks}
    counts = Counter(task.job for task in tasks)
    first = [task for task in tasks if task.index == 0]
    return _MANIFEST.format(
        make_secret=HOW_TO_MAKE_ONE,
        secret_name=secret_of(name),
        quoted_name=quoted(name),
        max_restarts=options.max_restarts,
        jobs="".join(
            _job(options, task, counts[task.job], name, hosts) for task in first
        ),
    )


def _job(
    options: Options, task: JobTask, count: int, name: str, hosts: dict[JobTask, str]
) -> str:
    is_chief = task.job == "chief"
    gpus = options.gpus_per_process if task.job == "worker" else None
    program = task.command(options)[1:]
    return _JOB.format(
        job=task.job,
        count=count,
        failures=_failures() if is_chief else _OTHER_FAILURES,
        restart="Never" if is_chief else "OnFailure",
        grace=120 if is_chief else 10,  # to save in when the pod is moved
        command=f"[{', '.join(literal(word) for word in ('python', *program))}]",
        environment="\n".join(_environment(options, task, name, hosts)),
        port=PORT,
        resources=RESOURCES.format(gpus=gpus) if gpus else "",
    )


def _failures() -> str:
    return _SCRIPT_FAILURES.format(
        preempted=listed_codes(ExitCode.that_restart(Restart.UNCOUNTED)),
        no_restart=listed_codes(ExitCode.that_restart(Restart.NEVER)),
    )


def _environment(
    options: Options, task: JobTask, name: str, hosts: dict[JobTask, str]
) -> list[str]:
    constant = {"PYTHONUNBUFFERED": "1", **of_cache(options)}
    constant |= _job_tasks.simulated(options, task)
    index = "batch.kubernetes.io/job-completion-index"
    # Kubernetes puts the index in; it is no text there.
    config = _job_tasks.tf_config(hosts, task).replace(
        f'"index": {task.index}}}', '"index": $(INDEX)}'
    )
    return [
        *(CONSTANT.format(name=k, value=literal(v)) for k, v in constant.items()),
        FROM_FIELD.format(name="INDEX", annotation=index),
        CONSTANT.format(name="TF_CONFIG", value=quoted(config)),
        FROM_SECRET.format(name=SECRET, secret=quoted(secret_of(name))),
    ]
