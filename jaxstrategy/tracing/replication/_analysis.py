"""Going through jaxprs, each nested one once per combination of operand levels.

What is found out about a nested jaxpr is kept in terms of its inputs, and translated
each time that it is called (`_lifted`). What an operation does is for its rule to say.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, Primitive
from jax.sharding import Mesh

from jaxstrategy.tracing._jaxpr_types import Atom, ClosedJaxpr, Equation, Var
from jaxstrategy.tracing.replication._collective_table import is_along
from jaxstrategy.tracing.replication._jaxprs import plain
from jaxstrategy.tracing.replication._levels import (
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
from jaxstrategy.tracing.replication._lowered import Lowered, lowered


class Analysis:
    """One analysis of a step.

    Args:
      axes: the mesh axes of the replicas, or the one there is.
      replicas: how many replicas there are.
      rules: of each primitive.
      mesh: where the replicas are, if that is known.
    """

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
        """Goes through `jaxpr` once.

        Args:
          jaxpr: what to go through.
          inputs: what is known of its inputs.
          unpacking: how many equations at the start only unpack arguments.
          repeats: for each input the first that is the same value, or nothing.
        """
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
    """One pass through one jaxpr.

    Attributes:
      analysis: what it is part of.
      known: what is known about each variable so far.
      collectives: those passed so far.
      jaxpr: what it goes through.
      names: of each input the first that is the same value, where inputs repeat.
      changes: how often a reference came to hold something of a higher level.
    """

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
        uses: dict[Var, list[Equation]] = {}
        for eqn in self.jaxpr.eqns:
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    uses.setdefault(atom, []).append(eqn)
        return uses

    @functools.cached_property
    def origins(self) -> Mapping[Var, Equation]:
        """The equation that makes each variable."""
        return {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}

    def enter(
        self,
        jaxpr: ClosedJaxpr,
        operands: Sequence[Known],
        eqn: Equation,
        is_certain: bool = True,
        repeats: tuple[int, ...] = (),
    ) -> tuple[list[Known], list[Collective]]:
        """The results of the jaxpr that `eqn` calls with `operands`; its collectives.

        Args:
          jaxpr: what is called.
          operands: what is known of its inputs.
          eqn: what calls it.
          is_certain: whether it is called exactly once.
          repeats: for each operand the first that is the same value, or nothing.
        """
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
