"""The placement of results over inner axes that take the place of arguments.

XLA chooses how results lie that nobody has placed. What replaces an argument is to lie
as that did, or the next call would be compiled anew, for state that lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import NamedSharding

from jaxstrategy.replicas._replicas import SAME
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.division._replaced import replaced_arguments
from jaxstrategy.values import _arrays
from jaxstrategy.values._types import Leaf


def kept_placements(
    step: TracedStep, leaves: Sequence[Leaf]
) -> dict[int, NamedSharding]:
    """For each result that is like an argument how the argument lies.

    Args:
      step: what was traced.
      leaves: its arguments, on all replicas.
    """
    replicas = step.trace.replicas
    found: dict[int, NamedSharding] = {}
    for number, argument in replaced_arguments(step).items():
        leaf = leaves[argument]
        lies = replicas.inner_placement(leaf, SAME) if _arrays.has_place(leaf) else None
        if lies is not None:
            found[number] = lies
    return found
