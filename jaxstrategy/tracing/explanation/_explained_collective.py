"""A collective of a step, explained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxstrategy.tracing._jaxpr_types import ArrayType
from jaxstrategy.tracing.explanation._facts import ExplainedCollective
from jaxstrategy.tracing.replication._collective_table import COLLECTIVES
from jaxstrategy.tracing.replication._site import Site


def explained(
    site: Site, operands: Sequence[ArrayType], **more: Any
) -> ExplainedCollective:
    """The collective at a place.

    Args:
      site: its equation.
      operands: the types of those that count.
      more: attributes that the site does not tell, or tells otherwise.
    """
    groups = site.eqns[0].params.get("axis_index_groups")
    known = COLLECTIVES.get(site.primitive)
    told: dict[str, Any] = {
        "operation": site.primitive,
        # Nothing takes longer than an all-reduce of as much.
        "kind": "all_reduce" if known is None else known.kind,
        "nbytes": nbytes_of(operands),
        "dtypes": tuple(dict.fromkeys(str(aval.dtype) for aval in operands)),
        "loops": site.loops,
        "in_branch": site.in_branch,
        "groups": tuple(map(tuple, groups)) if groups else None,
        "line": site.line,
        "is_transposed": site.is_transposed,
    }
    return ExplainedCollective(**told | more)


def nbytes_of(types: Sequence[ArrayType]) -> int:
    """The bytes of arrays of these types."""
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in types)
