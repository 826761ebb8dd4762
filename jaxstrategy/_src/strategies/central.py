"""Variables in one place, computation on many devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import jax

from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.strategies.choices import Choices
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.variables.policy import ReplicatedVariables


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
        home = _central(devices) if parameter_device is None else parameter_device
        replicas = Replicas.on(
            devices, logical_axes=logical_axes, per_device=replicas_per_device
        )
        variables = ReplicatedVariables(replicas, Replicas.on([_devices.find(home)]))
        self._compose(Choices(replicas, variables=variables))


def _central(compute_devices: Sequence[Device]) -> Device:
    if compute_devices[0].platform == "cpu":
        return compute_devices[0]
    return jax.local_devices(backend="cpu")[0]
