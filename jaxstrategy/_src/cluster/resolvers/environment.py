"""Clusters of environment variables: TF_CONFIG, launchers, SageMaker; the default."""

from __future__ import annotations

import json
import os
from typing import Any, TypeAlias, final

from jaxstrategy._src.cluster.resolvers.cluster_resolver import (
    ClusterResolver,
    Place,
    Process,
    all_tasks,
)
from jaxstrategy._src.cluster.resolvers.cluster_spec import (
    ClusterSpec,
    checked_port,
    host_and_port,
    task_index,
)

VARIABLE = "TF_CONFIG"
Json: TypeAlias = Any  # of the environment: looked at where it is used
_WANTED = (
    'It looks like {"cluster": {"worker": ["a:2222", "b:2222"]}, '
    '"task": {"type": "worker", "index": 0}}.'
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

    _is_lone_master = False

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
        spec, kind, index = self._of(task_type, task_id)
        if len(all_tasks(spec, spec.jobs)) > 1 and (kind is None or index is None):
            raise ValueError(f'{VARIABLE} has no "task". {_WANTED}')
        return super().master(task_type, task_id, rpc_layer)

    def process(self) -> Process:
        try:
            return super().process()
        except ValueError as error:
            raise ValueError(
                f"{error} {VARIABLE} is {os.environ.get(VARIABLE, '')}"
            ) from error

    def _found_task(self) -> Place:
        task = _part(_config(), "task")
        task_type, index = task.get("type"), task.get("index")
        if not isinstance(task_type, str | int | None):
            raise ValueError(
                f'"type" of {VARIABLE}\'s task is {task_type!r}. {_WANTED}'
            )
        if index is not None and task_index(index) is None:
            raise ValueError(
                f"The index of {VARIABLE}'s task is {index!r}; it is a whole number "
                f"from 0 on. {_WANTED}"
            )
        return None if task_type is None else str(task_type), task_index(index)

    def _found_rpc_layer(self) -> str | None:
        return _config().get("rpc_layer")


def _config() -> dict[str, Json]:
    text, config = _json(VARIABLE, "{}", _WANTED)
    if not isinstance(config, dict):
        raise ValueError(f"{VARIABLE} is {text}, which is no object. {_WANTED}")
    for key in ("session_master", "rpc_layer"):
        if not isinstance(config.get(key), str | None):
            raise ValueError(
                f'"{key}" of {VARIABLE} is {config[key]!r}; it is a string.'
            )
    return config


def _part(config: dict[str, Json], key: str) -> dict[str, Json]:
    part = config.get(key)
    if part is not None and not isinstance(part, dict):
        raise ValueError(f'"{key}" of {VARIABLE} is {json.dumps(part)}. {_WANTED}')
    return part or {}


def _json(name: str, empty: str, wanted: str) -> tuple[str, Json]:
    """What an environment variable holds, and the text of it."""
    text = os.environ.get(name, "").strip() or empty
    try:
        return text, json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON ({error}): {text} {wanted}") from error


HOSTS = "SM_HOSTS"
CURRENT_HOST = "SM_CURRENT_HOST"
_MPI = "OMPI_COMM_WORLD_SIZE"  # Open MPI sets it, also where SageMaker starts it


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

    _is_lone_master = False

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        super().__init__(task_type, task_id, rpc_layer, environment or "")
        self._port = checked_port(port, "port")

    def cluster_spec(self) -> ClusterSpec:
        """The hosts as workers, without jobs if SageMaker names no host.

        Raises:
          ValueError: a variable is missing or malformed.
        """
        workers = [f"{host}:{self._port}" for host in _hosts()[0]]
        return ClusterSpec({"worker": workers} if workers else {})

    def _found_task(self) -> Place:
        hosts, index = _hosts()
        return ("worker", index) if hosts else (None, None)


def _hosts() -> tuple[list[str], int]:
    """The names of the hosts as TensorFlow orders them, and which is this one."""
    for name in (HOSTS, CURRENT_HOST):
        if name not in os.environ:
            raise ValueError(
                f"{name} is not set, so this is no training job of Amazon SageMaker, "
                f"which sets {HOSTS} and {CURRENT_HOST} on each host."
            )
    wanted = 'It looks like ["algo-1", "algo-2"].'
    text, hosts = _json(HOSTS, "[]", wanted)
    if not isinstance(hosts, list) or not all(
        isinstance(host, str) and host.strip() for host in hosts
    ):
        raise ValueError(f"{HOSTS} is {text}, which is no list of names. {wanted}")
    own = os.environ[CURRENT_HOST].strip()
    # One host does not need to know its name, as in TensorFlow.
    if not hosts or (not own and len(hosts) == 1):
        return [], 0
    if own not in hosts:
        raise ValueError(
            f"{CURRENT_HOST} is {own!r}, which is none of the hosts {sorted(hosts)} of "
            f"{HOSTS}. SageMaker sets both; set neither by hand, or both."
        )
    hosts.sort()
    return hosts, hosts.index(own)


COORDINATOR = "JAXSTRATEGY_COORDINATOR"
PROCESS_ID = "JAXSTRATEGY_PROCESS_ID"
NUM_PROCESSES = "JAXSTRATEGY_NUM_PROCESSES"
LOCAL_RANK = "JAXSTRATEGY_LOCAL_RANK"
ATTEMPT = "JAXSTRATEGY_ATTEMPT"
COMPILATION_CACHE = "JAXSTRATEGY_COMPILATION_CACHE"  # a folder
JOB = "JAXSTRATEGY_JOB"  # the same for all processes that belong together
MEMORY = "JAXSTRATEGY_MEMORY"  # a folder in memory that lasts as long as the job

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
    config = _config()
    if config.get("cluster") or config.get("task"):
        return TFConfigClusterResolver()
    if any(os.environ.get(name) for name in _NEEDED):
        return LaunchedClusterResolver()
    # Under MPI each host has several processes, which JAX finds.
    is_sagemaker = os.environ.get(HOSTS) or os.environ.get(CURRENT_HOST)
    if is_sagemaker and not os.environ.get(_MPI) and len(_hosts()[0]) > 1:
        return SageMakerClusterResolver()
    return None


def _number(name: str, default: str = "") -> int:
    text = os.environ.get(name) or default
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}; it is a whole number from 0 on.")
    return int(text)
