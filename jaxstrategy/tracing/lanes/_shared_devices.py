"""Functions of one replica, for replicas that share devices: `on_shared_devices`.

The replicas of a device are the lanes of a `jax.vmap`. A function is traced as if each
replica had a device of its own; then its collectives are replaced by those over lanes
and devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.ref import AbstractRef

from jaxstrategy.replicas._replicas import SAME, SPLIT, Lies, Replicas
from jaxstrategy.tracing._jaxpr_types import Equation, Jaxpr, Var
from jaxstrategy.tracing._rewritten import rewritten
from jaxstrategy.tracing.lanes._lane_collectives import LaneAxes
from jaxstrategy.tracing.replication._jaxprs import closed, hidden
from jaxstrategy.values._types import Function, Leaf, PyTree

_LANES = "replica_of_device"


def on_shared_devices(
    fn: Function, replicas: Replicas, taken: Sequence[Lies], returned: PyTree
) -> Function:
    """As `on_replicas`, for replicas that share devices.

    References are values in `jax.vmap`, which can write none of a value that all lanes
    have in common (JAX 0.10 and 0.12). They are written when it has ended.
    """

    def all_replicas(*given: Leaf) -> PyTree:
        references = {i: x for i, x in enumerate(given) if _is_reference(x)}
        values = [x[...] if i in references else x for i, x in enumerate(given)]
        lanes = _Lanes(fn, replicas, taken, list(references), values)
        shapes: Any = lanes.shapes
        lies = jax.tree.leaves(_like(returned, shapes)) + [
            taken[i] for i in lanes.written
        ]
        run = jax.shard_map(
            lanes.on_device,
            mesh=replicas.mesh,
            in_specs=tuple(map(replicas.spec_of, lanes.taken)),
            out_specs=[replicas.spec_of(each) for each in lies],
            check_vma=False,
        )
        lanes.returned = lies
        results = run(*values, *lanes.constants)
        count = len(lies) - len(lanes.written)
        for index, value in zip(lanes.written, results[count:], strict=True):
            references[index][...] = value
        return jax.tree.unflatten(jax.tree.structure(shapes), results[:count])

    return all_replicas


class _Lanes:
    """One function of one replica, traced, as that of the replicas of a device.

    Args:
      fn: the function.
      replicas: where it runs.
      taken: how the arrays that it is given lie.
      references: which of them are references.
      values: the arrays.

    Attributes:
      shapes: the pytree that it returns, of types.
      written: those of the references that it writes.
      constants: arrays that it refers to.
      taken: how the arrays that it is given lie, and then the constants.
      returned: how the arrays that it returns lie.
    """

    def __init__(
        self,
        fn: Function,
        replicas: Replicas,
        taken: Sequence[Lies],
        references: Sequence[int],
        values: Sequence[Leaf],
    ) -> None:
        self._axes = LaneAxes(
            replicas.axes[0],
            replicas.axes[0],
            _LANES,
            replicas.parts,
            replicas.per_device,
        )
        types = [
            _type_of_one(value, lies, replicas)
            for value, lies in zip(values, taken, strict=True)
        ]
        made: Any = _traced(fn, types, references, replicas)
        traced, self.shapes = made
        self.constants: list[Leaf] = list(traced.consts)
        self.taken = [*taken, *(SAME for _ in traced.consts)]
        self.returned: list[Lies] = []
        names = dict(
            zip(references, _references_in(traced.jaxpr, references), strict=True)
        )
        self.written = [i for i in references if _is_written(traced.jaxpr, names[i])]
        self._batched = {i for i, lies in enumerate(self.taken) if lies is SPLIT}
        self._batched.update(self.written)
        self._jaxpr = self._for_lanes(traced.jaxpr, references)

    def _for_lanes(self, jaxpr: Any, references: Sequence[int]) -> Jaxpr:
        results = jaxpr.outvars[: len(jaxpr.outvars) - len(references)]
        contents = jaxpr.outvars[len(results) :]
        kept = [
            var
            for index, var in zip(references, contents, strict=True)
            if index in self.written
        ]
        changes: dict[str, Any] = {
            "constvars": [],
            "invars": [*jaxpr.invars, *jaxpr.constvars],
            "outvars": [*results, *kept],
        }
        axes = self._axes
        sizes = [(axes.devices, axes.num_devices), (axes.lanes, axes.num_lanes)]
        whole = jaxpr.replace(**changes)
        return rewritten(whole, axes.in_place_of, sizes, _once_for_each)

    def on_device(self, *given: Leaf) -> list[jax.Array]:
        """Of what one device has of the arrays, what it has of the results."""
        count = self._axes.num_lanes
        inputs = [
            self._by_lane(x, self.taken[i]) if i in self._batched else x
            for i, x in enumerate(given)
        ]
        results = jax.vmap(
            core.jaxpr_as_fun(closed(self._jaxpr)),
            in_axes=tuple(0 if i in self._batched else None for i in range(len(given))),
            axis_name=self._axes.lanes,
            axis_size=count,
        )(*inputs)
        # What is the same on all replicas, the first lane of a device has too.
        return [
            lax.squeeze(x, (1,)) if lies is SPLIT else x[0]
            for x, lies in zip(results, self.returned, strict=True)
        ]

    def _by_lane(self, array: jax.Array, lies: Lies) -> jax.Array:
        if lies is SPLIT:
            return lax.expand_dims(array, (1,))
        return jnp.broadcast_to(array, (self._axes.num_lanes, *array.shape))


def _once_for_each(eqn: Equation) -> dict[str, Any]:
    """Lets a host callback be called for each replica, as `jax.vmap` has to know."""
    is_callback = eqn.primitive.name == "pure_callback"
    return {"vmap_method": "sequential"} if is_callback else {}


def _traced(
    fn: Function,
    types: Sequence[jax.ShapeDtypeStruct],
    references: Sequence[int],
    replicas: Replicas,
) -> Any:
    """The jaxpr of one replica, which returns what references hold last."""
    shapes: list[PyTree] = []

    def one(*given: jax.Array) -> list[jax.Array]:
        own = {i: jax.new_ref(given[i]) for i in references}
        result = fn(*(own.get(i, x) for i, x in enumerate(given)))
        leaves, structure = jax.tree.flatten(result)
        kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        shapes.append(jax.tree.unflatten(structure, kinds))
        return [*leaves, *(own[i][...] for i in references)]

    made = jax.make_jaxpr(one, axis_env=replicas.axis_sizes)(*types)
    return made, shapes[0]


def _references_in(jaxpr: Jaxpr, references: Sequence[int]) -> Sequence[Var]:
    """The variables of the references that were made first."""
    made = [eqn.outvars[0] for eqn in jaxpr.eqns if isinstance(_aval(eqn), AbstractRef)]
    return made[: len(references)]


def _aval(eqn: Equation) -> object:
    return eqn.outvars[0].aval if eqn.outvars else None


def _is_written(jaxpr: Jaxpr, reference: Var) -> bool:
    """Whether an equation may write a reference."""
    return any(
        any(atom is reference for atom in eqn.invars) and _writes(eqn)
        for eqn in jaxpr.eqns
    )


def _writes(eqn: Equation) -> bool:
    found = (eqn, *hidden(eqn.params))
    return any(each.primitive.name in ("swap", "addupdate") for each in found)


def _type_of_one(value: Leaf, lies: Lies, replicas: Replicas) -> jax.ShapeDtypeStruct:
    """The type of what one replica has of an array."""
    kind = jax.typeof(value)
    shape = list(kind.shape)
    if lies is SPLIT:
        shape[0] = 1
    elif isinstance(lies, int):
        shape[lies] //= replicas.parts
    weak_type = getattr(kind, "weak_type", False)
    return jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=weak_type)


def _is_reference(value: Leaf) -> bool:
    return isinstance(jax.typeof(value), AbstractRef)


def _like(prefix: PyTree, tree: PyTree) -> PyTree:
    return jax.tree.broadcast(prefix, tree)
