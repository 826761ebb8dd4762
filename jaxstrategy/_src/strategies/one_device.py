"""One replica, on a device of choice."""

from __future__ import annotations

from typing import final

from jaxstrategy._src.replicas import devices
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.strategies.strategy import Strategy


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
        super().__init__((devices.find(device),))
