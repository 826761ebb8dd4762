"""The part of a step that is computed once for all replicas: `GlobalPart`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, TypeAlias, final

import jax
from jax.extend.core import Literal

from jaxstrategy._src.tracing.jaxprs.visit import (
    ArrayType,
    Atom,
    Equation,
    Jaxpr,
    Var,
    plain,
)

Dimension: TypeAlias = int | None
"""The dimension along which a value is sharded; None: it is replicated."""

UNKNOWN: Final = -1
"""XLA chooses the sharding."""


def result_dimensions(eqn: Equation, operands: Sequence[Dimension]) -> list[Dimension]:
    """How the results of `eqn` are sharded, given its operands."""
    name = eqn.primitive.name
    if name == "optimization_barrier":
        return [*operands]
    (dimension, *others) = {d for d in operands if d is not None}
    if others or (operands[0] is None and name not in _OF_ANY_OPERAND):
        dimension = UNKNOWN
    elif name in _ELEMENTWISE:
        pass
    elif _is_reduction(eqn):
        axes = eqn.params["axes"]
        is_sum = dimension in axes
        dimension = None if is_sum else dimension - sum(a < dimension for a in axes)
    else:
        rule = _RULES.get(name)
        dimension = UNKNOWN if rule is None else rule(eqn, dimension)
    return [dimension for _ in eqn.outvars]


def _is_reduction(eqn: Equation) -> bool:
    return "axes" in eqn.params and eqn.primitive.name.startswith(("reduce_", "arg"))


def _reshaped(eqn: Equation, dimension: int) -> int:
    """The dimension of the same length with as many elements before it."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    for place, length in enumerate(after):
        is_same = math.prod(after[:place]) == math.prod(before[:dimension])
        if is_same and length == before[dimension]:
            return place
    return UNKNOWN


def _unless_along(*names: str) -> Callable[[Equation, int], int]:
    def rule(eqn: Equation, dimension: int) -> int:
        values = [eqn.params[name] for name in names if name in eqn.params]
        return UNKNOWN if dimension in jax.tree.leaves(values) else dimension

    return rule


def _unless_cut(eqn: Equation, dimension: int) -> int:
    shapes = [eqn.invars[0].aval.shape, *(var.aval.shape for var in eqn.outvars)]
    return dimension if len({shape[dimension] for shape in shapes}) == 1 else UNKNOWN


_RULES: dict[str, Callable[[Equation, int], int]] = {
    "broadcast_in_dim": lambda eqn, d: eqn.params["broadcast_dimensions"][d],
    "transpose": lambda eqn, d: eqn.params["permutation"].index(d),
    "squeeze": lambda eqn, d: d - sum(i < d for i in eqn.params["dimensions"]),
    "reshape": _reshaped,
    "slice": _unless_cut,
    "dynamic_slice": _unless_cut,
    "pad": _unless_cut,
    "split": _unless_cut,
    "concatenate": _unless_along("dimension"),
    "rev": _unless_along("dimensions"),
    "sort": _unless_along("dimension"),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _unless_along("axis")
    ),
}
_ELEMENTWISE = frozenset(
    (
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan",
        "atan2", "atanh", "bitcast_convert_type", "cbrt", "ceil", "clamp", "complex",
        "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma",
        "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge",
        "gt", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p",
        "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or",
        "population_count", "pow", "real", "reduce_precision", "rem", "round", "rsqrt",
        "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical",
        "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh",
        "xor",
    )
)  # fmt: skip

_OF_ANY_OPERAND = _ELEMENTWISE | {"concatenate", "sort"}


_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


@final
@dataclasses.dataclass(frozen=True)
class GlobalExchange:
    """A collective that XLA inserts to compute an equation from parts."""

    kind: str
    type: ArrayType
    eqns: tuple[Equation, ...]


# XLA partitions the global part: elementwise operations keep the sharding of operands,
# others need collectives. Those for sums and replicated results are known; for matrix
# products and sorts XLA chooses by its own cost estimates.
@final
class GlobalPart:
    """Predicts how XLA shards the equations that are computed once for all."""

    def __init__(
        self,
        eqns: Sequence[Equation],
        parts: Mapping[Var, int],
        replicated: Collection[Atom],
    ) -> None:
        self.exchanges: list[GlobalExchange] = []
        self.undecided: list[tuple[Equation, ...]] = []
        self._known: dict[Var, Dimension] = dict(parts)
        self._replicated = replicated
        self._gathered: dict[Var, Dimension] = {}
        self._propagate(eqns, self._known, ())

    def dimension(self, atom: Atom) -> Dimension:
        """The dimension along which a value is sharded before it is gathered."""
        if isinstance(atom, Literal):
            return None
        return self._gathered.get(atom, self._known.get(atom))

    def is_whole(self, atom: Atom) -> bool:
        """Whether each device has all of a value without any collective."""
        return self.dimension(atom) is None

    def _propagate(
        self,
        eqns: Iterable[Equation],
        known: dict[Var, Dimension],
        holders: tuple[Equation, ...],
    ) -> None:
        for eqn in eqns:
            operands = [_read(known, atom) for atom in eqn.invars]
            if any(dimension is not None for dimension in operands):
                results = self._results(eqn, operands, holders)
                known.update(zip(eqn.outvars, results, strict=True))
                for var in eqn.outvars:
                    if var in self._replicated and known[var] != UNKNOWN:
                        self._gathered[var], known[var] = known[var], None

    def _results(
        self, eqn: Equation, operands: list[Dimension], holders: tuple[Equation, ...]
    ) -> list[Dimension]:
        inner = (eqn, *holders)
        if (key := _CALLS.get(eqn.primitive.name)) is not None:
            return self._called(plain(eqn.params[key]), operands, inner)
        if eqn.primitive.name == "cond":
            branches = eqn.params["branches"]
            each = [self._called(plain(b), operands[1:], inner) for b in branches]
            return [_joined(dimensions) for dimensions in zip(*each, strict=True)]
        if UNKNOWN in operands:
            return [UNKNOWN if var.aval.shape else None for var in eqn.outvars]
        results = result_dimensions(eqn, operands)
        if None in results and _is_reduction(eqn):
            self.exchanges += (
                GlobalExchange("all_reduce", var.aval, inner) for var in eqn.outvars
            )
        if UNKNOWN in results:
            self.undecided.append(inner)
        return results

    def _called(
        self, jaxpr: Jaxpr, operands: list[Dimension], holders: tuple[Equation, ...]
    ) -> list[Dimension]:
        known: dict[Var, Dimension] = dict(zip(jaxpr.invars, operands, strict=True))
        self._propagate(jaxpr.eqns, known, holders)
        return [_read(known, atom) for atom in jaxpr.outvars]


def _read(known: Mapping[Var, Dimension], atom: Atom) -> Dimension:
    return None if isinstance(atom, Literal) else known.get(atom)


def _joined(dimensions: Sequence[Dimension]) -> Dimension:
    """The sharding of a result of several branches."""
    sharded = {dimension for dimension in dimensions if dimension is not None}
    return sharded.pop() if len(sharded) == 1 else (UNKNOWN if sharded else None)
