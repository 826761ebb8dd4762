"""Sums joined with those whose arrays are computed next to them: `in_ready_packs`.

Where reductions are to go on beside the computation, a plan leaves sums of arrays as
equations in a row, one for each. A pack of them can be sent as soon as its last array
is computed, so it should hold arrays that are computed one after the other: in the
gradient of a network the last layers' come first, whatever the order of the tree. That
order is in the trace, which is equal in all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import DropVar, Literal

from jaxstrategy._src.reductions.packing import AbstractPacking, in_packs
from jaxstrategy._src.tracing.jaxprs.rewrite import rewritten
from jaxstrategy._src.tracing.jaxprs.visit import (
    Atom,
    Equation,
    Jaxpr,
    Var,
    inner_jaxprs,
)
from jaxstrategy._src.values.arrays import Function

# Where in a jaxpr a value is computed: the number of the equation; of one that calls a
# function, followed by the place in it. What is given is before all.
_Place: TypeAlias = tuple[int, ...]

# These call their jaxpr many times, or one of several: their results come at once.
_AT_ONCE = frozenset(("scan", "while", "cond"))


def in_ready_packs(
    jaxpr: Jaxpr, packing: AbstractPacking, axis_sizes: Sequence[tuple[str, int]]
) -> Jaxpr:
    """`jaxpr`, in which arrays that are summed in a row are summed in packs."""
    places: dict[Var, _Place] = {}
    _find_places(jaxpr, places, set())

    def packed(eqn: Equation) -> Function | None:
        if eqn.primitive.name != "psum" or len(eqn.invars) < 2:
            return None
        computed = [_of(atom, places) for atom in eqn.invars]
        order = sorted(range(len(computed)), key=computed.__getitem__)

        def alone(array: jax.Array) -> jax.Array:
            return eqn.primitive.bind(array, **eqn.params)

        def sums(*arrays: jax.Array) -> list[jax.Array]:
            ready = [arrays[index] for index in order]
            done = in_packs(alone, ready, packing, tells_places=True)
            by_index = dict(zip(order, done, strict=True))
            return [by_index[index] for index in range(len(arrays))]

        return sums

    return rewritten(jaxpr, packed, axis_sizes, grouped=_with_runs)


def _with_runs(eqns: Sequence[Any]) -> list[Equation]:
    """`eqns`, with one for each run of sums, which has the operands of all."""
    found: list[Any] = []
    for eqn in eqns:
        last = found[-1] if found else None
        if last is not None and _goes_on(last, eqn):
            found[-1] = last.replace(
                invars=[*last.invars, *eqn.invars],
                outvars=[*last.outvars, *eqn.outvars],
            )
        else:
            found.append(eqn)
    return found


def _goes_on(run: Equation, eqn: Equation) -> bool:
    """Whether an equation is one more sum over the same replicas."""
    is_sum = run.primitive.name == eqn.primitive.name == "psum"
    return is_sum and run.params == eqn.params and eqn.invars[0] not in run.outvars


def _find_places(jaxpr: Jaxpr, places: dict[Var, _Place], seen: set[int]) -> None:
    """Notes where each variable of `jaxpr`, and of those it holds, is computed."""
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for number, eqn in enumerate(jaxpr.eqns):
        inner = list(inner_jaxprs(eqn.params))
        for each in inner:
            _find_places(each, places, seen)
        for index, var in enumerate(eqn.outvars):
            if isinstance(var, DropVar):
                continue
            if (source := _passed_on(eqn)) is not None and not inner:
                places[var] = _of(source, places)
            elif len(inner) == 1 and eqn.primitive.name not in _AT_ONCE:
                within = inner[0].outvars
                is_called = len(within) == len(eqn.outvars)
                at = _of(within[index], places) if is_called else ()
                places[var] = (number, *at)
            else:
                places[var] = (number,)


def _passed_on(eqn: Equation) -> Atom | None:
    """The operand of which the only result is another form, with as many elements."""
    if len(eqn.outvars) != 1 or eqn.effects:  # as what was written to a reference
        return None
    size = _size(eqn.outvars[0])
    operands = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
    whole = [atom for atom in operands if _size(atom) == size]
    others = [atom for atom in operands if _size(atom) not in (1, size)]
    return whole[0] if size > 1 and len(whole) == 1 and not others else None


def _size(atom: Atom) -> int:
    return getattr(atom.aval, "size", 0)


def _of(atom: Atom, places: dict[Var, _Place]) -> _Place:
    return () if isinstance(atom, Literal) else places.get(atom, ())
