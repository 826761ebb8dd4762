"""Sums over the replicas of what is summed already."""

from __future__ import annotations

from collections.abc import Iterator

from jaxstrategy.text._user_code import Line
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.checks._divergences import or_unknown
from jaxstrategy.tracing.replication._levels import Replication
from jaxstrategy.tracing.replication._site import Site


def double_reductions(step: TracedStep) -> Iterator[tuple[str, Line | None]]:
    """For each sum of the result of a reduction, a message and the line of the sum."""
    seen = set()
    for found in step.findings.collectives:
        before = found.reduced_before
        if before is None or _is_no_second_sum(found.site, before):
            continue
        first, again = step.began(before), found.site.line
        # One line sums a whole pytree, by an equation for each array or pack of arrays.
        if (first, again) in seen:
            continue
        seen.add((first, again))
        message = (
            f"`{step.name}` sums over the replicas what is the result of a reduction "
            "already, equal on all of them: the sum is that times their number.\n"
            f"  reduced first: {or_unknown(first)}\n"
            f"  summed again: {or_unknown(again)}\n"
            "Leave out one of them. If every replica is meant to count, reduce with "
            "'mean', or divide by `num_replicas_in_sync` before the sum."
        )
        yield message, again


def _is_no_second_sum(site: Site, before: Replication) -> bool:
    """Whether the sum at `site` of the reduction `before` is right for all we know.

    Differentiation makes sums of its own: the gradient of a sum is a sum. What they
    make of a loss is for its scale to decide, and that is where the user put it.
    """
    if site.is_transposed or (before.site is not None and before.site.is_transposed):
        return True
    # A mean; and the derivative of our 'min' and 'max', a weighted mean.
    return site.called("pmean", "_extreme_jvp") is not None
