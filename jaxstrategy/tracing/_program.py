"""One step compiled for all replicas of a strategy: `Program`.

The step is traced once, as one replica sees it. The replication analysis then says
which results are equal on all replicas, and the same trace is compiled with those as
replicated arrays and the others split over the replicas. Everything Python has to
decide is decided when a `Program` is made or traced, so that a call is little more than
the call of the jitted function.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, final

import jax

from jaxstrategy.tracing import _many
from jaxstrategy.tracing._executable import Executable, Handover, NotTraced, jitted
from jaxstrategy.tracing._jaxpr_types import Leaf
from jaxstrategy.tracing._replica_step import ReplicaStep
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.functions import _callbacks
from jaxstrategy.tracing.stages._placement import Placement
from jaxstrategy.tracing.stages._stage import Stage, overridden
from jaxstrategy.tracing.stages._variables import VariableArguments
from jaxstrategy.values._types import PyTree
from jaxstrategy.variables import _access


@final
class Program:
    """A step for one structure of arguments; shapes and dtypes are open.

    Args:
      step: the step.
      stages: what is done for it besides.
    """

    def __init__(self, step: ReplicaStep, stages: Sequence[Stage]) -> None:
        self._step = step
        self._stages = stages
        self._donated = frozenset[int]().union(*(stage.donated for stage in stages))
        self._placement = Placement(step, self._donated)
        forget = _callbacks.of(self, Program._compile)
        self._variables = VariableArguments(step, forget)
        # One thread traces, so that one trace tells which variables there are.
        self._one_tracer = threading.RLock()
        self._handover = Handover()
        self._has_plain = False
        # Whether the last call had to move an array: then the next one probably must.
        self._must_place = False
        # The jitted function for arguments of these types. One function for all types
        # would do; but where one has raised `NotTraced`, JAX calls it for such types by
        # way of Python ever after, at ten times the cost (0.10 and 0.12).
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._compile()

    def __call__(self, leaves: Sequence[Leaf]) -> PyTree:
        """The step's results for these leaves, which are live arrays."""
        if self._must_place or not self._placement.is_right(leaves):
            return self.place_and_call(leaves)
        try:
            executable = self._executable
            if executable.is_plain:  # the usual case, kept short
                return executable(leaves)
            return self._dispatch(leaves)
        except NotTraced:
            pass  # and out of the block, or this were the context of later errors
        except ValueError:
            # It may be JAX's, about an array that is split in another way. Such an
            # array is moved, or refused with our advice.
            if not _differ(self._placement.placed(leaves), leaves):
                raise
        return self.place_and_call(leaves)

    def place_and_call(self, leaves: Sequence[Leaf]) -> PyTree:
        """The same, for leaves of any kind and in any place."""
        placed = self._placement.placed(leaves)
        moved = _differ(placed, leaves)
        try:
            return self._call_placed(placed)
        finally:
            self._must_place = moved or self._variables.by_reference

    def lower(self, leaves: Sequence[Leaf]) -> Any:
        """JAX's lowered form of the program; `leaves` may be types of arrays."""
        types = [
            jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type
            )
            for leaf, sharding in zip(
                jax.eval_shape(list, leaves), self._placement.shardings, strict=True
            )
        ]
        self._placement.check_types(types)
        with self._one_tracer, self._handover.of(self._trace(types)):
            return self._executable.lower(types)

    def _call_placed(self, leaves: Sequence[Leaf]) -> PyTree:
        types = tuple(map(jax.typeof, leaves))
        with self._one_tracer:
            # Another thread may have traced it meanwhile.
            if (compiled := self._compiled.get(types)) is not None:
                self._use(compiled)
                try:
                    return self._dispatch(leaves)
                except NotTraced:
                    pass  # JAX's own settings are others than they were
            elif self._compiled:
                self._use(self._jitted())
            with self._handover.of(self._trace(leaves)):
                results = self._dispatch(leaves)
            self._compiled[types] = self._executable.compiled
            return results

    def _dispatch(self, leaves: Sequence[Leaf]) -> PyTree:
        """The results for leaves that lie where they belong."""
        if not self._variables.are_used:
            return self._valid_executable()(leaves)
        self._variables.check_outside()
        # Calling a program gives it the memory of the variables and takes other memory
        # back; two threads at once would end the process (JAX 0.10 and 0.12).
        with _access.one_at_a_time:
            return self._valid_executable()(leaves)

    def _valid_executable(self) -> Executable:
        # Both are asked: each takes note of what has changed.
        if self._executable.is_outdated() | self._variables.settle():
            self._compile()
        return self._executable

    def _trace(self, leaves: Sequence[Leaf]) -> TracedStep:
        """Traces the step for arguments like these, and lets all stages know."""
        trace = self._step.trace(leaves, overridden(self._stages, "tracing"))
        step = TracedStep(self._step, trace, self._donated)
        _many.tell(step.name, step.jaxpr)
        self._placement.check_captured(step)
        for stage in self._stages:
            stage.traced(step)
        self._has_plain = self._has_plain or step.results.has_plain
        if self._variables.traced(step):
            self._compile()
        else:
            self._use(self._executable.compiled)
        return step

    def _compile(self) -> None:
        """Forgets what was compiled; JAX compiles anew when it is called."""
        self._compiled.clear()
        self._use(self._jitted())

    def _jitted(self) -> Any:
        """What JAX compiles when it is called."""
        carried = self._variables.carried
        shardings: Any = (*self._placement.shardings, *carried.shardings)
        lent = (len(self._step.roles) + i for i in carried.lent)
        # A call that is refused afterwards leaves arguments and variables as they were.
        is_refused_late = bool(overridden(self._stages, "check"))
        taken = () if is_refused_late else (*sorted(self._donated), *lent)
        # JAX has no rule for references inside a jitted function with shardings inside
        # another jitted function (0.10 and 0.12). So each call checks its arguments.
        options = {} if self._variables.by_reference else {"in_shardings": shardings}
        return jitted(
            self._step.name,
            self._handover,
            carried,
            self._stages,
            donate_argnums=taken,
            **options,
        )

    def _use(self, compiled: Any) -> None:
        """Lets later calls be of this, and of the stages that are active now."""
        self._executable = Executable(
            compiled, self._variables, self._stages, self._has_plain
        )


def _differ(new: Sequence[Leaf], old: Sequence[Leaf]) -> bool:
    return any(a is not b for a, b in zip(new, old, strict=True))
