"""One call of a step that runs eagerly, from arguments to results: `EagerCall`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import final

from jaxstrategy._errors import PlacementError
from jaxstrategy._options import RunOptions
from jaxstrategy.executors.replica_threads import _versions_of_replicas
from jaxstrategy.executors.replica_threads._eager_errors import eagerly_translated
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.tracing import _roles
from jaxstrategy.tracing._replica_step import ReplicaStep, StepEnvironment, name_of
from jaxstrategy.tracing._roles import Role
from jaxstrategy.tracing.functions import _leaks, _lending
from jaxstrategy.tracing.nnx._adapter import (
    AttributeChange,
    call_of,
    is_changed_in_place,
    options_of,
    step_of_arrays,
)
from jaxstrategy.tracing.stages._mask_arguments import MaskArguments
from jaxstrategy.tracing.stages._placement import Placement
from jaxstrategy.values._types import Function, Leaf, PyTree


@final
class EagerCall:
    """A call of a step, whose arguments lie where those of a compiled one would.

    Args:
      fn: the step.
      args: positional arguments.
      kwargs: keyword arguments.
      options: how it would be compiled.
      environment: of the strategy's steps.

    Attributes:
      fn: as given.
      name: of it, for messages.
      options: as given.
      leaves: its arrays, those of objects included.
    """

    def __init__(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        options: RunOptions,
        environment: StepEnvironment,
    ) -> None:
        self.fn = fn
        self.name = name_of(fn)
        self.options = options
        self._replicas = environment.replicas
        self._changes: list[AttributeChange] = []
        found = _lending.references(fn, is_changed_in_place)
        try:
            self._begin(args, kwargs, {**found.objects, **found.arrays}, environment)
        except PlacementError:
            if not found.arrays:
                raise
            # A captured array may lie where no argument may: then it is a constant.
            self._begin(args, kwargs, found.objects, environment)

    def _begin(
        self,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        captured: dict[str, object],
        environment: StepEnvironment,
    ) -> None:
        call = self._call = call_of(args, kwargs, captured)
        self._step_fn = self.fn
        given: tuple[Sequence[PyTree], dict[str, PyTree]] = args, kwargs
        if call is not None:
            form = None if call.objects is None else call.objects.form
            self._step_fn = step_of_arrays(lambda: self.fn, form, call.captured)
            given = call.args, call.kwargs
        leaves, self._signature = _roles.take_apart(self._step_fn, *given)
        step = ReplicaStep(
            lambda: self._step_fn, environment, self._signature, lambda: False
        )
        self._roles = step.roles
        self._masks = MaskArguments(step, self.options)
        self.leaves = leaves
        self._placed = Placement(step, frozenset()).placed(leaves)

    @property
    def has_objects(self) -> bool:
        """Whether new arrays of objects stand behind the results."""
        return self._call is not None

    @property
    def statics(self) -> tuple[Leaf, ...]:
        """The static arguments."""
        return self._signature.statics

    @property
    def expected(self) -> PyTree:
        """The results that should be mirrored, as `RunOptions` says it."""
        options = options_of(self.options) if self.has_objects else self.options
        return options.expect_mirrored

    @property
    def per_replica(self) -> list[int]:
        """The places of leaves of which each replica has its own version."""
        roles = enumerate(self._roles)
        return [i for i, role in roles if role is Role.PER_REPLICA]

    def columns(self, replicas: Replicas) -> list[list[Leaf]]:
        """For each leaf what each replica of this process has of it."""
        return [
            _versions_of_replicas.versions(leaf, replicas)
            if role is Role.PER_REPLICA
            else _versions_of_replicas.copies(leaf, replicas)
            for leaf, role in zip(self._placed, self._roles, strict=True)
        ]

    def masked(self, own: Sequence[Leaf]) -> contextlib.AbstractContextManager[None]:
        """A `with` block in which a replica with these leaves may ask for masks."""
        return self._masks.tracing(own)

    def check_masks(self) -> None:
        """Warns if rows that only fill up the batch have counted."""
        if self._masks.is_active:
            self._masks.before(self.leaves)

    def of_replica(self, own: Sequence[Leaf]) -> PyTree:
        """The function, called as one replica with these leaves."""
        args, kwargs = self._signature.rebuild(own)
        try:
            return self._alike(self._step_fn(*args, **kwargs))
        except _leaks.Leak as leak:
            raise leak.explained() from None
        except Exception as error:
            told = eagerly_translated(error, self.name, self._replicas, self.options)
            if told is None:
                raise
            raise told from error

    def _alike(self, returned: PyTree) -> PyTree:
        """`returned`, in which equal changes of objects are the first replica's.

        JAX compares them by identity, as parts of the structure.
        """
        if self._call is None:
            return returned
        results, parts = returned
        return results, [
            dataclasses.replace(part, changes=tuple(map(self._known, part.changes)))
            for part in parts
        ]

    def _known(self, change: AttributeChange) -> AttributeChange:
        for other in self._changes:
            is_there = (other.path, other.name) == (change.path, change.name)
            if is_there and (
                other.value is change.value or other.value == change.value
            ):
                return other
        self._changes.append(change)
        return change

    def finish(self, found: PyTree) -> PyTree:
        """The results; objects then hold their new arrays."""
        return found if self._call is None else self._call.finish(found)
