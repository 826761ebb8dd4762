"""Sums that stand for means, and equal shares of what is equal on all replicas.

Both are seen by a division by the number of replicas, which is a literal, or the sum
over the replicas of one.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Literal

from jaxstrategy.tracing.replication._analysis import Frame


def is_mean(frame: Frame, eqn: Any) -> bool:
    """Whether all that happens to the sum `eqn` is a division by the replicas."""
    sums = list(eqn.outvars)
    for var in sums:  # which grows meanwhile
        for use in frame.uses.get(var, ()):
            if use.primitive.name == "convert_element_type":
                sums += use.outvars
            elif not is_share(frame, use):
                return False
    return not any(atom is var for atom in frame.jaxpr.outvars for var in sums)


def is_share(frame: Frame, eqn: Any) -> bool:
    """Whether `eqn` divides something by the number of replicas."""
    replicas = frame.analysis.replicas
    if eqn.primitive.name == "div":
        divisor = eqn.invars[1]
        return _literal(divisor) == replicas or _is_counted(frame, divisor)
    if eqn.primitive.name != "mul":
        return False
    factors = [_literal(atom) for atom in eqn.invars]
    return any(
        factor is not None and abs(factor * replicas - 1) < 1e-6 for factor in factors
    )


def _literal(atom: Any) -> complex | None:
    is_number = isinstance(atom, Literal) and getattr(atom.val, "shape", ()) == ()
    return complex(atom.val) if is_number else None


def _is_counted(frame: Frame, atom: Any) -> bool:
    """Whether this is a sum over the replicas of a literal: so much for each."""
    if isinstance(atom, Literal):
        return False
    eqn = frame.origins.get(atom)
    if eqn is None:
        return False
    if eqn.primitive.name in ("convert_element_type", "broadcast_in_dim"):
        return _is_counted(frame, eqn.invars[0])
    summed = eqn.primitive.name.startswith("psum")
    return summed and all(isinstance(each, Literal) for each in eqn.invars)
