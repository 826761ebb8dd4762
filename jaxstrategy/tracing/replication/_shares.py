"""Sums that stand for means, and equal shares of what is equal on all replicas.

Both are seen by a division by the number of replicas, which is a literal, or the sum
over the replicas of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jax.extend.core import Literal

from jaxstrategy.tracing._jaxpr_types import Atom, Equation
from jaxstrategy.tracing.replication._analysis import Frame
from jaxstrategy.tracing.replication._collective_table import Effect, effect_of

# What changes the form of an array and not its numbers.
FORMING = ("convert_element_type", "reshape", "squeeze", "broadcast_in_dim")
FORMING += ("transpose", "rev", "copy")
_FORMING = (*FORMING, "optimization_barrier")
_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")


def is_mean(frame: Frame, eqn: Equation) -> bool:
    """Whether all that happens to the sum `eqn` is a division by the replicas.

    Or a comparison with something: the sum is a check then.
    """
    sums = list(eqn.outvars)
    for var in sums:  # which grows meanwhile
        for use in frame.uses.get(var, ()):
            if use.primitive.name in _FORMING:
                sums += use.outvars
            elif use.primitive.name not in _COMPARING and not is_share(frame, use):
                return False
    return not any(atom is var for atom in frame.jaxpr.outvars for var in sums)


def gathers_sums(frame: Frame, eqn: Equation) -> bool:
    """Whether `eqn` gathers the parts of a sum, which is then whole everywhere."""
    return any(
        effect_of(origin) in (Effect.SUM, Effect.SUM_SCATTER)
        for origin in _origins(frame, eqn.invars[0], ("mul", "div"))
    )


def gathered(frame: Frame, eqn: Equation) -> Equation | None:
    """The gathering of the axis along which `eqn` reduces its operand, or None."""
    for origin in _origins(frame, eqn.invars[0], ()):
        if effect_of(origin) is Effect.GATHER:
            is_along = origin.params["all_gather_dimension"] in eqn.params["axes"]
            return origin if is_along else None
        if origin.primitive.name != "convert_element_type":
            return None
    return None


def _origins(frame: Frame, atom: Atom, through: Sequence[str]) -> Iterator[Equation]:
    """The equations that `atom` comes from by first operands, the last one first."""
    while not isinstance(atom, Literal):
        eqn = frame.origins.get(atom)
        if eqn is None:
            return
        yield eqn
        name = eqn.primitive.name
        if name not in _FORMING and name not in _CUTTING and name not in through:
            return
        atom = eqn.invars[0]


_CUTTING = ("slice", "pad", "dynamic_slice", "concatenate")


def is_share(frame: Frame, eqn: Equation) -> bool:
    """Whether `eqn` divides something by the number of replicas."""
    replicas = frame.analysis.replicas
    if eqn.primitive.name == "div":
        divisor = eqn.invars[1]
        return _literal(divisor) == replicas or _is_counted(frame, divisor)
    if eqn.primitive.name != "mul":
        return False
    # A reciprocal is a rounded one: in float32 it is wrong by up to 6e-8 of itself.
    factors = [_literal(atom) for atom in eqn.invars]
    return any(
        factor is not None and abs(factor * replicas - 1) < 1e-6 for factor in factors
    )


def _literal(atom: Atom) -> complex | None:
    if isinstance(atom, Literal) and getattr(atom.val, "shape", ()) == ():
        return complex(atom.val)
    return None


def _is_counted(frame: Frame, atom: Atom) -> bool:
    """Whether this is a sum over the replicas of a literal: so much for each."""
    if isinstance(atom, Literal):
        return False
    eqn = frame.origins.get(atom)
    if eqn is None:
        return False
    if eqn.primitive.name in ("convert_element_type", "broadcast_in_dim"):
        return _is_counted(frame, eqn.invars[0])
    is_sum = effect_of(eqn) is Effect.SUM
    return is_sum and all(isinstance(each, Literal) for each in eqn.invars)
