"""The moment at which the replicas of a loop of steps exchange what they have."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias, cast, final

import jax
import jax.numpy as jnp

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import LOCAL_SCOPE, LocalSteps
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.reductions.reduction import HowReduced
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.variables.variable import Variable

# Arrays of the state, and others, which the loop returns.
Ends: TypeAlias = tuple[Sequence[jax.Array], Sequence[jax.Array]]


class AbstractSynchronization(abc.ABC):
    """What the replicas have to do with each other in a loop of several steps."""

    @abc.abstractmethod
    def step(self) -> contextlib.AbstractContextManager[object]:
        """A `with` block in which a step is traced."""

    @abc.abstractmethod
    def kept(self, rest: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """What the loop keeps of the arrays that a step returned beside its state."""

    @abc.abstractmethod
    def end(
        self,
        state: Sequence[jax.Array],
        same: Sequence[bool],
        rest: Sequence[jax.Array],
    ) -> Ends:
        """The state and the other arrays that the loop returns."""


@final
class InEachStep(AbstractSynchronization):
    """The steps reduce what they want to."""

    def step(self) -> contextlib.AbstractContextManager[object]:
        """Nothing to do."""
        return contextlib.nullcontext()

    def kept(self, rest: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """All as it is."""
        return rest

    def end(
        self,
        state: Sequence[jax.Array],
        same: Sequence[bool],
        rest: Sequence[jax.Array],
    ) -> Ends:
        """All as it is."""
        return state, rest


@final
class AfterTheLast(AbstractSynchronization):
    """Each replica is by itself until the last step, and then they take means."""

    def __init__(self, replica: ReplicaContext) -> None:
        self._replica = replica
        self._local = LocalSteps(replica.num_replicas_in_sync)
        self._how: list[HowReduced | None] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A `with` block whose reductions take the replica's own for all."""
        self._local.reduction.begin()
        with context.entered(local=self._local), jax.named_scope(LOCAL_SCOPE):
            yield

    def kept(self, rest: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Of what the step has reduced, what it was before."""
        pairs = [self._local.reduction.before(array) for array in rest]
        self._local.reduction.forget()
        self._how = [how for _, how in pairs]
        return [own for own, _ in pairs]

    def end(
        self,
        state: Sequence[jax.Array],
        same: Sequence[bool],
        rest: Sequence[jax.Array],
    ) -> Ends:
        """The means of floating-point arrays, and what the steps reduced, reduced."""
        variables = list(filter(_has_mean, self._local.assigned.values()))
        arrays = [*state, *rest, *(each.value() for each in variables)]
        changed = zip(state, same, strict=True)
        means = [_MEAN if _is_float(a) and not kept else None for a, kept in changed]
        found = self._reduced(arrays, [*means, *self._how, *(_MEAN for _ in variables)])
        first, second = len(state), len(state) + len(rest)
        # On this side a variable takes what it is given, whatever its aggregation.
        with context.entered(replica=None):
            for variable, mean in zip(variables, found[second:], strict=True):
                cast(Variable, variable).assign(mean)
        return found[:first], found[first:second]

    def _reduced(
        self, arrays: list[jax.Array], each: Sequence[HowReduced | None]
    ) -> list[jax.Array]:
        """Each of `arrays` reduced as is said of it, with None as it is."""
        found = list(arrays)
        for how in dict.fromkeys(filter(None, each)):
            places = [i for i, other in enumerate(each) if other == how]
            results = self._replica.all_reduce(
                how.op, [arrays[i] for i in places], how.options, groups=how.groups
            )
            for i, array in zip(places, results, strict=True):
                found[i] = array
        return found


_MEAN = HowReduced(ReduceOp.MEAN)


def _has_mean(variable: Handle) -> bool:
    return variable.copies_must_agree and _is_float(variable.value())


def _is_float(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def synchronization_after_the_last() -> AbstractSynchronization:
    """That of the replicas of the step which is traced; with one there is none."""
    replica = context.current().replica
    if not isinstance(replica, ReplicaContext) or replica.num_replicas_in_sync == 1:
        return InEachStep()
    return AfterTheLast(replica)
