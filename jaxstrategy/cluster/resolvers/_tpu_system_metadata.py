"""How many devices and hosts a TPU has: `TPUSystemMetadata`."""

from __future__ import annotations

from typing import Any, NamedTuple


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
