"""`ClusterResolver`, `SimpleClusterResolver` and `UnionClusterResolver`."""

from __future__ import annotations

import abc
import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

from jaxstrategy._src.cluster.resolvers.cluster_spec import (
    ClusterSpec,
    GivenTasks,
    Tasks,
    host_and_port,
    task_index,
)
from jaxstrategy._src.text import shown

# In the order of their ranks. `master` is what `chief` was called before.
TRAINING = ("chief", "master", "worker")
_OTHERS = ("ps", "evaluator")
_NO_TRAINERS = {
    "evaluator": "An evaluator is a cluster of its own: use MirroredStrategy there, "
    "and load the checkpoints that the others save.",
    "ps": "Replicas that are kept equal need no parameter servers: leave these tasks "
    "out, or start no training in them.",
}

Place: TypeAlias = tuple[str | None, int | None]
"""The type and the index of a task, None where they are not known."""


@final
@dataclasses.dataclass(frozen=True)
class Process:
    """The place of one process among those that train together.

    Attributes:
      index: its rank: the chief is 0, workers follow in the order of their tasks.
      count: how many train together.
      coordinator: `host:port` of the process of rank 0, where `jax.distributed` lets
        them meet. Empty if the cluster has no tasks: the process is alone.

    >>> import jaxstrategy as js
    >>> cluster = {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]}
    >>> resolver = js.cluster_resolver.SimpleClusterResolver(
    ...     cluster, task_type="worker", task_id=0
    ... )
    >>> process = resolver.process()
    >>> process.index, process.count, process.coordinator
    (1, 3, 'a:2222')
    """

    index: int
    count: int
    coordinator: str


class ClusterResolver(abc.ABC):
    """Tells a process what the cluster is and which of its tasks it is.

    Subclass it to ask a cluster manager of your own. `cluster_spec` is all that is
    needed; set `self.task_type` and `self.task_id` to what this process is.

    Task types are those of TensorFlow: `chief` (a worker with more duties, as saving),
    `worker`, `ps` (a parameter server) and `evaluator`.

    >>> class MyResolver(js.cluster_resolver.ClusterResolver):
    ...     def __init__(self, rank):
    ...         self.task_type, self.task_id = "worker", rank
    ...
    ...     def cluster_spec(self):
    ...         return js.cluster_resolver.ClusterSpec({"worker": ["a:2222", "b:2222"]})
    >>> MyResolver(1).process()
    Process(index=1, count=2, coordinator='a:2222')
    """

    # What was given or set; if None, what the resolver finds counts. A subclass of a
    # user need not call `__init__`.
    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment = ""
    # What was told of accelerators, so that JAX need not be asked.
    _accelerators: Mapping[str, int] | None = None
    _is_lone_master = True  # whether a task without others has an address

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str = "",
    ) -> None:
        self._task_type, self._task_id = task_type, task_id
        self._rpc_layer, self._environment = rpc_layer, environment

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The cluster as it is now; asked for anew at every call."""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The address of a task, as `grpc://host:port` where there is an RPC layer.

        What is not given is what this process is; empty if that is not known.

        Raises:
          ValueError: there is no such task.
        """
        is_named = task_type is not None and task_id is not None
        if not is_named and (unnamed := self._unnamed_master(rpc_layer)) is not None:
            return unnamed
        spec, kind, index = self._of(task_type, task_id)
        is_lone = len(all_tasks(spec, spec.jobs)) <= 1 and not self._is_lone_master
        if kind is None or index is None or is_lone or not (spec or is_named):
            return ""
        return self._url(spec.task_address(kind, index), rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """A task's accelerators, counted by kind: `{"GPU": 8}`. CPUs do not count.

        It asks JAX, which starts the devices; in a cluster, build the strategy first.
        Resolvers that were told, as those of Slurm, ask nobody.

        Args:
          task_type: of the task; by default what this process is.
          task_id: see `task_type`.
          config_proto: not used; TensorFlow 1 had sessions.

        Raises:
          ValueError: it is a task that does not train.
          RuntimeError: JAX does not know the task's process yet.
        """
        return self._accelerators_of(task_type, task_id)

    def _accelerators_of(
        self, task_type: str | None, task_id: int | None
    ) -> dict[str, int]:
        if self._accelerators is not None:
            return dict(self._accelerators)
        # Imported only here: the launcher, which has no devices, reads this module.
        import jax

        devices = jax.local_devices()
        if task_type is not None or task_id is not None:
            spec, kind, index = self._of(task_type, task_id)
            process = self._placed(spec, kind, index)
            if process.count != jax.process_count():
                raise RuntimeError(
                    f"The accelerators of {kind} {index} are not known: the cluster "
                    f"has {process.count} processes, JAX knows {jax.process_count()}. "
                    "Build the strategy first."
                )
            devices = [d for d in jax.devices() if d.process_index == process.index]
        kinds = (device.platform.upper() for device in devices)
        return dict(collections.Counter(kind for kind in kinds if kind != "CPU"))

    def process(self) -> Process:
        """The rank of this process, how many there are, and where they meet.

        The chief has rank 0 and the workers follow. The coordinator is at the address
        of the first of them: that port must be free on that host.

        Raises:
          ValueError: the cluster or the task is not one that can train.
        """
        spec, task_type, task_id = self._now()
        if task_type is None and task_id is None:
            if not spec:
                return Process(0, 1, "")
            if len(tasks := all_tasks(spec, spec.jobs)) == 1:
                ((task_type, task_id),) = tasks
        return self._placed(spec, task_type, task_id)

    @property
    def environment(self) -> str:
        """The place where this runs; an empty string unless a subclass knows better."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """`"chief"`, `"worker"`, `"ps"` or `"evaluator"`; None if it is not known."""
        given = self._task_type  # a number is text, as in TensorFlow
        return self._found_task()[0] if given is None else str(given)

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process among the tasks of its type, or None.

        Raises:
          ValueError: what was given is none.
        """
        given = self._task_id
        return self._found_task()[1] if given is None else checked_task_id(given)

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The prefix that `master` puts before addresses: `"grpc"` makes `grpc://host:port`."""
        # An empty one that was given does not become None where none is found.
        return self._rpc_layer or self._found_rpc_layer() or self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    # What resolvers differ in.

    def _unnamed_master(self, rpc_layer: str | None) -> str | None:
        """The address of no task that was named; None: that of this process."""
        return None

    def _found_task(self) -> Place:
        """The task of this process, for what was not given."""
        return None, None

    def _found_rpc_layer(self) -> str | None:
        """The RPC layer where none was given."""
        return None

    def _now(self) -> tuple[ClusterSpec, str | None, int | None]:
        """The cluster and the task that this process is, at one moment."""
        return self.cluster_spec(), self.task_type, self.task_id

    def _how_to_tell(self) -> str:
        """What to do where it is not known which task this process is."""
        return 'Give both, in TF_CONFIG as "task": {"type": "worker", "index": 0}.'

    # What they share.

    def _of(
        self, task_type: str | None, task_id: int | None
    ) -> tuple[ClusterSpec, str | None, int | None]:
        """The cluster, and a task of it: this process's where it is not given."""
        if task_type is not None and task_id is not None:
            return self.cluster_spec(), task_type, task_id
        spec, own_type, own_id = self._now()
        return (
            spec,
            own_type if task_type is None else task_type,
            own_id if task_id is None else task_id,
        )

    def _placed(
        self, spec: ClusterSpec, task_type: str | None, task_id: int | None
    ) -> Process:
        """The rank of a task among those that train, or why it has none."""
        if task_type is None or task_id is None:
            raise ValueError(
                f"The cluster is {spec}, but which of its tasks this process is, is "
                f"not known: task_type is {task_type!r}, task_id is {task_id!r}. "
                f"{self._how_to_tell()}"
            )
        _check_jobs(spec)
        if task_type not in TRAINING:
            anything = f"Tasks that train are of the type {', '.join(TRAINING)}."
            raise ValueError(
                f"This process is a {task_type!r}, which does not train. "
                f"{_NO_TRAINERS.get(task_type, anything)}"
            )
        tasks = all_tasks(spec, TRAINING)
        if (task_type, task_id) not in tasks:
            raise ValueError(
                f"This process is said to be task {task_id!r} of {task_type!r}, which "
                f"{spec} does not have."
            )
        coordinator = spec.task_address(*tasks[0])
        host_and_port(coordinator)
        return Process(tasks.index((task_type, task_id)), len(tasks), coordinator)

    def _url(self, address: str, rpc_layer: str | None) -> str:
        """`grpc://host:port`, or the bare address without a layer."""
        layer = rpc_layer or self.rpc_layer
        return f"{layer}://{address}" if layer else address


def all_tasks(spec: ClusterSpec, jobs: Sequence[str]) -> list[tuple[str, int]]:
    """The tasks of these jobs, of those that there are."""
    there = [job for job in jobs if job in spec.jobs]
    return [(job, index) for job in there for index in spec.task_indices(job)]


def checked_task_id(given: object) -> int:
    """The index of a task that was given for this process."""
    found = task_index(given)
    if found is None:
        raise ValueError(
            f"`task_id` was {shown(given)}; the index of this process among the tasks "
            "of its type was wanted, a whole number from 0 on."
        )
    return found


def _check_jobs(spec: ClusterSpec) -> None:
    """Check that the cluster is one whose processes can train together."""
    known = (*TRAINING, *_OTHERS)
    if unknown := sorted(set(spec.jobs) - set(known)):
        raise ValueError(
            f"The cluster has the unknown job {unknown[0]!r}. Jobs are "
            f"{', '.join(known)}; the cluster is {spec}."
        )
    chiefs = len(all_tasks(spec, ("chief", "master")))
    if chiefs > 1:
        raise ValueError(
            f"The cluster has {chiefs} chiefs, and there is at most one; make the "
            f"others workers. The cluster is {spec}."
        )
    for job in TRAINING:
        if job in spec.jobs and None in spec.job_tasks(job):
            raise ValueError(
                f"The cluster does not name all tasks of {job!r}: it has "
                f"{spec.task_indices(job)}. Every process must know how many train: "
                "give all addresses."
            )


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
        super().__init__(task_type, task_id, rpc_layer, environment)
        self._cluster_spec = ClusterSpec(cluster_spec)
        self._master = master
        self._accelerators = dict(num_accelerators or {})

    def cluster_spec(self) -> ClusterSpec:
        return self._cluster_spec

    def _unnamed_master(self, rpc_layer: str | None) -> str:
        return self._url(self._master, rpc_layer)


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
        super().__init__(task_type, task_id, rpc_layer)
        self._resolvers, self._first = args, args[0]

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

    def _unnamed_master(self, rpc_layer: str | None) -> str:
        return self._first.master(rpc_layer=rpc_layer or self._rpc_layer)

    def _accelerators_of(
        self, task_type: str | None, task_id: int | None
    ) -> dict[str, int]:
        return self._first.num_accelerators(task_type, task_id)

    def _found_task(self) -> Place:
        return self._first.task_type, self._first.task_id

    def _found_rpc_layer(self) -> str | None:
        return self._first.rpc_layer


def _merged(job: str, given: list[Tasks]) -> Tasks:
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
