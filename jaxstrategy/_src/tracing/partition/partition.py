"""Which equations each replica computes and which are global; the layout of
arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias, final

import jax
from jax.extend import core
from jax.extend.core import DropVar, Literal
from jax.ref import AbstractRef
from jax.sharding import NamedSharding

from jaxstrategy._src.replicas.inner_axes import (
    WHOLE,
    InnerSpec,
    inner_dimensions,
    inner_spec,
    with_inner,
)
from jaxstrategy._src.replicas.replica_placements import (
    SAME,
    lies_along,
)
from jaxstrategy._src.replicas.state_sharding import LeafSharding
from jaxstrategy._src.tracing.checks.varying_results import successors
from jaxstrategy._src.tracing.jaxprs.visit import (
    ArrayType,
    Atom,
    ClosedJaxpr,
    Equation,
    Jaxpr,
    KeyPath,
    Var,
    all_eqns,
    inner_jaxprs,
    jaxpr_of,
    live_equations,
    plain,
    variables,
)
from jaxstrategy._src.tracing.partition.values import (
    AROUND_FUNCTIONS,
    is_around_function,
    shard_function,
)
from jaxstrategy._src.tracing.traced_step import TracedStep
from jaxstrategy._src.values import arrays
from jaxstrategy._src.values.arrays import Leaf
from jaxstrategy._src.variables.variable import Variable

_Names: TypeAlias = dict[Var, Atom]
# What calls a function once, and does nothing else. A function with a rule of its own
# for derivatives stays: somebody may differentiate the program. So does `checkpoint`,
# which keeps XLA from joining what is computed twice on purpose.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}


@final
@dataclasses.dataclass(frozen=True)
class Flat:
    """A jaxpr without calls."""

    jaxpr: Jaxpr
    constants: list[Leaf]
    calls: Mapping[Var, tuple[Equation, ...]]


# A reduction inside a jitted function could not be where the step is divided.
def flattened(
    jaxpr: Jaxpr, stays: Callable[[Equation], bool] = lambda _: False
) -> Flat:
    """`jaxpr` with the equations of the functions that it calls in place of the calls.

    Calls of functions that can be computed from parts stay as they are.
    """
    flattening = _Flattening(stays)
    names: _Names = {}
    flattening.add(jaxpr.eqns, names)
    outvars = [_read(names, atom) for atom in jaxpr.outvars]
    invars = [*jaxpr.invars, *flattening.constant_vars]
    flat = jaxpr_of(invars, flattening.eqns, outvars)
    return Flat(flat, flattening.constants, flattening.calls)


@final
class _Flattening:
    """The equations so far, and the constants that they need."""

    def __init__(self, stays: Callable[[Equation], bool]) -> None:
        self._stays = stays
        self.eqns: list[Equation] = []
        self.constants: list[Leaf] = []
        self.constant_vars: list[Var] = []
        self.calls: dict[Var, tuple[Equation, ...]] = {}

    def add(
        self,
        eqns: Sequence[Equation],
        names: _Names,
        calls: tuple[Equation, ...] = (),
    ) -> None:
        """Add equations, in which `names` stand for some variables."""
        for eqn in eqns:
            operands = [_read(names, atom) for atom in eqn.invars]
            called = None if self._stays(eqn) else self._callee(eqn)
            if called is None:
                outvars = self._outvars(eqn, names) if calls else eqn.outvars
                self.calls.update((var, calls) for var in outvars if calls)
                self.eqns.append(_with_atoms(eqn, operands, outvars))
                continue
            inner = plain(called)
            own: _Names = dict(zip(inner.invars, operands, strict=True))
            own.update(self._constants(called))
            self.add(inner.eqns, own, (eqn, *calls))
            results = [_read(own, atom) for atom in inner.outvars]
            names.update(zip(eqn.outvars, results, strict=True))

    def _callee(self, eqn: Equation) -> ClosedJaxpr | None:
        """The function that `eqn` calls, and does nothing else; None of others."""
        name = eqn.primitive.name
        if name in AROUND_FUNCTIONS:
            called = eqn.params[AROUND_FUNCTIONS[name]]
            inner = plain(called)
            is_around = is_around_function(inner) or any(
                self._stays(each) for each in all_eqns(inner)
            )
            return called if is_around else None
        if name not in _CALLS or shard_function(eqn) is not None:
            return None
        return eqn.params[_CALLS[name]]

    def _outvars(self, eqn: Equation, names: _Names) -> list[Var]:
        for var in eqn.outvars:
            if not isinstance(var, DropVar):
                names[var] = core.Var(var.aval)
        return [names.get(var, var) for var in eqn.outvars]

    def _constants(self, called: ClosedJaxpr) -> _Names:
        inner = plain(called)
        values = getattr(called, "consts", ())
        fresh = [core.Var(var.aval) for var in inner.constvars]
        self.constants += values
        self.constant_vars += fresh
        return dict(zip(inner.constvars, fresh, strict=True))


def _read(names: _Names, atom: Atom) -> Atom:
    return atom if isinstance(atom, Literal) else names.get(atom, atom)


def _with_atoms(eqn: Any, invars: Sequence[Atom], outvars: Sequence[Var]) -> Equation:
    return eqn.replace(invars=list(invars), outvars=list(outvars))


# They take about as long as reading what they read, which the other side has, too.
_NOT_LIGHT = frozenset(("dot_general", "conv_general_dilated", "sort", "fft"))


@final
@dataclasses.dataclass(frozen=True)
class Partition:
    """A step, divided into what each replica computes and what is computed once."""

    per_replica: Sequence[Equation]
    global_: Sequence[Equation]
    copied: Sequence[Equation]
    unused: Sequence[Equation]

    @cached_property
    def read_per_replica(self) -> frozenset[Var]:
        """The variables that the replicas' equations read."""
        return frozenset(
            variables(atom for eqn in self.per_replica for atom in eqn.invars)
        )

    @cached_property
    def read_by_users(self) -> frozenset[Var]:
        """The variables that the replicas' part of the user's step mentions.

        Whether a step returns its loss, too, is not to change where state lies.
        """
        unused = variables(atom for eqn in self.unused for atom in eqn.invars)
        return self.read_per_replica.union(unused)

    @cached_property
    def read_globally(self) -> frozenset[Var]:
        """Those that the others read."""
        eqns = (*self.copied, *self.global_)
        return frozenset(variables(atom for eqn in eqns for atom in eqn.invars))

    @cached_property
    def made_per_replica(self) -> frozenset[Var]:
        """Those that the replicas' equations make."""
        return frozenset(var for eqn in self.per_replica for var in eqn.outvars)

    @cached_property
    def made_globally(self) -> frozenset[Var]:
        """Those that the others make."""
        eqns = (*self.copied, *self.global_)
        return frozenset(var for eqn in eqns for var in eqn.outvars)


def partition(
    jaxpr: Jaxpr,
    varies: Callable[[Atom], bool],
    stays: Callable[[Equation], bool] = lambda eqn: False,
) -> Partition:
    """The division of a step."""
    per_replica: list[Equation] = []
    global_: list[Equation] = []
    needed: set[Var] = set()
    alive, unused = set(variables(jaxpr.outvars)), list[Equation]()
    for eqn in reversed(jaxpr.eqns):
        if not eqn.effects and alive.isdisjoint(eqn.outvars):
            unused.append(eqn)
            continue
        alive.update(variables(eqn.invars))
        is_free = _is_equal(eqn, varies) and not stays(eqn)
        if is_free and needed.isdisjoint(eqn.outvars):
            global_.append(eqn)
        else:
            per_replica.append(eqn)
            needed.update(variables(eqn.invars))
    per_replica.reverse()
    global_.reverse()
    wanted = set(variables(atom for eqn in global_ for atom in eqn.invars))
    wanted.update(variables(jaxpr.outvars))
    copied = _copied(per_replica, set(jaxpr.invars), wanted, varies)
    return Partition(per_replica, global_, copied, unused)


def _is_equal(eqn: Equation, varies: Callable[[Atom], bool]) -> bool:
    """Whether it computes the same on all replicas, and does nothing besides."""
    # Collectives have an effect, the name of their axis (JAX 0.10 and 0.12).
    return not eqn.effects and not any(map(varies, (*eqn.invars, *eqn.outvars)))


def _copied(
    per_replica: Sequence[Equation],
    given: set[Var],
    wanted: set[Var],
    varies: Callable[[Atom], bool],
) -> list[Equation]:
    """The equations of the replicas that are made of arguments alone, cheaply."""
    known, light = set(given), list[Equation]()
    for eqn in per_replica:
        is_light = eqn.primitive.name not in _NOT_LIGHT and not any(
            True for _ in inner_jaxprs(eqn.params)
        )
        if (
            is_light
            and _is_equal(eqn, varies)
            and known.issuperset(variables(eqn.invars))
        ):
            light.append(eqn)
            known.update(eqn.outvars)
    return live_equations(light, wanted)


# To lie like another array changes no number, so that here a guess will do: what the
# checks of a step must be sure of, `successors`, comes first, and then the argument of
# the same type whose name is most like that of the result.
def replaced_arguments(step: TracedStep) -> dict[int, int]:
    """For each result that is like an argument which argument.

    Both are counted among those that are arrays. Only what is equal on all replicas
    counts.
    """
    sure = successors(step)
    objects = {step.label(i): i for i in step.same_arguments}
    alike: dict[tuple[object, ...], list[int]] = {}
    for argument in step.same_arguments:
        alike.setdefault(_kind(step.type_of(argument)), []).append(argument)
    found: dict[int, int] = {}
    for number, (position, path) in enumerate(step.results.array_paths()):
        if step.trace.varies[number]:
            continue
        candidates = alike.get(_kind(step.outputs[number]), ())
        argument = sure.get(position)
        if step.is_of_object(path):  # the new array of an argument of that name
            argument = objects.get(step.path(path))
        elif argument is None and candidates:
            argument = _most_alike(step, path, candidates)
        if argument is not None:
            found[number] = argument
    return found


def _most_alike(step: TracedStep, path: KeyPath, candidates: Sequence[int]) -> int:
    """The argument whose path is most like that of a result."""

    def likeness(argument: int) -> tuple[int, int]:
        other = step.key_path_of(argument)
        return _common_end(path, other), -abs(len(path) - len(other))

    return max(candidates, key=likeness)


def _kind(aval: ArrayType) -> tuple[object, ...]:
    return aval.shape, aval.dtype


def _common_end(one: KeyPath, other: KeyPath) -> int:
    """The number of keys that two paths have in common at their ends."""
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        count += 1
    return count


@final
@dataclasses.dataclass(frozen=True)
class DividedLeaf:
    """An array that is equal on all replicas, and how it lies."""

    get_label: Callable[[], str]
    type: ArrayType
    sharding: LeafSharding
    inner: InnerSpec = WHOLE

    @property
    def label(self) -> str:
        """The argument or variable, as messages call it."""
        return self.get_label()


@final
@dataclasses.dataclass(frozen=True)
class Layout:
    """The way in which the arrays of a step lie that are equal on all replicas."""

    inputs: Mapping[Var, int]
    results: Sequence[LeafSharding]
    placements: Sequence[NamedSharding | None]
    inner: Sequence[InnerSpec]
    divisible: Sequence[int | None]
    arguments: Mapping[int, int | None]
    leaves: Mapping[Var, DividedLeaf]

    @property
    def outputs(self) -> list[int | None]:
        """The dimension along which each result is divided, None of whole ones."""
        return [result.dimension for result in self.results]


@final
class Layouts:
    """The layout of one step."""

    def __init__(
        self,
        step: TracedStep,
        invars: Sequence[Var],
        partition: Partition,
        given: Sequence[Leaf],
    ) -> None:
        self._step = step
        self._replicas = step.trace.replicas
        self._partition = partition
        self._given = given
        self._replaced = replaced_arguments(step)
        self._state = frozenset(self._replaced.values())
        inputs = zip(step.trace.inputs, invars, strict=False)
        self._at = {place: var for place, var in inputs if place is not None}

    def chosen(self) -> Layout:
        """How the arguments, variables and results lie."""
        step = self._step
        leaves = {i: self._argument(i) for i in step.same_arguments}
        first = len(self._given)
        for number, variable in enumerate(step.trace.variables):
            if variable in step.trace.used and variable.copies_must_agree:
                leaves[first + number] = self._variable(variable)
        chosen = {place: leaf.sharding.dimension for place, leaf in leaves.items()}
        inputs = {self._at[i]: d for i, d in chosen.items() if d is not None}
        return Layout(
            # What stays a reference is whole while the replicas work on it.
            {v: d for v, d in inputs.items() if not isinstance(v.aval, AbstractRef)},
            [self._result(n, leaves) for n in range(len(step.outputs))],
            [self._placement(n, leaves) for n in range(len(step.outputs))],
            [self._inner_of(n, leaves) for n in range(len(step.outputs))],
            [self._divisible(n, chosen) for n in range(len(step.outputs))],
            {i: chosen[i] for i in self._state},
            {self._at[place]: leaf for place, leaf in leaves.items()},
        )

    def _argument(self, index: int) -> DividedLeaf:
        step, var = self._step, self._at[index]
        aval = step.type_of(index)
        leaf = self._given[index]
        taken = inner_dimensions(leaf, self._replicas)
        sharding = self._replicas.division(step.path_of(index), aval, taken)
        if not sharding.is_whole:
            sharding = self._unless_needed(sharding, index, var)
        label = functools.partial(step.label, index)
        return DividedLeaf(label, aval, sharding, inner_spec(leaf, self._replicas))

    def _unless_needed(
        self, sharding: LeafSharding, index: int, var: Var
    ) -> LeafSharding:
        chosen = self._replicas.state_sharding
        assert chosen is not None, "or nothing is divided"
        if chosen.shard == "optimizer" and var in self._partition.read_by_users:
            return LeafSharding(None, "each replica's own computation reads it")
        if index in self._state:
            return sharding
        # It may be anything: a table, or what an evaluation is given. It stays as it
        # lies, or each call would move it.
        leaf = self._given[index]
        if arrays.is_placed(leaf) and self._replicas.dimension_of(leaf) is None:
            return LeafSharding(None, "it was given whole, and no result replaces it")
        return sharding

    def _variable(self, variable: Variable) -> DividedLeaf:
        aval = jax.ShapeDtypeStruct(variable.cell.shape, variable.dtype)
        name = f"variable {variable.name!r}"
        inner = inner_spec(variable, self._replicas)
        return DividedLeaf(lambda: name, aval, variable.division, inner)

    def _result(self, number: int, leaves: Mapping[int, DividedLeaf]) -> LeafSharding:
        if self._step.trace.varies[number]:
            return LeafSharding(None, "it differs between replicas")
        argument = self._replaced.get(number)
        if argument is None:
            return LeafSharding(None, "no argument is like it")
        return leaves[argument].sharding

    def _placement(
        self, number: int, leaves: Mapping[int, DividedLeaf]
    ) -> NamedSharding | None:
        """The place of a result."""
        if self._replicas.inner_axes and number not in self._replaced:
            return None
        lies = lies_along(self._result(number, leaves).dimension)
        return with_inner(self._inner_of(number, leaves), self._replicas, lies)

    def _inner_of(self, number: int, leaves: Mapping[int, DividedLeaf]) -> InnerSpec:
        argument = self._replaced.get(number)
        return WHOLE if argument is None else leaves[argument].inner

    def _divisible(self, number: int, chosen: Mapping[int, int | None]) -> int | None:
        argument = self._replaced.get(number)
        if argument is None or chosen[argument] is not None:
            return None
        step = self._step
        aval = step.type_of(argument)
        taken = inner_dimensions(self._given[argument], self._replicas)
        return self._replicas.division(step.path_of(argument), aval, taken).dimension


def kept_placements(
    step: TracedStep, leaves: Sequence[Leaf]
) -> dict[int, NamedSharding]:
    """For each result that is like an argument how the argument lies."""
    replicas = step.trace.replicas
    found: dict[int, NamedSharding] = {}
    for number, argument in replaced_arguments(step).items():
        leaf = leaves[argument]
        lies = replicas.inner_placement(leaf, SAME) if arrays.has_place(leaf) else None
        if lies is not None:
            found[number] = lies
    return found
