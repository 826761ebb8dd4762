"""A step compiled for all replicas of a strategy: `Executable`.

`jax.jit` keeps one executable for each combination of shapes and dtypes, and calls the
Python function that it was given when it has none. That function has no step to trace,
only a trace to evaluate, which was made before. Where there is none it says so with
`NotTraced`, the only way out of `jax.jit` there is.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax

from jaxstrategy.tracing import _results
from jaxstrategy.tracing._jaxpr_types import Leaf
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.stages._carried import Carried
from jaxstrategy.tracing.stages._finite import Finite
from jaxstrategy.tracing.stages._stage import Stage, overridden
from jaxstrategy.tracing.stages._variables import VariableArguments
from jaxstrategy.values._types import PyTree
from jaxstrategy.variables import _cell


class NotTraced(Exception):
    """JAX has no executable for the arguments of a call, and there is no trace."""


class Handover:
    """The trace that a step is about to be compiled from, of the thread that made it.

    Other threads may call the step at the same time, with other shapes.
    """

    def __init__(self) -> None:
        self._own = threading.local()

    @contextlib.contextmanager
    def of(self, step: TracedStep) -> Iterator[None]:
        """A `with` block in which `step` may be compiled."""
        self._own.step = step
        try:
            yield
        finally:
            self._own.step = None

    def take(self) -> TracedStep:
        """The step that was traced.

        Raises:
          NotTraced: there is none.
        """
        step = getattr(self._own, "step", None)
        if step is None:
            raise NotTraced
        return step


@final
class Executable:
    """What a call of a step does; does not change, so that threads may share it.

    Args:
      compiled: the jitted function, of the arguments and the variables' values. It
        returns the results, the outputs that stages have added, and the new values.
      variables: which the step is given, or reaches by references.
      stages: what is done before and after.
      has_plain: whether a leaf of the results is not an array.

    Attributes:
      compiled: as given.
      is_plain: whether it can be called without asking whether it is right still.
    """

    __slots__ = (
        "compiled",
        "is_plain",
        "_after",
        "_before",
        "_carried",
        "_checks",
        "_has_plain",
        "_has_variables",
        "_in_references",
        "_outdated",
    )

    def __init__(
        self,
        compiled: Any,
        variables: VariableArguments,
        stages: Sequence[Stage],
        has_plain: bool,
    ) -> None:
        active = [stage for stage in stages if stage.is_active]
        self.compiled = compiled
        self._carried = variables.carried
        self._has_variables = not self._carried.is_empty
        self._in_references = variables.in_references
        self._before = overridden(active, "before")
        self._checks = _of_outputs(active, "check")
        self._after = _of_outputs(active, "after")
        self._outdated = overridden(active, "is_outdated")
        self._has_plain = has_plain
        self.is_plain = not (variables.are_used or self._outdated)

    def __call__(self, leaves: Sequence[Leaf]) -> PyTree:
        """The step's results for leaves that lie where they belong.

        Raises:
          NotTraced: there is no trace for arguments like these.
        """
        for before in self._before:
            before(leaves)
        inputs = leaves
        if self._has_variables:
            inputs = [*leaves, *self._carried.values()]
        before_call = self._in_references() if self._checks else ()
        results, outputs, kept = self.compiled(*inputs)
        if self._checks:
            self._check(outputs, before_call)
        if kept:
            self._carried.store(kept)
        for place, after in self._after:
            after(outputs[place])
        return _results.unwrap_plain(results) if self._has_plain else results

    def _check(
        self, outputs: Sequence[jax.Array], before: Sequence[tuple[Any, jax.Array]]
    ) -> None:
        try:
            for place, check in self._checks:
                check(outputs[place])
        except Exception:
            for reference, value in before:
                reference[...] = value
            raise

    def is_outdated(self) -> bool:
        """Whether a stage says that what was compiled is of no use any more."""
        # All are asked: each takes note of what has changed.
        return any([is_outdated() for is_outdated in self._outdated])

    def lower(self, types: Sequence[jax.ShapeDtypeStruct]) -> Any:
        """JAX's lowered form for arguments of these types."""
        return self.compiled.lower(*types, *self._carried.values())


def _of_outputs(
    active: Sequence[Stage], method: str
) -> list[tuple[int, Callable[[jax.Array], None]]]:
    """The method of each stage that overrides it, with the place of its output."""
    adding = [stage for stage in active if type(stage).within is not Stage.within]
    return [
        (place, found)
        for place, stage in enumerate(adding)
        for found in overridden([stage], method)
    ]


def jitted(
    name: str,
    handover: Handover,
    carried: Carried,
    stages: Sequence[Stage],
    **options: Any,
) -> Any:
    """What `Executable` calls.

    Args:
      name: of the step, which profiles and HLO dumps show.
      handover: where the trace is that it is compiled from.
      carried: the variables.
      stages: what they add is computed as well.
      options: of `jax.jit`.
    """

    def program(*inputs: Any) -> Any:
        step = handover.take()
        if not _cell.is_traced() and _looks_for_nans():
            return _debugged(step, inputs, carried, stages)
        return _evaluated(step, inputs, carried, stages)

    program.__name__ = program.__qualname__ = name
    return jax.jit(program, **options)


def _evaluated(
    step: TracedStep, inputs: Sequence[Any], carried: Carried, stages: Sequence[Stage]
) -> tuple[PyTree, list[Any], list[Any]]:
    """The results of a step that was traced, the stages' outputs, and the variables."""
    count = len(step.signature.dynamic)
    leaves, values = inputs[:count], inputs[count:]
    references = carried.references(values)

    def within(evaluate: Any) -> Any:
        # From the last stage outwards, so that their outputs stand in their order.
        for add in reversed(overridden([s for s in stages if s.is_active], "within")):
            evaluate = add(step, evaluate)
        return evaluate

    arrays, outputs = step.trace.evaluate(leaves, references, within)
    kept = [jax.freeze(reference) for reference in references.values()]
    return step.results.rebuild(arrays), outputs, kept


def _looks_for_nans() -> bool:
    return bool(jax.config.jax_debug_nans or jax.config.jax_debug_infs)


def _debugged(
    step: TracedStep, inputs: Sequence[Any], carried: Carried, stages: Sequence[Stage]
) -> Any:
    """The results for what has led to a NaN, which `jax_debug_nans` looks for.

    JAX calls a function again then, operation by operation. Inside a `shard_map` it
    would do so for ever, and it knows nothing of replicas.

    Raises:
      NonFiniteError: that the step makes.
    """
    finite = Finite(step.replica_step, bool(jax.config.jax_debug_infs))
    others = [stage for stage in stages if not isinstance(stage, Finite)]
    with jax.debug_nans(False), jax.debug_infs(False):
        evaluated = functools.partial(_evaluated, step)
        compiled: Callable[..., Any] = jax.jit(
            lambda *inputs: evaluated(inputs, carried, [*others, finite])
        )
        returned = compiled(*inputs)
        finite.check(returned[1][-1])
    return returned
