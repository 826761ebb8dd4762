"""The places of arrays on the devices of replicas: `ReplicaPlacements`."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.replica_devices import ReplicaDevices


class Meaning(enum.Enum):
    """The meaning of an array on the devices of all replicas."""

    SAME = "same"
    """Every replica holds the whole array."""

    SPLIT = "split"
    """Replica i holds entry i of the first dimension."""


SAME, SPLIT = Meaning.SAME, Meaning.SPLIT

Lies: TypeAlias = Meaning | int
"""Its meaning; or the dimension along which it is divided, the same for all."""


def lies_along(dimension: int | None) -> Lies:
    """What is the same for all and divided along a dimension; None: whole."""
    return SAME if dimension is None else dimension


@dataclasses.dataclass(frozen=True)
class ReplicaPlacements(ReplicaDevices):
    """How arrays lie on the devices of some replicas."""

    @functools.cached_property
    def are_all_own(self) -> bool:
        """Whether this process has the devices of all replicas."""
        return self.sharding(SAME).is_fully_addressable

    # Arrays on all replicas.

    def spec(self, meaning: Meaning) -> PartitionSpec:
        """The division of an array of this meaning over the mesh."""
        is_divided = meaning is SPLIT and self.axes
        return PartitionSpec(self.axes) if is_divided else PartitionSpec()

    def sharding(self, meaning: Meaning) -> NamedSharding:
        """The placement of an array of this meaning."""
        return self._shardings[meaning]

    @functools.cached_property
    def _shardings(self) -> dict[Meaning, NamedSharding]:
        return {
            meaning: NamedSharding(self.mesh, self.spec(meaning)) for meaning in Meaning
        }

    def differ(self, meaning: Meaning) -> bool:
        """Whether replicas may have different arrays of this meaning."""
        return meaning is SPLIT and bool(self.axes)

    def divides_over_replicas(self, sharding: Sharding) -> bool:
        """Whether a sharding names the axes along which replicas differ."""
        return isinstance(sharding, NamedSharding) and any(
            not set(self.axes).isdisjoint(mesh.names(entry)) for entry in sharding.spec
        )

    def may_lie_inside(self, shape: Sequence[int]) -> bool:
        """Whether the devices of a replica may have parts of an array of this shape."""
        sizes = [size for size in self.inner_sizes.values() if size > 1]
        return any(length % size == 0 for length in shape for size in sizes)

    def inner_placement(
        self, array: jax.Array, meaning: Meaning
    ) -> NamedSharding | None:
        """The placement of `array`, `[...]`, if inner axes at most divide it besides.

        None if it lies elsewhere, or if replicas have other entries of it.
        """
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            return None
        entries = list(map(mesh.names, sharding.spec))
        over_replicas = [not set(self.axes).isdisjoint(names) for names in entries]
        if meaning is SPLIT and (self.count > 1 or any(over_replicas)):
            if not over_replicas or entries[0] != self.axes:
                return None
            over_replicas[0] = False
        return None if any(over_replicas) else sharding

    def spec_of(self, lies: Lies) -> PartitionSpec:
        """The division of an array over the replicas' axes of the mesh."""
        return self.spec_along(lies) if isinstance(lies, int) else self.spec(lies)

    # Arrays of which each replica keeps a part.

    @functools.cached_property
    def parts(self) -> int:
        """The number of parts of an array that is divided over the replicas."""
        return self.count // self.per_device

    def spec_along(self, dimension: int | None) -> PartitionSpec:
        """The division of an array along one of its dimensions; None: it is whole."""
        if dimension is None:
            return PartitionSpec()
        return PartitionSpec(*(None,) * dimension, self.axes)

    def sharding_along(self, dimension: int | None) -> NamedSharding:
        """The placement of an array that is divided along one of its dimensions."""
        found = self._sharding_along.get(dimension)
        if found is None:
            found = NamedSharding(self.mesh, self.spec_along(dimension))
            self._sharding_along[dimension] = found
        return found

    @functools.cached_property
    def _sharding_along(self) -> dict[int | None, NamedSharding]:
        # One object for each, so that looking whether an array lies there is quick.
        return {None: self.sharding(SAME)}

    def constraint_along(self, dimension: int, rank: int) -> NamedSharding:
        """As `sharding_along`, for an array that XLA may divide over inner axes."""
        if not self.inner_axes:
            return self.sharding_along(dimension)
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * rank
        entries[dimension] = self.axes
        return NamedSharding(self.mesh, PartitionSpec(*entries))

    def on_mesh(self, sharding: NamedSharding) -> NamedSharding:
        """The same division, of an array on the devices of these replicas."""
        return mesh.on_mesh(sharding, self.mesh)

    def dimension_of(self, array: jax.Array) -> int | None:
        """The dimension along which `array`, `[...]`, is divided over these replicas.

        None if it is not.
        """
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            return None
        return self.dimension_along(sharding)

    def dimension_along(self, sharding: NamedSharding) -> int | None:
        """The dimension that a sharding divides over all replicas; None: none."""
        for dimension, names in enumerate(sharding.spec):
            named = names if isinstance(names, tuple) else (names,)
            if not set(self.axes).isdisjoint(named):
                return dimension if named == self.axes else None
        return None
