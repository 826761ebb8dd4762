"""Several steps as one: a loop on the devices instead of one in Python."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from jaxstrategy.executors._batch_runs import runs
from jaxstrategy.executors._loop_signature import name_of, signature_of
from jaxstrategy.executors._step_loop import StepLoop
from jaxstrategy.executors._synchronizations import AbstractSynchronization, InEachStep
from jaxstrategy.tracing.functions import _code
from jaxstrategy.values._types import Function, PyTree


def several(
    fn: Function, synchronization: Callable[[], AbstractSynchronization] = InEachStep
) -> Function:
    """A function that makes one step of `fn` after the other, with a batch for each.

    Args:
      fn: the step, `fn(*going, batch, **same)`. It returns what it goes on with, and
        then anything else.
      synchronization: makes what the replicas have to do with each other in one call.

    Returns:
      A function `steps(*going, batches, **same)`. It returns what the last step went on
      with; of anything else the arrays of all steps, stacked `[step, ...]`.
    """

    @functools.wraps(fn)
    def steps(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if not args:
            raise TypeError(
                f"`{name_of(fn)}` was called without batches. Its last positional "
                "argument is the tuple of them: `many(state, (batch, next_batch))`."
            )
        *first, batches = args
        loop = StepLoop(fn, first, kwargs, synchronization())
        return loop.over(runs(name_of(fn), batches))

    if (signature := signature_of(fn)) is not None:
        steps.__dict__["__signature__"] = signature
    steps.__dict__["makes_several"] = True
    _code.define_at(steps, _code.place_of(fn))
    return steps


def number_of_steps(fn: Function, args: Sequence[PyTree]) -> int:
    """The number of steps that a call of `fn` makes."""
    return len(args[-1]) if getattr(fn, "makes_several", False) else 1
