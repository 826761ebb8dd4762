"""What a step may not ask of the devices of its replicas."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp

from jaxstrategy.tracing._jaxpr_types import Equation
from jaxstrategy.tracing._traced_step import TracedStep
from jaxstrategy.tracing._translation import along_replicas
from jaxstrategy.tracing.checks._divergences import or_unknown
from jaxstrategy.tracing.replication._collective_table import Effect, effect_of
from jaxstrategy.tracing.replication._jaxprs import all_eqns, hidden
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


def narrow_sums_on_some_devices(step: TracedStep) -> Iterator[NotImplementedError]:
    """One for each reduction of bfloat16 by which XLA would end the process on a CPU.

    It stands in a `shard_map` of the step's own that leaves an inner axis to XLA; where
    all are named, and outside of them, such a reduction is compiled (JAX 0.10, 0.12).
    """
    replicas = step.trace.replicas
    if len(replicas.inner_axes) < 2 or replicas.devices[0].platform != "cpu":
        return
    for outer in all_eqns(step.jaxpr):
        if outer.primitive.name != "shard_map":
            continue
        open_axes = set(replicas.inner_axes).difference(
            outer.params["newly_manual_axes"]
        )
        for eqn in hidden(outer.params):
            if open_axes and effect_of(eqn) in _REDUCTIONS and _is_narrow(eqn):
                yield NotImplementedError(
                    f"`{step.name}` reduces bfloat16 in a `shard_map` that leaves the "
                    f"axes {sorted(open_axes)} to XLA, which cannot compile that on a "
                    "CPU.\n"
                    f"  the `{eqn.primitive.name}`: {or_unknown(Site((eqn,)).line)}\n"
                    "Reduce it in float32 (`x.astype('float32')`), or name all inner "
                    "axes in `axis_names`."
                )


_REDUCTIONS = (Effect.SUM, Effect.EXTREME, Effect.SUM_SCATTER)


def _is_narrow(eqn: Equation) -> bool:
    return any(atom.aval.dtype == jnp.bfloat16 for atom in eqn.invars)


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
