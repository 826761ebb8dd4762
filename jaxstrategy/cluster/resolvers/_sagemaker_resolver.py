"""`SageMakerClusterResolver`: what Amazon SageMaker tells the hosts of a job."""

from __future__ import annotations

import json
import os
from typing import final

from jaxstrategy.cluster.resolvers._cluster_resolver import ClusterResolver
from jaxstrategy.cluster.resolvers._cluster_spec import (
    ClusterSpec,
    checked_port,
    checked_task_id,
)

HOSTS = "SM_HOSTS"
CURRENT_HOST = "SM_CURRENT_HOST"
_WORKER = "worker"
_MPI = "OMPI_COMM_WORLD_SIZE"  # Open MPI sets it, also where SageMaker starts it
_WANTED = 'It looks like ["algo-1", "algo-2"].'


@final
class SageMakerClusterResolver(ClusterResolver):
    """Reads `SM_HOSTS` and `SM_CURRENT_HOST`, which SageMaker sets on each host.

    All hosts are workers, in the order of their names as text, with one process each.
    The variables are read anew at each call. Without a resolver, a strategy finds a
    job of several hosts by itself, unless MPI has started the processes.

    Args:
      port: of all addresses.
      task_type: instead of `"worker"`.
      task_id: instead of the place of `SM_CURRENT_HOST` among the hosts.
      rpc_layer: what `master` puts before addresses.
      environment: what `environment` gives.

    All methods raise ValueError, and quote what is wrong, if a variable is missing or
    malformed, or if `SM_CURRENT_HOST` is none of the hosts.

    Raises:
      ValueError: `port` is no port.

    >>> import os
    >>> os.environ["SM_HOSTS"] = '["algo-1", "algo-2"]'
    >>> os.environ["SM_CURRENT_HOST"] = "algo-2"
    >>> js.cluster_resolver.SageMakerClusterResolver().process()
    Process(index=1, count=2, coordinator='algo-1:2223')
    >>> del os.environ["SM_HOSTS"], os.environ["SM_CURRENT_HOST"]
    """

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._port = checked_port(port, "port")
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment or ""

    @staticmethod
    def is_several_hosts() -> bool:
        """Whether this is a SageMaker job of several hosts, with a process on each.

        Raises:
          ValueError: a variable is malformed.
        """
        # Under MPI each host has several processes, which JAX finds.
        if os.environ.get(_MPI):
            return False
        # Without the hosts it is an error that says so, when they are asked for.
        if not os.environ.get(HOSTS):
            return bool(os.environ.get(CURRENT_HOST))
        return len(_hosts()) > 1

    def cluster_spec(self) -> ClusterSpec:
        """The hosts as workers, without jobs if SageMaker names no host.

        Raises:
          ValueError: a variable is missing or malformed.
        """
        hosts, own = _hosts(), _own()
        # One host does not need to know its name, as in TensorFlow.
        if not hosts or (not own and len(hosts) == 1):
            return ClusterSpec({})
        _place(hosts, own)
        return ClusterSpec({_WORKER: [f"{host}:{self._port}" for host in hosts]})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task, by default this process's; empty if there is no other.

        Raises:
          ValueError: there is no such task, or a variable is missing or malformed.
        """
        spec = self.cluster_spec()
        if sum(map(spec.num_tasks, spec.jobs)) <= 1:
            return ""
        return super().master(*self._completed(task_type, task_id), rpc_layer)

    def _found_task_type(self) -> str | None:
        return _WORKER if self.cluster_spec() else None

    def _found_task_id(self) -> int | None:
        return _place(_hosts(), _own()) if self.cluster_spec() else None

    def _as_task_type(self, given: str) -> str:
        return str(given)  # as in TensorFlow

    def _as_task_id(self, given: int) -> int:
        return checked_task_id(given)

    def _accelerators(
        self, task_type: str | None, task_id: int | None
    ) -> dict[str, int]:
        if task_type is None and task_id is None:
            return super()._accelerators(None, None)
        return super()._accelerators(*self._completed(task_type, task_id))


def _hosts() -> list[str]:
    """The names of the hosts as TensorFlow orders them."""
    text = _variable(HOSTS).strip() or "[]"
    try:
        hosts = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{HOSTS} is not JSON ({error}): {text} {_WANTED}") from error
    if not isinstance(hosts, list) or not all(
        isinstance(host, str) and host.strip() for host in hosts
    ):
        raise ValueError(f"{HOSTS} is {text}, which is no list of names. {_WANTED}")
    return sorted(hosts)


def _own() -> str:
    return _variable(CURRENT_HOST).strip()


def _place(hosts: list[str], own: str) -> int:
    if own not in hosts:
        raise ValueError(
            f"{CURRENT_HOST} is {own!r}, which is none of the hosts {hosts} of "
            f"{HOSTS}. SageMaker sets both; set neither by hand, or both."
        )
    return hosts.index(own)


def _variable(name: str) -> str:
    if name not in os.environ:
        raise ValueError(
            f"{name} is not set, so this is no training job of Amazon SageMaker, which "
            f"sets {HOSTS} and {CURRENT_HOST} on each host."
        )
    return os.environ[name]
