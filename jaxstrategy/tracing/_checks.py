"""What is wrong with a step, found while it is traced.

Each check names the user's lines; none runs anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxstrategy import _source
from jaxstrategy._errors import (
    DivergentCollectiveError,
    DoubleReductionWarning,
    NotMirroredError,
)
from jaxstrategy._source import Line
from jaxstrategy.tracing._site import Site
from jaxstrategy.tracing._traced import TracedStep
from jaxstrategy.tracing.replication._state import Collective


def check(step: TracedStep, expect_mirrored: Any = None) -> None:
    """Raise if `step` would hang or breaks a promise; warn if it reduces twice.

    Args:
      step: what was traced.
      expect_mirrored: see `RunOptions`.

    Raises:
      DivergentCollectiveError: a varying value decides whether a collective is reached.
      NotMirroredError: a result that should be mirrored is not.
      ValueError: `expect_mirrored` does not fit the results.
    """
    for error in (*divergences(step), *broken_promises(step, expect_mirrored)):
        raise error
    for message, line in double_reductions(step):
        _source.warn(message, DoubleReductionWarning, line)


# Collectives that only some replicas reach.


def divergences(step: TracedStep) -> Iterator[DivergentCollectiveError]:
    """One for each collective that only some replicas may reach."""
    for found in step.findings.collectives:
        if found.decided_by is None:
            continue
        assert found.decided_at is not None
        line, decided = found.site.line, step.began(found.decided_by)
        what, control = _name(found), _control(found.decided_at)
        yield DivergentCollectiveError(
            f"Only some replicas of `{step.name}` would reach {what}, and wait for "
            f"ever for the others: it is inside a {control} whose predicate differs "
            f"between replicas.\n"
            f"  {what}: {_or_unknown(line)}\n"
            f"  the {control}: {_or_unknown(found.decided_at.line)}\n"
            f"  its predicate varies since: {step.why(found.decided_by)}\n"
            "Reduce the predicate, so that all replicas decide alike: "
            "`get_replica_context().all_reduce('max', predicate)`. Or move the "
            f"reduction out of the {control}, and choose with `jnp.where`.",
            collective_line=line and str(line),
            predicate_line=decided and str(decided),
        )


def _name(found: Collective) -> str:
    return "a `merge_call`" if found.is_merge else f"the `{found.site.primitive}`"


def _control(site: Site) -> str:
    if site.primitive == "while":
        return "`while_loop`"
    return "`switch`" if len(site.eqns[0].params["branches"]) > 2 else "`cond`"


def _or_unknown(line: Line | None) -> str:
    return "a line that JAX did not keep" if line is None else str(line)


# Sums of what is summed already.


def double_reductions(step: TracedStep) -> Iterator[tuple[str, Line | None]]:
    """For each sum of the result of a reduction, a message and the line of the sum."""
    seen = set()
    for found in step.findings.collectives:
        before = found.reduced_before
        if before is None or found.site.is_transposed:
            continue
        first, again = step.began(before), found.site.line
        if (first, again) in seen:
            continue
        seen.add((first, again))
        message = (
            f"`{step.name}` sums over the replicas what is the result of a reduction "
            "already, and so gets it once for each replica.\n"
            f"  reduced first: {_or_unknown(first)}\n"
            f"  summed again: {_or_unknown(again)}\n"
            "Leave out one of them. If every replica is meant to count, reduce with "
            "'mean', or divide by `num_replicas_in_sync` before the sum."
        )
        yield message, again


# Results that are not what the caller expects.


def broken_promises(step: TracedStep, expected: Any) -> Iterator[NotMirroredError]:
    """One for each result that is expected to be mirrored and varies."""
    if expected is None:
        return
    arrays = step.results.array_paths()
    is_expected = _expectation(step, expected)
    states = zip(arrays, step.outputs, step.findings.outputs, strict=True)
    for (position, keys), output, state in states:
        if state is None or not state.varies or not is_expected(position, keys, output):
            continue
        line, path = step.began(state), step.path(keys)
        yield NotMirroredError(
            f"{path} was expected to be mirrored, but may differ between replicas.\n"
            f"  it varies since: {step.why(state)}\n"
            "Something it is computed from was not reduced: use "
            "`get_replica_context().all_reduce('mean', ...)` on the way, usually on "
            "the gradients. If it may differ, take it out of `expect_mirrored`.",
            path=path.strip("`"),
            line=line and str(line),
        )


def _expectation(step: TracedStep, expected: Any) -> Callable[[int, Any, Any], bool]:
    """Whether the result with this position, path and type should be mirrored."""
    if callable(expected):
        return lambda position, keys, output: bool(
            expected(keys, jax.ShapeDtypeStruct(output.shape, output.dtype))
        )
    wanted = step.results.broadcast(expected, step.path(()))
    return lambda position, keys, output: wanted[position]
