"""What lies divided where a step is computed once for all: `Outside`.

XLA divides that part. It goes on as its operands lie, element by element; where an
element needs others, it has to exchange something. What it exchanges for sums and for
whole results is known; for matrix products and sorts it chooses by its own estimates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import final

from jax.extend.core import Literal

from jaxstrategy.tracing._jaxpr_types import ArrayType, Atom, Equation, Jaxpr, Var
from jaxstrategy.tracing.division import _dimensions
from jaxstrategy.tracing.division._dimensions import UNKNOWN, Dimension
from jaxstrategy.tracing.replication._jaxprs import plain

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
class OutsideExchange:
    """A collective that XLA needs to compute an equation from parts.

    Attributes:
      kind: `"all_reduce"`, `"all_gather"` or `"all_to_all"`.
      type: shape and dtype of all of what is exchanged.
      eqns: the equation, and those that hold it, the innermost first.
    """

    kind: str
    type: ArrayType
    eqns: tuple[Equation, ...]


@final
class Outside:
    """The equations that are computed once for all, from parts of arrays.

    Args:
      eqns: in order.
      parts: the dimension of what they are given divided.
      whole: what is returned whole: gathered as soon as it is made.

    Attributes:
      exchanges: what XLA needs for sums over what is divided.
      undecided: the equations of which XLA alone knows what they need, each with those
        that hold it.
    """

    def __init__(
        self,
        eqns: Sequence[Equation],
        parts: Mapping[Var, int],
        whole: Collection[Atom] = (),
    ) -> None:
        self.exchanges: list[OutsideExchange] = []
        self.undecided: list[tuple[Equation, ...]] = []
        self._known: dict[Var, Dimension] = dict(parts)
        self._whole = whole
        self._gathered: dict[Var, Dimension] = {}
        self._go_through(eqns, self._known, ())

    def dimension(self, atom: Atom) -> Dimension:
        """The dimension along which a value is divided; None of whole ones."""
        if isinstance(atom, Literal):
            return None
        return self._gathered.get(atom, self._known.get(atom))

    def is_whole(self, atom: Atom) -> bool:
        """Whether each device has all of a value, without any exchange."""
        return self.dimension(atom) is None

    def _go_through(
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
                    if var in self._whole and known[var] != UNKNOWN:
                        self._gathered[var], known[var] = known[var], None

    def _results(
        self,
        eqn: Equation,
        operands: list[Dimension],
        holders: tuple[Equation, ...],
    ) -> list[Dimension]:
        inner = (eqn, *holders)
        if (key := _CALLS.get(eqn.primitive.name)) is not None:
            return self._called(plain(eqn.params[key]), operands, inner)
        if eqn.primitive.name == "cond":
            branches = eqn.params["branches"]
            each = [self._called(plain(b), operands[1:], inner) for b in branches]
            return [_agreed(found) for found in zip(*each, strict=True)]
        if UNKNOWN in operands:
            return [UNKNOWN if var.aval.shape else None for var in eqn.outvars]
        found = _dimensions.of_results(eqn, operands)
        if found.is_sum:
            types = (var.aval for var in eqn.outvars)
            exchanges = (OutsideExchange("all_reduce", each, inner) for each in types)
            self.exchanges.extend(exchanges)
        if UNKNOWN in found.dimensions:
            self.undecided.append(inner)
        return found.dimensions

    def _called(
        self, jaxpr: Jaxpr, operands: list[Dimension], holders: tuple[Equation, ...]
    ) -> list[Dimension]:
        known: dict[Var, Dimension] = dict(zip(jaxpr.invars, operands, strict=True))
        self._go_through(jaxpr.eqns, known, holders)
        return [_read(known, atom) for atom in jaxpr.outvars]


def _read(known: Mapping[Var, Dimension], atom: Atom) -> Dimension:
    return None if isinstance(atom, Literal) else known.get(atom)


def _agreed(found: Sequence[Dimension]) -> Dimension:
    """What branches have in common: a whole value need not be told from a part."""
    divided = {dimension for dimension in found if dimension is not None}
    return divided.pop() if len(divided) == 1 else (UNKNOWN if divided else None)
