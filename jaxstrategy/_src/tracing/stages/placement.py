"""Getting a step's arguments to where its program needs them.

A value that lies elsewhere is copied; one whose place shows a mistake is refused.
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
from jaxstrategy._src.tracing.roles import must_look_first
from jaxstrategy._src.tracing.stages.stages import check_once
from jaxstrategy._src.tracing.trace import divides_state
from jaxstrategy._src.tracing.traced_step import ReplicaStep, TracedStep
from jaxstrategy._src.values import arrays
from jaxstrategy._src.values.arrays import Leaf

# Numbers that were placed lately: a learning rate is often the same at each step, and
# placing a number costs as much as dispatching a small step (44 to 60 us on CPU).
_NUMBERS_KEPT = 256

_get_sharding = operator.attrgetter("sharding")


@final
class Placement:
    """Where the arguments of one program go."""

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
        self.divides_state = divides_state(self._replicas)
        self.is_open = self.divides_state or bool(self._replicas.inner_axes)
        self.right: dict[int, Sharding | None] = {
            i: None for i, s in enumerate(self._split) if s or self.is_open
        }
        # With an old jaxlib, where all arguments were seen to lie.
        looks = must_look_first(len(self._replicas.all_devices))
        self._lay: tuple[Sharding, ...] | None = () if looks else None
        # The dimension along which state of this place and shape is divided.
        self._dimensions: dict[tuple[int, tuple[int, ...]], int | None] = {}
        self._numbers: dict[Hashable, jax.Array] = {}

    def is_right(self, leaves: Sequence[Leaf]) -> bool:
        """Whether each `PerReplica` lies as one did before; says nothing of others."""
        for index, right in self.right.items():
            sharding = getattr(leaves[index], "sharding", None)
            if sharding is not right and (right is None or sharding != right):
                return False
        if self._lay is None:
            return True
        # JAX 0.10 ends the process where an array lies on the same devices in another
        # order; 0.12 raises.
        lie = tuple(map(_get_sharding, leaves))
        if lie != self._lay:
            for sharding, wanted in zip(lie, self.shardings, strict=True):
                if mesh.is_in_another_order(sharding, wanted):
                    return False
            self._lay = lie
        return True

    def traced(self, step: TracedStep, leaves: Sequence[Leaf]) -> bool:
        """Notes where a trace wants state; whether some of it lies elsewhere."""
        if step.division is None:
            return False
        for index, dimension in step.division.arguments.items():
            self._dimensions[index, step.type_of(index).shape] = dimension
        return any(
            arrays.is_placed(leaf)
            and not mesh.has_sharding_on_mesh(leaf, self.wanted(i, leaf))
            for i, leaf in enumerate(leaves)
        )

    def wanted(self, index: int, leaf: Leaf) -> NamedSharding:
        """The place of an argument: as it lies, if that does not matter."""
        if not self.divides_state or self._split[index]:
            return self._lying_inside(index, leaf) or self.shardings[index]
        key = (index, np.shape(leaf))
        if key in self._dimensions:
            dimension = self._dimensions[key]
        else:
            is_known = arrays.has_place(leaf)
            dimension = self._replicas.dimension_of(leaf) if is_known else None
        return sharding_like(leaf, self._replicas, sharded_along(dimension))

    def _lying_inside(self, index: int, leaf: Leaf) -> NamedSharding | None:
        """How an argument lies that is divided over inner axes at most."""
        if not (self._replicas.inner_axes and arrays.has_place(leaf)):
            return None
        layout = STACKED if self._split[index] else REPLICATED
        return self._replicas.inner_placement(leaf, layout)

    def placed(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """`leaves` where the program needs them; the same objects where they are."""
        self.check_once(leaves)  # moved twice, an array may lie in one memory twice
        return [self._place(index, leaf) for index, leaf in enumerate(leaves)]

    def check_once(self, leaves: Sequence[Leaf]) -> None:
        """Raises if a donated array is passed twice."""
        if self._donated:
            check_once(self._step, leaves, self._donated)

    def _place(self, index: int, leaf: Leaf) -> jax.Array:
        if self._split[index]:
            self._check_replicas(index, leaf)
        if isinstance(leaf, Tracer):
            # The program says nothing of where arguments lie, if they may be divided
            # over the replicas; over inner axes they stay as they are.
            is_free = not self.divides_state or self._replicas.inner_axes
            if is_free and not mesh.has_explicit_axes(leaf):
                return leaf
            return mesh.place(leaf, self.wanted(index, leaf))
        if not isinstance(leaf, jax.Array):
            return self._place_host(index, leaf)
        if leaf.is_deleted():
            raise DonatedValueError(
                f"{self._label(index)} was donated to an earlier call, which has "
                "reused its memory. Go on with the value that call returned, or leave "
                "the argument out of `donate_argnums`."
            )
        wanted = self.wanted(index, leaf)
        # On another mesh of the same devices it has another type, and would be
        # compiled for a second time; it moves without a copy.
        if mesh.has_sharding_on_mesh(leaf, wanted):
            if index in self.right:
                self.right[index] = leaf.sharding
            return leaf
        if not (self._is_divided_state(leaf) or self._lying_inside(index, leaf)):
            self._check_movable(index, leaf)
        return mesh.place(leaf, wanted)

    def _place_host(self, index: int, leaf: Leaf) -> jax.Array:
        # Placed even though the jitted function would do it: to JAX, an array that
        # comes from the host has another type than one on a mesh, and the second call,
        # with the returned state, would compile again.
        if type(leaf) not in (int, float) or index in self._donated:
            return mesh.place(leaf, self.wanted(index, leaf))
        # 0.0 equals -0.0, and floats have another dtype where 64 bits are on.
        sign = type(leaf) is float and math.copysign(1.0, leaf)
        key = (type(leaf), leaf, sign, jax.config.jax_enable_x64)
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= _NUMBERS_KEPT:
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
                f"{n} replicas on {self._where()}. Make it with this strategy: "
                "`strategy.per_replica([...])`, one entry per replica."
            )

    def _check_movable(self, index: int, leaf: jax.Array) -> None:
        """Raise where moving `leaf` would hide a mistake."""
        if not self._split[index]:
            check_whole(leaf, self._replicas, self._label(index), "a plain argument")
        elif mesh.is_split(leaf.sharding):
            raise PlacementError(
                f"{self._label(index)} is a PerReplica of another strategy: it lies on "
                f"{devices.names(_devices_of(leaf))}, this strategy's replicas are on "
                f"{self._where()}. Make it with this strategy, or read it first with "
                "the other one's `reduce` or `gather`."
            )

    def _is_divided_state(self, array: jax.Array) -> bool:
        """Whether each replica keeps its part of `array`, which is the same for all."""
        return self.divides_state and self._replicas.dimension_of(array) is not None

    def _where(self) -> str:
        return self._replicas.device_names

    def check_types(self, leaves: Sequence[Leaf]) -> None:
        """Raises unless each `PerReplica` has a version for each replica."""
        for index, leaf in enumerate(leaves):
            if self._split[index]:
                self._check_replicas(index, leaf)

    def check_captured(self, step: TracedStep) -> None:
        """Raises if a step captures an array that lies as none of its arguments may."""
        for constant in constants(step.trace.closed):
            if arrays.is_placed(constant.value):
                name = f"What `{self._step.name}` captures, {constant.description},"
                arrays.check_alive(constant.value, name)
                what = "what a step captures"
                is_inner = self._replicas.inner_placement(constant.value, REPLICATED)
                if not (is_inner or self._is_divided_state(constant.value)):
                    check_whole(constant.value, self._replicas, name, what)


def check_whole(array: jax.Array, replicas: Replicas, name: str, what: str) -> None:
    """Raise if the parts of a plain array may be meant for the replicas."""
    ours = replicas.all_devices
    is_ours = len(ours) > 1 and bool(ours & array.sharding.device_set)
    if is_ours and mesh.is_divided(array):
        raise PlacementError(
            f"{name} is a plain array that is split over the replicas' devices (its "
            f"shape is {array.shape}), but {what} is the same on every replica. "
            f"{_meant_for_replicas(array, replicas.count)} If every replica should see "
            "all of it, as of state that another strategy has divided, pass "
            "`strategy.mirror(array)`."
        )


def _meant_for_replicas(array: jax.Array, replicas: int) -> str:
    """Advice for `array`, if each of the replicas should have its part of it."""
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
