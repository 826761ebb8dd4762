"""`UnionClusterResolver`: several clusters seen as one."""

from __future__ import annotations

from typing import final

from jaxstrategy.cluster.resolvers._cluster_resolver import ClusterResolver
from jaxstrategy.cluster.resolvers._cluster_spec import ClusterSpec


@final
class UnionClusterResolver(ClusterResolver):
    """The tasks of several resolvers together; also known as `UnionResolver`.

    Where two name the same job, lists of tasks follow each other; tasks that are given
    with their indices keep them. `num_accelerators`, and `master` without a task, give
    what the first resolver says.

    Args:
      *args: the resolvers.
      rpc_layer: what `master` puts before addresses; by default the first resolver's.
      task_type: what this process is; by default the first resolver's.
      task_id: its index among the tasks of that type; by default the first resolver's.

    Raises:
      ValueError: there is no resolver.
      TypeError: something that is no resolver.

    >>> Simple = js.cluster_resolver.SimpleClusterResolver
    >>> js.cluster_resolver.UnionResolver(
    ...     Simple({"worker": ["a:1", "b:1"]}), Simple({"worker": ["c:1"]})
    ... ).cluster_spec()
    ClusterSpec({'worker': ['a:1', 'b:1', 'c:1']})
    """

    def __init__(
        self,
        *args: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        if not args:
            raise ValueError(
                "At least one ClusterResolver is required; none was given."
            )
        for resolver in args:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    f"All arguments must be resolvers, got {resolver!r}. Put a "
                    "cluster into a SimpleClusterResolver."
                )
        self._resolvers = args
        self._rpc_layer = rpc_layer
        self._task_type = task_type
        self._task_id = task_id

    def cluster_spec(self) -> ClusterSpec:
        """All tasks of all resolvers.

        Raises:
          KeyError: two of them give an address to the same task.
        """
        specs = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        jobs = dict.fromkeys(job for spec in specs for job in spec)
        return ClusterSpec(
            {job: _merged(job, [s[job] for s in specs if job in s]) for job in jobs}
        )

    @property
    def environment(self) -> str:
        """The first resolver's."""
        return self._first.environment

    def _found_task_type(self) -> str | None:
        return self._first.task_type

    def _found_task_id(self) -> int | None:
        return self._first.task_id

    def _found_rpc_layer(self) -> str | None:
        return self._first.rpc_layer

    def _own_master(
        self, task_type: str | None, task_id: int | None, rpc_layer: str | None
    ) -> str:
        return self._first.master(rpc_layer=rpc_layer or self._rpc_layer)

    def _accelerators(
        self, task_type: str | None, task_id: int | None
    ) -> dict[str, int]:
        return self._first.num_accelerators(task_type, task_id)

    @property
    def _first(self) -> ClusterResolver:
        return self._resolvers[0]


def _merged(
    job: str, given: list[list[str] | dict[int, str]]
) -> list[str] | dict[int, str]:
    lists = [tasks for tasks in given if isinstance(tasks, list)]
    if len(lists) == len(given):
        return [address for tasks in lists for address in tasks]
    merged: dict[int, str] = {}
    for tasks in given:
        tasks = dict(enumerate(tasks)) if isinstance(tasks, list) else tasks
        twice = sorted(merged.keys() & tasks.keys())
        if twice:
            raise KeyError(
                f"Several resolvers give an address to the tasks {twice} of job "
                f"{job!r}. Give each task to one of them, or give lists, which follow "
                "each other."
            )
        merged |= tasks
    return merged
