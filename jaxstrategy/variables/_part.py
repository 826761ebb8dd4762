"""A part of a variable, as in `v[1:3]`: a value, and a way to assign it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import jax

from jaxstrategy.variables import _changes
from jaxstrategy.variables._changes import Change
from jaxstrategy.variables._operators import Operators


@final
@jax.tree_util.register_pytree_node_class
class VariablePart(Operators):
    """What `variable[index]` gives: the value it had then, which can be assigned.

    In arithmetic and `jnp` functions it stands for its value, and has the attributes of
    that array. Where an array is demanded, `value()` is one.

    Args:
      value: of the part.
      index: which part.
      write: makes a change of the variable, and returns its new value.

    >>> import jaxstrategy as js
    >>> v = js.Variable([1.0, 2.0, 3.0])
    >>> v[1:].assign([8.0, 9.0])
    Array([1., 8., 9.], dtype=float32)
    """

    def __init__(
        self, value: jax.Array, index: Any, write: Callable[[Any, Change], jax.Array]
    ) -> None:
        self._value = value
        self._index = index
        self._write = write

    def value(self) -> jax.Array:
        """The value that the part had when it was asked for."""
        return self._value

    def assign(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> jax.Array | None:
        """Make this part of the variable `value`; returns the variable's new value.

        All copies change in the same way, whatever the aggregation. In `run` an on-read
        variable's own copy changes; of a mirrored one `value` must be equal on all
        replicas, which is proved. A `value` of fewer dimensions, or with dimensions of
        size 1, is repeated.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: a dtype that would lose something.
        """
        return self._changed(_changes.ASSIGN, value, read_value)

    def assign_add(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> jax.Array | None:
        """Add `delta` to this part; otherwise as `assign`."""
        return self._changed(_changes.ASSIGN_ADD, delta, read_value)

    def assign_sub(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> jax.Array | None:
        """Subtract `delta` from this part; otherwise as `assign`."""
        return self._changed(_changes.ASSIGN_SUB, delta, read_value)

    def _changed(self, change: Change, value: Any, read: bool) -> jax.Array | None:
        new = self._write(value, change.of_part(self._index))
        return new if read else None

    def __eq__(self, other: object) -> Any:
        return self._equal(other)

    def __ne__(self, other: object) -> Any:
        return self._unequal(other)

    __hash__ = None  # as of an array  # pyright: ignore[reportAssignmentType]

    def __getattr__(self, name: str) -> Any:
        # JAX and NumPy ask objects by such names what they are.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._value, name)

    def __getitem__(self, index: Any) -> jax.Array:
        return self._value[index]

    def __repr__(self) -> str:
        return repr(self._value)

    # To JAX it is a node around its value, and comes back as that.

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        """The value, for JAX."""
        return (self._value,), None

    @classmethod
    def tree_unflatten(cls, auxiliary: None, children: tuple[Any]) -> Any:
        """What takes its place in a pytree: an array."""
        return children[0]
