"""What a step may not ask of the devices of its replicas."""

from __future__ import annotations

from collections.abc import Iterator

from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing._translation import along_replicas
from jaxstrategy.tracing.checks._divergences import or_unknown
from jaxstrategy.tracing.replication._jaxprs import all_eqns
from jaxstrategy.tracing.replication._site import Site


def constraints_along_replicas(step: TracedStep) -> Iterator[ValueError]:
    """One for each value of a step that is to be divided over the replicas.

    JAX refuses it where the axis is that of a `shard_map`, and not where a step is
    traced by itself (0.10 and 0.12).
    """
    for eqn in all_eqns(step.jaxpr):
        if eqn.primitive.name == "sharding_constraint":
            if step.trace.replicas.divides_over_replicas(eqn.params["sharding"]):
                where = f"\n  {or_unknown(Site((eqn,)).line)}\n"
                yield along_replicas(step.name, where, step.trace.replicas)


_CALLBACKS = ("pure_callback", "io_callback")


def callbacks_beside_inner_axes(step: TracedStep) -> Iterator[NotImplementedError]:
    """One for each host callback of a step, which JAX cannot compile there.

    With an axis of a mesh that is left to XLA, of whatever size, nobody says which
    devices have which parts of what the host is to be given (JAX 0.10 and 0.12).
    """
    if not step.trace.replicas.inner_axes:
        return
    sizes = step.trace.replicas.inner_sizes
    for eqn in all_eqns(step.jaxpr):
        if eqn.primitive.name in _CALLBACKS:
            name = eqn.primitive.name
            yield NotImplementedError(
                f"`{step.name}` calls the host, and its replicas have several devices, "
                f"{sizes}: JAX calls none from programs that XLA divides over them.\n"
                f"  the `{name}`: {or_unknown(Site((eqn,)).line)}\n"
                "Return the value and work on it after the step; print with "
                "`jax.debug.print`, which works; or use one device for each replica."
            )
