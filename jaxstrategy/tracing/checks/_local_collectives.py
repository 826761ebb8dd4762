"""Collectives in steps that each replica takes by itself."""

from __future__ import annotations

from collections.abc import Iterator

from jaxstrategy._errors import ContextError
from jaxstrategy.contexts._local_steps import LOCAL_SCOPE
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.checks._divergences import name_of, or_unknown
from jaxstrategy.tracing.replication._site import Site


def local_collectives(step: TracedStep) -> Iterator[ContextError]:
    """One for each collective in local steps; what `all_reduce` does there is none."""
    for found in step.findings.collectives:
        if not found.is_merge and _is_local(found.site):
            what = name_of(found)
            yield ContextError(
                f"`{step.name}` communicates in local steps, where each replica is by "
                "itself.\n"
                f"  the `{what}`: {or_unknown(found.site.line)}\n"
                "Reduce with `get_replica_context().all_reduce(...)`, outside of "
                "`merge_call`: it takes the replica's own there (for BatchNorm: "
                "`jaxstrategy.flax.linen.BatchNorm`). Or make the steps together: "
                "`strategy.several(step)`."
            )


def _is_local(site: Site) -> bool:
    return any(LOCAL_SCOPE in str(eqn.source_info.name_stack) for eqn in site.eqns)
