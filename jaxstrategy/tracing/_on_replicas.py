"""Functions of one replica as functions of all: the calls of `shard_map`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxstrategy.replicas._replicas import Lies, Replicas
from jaxstrategy.tracing._cpu_collectives import on_cpu_devices
from jaxstrategy.tracing._lone_replica import without_collectives
from jaxstrategy.tracing._on_own_devices import on_own_devices
from jaxstrategy.tracing.vmapped._replicas import on_shared_devices
from jaxstrategy.values._types import Function, PyTree


def on_replicas(
    fn: Function, replicas: Replicas, taken: Sequence[Lies], returned: PyTree
) -> Function:
    """`fn` of one replica as a function of all replicas' arrays.

    Args:
      fn: takes one replica's parts of arrays, and returns a pytree of them.
      replicas: where it runs.
      taken: how the arrays that it is given lie.
      returned: how those that it returns do: a pytree of `Lies`, or a prefix of it.
    """
    if replicas.per_device > 1:
        return on_shared_devices(fn, replicas, taken, returned)
    if replicas.inner_axes and replicas.count == 1:
        fn = without_collectives(fn, replicas.axes)
    if replicas.inner_axes and replicas.devices[0].platform == "cpu":
        return on_cpu_devices(fn, replicas, taken, returned)
    return on_own_devices(fn, replicas, taken, returned)
