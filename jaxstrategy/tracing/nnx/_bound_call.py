"""Calls of a step whose first arguments, its objects, are fixed: `BoundCall`."""

from __future__ import annotations

from typing import final

import jax

from jaxstrategy.tracing.nnx._callers_objects import CallersObjects
from jaxstrategy.tracing.nnx._object_call import ObjectCall
from jaxstrategy.tracing.nnx._parts import is_parts, is_whole_or_parts
from jaxstrategy.values._types import Leaf, PyTree


@final
class BoundCall:
    """Calls of a step whose first arguments are fixed, as calls with arrays.

    It keeps no array alive that the objects have no more.

    Args:
      call: the call with the first arguments alone, some of which are objects.

    Attributes:
      objects: those of the caller.
    """

    def __init__(self, call: ObjectCall) -> None:
        assert call.objects is not None
        self.objects: CallersObjects = call.objects
        known = (call.args, call.kwargs)
        leaves, structure = jax.tree.flatten(known, is_leaf=is_whole_or_parts)
        self._structure = structure
        self._places = [i for i, leaf in enumerate(leaves) if is_parts(leaf)]
        self._leaves: list[Leaf] = [None if is_parts(leaf) else leaf for leaf in leaves]

    def arguments(
        self, rest: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """Those of a call with more, and with the arrays that the objects have now."""
        leaves = self._leaves.copy()
        for place, parts in zip(self._places, self.objects.parts(), strict=True):
            leaves[place] = parts
        args, captured = self._structure.unflatten(leaves)
        return (*args, *rest), {**kwargs, **captured}
