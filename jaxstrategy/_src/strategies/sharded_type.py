"""`Sharded`: the type of arrays of which every replica has a part."""

from __future__ import annotations

from typing import Any

from jaxstrategy._src.values import arrays
from jaxstrategy._src.values.handle import Handle


class _ShardedType(type):
    def __instancecheck__(cls, value: object) -> bool:
        if isinstance(value, Handle):
            return not value.division.is_whole
        return arrays.is_sharded(value)


class Sharded(metaclass=_ShardedType):
    """The type of values of which every replica has a part, as a type to test for.

    Such a value is a plain `jax.Array` of its logical shape that is divided over the
    replicas' devices; to a step it is whole, and equal on all of them. A strategy with
    a `StateSharding` makes them. There are no instances: `isinstance(x, Sharded)` asks
    where an array lies, or a variable.

    Raises:
      TypeError: somebody makes one.

    >>> import jaxstrategy as js
    >>> everything = js.StateSharding("state", min_bytes=0)
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2], sharding=everything)
    >>> w = strategy.mirror(np.arange(4.0))
    >>> isinstance(w, js.Sharded), isinstance(w, js.Mirrored), w.shape
    (True, False, (4,))
    """

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        raise TypeError(
            "`js.Sharded` is a type to test for. To place a value as the strategy "
            "keeps its state, write `strategy.mirror(value)`."
        )
