"""Variables that live elsewhere than the replicas: fetched for a step, then stored.

A variable of central storage is on its parameter device, an ordinary one on JAX's
default device. Before a step their values are copied to all replicas, and afterwards
the first replica's copy goes back.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from jaxstrategy import _devices, _mesh
from jaxstrategy._errors import PlacementError
from jaxstrategy.variables._variable import Variable


class Away:
    """Those of one program.

    Args:
      mesh: where the replicas are.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._sharding = _mesh.replicated(mesh)
        self._variables: list[weakref.ref[Variable]] = []

    @property
    def variables(self) -> list[Variable]:
        """Those, in order. A program that has lost one is not called any more."""
        found = [variable() for variable in self._variables]
        return [variable for variable in found if variable is not None]

    def add(self, variables: Sequence[Variable]) -> None:
        """Count these among them."""
        self._variables += map(weakref.ref, variables)

    def missing(self, used: Sequence[Variable]) -> list[Variable]:
        """Those among `used` that live elsewhere and are not among these yet."""
        known = self.variables
        return [
            variable
            for variable in used
            if not variable.lives_on(self._mesh) and variable not in known
        ]

    def fetched(self) -> list[jax.Array]:
        """Their values on all replicas.

        Raises:
          PlacementError: inside a function traced by JAX.
        """
        return [self._fetched(variable) for variable in self.variables]

    def _fetched(self, variable: Variable) -> jax.Array:
        value = variable.ref[...]
        if isinstance(value, Tracer):
            raise PlacementError(
                f"Variable {variable.name!r} lives on "
                f"{_devices.names(variable.devices)}, not on all replicas, so a step "
                "that uses it cannot be part of a function that JAX traces "
                "(`jax.jit`, `jax.lax.scan`): it is copied before and after each "
                "step. Call the step outside, or make the variable in the scope of a "
                "MirroredStrategy."
            )
        return jax.device_put(value, self._sharding)

    def store(self, values: Sequence[jax.Array]) -> None:
        """Keep what a step made of them."""
        for variable, value in zip(self.variables, values, strict=True):
            first = value.addressable_data(0)
            variable.ref[...] = jax.device_put(first, variable.sharding)

    def references(self, values: Sequence[Any]) -> dict[Variable, Any]:
        """For each a reference that a program works on, while it is traced."""
        refs = map(jax.new_ref, values)
        return dict(zip(self.variables, refs, strict=True))
