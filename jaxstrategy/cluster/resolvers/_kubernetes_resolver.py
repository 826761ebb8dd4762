"""`KubernetesClusterResolver`: the pods with a label as a cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import final

from jaxstrategy.cluster.resolvers._attempts import answered, checked_seconds
from jaxstrategy.cluster.resolvers._cluster_resolver import (
    ClusterResolver,
    Process,
)
from jaxstrategy.cluster.resolvers._cluster_spec import (
    ClusterSpec,
    checked_port,
    checked_task_id,
)
from jaxstrategy.cluster.resolvers._kubernetes_location import (
    KubernetesExecutableLocation,
)
from jaxstrategy.cluster.resolvers._pod_client import (
    PodClient,
    PodLists,
    Pods,
)
from jaxstrategy.cluster.resolvers._pod_tasks import PodTasks
from jaxstrategy.text._shown import shown
from jaxstrategy.text._whole_numbers import whole

_DEFAULT = {"worker": ["job-name=tensorflow"]}
_NAMES = ("POD_NAME", "HOSTNAME")


@final
class KubernetesClusterResolver(ClusterResolver):
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
        self._location = _checked_location(executable_location)
        self._num_tasks = _checked_numbers(num_tasks or {}, self._selectors)
        self._timeout_seconds = checked_seconds(timeout_seconds)
        self._client = PodClient(override_client, self._location, namespace)
        self._joined: tuple[str | None, int | None] | None = None

    def cluster_spec(self) -> ClusterSpec:
        """The addresses of the pods as they are now.

        Raises:
          ClusterError: a pod does not run or has no address; a job has no pods, or not
            as many as `num_tasks` in time; Kubernetes does not answer, or refuses to.
        """
        return self._tasks().spec(self._port)

    def process(self) -> Process:
        """As in `ClusterResolver`, of the pods as they are now.

        Raises:
          ClusterError: as of `cluster_spec`.
          ValueError: which pod this is is not known, or it is one that cannot train.
        """
        # A lone pod may be another: those of the job do not start at one moment.
        spec, task_type, task_id = self._now()
        process = self._placed(spec, task_type, task_id)
        self._joined = task_type, task_id
        return process

    def _found_task_type(self) -> str | None:
        return self._found()[0]

    def _found_task_id(self) -> int | None:
        return self._found()[1]

    def _found(self) -> tuple[str | None, int | None]:
        """The task of this process, which stays what it was when it joined a job."""
        if self._joined is not None:
            return self._joined
        return self._now()[1:] if self._own_name else (None, None)

    def _as_task_id(self, given: int) -> int:
        return checked_task_id(given)

    def _now(self) -> tuple[ClusterSpec, str | None, int | None]:
        # Asked once: between two questions, the pods may be others.
        tasks = self._tasks()
        return tasks.spec(self._port), *self._own(tasks)

    def _how_to_tell(self) -> str:
        if self._location is KubernetesExecutableLocation.OFF_CLUSTER:
            why = "It runs outside of the cluster."
        else:
            why = (
                f"{' and '.join(_NAMES)} name none of the pods, or several: "
                f"{self._own_name!r}."
            )
        return (
            f"{why} Set `task_type` and `task_id` of the resolver, or POD_NAME in the "
            "environment of each pod."
        )

    def _own(self, tasks: PodTasks) -> tuple[str | None, int | None]:
        """What was given of this process's task, and what its pod says of the rest."""
        found_type, found_id = tasks.place_of(self._own_name)
        given_type = self._task_type
        task_type = found_type if given_type is None else given_type
        if self._task_id is not None:
            return task_type, checked_task_id(self._task_id)
        return task_type, found_id if task_type == found_type else None

    @property
    def _own_name(self) -> str:
        """What the pod in which this runs is called; empty if it runs in none."""
        if self._location is KubernetesExecutableLocation.OFF_CLUSTER:
            return ""
        return next((os.environ[name] for name in _NAMES if os.environ.get(name)), "")

    def _tasks(self) -> PodTasks:
        """The pods, as soon as all are there."""
        with self._client.opened() as pods:
            return answered(
                lambda deadline: self._attempt(pods, deadline), self._timeout_seconds
            )

    def _attempt(self, pods: Pods, deadline: float) -> PodTasks:
        listed = {
            job: [
                pod
                for selector in selectors
                for pod in sorted(
                    pods(selector, deadline - time.monotonic()),
                    key=lambda pod: pod.name,
                )
            ]
            for job, selectors in self._selectors.items()
        }
        return PodTasks.of(listed, self._selectors, self._num_tasks)


def _checked_selectors(given: object) -> dict[str, list[str]]:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"`job_to_label_mapping` was {shown(given)}; a dict from jobs to lists of "
            'label selectors was wanted, as {"worker": ["job-name=train"]}.'
        )
    for job, selectors in given.items():
        # A string is a sequence, of which each letter would be a selector.
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


def _checked_location(given: object) -> KubernetesExecutableLocation:
    if not isinstance(given, KubernetesExecutableLocation):
        raise ValueError(
            f"`executable_location` was {shown(given)}; "
            "KubernetesExecutableLocation.WITHIN_CLUSTER or .OFF_CLUSTER was wanted."
        )
    return given


def _checked_numbers(
    given: object, selectors: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"`num_tasks` was {shown(given)}; the number of pods of each job was "
            'wanted, as {"worker": 4}.'
        )
    for job, number in given.items():
        if job not in selectors:
            raise ValueError(
                f"`num_tasks` has the job {job!r}, of which `job_to_label_mapping` "
                f"has no labels; it has those of {list(selectors)}."
            )
        if (whole(number) or 0) < 1:
            raise ValueError(
                f"`num_tasks` of job {job!r} was {shown(number)}; a whole number from "
                "1 on was wanted."
            )
    return {job: int(number) for job, number in given.items()}
