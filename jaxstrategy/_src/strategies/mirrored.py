"""`OneDeviceStrategy`, `MirroredStrategy` and `CentralStorageStrategy`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import jax

from jaxstrategy._src.options import CommunicationOptions
from jaxstrategy._src.reductions.cross_device_ops import CrossDeviceOps
from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas, devices_for
from jaxstrategy._src.replicas.state_sharding import StateSharding
from jaxstrategy._src.strategies.choices import Choices
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.variables.policy import ReplicatedVariables


@final
class OneDeviceStrategy(Strategy):
    """One replica on one device, through the same program as many.

    For trying a step before it is run on more devices: everything means what it means
    under `MirroredStrategy`, with one replica.

    Args:
      device: a `jax.Device` or a name such as `"GPU:0"`.

    Raises:
      ValueError: this host has no such device.
      TypeError: something else than a device or a name.

    >>> import jaxstrategy as js
    >>> js.OneDeviceStrategy("CPU:0")
    OneDeviceStrategy(1 replica on cpu:0)
    """

    def __init__(self, device: Device | str) -> None:
        super().__init__((_devices.find(device),))


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
      num_replicas: how many replicas there are, whatever the devices: as many share
        each device as it takes. What a program computes is then the same on any number
        of devices that divides it; others stay idle, and a warning says so.

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
    >>> js.MirroredStrategy(num_replicas=24)
    MirroredStrategy(24 replicas, 3 on each device, on cpu:0..7)
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
        num_replicas: int | None = None,
    ) -> None:
        available = (
            _devices.default_devices() if devices is None else _devices.choose(devices)
        )
        chosen, sharing = devices_for(
            num_replicas, available, logical_axes, replicas_per_device
        )
        super().__init__(
            chosen,
            cross_device_ops,
            communication_options,
            sharding,
            logical_axes,
            sharing,
        )


@final
class CentralStorageStrategy(Strategy):
    """One replica on each compute device; mirrored variables on one device only.

    Before a step its variables are copied to all compute devices, and afterwards one
    copy goes back. Results are those of `MirroredStrategy`; between steps the variables
    take the memory of one copy. On-read variables have a copy on each compute device.
    What `reduce` and `gather` return outside a step is beside the variables.

    Args:
      compute_devices: devices or their names, in replica order; by default as for
        `MirroredStrategy`.
      parameter_device: where the variables are; by default the host's CPU if there are
        accelerators, else the first device.
      logical_axes: as of `MirroredStrategy`.
      replicas_per_device: how many replicas share a compute device.

    Raises:
      ValueError: a device does not exist, or is given twice.
      TypeError: something else than devices and names.

    >>> import jaxstrategy as js
    >>> strategy = js.experimental.CentralStorageStrategy(js.simulate(8)[:2], "CPU:0")
    >>> with strategy.scope():
    ...     total = js.Variable(0.0, name="total", aggregation="sum")
    >>> strategy.run(lambda x: total.assign_add(x), (strategy.per_replica([1.0, 2.0]),))
    Array(3., dtype=float32)
    >>> total
    Variable 'total' float32[] mirrored on 1 replica: 3.0
    """

    def __init__(
        self,
        compute_devices: Sequence[Device | str] | Device | str | None = None,
        parameter_device: Device | str | None = None,
        *,
        logical_axes: Mapping[str, int] | None = None,
        replicas_per_device: int = 1,
    ) -> None:
        devices = (
            _devices.default_devices()
            if compute_devices is None
            else _devices.choose(compute_devices)
        )
        if parameter_device is None:
            is_cpu = devices[0].platform == "cpu"
            cpu = devices[0] if is_cpu else jax.local_devices(backend="cpu")[0]
            parameter_device = cpu
        replicas = Replicas.on(
            devices, logical_axes=logical_axes, per_device=replicas_per_device
        )
        variables = ReplicatedVariables(
            replicas, Replicas.on([_devices.find(parameter_device)])
        )
        self._compose(Choices(replicas, variables=variables))
