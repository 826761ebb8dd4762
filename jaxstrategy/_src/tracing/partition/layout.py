"""How arguments and results lie, over the replicas and the devices of each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import final

import jax
from jax.ref import AbstractRef
from jax.sharding import NamedSharding

from jaxstrategy._src.replicas.inner_axes import (
    WHOLE,
    InnerSpec,
    inner_dimensions,
    inner_spec,
    with_inner,
)
from jaxstrategy._src.replicas.replicas import REPLICATED, sharded_along
from jaxstrategy._src.replicas.state_sharding import LeafSharding
from jaxstrategy._src.tracing.checks.varying_results import successors
from jaxstrategy._src.tracing.jaxprs.visit import ArrayType, KeyPath, Var
from jaxstrategy._src.tracing.partition.partition import Partition
from jaxstrategy._src.tracing.traced_step import TracedStep
from jaxstrategy._src.values import arrays
from jaxstrategy._src.values.arrays import Leaf
from jaxstrategy._src.variables.variable import Variable


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
        layout = sharded_along(self._result(number, leaves).dimension)
        return with_inner(self._inner_of(number, leaves), self._replicas, layout)

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
        if not arrays.has_place(leaf):
            continue
        if (placed := replicas.inner_placement(leaf, REPLICATED)) is not None:
            found[number] = placed
    return found
