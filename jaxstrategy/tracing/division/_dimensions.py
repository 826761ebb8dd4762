"""How the results of an operation lie whose operands lie divided: `of_results`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, final

from jaxstrategy.tracing._jaxpr_types import Equation

Dimension: TypeAlias = int | None
"""The dimension along which a value is divided; None: it is whole."""

UNKNOWN: Final = -1
"""Of what XLA chooses for itself."""


@final
@dataclasses.dataclass(frozen=True)
class ResultDimensions:
    """How the results of an equation lie.

    Attributes:
      dimensions: of each, along which it is divided.
      is_sum: whether they are combined of what the devices computed from their parts.
    """

    dimensions: list[Dimension]
    is_sum: bool = False


def of_results(eqn: Equation, operands: Sequence[Dimension]) -> ResultDimensions:
    """How the results of `eqn` lie.

    Args:
      eqn: an equation without a nested function.
      operands: how its operands lie, of which one at least is divided.
    """
    name = eqn.primitive.name
    if name == "optimization_barrier":
        return ResultDimensions([*operands])
    if name in _ELEMENTWISE:
        return _all(eqn, _elementwise(eqn, operands))
    if name == "dot_general":
        return _product(eqn, operands)
    divided = {d for d in operands if d is not None}
    if len(divided) > 1 or operands[0] is None and name not in _OF_ANY_OPERAND:
        return _all(eqn, UNKNOWN)
    dimension = divided.pop()
    if "axes" in eqn.params and name.startswith(("reduce_", "arg")):
        axes = eqn.params["axes"]
        if dimension in axes:
            return ResultDimensions([None for _ in eqn.outvars], is_sum=True)
        return _all(eqn, dimension - sum(axis < dimension for axis in axes))
    rule = _RULES.get(name)
    return _all(eqn, UNKNOWN if rule is None else rule(eqn, dimension))


def _all(eqn: Equation, dimension: Dimension) -> ResultDimensions:
    return ResultDimensions([dimension for _ in eqn.outvars])


def _elementwise(eqn: Equation, operands: Sequence[Dimension]) -> int:
    divided = {d for d in operands if d is not None}
    return divided.pop() if len(divided) == 1 else UNKNOWN


def _product(eqn: Equation, operands: Sequence[Dimension]) -> ResultDimensions:
    (contracted, batches) = eqn.params["dimension_numbers"]
    one, other = operands
    if one in contracted[0] and other in contracted[1]:
        if contracted[0].index(one) == contracted[1].index(other):
            return ResultDimensions([None], is_sum=True)
        return ResultDimensions([UNKNOWN])
    if one is not None and other is not None:
        if one in batches[0] and other in batches[1]:
            same = batches[0].index(one) == batches[1].index(other)
            return ResultDimensions([batches[0].index(one) if same else UNKNOWN])
        return ResultDimensions([UNKNOWN])
    side = 0 if other is None else 1
    dimension = operands[side]
    if dimension in contracted[side]:
        return ResultDimensions([UNKNOWN])
    if dimension in batches[side]:
        return ResultDimensions([batches[side].index(dimension)])
    return ResultDimensions([_free_place(eqn, side, dimension)])


def _free_place(eqn: Equation, side: int, dimension: Dimension) -> int:
    """The place in a product of a dimension that only one of the factors has."""
    (contracted, batches) = eqn.params["dimension_numbers"]

    def free(operand: int) -> list[int]:
        taken = {*contracted[operand], *batches[operand]}
        return [i for i in range(len(eqn.invars[operand].aval.shape)) if i not in taken]

    first = len(batches[0]) + (len(free(0)) if side else 0)
    return first + free(side).index(dimension or 0)


def _broadcast(eqn: Equation, dimension: int) -> int:
    return eqn.params["broadcast_dimensions"][dimension]


def _transposed(eqn: Equation, dimension: int) -> int:
    return eqn.params["permutation"].index(dimension)


def _squeezed(eqn: Equation, dimension: int) -> int:
    return dimension - sum(axis < dimension for axis in eqn.params["dimensions"])


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
        given = [eqn.params[name] for name in names if name in eqn.params]
        axes = {i for each in given for i in (each if _is_many(each) else (each,))}
        return UNKNOWN if dimension in axes else dimension

    return rule


def _is_many(value: object) -> bool:
    return isinstance(value, (tuple, list))


def _unless_cut(eqn: Equation, dimension: int) -> int:
    shapes = [eqn.invars[0].aval.shape, *(var.aval.shape for var in eqn.outvars)]
    return dimension if len({shape[dimension] for shape in shapes}) == 1 else UNKNOWN


_RULES = {
    "broadcast_in_dim": _broadcast,
    "transpose": _transposed,
    "squeeze": _squeezed,
    "reshape": _reshaped,
    "slice": _unless_cut,
    "dynamic_slice": _unless_cut,
    "pad": _unless_cut,
    "split": _unless_cut,
    "concatenate": _unless_along("dimension"),
    "rev": _unless_along("dimensions"),
    "sort": _unless_along("dimension"),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
        _unless_along("axis"),
    ),
}
_OF_ANY_OPERAND = frozenset(("concatenate", "sort"))
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
