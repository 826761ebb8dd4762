"""A step traced once, as one replica sees it, and what its program makes of that."""

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
from jaxstrategy._src.replicas.mesh import (
    as_seen_on,
)
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    ReplicaLayout,
    Replicas,
)
from jaxstrategy._src.tracing.jaxprs.rewrite import rewritten
from jaxstrategy._src.tracing.jaxprs.visit import (
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
    with_jaxprs,
)
from jaxstrategy._src.tracing.numbered_prints import on_own_devices, with_numbers
from jaxstrategy._src.tracing.on_replicas import on_replicas
from jaxstrategy._src.tracing.replication.rules import analyse
from jaxstrategy._src.tracing.replication.types import Findings, Replication, Site
from jaxstrategy._src.tracing.results import Results
from jaxstrategy._src.tracing.translation import UnknownAxis
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.access import Cell, StepVariables
from jaxstrategy._src.variables.variable import Variable

# Where in a jaxpr a value is computed: the number of the equation; of one that calls a
# function, followed by the place in it. What is given is before all.
_Place: TypeAlias = tuple[int, ...]

# These call their jaxpr many times, or one of several: their results come at once.
_AT_ONCE = frozenset(("scan", "while", "cond"))


def in_ready_packs(
    jaxpr: Jaxpr, packing: AbstractPacking, axis_sizes: Sequence[tuple[str, int]]
) -> Jaxpr:
    """`jaxpr`, in which arrays that are summed in a row are summed in packs."""
    places: dict[Var, _Place] = {}
    _find_places(jaxpr, places, set())

    def packed(eqn: Equation) -> Function | None:
        if eqn.primitive.name != "psum" or len(eqn.invars) < 2:
            return None
        computed = [_of(atom, places) for atom in eqn.invars]
        order = sorted(range(len(computed)), key=computed.__getitem__)

        def alone(array: jax.Array) -> jax.Array:
            return eqn.primitive.bind(array, **eqn.params)

        def sums(*arrays: jax.Array) -> list[jax.Array]:
            ready = [arrays[index] for index in order]
            done = in_packs(alone, ready, packing, tells_places=True)
            by_index = dict(zip(order, done, strict=True))
            return [by_index[index] for index in range(len(arrays))]

        return sums

    return rewritten(jaxpr, packed, axis_sizes, grouped=_with_runs)


def _with_runs(eqns: Sequence[Any]) -> list[Equation]:
    """`eqns`, with one for each run of sums, which has the operands of all."""
    found: list[Any] = []
    for eqn in eqns:
        last = found[-1] if found else None
        if last is not None and _goes_on(last, eqn):
            found[-1] = last.replace(
                invars=[*last.invars, *eqn.invars],
                outvars=[*last.outvars, *eqn.outvars],
            )
        else:
            found.append(eqn)
    return found


def _goes_on(run: Equation, eqn: Equation) -> bool:
    """Whether an equation is one more sum over the same replicas."""
    is_sum = run.primitive.name == eqn.primitive.name == "psum"
    return is_sum and run.params == eqn.params and eqn.invars[0] not in run.outvars


def _find_places(jaxpr: Jaxpr, places: dict[Var, _Place], seen: set[int]) -> None:
    """Notes where each variable of `jaxpr`, and of those it holds, is computed."""
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for number, eqn in enumerate(jaxpr.eqns):
        inner = list(inner_jaxprs(eqn.params))
        for each in inner:
            _find_places(each, places, seen)
        for index, var in enumerate(eqn.outvars):
            if isinstance(var, DropVar):
                continue
            if (source := _passed_on(eqn)) is not None and not inner:
                places[var] = _of(source, places)
            elif len(inner) == 1 and eqn.primitive.name not in _AT_ONCE:
                within = inner[0].outvars
                is_called = len(within) == len(eqn.outvars)
                at = _of(within[index], places) if is_called else ()
                places[var] = (number, *at)
            else:
                places[var] = (number,)


def _passed_on(eqn: Equation) -> Atom | None:
    """The operand of which the only result is another form, with as many elements."""
    if len(eqn.outvars) != 1 or eqn.effects:  # as what was written to a reference
        return None
    size = _size(eqn.outvars[0])
    operands = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
    whole = [atom for atom in operands if _size(atom) == size]
    others = [atom for atom in operands if _size(atom) not in (1, size)]
    return whole[0] if size > 1 and len(whole) == 1 and not others else None


def _size(atom: Atom) -> int:
    return getattr(atom.aval, "size", 0)


def _of(atom: Atom, places: dict[Var, _Place]) -> _Place:
    return () if isinstance(atom, Literal) else places.get(atom, ())


# They only say on which mesh an array is to be.
_OF_MESHES = ("mesh_cast", "reshard")
_NO_MESH = AbstractMesh((), ())


def without_meshes(jaxpr: Jaxpr) -> Jaxpr:
    """`jaxpr`, and all that its equations hold, with types of no mesh."""
    is_meant = any(map(_names_mesh, jaxpr.invars)) or any(
        any(map(_names_mesh, eqn.outvars)) or not eqn.ctx.cur_abstract_mesh.empty
        for eqn in all_eqns(jaxpr)
    )
    return _Renaming().of_jaxpr(jaxpr) if is_meant else jaxpr


def _names_mesh(var: Var) -> bool:
    return _without_mesh(var.aval) is not var.aval


@final
class _Renaming:
    """Variables that take the places of those whose types name a mesh."""

    def __init__(self) -> None:
        self._names: dict[Atom, Atom] = {}
        self._contexts: dict[object, object] = {}
        # An inner jaxpr may stand in several equations.
        self._done: dict[int, tuple[Jaxpr, Jaxpr]] = {}

    def of_jaxpr(self, jaxpr: Any) -> Jaxpr:
        if id(jaxpr) not in self._done:
            new: dict[str, Any] = {
                "constvars": self._of_vars(jaxpr.constvars),
                "invars": self._of_vars(jaxpr.invars),
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
        if eqn.primitive.name in _OF_MESHES:
            self._names.update(zip(eqn.outvars, invars, strict=True))
            return []
        outvars = self._of_vars(eqn.outvars)
        params = eqn.params
        if eqn.primitive.name == "sharding_constraint":
            params = {**params, "sharding": _seen_by_one_replica(params)}
        else:
            params = {key: self._of_parameter(each) for key, each in params.items()}
        ctx = self._of_context(eqn.ctx)
        return [eqn.replace(invars=invars, outvars=outvars, params=params, ctx=ctx)]

    def _of_context(self, ctx: Any) -> Any:
        if ctx.cur_abstract_mesh.empty:
            return ctx
        if ctx not in self._contexts:
            self._contexts[ctx] = _context_without_mesh(ctx)
        return self._contexts[ctx]

    def _of_parameter(self, value: Any) -> Any:
        if isinstance(value, NamedSharding) and isinstance(value.mesh, AbstractMesh):
            return None
        return with_jaxprs(value, self.of_jaxpr)

    def _of_vars(self, variables: Sequence[Var]) -> list[Atom]:
        return [self._new(var) for var in variables]

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
            # The value names the mesh that was set when it was made.
            return core.Literal(np.asarray(atom.val), aval)
        return self._names.get(atom, atom)


def _seen_by_one_replica(params: dict[str, Any]) -> Sharding:
    """The sharding of a constraint, on the mesh as one replica sees it."""
    sharding = params["sharding"]
    if not isinstance(sharding, NamedSharding):
        return sharding
    return as_seen_on(sharding, params["context_mesh"])


def _context_without_mesh(ctx: Any) -> Any:
    """The context of an equation, what else it says, without the mesh that was set."""
    with ctx.manager, use_abstract_mesh(_NO_MESH):
        (eqn,) = jax.make_jaxpr(lax.neg)(jax.ShapeDtypeStruct((), "float32")).eqns
    return eqn.ctx


def _without_mesh(aval: ArrayType) -> ArrayType:
    """The same type without its mesh; the same object if it has none."""
    # Effects hold the variables of references, which have to stay as they are.
    if isinstance(aval, AbstractRef):
        return aval
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return aval
    weak_type = getattr(aval, "weak_type", False)
    bare = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type)
    return jax.typeof(bare)


# A jaxpr of all that is given, then that of one replica; of the inputs of the latter
# their places in what is given, and the constants among them.
OneReplica: TypeAlias = tuple[ClosedJaxpr, Jaxpr, list[int | None], dict[int, Leaf]]


def in_shard_map(
    replica: Function,
    leaves: Sequence[Leaf],
    there: Sequence[Variable],
    layouts: Sequence[ReplicaLayout],
    replicas: Replicas,
) -> OneReplica:
    """Traces one replica inside a `shard_map` that is only looked into."""
    # The same for every output is not a claim.
    looked_into = on_own_devices(replica, replicas, layouts, REPLICATED)

    def all_replicas(*given: jax.Array) -> PyTree:
        own, held = given[: len(leaves)], given[len(leaves) :]
        return looked_into(*own, *map(jax.new_ref, held))

    values = [
        jax.ShapeDtypeStruct(v.cell.shape, v.dtype, sharding=v.sharding) for v in there
    ]
    try:
        closed = jax.make_jaxpr(all_replicas)(*leaves, *values)
    except AttributeError as error:
        # shard_map has no rule for references that a function captures.
        if "'AbstractRef' object" in str(error):
            raise CapturedReference from error
        raise
    *references, eqn = closed.jaxpr.eqns
    given = closed.jaxpr.invars[: len(leaves)]
    made = [each.outvars[0] for each in references]
    place = {var: index for index, var in enumerate([*given, *made])}
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    places: list[int | None] = []
    constants: dict[int, Leaf] = {}
    for index, atom in enumerate(eqn.invars):
        is_literal = isinstance(atom, core.Literal)
        places.append(None if is_literal else place.get(atom))
        if places[index] is None:
            constants[index] = atom.val if is_literal else values[atom]
    return closed, eqn.params["jaxpr"], places, constants


def by_axes(
    replica: Function,
    leaves: Sequence[Leaf],
    there: Sequence[Variable],
    layouts: Sequence[ReplicaLayout],
    replicas: Replicas,
) -> OneReplica:
    """Traces one replica by itself, where the axes of the replicas have names."""

    is_own = [replicas.differ(layout) for layout in layouts]
    row = functools.partial(jax.lax.slice_in_dim, start_index=0, limit_index=1)

    def one_replica(*given: jax.Array) -> PyTree:
        # Its first row stands for what a replica has: whatever the dtype, or a tracer.
        parts = [row(x) if own else x for x, own in zip(given, is_own, strict=True)]
        own, held = parts[: len(leaves)], parts[len(leaves) :]
        return replica(*own, *map(jax.new_ref, held))

    values = [jax.ShapeDtypeStruct(v.cell.shape, v.dtype) for v in there]
    made = jax.make_jaxpr(one_replica, axis_env=replicas.axis_sizes)
    # Without the mesh that an array lies on: what is traced would carry it in types.
    types = [
        jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False)
        )
        for leaf in jax.eval_shape(list, leaves)
    ]
    with replicas.as_one_replica():
        closed = made(*types, *values)
    if any(isinstance(jax.typeof(value), AbstractRef) for value in closed.consts):
        raise CapturedReference
    whole, rows = closed.jaxpr, sum(is_own)
    start = rows + len(there)
    results = iter(eqn.outvars[0] for eqn in whole.eqns[:rows])
    inputs = [
        next(results) if own else var
        for var, own in zip(whole.invars, is_own, strict=True)
    ]
    references = [eqn.outvars[0] for eqn in whole.eqns[rows:start]]
    invars = [*inputs[: len(leaves)], *references, *whole.constvars]
    jaxpr = without_meshes(jaxpr_of(invars, whole.eqns[start:], whole.outvars))
    known = len(layouts)
    places = [index if index < known else None for index in range(len(invars))]
    constants = dict(enumerate(closed.consts, start=known))
    return closed, jaxpr, places, constants


class CapturedReference(Exception):
    """A step uses a reference that is no variable."""


# Of the inputs of one replica its results, and whatever a program returns besides.
Evaluate = Callable[[Sequence[Leaf]], tuple[list[jax.Array], list[jax.Array]]]


@dataclasses.dataclass(frozen=True)
class Trace:
    """A step as it was traced."""

    closed: ClosedJaxpr
    jaxpr: Jaxpr
    inputs: list[int | None]
    constants: dict[int, Leaf]
    layouts: list[ReplicaLayout]
    given_types: list[ArrayType]
    unpacking: int
    results: Results
    variables: Sequence[Variable]
    used: Sequence[Variable]
    replicas: Replicas
    findings: Findings
    is_divided: bool

    @property
    def contents(self) -> list[tuple[Variable, Replication | None]]:
        """The contents of each used variable afterwards, as far as they are known."""
        first = len(self.given_types)
        places, used = self.inputs, set(self.used)
        return [
            (
                variable,
                self.findings.contents.get(places.index(first + index)),
            )
            for index, variable in enumerate(self.variables)
            if variable in used
        ]

    @property
    def varies(self) -> list[bool]:
        """For each array that the step returns, whether it may differ."""
        return [state is not None and state.varies for state in self.findings.outputs]

    def evaluate(
        self,
        leaves: Sequence[Leaf],
        references: dict[Cell, jax.Ref],
        within: Callable[[Evaluate], Evaluate],
    ) -> tuple[list[jax.Array | PerReplica], list[jax.Array]]:
        """The step's results, as the analysis proved them, and further outputs."""
        operands = self.operands(leaves, references)
        kept = [i for i, each in enumerate(operands) if each is not None]
        varies = self.varies

        def replica(*locals_: Leaf) -> tuple[list[jax.Array], list[jax.Array]]:
            jaxpr = with_numbers(self.jaxpr, self.replicas)
            step = core.jaxpr_as_fun(closed(jaxpr))
            evaluate = within(lambda inputs: (step(*inputs), []))
            given = dict(zip(kept, locals_, strict=True))
            returned, more = evaluate([given.get(i) for i in range(len(operands))])
            arrays = [
                jax.lax.expand_dims(array, (0,)) if differs else array
                for array, differs in zip(returned, varies, strict=True)
            ]
            if not arrays and not more:
                more = [jnp.zeros((), jnp.int8)]
            return arrays, more

        returned = [STACKED if differs else REPLICATED for differs in varies]
        arrays, more = on_replicas(
            replica,
            self.replicas,
            [self.layouts[i] for i in kept],
            (returned, REPLICATED),
        )(*(operands[i] for i in kept))
        wrapped = [
            PerReplica(array) if differs else array
            for array, differs in zip(arrays, varies, strict=True)
        ]
        return wrapped, more

    def operands(
        self, leaves: Sequence[Leaf], references: dict[Cell, jax.Ref]
    ) -> list[Leaf]:
        """For each input of `jaxpr` what it is, None of a variable that is not used."""
        used = set(self.used)
        given: list[Leaf] = list(leaves)
        for variable in self.variables:
            # A variable that is not used stays out of the program.
            is_given = variable not in used or variable.cell in references
            own = references.get(variable.cell) if variable in used else None
            given.append(own if is_given else variable.cell.ref)
        return [
            self.constants[index] if place is None else given[place]
            for index, place in enumerate(self.inputs)
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
    """Traces a step once; or twice, if it makes variables or names unknown axes."""
    there = list(variables())
    found: list[Results] = []
    seen: list[StepVariables] = []

    def replica(*locals_: Leaf) -> list[jax.Array]:
        own, references = locals_[: len(leaves)], locals_[len(leaves) :]
        pairs = list(zip(there, references, strict=True))
        seen.append(StepVariables(pairs, may_create))
        try:
            with access.traced_with(seen[-1]):
                arrays, results = run(own)
        except UnknownAxis as error:
            if seen[-1].created:
                raise _MadeVariables from error
            raise
        if seen[-1].created:
            # The trace cannot end: `shard_map` has no rule for their references.
            raise _MadeVariables
        found.append(results)
        return arrays

    given = [*layouts, *(_layout(variable, replicas) for variable in there)]
    divided = [variable for variable in there if not variable.division.is_whole]
    is_by_axes = divides_state(replicas) or bool(divided) and can_divide(replicas)
    is_by_axes |= replicas.per_device > 1
    look = by_axes if is_by_axes else _with_or_without_mesh
    try:
        found_in = look(replica, leaves, there, given, replicas)
        if is_by_axes and _goes_inside(found_in[1], replicas):
            seen.clear()
            found.clear()
            is_by_axes = False
            found_in = in_shard_map(replica, leaves, there, given, replicas)
        closed, jaxpr, places, constants = found_in
    except _MadeVariables:
        return trace(run, leaves, layouts, replicas, variables, False, ready_packing)
    except CapturedReference as error:
        raise TypeError(
            "The step uses a `jax.Ref` that was made outside of it, whose memory is on "
            "one device. Make a `js.Variable` in the strategy's scope, which has a "
            "copy on each; or pass `ref[...]`, and write what the step returns."
        ) from error
    step, (results,) = seen[-1], found
    if ready_packing is not None:
        jaxpr = in_ready_packs(jaxpr, ready_packing, replicas.axis_sizes)
    if step.used:
        _check_conditions(jaxpr)
    of_inputs = [REPLICATED if place is None else given[place] for place in places]
    unpacking = sum(layout is STACKED for layout in layouts)
    findings = analyse(
        jaxpr,
        [replicas.differ(layout) for layout in of_inputs],
        replicas.collective_axes,
        replicas.count,
        unpacking=unpacking,
        mesh=replicas.mesh,
    )
    return Trace(
        closed=closed,
        jaxpr=jaxpr,
        inputs=places,
        constants=constants,
        layouts=of_inputs,
        given_types=[var.aval for var in closed.jaxpr.invars[: len(leaves)]],
        unpacking=unpacking,
        results=results,
        variables=there,
        used=cast("list[Variable]", list(step.used.values())),
        replicas=replicas,
        findings=findings,
        is_divided=is_by_axes
        and can_divide(replicas)
        and (
            divides_state(replicas)
            or any(id(variable) in step.used for variable in divided)
        ),
    )


def _with_or_without_mesh(
    replica: Function,
    leaves: Sequence[Leaf],
    there: Sequence[Variable],
    layouts: Sequence[ReplicaLayout],
    replicas: Replicas,
) -> OneReplica:
    """Traces one replica inside a `shard_map`, if what it says of meshes allows it."""
    try:
        return in_shard_map(replica, leaves, there, layouts, replicas)
    except UnknownAxis:
        if has_inner_axes(replicas):
            raise
    return by_axes(replica, leaves, there, layouts, replicas)


def divides_state(replicas: Replicas) -> bool:
    """Whether all steps of these replicas are divided where all become equal."""
    return replicas.state_sharding is not None and can_divide(replicas)


def can_divide(replicas: Replicas) -> bool:
    """Whether steps of these replicas can be divided where all become equal."""
    return replicas.parts > 1


def _goes_inside(jaxpr: Jaxpr, replicas: Replicas) -> bool:
    """Whether a step says itself what each device of a replica does."""
    return bool(replicas.inner_axes) and any(
        eqn.primitive.name == "shard_map" for eqn in all_eqns(jaxpr)
    )


class _MadeVariables(Exception):
    """A step has made variables: they are to be there before it."""


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


def check_not_divided(name: str) -> None:
    """Raise if code runs on each of several devices already."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Manual in mesh.axis_types:
        raise ContextError(
            f"`{name}` was to be run on all replicas inside a function that `jax.pmap` "
            "or `jax.shard_map` runs on each of several devices already. A strategy "
            "does that itself: call `strategy.run` instead of it, on the whole batch. "
            "Inside `jax.jit`, `jax.vmap` and `jax.lax.scan` it may be called."
        )


def _layout(variable: Variable, replicas: Replicas) -> ReplicaLayout:
    is_own = variable.lives_on(replicas) and not variable.copies_must_agree
    return STACKED if is_own else REPLICATED
