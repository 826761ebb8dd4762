"""JobSets of Kubernetes that run the job: `manifest`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from jaxstrategy._src.cluster.resolvers.cluster_spec import host_and_port
from jaxstrategy._src.launch.options import Options
from jaxstrategy._src.launch.tasks import (
    ALWAYS_AGAIN,
    NEVER_AGAIN,
    JobTask,
    job_tasks,
    tf_config,
)
from jaxstrategy._src.processes.secret import HOW_TO_MAKE_ONE, VARIABLE as SECRET

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
# maxRestarts times; after exit code {never} starting again would not mend it, and
# after {always} the state is saved, so that a new pod goes on.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: "{name}"
spec:
{success}  failurePolicy:
    maxRestarts: {max_restarts}
    rules:
    - name: no-restart
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
{jobs}"""

# The job is over when the script is.
_SUCCESS = """\
  successPolicy:
    operator: All
    targetReplicatedJobs: [chief]
"""

_JOB = """\
  - name: {job}
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        completions: {count}
        parallelism: {count}
        {failures}
        template:
          spec:
            {pod}
            containers:
            - name: main
              image: IMAGE
              command: [{command}]
              ports:
              - containerPort: {port}
{resources}              env:
{environment}"""

_ALL_AGAIN = """backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes: {{operator: In, values: [{never}]}}
          - action: Ignore
            onExitCodes: {{operator: In, values: [{always}]}}"""
_ITSELF_AGAIN = "backoffLimit: 1000000"

# With the time to save in when a pod is moved.
_RUN_ONCE = """restartPolicy: Never
            terminationGracePeriodSeconds: 120"""
_RUN_AGAIN = """restartPolicy: OnFailure
            terminationGracePeriodSeconds: 10"""

_RESOURCES = """\
              resources:
                limits:
                  nvidia.com/gpu: {gpus}
"""


def manifest(options: Options) -> str:
    """A JobSet in YAML, with a pod for each process of the job."""
    name = dns_name(options.name)
    kinds = job_tasks(options)
    every = [task for tasks in kinds.values() for task in tasks]
    hosts = {t: f"{name}-{t.job}-0-{t.index}.{name}:{_PORT}" for t in every}
    return _JOBSET.format(
        how_to_make_one=HOW_TO_MAKE_ONE,
        name=name,
        never=_listed(NEVER_AGAIN),
        always=_listed(ALWAYS_AGAIN),
        success="" if options.workers is None else _SUCCESS,
        max_restarts=options.max_restarts,
        jobs="".join(_job(options, name, hosts, tasks) for tasks in kinds.values()),
    )


def _job(
    options: Options, name: str, hosts: dict[JobTask, str], tasks: Sequence[JobTask]
) -> str:
    """The pods of one kind."""
    task, port = tasks[0], _PORT
    variables = task.variables(options)
    secret = f'secretKeyRef: {{name: "{name}-cluster-secret", key: secret}}'
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
            "TF_CONFIG": f"value: {_quoted(config)}",
        }
    environment |= {key: _value(text) for key, text in variables.items()}
    environment[SECRET] = f"valueFrom:\n                  {secret}"
    # Others than the script are started again by themselves, whenever they end.
    is_counted = task.job in ("process", "chief")
    gpus = task.gpus(options)
    return _JOB.format(
        job=task.job,
        count=len(tasks),
        failures=_ALL_AGAIN.format(
            never=_listed(NEVER_AGAIN), always=_listed(ALWAYS_AGAIN)
        )
        if is_counted
        else _ITSELF_AGAIN,
        pod=_RUN_ONCE if is_counted else _RUN_AGAIN,
        command=", ".join(map(_literal, ("python", *task.program(options)))),
        port=port,
        resources=_RESOURCES.format(gpus=gpus) if gpus else "",
        environment="".join(
            f"              - name: {key}\n                {text}\n"
            for key, text in environment.items()
        ),
    )


def _value(text: str) -> str:
    return f"value: {_literal(text)}"


def _annotation(name: str) -> str:
    path = f"metadata.annotations['{name}']"
    return f"valueFrom:\n                  fieldRef: {{fieldPath: {_quoted(path)}}}"


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


def _listed(codes: Iterable[int]) -> str:
    return ", ".join(str(int(code)) for code in codes)


def dns_name(name: str) -> str:
    """`name` in the letters that Kubernetes allows."""
    letters = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not letters[:1].isalpha():
        letters = f"job-{letters}"
    return letters[:_LONGEST_NAME].strip("-")
