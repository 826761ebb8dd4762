"""JobSets of Kubernetes that run the job: `manifest`."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from typing import Any, TypeAlias

from jaxstrategy._src.cluster.resolvers.cluster_spec import host_and_port
from jaxstrategy._src.errors import MissingExtraError
from jaxstrategy._src.launch.local import (
    ALWAYS_AGAIN,
    NEVER_AGAIN,
    common,
    of_cache,
)
from jaxstrategy._src.launch.options import Options
from jaxstrategy._src.launch.roles import (
    JobTask,
    job_tasks,
    simulated,
    tf_config,
)
from jaxstrategy._src.processes.exit_codes import ExitCode
from jaxstrategy._src.processes.secret import HOW_TO_MAKE_ONE, VARIABLE as SECRET

Yaml: TypeAlias = dict[str, Any]

_PORT = 2222
# Characters; Kubernetes puts up to 22 behind it, and has room for 63.
_LONGEST_NAME = 40
_INDEX = "batch.kubernetes.io/job-completion-index"
_HEAD = f"""\
# Needs the JobSet controller (https://jobset.sigs.k8s.io). One pod is one process.
# Put your image where it says IMAGE. Make the secret by which the processes know each
# other, once, so that it is in no file and on no command line:
#   {HOW_TO_MAKE_ONE} |
#     kubectl create secret generic {{secret}} --from-file=secret=/dev/stdin
# Then `kubectl apply -f` this file. A pod that fails starts all of them again, up to
# maxRestarts times; after exit code {{never}} starting again would not mend it, and
# after {{always}} the state is saved, so that a new pod goes on.
"""


class _Quoted(str):
    """Text that stays text in YAML, whatever it is."""


def manifest(options: Options) -> str:
    """A JobSet in YAML, with a pod for each process of the job."""
    name = dns_name(options.name)
    spec: Yaml = {
        "failurePolicy": {
            "maxRestarts": options.max_restarts,
            "rules": [
                {
                    "name": "no-restart",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        }
    }
    if options.workers is None:
        spec["replicatedJobs"] = [_processes(options, name)]
    else:
        # The job is over when the script is.
        success = {"operator": "All", "targetReplicatedJobs": ["chief"]}
        spec = {"successPolicy": success, **spec}
        spec["replicatedJobs"] = _roles(options, name)
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": _Quoted(name)},
        "spec": spec,
    }
    never, always = NEVER_AGAIN, ALWAYS_AGAIN
    head = _HEAD.format(
        secret=f"{name}-cluster-secret", never=_listed(never), always=_listed(always)
    )
    return head + _dumped(jobset)


def _processes(options: Options, name: str) -> Yaml:
    coordinator = options.coordinator or f"{name}-process-0-0.{name}:{_PORT}"
    constants = {
        "JAXSTRATEGY_COORDINATOR": coordinator,
        "JAXSTRATEGY_NUM_PROCESSES": str(options.total),
        "JAXSTRATEGY_LOCAL_RANK": "0",
        **common(options, {}),
    }
    environment = [
        *(_constant(key, _literal(value)) for key, value in constants.items()),
        _field("JAXSTRATEGY_PROCESS_ID", _INDEX),
        _field("JAXSTRATEGY_ATTEMPT", "jobset.sigs.k8s.io/restart-attempt"),
        _secret(name),
    ]
    pod = _pod(options.program, environment, host_and_port(coordinator)[1])
    if options.gpus_per_process:
        _limit_gpus(pod, options.gpus_per_process)
    return _job("process", options.total, _FAILURES, pod)


def _roles(options: Options, name: str) -> list[Yaml]:
    tasks = job_tasks(options)
    hosts = {task: f"{name}-{task.job}-0-{task.index}.{name}:{_PORT}" for task in tasks}
    counts = Counter(task.job for task in tasks)
    jobs = []
    for task in tasks:
        if task.index:
            continue
        pod = _pod(task.program(options), _role_environment(options, task, name, hosts))
        if task.job == "chief":
            failures = _FAILURES
        else:  # whoever ends is started again, by itself
            failures = {"backoffLimit": 1000000}
            pod["restartPolicy"], pod["terminationGracePeriodSeconds"] = "OnFailure", 10
        if task.job == "worker" and options.gpus_per_process:
            _limit_gpus(pod, options.gpus_per_process)
        jobs.append(_job(task.job, counts[task.job], failures, pod))
    return jobs


def _role_environment(
    options: Options, task: JobTask, name: str, hosts: dict[JobTask, str]
) -> list[Yaml]:
    constants = {"PYTHONUNBUFFERED": "1", **of_cache(options)}
    constants |= simulated(options, task)
    # Kubernetes puts the index in; it is no text there.
    config = tf_config(hosts, task).replace('"index": 0}', '"index": $(INDEX)}')
    return [
        *(_constant(key, _literal(value)) for key, value in constants.items()),
        _field("INDEX", _INDEX),
        _constant("TF_CONFIG", _Quoted(config)),
        _secret(name),
    ]


def _failures(codes: list[ExitCode], action: str) -> Yaml:
    values = [code.value for code in codes]
    return {"action": action, "onExitCodes": {"operator": "In", "values": values}}


_FAILURES = {
    "backoffLimit": 0,
    "podFailurePolicy": {
        "rules": [_failures(NEVER_AGAIN, "FailJob"), _failures(ALWAYS_AGAIN, "Ignore")]
    },
}


def _job(name: str, count: int, failures: Yaml, pod: Yaml) -> Yaml:
    spec = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        **failures,
        "template": {"spec": pod},
    }
    return {"name": name, "replicas": 1, "template": {"spec": spec}}


def _pod(program: tuple[str, ...], environment: list[Yaml], port: int = _PORT) -> Yaml:
    container = {
        "name": "main",
        "image": "IMAGE",
        "command": [_literal(word) for word in ("python", *program)],
        "env": environment,
        "ports": [{"containerPort": port}],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 120,  # to save in when a pod is moved
        "containers": [container],
    }


def _limit_gpus(pod: Yaml, gpus: int) -> None:
    pod["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": gpus}}


def _constant(name: str, value: str) -> Yaml:
    return {"name": name, "value": value}


def _field(name: str, annotation: str) -> Yaml:
    field = {"fieldPath": f"metadata.annotations['{annotation}']"}
    return {"name": name, "valueFrom": {"fieldRef": field}}


def _secret(name: str) -> Yaml:
    reference = {"name": _Quoted(f"{name}-cluster-secret"), "key": "secret"}
    return {"name": SECRET, "valueFrom": {"secretKeyRef": reference}}


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
    return _Quoted(text.replace("$", "$$"))


def _listed(codes: list[ExitCode]) -> str:
    return ", ".join(str(code.value) for code in codes)


def _dumped(jobset: Yaml) -> str:
    """YAML in ASCII, in the order of the dicts."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as missing:
        raise MissingExtraError(
            "PyYAML is not installed, which writes the manifest. Install the extra: "
            'pip install "jaxstrategy[kubernetes]"'
        ) from missing

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    def quoted(dumper: Any, text: _Quoted) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"')

    Dumper.add_representer(_Quoted, quoted)
    return yaml.dump(jobset, Dumper=Dumper, sort_keys=False, width=float("inf"))


def dns_name(name: str) -> str:
    """`name` in the letters that Kubernetes allows."""
    letters = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not letters[:1].isalpha():
        letters = f"job-{letters}"
    return letters[:_LONGEST_NAME].strip("-")
