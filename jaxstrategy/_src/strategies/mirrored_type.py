"""`Mirrored`: the type of arrays that lie whole on every replica."""

from __future__ import annotations

from typing import Any

from jaxstrategy._src.strategies.current import get_strategy
from jaxstrategy._src.values import arrays
from jaxstrategy._src.values.handle import Handle
from jaxstrategy._src.values.types import PyTree


class _MirroredType(type):
    def __instancecheck__(cls, value: object) -> bool:
        if isinstance(value, Handle):
            is_whole = value.copies_must_agree and value.division.is_whole
            return value.is_distributed and is_whole
        return arrays.is_mirrored(value)


class Mirrored(metaclass=_MirroredType):
    """The type of mirrored values: arrays that are whole and equal on every replica.

    A mirrored value is a plain `jax.Array` whose sharding replicates it over a
    strategy's devices, so there are no instances: `isinstance(x, Mirrored)` asks an
    array or a variable, and `Mirrored(tree)` places a pytree, as
    `get_strategy().mirror(tree)` does.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     state = js.Mirrored({"w": np.zeros(3), "name": "net"})
    >>> isinstance(state["w"], js.Mirrored), state["name"]
    (True, 'net')
    """

    def __new__(cls, tree: PyTree) -> Any:
        return get_strategy().mirror(tree)
