"""The jaxpr of one replica as that of one lane of a device: `on_lanes`."""

from __future__ import annotations

from collections.abc import Callable

from jax.extend import core
from jax.ref import AbstractRef

from jaxstrategy.tracing._jaxpr_types import Equation, Jaxpr
from jaxstrategy.tracing._rewritten import rewritten
from jaxstrategy.tracing.lanes._lane_axes import LaneAxes
from jaxstrategy.tracing.lanes._lane_collectives import LaneCollectives
from jaxstrategy.tracing.lanes._lane_control import LaneControl
from jaxstrategy.tracing.lanes._lane_derivatives import LaneDerivatives
from jaxstrategy.tracing.lanes._one_equation import references
from jaxstrategy.tracing.replication._collective_table import is_along
from jaxstrategy.tracing.replication._jaxprs import all_eqns, hidden
from jaxstrategy.values._types import Function


def on_lanes(jaxpr: Jaxpr, axes: LaneAxes) -> Jaxpr:
    """`jaxpr` with what takes the place of all that `jax.vmap` does otherwise.

    Args:
      jaxpr: of one replica, without constants.
      axes: of the replicas.

    Raises:
      NotImplementedError: it has something that replicas that share a device cannot.
    """

    def again(other: Jaxpr) -> Jaxpr:
        return on_lanes(other, axes)

    rules = (
        LaneCollectives(axes).in_place_of,
        LaneControl(axes, _has_groups(jaxpr)).in_place_of,
        LaneDerivatives(axes, again).in_place_of,
        _without_own_lanes(axes),
    )

    def rule(eqn: Equation) -> Function | None:
        return next(filter(None, (each(eqn) for each in rules)), None)

    def operands(eqn: Equation) -> Function | None:
        return axes.own if _makes_reference(eqn) else None

    return rewritten(jaxpr, rule, axes.of_lanes, operands)


def _makes_reference(eqn: Equation) -> bool:
    # `jax.vmap` writes none that lanes have in common (JAX 0.10 and 0.12).
    is_made = any(isinstance(var.aval, AbstractRef) for var in eqn.outvars)
    return is_made and not references(eqn)


def _has_groups(jaxpr: Jaxpr) -> bool:
    return any(eqn.params.get("axis_index_groups") for eqn in all_eqns(jaxpr))


def _without_own_lanes(axes: LaneAxes) -> Callable[[Equation], Function | None]:
    """A rule for functions that say themselves what `jax.vmap` makes of them.

    What they say then knows of the lanes, and its collectives are those of devices.
    """

    def rule(eqn: Equation) -> Function | None:
        if eqn.primitive.name != "custom_vmap_call":
            return None
        if not any(is_along(each, axes.both) for each in hidden(eqn.params)):
            return None
        return core.jaxpr_as_fun(eqn.params["call"])

    return rule
