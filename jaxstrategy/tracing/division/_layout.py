"""The arrays of a step of which each replica keeps a part: `Layout`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import final

import jax
from jax.ref import AbstractRef
from jax.sharding import NamedSharding

from jaxstrategy.replicas._inner_placement import (
    WHOLE,
    InnerSpec,
    inner_dimensions,
    inner_spec,
    with_inner,
)
from jaxstrategy.replicas._replicas import lies_along
from jaxstrategy.replicas._state_sharding import LeafSharding
from jaxstrategy.tracing._jaxpr_types import ArrayType, Var
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.division._cut import Cut
from jaxstrategy.tracing.division._replaced import replaced_arguments
from jaxstrategy.values import _arrays
from jaxstrategy.values._types import Leaf
from jaxstrategy.variables._variable import Variable


@final
@dataclasses.dataclass(frozen=True)
class DividedLeaf:
    """An array that is equal on all replicas, and how it lies.

    Attributes:
      get_label: returns `label`, which takes long where there are many arguments.
      type: shape and dtype.
      sharding: the dimension, or why it is whole.
      inner: how it lies over inner axes.
    """

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
    """The way in which the arrays of a step lie that are equal on all replicas.

    Attributes:
      inputs: the dimension of each divided input, by its variable.
      results: how each result lies; those that differ between replicas are whole.
      placements: the same as shardings; None of results that XLA may place.
      inside: how the devices of a replica divide each result.
      divisible: for each result that stays whole, as what it takes the place of, the
        dimension along which it could be divided.
      arguments: for each argument that a result takes the place of, how it is to lie.
      leaves: all arguments and variables, by their input.
    """

    inputs: Mapping[Var, int]
    results: Sequence[LeafSharding]
    placements: Sequence[NamedSharding | None]
    inside: Sequence[InnerSpec]
    divisible: Sequence[int | None]
    arguments: Mapping[int, int | None]
    leaves: Mapping[Var, DividedLeaf]

    @property
    def outputs(self) -> list[int | None]:
        """The dimension along which each result is divided, None of whole ones."""
        return [result.dimension for result in self.results]


@final
class Layouts:
    """The layout of one step.

    Args:
      step: what was traced.
      invars: the inputs of its flat form, the first of them those of `step.jaxpr`.
      cut: which equations read what.
      given: the arguments, on all replicas.
    """

    def __init__(
        self,
        step: TracedStep,
        invars: Sequence[Var],
        cut: Cut,
        given: Sequence[Leaf],
    ) -> None:
        self._step = step
        self._replicas = step.trace.replicas
        self._cut = cut
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
            [self._inside(n, leaves) for n in range(len(step.outputs))],
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
        if chosen.shard == "optimizer" and var in self._cut.read_by_users:
            return LeafSharding(None, "each replica's own computation reads it")
        if index in self._state:
            return sharding
        # It may be anything: a table, or what an evaluation is given. It stays as it
        # lies, or each call would move it.
        leaf = self._given[index]
        if _arrays.is_placed(leaf) and self._replicas.dimension_of(leaf) is None:
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
        return with_inner(self._inside(number, leaves), self._replicas, lies)

    def _inside(self, number: int, leaves: Mapping[int, DividedLeaf]) -> InnerSpec:
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
