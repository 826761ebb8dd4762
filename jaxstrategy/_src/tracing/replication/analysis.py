"""Interprets a jaxpr on replication types, by the rules of its primitives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.extend.core import Jaxpr, Literal, Primitive
from jax.sharding import Mesh

from jaxstrategy._src.tracing.jaxprs import (
    Atom,
    ClosedJaxpr,
    Effect,
    Equation,
    Var,
    effect_of,
    is_along,
    origins_of,
    plain,
    uses_of,
)
from jaxstrategy._src.tracing.replication.primitives import (
    Lowered,
    alone,
    lowered,
    operands_of,
)
from jaxstrategy._src.tracing.replication.types import (
    SAME,
    Collective,
    Findings,
    RefState,
    Replication,
    SameReference,
    State,
    content_of,
    join,
)
from jaxstrategy._src.values.arrays import Function

# A function and the types of its arguments -> another function and its types, which
# takes the arguments once or several times, and returns the results as often.
Types = list[jax.ShapeDtypeStruct]
Transform = Callable[[Function, Types], tuple[Function, Types]]


# The findings of an inner jaxpr are cached in terms of its inputs, and translated at
# each call (`_lifted`).
class Analysis:
    """The analysis of one step, with caches for inner jaxprs."""

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
        self._known: dict[Hashable, Findings] = {}
        self._expanded: dict[Hashable, Jaxpr | None] = {}
        self._lowered: dict[int, Lowered] = {}
        self._transformed: dict[Hashable, Jaxpr] = {}

    def of(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[State],
        unpacking: int = 0,
        repeats: Sequence[int] = (),
    ) -> Findings:
        """The findings for a jaxpr whose inputs have these types.

        Args:
          unpacking: how many leading equations take a replica's part of an input.
          repeats: for each input the first one that is the same value.
        """
        frame = self.evaluated(jaxpr, inputs, unpacking, repeats)
        written = {
            index: state
            for index, state in enumerate(inputs)
            if isinstance(state, RefState) and state.is_written
        }
        outputs = [frame.read(atom) for atom in jaxpr.outvars]
        contents = {index: state.content for index, state in written.items()}
        overwritten = frozenset(i for i, s in written.items() if s.is_overwritten)
        return Findings(outputs, frame.collectives, contents, overwritten)

    def evaluated(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[State],
        unpacking: int = 0,
        repeats: Sequence[int] = (),
    ) -> Frame:
        """The types of all values of a jaxpr; see `of`."""
        frame = Frame(self, dict(zip(jaxpr.invars, inputs, strict=True)))
        frame.names = {
            jaxpr.invars[index]: jaxpr.invars[first]
            for index, first in enumerate(repeats)
        }
        for eqn in jaxpr.eqns[:unpacking]:
            frame.known[eqn.outvars[0]] = frame.known[eqn.invars[0]]
        frame.run(jaxpr, unpacking)
        return frame

    def in_terms_of_inputs(
        self, jaxpr: Jaxpr, operands: Sequence[State], repeats: tuple[int, ...] = ()
    ) -> Findings:
        """The findings for operands of these levels, cached."""
        # By the order, too: in the last one `also` applies no more transforms.
        key = (id(jaxpr), self.order, repeats, *map(_cache_key, operands))
        findings = self._known.get(key)
        if findings is None:
            inputs = [_as_input(index, state) for index, state in enumerate(operands)]
            findings = self._known[key] = self.of(jaxpr, inputs, 0, repeats)
            for place, output in enumerate(findings.outputs):
                for index, state in enumerate(inputs):
                    if isinstance(output, RefState) and state is output:
                        findings.outputs[place] = SameReference(index)
        return findings

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
    """The part of an operand's type on which findings depend."""
    if isinstance(state, RefState):
        return -1, _cache_key(state.content)
    if state is None:
        return 0
    return state.level if state.classes is None else (state.level, state.classes)


def _as_input(index: int, state: State) -> State:
    if isinstance(state, RefState):
        return RefState(content_of(_as_input(index, state.content)))
    if state is None or state is SAME:
        return state
    return Replication(state.level, index, classes=state.classes)


class Frame:
    """The types of the values of one jaxpr, while it is interpreted."""

    def __init__(self, analysis: Analysis, known: dict[Var, State]) -> None:
        self.analysis = analysis
        self.known = known
        self.collectives: list[Collective] = []
        self.changes = 0
        self.jaxpr: ClosedJaxpr = None
        self.names: Mapping[Var, Var] = {}

    def run(self, jaxpr: Jaxpr, start: int) -> None:
        """Interprets a jaxpr from equation number `start` on."""
        self.jaxpr = jaxpr
        known, read = self.known, self.read
        rules = self.analysis.rules
        for eqn in jaxpr.eqns[start:] if start else jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            rule = rules[eqn.primitive]
            for var, state in zip(eqn.outvars, rule(self, eqn, operands), strict=True):
                known[var] = state

    def read(self, atom: Atom) -> State:
        return None if isinstance(atom, Literal) else self.known.get(atom)

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
        is_certain: bool = True,
        repeats: tuple[int, ...] = (),
    ) -> tuple[list[State], list[Collective]]:
        """The results and collectives of `jaxpr`, called by `eqn` with `operands`."""
        findings = self.analysis.in_terms_of_inputs(plain(jaxpr), operands, repeats)
        before = [content_of(state) for state in operands]

        def lifted(state: State) -> Any:
            return _lifted(state, before, eqn)

        for index, content in findings.contents.items():
            cell = operands[index]
            # A reference passed twice is two inside: a write to one is not seen in the
            # other, so that neither is certain to overwrite it.
            is_unique = sum(other is cell for other in operands) == 1
            if is_certain and is_unique and index in findings.overwritten:
                self.overwrite(cell, lifted(content))
            else:
                self.write(cell, lifted(content))
        outputs = [
            operands[output.input]
            if isinstance(output, SameReference)
            else lifted(output)
            for output in findings.outputs
        ]
        collectives = [
            dataclasses.replace(
                found,
                site=found.site.within(eqn),
                decided_by=lifted(found.decided_by),
                decided_at=found.decided_at and found.decided_at.within(eqn),
                reduced_before=lifted(found.reduced_before),
            )
            for found in findings.collectives
        ]
        return outputs, collectives

    def called(
        self,
        jaxpr: ClosedJaxpr,
        operands: Sequence[State],
        eqn: Equation,
        repeats: tuple[int, ...] = (),
    ) -> list[State]:
        """The results of `jaxpr`, which `eqn` calls once."""
        outputs, collectives = self.call(jaxpr, operands, eqn, repeats=repeats)
        self.collectives += collectives
        return outputs

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


def _lifted(state: State, operands: Sequence[State], eqn: Equation) -> Any:
    """Translates a type of an inner jaxpr for the caller, `eqn`."""
    if isinstance(state, RefState):  # a reference made inside
        return RefState(_lifted(state.content, operands, eqn))
    if state is None or state is SAME:
        return state
    site = None if state.site is None else state.site.within(eqn)
    if state.input is None:
        part = _lifted(state.part, operands, eqn)
        return dataclasses.replace(state, site=site, part=part)
    outer = content_of(operands[state.input])
    assert outer is not None, "what comes of a constant is one"
    if site is not None and outer.site is not None:
        site = outer.site
    if site is None:  # passed through untouched, or joined with another such
        return dataclasses.replace(outer, classes=state.classes)
    return Replication(outer.level, outer.input, site, classes=state.classes)


# The types of results from those of operands.
Rule = Callable[[Frame, Equation, list[State]], list[State]]


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


def repeats(frame: Frame, atoms: Sequence[Atom]) -> tuple[int, ...]:
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
