"""One replica on each of several devices of this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from jaxstrategy._src.communication_options import CommunicationOptions
from jaxstrategy._src.reductions.cross_device_ops import CrossDeviceOps
from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.state_sharding import StateSharding
from jaxstrategy._src.strategies.strategy import Strategy


@final
class MirroredStrategy(Strategy):
    """One replica per device of this host; state is mirrored on all of them.

    Args:
      devices: `jax.Device`s or names such as `"GPU:1"`, in replica order. The name of
        a platform by itself, `"GPU"`, means all its devices on this host. By default
        all accelerators, or all CPU devices where there is none.
      cross_device_ops: how values are reduced over the replicas: `NcclAllReduce`,
        `HierarchicalCopyAllReduce`, `ReductionToOneDevice`, or a `CrossDeviceOps` of
        yours. By default all-reduces, with small arrays joined.
      communication_options: the same, in more detail.
      sharding: a `StateSharding`: each replica keeps a part of the optimizer's state,
        or of all state, instead of all of it. Steps stay what they are.
      logical_axes: names and sizes of further axes of the mesh, such as `{"core": 2}`:
        so many devices together are one replica, which divides its arrays over them
        as `jax.lax.with_sharding_constraint` says.
      replicas_per_device: how many replicas share a device.

    Raises:
      ValueError: an empty list, a device given twice or unknown here, or devices of
        several platforms; the operations name other replicas or devices.
      TypeError: something else than devices and names, or than operations or options.

    >>> import jaxstrategy as js
    >>> _ = js.simulate(8)
    >>> js.MirroredStrategy()
    MirroredStrategy(8 replicas on cpu:0..7)
    >>> js.MirroredStrategy(["CPU:0", "CPU:2"])
    MirroredStrategy(2 replicas on cpu:0, cpu:2)
    >>> sharded = js.MirroredStrategy(sharding=js.StateSharding("state", min_bytes=0))
    >>> w = sharded.mirror(np.zeros((16, 3), "float32"))
    >>> w.shape, w.sharding.shard_shape(w.shape), isinstance(w, js.Sharded)
    ((16, 3), (2, 3), True)
    >>> js.MirroredStrategy(logical_axes={"core": 2})
    MirroredStrategy(4 replicas of {'core': 2} on cpu:0..7)
    >>> js.MirroredStrategy(["CPU:0", "CPU:1"], replicas_per_device=32)
    MirroredStrategy(64 replicas, 32 on each device, on cpu:0, cpu:1)
    """

    def __init__(
        self,
        devices: Sequence[Device | str] | Device | str | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        sharding: StateSharding | None = None,
        logical_axes: Mapping[str, int] | None = None,
        replicas_per_device: int = 1,
    ) -> None:
        super().__init__(
            _devices.default_devices() if devices is None else _devices.choose(devices),
            cross_device_ops,
            communication_options,
            sharding,
            logical_axes,
            replicas_per_device,
        )
