"""`ClusterSpec`, the tasks of a cluster by job, and addresses as sockets want them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast, final

from jaxstrategy._src.text import shown, whole

Tasks: TypeAlias = list[str] | dict[int, str]
GivenTasks: TypeAlias = Sequence[str] | Mapping[int, str]
"""The addresses of a job, as users give them."""

_ADDRESS = re.compile(
    r"(?P<host>\[[0-9a-fA-F:.%\w]+\]|(?!-)[\w.-]+):(?P<port>[0-9]{1,5})"
)


@final
class ClusterSpec:
    """The tasks of a cluster: for each job the addresses of its processes.

    Args:
      cluster: by job name, the addresses in the order of the tasks; or, where not all
        are known, a dict from task index to address; or another `ClusterSpec`.

    It is equal to another one, or to such a dict, that describes the same tasks. It is
    false if it has no job.

    Raises:
      TypeError: something else, or an address that is no string.
      ValueError: a task index that is no whole number from 0 on, or an empty address.

    >>> spec = js.cluster_resolver.ClusterSpec(
    ...     {"chief": ["a:2222"], "worker": {1: "c:2222"}}
    ... )
    >>> spec.jobs
    ['chief', 'worker']
    >>> spec.task_address("worker", 1), spec.num_tasks("worker")
    ('c:2222', 1)
    >>> spec.as_dict()
    {'chief': ['a:2222'], 'worker': {1: 'c:2222'}}
    """

    def __init__(self, cluster: ClusterSpec | Mapping[str, GivenTasks]) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        if not isinstance(cluster, Mapping):
            raise TypeError(
                f"`cluster` is {cluster!r}. Give a dict from job names to lists of "
                'addresses, like {"worker": ["a:2222", "b:2222"]}, or a ClusterSpec.'
            )
        self._jobs = {job: _tasks(job, given) for job, given in cluster.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """The number of tasks of the job.

        Raises:
          ValueError: there is no such job.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The indices of the job's tasks, rising.

        Raises:
          ValueError: there is no such job.
        """
        return list(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """The address of one task.

        Raises:
          ValueError: there is no such job, or no such task in it.
        """
        job = self._job(job_name)
        if task_index not in job:
            raise ValueError(
                f"There is no task {task_index!r} in job {job_name!r}: its tasks are "
                f"{list(job)}."
            )
        return job[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The addresses of the job's tasks by index, None where one is not known.

        Raises:
          ValueError: there is no such job.

        >>> spec = js.cluster_resolver.ClusterSpec({"ps": {2: "b:1", 0: "a:1"}})
        >>> spec.job_tasks("ps")
        ['a:1', None, 'b:1']
        """
        job = self._job(job_name)
        return [job.get(index) for index in range(max(job, default=-1) + 1)]

    def as_dict(self) -> dict[str, Tasks]:
        """The tasks by job: a list where all indices from 0 on are there, else a dict.

        As in TensorFlow, a job without tasks is an empty dict.
        """

        def is_dense(job: dict[int, str]) -> bool:
            return bool(job) and list(job) == list(range(len(job)))

        return {
            name: list(job.values()) if is_dense(job) else dict(job)
            for name, job in self._jobs.items()
        }

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Mapping):
            try:
                other = ClusterSpec(other)
            except (TypeError, ValueError):
                return False
        if not isinstance(other, ClusterSpec):
            return NotImplemented
        return self._jobs == other._jobs

    def __repr__(self) -> str:
        jobs = self.as_dict()
        inside = ", ".join(f"{name!r}: {jobs[name]!r}" for name in sorted(jobs))
        return f"ClusterSpec({{{inside}}})"

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._jobs:
            raise ValueError(
                f"No such job in cluster: {name!r}. The jobs are {self.jobs}."
            )
        return self._jobs[name]


def _tasks(job: object, given: object) -> dict[int, str]:
    """The tasks by index, rising."""
    if not isinstance(job, str):
        raise TypeError(f"{job!r} is not the name of a job. Names are strings.")
    if isinstance(given, (list, tuple)):
        given = dict(enumerate(given))
    if not isinstance(given, Mapping):
        raise TypeError(
            f"The tasks of job {job!r} are {given!r}. Give a list of addresses, or a "
            "dict from task indices to addresses."
        )
    tasks: dict[int, str] = {}
    for key, address in given.items():
        index = task_index(key)
        if index is None:
            raise ValueError(
                f"Job {job!r} has a task with the index {key!r}. Indices are whole "
                "numbers from 0 on."
            )
        if not isinstance(address, str):
            raise TypeError(
                f"The address of task {key} in job {job!r} is {address!r}. Give a "
                'string, like "host:2222".'
            )
        if not address.strip():
            raise ValueError(f"The address of task {key} in job {job!r} is empty.")
        tasks[index] = address
    return dict(sorted(tasks.items()))


def task_index(given: object) -> int | None:
    """The index of a task, None if it is no whole number from 0 on."""
    # JSON has string keys only, so "1" is taken for 1, as TensorFlow does.
    text = isinstance(given, str) and given.isdecimal()
    number = int(cast(str, given)) if text else whole(given)
    return None if number is None or number < 0 else number


def checked(
    name: str, given: object, wanted: str, least: int = 1, most: float = math.inf
) -> int:
    """A whole number that was given for `name`."""
    number = whole(given)
    if number is None or not least <= number <= most:
        raise ValueError(f"{name} was {shown(given)}; {wanted}")
    return number


def checked_port(given: object, name: str = "port") -> int:
    """A port that was given as the argument `name`."""
    wanted = "a port was wanted, a whole number from 1 to 65535, at which each task "
    return checked(f"`{name}`", given, f"{wanted}listens.", 1, 65535)


def host_and_port(address: str) -> tuple[str, int]:
    """Host and port of an address."""
    found = _ADDRESS.fullmatch(address)
    try:
        # What sockets raise for an empty label is hard to read.
        if found and 0 < int(found["port"]) < 65536 and found["host"].encode("idna"):
            return found["host"], int(found["port"])
    except UnicodeError:
        pass
    raise ValueError(
        f"{address!r} is not an address. Give it as host:port with a port from 1 to "
        '65535, like "node7:2222", "10.0.0.7:2222" or "[fd00::7]:2222".'
    )


def endpoint(address: str) -> tuple[str, int]:
    """Host and port as sockets want them; raises as `host_and_port`."""
    host, port = host_and_port(address)
    return host.removeprefix("[").removesuffix("]"), port


def address_of(host: str, port: int) -> str:
    """The opposite of `endpoint`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
