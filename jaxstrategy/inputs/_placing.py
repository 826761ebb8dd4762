"""Steps on the host to `PerReplica` batches on the devices."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from jaxstrategy import _mesh, _padding, _values
from jaxstrategy._values import PerReplica, PyTree
from jaxstrategy.inputs import _division
from jaxstrategy.inputs._batch import Kind
from jaxstrategy.inputs._division import Replicas
from jaxstrategy.inputs._steps import Step


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
        self._full: dict[int, jax.Array] = {}

    @property
    def _is_alone(self) -> bool:
        return self._replicas.local == self._replicas.total

    def place(self, step: Step, kind: Kind) -> PyTree:
        """The batch of a step, each array a `PerReplica` with the mask of its rows.

        The host's arrays may be overwritten as soon as it returns.
        """
        mask = self._mask(step)
        if self._is_alone:
            # A device of the host could share the memory of the array.
            placed = jax.device_put(step.arrays, self._split, may_alias=False)
        else:
            n = self._replicas.total
            placed = [
                jax.make_array_from_process_local_data(
                    self._split, array, (n, *array.shape[1:])
                )
                for array in step.arrays
            ]
        jax.block_until_ready(placed)
        leaves = [_values.with_mask(PerReplica(array), mask) for array in placed]
        return jax.tree.unflatten(kind.treedef, leaves)

    def _mask(self, step: Step) -> jax.Array:
        if not step.is_full:
            mask = self._everywhere(_division.mask(step.counts, step.each))
            _padding.note(mask)
            return mask
        if step.each not in self._full:
            full = _division.mask(step.counts, step.each)
            self._full[step.each] = self._everywhere(full)
        return self._full[step.each]

    def _everywhere(self, mask: np.ndarray) -> jax.Array:
        if self._is_alone:
            return jax.device_put(mask, self._same)
        return jax.make_array_from_process_local_data(self._same, mask, mask.shape)
