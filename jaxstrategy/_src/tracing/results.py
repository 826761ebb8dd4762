"""The results of a step: arrays for the program, plain values kept beside it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.tracing.jaxprs.visit import KeyPath
from jaxstrategy._src.tracing.roles import HandleReference
from jaxstrategy._src.values import arrays as _arrays, trees
from jaxstrategy._src.values.arrays import Leaf, PyTree, TreeStructure
from jaxstrategy._src.values.per_replica import Handle, PerReplica

_CONTAINERS = (list, tuple, set, frozenset, deque)
_CLOSED = (type, types.ModuleType, jax.Array, np.ndarray, AbstractStrategy, Handle)

# Beyond these a graph of objects is a library's, and no result of a step.
_MOST = 100_000


def traced_within(value: object) -> str | None:
    """The way from `value` to an array that is being traced; None without any."""
    waiting: deque[tuple[str, object]] = deque([("", value)])
    seen: dict[int, object] = {}
    while waiting and len(seen) < _MOST:
        path, each = waiting.popleft()
        if isinstance(each, Tracer):
            return path
        if id(each) not in seen:
            seen[id(each)] = each  # kept, so that no other object gets its id
            waiting.extend((path + step, held) for step, held in _held(each))
    return None


def _held(value: object) -> Iterator[tuple[str, object]]:
    """The values that `value` holds, each with how to write it."""
    if isinstance(value, _CLOSED):
        return
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", held) for key, held in value.items())
    elif isinstance(value, _CONTAINERS):
        yield from ((f"[{i}]", held) for i, held in enumerate(value))
    elif isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        yield from ((f".{name}", held) for name, held in parts.items())
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        # Not `__globals__`, one of its slots: its whole module, half a second of it.
        yield from _captured(value)
        yield from ((f".{name}", held) for name, held in vars(value).items())
        return
    yield from _attributes(value)


def _captured(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield f" (captured as {name!r})", cell.cell_contents
        except ValueError:  # it has no value yet
            pass
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        own = {}
    yield from ((f".{name}", held) for name, held in own.items())
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield f".{name}", slot.__get__(value, type(value))
                except AttributeError:  # it has no value yet
                    pass


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Plain:
    """A leaf that is not an array, on its way out of the compiled program."""

    kept: Leaf

    @property
    def value(self) -> Leaf:
        """The leaf."""
        is_reference = isinstance(self.kept, HandleReference)
        return self.kept() if is_reference else self.kept


@dataclasses.dataclass
class Results:
    """The pytree that a step returned, without its arrays."""

    leaves: list[Plain | None]
    treedef: TreeStructure

    @property
    def has_plain(self) -> bool:
        """Whether some leaf is not an array."""
        return any(leaf is not None for leaf in self.leaves)

    @property
    def variables(self) -> list[Handle]:
        """The variables among the leaves."""
        plain = (leaf.value for leaf in self.leaves if leaf is not None)
        return [value for value in plain if isinstance(value, Handle)]

    def rebuild(self, arrays: Sequence[Leaf]) -> PyTree:
        """The pytree again, with `arrays` in place of its arrays."""
        following = iter(arrays)
        leaves = [next(following) if leaf is None else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)

    def array_paths(self) -> list[tuple[int, KeyPath]]:
        """For each array, its place among the leaves and its path in the pytree."""
        numbered = jax.tree.unflatten(self.treedef, range(len(self.leaves)))
        return [
            (position, path)
            for path, position in jax.tree.leaves_with_path(numbered)
            if self.leaves[position] is None
        ]


def take_apart(
    tree: PyTree, statics: Sequence[Leaf], name: str
) -> tuple[list[jax.Array], Results]:
    """The arrays of what step `name` returned, and the rest of it."""
    paths, treedef = jax.tree.flatten_with_path(tree, is_leaf=is_one_leaf)
    arrays: list[jax.Array] = []
    leaves: list[Plain | None] = []
    for path, leaf in paths:
        if _arrays.is_array(leaf):
            arrays.append(jnp.asarray(leaf))
            leaves.append(None)
        else:
            _check_plain(leaf, statics, f"{name}(...){jax.tree_util.keystr(path)}")
            is_handle = isinstance(leaf, Handle)
            leaves.append(Plain(HandleReference(leaf) if is_handle else leaf))
    return arrays, Results(leaves, treedef)


def unwrap_plain(tree: PyTree) -> PyTree:
    """`tree` with each `Plain` replaced by its value."""

    def is_plain(node: object) -> bool:
        return isinstance(node, (Plain, PerReplica))

    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, Plain) else leaf,
        tree,
        is_leaf=is_plain,
    )


def is_one_leaf(node: object) -> bool:
    """Whether `node` counts as one leaf of what a step returns."""
    return trees.is_whole(node) or isinstance(node, Iterator)  # JAX warns about these


def _check_plain(leaf: Leaf, statics: Sequence[Leaf], where: str) -> None:
    if isinstance(leaf, PerReplica):
        raise TypeError(
            f"`{where}` is a PerReplica that the function captured from outside. Pass "
            "it as an argument: the function then sees its own replica's version."
        )
    if any(leaf is static for static in statics):
        return
    if inspect.isawaitable(leaf) or isinstance(leaf, AsyncIterator):
        raise TypeError(
            f"`{where}` is {leaf!r}: `async def` and what it calls run in no step, as "
            "nobody awaits it there. Write it as an ordinary function."
        )
    if isinstance(leaf, Iterator):
        what = "an iterator, which can hide arrays of the step."
    elif (path := traced_within(leaf)) is not None:
        what = f"and holds an array of the step as `{where}{path}`, unseen by JAX."
    else:
        return
    raise TypeError(
        f"`{where}` is {leaf!r}, a {type(leaf).__name__}, {what} Objects that are no "
        "pytrees come back as they were when the step was traced. Return its arrays in "
        "a tuple or dict, or register its class with "
        "`jax.tree_util.register_dataclass`."
    )
