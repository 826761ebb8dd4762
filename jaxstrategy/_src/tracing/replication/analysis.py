"""Going through a step: what is known of each value, by rules of its equations."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal, Primitive
from jax.sharding import Mesh

from jaxstrategy._src.tracing.jaxprs.visit import (
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
from jaxstrategy._src.tracing.replication.primitives import Lowered, lowered
from jaxstrategy._src.tracing.replication.types import (
    SAME,
    Collective,
    Findings,
    HeldState,
    Known,
    Replication,
    SameReference,
    content_of,
    join,
)


# What is found out about a nested jaxpr is kept in terms of its inputs, and translated
# each time that it is called (`_lifted`). What an operation does is for its rule to
# say.
class Analysis:
    """One analysis of a step."""

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
        # How many transformations of the step the jaxpr at hand is the result of.
        self.order = 0
        # The jaxprs live as long as the step's, which the caller holds.
        self._known: dict[Hashable, Findings] = {}
        self._expanded: dict[Hashable, Jaxpr | None] = {}
        self._lowered: dict[int, Lowered] = {}
        self._transformed: dict[Hashable, Jaxpr] = {}

    def of(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[Known],
        unpacking: int = 0,
        repeats: Sequence[int] = (),
    ) -> Findings:
        """Goes through `jaxpr` once."""
        frame = self.passed(jaxpr, inputs, unpacking, repeats)
        written = {
            index: state
            for index, state in enumerate(inputs)
            if isinstance(state, HeldState) and state.is_written
        }
        outputs = [frame.read(atom) for atom in jaxpr.outvars]
        contents = {index: state.content for index, state in written.items()}
        overwritten = frozenset(i for i, s in written.items() if s.is_overwritten)
        return Findings(outputs, frame.collectives, contents, overwritten)

    def passed(
        self,
        jaxpr: Jaxpr,
        inputs: Sequence[Known],
        unpacking: int = 0,
        repeats: Sequence[int] = (),
    ) -> Frame:
        """One pass through `jaxpr`; see `of`."""
        frame = Frame(self, dict(zip(jaxpr.invars, inputs, strict=True)))
        frame.names = {
            jaxpr.invars[index]: jaxpr.invars[first]
            for index, first in enumerate(repeats)
        }
        for eqn in jaxpr.eqns[:unpacking]:
            frame.known[eqn.outvars[0]] = frame.known[eqn.invars[0]]
        frame.go_through(jaxpr, unpacking)
        return frame

    def in_terms_of_inputs(
        self, jaxpr: Jaxpr, operands: Sequence[Known], repeats: tuple[int, ...] = ()
    ) -> Findings:
        """The findings for operands of these levels, worked out once."""
        # By the order, too: in the last one `_derived` applies no more transforms.
        key = (id(jaxpr), self.order, repeats, *map(_kind, operands))
        findings = self._known.get(key)
        if findings is None:
            inputs = [_as_input(index, state) for index, state in enumerate(operands)]
            findings = self._known[key] = self.of(jaxpr, inputs, 0, repeats)
            outputs = [_by_index(output, inputs) for output in findings.outputs]
            findings.outputs[:] = outputs
        return findings

    def expanded(self, eqn: Equation) -> Jaxpr | None:
        """The jaxpr that JAX puts in the place of a primitive of Python, or None."""
        primitive: Any = eqn.params.get("_prim")
        avals = [atom.aval for atom in eqn.invars]
        # To be equal such primitives need not take operands of the same types.
        key = (primitive, *((aval.shape, aval.dtype) for aval in avals))
        if key not in self._expanded:
            structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
            try:
                args = jax.tree.unflatten(
                    jax.tree.structure(primitive.in_avals), structs
                )
                make = jax.make_jaxpr(primitive.expand, axis_env=self.axis_env)
                jaxpr = plain(make(*args))
            except _NOT_EXPANDED:  # anybody's code, not meant to be traced here
                jaxpr = None
            self._expanded[key] = jaxpr
        return self._expanded[key]

    def lowered(self, eqn: Equation) -> Lowered:
        """The description of `eqn` by what JAX lowers it to."""
        if id(eqn) not in self._lowered:
            self._lowered[id(eqn)] = lowered(eqn, self.mesh)
        return self._lowered[id(eqn)]

    def transformed(
        self, eqn: Equation, transform: Hashable, make: Callable[..., Jaxpr]
    ) -> Jaxpr:
        """The jaxpr that `make` makes of `eqn` under `transform`, made once."""
        key = (id(eqn), transform)
        if key not in self._transformed:
            made = make(eqn, transform, self.axis_env)
            self._transformed[key] = made
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


# What tracing says of code that is not meant for it, or of an unknown mesh axis.
_NOT_EXPANDED = (TypeError, ValueError, AttributeError, NameError, NotImplementedError)


def _known(state: Known) -> tuple[int, tuple[int, ...] | None]:
    state = content_of(state)
    return (0, None) if state is None else (state.level, state.classes)


def _kind(state: Known) -> Hashable:
    """The part of an operand that decides about the findings; references apart."""
    if isinstance(state, HeldState):
        return -1, _kind(state.content)
    if state is None:
        return 0
    return state.level if state.classes is None else (state.level, state.classes)


def _as_input(index: int, state: Known) -> Known:
    if isinstance(state, HeldState):
        return HeldState(content_of(_as_input(index, state.content)))
    if state is None or state is SAME:
        return state
    return Replication(state.level, index, classes=state.classes)


def _by_index(
    output: Known | SameReference, inputs: list[Known]
) -> Known | SameReference:
    if isinstance(output, HeldState):
        for index, state in enumerate(inputs):
            if state is output:
                return SameReference(index)
    return output


class Frame:
    """One pass through one jaxpr."""

    def __init__(self, analysis: Analysis, known: dict[Var, Known]) -> None:
        self.analysis = analysis
        self.known = known
        self.collectives: list[Collective] = []
        self.changes = 0
        self.jaxpr: ClosedJaxpr = None
        self.names: Mapping[Var, Var] = {}

    def go_through(self, jaxpr: Jaxpr, start: int) -> None:
        """Learn about every variable, from equation number `start` on."""
        self.jaxpr = jaxpr
        known, read = self.known, self.read
        rules = self.analysis.rules
        for eqn in jaxpr.eqns[start:] if start else jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            rule = rules[eqn.primitive]
            for var, state in zip(eqn.outvars, rule(self, eqn, operands), strict=True):
                known[var] = state

    def read(self, atom: Atom) -> Known:
        """The knowledge of a variable or literal."""
        return None if isinstance(atom, Literal) else self.known.get(atom)

    @functools.cached_property
    def uses(self) -> Mapping[Var, Sequence[Equation]]:
        """The equations that read each variable."""
        return uses_of(self.jaxpr.eqns)

    @functools.cached_property
    def origins(self) -> Mapping[Var, Equation]:
        """The equation that makes each variable."""
        return origins_of(self.jaxpr.eqns)

    def enter(
        self,
        jaxpr: ClosedJaxpr,
        operands: Sequence[Known],
        eqn: Equation,
        is_certain: bool = True,
        repeats: tuple[int, ...] = (),
    ) -> tuple[list[Known], list[Collective]]:
        """The results of `jaxpr`, called by `eqn` with `operands`; its collectives."""
        findings = self.analysis.in_terms_of_inputs(plain(jaxpr), operands, repeats)
        before = [content_of(state) for state in operands]

        def lifted(state: Known) -> Any:
            return _lifted(state, before, eqn)

        for index, content in findings.contents.items():
            cell = operands[index]
            # A reference passed twice is two inside: what is written by one name is
            # not seen by the other, so that neither is certain to overwrite it.
            is_one_name = sum(other is cell for other in operands) == 1
            if is_certain and is_one_name and index in findings.overwritten:
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

    def write(self, cell: Known, state: Replication | None) -> None:
        """Note that `cell`, a reference, may hold `state` from now on."""
        assert isinstance(cell, HeldState), "only those can be written to"
        cell.is_written = True
        after = join((cell.content, state))
        if _known(after) != _known(cell.content):
            cell.content = after
            self.changes += 1

    def overwrite(self, cell: Known, state: Replication | None) -> None:
        """Note that `cell`, a reference, now holds `state` and nothing else."""
        assert isinstance(cell, HeldState), "only those can be written to"
        cell.is_written = cell.is_overwritten = True
        cell.content = content_of(state)

    def until_stable(
        self,
        turn: Callable[[list[Known]], tuple[list[Known], list[Collective]]],
        carry: list[Known],
    ) -> list[Known]:
        """The carry of a loop with body `turn`, whatever the number of turns.

        The collectives of the last turn are the loop's.
        """
        # Levels only ever rise, and classes are only ever divided, so this ends.
        while True:
            changes = self.changes
            after, collectives = turn(carry)
            joined: list[Known] = [
                join((old, new)) for old, new in zip(carry, after, strict=True)
            ]
            is_same = list(map(_known, joined)) == list(map(_known, carry))
            if is_same and self.changes == changes:
                self.collectives += collectives
                return carry
            carry = joined


def _lifted(state: Known, operands: Sequence[Known], eqn: Equation) -> Any:
    """`state` of a jaxpr called by `eqn` as the caller sees it."""
    if isinstance(state, HeldState):  # a reference made inside
        return HeldState(_lifted(state.content, operands, eqn))
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


# What an operation makes of its operands.
Rule = Callable[[Frame, Equation, list[Known]], list[Known]]


# What changes the form of an array and not its numbers.
FORMING = ("convert_element_type", "reshape", "squeeze", "broadcast_in_dim")
FORMING += ("transpose", "rev", "copy")
_FORMING = (*FORMING, "optimization_barrier")
_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")


# Both are seen by a division by the number of replicas, which is a literal, or the sum
# over the replicas of one.
def is_mean(frame: Frame, eqn: Equation) -> bool:
    """Whether all that happens to the sum `eqn` is a division by the replicas.

    Or a comparison with something: the sum is a check then.
    """
    sums = list(eqn.outvars)
    for var in sums:  # which grows meanwhile
        for use in frame.uses.get(var, ()):
            if use.primitive.name in _FORMING:
                sums += use.outvars
            elif use.primitive.name not in _COMPARING and not is_share(frame, use):
                return False
    return not any(atom is var for atom in frame.jaxpr.outvars for var in sums)


def gathers_sums(frame: Frame, eqn: Equation) -> bool:
    """Whether `eqn` gathers the parts of a sum, which is then whole everywhere."""
    return any(
        effect_of(origin) in (Effect.SUM, Effect.SUM_SCATTER)
        for origin in _origins(frame, eqn.invars[0], ("mul", "div"))
    )


def gathered(frame: Frame, eqn: Equation) -> Equation | None:
    """The gathering of the axis along which `eqn` reduces its operand, or None."""
    for origin in _origins(frame, eqn.invars[0], ()):
        if effect_of(origin) is Effect.GATHER:
            is_along = origin.params["all_gather_dimension"] in eqn.params["axes"]
            return origin if is_along else None
        if origin.primitive.name != "convert_element_type":
            return None
    return None


def _origins(frame: Frame, atom: Atom, through: Sequence[str]) -> Iterator[Equation]:
    """The equations that `atom` comes from by first operands, the last one first."""
    while not isinstance(atom, Literal):
        eqn = frame.origins.get(atom)
        if eqn is None:
            return
        yield eqn
        name = eqn.primitive.name
        if name not in _FORMING and name not in _CUTTING and name not in through:
            return
        atom = eqn.invars[0]


_CUTTING = ("slice", "pad", "dynamic_slice", "concatenate")


def is_share(frame: Frame, eqn: Equation) -> bool:
    """Whether `eqn` divides something by the number of replicas."""
    replicas = frame.analysis.replicas
    if eqn.primitive.name == "div":
        divisor = eqn.invars[1]
        return _literal(divisor) == replicas or _is_counted(frame, divisor)
    if eqn.primitive.name != "mul":
        return False
    # A reciprocal is a rounded one: in float32 it is wrong by up to 6e-8 of itself.
    factors = [_literal(atom) for atom in eqn.invars]
    return any(
        factor is not None and abs(factor * replicas - 1) < 1e-6 for factor in factors
    )


def _literal(atom: Atom) -> complex | None:
    if isinstance(atom, Literal) and getattr(atom.val, "shape", ()) == ():
        return complex(atom.val)
    return None


def _is_counted(frame: Frame, atom: Atom) -> bool:
    """Whether this is a sum over the replicas of a literal: so much for each."""
    if isinstance(atom, Literal):
        return False
    eqn = frame.origins.get(atom)
    if eqn is None:
        return False
    if eqn.primitive.name in ("convert_element_type", "broadcast_in_dim"):
        return _is_counted(frame, eqn.invars[0])
    is_sum = effect_of(eqn) is Effect.SUM
    return is_sum and all(isinstance(each, Literal) for each in eqn.invars)


_COMPARISONS_OF_IDS: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_COMPUTING: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply,
}  # fmt: skip


def are_one(frame: Frame, atoms: Sequence[Atom]) -> bool:
    """Whether `atoms` are the same value, bit by bit."""
    return len({_name(frame, atom) for atom in atoms}) == 1


def repeats(frame: Frame, atoms: Sequence[Atom]) -> tuple[int, ...]:
    """For each of `atoms` the first that is the same value; () if none is another."""
    numbers: dict[Hashable, int] = {}
    firsts = tuple(
        numbers.setdefault(_name(frame, atom), index)
        for index, atom in enumerate(atoms)
    )
    return firsts if len(numbers) < len(firsts) else ()


def _name(frame: Frame, atom: Atom) -> Hashable:
    """Equal for what is the same value, bit by bit."""
    if isinstance(atom, Literal):
        # By its bits: NaN is not equal to itself, and 0.0 is equal to -0.0.
        return str(atom.aval), np.asarray(atom.val).tobytes()
    eqn = frame.origins.get(atom)
    if eqn is None or eqn.primitive.name not in FORMING:
        return frame.names.get(atom, atom)
    of = tuple(_name(frame, each) for each in eqn.invars)
    return eqn.primitive.name, str(eqn.params), of


def compared_ids(frame: Frame, eqn: Equation) -> list[bool] | None:
    """The outcome on each replica of a comparison of their ids with literals."""
    compare = _COMPARISONS_OF_IDS.get(eqn.primitive.name)
    sides = [_ids(frame, atom) for atom in eqn.invars]
    if compare is None or any(side is None for side in sides):
        return None
    return compare(*sides).tolist()


def _ids(frame: Frame, atom: Atom) -> np.ndarray | None:
    """The value of `atom` on each replica, if literals and the id tell it."""
    replicas = frame.analysis.replicas
    if isinstance(atom, Literal):
        return np.full(replicas, atom.val) if np.shape(atom.val) == () else None
    eqn = frame.origins.get(atom)
    if eqn is None:
        return None
    if eqn.primitive.name == "axis_index":
        is_along = frame.analysis.mentions_replicas(eqn)
        return np.arange(replicas, dtype=np.int32) if is_along else None
    # JAX makes `0 + 1 * id` of the id along several axes of which there is one.
    compute = _COMPUTING.get(eqn.primitive.name)
    if compute is None or sum(isinstance(side, Literal) for side in eqn.invars) != 1:
        return None
    sides = [_ids(frame, side) for side in eqn.invars]
    if any(side is None for side in sides):
        return None
    return compute(*sides).astype(np.int32)  # as JAX's ids are
