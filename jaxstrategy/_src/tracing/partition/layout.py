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
from jaxstrategy._src.tracing.jaxprs import ArrayType, KeyPath, Var
from jaxstrategy._src.tracing.partition.partition import Partition
from jaxstrategy._src.tracing.traced_step import TracedStep
from jaxstrategy._src.values import arrays
from jaxstrategy._src.values.arrays import Leaf


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
        if step.varies[number]:
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


def layout_of(
    step: TracedStep,
    invars: Sequence[Var],
    partition: Partition,
    arguments: Sequence[Leaf],
) -> Layout:
    """Chooses the layout of a step."""
    replicas = step.replicas
    similar = similar_arguments(step)
    state = frozenset(similar.values())
    vars_ = {index: invars[number] for index, number in step.input_of.items()}

    def division(index: int) -> LeafSharding:
        taken = inner_dimensions(arguments[index], replicas)
        return replicas.division(step.path_of(index), step.type_of(index), taken)

    def sharding_of(index: int) -> LeafSharding:
        found, leaf = division(index), arguments[index]
        if found.is_whole:
            return found
        assert replicas.state_sharding is not None, "or nothing is divided"
        is_read = vars_[index] in partition.read_by_users
        if replicas.state_sharding.shard == "optimizer" and is_read:
            return LeafSharding(None, "each replica's own computation reads it")
        # What no result replaces keeps its sharding, or each call would move it.
        is_placed = arrays.is_placed(leaf) and replicas.dimension_of(leaf) is None
        if index not in state and is_placed:
            return LeafSharding(None, "it was given whole, and no result replaces it")
        return found

    leaves: dict[int, LeafLayout] = {}
    for index in step.same_arguments:
        label = functools.partial(step.label, index)
        inner = inner_spec(arguments[index], replicas)
        kind = step.type_of(index)
        leaves[index] = LeafLayout(label, kind, sharding_of(index), inner)
    by_var = {vars_[index]: leaf for index, leaf in leaves.items()}
    for number, variable in step.used_inputs.items():
        if variable.copies_must_agree:
            aval = jax.ShapeDtypeStruct(variable.cell.shape, variable.dtype)
            label = functools.partial("variable {!r}".format, variable.name)
            inner = inner_spec(variable, replicas)
            by_var[invars[number]] = LeafLayout(label, aval, variable.division, inner)
    results = [
        leaves[similar[number]].sharding
        if number in similar
        else LeafSharding(None, _UNLIKE[step.varies[number]])
        for number in range(len(step.outputs))
    ]
    inner = [
        leaves[similar[number]].inner if number in similar else WHOLE
        for number in range(len(step.outputs))
    ]
    shardings = [
        None
        if replicas.inner_axes and number not in similar
        else with_inner(each, replicas, sharded_along(result.dimension))
        for number, (result, each) in enumerate(zip(results, inner, strict=True))
    ]
    shardable = [
        division(similar[number]).dimension
        if number in similar and result.is_whole
        else None
        for number, result in enumerate(results)
    ]
    # References are replicated while the replicas use them.
    inputs = {
        var: dimension
        for var, leaf in by_var.items()
        if (dimension := leaf.sharding.dimension) is not None
        and not isinstance(var.aval, AbstractRef)
    }
    return Layout(
        inputs,
        results,
        shardings,
        inner,
        shardable,
        {index: leaves[index].sharding.dimension for index in state},
        by_var,
    )


_UNLIKE = {True: "it differs between replicas", False: "no argument is like it"}


def output_shardings(
    step: TracedStep, leaves: Sequence[Leaf]
) -> dict[int, NamedSharding]:
    """For each result that is similar to an argument the argument's sharding."""
    replicas = step.replicas
    shardings: dict[int, NamedSharding] = {}
    for number, argument in similar_arguments(step).items():
        leaf = leaves[argument]
        if arrays.has_place(leaf) and (
            sharding := replicas.inner_placement(leaf, REPLICATED)
        ):
            shardings[number] = sharding
    return shardings
