"""Clusters of environment variables: TF_CONFIG, launchers, SageMaker; the default."""

from __future__ import annotations

import json
import os
from typing import Any, TypeAlias, final

from jaxstrategy._src.cluster.resolvers.cluster_resolver import ClusterResolver, Process
from jaxstrategy._src.cluster.resolvers.cluster_spec import (
    ClusterSpec,
    checked_port,
    checked_task_id,
    host_and_port,
    task_index,
)

VARIABLE = "TF_CONFIG"
Json: TypeAlias = Any  # of the environment: looked at where it is used
_EXAMPLE = (
    '{"cluster": {"worker": ["a:2222", "b:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


@final
class TFConfigClusterResolver(ClusterResolver):
    """Reads `TF_CONFIG`, the JSON that TensorFlow's clusters set for every process.

    It is read anew at each call:

        {"cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]},
         "task": {"type": "worker", "index": 0}}

    Args:
      task_type: instead of the task's `type`.
      task_id: instead of the task's `index`.
      rpc_layer: instead of the `rpc_layer` there.
      environment: what `environment` gives.

    All methods raise ValueError, and quote what is wrong, if `TF_CONFIG` is malformed.

    >>> import json, os
    >>> os.environ["TF_CONFIG"] = json.dumps({
    ...     "cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]},
    ...     "task": {"type": "worker", "index": 1},
    ... })
    >>> js.cluster_resolver.TFConfigClusterResolver().process()
    Process(index=2, count=3, coordinator='a:2222')
    >>> del os.environ["TF_CONFIG"]
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str = "",
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """The cluster of `TF_CONFIG`, without jobs if there is none.

        Raises:
          ValueError: `TF_CONFIG` is malformed; the message quotes what is wrong.
        """
        cluster = _part(_config(), "cluster")
        try:
            return ClusterSpec(cluster)
        except (TypeError, ValueError) as error:
            raise ValueError(f'"cluster" of {VARIABLE} is wrong. {error}') from error

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """The `session_master` of `TF_CONFIG` if there is one, else a task's address.

        Without arguments that of this process; empty if it is the only task.

        Raises:
          ValueError: there is no such task, or this process's task is not known.
        """
        session_master = _config().get("session_master")
        if session_master is not None:
            return session_master
        spec = self.cluster_spec()
        if sum(map(spec.num_tasks, spec.jobs)) <= 1:
            return ""
        task_type, task_id = self._completed(task_type, task_id)
        if task_type is None or task_id is None:
            raise ValueError(f'{VARIABLE} has no "task". {_wanted()}')
        return self._url_of(task_type, task_id, rpc_layer)

    def process(self) -> Process:
        """As in `ClusterResolver`, from `TF_CONFIG`.

        Raises:
          ValueError: `TF_CONFIG` is malformed, or the cluster or the task is not one
            that can train; the message quotes what is wrong.
        """
        try:
            return super().process()
        except ValueError as error:
            raise ValueError(
                f"{error} {VARIABLE} is {os.environ.get(VARIABLE, '')}"
            ) from error

    def _found_task_type(self) -> str | None:
        found = _part(_config(), "task").get("type")
        if found is None or isinstance(found, (str, int)):
            return None if found is None else str(found)
        raise ValueError(f'"type" of {VARIABLE}\'s task is {found!r}. {_wanted()}')

    def _found_task_id(self) -> int | None:
        found = _part(_config(), "task").get("index")
        return None if found is None else _index(found)

    def _as_task_type(self, given: str) -> str:
        return str(given)  # a number is text, as in TensorFlow

    def _as_task_id(self, given: int) -> int:
        return _index(given)

    def _found_rpc_layer(self) -> str | None:
        return _config().get("rpc_layer")

    def _accelerators(
        self, task_type: str | None, task_id: int | None
    ) -> dict[str, int]:
        if task_type is None and task_id is None:
            return super()._accelerators(None, None)
        return super()._accelerators(*self._completed(task_type, task_id))


def tells_of_cluster() -> bool:
    """Whether `TF_CONFIG` has a cluster or a task."""
    config = _config()
    return bool(config.get("cluster") or config.get("task"))


def _config() -> dict[str, Json]:
    text = os.environ.get(VARIABLE, "").strip() or "{}"
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{VARIABLE} is not JSON ({error}): {text} {_wanted()}"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{VARIABLE} is {text}, which is no object. {_wanted()}")
    for key in ("session_master", "rpc_layer"):
        if not isinstance(config.get(key), str | None):
            raise ValueError(
                f'"{key}" of {VARIABLE} is {config[key]!r}; it is a string.'
            )
    return config


def _part(config: dict[str, Json], key: str) -> dict[str, Json]:
    part = config.get(key)
    if part is not None and not isinstance(part, dict):
        raise ValueError(f'"{key}" of {VARIABLE} is {json.dumps(part)}. {_wanted()}')
    return part or {}


def _index(index: object) -> int:
    found = task_index(index)
    if found is not None:
        return found
    raise ValueError(
        f"The index of {VARIABLE}'s task is {index!r}; it is a whole number from 0 on. "
        + _wanted()
    )


def _wanted() -> str:
    return f"It looks like {_EXAMPLE}."


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


COORDINATOR = "JAXSTRATEGY_COORDINATOR"
PROCESS_ID = "JAXSTRATEGY_PROCESS_ID"
NUM_PROCESSES = "JAXSTRATEGY_NUM_PROCESSES"
LOCAL_RANK = "JAXSTRATEGY_LOCAL_RANK"
ATTEMPT = "JAXSTRATEGY_ATTEMPT"
COMPILATION_CACHE = "JAXSTRATEGY_COMPILATION_CACHE"  # a folder
JOB = "JAXSTRATEGY_JOB"  # the same for all processes that belong together

LATE = "jaxstrategy: at the end: "
"""The beginning of process 0's line about late processes; the launcher repeats it."""

OF_PROCESS = (COORDINATOR, PROCESS_ID, NUM_PROCESSES, LOCAL_RANK, ATTEMPT, JOB)
"""What is another process's, and is not handed on."""

_NEEDED = (COORDINATOR, PROCESS_ID, NUM_PROCESSES)


@final
class LaunchedClusterResolver(ClusterResolver):
    """Reads what `python -m jaxstrategy.launch` sets for every process.

    Any other launcher may set it too: `JAXSTRATEGY_COORDINATOR` (`host:port`, where
    process 0 listens), `JAXSTRATEGY_PROCESS_ID` and `JAXSTRATEGY_NUM_PROCESSES`; and,
    where it knows, `JAXSTRATEGY_LOCAL_RANK` (the rank on this host) and
    `JAXSTRATEGY_ATTEMPT` (0 at first, one more at every restart). On several hosts also
    `JAXSTRATEGY_CLUSTER_SECRET`, the same random word for all processes of a job.

    Raises:
      ValueError: one is missing or malformed.

    >>> import os
    >>> os.environ["JAXSTRATEGY_COORDINATOR"] = "a:2222"
    >>> os.environ["JAXSTRATEGY_PROCESS_ID"] = "1"
    >>> os.environ["JAXSTRATEGY_NUM_PROCESSES"] = "2"
    >>> js.cluster_resolver.LaunchedClusterResolver().process()
    Process(index=1, count=2, coordinator='a:2222')
    >>> for name in ("COORDINATOR", "PROCESS_ID", "NUM_PROCESSES"):
    ...     del os.environ[f"JAXSTRATEGY_{name}"]
    """

    def __init__(self) -> None:
        self.task_type, self.task_id = "worker", self.process().index

    @staticmethod
    def is_launched() -> bool:
        """Whether any of the variables is set."""
        return any(os.environ.get(name) for name in _NEEDED)

    def cluster_spec(self) -> ClusterSpec:
        """The processes as workers.

        Only the coordinator has a port, so it alone has an address; process 1 is
        called `process-1:0`, and so on.

        Raises:
          ValueError: a variable is missing or malformed.
        """
        process = self.process()
        others = [f"process-{index}:0" for index in range(1, process.count)]
        return ClusterSpec({"worker": [process.coordinator, *others]})

    def process(self) -> Process:
        """The rank and the number of processes, as the launcher set them.

        Raises:
          ValueError: a variable is missing or malformed.
        """
        missing = [name for name in _NEEDED if not os.environ.get(name)]
        if missing:
            raise ValueError(
                f"{' and '.join(missing)} must be set in the environment, together "
                f"with the others of {', '.join(_NEEDED)}. "
                "`python -m jaxstrategy.launch` sets them."
            )
        coordinator = os.environ[COORDINATOR]
        try:
            host_and_port(coordinator)
        except ValueError as error:
            raise ValueError(f"{COORDINATOR} is wrong: {error}") from error
        index, count = _number(PROCESS_ID), _number(NUM_PROCESSES)
        if index >= count:
            raise ValueError(
                f"{PROCESS_ID} is {index} and {NUM_PROCESSES} is {count}. Processes "
                "are numbered from 0, so the number must be smaller than the count."
            )
        return Process(index, count, coordinator)

    @property
    def local_rank(self) -> int:
        """The rank of this process on its host; 0 where the launcher does not say.

        Raises:
          ValueError: what it says is no whole number.
        """
        return _number(LOCAL_RANK, default="0")

    @property
    def attempt(self) -> int:
        """The number of starts of the job before; 0 where the launcher does not say.

        Raises:
          ValueError: what it says is no whole number.
        """
        return _number(ATTEMPT, default="0")


def default_resolver() -> ClusterResolver | None:
    """`TF_CONFIG` if it is set, else what a launcher or SageMaker set, else None."""
    if tells_of_cluster():
        return TFConfigClusterResolver()
    if LaunchedClusterResolver.is_launched():
        return LaunchedClusterResolver()
    if SageMakerClusterResolver.is_several_hosts():
        return SageMakerClusterResolver()
    return None


def _number(name: str, default: str = "") -> int:
    text = os.environ.get(name) or default
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; it is a whole number from 0 on.")
    return int(text)
