"""The arguments and results of a step: `Signature`, `Results`."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import types
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from importlib import metadata
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.text import array_type, shown
from jaxstrategy._src.tracing.jaxprs import KeyPath
from jaxstrategy._src.tracing.references import Binding, attributes_of
from jaxstrategy._src.values import arrays, arrays as _arrays, per_replica, trees
from jaxstrategy._src.values.arrays import (
    Arguments,
    Function,
    Leaf,
    PyTree,
    TreeStructure,
)
from jaxstrategy._src.values.per_replica import Handle, PerReplica


class Role(enum.Enum):
    """How a leaf of the arguments is passed to the step."""

    SAME = "same"  # traced; every replica sees the same value
    PER_REPLICA = "per replica"  # traced; every replica sees its own version
    MASK = "mask"  # traced; says which rows of the `PerReplica` before it are real
    STATIC = "static"  # a Python value, part of the program


@dataclasses.dataclass(frozen=True)
class Signature:
    """Equal for calls that share a program; shapes and dtypes are open.

    `roles` has an entry for each leaf, and after a `PerReplica` one for its mask.
    """

    treedef: TreeStructure
    roles: tuple[Role, ...]
    static_leaves: tuple[Leaf, ...]  # variables as `HandleReference`
    static_types: tuple[type, ...]

    @property
    def statics(self) -> tuple[Leaf, ...]:
        return tuple(
            leaf() if isinstance(leaf, HandleReference) else leaf
            for leaf in self.static_leaves
        )

    def with_statics(self) -> list[tuple[int, Leaf]]:
        """The static leaves with their indices in `roles`."""
        indices = (i for i, role in enumerate(self.roles) if role is Role.STATIC)
        return list(zip(indices, self.statics, strict=True))

    @property
    def handles(self) -> list[per_replica.Handle]:
        """The variables among the static leaves."""
        # The caller holds the arguments, and so the variables: none is dead.
        leaves = self.static_leaves
        handles = [leaf() for leaf in leaves if isinstance(leaf, HandleReference)]
        return cast("list[per_replica.Handle]", handles)

    @property
    def dynamic(self) -> list[int]:
        """The indices in `roles` of the program's inputs."""
        return [i for i, role in enumerate(self.roles) if role is not Role.STATIC]

    @property
    def leaves(self) -> list[int]:
        """The indices in `roles` of leaves: without masks."""
        return [i for i, role in enumerate(self.roles) if role is not Role.MASK]

    def leaves_by_position(self) -> list[list[int]]:
        """For each positional argument the indices in `roles` of its leaves."""
        args, _ = jax.tree.unflatten(self.treedef, self.leaves)
        return [jax.tree.leaves(argument) for argument in args]

    def donated(self, positions: Sequence[int]) -> tuple[int, ...]:
        """The indices, among the program's inputs, of these positions of `args`."""
        if not positions:  # the usual case, kept short
            return ()
        leaves = self.leaves_by_position()
        beyond = [position for position in positions if position >= len(leaves)]
        if beyond:
            raise ValueError(
                f"`donate_argnums` names argument {beyond[0]}, but `args` has "
                f"{len(leaves)}. Positions count from 0; keyword arguments are not "
                "donated."
            )
        chosen = {leaf for position in positions for leaf in leaves[position]}
        return tuple(new for new, old in enumerate(self.dynamic) if old in chosen)

    def rebuild(self, locals_: Sequence[Leaf]) -> Arguments:
        """`(args, kwargs)` as the step sees them, from one replica's arrays."""
        dynamic, static = iter(locals_), iter(self.statics)
        leaves = [
            next(static if role is Role.STATIC else dynamic) for role in self.roles
        ]
        return jax.tree.unflatten(self.treedef, [leaves[i] for i in self.leaves])

    def labels(self, fn: Function) -> list[str]:
        """For each of `roles` the leaf as the caller of `fn` writes it."""
        leaves = iter(labels(fn, self.rebuild([0] * len(self.dynamic))))
        found: list[str] = []
        for role in self.roles:
            is_mask = role is Role.MASK
            found.append(f"the mask of {found[-1]}" if is_mask else next(leaves))
        return found

    def difference(self, fn: Function, new: Signature) -> tuple[str, str, str] | None:
        """The first leaf of another kind or static value: its label, was and is."""
        pairs = zip(self._descriptions(), new._descriptions(), strict=True)
        for index, (was, now) in zip(new.leaves, pairs, strict=True):
            if was != now:
                text = f"another {now[0]}" if was[0] == now[0] else now[0]
                return new.labels(fn)[index], was[0], text
        return None

    def _descriptions(self) -> list[tuple[str, type, Leaf]]:
        """Each leaf in words, and its type and value if it is static."""
        statics, found = dict(self.with_statics()), []
        for index in self.leaves:
            static, has_mask = (
                statics.get(index),
                Role.MASK in self.roles[index + 1 :][:1],
            )
            if isinstance(static, per_replica.Handle):  # its `repr` reads its array
                found.append((f"variable {static.name!r}", type(static), id(static)))
                continue
            text = {
                Role.SAME: "an array or number, the same on all replicas",
                Role.STATIC: shown(static),
                Role.PER_REPLICA: f"a PerReplica {'with' if has_mask else 'without'} a "
                "mask of its rows",
            }[self.roles[index]]
            found.append((text, type(static), static))
        return found


class HandleReference(weakref.ref):
    """A weak reference to a variable among static arguments."""


def flatten(
    fn: Function, arguments: Arguments, abstract: bool = False
) -> tuple[list[Leaf], Signature]:
    """The arrays and numbers of a call of `fn`, and its signature."""
    nodes, treedef = jax.tree.flatten(arguments, is_leaf=trees.is_whole)
    leaves: list[Leaf] = []
    roles: list[Role] = []
    static_leaves: list[Leaf] = []
    static_types: list[type] = []
    for index, node in enumerate(nodes):
        if isinstance(node, jax.Ref):
            raise TypeError(
                f"{labels(fn, arguments)[index]} is a `jax.Ref`, whose memory is on "
                "one device. Make a `js.Variable` in the strategy's scope, which has a "
                "copy on each; or pass `ref[...]`, and write what the step returns."
            )
        role, value = _role(node, abstract)
        if role is Role.STATIC:
            _check_hashable(fn, arguments, index, node)
            is_handle = isinstance(value, per_replica.Handle)
            static_leaves.append(HandleReference(value) if is_handle else value)
            static_types.append(type(value))
        else:
            leaves.append(value)
        is_struct = abstract and isinstance(value, jax.ShapeDtypeStruct)
        if role is Role.PER_REPLICA and not (is_struct or arrays.is_array(value)):
            raise TypeError(
                f"{labels(fn, arguments)[index]} is a PerReplica around {value!r}, "
                "not around an array of shape [replica, ...]. Make it with "
                "`strategy.per_replica([v0, v1, ...])`."
            )
        roles.append(role)
        if role is Role.PER_REPLICA and node.mask is not None:
            _check_mask(node, lambda i=index: labels(fn, arguments)[i])
            leaves.append(node.mask)
            roles.append(Role.MASK)
    statics = tuple(static_leaves), tuple(static_types)
    return leaves, Signature(treedef, tuple(roles), *statics)


def _role(node: Leaf, abstract: bool) -> tuple[Role, Leaf]:
    if isinstance(node, PerReplica):
        return Role.PER_REPLICA, per_replica.contents(node)
    if isinstance(node, per_replica.Handle):
        return Role.STATIC, node
    if isinstance(node, jax.Array):
        return Role.SAME, node
    if abstract and isinstance(node, jax.ShapeDtypeStruct):
        return Role.SAME, node
    if isinstance(node, bool):
        return Role.STATIC, node
    if isinstance(node, (int, float, complex)):
        return Role.SAME, node
    if isinstance(node, (np.ndarray, np.generic)):
        # Text and objects cannot be traced; they are static if hashable.
        return (Role.STATIC if node.dtype.kind in "OSU" else Role.SAME), node
    if hasattr(type(node), "__jax_array__"):
        return Role.SAME, jnp.asarray(node)
    if hasattr(type(node), "__array__"):  # another library's tensor
        return Role.SAME, np.asarray(node)
    return Role.STATIC, node


def _check_mask(value: PerReplica, name: Callable[[], str]) -> None:
    mask, rows = value.mask, np.shape(per_replica.contents(value))[:2]
    if np.shape(mask) != rows or mask.dtype != bool:
        kind = array_type(mask.dtype, np.shape(mask), ", ")
        raise ValueError(
            f"{name()} is a batch of shape {rows} + ..., [replica, rows, ...], but the "
            f"mask of its rows is {kind}: a function was "
            "mapped over the batch, and so over the mask. Change batches inside the "
            "step, or before they are divided over the replicas."
        )


def _check_hashable(
    fn: Function, arguments: Arguments, index: int, value: Leaf
) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(
            f"{labels(fn, arguments)[index]} is {value!r}, a "
            f"{type(value).__name__}: not an array, a number or a registered pytree, "
            "so it would be a static part of the program, and those must be hashable. "
            "Pass an array, make its class hashable, or register it with "
            "`jax.tree_util.register_dataclass`."
        ) from error


def labels(fn: Function, arguments: Arguments) -> list[str]:
    """The leaves of the arguments as the caller writes them: `` `batch['x']` ``."""
    paths, _ = jax.tree.flatten_with_path(arguments, is_leaf=trees.is_whole)
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kind = inspect.Parameter
    positional = (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)
    found = []
    for (_, first, *path), _ in paths:
        if isinstance(first, jax.tree_util.DictKey):
            name = first.key
        elif first.idx < len(parameters) and parameters[first.idx].kind in positional:
            name = parameters[first.idx].name
        else:
            name = f"args[{first.idx}]"
        found.append(f"`{name}{jax.tree_util.keystr(tuple(path))}`")
    return found


def are_live_arrays(leaves: Sequence[Leaf]) -> bool:
    """Whether all leaves are arrays on devices, none of them donated before."""
    for is_deleted in (_plain_is_deleted(), _is_deleted):
        try:
            return not any(map(is_deleted, leaves))
        except (TypeError, AttributeError, jax.errors.ConcretizationTypeError):
            continue
    return False


def must_check_first(num_devices: int) -> bool:
    """Whether calls check for deleted and for twice donated arrays before JAX does."""
    # On several devices JAX 0.10 ends the process for these; else JAX raises.
    return num_devices > 1 and is_before_jaxlib_012()


@functools.cache
def is_before_jaxlib_012() -> bool:
    major, minor, *_ = metadata.version("jaxlib").split(".")
    return (int(major), int(minor)) < (0, 12)


def _is_deleted(leaf: Leaf) -> bool:
    """Whether an array of any class is deleted, at three times the cost."""
    # By class: a variable of Flax NNX has all methods of the array in it.
    if not isinstance(leaf, jax.Array):
        raise TypeError
    return leaf.is_deleted()


@functools.cache
def _plain_is_deleted() -> Callable[[jax.Array], bool]:
    """The method of the class of ordinary arrays, a name that JAX does not export."""
    with jax.ensure_compile_time_eval():
        return type(jax.device_put(0)).is_deleted


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


def _children(value: object) -> list[tuple[str, object]]:
    """The values that `value` holds, each with its path."""
    if isinstance(value, _CLOSED):
        return []
    found = [(f".{name}", item) for name, item in attributes_of(value).items()]
    if isinstance(value, dict):
        found += [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, _CONTAINERS):
        found += [(f"[{i}]", item) for i, item in enumerate(value)]
    elif isinstance(value, types.FunctionType):
        # Not its slots: `__globals__` is its whole module, half a second of it.
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=True):
            found.append((f" (captured as {name!r})", Binding(cell).get()))
        defaults = value.__defaults__, value.__kwdefaults__
        paths = ".__defaults__", ".__kwdefaults__"
        return [*found, *zip(paths, defaults, strict=True)]
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # it has no value yet
                    found.append((f".{name}", slot.__get__(value, type(value))))
    return found


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


def flatten_results(
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
