"""What a cluster must have to train with parameter servers: `checked_cluster`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxstrategy.cluster.resolvers._cluster_spec import ClusterSpec, host_and_port

_JOBS = ("chief", "worker", "evaluator", "ps")
_ONE_TASK = ("chief", "evaluator")


class ClusterAddresses(NamedTuple):
    """The addresses of a cluster's workers and parameter servers, in their order."""

    workers: Sequence[str]
    servers: Sequence[str]


def is_for_servers(spec: ClusterSpec) -> bool:
    """Whether a cluster has parameter servers at all.

    >>> is_for_servers(ClusterSpec({"worker": ["a:1", "b:1"]}))
    False
    """
    return "ps" in spec.jobs and spec.num_tasks("ps") > 0


def checked_cluster(
    spec: ClusterSpec, task_type: str | None = None
) -> ClusterAddresses:
    """The tasks that a coordinator calls.

    Args:
      spec: the cluster, which may have a chief (the coordinator) and an evaluator, who
        works by itself.
      task_type: what this process is; None if that is not known.

    Raises:
      ValueError: the cluster cannot train in this way.

    >>> checked_cluster(ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]}))
    ClusterAddresses(workers=['a:1', 'b:1'], servers=['c:1'])
    """
    if not spec:
        raise ValueError(
            "Cluster spec must be non-empty: TF_CONFIG or the resolver names no task. "
            "Without a cluster, `ParameterServerStrategy(workers=2, "
            "parameter_servers=1)` starts processes on this host."
        )
    _check_jobs(spec, task_type)
    for job in ("ps", "worker"):
        if not _count(spec, job):
            raise ValueError(
                f"There must be at least one {job}. The cluster is {spec}, which needs "
                "to have `ps` jobs and `worker` jobs."
            )
    return ClusterAddresses(_addresses(spec, "worker"), _addresses(spec, "ps"))


def _check_jobs(spec: ClusterSpec, task_type: str | None) -> None:
    allowed = ", ".join(_JOBS)
    if set(spec.jobs) - set(_JOBS):
        raise ValueError(
            f"Disallowed task type found in cluster spec. Allowed types are {allowed}, "
            f"and the cluster spec is {spec}."
        )
    if task_type is not None and task_type not in _JOBS:
        raise ValueError(
            f"Unrecognized task_type: {task_type!r}, valid task types are {allowed}."
        )
    if task_type not in (None, "evaluator", "chief", *spec.jobs):
        raise ValueError(
            f"`task_type` {task_type!r} not found in the cluster spec {spec}."
        )
    for job in _ONE_TASK:
        if _count(spec, job) > 1:
            raise ValueError(
                f"There must be at most one {job!r} job, and the cluster has "
                f"{_count(spec, job)}: {spec}."
            )


def _count(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0


def _addresses(spec: ClusterSpec, job: str) -> list[str]:
    tasks = spec.job_tasks(job)
    addresses = [address for address in tasks if address is not None]
    if len(addresses) < len(tasks):
        raise ValueError(
            f"The cluster names the tasks {spec.task_indices(job)} of {job!r}; the "
            "coordinator calls all of them, so that it needs all addresses."
        )
    for address in addresses:
        host_and_port(address)
    return addresses
