"""What all strategies share: `Strategy`.

A strategy is a mesh with a few choices. Every method is either a rule about contexts,
or a small function run on all replicas through the one door of `tracing`. What it can
do stands in one file for each purpose: run steps, reduce values, place them, divide
datasets.
"""

from __future__ import annotations

from typing import Any, NoReturn, Self

from jaxstrategy.replicas import _devices
from jaxstrategy.strategies._calls import name_methods_after
from jaxstrategy.strategies._feeding_data import FedStrategy
from jaxstrategy.text import _tables
from jaxstrategy.text._units import with_noun


class Strategy(FedStrategy):
    """Runs one step on many replicas. Make one of its subclasses.

    Args:
      devices: the devices of the replicas, in replica order.
      cross_device_ops: how values are reduced over the replicas.
      communication_options: the same, in more detail.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name_methods_after(cls)

    def __repr__(self) -> str:
        replicas = with_noun(self.num_replicas_in_sync, "replica")
        return f"{type(self).__name__}({replicas} on {_devices.names(self.devices)})"

    def _repr_html_(self) -> str:
        rows = [
            (i, _devices.name(device), device.device_kind)
            for i, device in enumerate(self.devices)
        ]
        name = type(self).__name__
        return _tables.html_table(name, ("replica", "device", "kind"), rows)

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            "A strategy can be deep-copied (`copy.deepcopy`) but not copied: a copy "
            "would be another strategy that shares this one's compiled steps."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        Strategy.__init__(twin, self.devices, *self._chosen)
        return twin

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled: it stands for devices of this process. Make "
            "a strategy in each process instead."
        )
