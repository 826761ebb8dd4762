"""Reductions to chosen devices: `strategy.extended`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import jax
from jax.core import Tracer

from jaxstrategy import _contexts, _devices, _mesh, _values
from jaxstrategy._contexts import AbstractStrategy
from jaxstrategy._devices import Device
from jaxstrategy._options import ReduceOp
from jaxstrategy._values import PerReplica, PyTree

Destinations = Any


@final
class StrategyExtended:
    """Additional methods of a strategy, for library code and optimizers."""

    def __init__(self, strategy: AbstractStrategy) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The devices that compute, in replica order."""
        return self._strategy.devices

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """The devices that hold state: here the ones that compute."""
        return self._strategy.devices

    @property
    def experimental_require_static_shapes(self) -> bool:
        """True: one program is compiled for all replicas."""
        return True

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: PyTree, destinations: Destinations
    ) -> PyTree:
        """`value` reduced over the replicas and placed on `destinations`.

        Args:
          reduce_op: a `ReduceOp` or its name in any case.
          value: as for `strategy.reduce`.
          destinations: a device or its name for one copy there; several devices, a
            `PerReplica` or a mirrored value for a copy on each device of theirs.
            While a step is traced (in `merge_call`, or under your own `jax.jit`) the
            result is on all replicas, whatever is asked for.

        Raises:
          ValueError: `reduce_op` is not a reduction, or there is no destination.
          TypeError: a leaf is not a number, or `destinations` names no devices.
          ContextError: inside `run`.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> x = strategy.per_replica([1.0, 2.0])
        >>> strategy.extended.reduce_to("sum", x, "CPU:1").devices()
        {CpuDevice(id=1)}
        """
        return self.batch_reduce_to(reduce_op, [(value, destinations)])[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[PyTree, Destinations]],
    ) -> list[PyTree]:
        """Several `reduce_to` in one program: one result per pair, in order.

        Raises:
          ValueError: something else than a sequence of pairs; else as `reduce_to`.
        """
        context = _contexts.require_cross_replica(
            self._strategy, "extended.batch_reduce_to"
        )
        pairs = _checked_pairs(value_destination_pairs)
        shardings = [_sharding(destinations) for _, destinations in pairs]
        op = ReduceOp(reduce_op)
        results = self._strategy.reduce(op, [value for value, _ in pairs])
        if context is not None and context.in_step:
            return results
        return [
            _placed(result, sharding)
            for result, sharding in zip(results, shardings, strict=True)
        ]


def _checked_pairs(pairs: Any) -> list[tuple[PyTree, Destinations]]:
    if isinstance(pairs, (list, tuple)) and all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
    ):
        return [tuple(pair) for pair in pairs]
    raise ValueError(
        "Each element of `value_destination_pairs` should be a tuple of a value and "
        f"its destinations, got {pairs!r}."
    )


def _sharding(destinations: Destinations) -> jax.sharding.Sharding | None:
    """Where a result goes; None for where it is, on all replicas."""
    if isinstance(destinations, (str, Device)):
        return jax.sharding.SingleDeviceSharding(_devices.find(destinations))
    if isinstance(destinations, (list, tuple)):
        if not destinations:
            raise ValueError(
                "`destinations` is empty. Name a device, several, or give a value "
                "whose devices are meant."
            )
        return _mesh.replicated(_mesh.mesh_of(_devices.choose(destinations)))
    whole = not isinstance(destinations, PerReplica)
    value = destinations if whole else _values.contents(destinations)
    if isinstance(value, Tracer):
        return None
    if isinstance(value, jax.Array):
        return value.sharding if whole else _mesh.replicated_like(value.sharding)
    raise TypeError(
        f"`destinations` was {destinations!r}; a device, a device name, a list of "
        "them, a PerReplica or an array was wanted."
    )


def _placed(result: PyTree, sharding: jax.sharding.Sharding | None) -> PyTree:
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(result))
    return result if sharding is None or traced else jax.device_put(result, sharding)
