"""A step of a strategy, as each replica takes it: `ReplicaStep`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import final

import jax

from jaxstrategy._src.reductions.packing import Overlap
from jaxstrategy._src.replicas.replica_placements import (
    SAME,
    SPLIT,
    Meaning,
)
from jaxstrategy._src.replicas.replicas import (
    Replicas,
)
from jaxstrategy._src.tracing import results
from jaxstrategy._src.tracing.constants import ProgramValue
from jaxstrategy._src.tracing.functions import rebinding
from jaxstrategy._src.tracing.nnx.object_calls import (
    takes_arrays,
)
from jaxstrategy._src.tracing.nnx.object_form import (
    is_changed_in_place,
)
from jaxstrategy._src.tracing.roles import Role, Signature
from jaxstrategy._src.tracing.trace import Trace, check_not_divided, trace
from jaxstrategy._src.tracing.translation import translated
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.variables.variable import Variable

# A `with` block for the step's own code, of the arguments of one replica.
Tracing = Callable[[Sequence[Leaf]], contextlib.AbstractContextManager[None]]


@final
@dataclasses.dataclass(frozen=True)
class StepEnvironment:
    """The surroundings of all steps of a strategy."""

    replicas: Replicas
    call: Callable[[Function, Sequence[PyTree], dict[str, PyTree]], PyTree]
    variables: Callable[[], Sequence[Variable]]
    overlap: Overlap | None = None


@final
class ReplicaStep:
    """A step for one structure of arguments; their shapes and dtypes are open."""

    def __init__(
        self,
        get_fn: Callable[[], Function | None],
        environment: StepEnvironment,
        signature: Signature,
        may_create: Callable[[], bool],
    ) -> None:
        self._get_fn = get_fn
        self._environment = environment
        self._may_create = may_create
        self.signature = signature
        self.replicas = environment.replicas
        self.overlap = environment.overlap
        self.roles = [role for role in signature.roles if role is not Role.STATIC]

    @property
    def is_alive(self) -> bool:
        """Whether there still is a function to trace."""
        return self._get_fn() is not None

    @property
    def fn(self) -> Function:
        """The function."""
        fn = self._get_fn()
        assert fn is not None, "the caller of a program holds its function"
        return fn

    @property
    def name(self) -> str:
        """Its name in messages and profiles."""
        return name_of(self.fn)

    @property
    def takes_arrays(self) -> bool:
        """Whether arrays stand for the objects that the user's function was given."""
        return takes_arrays(self.fn)

    def label(self, index: int) -> str:
        """The name of an argument in messages, by its place among the traced ones."""
        return self.signature.label(self.fn, self.signature.dynamic[index])

    @property
    def meanings(self) -> list[Meaning]:
        """The meaning of each argument that is traced."""
        return [SPLIT if role is Role.PER_REPLICA else SAME for role in self.roles]

    def same(self, leaves: Sequence[Leaf]) -> dict[int, ProgramValue]:
        """The leaves that are no replica's own, by their place."""
        return {
            index: ProgramValue(leaves[index], label)
            for index, label in self._labels.items()
        }

    @functools.cached_property
    def _labels(self) -> dict[int, str]:
        return {
            index: self.label(index)
            for index, role in enumerate(self.roles)
            if role is Role.SAME
        }

    def trace(self, leaves: Sequence[Leaf], tracing: Sequence[Tracing]) -> Trace:
        """Traces the function once, for arguments of these types."""
        check_not_divided(self.name)
        try:
            return trace(
                functools.partial(self._run, tracing),
                leaves,
                self.meanings,
                self.replicas,
                self._environment.variables,
                self._may_create(),
                None if self.overlap is None else self.overlap.packing,
            )
        except rebinding.Leak as leak:
            # Where the value was made JAX says only when the trace has ended.
            raise leak.explained() from None

    def _run(
        self, tracing: Sequence[Tracing], locals_: Sequence[Leaf]
    ) -> tuple[list[jax.Array], results.Results]:
        own = [
            jax.lax.squeeze(leaf, (0,)) if role is Role.PER_REPLICA else leaf
            for leaf, role in zip(locals_, self.roles, strict=True)
        ]
        fn = self.fn
        args, kwargs = self.signature.rebuild(own)
        try:
            with contextlib.ExitStack() as blocks:
                for block in (*tracing, self._without_leaks):
                    blocks.enter_context(block(own))
                returned = self._environment.call(fn, args, kwargs)
        except rebinding.Leak:
            raise
        except Exception as error:
            if (told := translated(error, self.name, self.replicas)) is None:
                raise
            raise told from error
        return results.take_apart(returned, self.signature.statics, self.name)

    def _without_leaks(
        self, own: Sequence[Leaf]
    ) -> contextlib.AbstractContextManager[None]:
        if self.takes_arrays:  # it looks for leaks itself, where its objects are
            return contextlib.nullcontext()
        statics = [
            (self.signature.label(self.fn, index).strip("`"), value)
            for index, value in self.signature.with_statics()
        ]
        return rebinding.refused(self.fn, self.name, is_changed_in_place, statics)


def name_of(fn: Function) -> str:
    """The name of a step in messages and profiles."""
    return getattr(fn, "__name__", type(fn).__name__)
