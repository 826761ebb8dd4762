"""The same job as a JobSet manifest for Kubernetes."""

from __future__ import annotations

import json
import re

from jaxstrategy.launch._codes import NO_RESTART, PREEMPTED
from jaxstrategy.launch._environment import common
from jaxstrategy.launch._options import Options

_PORT = 2222
_MANIFEST = """\
# Needs the JobSet controller (https://jobset.sigs.k8s.io). One pod is one process.
# Put your image where it says IMAGE, then `kubectl apply -f` this file.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  failurePolicy:
    maxRestarts: {max_restarts}  # a failed pod starts all of them again
    rules:
    - name: no-restart
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: process
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        completions: {total}
        parallelism: {total}
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
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 120  # to save in when a pod is moved
            containers:
            - name: main
              image: IMAGE
              command: {command}
              env:
{environment}
              ports:
              - containerPort: {port}
{resources}"""

_CONSTANT = """\
              - name: {name}
                value: {value}"""

_FROM_FIELD = """\
              - name: {name}
                valueFrom:
                  fieldRef:
                    fieldPath: metadata.annotations['{annotation}']"""

_RESOURCES = """\
              resources:
                limits:
                  nvidia.com/gpu: {gpus}
"""


def manifest(options: Options) -> str:
    """A JobSet in YAML, with a pod for each process of the job."""
    name = dns_name(options.name)
    coordinator = options.coordinator or f"{name}-process-0-0.{name}:{_PORT}"
    constant = {
        "JAXSTRATEGY_COORDINATOR": coordinator,
        "JAXSTRATEGY_NUM_PROCESSES": str(options.total),
        "JAXSTRATEGY_LOCAL_RANK": "0",
        **common(options, {}),
    }
    fields = {
        "JAXSTRATEGY_PROCESS_ID": "batch.kubernetes.io/job-completion-index",
        "JAXSTRATEGY_ATTEMPT": "jobset.sigs.k8s.io/restart-attempt",
    }
    gpus = options.gpus_per_process
    return _MANIFEST.format(
        name=name,
        total=options.total,
        max_restarts=options.max_restarts,
        preempted=PREEMPTED,
        no_restart=NO_RESTART,
        command=json.dumps(["python", *options.program]),
        environment="\n".join(
            [
                _CONSTANT.format(name=key, value=json.dumps(value))
                for key, value in constant.items()
            ]
            + [
                _FROM_FIELD.format(name=key, annotation=annotation)
                for key, annotation in fields.items()
            ]
        ),
        port=coordinator.rsplit(":", 1)[1],
        resources=_RESOURCES.format(gpus=gpus) if gpus else "",
    )


def dns_name(name: str) -> str:
    """`name` in the letters that Kubernetes allows.

    >>> dns_name("Train_digits"), dns_name("3.14")
    ('train-digits', 'job-3-14')
    """
    letters = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (letters if letters[:1].isalpha() else f"job-{letters}".strip("-"))[:40]
