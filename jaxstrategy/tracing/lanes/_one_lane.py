"""The computation of one replica that shares its device: `one_lane`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, final

import jax

from jaxstrategy.tracing._jaxpr_types import Equation, Jaxpr, Var
from jaxstrategy.tracing._value_form import with_values
from jaxstrategy.tracing.division._flat import flattened
from jaxstrategy.tracing.lanes._lane_axes import LaneAxes
from jaxstrategy.tracing.lanes._on_lanes import on_lanes
from jaxstrategy.tracing.replication._jaxprs import hidden, jaxpr_of
from jaxstrategy.values._types import Function, Leaf, PyTree

_WRITES = frozenset(("swap", "addupdate"))


@final
@dataclasses.dataclass(frozen=True)
class OneLane:
    """A function of one replica, as `jax.vmap` is to call it for each lane.

    Attributes:
      jaxpr: takes values, those of references too, and then the constants; returns the
        results, and then what written references hold.
      constants: arrays that it refers to.
      shapes: the pytree of results, of types.
      written: the references that it writes.
      referred: those of them that are references inside, too. Of such a one each lane
        needs its own: `jax.vmap` writes none that lanes have in common (0.10 and 0.12).
    """

    jaxpr: Jaxpr
    constants: list[Leaf]
    shapes: PyTree
    written: list[int]
    referred: frozenset[int]


def one_lane(
    fn: Function,
    types: Sequence[jax.ShapeDtypeStruct],
    references: Sequence[int],
    axes: LaneAxes,
) -> OneLane:
    """`fn` of one replica, of lanes.

    Args:
      fn: takes one replica's arrays, and returns a pytree of them.
      types: those of its arguments.
      references: which of them it takes as references.
      axes: of the replicas.

    Raises:
      NotImplementedError: it has something that replicas that share a device cannot.
    """
    made, shapes = _traced(fn, types, references, axes)
    whole: Any = made.jaxpr
    count = len(references)
    # The references are inputs at first, as they are where they can become values.
    creation: dict[int, Any] = dict(zip(references, whole.eqns[:count], strict=True))
    invars = [
        creation[i].outvars[0] if i in creation else var
        for i, var in enumerate(whole.invars)
    ]
    body = jaxpr_of([*invars, *whole.constvars], whole.eqns[count:], whole.outvars)
    flat = flattened(body)
    form = with_values(flat.jaxpr, references)
    kept = [i for i in references if i not in form.replaced]
    outvars = form.jaxpr.outvars[: len(whole.outvars)]
    results, contents = outvars[: len(outvars) - count], outvars[len(outvars) - count :]
    last = dict(zip(references, contents, strict=True))
    referred = [i for i in kept if _is_written(form.jaxpr, invars[i])]
    inputs = form.jaxpr.invars
    replaced = [i for i in form.replaced if last[i] is not inputs[i]]
    written = sorted((*referred, *replaced))
    wanted = [*results, *(last[i] for i in written)]
    lane = on_lanes(jaxpr_of(inputs, form.jaxpr.eqns, wanted), axes)
    values = [whole.invars[i] if i in kept else var for i, var in enumerate(inputs)]
    eqns = [*(creation[i] for i in kept), *lane.eqns]
    return OneLane(
        jaxpr_of(values, eqns, lane.outvars),
        [*made.consts, *flat.constants],
        shapes,
        written,
        frozenset(referred),
    )


def _traced(
    fn: Function,
    types: Sequence[jax.ShapeDtypeStruct],
    references: Sequence[int],
    axes: LaneAxes,
) -> tuple[Any, PyTree]:
    """The jaxpr of one replica, which returns what references hold last."""
    shapes: list[PyTree] = []

    def one(*given: jax.Array) -> list[jax.Array]:
        own = {i: jax.new_ref(given[i]) for i in references}
        result = fn(*(own.get(i, x) for i, x in enumerate(given)))
        leaves, structure = jax.tree.flatten(result)
        kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        shapes.append(jax.tree.unflatten(structure, kinds))
        return [*leaves, *(own[i][...] for i in references)]

    made = jax.make_jaxpr(one, axis_env=axes.of_steps)(*types)
    return made, shapes[0]


def _is_written(jaxpr: Jaxpr, reference: Var) -> bool:
    """Whether an equation may write a reference."""
    return any(
        any(atom is reference for atom in eqn.invars) and _writes(eqn)
        for eqn in jaxpr.eqns
    )


def _writes(eqn: Equation) -> bool:
    found = (eqn, *hidden(eqn.params))
    return any(each.primitive.name in _WRITES for each in found)
