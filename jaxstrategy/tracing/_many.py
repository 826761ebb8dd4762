"""A word about steps of so many arrays that compiling them takes very long."""

from __future__ import annotations

import sys

from jaxstrategy.tracing.jaxprs._visit import ClosedJaxpr

# Of a sum, 500 arrays take 2.5 s of processor time to compile, 2,000 take 17 s.
_MANY = 2000

_told: set[tuple[str, int]] = set()


def tell(name: str, jaxpr: ClosedJaxpr) -> None:
    """Say once of a step why nothing will be seen of it for a while.

    Args:
      name: of the step.
      jaxpr: of one replica, about to be compiled.
    """
    if max(len(jaxpr.invars), len(jaxpr.outvars)) < _MANY:  # the usual case
        return
    count = max(_used(jaxpr), len(jaxpr.outvars))
    if count < _MANY or (name, count) in _told:
        return
    _told.add((name, count))
    print(
        f"jaxstrategy: `{name}` takes or returns {count:,} arrays and is being "
        "compiled. XLA needs longer than in proportion to their number: about 20 s of "
        "processor time for 2,000, several minutes for 10,000. Stack arrays of equal "
        "layers, or join small ones (`jax.flatten_util.ravel_pytree`).",
        file=sys.stderr,
        flush=True,
    )


def _used(jaxpr: ClosedJaxpr) -> int:
    """How many inputs a step uses: a trace has all variables that live, too."""
    atoms = [atom for eqn in jaxpr.eqns for atom in eqn.invars]
    used = {id(atom) for atom in (*atoms, *jaxpr.outvars)}
    return sum(id(var) in used for var in jaxpr.invars)
