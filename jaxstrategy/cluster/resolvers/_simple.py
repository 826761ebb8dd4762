"""`SimpleClusterResolver`: a cluster that is written down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from jaxstrategy.cluster.resolvers._cluster_resolver import (
    ClusterResolver,
    as_url,
)
from jaxstrategy.cluster.resolvers._cluster_spec import ClusterSpec, GivenTasks


@final
class SimpleClusterResolver(ClusterResolver):
    """Gives back what it was given.

    Args:
      cluster_spec: the cluster, a `ClusterSpec` or what makes one.
      master: what `master()` gives if no task is named.
      task_type: what this process is, as `"worker"`.
      task_id: its index among the tasks of that type.
      environment: where this runs; for your own use.
      num_accelerators: what `num_accelerators()` gives for every task, as
        `{"GPU": 8}`; nothing is looked for.
      rpc_layer: what `master` puts before addresses.

    Raises:
      TypeError: `cluster_spec` is no cluster, or `master` is no string.

    >>> resolver = js.cluster_resolver.SimpleClusterResolver(
    ...     {"chief": ["a:2222"], "worker": ["b:2222"]}, task_type="worker", task_id=0
    ... )
    >>> resolver.process()
    Process(index=1, count=2, coordinator='a:2222')
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, GivenTasks],
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(master, str):
            raise TypeError(f"`master` is {master!r}. Give an address, a string.")
        self._cluster_spec = ClusterSpec(cluster_spec)
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """The cluster that was given."""
        return self._cluster_spec

    def _own_master(
        self, task_type: str | None, task_id: int | None, rpc_layer: str | None
    ) -> str:
        return as_url(self._master, rpc_layer or self.rpc_layer)

    def _accelerators(
        self, task_type: str | None, task_id: int | None
    ) -> dict[str, int]:
        return dict(self._num_accelerators)
