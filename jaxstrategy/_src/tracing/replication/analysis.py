"""Interprets a jaxpr on replication types: its calls, branches and loops.

The rules of other primitives are in `rules.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import Jaxpr, Literal, Primitive
from jax.ref import AbstractRef
from jax.sharding import Mesh

from jaxstrategy._src.contexts.replica_context import MERGE_SCOPE
from jaxstrategy._src.tracing.jaxprs import (
    Atom,
    ClosedJaxpr,
    Effect,
    Equation,
    Var,
    effect_of,
    inner_eqns,
    is_along,
    origins_of,
    plain,
    scan_counts,
    uses_of,
)
from jaxstrategy._src.tracing.replication.primitives import (
    Lowered,
    alone,
    is_declared_call,
    lowered,
    operands_of,
)
from jaxstrategy._src.tracing.replication.types import (
    SAME,
    Collective,
    Findings,
    Level,
    RefState,
    Replication,
    Site,
    State,
    content_of,
    for_each_result,
    join,
    level_of,
)
from jaxstrategy._src.values.arrays import Function

# A function and the types of its arguments -> another function and its types, which
# takes the arguments once or several times, and returns the results as often.
Types = list[jax.ShapeDtypeStruct]
Transform = Callable[[Function, Types], tuple[Function, Types]]


class Analysis:
    """The analysis of one step, with caches of what JAX makes of its equations."""

    def __init__(
        self,
        axes: str | Sequence[str],
        replicas: int,
        rules: Mapping[Primitive, Rule],
        mesh: Mesh | None = None,
    ) -> None:
        self.axes = (axes,) if isinstance(axes, str) else tuple(axes)
        self.replicas = replicas
        self.rules = rules
        self.mesh = mesh
        # How often the current jaxpr has been transformed, such as differentiated.
        self.order = 0
        # The jaxprs live as long as the step's, which the caller holds.
        # The results and collectives of inner jaxprs, in terms of their inputs.
        self.called: dict[Hashable, tuple[list[State], list[Collective]]] = {}
        self._expanded: dict[Hashable, Jaxpr | None] = {}
        self._lowered: dict[int, Lowered] = {}
        self._transformed: dict[Hashable, Jaxpr] = {}

    def of(self, jaxpr: Jaxpr, inputs: Sequence[State], unpacking: int = 0) -> Findings:
        """The findings for a jaxpr whose inputs have these types.

        Args:
          unpacking: how many leading equations take a replica's part of an input.
        """
        frame = self.evaluated(jaxpr, inputs, unpacking)
        contents = {
            index: state.content
            for index, state in enumerate(inputs)
            if isinstance(state, RefState) and state.is_written
        }
        return Findings(frame.outputs, frame.collectives, contents)

    def evaluated(
        self, jaxpr: Jaxpr, inputs: Sequence[State], unpacking: int = 0
    ) -> Frame:
        """The types of all values of a jaxpr; see `of`."""
        frame = Frame(self, jaxpr, inputs)
        for eqn in jaxpr.eqns[:unpacking]:
            frame.known[eqn.outvars[0]] = frame.known[eqn.invars[0]]
        frame.run(unpacking)
        return frame

    def expanded(self, eqn: Equation) -> Jaxpr | None:
        """The jaxpr to which JAX expands a primitive defined in Python, or None."""
        primitive: Any = eqn.params.get("_prim")
        avals = [atom.aval for atom in eqn.invars]
        # Equal primitives may take operands of different types.
        key = (primitive, *((aval.shape, aval.dtype) for aval in avals))
        if key not in self._expanded:
            structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
            try:
                args = jax.tree.unflatten(
                    jax.tree.structure(primitive.in_avals), structs
                )
                make = jax.make_jaxpr(primitive.expand, axis_env=self.axis_env)
                jaxpr = plain(make(*args))
            except _NOT_EXPANDED:  # the user's code, not meant to be traced here
                jaxpr = None
            self._expanded[key] = jaxpr
        return self._expanded[key]

    def lowered(self, eqn: Equation) -> Lowered:
        """Describes the StableHLO of an equation, cached."""
        if id(eqn) not in self._lowered:
            self._lowered[id(eqn)] = lowered(eqn, self.mesh)
        return self._lowered[id(eqn)]

    def transformed(self, eqn: Equation, transform: Transform) -> Jaxpr:
        """The equation's function under a transform, cached."""
        key = (id(eqn), transform)
        if key not in self._transformed:
            types = [
                jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
                for atom in operands_of(eqn)
            ]
            function, types = transform(core.jaxpr_as_fun(alone(eqn)), types)
            made = jax.make_jaxpr(function, axis_env=self.axis_env)(*types)
            self._transformed[key] = plain(made)
        return self._transformed[key]

    @property
    def axis_env(self) -> list[tuple[str, int]]:
        """The axes and their sizes, for a trace outside of `shard_map`."""
        if self.mesh is None or len(self.axes) == 1:
            return [(axis, self.replicas) for axis in self.axes]
        return [(axis, self.mesh.shape[axis]) for axis in self.axes]

    @property
    def is_on_cpu(self) -> bool:
        """Whether the replicas are known to be on CPUs."""
        return self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu"

    def mentions_replicas(self, eqn: Equation) -> bool:
        """Whether a collective equation works across the replica axis."""
        return is_along(eqn, self.axes)


# Raised by code that cannot be traced, or that names an unknown mesh axis.
_NOT_EXPANDED = (TypeError, ValueError, AttributeError, NameError, NotImplementedError)


def _known(state: State) -> tuple[int, tuple[int, ...] | None]:
    state = content_of(state)
    return (0, None) if state is None else (state.level, state.classes)


def _cache_key(state: State) -> Hashable:
    """The part of an operand's type on which the findings of a call depend."""
    if not isinstance(state, Replication):
        return state
    return state.level, state.classes, state.is_direct


def _as_input(index: int, state: State) -> State:
    if not isinstance(state, Replication) or state is SAME:
        return state
    return dataclasses.replace(state, input=index, site=None, part=None)


def _lifted(state: State, operands: Sequence[State], at: Site) -> Any:
    """Translates a type in terms of a call's inputs for the caller."""
    if not isinstance(state, Replication) or state is SAME:
        return state
    site = None if state.site is None else state.site.within(at)
    if state.input is None:
        part = _lifted(state.part, operands, at)
        return dataclasses.replace(state, site=site, part=part)
    outer = operands[state.input]
    assert isinstance(outer, Replication), "what comes of a constant is one"
    if site is None:  # passed through untouched, or joined with another such
        return dataclasses.replace(outer, classes=state.classes)
    site = outer.site or site
    return Replication(outer.level, outer.input, site, classes=state.classes)


class Frame:
    """The types of the values of one jaxpr, while it is interpreted."""

    def __init__(
        self,
        analysis: Analysis,
        jaxpr: Jaxpr,
        inputs: Sequence[State],
        holders: tuple[Equation, ...] = (),
    ) -> None:
        self.analysis = analysis
        self.jaxpr = jaxpr
        self.known: dict[Var, State] = dict(zip(jaxpr.invars, inputs, strict=True))
        self._holders = holders
        self.collectives: list[Collective] = []
        self.changes = 0
        # For inputs the first ones that are the same values.
        self.names: dict[Var, Var] = {}

    def run(self, start: int = 0) -> None:
        """Interprets the jaxpr from equation number `start` on."""
        known, read = self.known, self.read
        rules = self.analysis.rules
        for eqn in self.jaxpr.eqns[start:] if start else self.jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            rule = rules[eqn.primitive]
            for var, state in zip(eqn.outvars, rule(self, eqn, operands), strict=True):
                known[var] = state

    @property
    def outputs(self) -> list[State]:
        return [self.read(atom) for atom in self.jaxpr.outvars]

    def site(self, eqn: Equation) -> Site:
        return Site((eqn, *self._holders))

    def read(self, atom: Atom) -> State:
        return None if isinstance(atom, Literal) else self.known.get(atom)

    def varies(self, atom: Atom) -> bool:
        """Whether replicas may differ in a value."""
        return level_of(self.read(atom)) == Level.VARYING

    @functools.cached_property
    def uses(self) -> Mapping[Var, Sequence[Equation]]:
        return uses_of(self.jaxpr.eqns)

    @functools.cached_property
    def origins(self) -> Mapping[Var, Equation]:
        return origins_of(self.jaxpr.eqns)

    def call(
        self,
        jaxpr: ClosedJaxpr,
        operands: Sequence[State],
        eqn: Equation,
        names: Sequence[Atom] = (),
    ) -> tuple[list[State], list[Collective]]:
        """The results and collectives of `jaxpr`, called by `eqn` with `operands`.

        Args:
          names: the operands, if they are the same values inside.
        """
        inside, at, same = plain(jaxpr), self.site(eqn), _repeats(self, names)
        if any(isinstance(var.aval, AbstractRef) for var in _borders(inside)):
            # What a call does to references is not kept.
            frame = self._entered(inside, operands, same, at.eqns)
            return frame.outputs, frame.collectives
        # By the order, too: in the last one `also` applies no more transforms.
        key = (id(inside), self.analysis.order, same, *map(_cache_key, operands))
        if (known := self.analysis.called.get(key)) is None:
            inputs = [_as_input(index, state) for index, state in enumerate(operands)]
            frame = self._entered(inside, inputs, same)
            known = self.analysis.called[key] = frame.outputs, frame.collectives

        def lifted(state: State) -> Any:
            return _lifted(state, operands, at)

        outputs, collectives = known
        return list(map(lifted, outputs)), [
            dataclasses.replace(
                found,
                site=found.site.within(at),
                decided_by=lifted(found.decided_by),
                decided_at=found.decided_at and found.decided_at.within(at),
                reduced_before=lifted(found.reduced_before),
            )
            for found in collectives
        ]

    def _entered(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[State],
        same: Sequence[int],
        holders: tuple[Equation, ...] = (),
    ) -> Frame:
        """An inner jaxpr, interpreted."""
        frame = Frame(self.analysis, jaxpr, inputs, holders)
        frame.names = {
            jaxpr.invars[index]: jaxpr.invars[first] for index, first in enumerate(same)
        }
        frame.run()
        return frame

    def called(
        self,
        jaxpr: ClosedJaxpr,
        operands: Sequence[State],
        eqn: Equation,
        names: Sequence[Atom] = (),
    ) -> list[State]:
        """The results of `jaxpr`, which `eqn` calls once."""
        outputs, collectives = self.call(jaxpr, operands, eqn, names)
        self.collectives += collectives
        return outputs

    def repeated(
        self, jaxpr: ClosedJaxpr, operands: Sequence[State], eqn: Equation
    ) -> tuple[list[State], list[Collective]]:
        """As `call`, for any number of calls: no write certainly replaces a content."""
        inside = _with_own_references(operands)
        outputs, collectives = self.call(jaxpr, inside, eqn)
        for cell, copy in zip(operands, inside, strict=True):
            if isinstance(copy, RefState) and copy.is_written:
                self.write(cell, copy.content)
        return outputs, collectives

    def varying_since(self, eqn: Equation) -> Replication:
        """The type of a result of `eqn` that varies for any operands."""
        return Replication(Level.VARYING, None, self.site(eqn))

    def computed(self, eqn: Equation, operands: Iterable[State]) -> Replication | None:
        """The type of something that `eqn` computes from `operands`."""
        state = join(operands)
        if state is None or state is SAME:
            return state
        site = self.site(eqn) if state.site is None else state.site
        if state.level is Level.REDUCED:
            # A `Plan` sums 16 bits in float32 and converts back: still the sum itself.
            if eqn.primitive.name == "convert_element_type":
                return state
            if "transpose(" in str(eqn.source_info.name_stack):
                # Part of a gradient: a local share of what differentiation would sum.
                return SAME
            return Replication(state.level, state.input, site)
        if state.site is None or state.part is not None:
            return dataclasses.replace(state, site=site, part=None)
        return state

    def write(self, cell: State, state: Replication | None) -> None:
        """Adds `state` to what a reference may hold."""
        assert isinstance(cell, RefState), "only those can be written to"
        cell.is_written = True
        after = join((cell.content, state))
        if _known(after) != _known(cell.content):
            cell.content = after
            self.changes += 1

    def overwrite(self, cell: State, state: Replication | None) -> None:
        """Replaces what a reference holds."""
        assert isinstance(cell, RefState), "only those can be written to"
        cell.is_written = cell.is_overwritten = True
        cell.content = content_of(state)

    def fixed_point(
        self,
        turn: Callable[[list[State]], tuple[list[State], list[Collective]]],
        carry: list[State],
    ) -> list[State]:
        """The carry of a loop with body `turn`, for any number of iterations.

        The collectives of the last one are the loop's.
        """
        # Levels only rise, and classes are only split, so this ends.
        while True:
            changes = self.changes
            after, collectives = turn(carry)
            joined: list[State] = [
                join((old, new)) for old, new in zip(carry, after, strict=True)
            ]
            is_same = list(map(_known, joined)) == list(map(_known, carry))
            if is_same and self.changes == changes:
                self.collectives += collectives
                return carry
            carry = joined


def _borders(jaxpr: Jaxpr) -> list[Atom]:
    return [*jaxpr.invars, *jaxpr.outvars]


def _with_own_references(states: Sequence[State]) -> list[State]:
    """The same types, with other references, which no others see written to."""
    copies = {id(x): RefState(x.content) for x in states if isinstance(x, RefState)}
    return [copies.get(id(state), state) for state in states]


# The types of results from those of operands.
Rule = Callable[[Frame, Equation, list[State]], list[State]]


# Calls, branches and loops.


def call(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """A function called once with the operands."""
    return _called(frame, eqn, operands, eqn.invars)


def mapped(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """A function called once with other parts of each operand."""
    return _called(frame, eqn, operands, ())


def _called(
    frame: Frame, eqn: Equation, operands: list[State], names: Sequence[Atom]
) -> list[State]:
    (jaxpr,) = (eqn.params[key] for key in _CALLEES if key in eqn.params)
    outputs = frame.called(jaxpr, operands, eqn, names)
    if is_declared_call(eqn):
        return for_each_result(eqn, frame.computed(eqn, operands))
    return outputs


# The parameters in which primitives that call a function once have it.
_CALLEES = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call", "callee", "fwd_jaxpr")


def run_state(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """A function of references, called once; results are the references' contents."""
    inner = plain(eqn.params["jaxpr"])
    following: Iterator[State] = iter(operands)
    cells: list[State] = []
    is_initialized = eqn.params["is_initialized"]
    for var, has_value in zip(inner.invars, is_initialized, strict=True):
        state: State = next(following) if has_value else frame.varying_since(eqn)
        if isinstance(var.aval, AbstractRef) and not isinstance(state, RefState):
            state = RefState(state)
        cells.append(state)
    frame.called(inner, cells, eqn)
    return list(map(content_of, cells))


def linear_solve(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    """The solver is called once; the other functions are for derivatives."""
    sizes = eqn.params["const_lengths"]
    start = sizes.matvec + sizes.vecmat
    constants = operands[start : start + sizes.solve]
    right = operands[sum(sizes) :]
    return frame.called(eqn.params["jaxprs"].solve, constants + right, eqn)


def branching(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    predicate, operands = operands[0], operands[1:]
    results, ends = [], []
    decider = _decider(frame, eqn, content_of(predicate))
    for branch in eqn.params["branches"]:
        # Each branch starts from the same contents, without the writes of others.
        starts = _with_own_references(operands)
        outputs, collectives = frame.call(branch, starts, eqn, eqn.invars[1:])
        frame.collectives += _decided(frame, collectives, decider, eqn, branch)
        results.append(outputs)
        ends.append(starts)
    for cell, *versions in zip(operands, *ends, strict=True):
        if isinstance(cell, RefState) and any(end.is_written for end in versions):
            _merge(frame, cell, versions)
            if decider is not None:  # replicas may take different branches
                frame.write(cell, decider)
    # Replicas that take the same branch still agree.
    return [join((decider, *versions)) for versions in zip(*results, strict=True)]


def _merge(frame: Frame, cell: RefState, versions: list[RefState]) -> None:
    """Lets a reference hold what one of several branches left in it."""
    if all(version.is_overwritten for version in versions):
        frame.overwrite(cell, join(versions))
        return
    for version in versions:
        frame.write(cell, version.content)


def _decider(
    frame: Frame, eqn: Equation, predicate: Replication | None
) -> Replication | None:
    """The predicate of `eqn`, if it varies."""
    if level_of(predicate) != Level.VARYING:
        return None
    return frame.computed(eqn, (predicate,))


def _decided(
    frame: Frame,
    collectives: list[Collective],
    decider: Replication | None,
    eqn: Equation,
    *jaxprs: ClosedJaxpr,
) -> list[Collective]:
    """Marks the collectives in branches or loops of `eqn` with its varying decider."""
    if decider is None:
        return collectives
    at = frame.site(eqn)
    marked = [
        each if each.agrees_on(decider) else each.decided(decider, at)
        for each in collectives
    ]
    if all(each.decided_by is None for each in marked):
        if merge := _first_merge(eqn, jaxprs):
            site = Site((merge, *at.eqns))
            marked.append(Collective(site, decider, at, is_merge=True))
    return marked


def _first_merge(eqn: Equation, jaxprs: Iterable[ClosedJaxpr]) -> Equation | None:
    """The first equation of a `merge_call` inside `eqn`, or None."""
    if _in_merge(eqn):
        return None
    return next(filter(_in_merge, inner_eqns(tuple(jaxprs))), None)


def _in_merge(eqn: Equation) -> bool:
    return MERGE_SCOPE in str(eqn.source_info.name_stack)


def while_loop(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts = operands[:n_cond]
    body_consts = operands[n_cond : n_cond + n_body]

    def turn(carry: list[State]) -> tuple[list[State], list[Collective]]:
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]
        after: list[State]
        (goes_on,), tests = frame.repeated(condition, cond_consts + carry, eqn)
        after, steps = frame.repeated(body, body_consts + carry, eqn)
        decider = _decider(frame, eqn, content_of(goes_on))
        if decider is not None:  # replicas may stop at different iterations
            for cell in cond_consts + body_consts:
                if isinstance(cell, RefState) and cell.is_written:
                    frame.write(cell, decider)
            after = [join((decider, state)) for state in after]
        collectives = tests + steps
        return after, _decided(frame, collectives, decider, eqn, condition, body)

    return frame.fixed_point(turn, operands[n_cond + n_body :])


def scan(frame: Frame, eqn: Equation, operands: list[State]) -> list[State]:
    inner = plain(eqn.params["jaxpr"])
    n_consts, n_carry = scan_counts(eqn)
    n_same = n_consts + n_carry
    consts, xs = operands[:n_consts], operands[n_same:]
    results: list[State] = []

    def turn(carry: list[State]) -> tuple[list[State], list[Collective]]:
        results[:], collectives = frame.repeated(inner, consts + carry + xs, eqn)
        return results[:n_carry], collectives

    carry = frame.fixed_point(turn, operands[n_consts:n_same])
    # Without iterations the carry is returned unchanged.
    if eqn.params["length"] == 0:
        results[:n_carry] = carry
    return results


# What is known of the values of a frame.

# They change the shape or dtype of an array, not its numbers.
SHAPE_OPS = ("convert_element_type", "reshape", "squeeze", "broadcast_in_dim")
SHAPE_OPS += ("transpose", "rev", "copy")
_SHAPE_OPS = (*SHAPE_OPS, "optimization_barrier")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


# The number of replicas is a literal, or the sum over the replicas of a literal.
def is_mean(frame: Frame, eqn: Equation) -> bool:
    """Whether the sum `eqn` is only divided by the number of replicas, or compared."""
    sums = list(eqn.outvars)
    for var in sums:  # which grows meanwhile
        for use in frame.uses.get(var, ()):
            if use.primitive.name in _SHAPE_OPS:
                sums += use.outvars
            elif use.primitive.name not in _COMPARISONS and not is_share(frame, use):
                return False
    return not any(atom is var for atom in frame.jaxpr.outvars for var in sums)


def gathers_sums(frame: Frame, eqn: Equation) -> bool:
    """Whether `eqn` gathers the parts of a reduce-scatter: together an all-reduce."""
    return any(
        effect_of(origin) in (Effect.SUM, Effect.SUM_SCATTER)
        for origin in _origins(frame, eqn.invars[0], ("mul", "div"))
    )


def gather_before(frame: Frame, eqn: Equation) -> Equation | None:
    """The gather of the axis along which `eqn` reduces its operand, or None."""
    for origin in _origins(frame, eqn.invars[0], ()):
        if effect_of(origin) is Effect.GATHER:
            is_along = origin.params["all_gather_dimension"] in eqn.params["axes"]
            return origin if is_along else None
        if origin.primitive.name != "convert_element_type":
            return None
    return None


def _origins(frame: Frame, atom: Atom, through: Sequence[str]) -> Iterator[Equation]:
    """The equations that compute `atom`, through first operands, the last one first."""
    while not isinstance(atom, Literal):
        eqn = frame.origins.get(atom)
        if eqn is None:
            return
        yield eqn
        name = eqn.primitive.name
        if name not in _SHAPE_OPS and name not in _SLICING and name not in through:
            return
        atom = eqn.invars[0]


_SLICING = ("slice", "pad", "dynamic_slice", "concatenate")


def is_share(frame: Frame, eqn: Equation) -> bool:
    """Whether `eqn` divides something by the number of replicas."""
    replicas = frame.analysis.replicas
    if eqn.primitive.name == "div":
        divisor = eqn.invars[1]
        return _literal(divisor) == replicas or _is_replica_count(frame, divisor)
    if eqn.primitive.name != "mul":
        return False
    # A reciprocal is rounded, in float32 with a relative error of up to 6e-8.
    factors = [_literal(atom) for atom in eqn.invars]
    return any(
        factor is not None and abs(factor * replicas - 1) < 1e-6 for factor in factors
    )


def _literal(atom: Atom) -> complex | None:
    if isinstance(atom, Literal) and getattr(atom.val, "shape", ()) == ():
        return complex(atom.val)
    return None


def _is_replica_count(frame: Frame, atom: Atom) -> bool:
    """Whether this is the sum over the replicas of a literal."""
    if isinstance(atom, Literal):
        return False
    eqn = frame.origins.get(atom)
    if eqn is None:
        return False
    if eqn.primitive.name in ("convert_element_type", "broadcast_in_dim"):
        return _is_replica_count(frame, eqn.invars[0])
    is_sum = effect_of(eqn) is Effect.SUM
    return is_sum and all(isinstance(each, Literal) for each in eqn.invars)


_COMPARISONS_OF_IDS: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_COMPUTING: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply,
}  # fmt: skip


def are_identical(frame: Frame, atoms: Sequence[Atom]) -> bool:
    """Whether `atoms` are the same value, bit by bit."""
    return len({_value_key(frame, atom) for atom in atoms}) == 1


def _repeats(frame: Frame, atoms: Sequence[Atom]) -> tuple[int, ...]:
    """For each of `atoms` the first that is the same value; () if all differ."""
    numbers: dict[Hashable, int] = {}
    firsts = tuple(
        numbers.setdefault(_value_key(frame, atom), index)
        for index, atom in enumerate(atoms)
    )
    return firsts if len(numbers) < len(firsts) else ()


def _value_key(frame: Frame, atom: Atom) -> Hashable:
    """Equal for the same value, bit by bit."""
    if isinstance(atom, Literal):
        # By its bits: NaN is not equal to itself, and 0.0 is equal to -0.0.
        return str(atom.aval), np.asarray(atom.val).tobytes()
    eqn = frame.origins.get(atom)
    if eqn is None or eqn.primitive.name not in SHAPE_OPS:
        return frame.names.get(atom, atom)
    operands = tuple(_value_key(frame, each) for each in eqn.invars)
    return eqn.primitive.name, str(eqn.params), operands


def compared_ids(frame: Frame, eqn: Equation) -> list[bool] | None:
    """The result on each replica of comparing its id with literals."""
    compare = _COMPARISONS_OF_IDS.get(eqn.primitive.name)
    sides = [_values_by_replica(frame, atom) for atom in eqn.invars]
    if compare is None or any(side is None for side in sides):
        return None
    return compare(*sides).tolist()


def _values_by_replica(frame: Frame, atom: Atom) -> np.ndarray | None:
    """The value of `atom` on each replica, if only literals and the id determine it."""
    replicas = frame.analysis.replicas
    if isinstance(atom, Literal):
        return np.full(replicas, atom.val) if np.shape(atom.val) == () else None
    eqn = frame.origins.get(atom)
    if eqn is None:
        return None
    if eqn.primitive.name == "axis_index":
        is_along = frame.analysis.mentions_replicas(eqn)
        return np.arange(replicas, dtype=np.int32) if is_along else None
    # JAX traces the id along a tuple of one axis as `0 + 1 * id`.
    compute = _COMPUTING.get(eqn.primitive.name)
    if compute is None or sum(isinstance(side, Literal) for side in eqn.invars) != 1:
        return None
    sides = [_values_by_replica(frame, side) for side in eqn.invars]
    if any(side is None for side in sides):
        return None
    return compute(*sides).astype(np.int32)  # as JAX's ids are
