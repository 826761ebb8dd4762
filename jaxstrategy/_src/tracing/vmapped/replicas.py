"""Runs functions of one replica on all, under `jax.vmap` where they share a device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend import core
from jax.ref import AbstractRef
from jax.typing import DTypeLike

from jaxstrategy._src.reductions.operations import unfolded
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    LayoutOrDimension,
    Replicas,
)
from jaxstrategy._src.tracing.jaxprs import (
    Atom,
    Effect,
    Equation,
    Jaxpr,
    Run,
    Var,
    all_eqns,
    closed,
    effect_of,
    function_of,
    in_runs,
    inner_eqns,
    is_along,
    jaxpr_of,
    references,
    rewritten,
    rewritten_function,
    type_of,
    with_inner,
    with_values,
    without_collectives,
)
from jaxstrategy._src.tracing.numbered_prints import on_own_devices
from jaxstrategy._src.tracing.partition.partition import inline_calls
from jaxstrategy._src.tracing.vmapped.rules import (
    VmappedAxes,
    collective,
    control_flow,
    sequential,
)
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree

# (function of one replica, `in_axes`) -> the function vmapped.
_Vmap: TypeAlias = Callable[[Function, Sequence[int | None]], Function]


# A trace has the rules of `jax.custom_jvp` and `jax.custom_vjp` as Python functions,
# which JAX calls when the whole program is differentiated, without the axis names of
# `jax.vmap` (0.10 and 0.12). Collectives in them would be those of devices.
def _forward(eqn: Equation, axes: VmappedAxes) -> Function | None:
    """A `jax.custom_jvp`, whose derivative is vmapped as well."""
    function = function_of(eqn)
    count = len(eqn.invars)

    def derivative(*operands: jax.Array) -> list[jax.Array]:
        primals = operands[:count]
        tangents = _with_float0(primals, operands[count:])
        results, tangents = jax.jvp(function, primals, tuple(tangents))
        return [*results, *filter(_is_inexact, tangents)]

    operands = _types(eqn.invars)
    on_replica = _with_collectives(
        derivative, [*operands, *filter(_is_inexact, operands)], axes
    )
    if on_replica is None:
        return None

    def vmapped(vmap: _Vmap, in_axes: Sequence[int | None]) -> Callable[..., Any]:
        called = jax.custom_jvp(vmap(_callee(eqn), in_axes))

        @called.defjvp
        def _rule(primals: Sequence[Leaf], tangents: Sequence[Leaf]) -> Any:
            inexact = [i for i, x in enumerate(primals) if _is_inexact(x)]
            all_axes = [*in_axes, *(in_axes[i] for i in inexact)]
            outputs = vmap(on_replica, all_axes)(
                *primals, *(tangents[i] for i in inexact)
            )
            results = outputs[: len(eqn.outvars)]
            return results, _with_float0(results, outputs[len(results) :])

        return called

    return _custom_vmap(eqn, axes, vmapped)


def _backward(eqn: Equation, axes: VmappedAxes) -> Function | None:
    """A `jax.custom_vjp`, whose gradients are vmapped as well."""
    function = function_of(eqn)
    count = len(eqn.invars)

    def forward(*operands: jax.Array) -> list[jax.Array]:
        return jax.vjp(function, *operands)[0]

    # Residuals are computed again.
    def gradients(*operands: jax.Array) -> list[jax.Array]:
        results, pull_back = jax.vjp(function, *operands[:count])
        found = pull_back(_with_float0(results, operands[count:]))
        return list(filter(_is_inexact, found))

    operands, results = _types(eqn.invars), _types(eqn.outvars)
    on_replica = _with_collectives(
        gradients, [*operands, *filter(_is_inexact, results)], axes
    )
    if on_replica is None:
        return None
    forward_on_replica = _on_replica(
        jax.make_jaxpr(forward, axis_env=axes.in_steps)(*operands), axes
    )

    def vmapped(vmap: _Vmap, in_axes: Sequence[int | None]) -> Callable[..., Any]:
        called = jax.custom_vjp(vmap(_callee(eqn), in_axes))

        def first(*primals: jax.Array) -> tuple[Any, Any]:
            return vmap(forward_on_replica, in_axes)(*primals), primals

        def second(primals: Sequence[jax.Array], cotangents: Any) -> Any:
            inexact = list(filter(_is_inexact, cotangents))
            all_axes = [*in_axes, *(0 for _ in inexact)]
            outputs = iter(vmap(on_replica, all_axes)(*primals, *inexact))

            def gradient(primal: jax.Array, axis: int | None) -> Any:
                if not _is_inexact(primal):
                    return None
                # That of an unbatched operand is summed over the replicas.
                found = next(outputs)
                return found if axis == 0 else found.sum(0, dtype=primal.dtype)

            return tuple(map(gradient, primals, in_axes))

        called.defvjp(first, second)
        return called

    return _custom_vmap(eqn, axes, vmapped)


def _custom_vmap(
    eqn: Equation,
    axes: VmappedAxes,
    vmapped: Callable[[_Vmap, Sequence[int | None]], Function],
) -> Function:
    """The function of `eqn`, which `jax.vmap` replaces by `vmapped`."""
    function = _callee(eqn)

    @custom_vmap
    def called(_: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        return function(*operands)

    @called.def_vmap
    def _of_all(
        size: int, is_batched: list[bool], _: jax.Array, *operands: jax.Array
    ) -> tuple[list[jax.Array], list[bool]]:
        def vmap(one: Function, in_axes: Sequence[int | None]) -> Function:
            return jax.vmap(one, tuple(in_axes), axis_name=axes.vmapped, axis_size=size)

        in_axes = [0 if batched else None for batched in is_batched[1:]]
        results = vmapped(vmap, in_axes)(*operands)
        return results, [True] * len(results)

    # The index is batched, even if no operand is.
    return lambda *operands: called(axes.vmapped_index(), *operands)


def _with_collectives(
    rule: Function, types: Sequence[jax.ShapeDtypeStruct], axes: VmappedAxes
) -> Function | None:
    """A derivative rule, rewritten for a vmapped replica, if it has collectives."""
    try:
        made = jax.make_jaxpr(rule, axis_env=axes.in_steps)(*types)
    except Exception:  # raised by the user's code, which may never be called
        return None
    has_any = any(is_along(each, [axes.replicas]) for each in all_eqns(made.jaxpr))
    return _on_replica(made, axes) if has_any else None


def _on_replica(made: Any, axes: VmappedAxes) -> Function:
    """A traced function, rewritten for a vmapped replica."""

    # Lazily, as a rule may use the function that it is for.
    @functools.cache
    def evaluate() -> Function:
        jaxpr = made.jaxpr
        whole = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        return core.jaxpr_as_fun(closed(vmapped_jaxpr(whole, axes)))

    return lambda *operands: evaluate()(*made.consts, *operands)


def _callee(eqn: Equation) -> Function:
    """The function without its rules for derivatives."""
    return core.jaxpr_as_fun(eqn.params["call_jaxpr"])


def _with_float0(
    values: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> list[Leaf]:
    """Tangents of differentiable values, and `float0` zeros for the others."""
    following = iter(tangents)
    return [
        next(following) if _is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0)
        for x in values
    ]


def _types(atoms: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in atoms]


def _is_inexact(value: Leaf) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)


def _without_custom_vmap(eqn: Equation, axes: VmappedAxes) -> Function | None:
    """Drops a custom rule for `jax.vmap` of a function with collectives."""
    if any(is_along(each, axes.both) for each in inner_eqns(eqn.params)):
        return core.jaxpr_as_fun(eqn.params["call"])
    return None


_CALLS = {
    "custom_jvp_call": _forward,
    "custom_vjp_call": _backward,
    "custom_vmap_call": _without_custom_vmap,
}


def vmapped_jaxpr(jaxpr: Jaxpr, axes: VmappedAxes) -> Jaxpr:
    """Rewrites one replica's jaxpr so that `jax.vmap` of it computes all replicas'."""
    has_groups = any(eqn.params.get("axis_index_groups") for eqn in all_eqns(jaxpr))
    axes = dataclasses.replace(axes, has_groups=has_groups)

    def rule(eqn: Equation) -> Function | None:
        if (replace := _CALLS.get(eqn.primitive.name)) is not None:
            return replace(eqn, axes)
        return collective(eqn, axes) or control_flow(eqn, axes)

    def operands(eqn: Equation) -> Function | None:
        # `jax.vmap` cannot write to unbatched references (JAX 0.10 and 0.12).
        is_created = any(isinstance(var.aval, AbstractRef) for var in eqn.outvars)
        return axes.batched if is_created and not references(eqn) else None

    return rewritten(jaxpr, rule, axes.in_vmap, operands)


_WRITES = frozenset(("swap", "addupdate"))


@final
@dataclasses.dataclass(frozen=True)
class VmappedReplica:
    """One replica's jaxpr, ready for `jax.vmap`."""

    jaxpr: Jaxpr
    constants: list[Leaf]
    template: PyTree  # results, with zeros for arrays
    written: list[int]  # inputs that were references, whose contents are returned
    in_place: frozenset[int]  # those that still are references inside


def vmapped_replica(
    fn: Function,
    types: Sequence[jax.ShapeDtypeStruct],
    references: Sequence[int],
    axes: VmappedAxes,
    in_turn: bool,
) -> VmappedReplica:
    """Traces `fn` of one replica, with values for the inputs `references`."""
    made, template = _traced(fn, types, references, axes)
    whole: Any = made.jaxpr
    count = len(references)
    # For now, references are inputs, so that `with_values` can replace them.
    creation: dict[int, Any] = dict(zip(references, whole.eqns[:count], strict=True))
    invars = [
        creation[i].outvars[0] if i in creation else var
        for i, var in enumerate(whole.invars)
    ]
    body = jaxpr_of([*invars, *whole.constvars], whole.eqns[count:], whole.outvars)
    inlined = inline_calls(body)
    form = with_values(inlined.jaxpr, references)
    remaining = [i for i in references if i not in form.replaced]
    outvars = form.jaxpr.outvars[: len(whole.outvars)]
    results, contents = outvars[: len(outvars) - count], outvars[len(outvars) - count :]
    last = dict(zip(references, contents, strict=True))
    in_place = [i for i in remaining if _is_written(form.jaxpr, invars[i])]
    inputs = form.jaxpr.invars
    replaced = [i for i in form.replaced if last[i] is not inputs[i]]
    written = sorted((*in_place, *replaced))
    outputs = [*results, *(last[i] for i in written)]
    one = vmapped_jaxpr(jaxpr_of(inputs, form.jaxpr.eqns, outputs), axes)
    if in_turn:
        one = _in_turn(one, axes.both)
    values = [whole.invars[i] if i in remaining else v for i, v in enumerate(inputs)]
    eqns = [*(creation[i] for i in remaining), *one.eqns]
    return VmappedReplica(
        jaxpr_of(values, eqns, one.outvars),
        [*made.consts, *inlined.constants],
        template,
        written,
        frozenset(in_place),
    )


def _traced(
    fn: Function,
    types: Sequence[jax.ShapeDtypeStruct],
    references: Sequence[int],
    axes: VmappedAxes,
) -> tuple[Any, PyTree]:
    """The jaxpr of one replica, which returns the references' contents last.

    And its results as a tree of zeros.
    """
    templates: list[PyTree] = []

    def one(*inputs: jax.Array) -> list[jax.Array]:
        refs = {i: jax.new_ref(inputs[i]) for i in references}
        result = fn(*(refs.get(i, x) for i, x in enumerate(inputs)))
        templates.append(jax.tree.map(lambda _: 0, result))
        return [*jax.tree.leaves(result), *(refs[i][...] for i in references)]

    made = jax.make_jaxpr(one, axis_env=axes.in_steps)(*types)
    return made, templates[0]


def _is_written(jaxpr: Jaxpr, reference: Var) -> bool:
    """Whether an equation may write to a reference."""
    return any(
        each.primitive.name in _WRITES
        for eqn in jaxpr.eqns
        if any(atom is reference for atom in eqn.invars)
        for each in (eqn, *inner_eqns(eqn.params))
    )


# A function is traced as if each replica had its own device; then its collectives are
# replaced by those over vmapped replicas and devices.
def on_shared_devices(
    fn: Function,
    replicas: Replicas,
    taken: Sequence[LayoutOrDimension],
    returned: PyTree,
) -> Function:
    """As `on_replicas`, for replicas that share devices.

    References are values in `jax.vmap`; they are written when it has ended.
    """
    axes = VmappedAxes.of(replicas)

    def all_replicas(*inputs: Leaf) -> PyTree:
        refs = ((i, x) for i, x in enumerate(inputs))
        references = {i: x for i, x in refs if isinstance(jax.typeof(x), AbstractRef)}
        values = [x[...] if i in references else x for i, x in enumerate(inputs)]
        pairs = zip(values, taken, strict=True)
        types = [_type_on_replica(value, layout, replicas) for value, layout in pairs]
        one = vmapped_replica(fn, types, list(references), axes, replicas.in_turn)
        layout = jax.tree.leaves(jax.tree.broadcast(returned, one.template))
        layout += [taken[i] for i in one.written]
        layouts_in = [*taken, *(REPLICATED for _ in one.constants)]
        run = jax.shard_map(
            _on_device(one, axes, layouts_in, layout),
            mesh=replicas.mesh,
            in_specs=tuple(map(replicas.spec, layouts_in)),
            out_specs=[replicas.spec(each) for each in layout],
            check_vma=False,
        )
        results = run(*values, *one.constants)
        count = len(layout) - len(one.written)
        for index, value in zip(one.written, results[count:], strict=True):
            references[index][...] = value
        return jax.tree.unflatten(jax.tree.structure(one.template), results[:count])

    return all_replicas


def _on_device(
    one: VmappedReplica,
    axes: VmappedAxes,
    taken: Sequence[LayoutOrDimension],
    returned: Sequence[LayoutOrDimension],
) -> Function:
    """Computes one device's shard of the results from its shard of the inputs."""
    is_batched = [
        layout is STACKED or i in one.in_place for i, layout in enumerate(taken)
    ]
    vmapped = jax.vmap(
        core.jaxpr_as_fun(closed(one.jaxpr)),
        in_axes=tuple(0 if batched else None for batched in is_batched),
        axis_name=axes.vmapped,
        axis_size=axes.per_device,
    )
    if axes.num_devices == 1:
        vmapped = without_collectives(vmapped, [axes.replicas])

    def by_replica(
        array: jax.Array, layout: LayoutOrDimension, batched: bool
    ) -> jax.Array:
        if layout is STACKED:
            return lax.expand_dims(array, (1,))
        shape = (axes.per_device, *array.shape)
        return jnp.broadcast_to(array, shape) if batched else array

    def on_device(*inputs: Leaf) -> list[jax.Array]:
        results = vmapped(*map(by_replica, inputs, taken, is_batched))
        return [
            lax.squeeze(x, (1,)) if layout is STACKED else _first(x)
            for x, layout in zip(results, returned, strict=True)
        ]

    return on_device


def _first(vmapped: jax.Array) -> jax.Array:
    """The value of the first vmapped replica, which is that of all."""
    is_number = jnp.issubdtype(vmapped.dtype, jnp.inexact)
    return _first_number(vmapped) if is_number else vmapped[0]


@jax.custom_jvp
def _first_number(vmapped: jax.Array) -> jax.Array:
    return vmapped[0]


@_first_number.defjvp
def _with_share(
    vmapped: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    # Each replica gets its share of a cotangent, as devices do from `shard_map`.
    return vmapped[0][0], tangents[0].mean(0)


def _type_on_replica(
    value: Leaf, layout: LayoutOrDimension, replicas: Replicas
) -> jax.ShapeDtypeStruct:
    """The type of one replica's part of an array."""
    kind = jax.typeof(value)
    shape = list(kind.shape)
    if layout is STACKED:
        shape[0] = 1
    elif isinstance(layout, int):
        shape[layout] //= replicas.parts
    weak_type = getattr(kind, "weak_type", False)
    return jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=weak_type)


def _in_turn(jaxpr: Jaxpr, axes: Sequence[str]) -> Jaxpr:
    """Lets replicas compute one after the other what is between collectives.

    XLA chooses algorithms for batched products and sums by the size of the batch, and
    so the rounding. Operations of one replica, in a loop over the replicas of a device,
    are mostly rounded alike, however many there are.
    """

    def is_together(eqn: Equation) -> bool:
        if eqn.effects or any(is_key(var.aval.dtype) for var in eqn.outvars):
            return True  # random keys are whole numbers
        return any(is_along(each, axes) for each in (eqn, *inner_eqns(eqn.params)))

    eqns: list[Equation] = []
    for each in in_runs(jaxpr.eqns, is_together, jaxpr.outvars):
        if isinstance(each, Run):
            eqns += _call_in_turn(each)
            continue
        eqns.append(with_inner(each, lambda inner: _in_turn(inner, axes)))
    whole: Any = jaxpr
    effects = frozenset[Any](jaxpr.effects).union(*(eqn.effects for eqn in eqns))
    return whole.replace(eqns=eqns, effects=effects)


def _call_in_turn(run: Run) -> list[Equation]:
    """A call of a function by one replica after the other."""
    call: Any = jax.make_jaxpr(sequential(run.function))(*map(type_of, run.inputs))
    inside = (*call.jaxpr.invars, *call.jaxpr.outvars)
    names = dict(zip(inside, (*run.inputs, *run.outputs), strict=True))
    return [
        eqn.replace(
            invars=[names.get(atom, atom) for atom in eqn.invars],
            outvars=[names.get(var, var) for var in eqn.outvars],
        )
        for eqn in call.jaxpr.eqns
    ]


_EFFECTS = (Effect.SUM, Effect.EXTREME, Effect.SUM_SCATTER, Effect.GATHER)


def on_cpu_devices(
    fn: Function,
    replicas: Replicas,
    taken: Sequence[LayoutOrDimension],
    returned: PyTree,
) -> Function:
    """As `on_own_devices`, with sums of bfloat16 in float32, in derivatives too.

    Beside automatic axes XLA cannot compile others on CPUs.
    """

    def all_replicas(*inputs: Leaf) -> PyTree:
        is_widened = [
            layout is REPLICATED and _is_bfloat16_array(x)
            for x, layout in zip(inputs, taken, strict=True)
        ]

        def narrowed(*own: jax.Array) -> PyTree:
            return fn(*_converted(own, is_widened, jnp.bfloat16))

        compilable = rewritten_function(narrowed, _in_float32)
        run = on_own_devices(compilable, replicas, taken, returned)
        return run(*_converted(inputs, is_widened, jnp.float32))

    return all_replicas


def _is_bfloat16_array(value: Leaf) -> bool:
    kind = jax.typeof(value)
    return kind.dtype == jnp.bfloat16 and not isinstance(kind, AbstractRef)


def _converted(
    values: Sequence[Leaf], which: Sequence[bool], dtype: DTypeLike
) -> list[Leaf]:
    pairs = zip(values, which, strict=True)
    return [lax.convert_element_type(x, dtype) if is_ else x for x, is_ in pairs]


def _in_float32(eqn: Equation) -> Function | None:
    """A rule that computes collectives in dtypes which XLA can compile."""
    if effect_of(eqn) not in _EFFECTS or not any(map(_needs_change, eqn.invars)):
        return None

    def computed(*arrays: jax.Array) -> Sequence[jax.Array]:
        wide = list(map(_compilable, arrays))
        results = eqn.primitive.bind(*wide, **eqn.params)
        several = results if eqn.primitive.multiple_results else [results]
        return [
            lax.convert_element_type(result, var.aval.dtype)
            for result, var in zip(several, eqn.outvars, strict=True)
        ]

    return computed


def _needs_change(atom: Atom) -> bool:
    dtype = atom.aval.dtype
    return dtype == jnp.bfloat16 or jnp.issubdtype(dtype, jnp.complexfloating)


def _compilable(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bfloat16:
        return lax.convert_element_type(array, jnp.float32)
    return unfolded(array)


def on_replicas(
    fn: Function,
    replicas: Replicas,
    taken: Sequence[LayoutOrDimension],
    returned: PyTree,
) -> Function:
    """`fn` of one replica as a function of arrays of all replicas.

    Args:
      taken: the layout of each input.
      returned: the same for results, a pytree prefix.
    """
    if replicas.per_device > 1:
        return on_shared_devices(fn, replicas, taken, returned)
    if replicas.count == 1:
        fn = without_collectives(fn, replicas.axes)
    if replicas.inner_axes and replicas.devices[0].platform == "cpu":
        return on_cpu_devices(fn, replicas, taken, returned)
    return on_own_devices(fn, replicas, taken, returned)
