"""The types that the modules of `tracing` share.

Those of jaxprs are JAX's own, under the names that the field has for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from jax.extend import core

KeyPath: TypeAlias = tuple[Any, ...]
"""The keys that lead to a leaf of a pytree."""

ArrayType: TypeAlias = Any
"""Shape and dtype of an array that is being traced; to JAX a type that has neither."""


class Atom(Protocol):
    """An operand of an equation, a `Var` or a `Literal`."""

    @property
    def aval(self) -> ArrayType:
        """Its type."""
        ...


Var: TypeAlias = Atom
"""An input of a jaxpr, or what an equation makes."""


class Equation(Protocol):
    """One operation of a jaxpr."""

    # `Any`: JAX exports no classes of what equations hold besides.
    primitive: core.Primitive
    params: dict[str, Any]
    effects: Any
    source_info: Any
    ctx: Any

    @property
    def invars(self) -> Sequence[Atom]:
        """Its operands."""
        ...

    @property
    def outvars(self) -> Sequence[Var]:
        """The values that it makes."""
        ...


Jaxpr: TypeAlias = core.Jaxpr
"""A traced function as a list of equations, without constants."""

ClosedJaxpr: TypeAlias = Any
"""A jaxpr with its constants; before JAX 0.12 a class of its own."""
