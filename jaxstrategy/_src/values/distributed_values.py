"""The common type of all values of strategies: `DistributedValues`."""

from __future__ import annotations

from jaxstrategy._src.values.arrays import is_mirrored
from jaxstrategy._src.values.handle import Handle
from jaxstrategy._src.values.per_replica import PerReplica


class _DistributedType(type):
    def __instancecheck__(cls, value: object) -> bool:
        if isinstance(value, Handle):
            return value.is_distributed
        return isinstance(value, PerReplica) or is_mirrored(value)

    def __subclasscheck__(cls, other: type) -> bool:
        return other in (cls, PerReplica) or issubclass(other, Handle)


class DistributedValues(metaclass=_DistributedType):
    """The common type of `PerReplica`, mirrored values and variables of strategies.

    For `isinstance`.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> isinstance(strategy.mirror(1.0), js.DistributedValues)
    True
    >>> isinstance(1.0, js.DistributedValues)
    False
    """
