"""The results of a step: arrays, and other values that bypass the program."""

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
from jaxstrategy._src.tracing.functions.code import attributes_of
from jaxstrategy._src.tracing.functions.references import UNBOUND, Binding
from jaxstrategy._src.tracing.jaxprs import KeyPath
from jaxstrategy._src.tracing.roles import HandleReference
from jaxstrategy._src.values import arrays as _arrays, trees
from jaxstrategy._src.values.arrays import Leaf, PyTree, TreeStructure
from jaxstrategy._src.values.per_replica import Handle, PerReplica

_CONTAINERS = (list, tuple, set, frozenset, deque)
_CLOSED = (type, types.ModuleType, jax.Array, np.ndarray, AbstractStrategy, Handle)

# A larger graph of objects belongs to a library, and is no result of a step.
_MAX_OBJECTS = 100_000


def path_to_tracer(value: object) -> str | None:
    """The path from `value` to a tracer that it holds; None without any."""
    queue: deque[tuple[str, object]] = deque([("", value)])
    seen: dict[int, object] = {}
    while queue and len(seen) < _MAX_OBJECTS:
        path, each = queue.popleft()
        if isinstance(each, Tracer):
            return path
        if id(each) not in seen:
            seen[id(each)] = each  # kept alive, so that no other object gets its id
            queue.extend((path + step, child) for step, child in _children(each))
    return None


def _children(value: object) -> Iterator[tuple[str, object]]:
    """The values that `value` holds, each with its path."""
    if isinstance(value, _CLOSED):
        return
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, _CONTAINERS):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, functools.partial):
        parts = {"func": value.func, "args": value.args, "keywords": value.keywords}
        yield from ((f".{name}", part) for name, part in parts.items())
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        # Not `__globals__`, one of its slots: its whole module, half a second of it.
        yield from _captured(value)
        yield from ((f".{name}", item) for name, item in vars(value).items())
        return
    yield from _attributes(value)


def _captured(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        if (value := Binding(cell).get()) is not UNBOUND:
            yield f" (captured as {name!r})", value
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from ((f".{name}", item) for name, item in attributes_of(value).items())
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield f".{name}", slot.__get__(value, type(value))
                except AttributeError:  # it has no value yet
                    pass


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class NonArray:
    """A leaf of the results that is not an array: static in the compiled program."""

    leaf: Leaf  # a variable as `HandleReference`

    @property
    def value(self) -> Leaf:
        is_reference = isinstance(self.leaf, HandleReference)
        return self.leaf() if is_reference else self.leaf


@dataclasses.dataclass
class Results:
    """The pytree that a step returned, without its arrays."""

    leaves: list[NonArray | None]
    treedef: TreeStructure

    @property
    def has_non_arrays(self) -> bool:
        """Whether some leaf is not an array."""
        return any(leaf is not None for leaf in self.leaves)

    @property
    def variables(self) -> list[Handle]:
        """The variables among the leaves."""
        values = (leaf.value for leaf in self.leaves if leaf is not None)
        return [value for value in values if isinstance(value, Handle)]

    def rebuild(self, arrays: Sequence[Leaf]) -> PyTree:
        """The pytree with these arrays."""
        following = iter(arrays)
        leaves = [next(following) if leaf is None else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)

    def array_paths(self) -> list[tuple[int, KeyPath]]:
        """For each array its index among the leaves and its path in the pytree."""
        numbered = jax.tree.unflatten(self.treedef, range(len(self.leaves)))
        return [
            (position, path)
            for path, position in jax.tree.leaves_with_path(numbered)
            if self.leaves[position] is None
        ]


class NamedResults:
    """The results of a step with their names in messages."""

    def __init__(self, name: str, results: Results, has_objects: bool) -> None:
        self.name = name
        self.results = results
        # Whether it returns new arrays of objects besides its results.
        self.has_objects = has_objects

    def path(self, keys: KeyPath) -> str:
        """The name of the result at `keys` in messages: `` `step(...)['loss']` ``."""
        if self.is_of_object(keys):  # the name of the array is one key
            return f"`{jax.tree_util.keystr(keys[2:]).removeprefix('.')}`"
        return f"`{self.name}(...){jax.tree_util.keystr(keys[self.has_objects :])}`"

    def is_of_object(self, keys: KeyPath) -> bool:
        """Whether the result at `keys` is a new array of an object."""
        return self.has_objects and bool(keys) and keys[0].idx == 1


def flatten(
    tree: PyTree, statics: Sequence[Leaf], name: str
) -> tuple[list[jax.Array], Results]:
    """The arrays that step `name` returned, and the pytree without them."""
    paths, treedef = jax.tree.flatten_with_path(tree, is_leaf=is_one_leaf)
    arrays: list[jax.Array] = []
    leaves: list[NonArray | None] = []
    for path, leaf in paths:
        if _arrays.is_array(leaf):
            arrays.append(jnp.asarray(leaf))
            leaves.append(None)
        else:
            _check_non_array(leaf, statics, f"{name}(...){jax.tree_util.keystr(path)}")
            is_handle = isinstance(leaf, Handle)
            leaves.append(NonArray(HandleReference(leaf) if is_handle else leaf))
    return arrays, Results(leaves, treedef)


def unwrap_non_arrays(tree: PyTree) -> PyTree:
    """`tree` with each `NonArray` replaced by its value."""
    return jax.tree.map(
        lambda leaf: leaf.value if isinstance(leaf, NonArray) else leaf,
        tree,
        is_leaf=lambda node: isinstance(node, (NonArray, PerReplica)),
    )


def is_one_leaf(node: object) -> bool:
    """Whether `node` is a leaf of the results of a step."""
    return trees.is_whole(node) or isinstance(node, Iterator)  # JAX warns about these


def _check_non_array(leaf: Leaf, statics: Sequence[Leaf], where: str) -> None:
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
    elif (path := path_to_tracer(leaf)) is not None:
        what = f"and holds an array of the step as `{where}{path}`, unseen by JAX."
    else:
        return
    raise TypeError(
        f"`{where}` is {leaf!r}, a {type(leaf).__name__}, {what} Objects that are no "
        "pytrees come back as they were when the step was traced. Return its arrays in "
        "a tuple or dict, or register its class with "
        "`jax.tree_util.register_dataclass`."
    )
