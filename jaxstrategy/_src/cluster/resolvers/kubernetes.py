"""`KubernetesClusterResolver`: the pods with a label as a cluster."""

from __future__ import annotations

import collections
import datetime
import enum
import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, final

from jaxstrategy._src.cluster.resolvers.cloud import (
    BUSY,
    CloudResolver,
    NotYetError,
    checked_seconds,
    is_of,
    request_seconds,
)
from jaxstrategy._src.cluster.resolvers.cluster_resolver import Place
from jaxstrategy._src.cluster.resolvers.cluster_spec import (
    ClusterSpec,
    address_of,
    checked,
    checked_port,
)
from jaxstrategy._src.errors import ClusterError, MissingExtraError
from jaxstrategy._src.text import shown

_DEFAULT = {"worker": ["job-name=tensorflow"]}
_NAMES = ("POD_NAME", "HOSTNAME")


class KubernetesExecutableLocation(enum.Enum):
    """Where the program runs, which decides how it reaches the API of Kubernetes.

    `WITHIN_CLUSTER`: in a pod, with the pod's service account. `OFF_CLUSTER`: anywhere
    else, with the user's kubeconfig.

    >>> js.cluster_resolver.KubernetesExecutableLocation(1).name
    'OFF_CLUSTER'
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class PodLists(Protocol):
    """What is used of `kubernetes.client.CoreV1Api`."""

    def list_pod_for_all_namespaces(self, *, label_selector: str) -> Any:
        """An object whose `items` are the pods with that label."""


@final
class KubernetesClusterResolver(CloudResolver):
    """The running pods with a label, in the order of their names.

    Kubernetes is asked anew at each call, but a process stays the task as which it
    joined a job. All pods of a job must run when it is asked, or `num_tasks` says how
    many there will be, and the call waits for them: a job that trains synchronously
    wants that, because its pods do not start at one moment. Where pods are replaced
    while others go on, let them keep their names, as those of a StatefulSet do.

    A program in a pod finds its own task by the name of its pod: `POD_NAME`, if the
    manifest sets that (`fieldRef: metadata.name`), else `HOSTNAME`, which Kubernetes
    sets. Only with `hostNetwork` that is not enough. Elsewhere, and to be another
    task, set `task_type` and `task_id`.

    Addresses are those of the pods, where TensorFlow takes those of their nodes.

    Args:
      job_to_label_mapping: label selectors of the pods of each job, as
        `{"worker": ["job-name=train"], "ps": ["job-name=ps"]}`; the pods of the first
        selector come first. By default `{"worker": ["job-name=tensorflow"]}`.
      tf_server_port: the port at which each task listens.
      rpc_layer: what `master` puts before addresses.
      override_client: a `kubernetes.client.CoreV1Api` that was configured, or a
        stand-in; by default one is made for `executable_location`.
      executable_location: whether the program runs in a pod.
      namespace: of the pods; by default pods of all namespaces count.
      num_tasks: how many pods of each job there will be, as `{"worker": 4}`.
      timeout_seconds: how long a call waits for Kubernetes, and for those pods.

    Raises:
      MissingExtraError: the client of Kubernetes is needed and not installed.
      ClusterError: nothing says how to reach Kubernetes from there.
      ValueError: a port, location or number that is none; `num_tasks` of a job without
        labels.
      TypeError: labels that are no lists of selectors; a client that lists no pods.

    >>> from types import SimpleNamespace as Some
    >>> class Client:  # stands for `kubernetes.client.CoreV1Api()`
    ...     def list_pod_for_all_namespaces(self, label_selector):
    ...         return Some(items=[
    ...             Some(
    ...                 metadata=Some(name=f"train-{i}"),
    ...                 status=Some(phase="Running", pod_ip=f"10.0.0.{i}"),
    ...             )
    ...             for i in (1, 2)
    ...         ])
    >>> resolver = js.cluster_resolver.KubernetesClusterResolver(
    ...     {"worker": ["job-name=train"]}, override_client=Client()
    ... )
    >>> resolver.cluster_spec()
    ClusterSpec({'worker': ['10.0.0.1:8470', '10.0.0.2:8470']})
    >>> resolver.task_type, resolver.task_id = "worker", 1
    >>> resolver.process()
    Process(index=1, count=2, coordinator='10.0.0.1:8470')
    """

    _packages = "kubernetes", "urllib3"

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: PodLists | None = None,
        executable_location: KubernetesExecutableLocation = (
            KubernetesExecutableLocation.WITHIN_CLUSTER
        ),
        *,
        namespace: str | None = None,
        num_tasks: Mapping[str, int] | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        self._selectors = _checked_selectors(job_to_label_mapping or _DEFAULT)
        self._port = checked_port(tf_server_port, "tf_server_port")
        self._rpc_layer = rpc_layer
        if not isinstance(executable_location, KubernetesExecutableLocation):
            raise ValueError(
                f"`executable_location` was {shown(executable_location)}; "
                "KubernetesExecutableLocation.WITHIN_CLUSTER or .OFF_CLUSTER was "
                "wanted."
            )
        within = KubernetesExecutableLocation.WITHIN_CLUSTER
        self._is_within = executable_location is within
        self._num_tasks = _checked_numbers(num_tasks or {}, self._selectors)
        self._timeout_seconds = checked_seconds(timeout_seconds)
        self._method = "list_pod_for_all_namespaces"
        self._where: dict[str, str] = {}
        if namespace is not None:
            self._method = "list_namespaced_pod"
            self._where = {"namespace": namespace}
        self._client = override_client
        self._configuration = None
        if override_client is None:
            self._configuration = _configuration(self._is_within)
        elif not callable(getattr(override_client, self._method, None)):
            raise TypeError(
                f"`override_client` was {shown(override_client)}, which has no method "
                f"`{self._method}`. Give a `CoreV1Api` of Kubernetes, or a stand-in."
            )

    def cluster_spec(self) -> ClusterSpec:
        """The addresses of the pods as they are now.

        Raises:
          ClusterError: a pod does not run or has no address; a job has no pods, or not
            as many as `num_tasks` in time; Kubernetes does not answer, or refuses to.
        """
        return self._spec(self._pods())

    def _found_task(self) -> Place:
        is_found = self._joined is not None or self._own_name
        return super()._found_task() if is_found else (None, None)

    def _now(self) -> tuple[ClusterSpec, str | None, int | None]:
        pods = self._pods()  # once: between two questions, they may be others
        own = self._own_name
        places = [
            (job, index)
            for job, tasks in pods.items()
            for index, pod in enumerate(tasks)
            # Kubernetes makes the hostname of a longer name so.
            if own and own in (pod.name, pod.hostname, pod.name[:63].rstrip("-."))
        ]
        found_type, found_id = places[0] if len(places) == 1 else (None, None)
        task_type = found_type if self._task_type is None else self.task_type
        task_id = found_id if task_type == found_type else None
        if self._task_id is not None:
            task_id = self.task_id
        return self._spec(pods), task_type, task_id

    def _how_to_tell(self) -> str:
        why = "It runs outside of the cluster."
        if self._is_within:
            why = (
                f"{' and '.join(_NAMES)} name none of the pods, or several: "
                f"{self._own_name!r}."
            )
        return (
            f"{why} Set `task_type` and `task_id` of the resolver, or POD_NAME in the "
            "environment of each pod."
        )

    @property
    def _own_name(self) -> str:
        """What the pod in which this runs is called; empty if it runs in none."""
        names = _NAMES if self._is_within else ()
        return next((os.environ[name] for name in names if os.environ.get(name)), "")

    def _spec(self, pods: Mapping[str, Sequence[_Pod]]) -> ClusterSpec:
        return ClusterSpec(
            {
                job: [address_of(pod.ip, self._port) for pod in tasks]
                for job, tasks in pods.items()
            }
        )

    def _pods(self) -> dict[str, list[_Pod]]:
        """The pods of each job in the order of its tasks, as soon as all are there."""
        if self._client is not None:
            return self._answered(functools.partial(self._attempt, self._client))
        import kubernetes.client

        with kubernetes.client.ApiClient(self._configuration) as connection:
            client = kubernetes.client.CoreV1Api(connection)
            return self._answered(functools.partial(self._attempt, client))

    def _attempt(self, client: PodLists, deadline: float) -> dict[str, list[_Pod]]:
        def listed(selector: str) -> list[_Pod]:
            arguments: dict[str, Any] = {**self._where, "label_selector": selector}
            if is_of(client, "kubernetes"):  # stand-ins take no deadline
                # Of connecting and of reading: version 29 does not look at a float.
                seconds = request_seconds(deadline - time.monotonic())
                arguments["_request_timeout"] = (seconds, seconds)
            found = getattr(client, self._method)(**arguments).items
            return sorted(map(_pod, found), key=lambda pod: pod.name)

        # All are listed before any is looked at.
        pods = {
            job: [pod for selector in selectors for pod in listed(selector)]
            for job, selectors in self._selectors.items()
        }
        tasks = {job: self._checked(job, found) for job, found in pods.items()}
        counts = collections.Counter(
            (pod.namespace, pod.name) for found in tasks.values() for pod in found
        )
        (_, name), count = counts.most_common(1)[0]
        if count > 1:
            raise ClusterError(
                f'Pod "{name}" would be {count} tasks: it has the labels of several '
                "selectors. Give each pod the label of one only."
            )
        return tasks

    def _checked(self, job: str, pods: list[_Pod]) -> list[_Pod]:
        """The pods of a job, all of which run, as many as there will be."""
        labels = self._selectors[job]
        wanted = self._num_tasks.get(job)
        running = [pod for pod in pods if pod.phase == "Running" and pod.ip]
        if wanted is None:
            if not pods:
                raise ClusterError(
                    f"Kubernetes has no pods for job {job!r}, with the labels "
                    f"{labels}. `kubectl get pods --selector` shows those with a "
                    "label; give `num_tasks` to wait for pods that are not there yet."
                )
            for pod in pods:
                if pod.phase != "Running":
                    raise ClusterError(
                        f'Pod "{pod.name}" is not running; phase: "{pod.phase}". Give '
                        f"`num_tasks` to wait until as many pods of job {job!r} run, "
                        "whatever others do."
                    )
                if not pod.ip:
                    raise ClusterError(
                        f'Pod "{pod.name}" of job {job!r} has no IP address. Give '
                        "`num_tasks` to wait until as many pods have one."
                    )
        elif len(running) > wanted:
            raise ClusterError(
                f"{len(running)} pods of job {job!r} run, and `num_tasks` has {wanted}:"
                f" {', '.join(pod.name for pod in running)}. The labels {labels} are "
                "not those of this job alone."
            )
        elif len(running) < wanted:
            others = ", ".join(
                f"{pod.name} ({'no IP' if pod.phase == 'Running' else pod.phase})"
                for pod in pods
                if pod not in running
            )
            raise NotYetError(
                f"{len(running)} of {wanted} pods of job {job!r} run, of those with "
                f"the labels {labels}. Others: {others or 'none'}."
            )
        return running

    def _explanation(self, error: Exception) -> ClusterError:
        status, reason = getattr(error, "status", None), getattr(error, "reason", None)
        told = shown(error)
        if isinstance(reason, str):
            told = " ".join(f"{status or ''} {reason}".split())
        if not status or status in BUSY:  # no status: there was no answer at all
            host = getattr(self._configuration, "host", "")
            at = f" at {host}" if host else ""
            return NotYetError(f"The API of Kubernetes{at} did not answer: {told}.")
        advice = ""
        if status == 401:
            advice = (
                " The token was not taken: in a pod that of its service account, "
                "elsewhere that of the kubeconfig. `kubectl auth whoami` tells whose "
                "it is."
            )
        elif status == 403:
            advice = " Give its account (in a pod, the service account) "
            advice += (
                'a Role with the verb "list" for "pods" in the namespace '
                f"{self._where['namespace']!r}."
                if self._where
                else 'a ClusterRole with the verb "list" for "pods"; or name the '
                "`namespace` of the pods, in which a Role with that verb is enough."
            )
        return ClusterError(
            f"Kubernetes does not let this program list pods: {told}.{advice}"
        )


class _Pod(NamedTuple):
    """What is known of one pod; what a stand-in does not say is empty."""

    name: str
    namespace: str
    hostname: str
    phase: str
    ip: str


def _pod(listed: object) -> _Pod:
    """A pod as a client lists it: a `V1Pod`, or a stand-in."""
    metadata = getattr(listed, "metadata", None)
    status = getattr(listed, "status", None)
    phase = _text(status, "phase")
    ended = getattr(metadata, "deletion_timestamp", None)
    if isinstance(ended, datetime.datetime | str):
        phase += ", being deleted"
    # Not `host_ip` as TensorFlow: two pods of a node would have one address, at which
    # none can listen. Stand-ins that were made for TensorFlow know no other.
    ip = getattr(status, "pod_ip", NotImplemented)
    if not (ip is None or isinstance(ip, str)):
        ip = _text(status, "host_ip")
    name, namespace = _text(metadata, "name"), _text(metadata, "namespace")
    hostname = _text(getattr(listed, "spec", None), "hostname")
    return _Pod(name, namespace, hostname, phase, ip or "")


def _text(holder: object, name: str) -> str:
    found = getattr(holder, name, None)
    return found if isinstance(found, str) else ""


def _checked_selectors(given: object) -> dict[str, list[str]]:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"`job_to_label_mapping` was {shown(given)}; a dict from jobs to lists of "
            'label selectors was wanted, as {"worker": ["job-name=train"]}.'
        )
    for job, selectors in given.items():
        # A string is a sequence: each letter would be a selector.
        if (
            not isinstance(selectors, Sequence)
            or isinstance(selectors, str)
            or not selectors
            or not all(isinstance(each, str) and each for each in selectors)
        ):
            raise TypeError(
                f"The label selectors of job {job!r} were {shown(selectors)}; a list "
                'was wanted, as ["job-name=train"].'
            )
    return {job: list(selectors) for job, selectors in given.items()}


def _checked_numbers(
    given: object, selectors: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"`num_tasks` was {shown(given)}; the number of pods of each job was "
            'wanted, as {"worker": 4}.'
        )
    if unknown := [job for job in given if job not in selectors]:
        raise ValueError(
            f"`num_tasks` has the job {unknown[0]!r}, of which `job_to_label_mapping` "
            f"has no labels; it has those of {list(selectors)}."
        )
    wanted = "a whole number from 1 on was wanted."
    return {
        job: checked(f"`num_tasks` of job {job!r}", number, wanted)
        for job, number in given.items()
    }


def _configuration(is_within: bool) -> Any:
    """How to reach Kubernetes; that of other clients in this program stays as it is."""
    try:
        import kubernetes.client
        import kubernetes.config
        import yaml  # a part of that client
    except ImportError as missing:
        raise MissingExtraError(
            "`KubernetesClusterResolver` needs the client of Kubernetes, which is not "
            "installed. Install the extra: pip install 'jaxstrategy[kubernetes]'"
        ) from missing
    configuration = kubernetes.client.Configuration()
    configuration.retries = False  # the resolver tries again itself, with a deadline
    try:
        if is_within:
            kubernetes.config.load_incluster_config(client_configuration=configuration)
        else:
            kubernetes.config.load_kube_config(client_configuration=configuration)
    except (kubernetes.config.ConfigException, yaml.YAMLError, OSError) as error:
        text = (
            f"The kubeconfig cannot be used: {error} `kubectl get pods` should work "
            "here; in a pod, leave out `executable_location`."
        )
        if is_within:
            text = (
                f"This program does not run in a pod with a service account: {error} "
                "Elsewhere, give `executable_location=KubernetesExecutableLocation."
                "OFF_CLUSTER`, which reads the kubeconfig."
            )
        raise ClusterError(text) from error
    return configuration
