"""Objects that a function on its way to a worker must not change: `unchanged`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from jaxstrategy._errors import ObjectError
from jaxstrategy.tracing.nnx._object_kinds import is_changed_in_place, is_whole_object
from jaxstrategy.values._types import PyTree


@contextlib.contextmanager
def unchanged(tree: PyTree, name: str) -> Iterator[None]:
    """Raise at the end if objects in `tree` have changed meanwhile.

    Args:
      tree: what the function is given, while it is traced.
      name: of the function.

    Raises:
      ObjectError: one has changed. Nobody would see it: a worker has no objects.
    """
    # What a function makes of an `nnx.State` may have the variables of that.
    found = jax.tree.leaves(tree, is_leaf=is_whole_object)
    objects = [node for node in found if is_changed_in_place(node)]
    before = [jax.tree.flatten(node) for node in objects]
    yield
    for node, (leaves, structure) in zip(objects, before, strict=True):
        now, structure_now = jax.tree.flatten(node)
        same = all(a is b for a, b in zip(leaves, now, strict=False))
        if not same or structure != structure_now:
            raise ObjectError(
                f"`{name}` runs for parameter servers, and changes a "
                f"{type(node).__name__} of Flax NNX that it was given: the caller's "
                "object would stay as it was. Pass the state of `nnx.split` instead, "
                "make the object of it with `nnx.merge`, and return its `nnx.state`, "
                "for `nnx.update` where the result is fetched; or keep what changes in "
                "variables made in `strategy.scope()`."
            )
