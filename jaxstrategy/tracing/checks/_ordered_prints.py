"""Prints of several devices that cannot be in order."""

from __future__ import annotations

from collections.abc import Iterator

from jaxstrategy.tracing._jaxpr_types import Equation
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing.checks._divergences import or_unknown
from jaxstrategy.tracing.replication._jaxprs import all_eqns
from jaxstrategy.tracing.replication._site import Site

_NAMES = {"debug_print": "jax.debug.print", "debug_callback": "jax.debug.callback"}


def ordered_prints(step: TracedStep) -> Iterator[ValueError]:
    """One for each ordered print of a step on several devices, which JAX refuses."""
    count = len(step.trace.replicas.all_devices)
    if count == 1:
        return
    for eqn in all_eqns(step.jaxpr):
        name = _NAMES.get(eqn.primitive.name)
        if name is not None and _is_ordered(eqn):
            yield ValueError(
                f"`{step.name}` prints with `ordered=True` on {count} devices, and JAX "
                "keeps an order on a single one only.\n"
                f"  the `{name}`: {or_unknown(Site((eqn,)).line)}\n"
                "Leave `ordered=True` out: each line says which replica printed. Or "
                "take one device: `MirroredStrategy(d[:1], replicas_per_device=8)`."
            )


def _is_ordered(eqn: Equation) -> bool:
    # Of a callback the effect alone tells (JAX 0.10 and 0.12).
    effect = str(eqn.params.get("effect", ""))
    return bool(eqn.params.get("ordered")) or effect == "OrderedDebug"
