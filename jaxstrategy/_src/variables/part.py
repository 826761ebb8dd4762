"""A part of a variable, as in `v[1:3]`: a value, and a way to assign it."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import jax

from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.types import Index, Leaf, Value
from jaxstrategy._src.variables.assignments import Assignments
from jaxstrategy._src.variables.changes import Change
from jaxstrategy._src.variables.operators import Operators


@final
@jax.tree_util.register_pytree_node_class
class VariablePart(Operators, Assignments):
    """The value of `variable[index]` when it was asked for, which can be assigned.

    In arithmetic and `jnp` functions it stands for its value, and has the attributes of
    that array. Where an array is demanded, `value()` is one.

    Args:
      value: of the part.
      index: which part.
      change: changes the variable, and returns its new value.

    >>> import jaxstrategy as js
    >>> v = js.Variable([1.0, 2.0, 3.0])
    >>> v[1:].assign([8.0, 9.0])
    Array([1., 8., 9.], dtype=float32)
    """

    def __init__(
        self,
        value: jax.Array,
        index: Index,
        change: Callable[[Value, Change], jax.Array | PerReplica],
    ) -> None:
        self._value = value
        self._index = index
        self._change = change

    def value(self) -> jax.Array:
        """The value that the part had when it was asked for."""
        return self._value

    def _write(self, value: Value, change: Change) -> jax.Array | PerReplica:
        return self._change(value, change.of_part(self._index))

    def __eq__(self, other: object) -> Value:
        return self._equal(other)

    def __ne__(self, other: object) -> Value:
        return self._unequal(other)

    __hash__ = None  # as of an array  # pyright: ignore[reportAssignmentType]

    def __getattr__(self, name: str) -> Value:
        # JAX and NumPy ask objects by such names what they are.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._value, name)

    def __getitem__(self, index: Index) -> jax.Array:
        return self._value[index]

    def __repr__(self) -> str:
        return repr(self._value)

    # To JAX it is a node around its value, and comes back as that.

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        """The value, for JAX."""
        return (self._value,), None

    @classmethod
    def tree_unflatten(cls, auxiliary: None, children: tuple[Leaf]) -> Leaf:
        """The array that takes its place in a pytree."""
        return children[0]
