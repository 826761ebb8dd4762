"""Steps on the host to `PerReplica` batches on the devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxstrategy.inputs import _division
from jaxstrategy.inputs._batch import Kind
from jaxstrategy.inputs._division import Replicas
from jaxstrategy.inputs._steps import Step
from jaxstrategy.masks import _filled_rows
from jaxstrategy.replicas import _mesh
from jaxstrategy.values import _per_replica
from jaxstrategy.values._per_replica import (
    PerReplica,
    PyTree,
)


class Placing:
    """Places batches on the replicas of a mesh.

    Args:
      mesh: where they are.
      replicas: those of this process.
    """

    def __init__(self, mesh: Mesh, replicas: Replicas) -> None:
        self._replicas = replicas
        self._split = _mesh.split(mesh)
        self._same = _mesh.replicated(mesh)
        first = replicas.first
        self._devices = _mesh.devices_of(mesh)[first : first + replicas.local]
        self._on_cpu = self._devices[0].platform == "cpu"
        self._full: dict[int, jax.Array] = {}

    def place(self, step: Step, kind: Kind) -> PyTree:
        """The batch of a step, each array a `PerReplica` with the mask of its rows.

        One replica has its rows and no others, in plain arrays. The host's arrays may
        be overwritten as soon as it returns.
        """
        if self._replicas.is_one:
            leaves = [self._whole(array, step.are_own) for array in step.arrays]
            jax.block_until_ready(leaves)
            return jax.tree.unflatten(kind.treedef, leaves)
        mask = self._mask(step) if step.is_padded else None
        placed = [self._divided(array, step.are_own) for array in step.arrays]
        jax.block_until_ready(placed)
        leaves = [_with_mask(array, mask) for array in placed]
        return jax.tree.unflatten(kind.treedef, leaves)

    def _divided(self, array: Any, is_own: bool) -> jax.Array:
        if isinstance(array, list):
            return self._put_together(array)
        array = array if is_own else self._private(array)
        if self._replicas.are_all:
            return jax.device_put(array, self._split, may_alias=False)
        return jax.make_array_from_process_local_data(
            self._split, array, self._shape(array)
        )

    def _whole(self, array: Any, is_own: bool) -> jax.Array:
        """The only replica's part of `array`, `[1, rows, ...]`, as `[rows, ...]`."""
        array = array[0] if isinstance(array, list) else array
        array = array if is_own else self._private(array)
        return jax.device_put(array[0], self._same, may_alias=False)

    def _put_together(self, arrays: list[Any]) -> jax.Array:
        """Of an array `[1, each, ...]` for each replica."""
        placed = [
            jax.device_put(self._private(array), device, may_alias=False)
            for array, device in zip(arrays, self._devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(
            self._shape(placed[0]), self._split, placed
        )

    def _private(self, array: Any) -> Any:
        """`array`, or a copy, so that no device shares its memory."""
        if self._on_cpu and isinstance(array, np.ndarray) and _may_be_shared(array):
            return _own(array)
        return array

    def _shape(self, array: Any) -> tuple[int, ...]:
        return self._replicas.total, *array.shape[1:]

    def _mask(self, step: Step) -> jax.Array:
        if not step.is_full:
            mask = self._everywhere(_division.mask(step.counts, step.each))
            _filled_rows.note(mask)
            return mask
        if step.each not in self._full:
            full = _division.mask(step.counts, step.each)
            self._full[step.each] = self._everywhere(full)
        return self._full[step.each]

    def _everywhere(self, mask: np.ndarray) -> jax.Array:
        if self._replicas.are_all:
            return jax.device_put(mask, self._same)
        return jax.make_array_from_process_local_data(self._same, mask, mask.shape)


def _with_mask(array: jax.Array, mask: jax.Array | None) -> PerReplica:
    """`[replica, rows, ...]` with `mask`; scalars, `[replica]`, have no rows."""
    value = PerReplica(array)
    return (
        value
        if mask is None or array.ndim == 1
        else _per_replica.with_mask(value, mask)
    )


# Where memory of the host begins that a device takes over instead of copying it. It is
# so with XLA; half of it would be found, too.
_ALIGNMENT = 64


def _may_be_shared(array: np.ndarray) -> bool:
    """Whether devices of the host would share memory with `array`, when it is split.

    They may although `device_put` was told otherwise.
    """
    if not array.flags.c_contiguous:
        return True
    start, step = array.ctypes.data, array.strides[0]
    return any((start + i * step) % (_ALIGNMENT // 2) == 0 for i in range(len(array)))


def _own(array: np.ndarray) -> np.ndarray:
    """A copy that lies where it can be taken over, so that no second one is made."""
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    own = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    np.copyto(own, array)
    return own
