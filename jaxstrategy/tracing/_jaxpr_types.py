"""The types that the modules of `tracing` share.

Those of jaxprs are JAX's own, under the names that the field has for them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from jax.extend import core

from jaxstrategy.values._types import Function as Function
from jaxstrategy.values._types import Leaf as Leaf

Equation: TypeAlias = core.JaxprEqn
"""One operation of a jaxpr."""

Jaxpr: TypeAlias = core.Jaxpr
"""What JAX makes of a traced function, without constants."""

ClosedJaxpr: TypeAlias = Any
"""A jaxpr with its constants; before JAX 0.12 a class of its own."""

Atom: TypeAlias = core.Var | core.Literal
"""An operand of an equation."""

ArrayType: TypeAlias = Any
"""Shape and dtype of an array that is being traced; to JAX a type that has neither."""
