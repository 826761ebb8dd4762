"""The base class of all strategies: `Strategy`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jaxstrategy._src.communication_options import CommunicationOptions, checked_options
from jaxstrategy._src.contexts.strategy_face import checked_core
from jaxstrategy._src.reductions.cross_device_ops import CrossDeviceOps
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.replicas.state_sharding import StateSharding, checked_sharding
from jaxstrategy._src.strategies.calls import name_methods_after
from jaxstrategy._src.strategies.choices import Choices
from jaxstrategy._src.strategies.compiling_steps import CompilesSteps
from jaxstrategy._src.strategies.dividing_data import DividesData
from jaxstrategy._src.strategies.explaining import ExplainsSteps
from jaxstrategy._src.strategies.placing_values import PlacesValues
from jaxstrategy._src.strategies.reducing import ReducesValues
from jaxstrategy._src.strategies.running import RunsSteps
from jaxstrategy._src.text import html


class Strategy(
    RunsSteps, CompilesSteps, ExplainsSteps, ReducesValues, PlacesValues, DividesData
):
    """Runs one step on many replicas. Make one of its subclasses.

    Args:
      devices: the devices of the replicas, in replica order.
      cross_device_ops: how values are reduced over the replicas.
      communication_options: the same, in more detail.
      sharding: which state each replica keeps a part of, instead of all of it.
      logical_axes: names and sizes of further axes of the mesh, such as `{"core": 2}`:
        so many devices together are one replica, which divides its arrays over them
        as `jax.lax.with_sharding_constraint` says.
      replicas_per_device: how many replicas share a device.

    Raises:
      ValueError: no device, or one twice; operations that name other replicas.
      TypeError: something else than devices, operations or options.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> isinstance(strategy, js.Strategy), isinstance(js.get_strategy(), js.Strategy)
    (True, True)
    """

    def __init__(
        self,
        devices: Sequence[Device],
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
        sharding: StateSharding | None = None,
        logical_axes: Mapping[str, int] | None = None,
        replicas_per_device: int = 1,
    ) -> None:
        checked_options(communication_options, of_strategy=True)
        replicas = Replicas.on(
            devices, checked_sharding(sharding), logical_axes, replicas_per_device
        )
        self._compose(Choices(replicas, cross_device_ops, communication_options))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name_methods_after(cls)

    def __repr__(self) -> str:
        replicas = self._replicas
        comma = "," if replicas.per_device > 1 else ""
        where = f"{replicas.description}{comma} on {replicas.device_names}"
        sharding = replicas.state_sharding
        divided = "" if sharding is None else f", sharding={sharding.shard!r}"
        return f"{type(self).__name__}({where}{divided})"

    def _repr_html_(self) -> str:
        rows = [
            (i, self._replicas.device_names_of(i), device.device_kind)
            for i, device in enumerate(self.devices)
        ]
        header = ("replica", "device", "kind")
        return html.rows_of(repr(self), header, rows)

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            "A strategy can be deep-copied (`copy.deepcopy`) but not copied: a copy "
            "would be another strategy that shares this one's compiled steps."
        )

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            f"{self!r} cannot be pickled: it stands for devices of this process. Make "
            "a strategy in each process instead."
        )


def checked_strategy(strategy: object) -> Strategy:
    """The strategy that an argument `strategy` means, with its public methods.

    Raises:
      TypeError: it is none, and no face of one.
    """
    core = checked_core(strategy)
    assert isinstance(core, Strategy), "there are no others"
    return core


name_methods_after(Strategy)
