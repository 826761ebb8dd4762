"""Traces a step as one replica sees it: `trace`, `Trace`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import DropVar, Literal
from jax.ref import AbstractRef
from jax.sharding import (
    AbstractMesh,
    AxisType,
    NamedSharding,
    Sharding,
    use_abstract_mesh,
)

from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.reductions.packing import AbstractPacking, in_packs
from jaxstrategy._src.replicas.inner_axes import has_inner_axes
from jaxstrategy._src.replicas.mesh import as_seen_on
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    ReplicaLayout,
    Replicas,
)
from jaxstrategy._src.tracing.jaxprs import (
    ArrayType,
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    Var,
    all_eqns,
    closed,
    inner_jaxprs,
    jaxpr_of,
    rewritten,
    with_jaxprs,
)
from jaxstrategy._src.tracing.numbered_prints import on_own_devices, with_numbers
from jaxstrategy._src.tracing.replication.rules import analyse
from jaxstrategy._src.tracing.replication.types import Findings, Replication, Site
from jaxstrategy._src.tracing.signature import Results
from jaxstrategy._src.tracing.translation import UnknownAxis
from jaxstrategy._src.tracing.vmapped.replicas import on_replicas
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.access import Cell, StepVariables
from jaxstrategy._src.variables.variable import Variable

# When a value is computed: the number of the equation; for one that calls a function,
# followed by the number in it. Inputs, `()`, come first.
_Position: TypeAlias = tuple[int, ...]

# Their results are ready at once, as the number of calls is not known.
_AT_ONCE = frozenset(("scan", "while", "cond"))


def pack_reductions(
    jaxpr: Jaxpr, packing: AbstractPacking, axis_sizes: Sequence[tuple[str, int]]
) -> Jaxpr:
    """Sums arrays of consecutive `psum`s in packs, in the order they are computed."""
    positions: dict[Var, _Position] = {}
    _find_positions(jaxpr, positions, set())

    def packed(eqn: Equation) -> Function | None:
        if eqn.primitive.name != "psum" or len(eqn.invars) < 2:
            return None
        computed = [_position(atom, positions) for atom in eqn.invars]
        order = sorted(range(len(computed)), key=computed.__getitem__)

        def sum_of(array: jax.Array) -> jax.Array:
            return eqn.primitive.bind(array, **eqn.params)

        def sums(*arrays: jax.Array) -> list[jax.Array]:
            ready = [arrays[index] for index in order]
            done = in_packs(sum_of, ready, packing, tells_places=True)
            by_index = dict(zip(order, done, strict=True))
            return [by_index[index] for index in range(len(arrays))]

        return sums

    return rewritten(jaxpr, packed, axis_sizes, grouped=_join_sums)


def _join_sums(eqns: Sequence[Any]) -> list[Equation]:
    """Joins consecutive sums over the same replicas into one equation."""
    joined: list[Any] = []
    for eqn in eqns:
        last = joined[-1] if joined else None
        if last is not None and _can_be_joined(last, eqn):
            joined[-1] = last.replace(
                invars=[*last.invars, *eqn.invars],
                outvars=[*last.outvars, *eqn.outvars],
            )
        else:
            joined.append(eqn)
    return joined


def _can_be_joined(eqn: Equation, following: Equation) -> bool:
    is_sum = eqn.primitive.name == following.primitive.name == "psum"
    is_independent = following.invars[:1] and following.invars[0] not in eqn.outvars
    return is_sum and eqn.params == following.params and bool(is_independent)


def _find_positions(
    jaxpr: Jaxpr, positions: dict[Var, _Position], seen: set[int]
) -> None:
    """Adds the position of each variable of `jaxpr` and of inner jaxprs."""
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for number, eqn in enumerate(jaxpr.eqns):
        inner = list(inner_jaxprs(eqn.params))
        for each in inner:
            _find_positions(each, positions, seen)
        for index, var in enumerate(eqn.outvars):
            if isinstance(var, DropVar):
                continue
            if (source := _reshaped_operand(eqn)) is not None and not inner:
                positions[var] = _position(source, positions)
                continue
            positions[var] = (number,)
            if len(inner) == 1 and eqn.primitive.name not in _AT_ONCE:
                results = inner[0].outvars
                if len(results) == len(eqn.outvars):
                    positions[var] += _position(results[index], positions)


def _reshaped_operand(eqn: Equation) -> Atom | None:
    """The operand from which the only result is made element by element, if any."""
    if len(eqn.outvars) != 1 or eqn.effects:  # such as of a write to a reference
        return None
    size = _size(eqn.outvars[0])
    operands = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
    whole = [atom for atom in operands if _size(atom) == size]
    others = [atom for atom in operands if _size(atom) not in (1, size)]
    return whole[0] if size > 1 and len(whole) == 1 and not others else None


def _size(atom: Atom) -> int:
    return getattr(atom.aval, "size", 0)


def _position(atom: Atom, positions: dict[Var, _Position]) -> _Position:
    return () if isinstance(atom, Literal) else positions.get(atom, ())


# They change nothing but the mesh of a type.
_MESH_PRIMITIVES = ("mesh_cast", "reshard")
_NO_MESH = AbstractMesh((), ())


def without_meshes(jaxpr: Jaxpr) -> Jaxpr:
    """`jaxpr`, and inner jaxprs, without meshes in the types of variables."""
    has_mesh = any(map(_names_mesh, jaxpr.invars)) or any(
        any(map(_names_mesh, eqn.outvars)) or not eqn.ctx.cur_abstract_mesh.empty
        for eqn in all_eqns(jaxpr)
    )
    return _MeshRemoval().of_jaxpr(jaxpr) if has_mesh else jaxpr


def _names_mesh(var: Var) -> bool:
    return _without_mesh(var.aval) is not var.aval


@final
class _MeshRemoval:
    """Replaces variables whose types name a mesh."""

    def __init__(self) -> None:
        self._names: dict[Atom, Atom] = {}
        self._contexts: dict[object, object] = {}
        # An inner jaxpr may stand in several equations.
        self._done: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def of_jaxpr(self, jaxpr: Any) -> Jaxpr:
        if id(jaxpr) not in self._done:
            new: dict[str, Any] = {
                "constvars": list(map(self._new, jaxpr.constvars)),
                "invars": list(map(self._new, jaxpr.invars)),
                "eqns": [new for eqn in jaxpr.eqns for new in self._of_equation(eqn)],
                "outvars": [self._read(atom) for atom in jaxpr.outvars],
                "debug_info": jaxpr.debug_info,
            }
            if hasattr(jaxpr, "consts"):  # JAX 0.12; they would be dropped
                new["consts"] = jaxpr.consts
            self._done[id(jaxpr)] = jaxpr, jaxpr.replace(**new)
        return self._done[id(jaxpr)][1]

    def _of_equation(self, eqn: Any) -> list[Equation]:
        invars = [self._read(atom) for atom in eqn.invars]
        if eqn.primitive.name in _MESH_PRIMITIVES:
            self._names.update(zip(eqn.outvars, invars, strict=True))
            return []
        outvars = list(map(self._new, eqn.outvars))
        params = eqn.params
        if eqn.primitive.name == "sharding_constraint":
            params = {**params, "sharding": _seen_by_one_replica(params)}
        else:
            params = {
                key: None
                if isinstance(value, NamedSharding)
                and isinstance(value.mesh, AbstractMesh)
                else with_jaxprs(value, self.of_jaxpr)
                for key, value in params.items()
            }
        ctx = self._of_context(eqn.ctx)
        return [eqn.replace(invars=invars, outvars=outvars, params=params, ctx=ctx)]

    def _of_context(self, ctx: Any) -> Any:
        if ctx.cur_abstract_mesh.empty:
            return ctx
        if ctx not in self._contexts:
            self._contexts[ctx] = _context_without_mesh(ctx)
        return self._contexts[ctx]

    def _new(self, var: Var) -> Atom:
        aval = _without_mesh(var.aval)
        if aval is var.aval or isinstance(var, DropVar):
            return var
        return self._names.setdefault(var, core.Var(aval))

    def _read(self, atom: Atom) -> Atom:
        if isinstance(atom, Literal):
            aval = _without_mesh(atom.aval)
            if aval is atom.aval:
                return atom
            # The value has the mesh that was set when it was made.
            return core.Literal(np.asarray(atom.val), aval)
        return self._names.get(atom, atom)


def _seen_by_one_replica(params: dict[str, Any]) -> Sharding:
    """The sharding of a constraint, on the mesh as one replica sees it."""
    sharding = params["sharding"]
    if not isinstance(sharding, NamedSharding):
        return sharding
    return as_seen_on(sharding, params["context_mesh"])


def _context_without_mesh(ctx: Any) -> Any:
    """The context of an equation, without the mesh that was set."""
    with ctx.manager, use_abstract_mesh(_NO_MESH):
        (eqn,) = jax.make_jaxpr(lax.neg)(jax.ShapeDtypeStruct((), "float32")).eqns
    return eqn.ctx


def _without_mesh(aval: ArrayType) -> ArrayType:
    """The same type without its mesh; the same object if it has none."""
    # Effects refer to the variables of references, so these must stay.
    if isinstance(aval, AbstractRef):
        return aval
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return aval
    weak_type = getattr(aval, "weak_type", False)
    bare = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type)
    return jax.typeof(bare)


# The jaxpr of the whole call; the jaxpr of one replica; for each of its inputs the
# index among arguments and variables, or None; and the constants among the inputs.
OneReplica: TypeAlias = tuple[ClosedJaxpr, Jaxpr, list[int | None], dict[int, Leaf]]


def _trace_in_shard_map(
    replica: Function,
    leaves: Sequence[Leaf],
    variables: Sequence[Variable],
    layouts: Sequence[ReplicaLayout],
    replicas: Replicas,
) -> OneReplica:
    """Traces one replica inside a `shard_map`, and takes only its body."""
    # `REPLICATED` for all outputs is no claim, as the `shard_map` is not kept.
    mapped = on_own_devices(replica, replicas, layouts, REPLICATED)

    def all_replicas(*inputs: jax.Array) -> PyTree:
        own, values = inputs[: len(leaves)], inputs[len(leaves) :]
        return mapped(*own, *map(jax.new_ref, values))

    types = [
        jax.ShapeDtypeStruct(v.cell.shape, v.dtype, sharding=v.sharding)
        for v in variables
    ]
    try:
        closed = jax.make_jaxpr(all_replicas)(*leaves, *types)
    except AttributeError as error:
        # shard_map has no rule for references that a function captures.
        if "'AbstractRef' object" in str(error):
            raise CapturedReference from error
        raise
    *references, eqn = closed.jaxpr.eqns
    arguments = closed.jaxpr.invars[: len(leaves)]
    refs = [each.outvars[0] for each in references]
    index_of = {var: index for index, var in enumerate([*arguments, *refs])}
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    indices: list[int | None] = []
    constants: dict[int, Leaf] = {}
    for number, atom in enumerate(eqn.invars):
        is_literal = isinstance(atom, core.Literal)
        indices.append(None if is_literal else index_of.get(atom))
        if indices[number] is None:
            constants[number] = atom.val if is_literal else values[atom]
    return closed, eqn.params["jaxpr"], indices, constants


def _trace_with_axis_names(
    replica: Function,
    leaves: Sequence[Leaf],
    variables: Sequence[Variable],
    layouts: Sequence[ReplicaLayout],
    replicas: Replicas,
) -> OneReplica:
    """Traces one replica without a `shard_map`, where its axes are only names."""

    is_own = [replicas.differ(layout) for layout in layouts]
    row = functools.partial(jax.lax.slice_in_dim, start_index=0, limit_index=1)

    def one_replica(*inputs: jax.Array) -> PyTree:
        # The first row stands for any replica's: whatever the dtype, or a tracer.
        parts = [row(x) if own else x for x, own in zip(inputs, is_own, strict=True)]
        own, values = parts[: len(leaves)], parts[len(leaves) :]
        return replica(*own, *map(jax.new_ref, values))

    values = [jax.ShapeDtypeStruct(v.cell.shape, v.dtype) for v in variables]
    make_jaxpr = jax.make_jaxpr(one_replica, axis_env=replicas.axis_sizes)
    # Without the mesh of arrays, which would be in the types of what is traced.
    types = [
        jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False)
        )
        for leaf in jax.eval_shape(list, leaves)
    ]
    with replicas.as_one_replica():
        closed = make_jaxpr(*types, *values)
    if any(isinstance(jax.typeof(value), AbstractRef) for value in closed.consts):
        raise CapturedReference
    whole, rows = closed.jaxpr, sum(is_own)
    start = rows + len(variables)
    results = iter(eqn.outvars[0] for eqn in whole.eqns[:rows])
    inputs = [
        next(results) if own else var
        for var, own in zip(whole.invars, is_own, strict=True)
    ]
    references = [eqn.outvars[0] for eqn in whole.eqns[rows:start]]
    invars = [*inputs[: len(leaves)], *references, *whole.constvars]
    jaxpr = without_meshes(jaxpr_of(invars, whole.eqns[start:], whole.outvars))
    count = len(layouts)
    indices = [index if index < count else None for index in range(len(invars))]
    constants = dict(enumerate(closed.consts, start=count))
    return closed, jaxpr, indices, constants


class CapturedReference(Exception):
    """A step captures a `jax.Ref` that is no variable."""


# One replica's inputs -> its results, and the outputs of stages.
Evaluate = Callable[[Sequence[Leaf]], tuple[list[jax.Array], list[jax.Array]]]


@dataclasses.dataclass(frozen=True)
class Trace:
    """A step as it was traced."""

    closed: ClosedJaxpr
    jaxpr: Jaxpr  # of one replica
    inputs: list[int | None]  # of `jaxpr`: index among arguments and variables
    constants: dict[int, Leaf]  # the other inputs
    layouts: list[ReplicaLayout]  # of each input
    argument_types: list[ArrayType]
    unpacking: int  # leading equations that take a replica's part of arguments
    results: Results
    variables: Sequence[Variable]  # all live ones
    used: Sequence[Variable]
    replicas: Replicas
    findings: Findings
    is_partitioned: bool

    @property
    def contents(self) -> list[tuple[Variable, Replication | None]]:
        """Each used variable, and the replication type of its value after the step."""
        first, used = len(self.argument_types), set(self.used)
        contents = self.findings.contents
        return [
            (variable, contents.get(self.inputs.index(index)))
            for index, variable in enumerate(self.variables, start=first)
            if variable in used
        ]

    @property
    def varies(self) -> list[bool]:
        """For each array that the step returns whether replicas may differ."""
        return [state is not None and state.varies for state in self.findings.outputs]

    def evaluate(
        self,
        leaves: Sequence[Leaf],
        references: dict[Cell, jax.Ref],
        instrument: Callable[[Evaluate], Evaluate],
    ) -> tuple[list[jax.Array | PerReplica], list[jax.Array]]:
        """The step's results on all replicas, and the outputs of stages."""
        operands = self.operands(leaves, references)
        used = [i for i, each in enumerate(operands) if each is not None]
        varies = self.varies

        def replica(*locals_: Leaf) -> tuple[list[jax.Array], list[jax.Array]]:
            jaxpr = with_numbers(self.jaxpr, self.replicas)
            step = core.jaxpr_as_fun(closed(jaxpr))
            evaluate = instrument(lambda inputs: (step(*inputs), []))
            inputs = dict(zip(used, locals_, strict=True))
            returned, outputs = evaluate([inputs.get(i) for i in range(len(operands))])
            arrays = [
                jax.lax.expand_dims(array, (0,)) if differs else array
                for array, differs in zip(returned, varies, strict=True)
            ]
            if not arrays and not outputs:
                outputs = [jnp.zeros((), jnp.int8)]
            return arrays, outputs

        returned = [STACKED if differs else REPLICATED for differs in varies]
        layouts = [self.layouts[i] for i in used]
        run = on_replicas(replica, self.replicas, layouts, (returned, REPLICATED))
        arrays, outputs = run(*(operands[i] for i in used))
        results = [
            PerReplica(array) if differs else array
            for array, differs in zip(arrays, varies, strict=True)
        ]
        return results, outputs

    def operands(
        self, leaves: Sequence[Leaf], references: dict[Cell, jax.Ref]
    ) -> list[Leaf]:
        """The inputs of `jaxpr`; None for variables that it does not use."""
        used = set(self.used)
        values: list[Leaf] = list(leaves)
        for variable in self.variables:
            if variable not in used:
                values.append(None)
            elif variable.cell in references:
                values.append(references[variable.cell])
            else:
                values.append(variable.cell.ref)
        return [
            self.constants[number] if index is None else values[index]
            for number, index in enumerate(self.inputs)
        ]


def trace(
    run: Callable[[Sequence[Leaf]], tuple[list[jax.Array], Results]],
    leaves: Sequence[Leaf],
    layouts: Sequence[ReplicaLayout],
    replicas: Replicas,
    variables: Callable[[], Sequence[Variable]],
    may_create: bool,
    ready_packing: AbstractPacking | None = None,
) -> Trace:
    """Traces a step; again if it creates variables or names unknown axes."""
    live = list(variables())
    returned: list[Results] = []
    traced: list[StepVariables] = []

    def replica(*locals_: Leaf) -> list[jax.Array]:
        own, references = locals_[: len(leaves)], locals_[len(leaves) :]
        step = StepVariables(list(zip(live, references, strict=True)), may_create)
        traced.append(step)
        try:
            with access.traced_with(step):
                arrays, results = run(own)
        except UnknownAxis as error:
            if step.created:
                raise _CreatedVariables from error
            raise
        if step.created:
            # The trace cannot end: `shard_map` has no rule for their references.
            raise _CreatedVariables
        returned.append(results)
        return arrays

    all_layouts = [*layouts, *(_layout(variable, replicas) for variable in live)]
    sharded = [variable for variable in live if not variable.division.is_whole]
    inputs = replica, leaves, live, all_layouts, replicas
    has_mesh = replicas.per_device == 1 and not shards_state(replicas)
    has_mesh &= not (sharded and can_shard(replicas))
    try:
        if has_mesh:
            try:
                one_replica = _trace_in_shard_map(*inputs)
            except UnknownAxis:
                if has_inner_axes(replicas):
                    raise
                one_replica = _trace_with_axis_names(*inputs)
        else:
            one_replica = _trace_with_axis_names(*inputs)
            primitives = {eqn.primitive.name for eqn in all_eqns(one_replica[1])}
            # Over the devices of a replica: needs a mesh.
            if replicas.inner_axes and "shard_map" in primitives:
                traced.clear()
                returned.clear()
                has_mesh = True
                one_replica = _trace_in_shard_map(*inputs)
    except _CreatedVariables:
        return trace(run, leaves, layouts, replicas, variables, False, ready_packing)
    except CapturedReference as error:
        raise TypeError(
            "The step uses a `jax.Ref` that was made outside of it, whose memory is on "
            "one device. Make a `js.Variable` in the strategy's scope, which has a "
            "copy on each; or pass `ref[...]`, and write what the step returns."
        ) from error
    closed, jaxpr, indices, constants = one_replica
    step, (results,) = traced[-1], returned
    if ready_packing is not None:
        jaxpr = pack_reductions(jaxpr, ready_packing, replicas.axis_sizes)
    if step.used:
        _check_conditions(jaxpr)
    of_inputs = [REPLICATED if i is None else all_layouts[i] for i in indices]
    unpacking = sum(layout is STACKED for layout in layouts)
    findings = analyse(
        jaxpr,
        [replicas.differ(layout) for layout in of_inputs],
        replicas.axes,
        replicas.count,
        unpacking=unpacking,
        mesh=replicas.mesh,
    )
    return Trace(
        closed=closed,
        jaxpr=jaxpr,
        inputs=indices,
        constants=constants,
        layouts=of_inputs,
        argument_types=[var.aval for var in closed.jaxpr.invars[: len(leaves)]],
        unpacking=unpacking,
        results=results,
        variables=live,
        used=cast("list[Variable]", list(step.used.values())),
        replicas=replicas,
        findings=findings,
        is_partitioned=not has_mesh
        and can_shard(replicas)
        and (
            shards_state(replicas)
            or any(id(variable) in step.used for variable in sharded)
        ),
    )


def shards_state(replicas: Replicas) -> bool:
    """Whether all state of these replicas may be sharded over them."""
    return replicas.state_sharding is not None and can_shard(replicas)


def can_shard(replicas: Replicas) -> bool:
    return replicas.parts > 1


class _CreatedVariables(Exception):
    """A step has created variables: trace again, with them as inputs."""


def _check_conditions(jaxpr: ClosedJaxpr) -> None:
    """Raise if a `while_loop` changes a variable that its condition reads."""
    for eqn in all_eqns(jaxpr):
        if eqn.primitive.name != "while":
            continue
        n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        read = [var for var in eqn.invars[:n] if isinstance(var.aval, AbstractRef)]
        body = all_eqns(eqn.params["body_jaxpr"].jaxpr)
        if any(var in eqn.invars[n : n + m] for var in read) and any(
            inner.primitive.name in ("swap", "addupdate") for inner in body
        ):
            raise ValueError(
                "The condition of a `while_loop` reads a variable that its body uses, "
                "and would not see it change.\n"
                f"  the `while_loop`: {Site((eqn,)).line or 'unknown'}\n"
                "Let the loop carry the value, and assign it to the variable as well."
            )


def check_not_in_shard_map(name: str) -> None:
    """Raise inside `jax.pmap` or `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Manual in mesh.axis_types:
        raise ContextError(
            f"`{name}` was to be run on all replicas inside a function that `jax.pmap` "
            "or `jax.shard_map` runs on each of several devices already. A strategy "
            "does that itself: call `strategy.run` instead of it, on the whole batch. "
            "Inside `jax.jit`, `jax.vmap` and `jax.lax.scan` it may be called."
        )


def _layout(variable: Variable, replicas: Replicas) -> ReplicaLayout:
    has_copies = variable.lives_on(replicas) and not variable.copies_must_agree
    return STACKED if has_copies else REPLICATED
