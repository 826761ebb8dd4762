"""`TPUClusterResolver`: the hosts of the TPU on which this program runs."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, NamedTuple, Self, final

from jaxstrategy._src.cluster.resolvers.cluster_resolver import (
    TRAINING,
    ClusterResolver,
    Place,
    Process,
    all_tasks,
)
from jaxstrategy._src.cluster.resolvers.cluster_spec import ClusterSpec
from jaxstrategy._src.cluster.resolvers.environment import default_resolver
from jaxstrategy._src.text import shown


class TPUSystemMetadata(NamedTuple):
    """The devices and hosts of a TPU, or of what JAX has instead of one.

    Attributes:
      num_cores: the number of devices of all hosts.
      num_hosts: the number of processes, which on a TPU is that of hosts.
      num_of_cores_per_host: the number of devices of each.
      topology: None; `js.tpu.experimental.initialize_tpu_system()` returns it.
      devices: the devices of JAX, those of process 0 first.

    >>> import jaxstrategy as js
    >>> _ = js.simulate(8)
    >>> resolver = js.cluster_resolver.TPUClusterResolver("local")
    >>> metadata = resolver.get_tpu_system_metadata()
    >>> metadata.num_cores, metadata.num_hosts, metadata.num_of_cores_per_host
    (8, 1, 8)
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: None
    devices: list[Any]


NAME = "TPU_NAME"
HOSTS = "TPU_WORKER_HOSTNAMES"
WORKER_ID = "TPU_WORKER_ID"
_SLICES = "MEGASCALE_COORDINATOR_ADDRESS"
_LOCAL = "local"
_PORT = 8476  # where JAX lets the processes of a TPU meet


@final
class TPUClusterResolver(ClusterResolver):
    """The hosts of the TPU on which this program runs, as Google's machines tell.

    The program runs on the hosts of the TPU themselves, one process on each, so that
    nothing is asked of a cloud: the hosts are those that `TF_CONFIG` or a launcher
    names, or else the environment variables `TPU_WORKER_HOSTNAMES` and
    `TPU_WORKER_ID`, or the processes that JAX has found. Without a TPU it tells of the
    devices that there are.

    Args:
      tpu: None or `""` for the TPU on which this runs; `"local"` for the devices of
        this host alone; or its name, if `TPU_NAME` in the environment is the same.
      zone: not needed to find a TPU on which this runs.
      project: not needed either.
      job_name: of the hosts' tasks in the cluster.
      coordinator_name: the job of a further task, which does not train.
      coordinator_address: of that task.
      credentials: not needed; they are for the interface of the cloud.
      service: not needed either.
      discovery_url: not needed either.

    Raises:
      ValueError: a TPU on which this does not run; a coordinator without an address.
      TypeError: `tpu` is no string.

    >>> import jaxstrategy as js
    >>> resolver = js.cluster_resolver.TPUClusterResolver("local")
    >>> resolver.task_type, resolver.task_id, resolver.master()
    ('worker', 0, '')
    >>> resolver.process().count
    1
    """

    def __init__(
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: object = "default",
        service: object = None,
        discovery_url: str | None = None,
    ) -> None:
        self.tpu = _checked_name(tpu)
        self._job = job_name
        self._coordinator: dict[str, list[str]] = {}
        if coordinator_name is not None:
            if not coordinator_address:
                raise ValueError(
                    f"`coordinator_name` was {coordinator_name!r} without a "
                    "`coordinator_address`. No server is started here: give the "
                    "address, or leave out both."
                )
            self._coordinator[coordinator_name] = [coordinator_address]

    @classmethod
    def connect(
        cls,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
    ) -> TPUClusterResolver:
        """A resolver; there is nothing to connect to.

        A strategy, or `js.tpu.experimental.initialize_tpu_system`, lets the processes
        meet.

        Args:
          tpu: as of the resolver.
          zone: not needed.
          project: not needed.

        Raises:
          ValueError: a TPU on which this does not run.
          TypeError: `tpu` is no string.
        """
        return cls(tpu, zone, project)

    @property
    def is_local(self) -> bool:
        """Whether it tells of this host alone."""
        return self.tpu == _LOCAL

    def cluster_spec(self) -> ClusterSpec:
        """The hosts as tasks of one job; empty where none is known.

        Raises:
          ValueError: an environment variable is malformed.
        """
        found, _ = self._hosts()
        return ClusterSpec({self._job: found, **self._coordinator} if found else {})

    def process(self) -> Process:
        hosts, index = self._hosts()
        return Process(index, len(hosts), hosts[0]) if hosts else Process(0, 1, "")

    def get_master(self) -> str:
        """`master()`."""
        return self.master()

    def get_job_name(self) -> str | None:
        """The job of the hosts' tasks."""
        return self.task_type

    def get_coordination_service_leader(self) -> str:
        """The task in which the processes meet, `/job:worker/task:0`."""
        return f"/job:{self.get_job_name()}/task:0"

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """The numbers of devices and hosts, and the devices.

        It asks JAX, which starts the devices; in a cluster, build the strategy first.
        """
        devices = self.devices()
        hosts = len({device.process_index for device in devices})
        return TPUSystemMetadata(
            len(devices), hosts, len(devices) // hosts, None, devices
        )

    def devices(self) -> list[Any]:
        """JAX's devices, those of process 0 first; of a local TPU those of this host.

        It asks JAX, which starts the devices; in a cluster, build the strategy first.
        """
        import jax  # only here, as in `cluster_resolver`

        found = jax.local_devices() if self.is_local else jax.devices()
        return sorted(found, key=lambda d: (d.process_index, d.id))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing is open."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"TPUClusterResolver({self.tpu!r})"

    def _accelerators_of(
        self, task_type: str | None, task_id: int | None
    ) -> dict[str, int]:
        import jax  # only here, as in `cluster_resolver`

        # All hosts of a TPU have as many.
        tpus = [device for device in jax.local_devices() if device.platform == "tpu"]
        return {"TPU": len(tpus)}

    def _found_task(self) -> Place:
        return self._job, self._hosts()[1]

    def _found_rpc_layer(self) -> str:
        return "grpc"

    def _hosts(self) -> tuple[list[str], int]:
        """The address of each process, and which is this one; none if none is known."""
        if self.is_local:
            return [], 0
        others = default_resolver()
        if others is not None:
            tasks = all_tasks(spec := others.cluster_spec(), TRAINING)
            return [spec.task_address(*each) for each in tasks], others.process().index
        # With several slices, the variable has the hosts of one of them.
        if os.environ.get(HOSTS, "").strip() and not os.environ.get(_SLICES):
            return _of_environment()
        import jax  # only here, as in `cluster_resolver`

        # It does not say the addresses of the processes that it has found.
        count = jax.process_count() if jax.distributed.is_initialized() else 0
        index = jax.process_index() if count else 0
        return [f"process-{k}:0" for k in range(count)], index


def _of_environment() -> tuple[list[str], int]:
    names = [name.strip() for name in os.environ[HOSTS].split(",") if name.strip()]
    text = os.environ.get(WORKER_ID, "").strip() or ("0" if len(names) == 1 else "")
    if not text.isdecimal() or int(text) >= len(names):
        raise ValueError(
            f"{WORKER_ID} is {text!r} and {HOSTS} has {len(names)} hosts; a whole "
            f"number from 0 to {len(names) - 1} was wanted, the place of this host "
            "among them. To use the devices of this host alone, give "
            '`TPUClusterResolver("local")`.'
        )
    return [f"{name}:{_PORT}" for name in names], int(text)


def _checked_name(given: object) -> str:
    """The name of the TPU on which this runs, which may be empty."""
    if given is not None and not isinstance(given, str):
        raise TypeError(
            f"`tpu` was {shown(given)}; the name of a TPU was wanted, a string, or "
            "None for the one on which this runs."
        )
    here = os.environ.get(NAME, "")
    if not given:
        return here
    if given in (_LOCAL, here):
        return given
    raise ValueError(
        f"`tpu` was {given!r}, and this program does not know to run on a TPU of that "
        f"name: {NAME} in the environment is {here!r}. Programs run on the hosts of "
        "the TPU themselves, one process on each, and nothing is asked of a cloud or "
        "sent to a server. Start this program on each host (`gcloud compute tpus "
        "tpu-vm ssh NAME --worker=all --command=...`) with `TPUClusterResolver()`, or "
        'with `TPUClusterResolver("local")` for the devices of one host.'
    )
