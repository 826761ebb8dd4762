"""The shardings of arguments and results, over replicas and devices of each."""

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
from jaxstrategy._src.tracing.checks.varying_results import updated_arguments
from jaxstrategy._src.tracing.jaxprs.visit import ArrayType, KeyPath, Var
from jaxstrategy._src.tracing.partition.partition import Partition
from jaxstrategy._src.tracing.traced_step import TracedStep
from jaxstrategy._src.values import arrays
from jaxstrategy._src.values.arrays import Leaf
from jaxstrategy._src.variables.variable import Variable


# A sharding changes no number, so a guess will do: `updated_arguments`, of which the
# checks of a step are sure, and then the argument of the same type whose path is most
# like that of the result.
def similar_arguments(step: TracedStep) -> dict[int, int]:
    """For each array result the argument whose sharding it gets.

    Only for those that are equal on all replicas.
    """
    updated = updated_arguments(step)
    objects = {step.label(i): i for i in step.same_arguments}
    alike: dict[tuple[object, ...], list[int]] = {}
    for argument in step.same_arguments:
        alike.setdefault(_kind(step.type_of(argument)), []).append(argument)
    found: dict[int, int] = {}
    for number, (position, path) in enumerate(step.results.array_paths()):
        if step.trace.varies[number]:
            continue
        candidates = alike.get(_kind(step.outputs[number]), ())
        argument = updated.get(position)
        if step.is_of_object(path):  # the new array of an argument of that name
            argument = objects.get(step.path(path))
        elif argument is None and candidates:
            argument = _most_similar(step, path, candidates)
        if argument is not None:
            found[number] = argument
    return found


def _most_similar(step: TracedStep, path: KeyPath, candidates: Sequence[int]) -> int:
    """The argument whose path is most similar to that of a result."""

    def similarity(argument: int) -> tuple[int, int]:
        other = step.key_path_of(argument)
        return _common_suffix(path, other), -abs(len(path) - len(other))

    return max(candidates, key=similarity)


def _kind(aval: ArrayType) -> tuple[object, ...]:
    return aval.shape, aval.dtype


def _common_suffix(one: KeyPath, other: KeyPath) -> int:
    """The number of keys that two paths have in common at their ends."""
    count = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        count += 1
    return count


@final
@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """The sharding of an argument or variable that is equal on all replicas."""

    get_label: Callable[[], str]
    type: ArrayType
    sharding: LeafSharding
    inner: InnerSpec = WHOLE

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.get_label()


@final
@dataclasses.dataclass(frozen=True)
class Layout:
    """The shardings of arrays of a step that are equal on all replicas."""

    inputs: Mapping[Var, int]  # sharded inputs, with their dimension
    results: Sequence[LeafSharding]
    shardings: Sequence[NamedSharding | None]  # of results
    inner: Sequence[InnerSpec]  # of results
    shardable: Sequence[int | None]  # a dimension for replicated results
    arguments: Mapping[int, int | None]  # those that a result replaces
    leaves: Mapping[Var, LeafLayout]

    @property
    def outputs(self) -> list[int | None]:
        """The dimension along which each result is sharded; None: replicated."""
        return [result.dimension for result in self.results]


@final
class LayoutChoice:
    """Chooses the layout of a step."""

    def __init__(
        self,
        step: TracedStep,
        invars: Sequence[Var],
        partition: Partition,
        arguments: Sequence[Leaf],
    ) -> None:
        self._step = step
        self._replicas = step.trace.replicas
        self._partition = partition
        self._arguments = arguments
        self._similar = similar_arguments(step)
        self._state = frozenset(self._similar.values())
        inputs = zip(step.trace.inputs, invars, strict=False)
        self._vars = {index: var for index, var in inputs if index is not None}

    def layout(self) -> Layout:
        step = self._step
        leaves = {i: self._argument(i) for i in step.same_arguments}
        first = len(self._arguments)
        for number, variable in enumerate(step.trace.variables):
            if variable in step.trace.used and variable.copies_must_agree:
                leaves[first + number] = self._variable(variable)
        chosen = {index: leaf.sharding.dimension for index, leaf in leaves.items()}
        inputs = {self._vars[i]: d for i, d in chosen.items() if d is not None}
        numbers = range(len(step.outputs))
        return Layout(
            # References are replicated while the replicas use them.
            {v: d for v, d in inputs.items() if not isinstance(v.aval, AbstractRef)},
            [self._result(n, leaves) for n in numbers],
            [self._sharding(n, leaves) for n in numbers],
            [self._inner_of(n, leaves) for n in numbers],
            [self._shardable(n, chosen) for n in numbers],
            {i: chosen[i] for i in self._state},
            {self._vars[index]: leaf for index, leaf in leaves.items()},
        )

    def _argument(self, index: int) -> LeafLayout:
        step, var = self._step, self._vars[index]
        aval = step.type_of(index)
        leaf = self._arguments[index]
        taken = inner_dimensions(leaf, self._replicas)
        sharding = self._replicas.division(step.path_of(index), aval, taken)
        if not sharding.is_whole:
            sharding = self._unless_read(sharding, index, var)
        label = functools.partial(step.label, index)
        return LeafLayout(label, aval, sharding, inner_spec(leaf, self._replicas))

    def _unless_read(
        self, sharding: LeafSharding, index: int, var: Var
    ) -> LeafSharding:
        chosen = self._replicas.state_sharding
        assert chosen is not None, "or nothing is divided"
        if chosen.shard == "optimizer" and var in self._partition.read_by_users:
            return LeafSharding(None, "each replica's own computation reads it")
        if index in self._state:
            return sharding
        # No state that a step updates: keep its sharding, or each call would move it.
        leaf = self._arguments[index]
        if arrays.is_placed(leaf) and self._replicas.dimension_of(leaf) is None:
            return LeafSharding(None, "it was given whole, and no result replaces it")
        return sharding

    def _variable(self, variable: Variable) -> LeafLayout:
        aval = jax.ShapeDtypeStruct(variable.cell.shape, variable.dtype)
        name = f"variable {variable.name!r}"
        inner = inner_spec(variable, self._replicas)
        return LeafLayout(lambda: name, aval, variable.division, inner)

    def _result(self, number: int, leaves: Mapping[int, LeafLayout]) -> LeafSharding:
        if self._step.trace.varies[number]:
            return LeafSharding(None, "it differs between replicas")
        argument = self._similar.get(number)
        if argument is None:
            return LeafSharding(None, "no argument is like it")
        return leaves[argument].sharding

    def _sharding(
        self, number: int, leaves: Mapping[int, LeafLayout]
    ) -> NamedSharding | None:
        if self._replicas.inner_axes and number not in self._similar:
            return None
        layout = sharded_along(self._result(number, leaves).dimension)
        return with_inner(self._inner_of(number, leaves), self._replicas, layout)

    def _inner_of(self, number: int, leaves: Mapping[int, LeafLayout]) -> InnerSpec:
        argument = self._similar.get(number)
        return WHOLE if argument is None else leaves[argument].inner

    def _shardable(self, number: int, chosen: Mapping[int, int | None]) -> int | None:
        argument = self._similar.get(number)
        if argument is None or chosen[argument] is not None:
            return None
        step = self._step
        aval = step.type_of(argument)
        taken = inner_dimensions(self._arguments[argument], self._replicas)
        return self._replicas.division(step.path_of(argument), aval, taken).dimension


def output_shardings(
    step: TracedStep, leaves: Sequence[Leaf]
) -> dict[int, NamedSharding]:
    """For each result that is similar to an argument the argument's sharding."""
    replicas = step.trace.replicas
    shardings: dict[int, NamedSharding] = {}
    for number, argument in similar_arguments(step).items():
        leaf = leaves[argument]
        if arrays.has_place(leaf) and (
            sharding := replicas.inner_placement(leaf, REPLICATED)
        ):
            shardings[number] = sharding
    return shardings
