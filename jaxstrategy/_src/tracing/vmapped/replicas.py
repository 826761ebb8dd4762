"""Functions of one replica, for the replicas that share devices, under `jax.vmap`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend import core
from jax.extend.core import DropVar
from jax.ref import AbstractRef

from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    LayoutOrDimension,
    Replicas,
)
from jaxstrategy._src.tracing.jaxprs.rewrite import function_of, references, rewritten
from jaxstrategy._src.tracing.jaxprs.visit import (
    Equation,
    Jaxpr,
    Var,
    all_eqns,
    closed,
    hidden,
    is_along,
    jaxpr_of,
    variables,
    with_jaxprs,
)
from jaxstrategy._src.tracing.partition.partition import flattened
from jaxstrategy._src.tracing.value_form import with_values
from jaxstrategy._src.tracing.vmapped.collectives import VmappedAxes, VmappedCollectives
from jaxstrategy._src.tracing.vmapped.control_flow import VmappedControlFlow
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree

Rewrite: TypeAlias = Callable[[Jaxpr], Jaxpr]
"""Of a jaxpr of one replica, without constants, that of one vmapped replica."""

_Vmapped: TypeAlias = Callable[[Function, Sequence[int | None]], Function]
"""Of a function of one replica, and the dimension of replicas of each of its operands,
that of all on a device."""


# Of `jax.custom_jvp` and `jax.custom_vjp` a trace holds the rules as functions of
# Python, which JAX calls when somebody differentiates the whole program, and without
# the names of the axes of `jax.vmap` (0.10 and 0.12). A collective in them would be
# that of devices.
@final
class VmappedDerivatives:
    """What takes the place of functions whose rules have collectives."""

    def __init__(self, axes: VmappedAxes, vmapped_jaxpr: Rewrite) -> None:
        self._axes = axes
        self._rewrite = vmapped_jaxpr

    def in_place_of(self, eqn: Equation) -> Function | None:
        """The function that takes the place of an equation; None: it stays."""
        if eqn.primitive.name == "custom_jvp_call":
            return self._forward(eqn)
        if eqn.primitive.name in ("custom_vjp_call", "custom_vjp_call_jaxpr"):
            return self._backward(eqn)
        return None

    def _forward(self, eqn: Equation) -> Function | None:
        """A function that is differentiated as a `jax.custom_jvp`."""
        whole = function_of(eqn)
        count = len(eqn.invars)

        def derivative(*operands: jax.Array) -> list[jax.Array]:
            of_some, some = _of_inexact(whole, operands[:count])
            results, found = jax.jvp(of_some, some, list(operands[count:]))
            return [*results, *filter(_is_inexact, found)]

        operands = _types(eqn.invars)
        on_replica = self._with_collectives(
            derivative, [*operands, *filter(_is_inexact, operands)]
        )
        if on_replica is None:
            return None

        def of_vmapped(
            vmapped: _Vmapped, axes: Sequence[int | None]
        ) -> Callable[..., Any]:
            function = jax.custom_jvp(vmapped(_of_call(eqn), axes))

            @function.defjvp
            def _rule(primals: Sequence[Leaf], tangents: Sequence[Leaf]) -> Any:
                own = [i for i, x in enumerate(primals) if _is_inexact(x)]
                all_axes = [*axes, *(axes[i] for i in own)]
                found = vmapped(on_replica, all_axes)(
                    *primals, *(tangents[i] for i in own)
                )
                results = found[: len(eqn.outvars)]
                return results, _with_none(results, found[len(results) :])

            return function

        return self._vmapped_function(eqn, of_vmapped)

    def _backward(self, eqn: Equation) -> Function | None:
        """A function that is differentiated as a `jax.custom_vjp`."""
        whole = function_of(eqn)
        count = len(eqn.invars)

        def forward(*operands: jax.Array) -> list[jax.Array]:
            of_some, some = _of_inexact(whole, operands)
            return jax.vjp(of_some, *some)[0]

        # What the rule keeps for the backward pass is computed again.
        def gradients(*operands: jax.Array) -> Sequence[jax.Array]:
            of_some, some = _of_inexact(whole, operands[:count])
            results, pull = jax.vjp(of_some, *some)
            return pull(_with_none(results, operands[count:]))

        operands, results = _types(eqn.invars), _types(eqn.outvars)
        on_replica = self._with_collectives(
            gradients, [*operands, *filter(_is_inexact, results)]
        )
        if on_replica is None:
            return None
        forward_on_replica = self._on_replica(
            jax.make_jaxpr(forward, axis_env=self._axes.of_steps)(*operands)
        )

        def of_vmapped(
            vmapped: _Vmapped, axes: Sequence[int | None]
        ) -> Callable[..., Any]:
            function = jax.custom_vjp(vmapped(_of_call(eqn), axes))

            def first(*given: jax.Array) -> tuple[Any, Any]:
                return vmapped(forward_on_replica, axes)(*given), given

            def second(given: Sequence[jax.Array], cotangents: Any) -> Any:
                some = list(filter(_is_inexact, cotangents))
                all_axes = [*axes, *(0 for _ in some)]
                found = iter(vmapped(on_replica, all_axes)(*given, *some))
                # Of what all vmapped replicas have in common, the gradient is that of
                # all.
                return tuple(
                    (next(found) if axis == 0 else next(found).sum(0, dtype=x.dtype))
                    if _is_inexact(x)
                    else None
                    for x, axis in zip(given, axes, strict=True)
                )

            function.defvjp(first, second)
            return function

        return self._vmapped_function(eqn, of_vmapped)

    def _vmapped_function(
        self,
        eqn: Equation,
        of_vmapped: Callable[[_Vmapped, Sequence[int | None]], Function],
    ) -> Function:
        """A function of one replica, for `jax.vmap` that of all of a device."""
        function, axis_name = _of_call(eqn), self._axes.vmapped

        @custom_vmap
        def called(_: jax.Array, *operands: jax.Array) -> list[jax.Array]:
            return function(*operands)

        @called.def_vmap
        def _of_all(
            size: int, is_batched: list[bool], _: jax.Array, *operands: jax.Array
        ) -> tuple[list[jax.Array], list[bool]]:
            def vmapped(one: Function, axes: Sequence[int | None]) -> Function:
                return jax.vmap(one, tuple(axes), axis_name=axis_name, axis_size=size)

            axes = [0 if batched else None for batched in is_batched[1:]]
            results = of_vmapped(vmapped, axes)(*operands)
            return results, [True] * len(results)

        # The number of the vmapped replica makes JAX ask, whatever the vmapped replicas
        # have in common.
        return lambda *operands: called(self._axes.vmapped_index(), *operands)

    def _with_collectives(
        self, rule: Function, types: Sequence[jax.ShapeDtypeStruct]
    ) -> Function | None:
        """What a rule computes on one replica; None of one without collectives."""
        try:
            made = jax.make_jaxpr(rule, axis_env=self._axes.of_steps)(*types)
        except Exception:  # anybody's code, which nobody may call
            return None
        known = [self._axes.replicas]
        if not any(is_along(each, known) for each in all_eqns(made.jaxpr)):
            return None
        return self._on_replica(made)

    def _on_replica(self, made: Any) -> Function:
        """What a traced function computes on one vmapped replica."""

        # Not before somebody calls it: a rule may use the function that it is for.
        @functools.cache
        def evaluate() -> Function:
            jaxpr = made.jaxpr
            inputs = [*jaxpr.constvars, *jaxpr.invars]
            whole = jaxpr.replace(constvars=[], invars=inputs)
            return core.jaxpr_as_fun(closed(self._rewrite(whole)))

        return lambda *operands: evaluate()(*made.consts, *operands)


def _of_call(eqn: Equation) -> Function:
    """The function itself, without its rules."""
    return core.jaxpr_as_fun(eqn.params["call_jaxpr"])


def _of_inexact(
    function: Function, operands: Sequence[jax.Array]
) -> tuple[Function, list[jax.Array]]:
    """A function of those operands only that have derivatives, and these operands."""
    places = [i for i, x in enumerate(operands) if _is_inexact(x)]

    def called(*some: jax.Array) -> list[jax.Array]:
        own = dict(zip(places, some, strict=True))
        return function(*(own.get(i, x) for i, x in enumerate(operands)))

    return called, [operands[place] for place in places]


def _with_none(values: Sequence[jax.Array], some: Sequence[jax.Array]) -> list[Leaf]:
    """`some` for the values that have derivatives, and nothing for the others."""
    found = iter(some)
    return [
        next(found) if _is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0)
        for x in values
    ]


def _types(atoms: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in atoms]


def _is_inexact(value: Leaf) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)


def vmapped_jaxpr(jaxpr: Jaxpr, axes: VmappedAxes) -> Jaxpr:
    """`jaxpr` with what takes the place of all that `jax.vmap` does otherwise."""

    def again(other: Jaxpr) -> Jaxpr:
        return vmapped_jaxpr(other, axes)

    rules = (
        VmappedCollectives(axes).in_place_of,
        VmappedControlFlow(axes, _has_groups(jaxpr)).in_place_of,
        VmappedDerivatives(axes, again).in_place_of,
        _without_own_vmap(axes),
    )

    def rule(eqn: Equation) -> Function | None:
        return next(filter(None, (each(eqn) for each in rules)), None)

    def operands(eqn: Equation) -> Function | None:
        return axes.own if _makes_reference(eqn) else None

    return rewritten(jaxpr, rule, axes.of_vmapped, operands)


def _makes_reference(eqn: Equation) -> bool:
    # `jax.vmap` writes none that vmapped replicas have in common (JAX 0.10 and 0.12).
    is_made = any(isinstance(var.aval, AbstractRef) for var in eqn.outvars)
    return is_made and not references(eqn)


def _has_groups(jaxpr: Jaxpr) -> bool:
    return any(eqn.params.get("axis_index_groups") for eqn in all_eqns(jaxpr))


def _without_own_vmap(axes: VmappedAxes) -> Callable[[Equation], Function | None]:
    """A rule for functions that say themselves what `jax.vmap` makes of them.

    That knows of the vmapped replicas, and its collectives are those of devices.
    """

    def rule(eqn: Equation) -> Function | None:
        if eqn.primitive.name != "custom_vmap_call":
            return None
        if not any(is_along(each, axes.both) for each in hidden(eqn.params)):
            return None
        return core.jaxpr_as_fun(eqn.params["call"])

    return rule


_WRITES = frozenset(("swap", "addupdate"))


@final
@dataclasses.dataclass(frozen=True)
class VmappedReplica:
    """A function of one replica, as `jax.vmap` is to call it for each."""

    jaxpr: Jaxpr
    constants: list[Leaf]
    shapes: PyTree
    written: list[int]
    referred: frozenset[int]


def vmapped_replica(
    fn: Function,
    types: Sequence[jax.ShapeDtypeStruct],
    references: Sequence[int],
    axes: VmappedAxes,
) -> VmappedReplica:
    """`fn` of one replica, of vmapped replicas."""
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
    one = vmapped_jaxpr(jaxpr_of(inputs, form.jaxpr.eqns, wanted), axes)
    if axes.in_turn:
        one = _in_turn(one, axes.both)
    values = [whole.invars[i] if i in kept else var for i, var in enumerate(inputs)]
    eqns = [*(creation[i] for i in kept), *one.eqns]
    return VmappedReplica(
        jaxpr_of(values, eqns, one.outvars),
        [*made.consts, *flat.constants],
        shapes,
        written,
        frozenset(referred),
    )


def _traced(
    fn: Function,
    types: Sequence[jax.ShapeDtypeStruct],
    references: Sequence[int],
    axes: VmappedAxes,
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


# The replicas of a device are the vmapped replicas of a `jax.vmap`. A function is
# traced as if each replica had a device of its own; then its collectives are replaced
# by those over vmapped replicas and devices.
def on_shared_devices(
    fn: Function,
    replicas: Replicas,
    taken: Sequence[LayoutOrDimension],
    returned: PyTree,
) -> Function:
    """As `on_replicas`, for replicas that share devices.

    References are values in `jax.vmap`. They are written when it has ended.
    """
    axes = VmappedAxes.of(replicas)

    def all_replicas(*given: Leaf) -> PyTree:
        references = {i: x for i, x in enumerate(given) if _is_reference(x)}
        values = [x[...] if i in references else x for i, x in enumerate(given)]
        pairs = zip(values, taken, strict=True)
        types = [_type_of_one(value, layout, replicas) for value, layout in pairs]
        one = vmapped_replica(fn, types, list(references), axes)
        shapes: Any = one.shapes
        layouts = jax.tree.leaves(_like(returned, shapes))
        layouts += [taken[i] for i in one.written]
        of_inputs = [*taken, *(REPLICATED for _ in one.constants)]
        run = jax.shard_map(
            _of_device(one, axes, of_inputs, layouts),
            mesh=replicas.mesh,
            in_specs=tuple(map(replicas.spec_of, of_inputs)),
            out_specs=[replicas.spec_of(each) for each in layouts],
            check_vma=False,
        )
        results = run(*values, *one.constants)
        count = len(layouts) - len(one.written)
        for index, value in zip(one.written, results[count:], strict=True):
            references[index][...] = value
        return jax.tree.unflatten(jax.tree.structure(shapes), results[:count])

    return all_replicas


def _of_device(
    one: VmappedReplica,
    axes: VmappedAxes,
    taken: Sequence[LayoutOrDimension],
    returned: Sequence[LayoutOrDimension],
) -> Function:
    """Of what one device has of the arrays, what it has of the results."""
    is_own = [layout is STACKED or i in one.referred for i, layout in enumerate(taken)]
    vmapped = jax.vmap(
        core.jaxpr_as_fun(closed(one.jaxpr)),
        in_axes=tuple(0 if own else None for own in is_own),
        axis_name=axes.vmapped,
        axis_size=axes.per_device,
    )

    def by_lane(array: jax.Array, layout: LayoutOrDimension, own: bool) -> jax.Array:
        if layout is STACKED:
            return lax.expand_dims(array, (1,))
        return (
            jnp.broadcast_to(array, (axes.per_device, *array.shape)) if own else array
        )

    def on_device(*given: Leaf) -> list[jax.Array]:
        results = vmapped(*map(by_lane, given, taken, is_own))
        return [
            lax.squeeze(x, (1,)) if layout is STACKED else _first(x)
            for x, layout in zip(results, returned, strict=True)
        ]

    return on_device


def _first(vmapped: jax.Array) -> jax.Array:
    """What is the same on all replicas, of the first vmapped replica."""
    is_number = jnp.issubdtype(vmapped.dtype, jnp.inexact)
    return _first_number(vmapped) if is_number else vmapped[0]


@jax.custom_jvp
def _first_number(vmapped: jax.Array) -> jax.Array:
    return vmapped[0]


@_first_number.defjvp
def _with_share(
    vmapped: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # So each replica has its share of a cotangent, as `shard_map` gives it to devices.
    return vmapped[0][0], tangents[0].mean(0)


def _type_of_one(
    value: Leaf, layout: LayoutOrDimension, replicas: Replicas
) -> jax.ShapeDtypeStruct:
    """The type of what one replica has of an array."""
    kind = jax.typeof(value)
    shape = list(kind.shape)
    if layout is STACKED:
        shape[0] = 1
    elif isinstance(layout, int):
        shape[layout] //= replicas.parts
    weak_type = getattr(kind, "weak_type", False)
    return jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=weak_type)


def _is_reference(value: Leaf) -> bool:
    return isinstance(jax.typeof(value), AbstractRef)


def _like(prefix: PyTree, tree: PyTree) -> PyTree:
    return jax.tree.broadcast(prefix, tree)
    return jax.tree.broadcast(prefix, tree)


def _in_turn(jaxpr: Jaxpr, axes: Sequence[str]) -> Jaxpr:
    """`jaxpr`, whose replicas compute all between collectives one after the other.

    What XLA makes of a batch of matrix products or sums depends on how many there are,
    and with it how numbers are rounded. One replica's own operations, in a loop over
    the replicas of a device, are mostly rounded alike however many take turns.

    Args:
      jaxpr: of one replica, for `jax.vmap` if several share a device.
      axes: along which replicas differ.
    """

    def is_together(eqn: Equation) -> bool:
        if eqn.effects or any(is_key(var.aval.dtype) for var in eqn.outvars):
            return True  # random keys are whole numbers
        return any(is_along(each, axes) for each in (eqn, *hidden(eqn.params)))

    last: dict[Var, int] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        last.update(dict.fromkeys(variables(eqn.invars), number))
    last.update(dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns)))
    eqns: list[Equation] = []
    groups = itertools.groupby(
        enumerate(jaxpr.eqns), lambda numbered: is_together(numbered[1])
    )
    for together, group in groups:
        numbers, found = zip(*group, strict=True)
        if together:
            eqns += (_with_inner_in_turn(eqn, axes) for eqn in found)
            continue
        made = (var for eqn in found for var in eqn.outvars)
        wanted = [
            var
            for var in made
            if not isinstance(var, DropVar) and last.get(var, -1) > numbers[-1]
        ]
        eqns += _call_in_turn(found, wanted)
    whole: Any = jaxpr
    effects = frozenset[Any](jaxpr.effects).union(*(eqn.effects for eqn in eqns))
    return whole.replace(eqns=eqns, effects=effects)


def _with_inner_in_turn(eqn: Any, axes: Sequence[str]) -> Equation:
    """A loop or a branch with collectives, whose other parts are computed in turn."""
    params = {
        name: with_jaxprs(value, lambda inner: _in_turn(inner, axes))
        for name, value in eqn.params.items()
    }
    return eqn.replace(params=params)


def _call_in_turn(eqns: Sequence[Equation], wanted: Sequence[Var]) -> list[Equation]:
    """The equations as one, of a function that replicas call in turn."""
    made = {var for eqn in eqns for var in eqn.outvars}
    read = (var for eqn in eqns for var in variables(eqn.invars))
    given = [var for var in dict.fromkeys(read) if var not in made]
    function = core.jaxpr_as_fun(closed(jaxpr_of(given, list(eqns), wanted)))
    types = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))
        for x in (var.aval for var in given)
    ]
    call: Any = jax.make_jaxpr(_taking_turns(function))(*types)
    names = {
        **dict(zip(call.jaxpr.invars, given, strict=True)),
        **dict(zip(call.jaxpr.outvars, wanted, strict=True)),
    }
    return [
        eqn.replace(
            invars=[names.get(atom, atom) for atom in eqn.invars],
            outvars=[names.get(var, var) for var in eqn.outvars],
        )
        for eqn in call.jaxpr.eqns
    ]


def _taking_turns(function: Function) -> Function:
    @custom_vmap
    def called(*operands: jax.Array) -> list[jax.Array]:
        return function(*operands)

    @called.def_vmap
    def _of_several(
        size: int, is_batched: Sequence[bool], *operands: jax.Array
    ) -> tuple[list[jax.Array], list[bool]]:
        pairs = list(zip(operands, is_batched, strict=True))

        def turn(number: jax.Array) -> list[jax.Array]:
            return function(*(x[number] if own else x for x, own in pairs))

        results = lax.map(turn, jnp.arange(size))
        return results, [True] * len(results)

    return called
