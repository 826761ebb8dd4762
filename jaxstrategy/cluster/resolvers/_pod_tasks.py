"""The pods of a cluster at one moment as its tasks: `PodTasks`."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import final

from jaxstrategy._errors import ClusterError
from jaxstrategy.cluster.resolvers import _addresses
from jaxstrategy.cluster.resolvers._attempts import NotYetError
from jaxstrategy.cluster.resolvers._cluster_spec import ClusterSpec
from jaxstrategy.cluster.resolvers._pod import Pod


@final
@dataclasses.dataclass(frozen=True)
class PodTasks:
    """The pods of each job in the order of the tasks, all running.

    Attributes:
      pods: by job.
    """

    pods: Mapping[str, Sequence[Pod]]

    @staticmethod
    def of(
        listed: Mapping[str, Sequence[Pod]],
        selectors: Mapping[str, Sequence[str]],
        num_tasks: Mapping[str, int],
    ) -> PodTasks:
        """The tasks, of the pods that were listed.

        Args:
          listed: the pods of each job, running or not.
          selectors: the labels of each job, for messages.
          num_tasks: how many of a job there will be; of others there are those listed.

        Raises:
          NotYetError: fewer run than there will be.
          ClusterError: a pod cannot take part; a job has none, or too many; a pod
            would be two tasks.
        """
        tasks = {
            job: _complete(job, pods, selectors[job], num_tasks[job])
            if job in num_tasks
            else _all_running(job, pods, selectors[job])
            for job, pods in listed.items()
        }
        _check_single([pod for pods in tasks.values() for pod in pods])
        return PodTasks(tasks)

    def spec(self, port: int) -> ClusterSpec:
        """The addresses of the pods."""
        return ClusterSpec(
            {
                job: [_addresses.address_of(pod.ip, port) for pod in pods]
                for job, pods in self.pods.items()
            }
        )

    def place_of(self, own: str) -> tuple[str, int] | tuple[None, None]:
        """Job and index of the pod that is called so, if it is only one."""
        found = [
            (job, index)
            for job, pods in self.pods.items()
            for index, pod in enumerate(pods)
            if own and pod.is_called(own)
        ]
        return found[0] if len(found) == 1 else (None, None)


def _all_running(
    job: str, pods: Sequence[Pod], selectors: Sequence[str]
) -> Sequence[Pod]:
    if not pods:
        raise ClusterError(
            f"Kubernetes has no pods for job {job!r}, with the labels "
            f"{list(selectors)}. `kubectl get pods --selector` shows those with a "
            "label; give `num_tasks` to wait for pods that are not there yet."
        )
    for pod in pods:
        if not pod.is_running:
            raise ClusterError(
                f'Pod "{pod.name}" is not running; phase: "{pod.state}". Give '
                f"`num_tasks` to wait until as many pods of job {job!r} run, whatever "
                "others do."
            )
        if not pod.ip:
            raise ClusterError(
                f'Pod "{pod.name}" of job {job!r} has no IP address. Give `num_tasks` '
                "to wait until as many pods have one."
            )
    return pods


def _complete(
    job: str, pods: Sequence[Pod], selectors: Sequence[str], wanted: int
) -> Sequence[Pod]:
    running = [pod for pod in pods if pod.is_running and pod.ip]
    if len(running) > wanted:
        raise ClusterError(
            f"{len(running)} pods of job {job!r} run, and `num_tasks` has {wanted}: "
            f"{', '.join(pod.name for pod in running)}. The labels {list(selectors)} "
            "are not those of this job alone."
        )
    if len(running) < wanted:
        others = ", ".join(
            f"{pod.name} ({pod.state if pod.ip or not pod.is_running else 'no IP'})"
            for pod in pods
            if pod not in running
        )
        raise NotYetError(
            f"{len(running)} of {wanted} pods of job {job!r} run, of those with the "
            f"labels {list(selectors)}. Others: {others or 'none'}."
        )
    return running


def _check_single(pods: Sequence[Pod]) -> None:
    counts = collections.Counter((pod.namespace, pod.name) for pod in pods)
    (_, name), count = counts.most_common(1)[0]
    if count > 1:
        raise ClusterError(
            f'Pod "{name}" would be {count} tasks: it has the labels of several '
            "selectors. Give each pod the label of one only."
        )
