"""The leaves of a state that belong to an optimizer, by their types.

Outside of steps nobody knows what a step will do with an array. What is not recognised
here lies whole until the first step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import jax

from jaxstrategy._src.values.types import PyTree

IsLeaf = Callable[[object], bool]


def optimizer_leaves(tree: PyTree, is_leaf: IsLeaf) -> list[bool]:
    """For each leaf of `tree`, in order, whether it is optimizer state.

    Recognised are the states of Optax, alone, nested or in one chain with those of
    users' own transformations, `opt_state` of Flax's `TrainState`, and the variables of
    an `nnx.Optimizer`.

    Args:
      tree: any pytree, of arrays or of their types.
      is_leaf: which nodes count as leaves although they are pytrees.
    """
    return list(_flags(tree, is_leaf))


def _flags(node: PyTree, is_leaf: IsLeaf) -> Iterator[bool]:
    def stops(child: object) -> bool:
        is_end = is_leaf(child) or _is_state(child) or _is_train_state(child)
        return is_end and child is not node

    if is_leaf(node):
        yield False
        return
    if _is_state(node):
        yield from _all_of(node, is_leaf)
        return
    is_train_state = _is_train_state(node)
    for path, child in jax.tree.leaves_with_path(node, is_leaf=stops):
        if child is node:
            yield False
        elif is_train_state and getattr(path[0], "name", None) == "opt_state":
            yield from _all_of(child, is_leaf)
        else:
            yield from _flags(child, is_leaf)


def _all_of(node: PyTree, is_leaf: IsLeaf) -> list[bool]:
    return [True] * len(jax.tree.leaves(node, is_leaf=is_leaf))


def _is_state(node: object) -> bool:
    return _is_of_optax(node) or _is_chain(node) or is_optimizer_variable(node)


def _is_of_optax(node: object) -> bool:
    """Whether `node` is a state that Optax, or our part of it, has defined."""
    if not _is_named_tuple(node):
        return False
    # The only named tuples of ours that hold arrays are states of optimizers.
    if type(node).__module__.partition(".")[0] not in ("optax", "jaxstrategy"):
        return False
    # The one type of Optax that holds parameters.
    holder = getattr(sys.modules.get("optax"), "LookaheadParams", None)
    return holder is None or not isinstance(node, holder)


def _is_chain(node: object) -> bool:
    """Whether `node` is the state of `optax.chain`, a plain tuple.

    Users write plain tuples, too: `(params, opt_state)`. So each entry must be a named
    tuple or a chain, one at least be Optax's, and none look like the parameters, which
    have the structure of the moments.
    """
    if type(node) is not tuple:
        return False
    known = [entry for entry in node if _is_of_optax(entry) or _is_chain(entry)]
    others = [entry for entry in node if not any(entry is each for each in known)]
    named = [entry for entry in others if _is_named_tuple(entry)]
    empty = [entry for entry in others if entry is None or type(entry) is tuple]
    if not known or len(named) + len(empty) < len(others) or any(empty):
        return False
    moments = {jax.tree.structure(field) for field in _fields(known)}
    return not any(jax.tree.structure(entry) in moments for entry in named)


def _fields(tree: PyTree) -> Iterator[PyTree]:
    """All fields of the named tuples in `tree`, at any depth."""
    for node in jax.tree.leaves(tree, is_leaf=_is_named_tuple):
        for field in node if _is_named_tuple(node) else ():
            yield field
            yield from _fields(field)


def _is_named_tuple(node: object) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def is_optimizer_variable(node: object) -> bool:
    """Whether `node` is a variable of Flax NNX that an optimizer keeps its state in."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.OptState)


def _is_train_state(node: object) -> bool:
    module = sys.modules.get("flax.training.train_state")
    return module is not None and isinstance(node, module.TrainState)
