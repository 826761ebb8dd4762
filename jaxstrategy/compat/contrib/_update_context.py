"""The devices whose copies code changes, as 2018 asks for them: `UpdateContext`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Self, final

from jaxstrategy.contexts import _context
from jaxstrategy.replicas import _devices
from jaxstrategy.replicas._devices import Device


@final
class UpdateContext:
    """A `with` block in which `get_update_device()` says these devices.

    `DistributionStrategy.update` enters one by itself. This one changes nothing but
    what `get_update_device()` returns in this thread.

    Args:
      device: a device or its name, or several.

    Raises:
      ValueError: there is no such device.
      TypeError: neither devices nor names.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> _ = js.simulate(8)
    >>> with contrib.UpdateContext("CPU:1"):
    ...     contrib.get_update_device()
    (CpuDevice(id=1),)
    """

    def __init__(self, device: Device | str | Sequence[Device | str]) -> None:
        given = [device] if isinstance(device, (Device, str)) else device
        self.devices = _devices.choose(given)
        self._blocks: list[contextlib.AbstractContextManager[Any]] = []

    def __enter__(self) -> Self:
        updated = _context.current().updated
        block = _context.entered(update_device=(self.devices, updated))
        block.__enter__()
        self._blocks.append(block)
        return self

    def __exit__(self, *error: Any) -> None:
        self._blocks.pop().__exit__(*error)


def get_update_device() -> tuple[Device, ...] | None:
    """The devices of the copies that code changes; None outside of updates.

    A function of `update` is called once for all copies, so that these are the devices
    of all of them.

    >>> import jaxstrategy as js
    >>> from jaxstrategy.compat import contrib
    >>> strategy = contrib.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     v = js.Variable(1.0)
    ...     strategy.update(v, lambda v: print(contrib.get_update_device()))
    (CpuDevice(id=0), CpuDevice(id=1))
    """
    context = _context.current()
    if context.update_device is not None:
        devices, updated = context.update_device
        if updated == context.updated:  # else an update was entered inside
            return devices
    return context.updated or None
