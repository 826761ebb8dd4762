"""The change that an assignment makes to a variable's value: `Change`."""

from __future__ import annotations

import dataclasses
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.values.types import Index


@final
@dataclasses.dataclass(frozen=True)
class Change:
    """The way from an old value, and one that is given, to a new one.

    Attributes:
      method: what the user called, for messages.
      operation: "set", "add", "subtract", "multiply", "divide", "min" or "max".
      index: the part of the value that changes, as in `array[index]`.
    """

    method: str
    operation: str
    index: Index = ...

    @property
    def is_whole(self) -> bool:
        """Whether it changes the whole value, not only a part."""
        return self.index is ...

    def of_part(self, index: Index) -> Change:
        """The same, of a part only."""
        return dataclasses.replace(self, index=index)

    def shape(self, whole: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
        """The shape of the part, in a value of the shape `whole`."""
        if self.is_whole:
            return whole
        struct = jax.ShapeDtypeStruct(whole, dtype)
        return jax.eval_shape(lambda value: value[self.index], struct).shape

    def applied(self, old: jax.Array, value: jax.Array) -> jax.Array:
        """The new value, of the shape and dtype of `old`."""
        if not self.is_whole:
            return changed(old, self.index, value, self.operation)
        match self.operation:
            case "set":
                return value
            case "add":
                return old + value
            case _:
                return old - value


def changed(
    old: jax.Array, index: Index, value: jax.Array, operation: str
) -> jax.Array:
    """`old` with its part at `index` changed; a row may be there more than once."""
    part = old.at[index]
    match operation:
        case "subtract":
            return part.add(-value)
        case "divide" if jnp.issubdtype(old.dtype, jnp.integer):
            # `at[].divide` divides as floats do; integers keep what is whole.
            return jax.lax.div(old, jnp.ones_like(old).at[index].multiply(value))
        case _:
            return getattr(part, operation)(value)


ASSIGN = Change("assign", "set")
ASSIGN_ADD = Change("assign_add", "add")
ASSIGN_SUB = Change("assign_sub", "subtract")
UPDATE = Change("update", "set")

# By the last word of the method, `scatter_add` and so on.
SCATTERS = {
    name: Change(f"scatter_{name}", operation)
    for name, operation in {
        "add": "add",
        "sub": "subtract",
        "mul": "multiply",
        "div": "divide",
        "min": "min",
        "max": "max",
        "update": "set",
    }.items()
}

# By the operation that word.
WORDS = {change.operation: name for name, change in SCATTERS.items()}
