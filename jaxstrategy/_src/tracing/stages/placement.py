"""Places the arguments of a step on the devices of its program.

An array with another sharding is copied; a sharding that suggests a bug raises.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Sequence
from typing import final

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from jaxstrategy._src.errors import DonatedValueError, PlacementError
from jaxstrategy._src.replicas import devices, mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.inner_axes import sharding_like
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    Replicas,
    sharded_along,
)
from jaxstrategy._src.tracing.constants import constants
from jaxstrategy._src.tracing.roles import must_check_first
from jaxstrategy._src.tracing.stages.stages import check_once
from jaxstrategy._src.tracing.trace import shards_state
from jaxstrategy._src.tracing.traced_step import ReplicaStep, TracedStep
from jaxstrategy._src.values import arrays
from jaxstrategy._src.values.arrays import Leaf

# Placed numbers are cached: a learning rate is often the same at each step, and placing
# a number costs as much as dispatching a small step (44 to 60 us on CPU).
_MAX_NUMBERS = 256

_get_sharding = operator.attrgetter("sharding")


@final
class Placement:
    """Places the arguments of one program."""

    def __init__(self, step: ReplicaStep, donated: frozenset[int]) -> None:
        self._step = step
        self._replicas = step.replicas
        self._donated = donated
        self._label = step.label
        layouts = step.layouts
        self._split = tuple(layout is STACKED for layout in layouts)
        self.shardings: tuple[NamedSharding, ...] = tuple(
            map(self._replicas.sharding, layouts)
        )
        self.shards_state = shards_state(self._replicas)
        self.is_open = self.shards_state or bool(self._replicas.inner_axes)
        # The sharding of each `PerReplica` in the last call.
        self.last_shardings: dict[int, Sharding | None] = {
            i: None for i, s in enumerate(self._split) if s or self.is_open
        }
        # With an old jaxlib, all shardings of the last call.
        is_old = must_check_first(len(self._replicas.all_devices))
        # Whether donated arrays are looked at before each call.
        self.must_check_first = bool(donated) and is_old
        self._all_last_shardings: tuple[Sharding, ...] | None = () if is_old else None
        # The dimension along which state is sharded, by argument and shape.
        self._dimensions: dict[tuple[int, tuple[int, ...]], int | None] = {}
        self._numbers: dict[Hashable, jax.Array] = {}

    def is_as_before(self, leaves: Sequence[Leaf]) -> bool:
        """Whether each `PerReplica` has the sharding of the last call."""
        for index, last in self.last_shardings.items():
            sharding = getattr(leaves[index], "sharding", None)
            if sharding is not last and (last is None or sharding != last):
                return False
        if self._all_last_shardings is None:
            return True
        # JAX 0.10 ends the process for an array on the same devices in another order;
        # 0.12 raises.
        shardings = tuple(map(_get_sharding, leaves))
        if shardings != self._all_last_shardings:
            if any(map(mesh.is_in_another_order, shardings, self.shardings)):
                return False
            self._all_last_shardings = shardings
        return True

    def traced(self, step: TracedStep, leaves: Sequence[Leaf]) -> bool:
        """Stores how a trace shards state; returns whether some must be moved."""
        if step.partitioned is None:
            return False
        for index, dimension in step.partitioned.arguments.items():
            self._dimensions[index, step.type_of(index).shape] = dimension
        return any(
            arrays.is_placed(leaf)
            and not mesh.has_sharding_on_mesh(leaf, self.sharding(i, leaf))
            for i, leaf in enumerate(leaves)
        )

    def sharding(self, index: int, leaf: Leaf) -> NamedSharding:
        """The sharding for an argument: its own where the program accepts any."""
        if not self.shards_state or self._split[index]:
            return self._inner_sharding(index, leaf) or self.shardings[index]
        key = (index, np.shape(leaf))
        dimension = None
        if key in self._dimensions:
            dimension = self._dimensions[key]
        elif arrays.has_place(leaf):
            dimension = self._replicas.dimension_of(leaf)
        return sharding_like(leaf, self._replicas, sharded_along(dimension))

    def _inner_sharding(self, index: int, leaf: Leaf) -> NamedSharding | None:
        """The sharding of an argument that is sharded over inner axes at most."""
        if not (self._replicas.inner_axes and arrays.has_place(leaf)):
            return None
        layout = STACKED if self._split[index] else REPLICATED
        return self._replicas.inner_placement(leaf, layout)

    def placed(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """The leaves, placed; those that need no move are the same objects."""
        self.check_once(leaves)  # two copies of one array may share memory
        return [self._place(index, leaf) for index, leaf in enumerate(leaves)]

    def check_once(self, leaves: Sequence[Leaf]) -> None:
        """Raises if a donated array is passed twice."""
        if self._donated:
            check_once(self._step, leaves, self._donated)

    def _place(self, index: int, leaf: Leaf) -> jax.Array:
        if self._split[index]:
            self._check_replicas(index, leaf)
        if isinstance(leaf, Tracer):
            # With sharded state the program has no `in_shardings`, so tracers are
            # constrained here; with inner axes they stay as they are.
            is_free = not self.shards_state or self._replicas.inner_axes
            if is_free and not mesh.has_explicit_axes(leaf):
                return leaf
            return mesh.place(leaf, self.sharding(index, leaf))
        if not isinstance(leaf, jax.Array):
            return self._place_host(index, leaf)
        if leaf.is_deleted():
            raise DonatedValueError(
                f"{self._label(index)} was donated to an earlier call, which has "
                "reused its memory. Go on with the value that call returned, or leave "
                "the argument out of `donate_argnums`."
            )
        sharding = self.sharding(index, leaf)
        # On another mesh of the same devices it has another type, and would be
        # compiled for a second time; it moves without a copy.
        if mesh.has_sharding_on_mesh(leaf, sharding):
            if index in self.last_shardings:
                self.last_shardings[index] = leaf.sharding
            return leaf
        if not (self._is_sharded_state(leaf) or self._inner_sharding(index, leaf)):
            self._check_movable(index, leaf)
        return mesh.place(leaf, sharding)

    def _place_host(self, index: int, leaf: Leaf) -> jax.Array:
        # The jitted function would place it, too. But to JAX an array from the host has
        # another type than one on a mesh, so that the second call, with the returned
        # state, would compile again.
        if type(leaf) not in (int, float) or index in self._donated:
            return mesh.place(leaf, self.sharding(index, leaf))
        # 0.0 equals -0.0, and floats have another dtype where 64 bits are on.
        sign = type(leaf) is float and math.copysign(1.0, leaf)
        key = (type(leaf), leaf, sign, jax.config.jax_enable_x64)
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= _MAX_NUMBERS:
                self._numbers.clear()
            number = self._numbers[key] = mesh.place(leaf, self.shardings[index])
        return number

    def _check_replicas(self, index: int, leaf: Leaf) -> None:
        """Raise unless the `PerReplica` `leaf` has a version for each replica."""
        n = self._replicas.count
        shape = np.shape(leaf)
        if not shape or shape[0] != n:
            held = f"for {shape[0]} replicas" if shape else f"of shape {shape}"
            raise PlacementError(
                f"{self._label(index)} is a PerReplica {held}, but this strategy has "
                f"{n} replicas on {self._replicas.device_names}. Make it with this "
                "strategy: `strategy.per_replica([...])`, one entry per replica."
            )

    def _check_movable(self, index: int, leaf: jax.Array) -> None:
        """Raise if the sharding of `leaf` suggests a bug."""
        if not self._split[index]:
            _check_not_sharded(
                leaf, self._replicas, self._label(index), "a plain argument"
            )
        elif mesh.is_split(leaf.sharding):
            raise PlacementError(
                f"{self._label(index)} is a PerReplica of another strategy: it lies on "
                f"{devices.names(_devices_of(leaf))}, this strategy's replicas are on "
                f"{self._replicas.device_names}. Make it with this strategy, or read "
                "it first with the other one's `reduce` or `gather`."
            )

    def _is_sharded_state(self, array: jax.Array) -> bool:
        return self.shards_state and self._replicas.dimension_of(array) is not None

    def check_types(self, leaves: Sequence[Leaf]) -> None:
        """Raises unless each `PerReplica` has a version for each replica."""
        for index, leaf in enumerate(leaves):
            if self._split[index]:
                self._check_replicas(index, leaf)

    def check_captured(self, step: TracedStep) -> None:
        """Raises if a step captures an array whose sharding no argument may have."""
        for constant in constants(step.trace.closed):
            if arrays.is_placed(constant.value):
                name = f"What `{self._step.name}` captures, {constant.description},"
                arrays.check_alive(constant.value, name)
                what = "what a step captures"
                is_inner = self._replicas.inner_placement(constant.value, REPLICATED)
                if not (is_inner or self._is_sharded_state(constant.value)):
                    _check_not_sharded(constant.value, self._replicas, name, what)


def _check_not_sharded(
    array: jax.Array, replicas: Replicas, name: str, what: str
) -> None:
    """Raise if the shards of a plain array may be meant for the replicas."""
    ours = replicas.all_devices
    is_ours = len(ours) > 1 and bool(ours & array.sharding.device_set)
    if is_ours and mesh.is_divided(array):
        raise PlacementError(
            f"{name} is a plain array that is split over the replicas' devices (its "
            f"shape is {array.shape}), but {what} is the same on every replica. "
            f"{_advice_for_per_replica(array, replicas.count)} If every replica should "
            "see all of it, as of state that another strategy has divided, pass "
            "`strategy.mirror(array)`."
        )


def _advice_for_per_replica(array: jax.Array, replicas: int) -> str:
    """How to pass `array` if each replica should have one shard."""
    rows, *rest = array.shape
    part = array.sharding.shard_shape(array.shape)
    if rows % replicas or part != (rows // replicas, *rest):
        return (
            "If each replica should have its own part, arrange it as "
            f"`[{replicas}, ...]`, entry i for replica i, and pass `PerReplica(array)`."
        )
    if rows == replicas:
        return (
            "If entry i belongs to replica i, pass `PerReplica(array)`, which copies "
            "nothing. If it is state that is equal in all entries, as "
            "`flax.jax_utils.replicate` and `jax.pmap` make it, pass it without that "
            "dimension: `array[0]`, or `flax.jax_utils.unreplicate(tree)`."
        )
    divided = ", ".join(map(str, (replicas, rows // replicas, *rest)))
    return (
        "If each replica should have the rows on its device, pass "
        f"`PerReplica(array.reshape({divided}))`, whose rows stay where they are."
    )


def _devices_of(array: jax.Array) -> list[Device]:
    return sorted(array.sharding.device_set, key=lambda device: device.id)
