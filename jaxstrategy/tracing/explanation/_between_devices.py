"""What devices with several replicas exchange for a collective: `BetweenDevices`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import jax
from jax import lax
from jax.extend import core

from jaxstrategy.replicas._replicas import SPLIT, Replicas
from jaxstrategy.tracing._jaxpr_types import Equation
from jaxstrategy.tracing._on_replicas import on_replicas
from jaxstrategy.tracing.explanation._explained_collective import nbytes_of
from jaxstrategy.tracing.explanation._facts import DeviceExchange
from jaxstrategy.tracing.replication._collective_table import COLLECTIVES, is_along
from jaxstrategy.tracing.replication._jaxprs import all_eqns, closed, jaxpr_of
from jaxstrategy.values._types import Leaf


@final
class BetweenDevices:
    """The collectives of devices in place of those of replicas that share them.

    Args:
      replicas: which share devices.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._found: dict[tuple[str, ...], tuple[DeviceExchange, ...]] = {}

    def of(self, eqn: Equation) -> tuple[DeviceExchange, ...]:
        """What devices exchange for an equation of one replica."""
        types = [str(atom.aval) for atom in eqn.invars]
        key = (eqn.primitive.name, str(eqn.params), *types)
        if key not in self._found:
            self._found[key] = tuple(self._traced(eqn))
        return self._found[key]

    def _traced(self, eqn: Any) -> Iterator[DeviceExchange]:
        types = [atom.aval for atom in eqn.invars]
        invars = [core.Var(aval) for aval in types]
        outvars = [core.Var(var.aval) for var in eqn.outvars]
        alone = eqn.replace(invars=list(invars), outvars=list(outvars))
        function = core.jaxpr_as_fun(closed(jaxpr_of(invars, [alone], outvars)))

        def one_replica(*given: Leaf) -> list[jax.Array]:
            results = function(*(lax.squeeze(x, (0,)) for x in given))
            return [x[None] for x in results]

        taken = [SPLIT] * len(types)
        everywhere = on_replicas(one_replica, self._replicas, taken, SPLIT)
        count = self._replicas.count
        shapes = [jax.ShapeDtypeStruct((count, *x.shape), x.dtype) for x in types]
        for inner in all_eqns(jax.make_jaxpr(everywhere)(*shapes).jaxpr):
            known = COLLECTIVES.get(inner.primitive.name)
            if known is not None and is_along(inner, self._replicas.axes):
                # Lanes are reduced before, in the same equation.
                is_reduced = known.kind == "all_reduce"
                atoms = inner.outvars if is_reduced else inner.invars
                yield DeviceExchange(known.kind, nbytes_of([x.aval for x in atoms]))
