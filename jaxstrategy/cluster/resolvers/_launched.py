"""The launcher's environment variables as a cluster, and the default resolver."""

from __future__ import annotations

import os
from typing import final

from jaxstrategy.cluster.resolvers import _tf_config
from jaxstrategy.cluster.resolvers._cluster_resolver import (
    ClusterResolver,
    Process,
)
from jaxstrategy.cluster.resolvers._cluster_spec import (
    ClusterSpec,
    host_and_port,
)
from jaxstrategy.cluster.resolvers._sagemaker_resolver import (
    SageMakerClusterResolver,
)
from jaxstrategy.cluster.resolvers._tf_config import TFConfigClusterResolver

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
    """`TF_CONFIG` if it is set, else what a launcher or SageMaker set, else None.

    Of SageMaker only a job of several hosts, each of which would train alone. None
    leaves it to other variables and `jax.distributed`, if there is a cluster.

    Raises:
      ValueError: a variable is missing or malformed.
    """
    if _tf_config.tells_of_cluster():
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
