"""A JobSet manifest for Kubernetes that runs the job."""

from __future__ import annotations

import re

from jaxstrategy.cluster.resolvers._cluster_spec import host_and_port
from jaxstrategy.launch._environment import common
from jaxstrategy.launch._launch_options import Options
from jaxstrategy.processes._exit_codes import ExitCode, Restart
from jaxstrategy.processes._secret import HOW_TO_MAKE_ONE
from jaxstrategy.processes._secret import VARIABLE as SECRET

PORT = 2222
_LONGEST_NAME = (
    40  # characters; Kubernetes puts up to 22 behind it, and has room for 63
)
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

CONSTANT = """\
              - name: {name}
                value: {value}"""

FROM_FIELD = """\
              - name: {name}
                valueFrom:
                  fieldRef:
                    fieldPath: metadata.annotations['{annotation}']"""

FROM_SECRET = """\
              - name: {name}
                valueFrom:
                  secretKeyRef:
                    name: {secret}
                    key: secret"""

RESOURCES = """\
              resources:
                limits:
                  nvidia.com/gpu: {gpus}
"""


def manifest(options: Options) -> str:
    """A JobSet in YAML, with a pod for each process of the job.

    Raises:
      ValueError: an argument is no text, which YAML cannot say.
    """
    name = dns_name(options.name)
    coordinator = options.coordinator or f"{name}-process-0-0.{name}:{PORT}"
    gpus = options.gpus_per_process
    return _MANIFEST.format(
        quoted_name=quoted(name),
        make_secret=HOW_TO_MAKE_ONE,
        secret_name=secret_of(name),
        total=options.total,
        max_restarts=options.max_restarts,
        preempted=listed_codes(ExitCode.that_restart(Restart.UNCOUNTED)),
        no_restart=listed_codes(ExitCode.that_restart(Restart.NEVER)),
        command=f"[{', '.join(literal(a) for a in ('python', *options.program))}]",
        environment="\n".join(_environment(options, name, coordinator)),
        port=host_and_port(coordinator)[1],
        resources=RESOURCES.format(gpus=gpus) if gpus else "",
    )


def listed_codes(codes: list[ExitCode]) -> str:
    return ", ".join(str(code.value) for code in codes)


def _environment(options: Options, name: str, coordinator: str) -> list[str]:
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
    return [
        *(
            CONSTANT.format(name=key, value=literal(value))
            for key, value in constant.items()
        ),
        *(
            FROM_FIELD.format(name=key, annotation=annotation)
            for key, annotation in fields.items()
        ),
        FROM_SECRET.format(name=SECRET, secret=quoted(secret_of(name))),
    ]


def secret_of(name: str) -> str:
    return f"{name}-cluster-secret"


def literal(text: str) -> str:
    """A string in which Kubernetes finds no variables, as YAML."""
    # It replaces `$(NAME)` in commands and environments, and takes `$$` for `$`.
    return quoted(text.replace("$", "$$"))


def quoted(text: str) -> str:
    r"""A string as YAML, in ASCII.

    Raises:
      ValueError: it has bytes that are no text.

    >>> print(quoted('say "yes"\n'), quoted("\N{SNOWMAN}"))
    "say \"yes\"\x0a" "\u2603"
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{text!r} has bytes that are not UTF-8, which a manifest cannot carry. "
            "Rename the file, or give the argument in another way"
        ) from None
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    code = ord(character)
    if character in '"\\':
        return f"\\{character}"
    if " " <= character <= "~":
        return character
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def dns_name(name: str) -> str:
    """`name` in the letters that Kubernetes allows.

    >>> dns_name("Train_digits"), dns_name("3.14")
    ('train-digits', 'job-3-14')
    """
    letters = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not letters[:1].isalpha():
        letters = f"job-{letters}"
    return letters[:_LONGEST_NAME].strip("-")
