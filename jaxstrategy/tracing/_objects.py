"""Objects that a step changes in place: modules, optimizers and metrics of Flax NNX.

A compiled step is a function of arrays. So the arrays of all objects that it is given
are passed to it, objects like them are put together there, the step works on those, and
their new arrays are put into the caller's objects. An array that is reached in several
ways is passed once.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer

from jaxstrategy import _contexts, _source
from jaxstrategy._errors import NotMirroredError, ObjectError
from jaxstrategy._options import RunOptions, is_function
from jaxstrategy._values import PyTree
from jaxstrategy.tracing import _captured

_kinds: tuple[type, ...] = ()


def kinds() -> tuple[type, ...]:
    """The classes of such objects; none as long as Flax NNX is not imported."""
    global _kinds
    if not _kinds and (nnx := sys.modules.get("flax.nnx")) is not None:
        _kinds = (nnx.Pytree,)
    return _kinds


def is_object(node: object) -> bool:
    """Whether `node` is an object that a step may change in place."""
    return isinstance(node, _kinds)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The arrays that stand for an object.

    Attributes:
      arrays: they, or what else its variables hold.
      names: how messages call them.
    """

    arrays: Sequence[Any]
    names: tuple[str, ...]

    def tree_flatten(self) -> tuple[Sequence[Any], tuple[str, ...]]:
        """For JAX."""
        return self.arrays, self.names

    def tree_flatten_with_keys(self) -> tuple[list[Any], tuple[str, ...]]:
        """For JAX."""
        keys = map(jax.tree_util.GetAttrKey, self.names)
        return list(zip(keys, self.arrays, strict=True)), self.names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], arrays: Sequence[Any]) -> Parts:
        """For JAX."""
        return cls(arrays, names)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Same:
    """In what a step returns: one of the caller's objects, or a part of one."""

    path: tuple[Any, ...]


class Binding:
    """Some of the caller's objects, as they are put together now.

    Args:
      objects: they.

    Attributes:
      form: how objects like them are put together again.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        nnx = sys.modules["flax.nnx"]
        objects = list(objects)
        self._objects = [weakref.ref(each) for each in objects]
        nodes, self._structure = jax.tree.flatten(objects, is_leaf=_is_variable)
        self._nodes = nodes
        graph, state = nnx.split(objects)
        self._by_path = dict(nnx.iter_graph(objects))
        found, _ = jax.tree.flatten_with_path(state, is_leaf=_is_variable)
        paths = [tuple(key.key for key in path) for path, _ in found]
        self._variables = [self._by_path[path] for path in paths]
        for path, variable in zip(paths, self._variables, strict=True):
            if not _is_variable(variable):
                raise ObjectError(
                    f"`{_dotted(path)}` of {objects[path[0]]!r} is an array that is "
                    "not in an `nnx.Variable`, so that a step cannot give it back "
                    "changed. Write `nnx.Variable(array)`."
                )
        owners = [
            [i for i, path in enumerate(paths) if path[0] == place]
            for place in range(len(objects))
        ]
        self.form = Form(
            graph,
            jax.tree.structure(state, is_leaf=_is_variable),
            tuple(map(tuple, owners)),
            tuple(tuple(_dotted(paths[i]) for i in own) for own in owners),
        )
        self._templates = [leaf for _, leaf in found]
        self.form.templates = self._templates

    def is_of(self, objects: Sequence[Any]) -> bool:
        """Whether `objects` are these, put together as they were."""
        if [each() for each in self._objects] != list(objects):
            return False
        nodes, structure = jax.tree.flatten(list(objects), is_leaf=_is_variable)
        return structure == self._structure and all(
            a is b for a, b in zip(nodes, self._nodes, strict=True)
        )

    def parts(self) -> list[Parts]:
        """The arrays of each object."""
        values = [variable.get_raw_value() for variable in self._variables]
        return [
            Parts([values[i] for i in own], names)
            for own, names in zip(self.form.owners, self.form.names, strict=True)
        ]

    def fill(
        self, call: Call, rest: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call with more arguments, and the arrays that the objects have now."""
        parts = iter(self.parts())
        known = (call.args, call.kwargs)
        leaves, structure = jax.tree.flatten(known, is_leaf=_is_parts)
        leaves = [next(parts) if _is_parts(leaf) else leaf for leaf in leaves]
        args, captured = jax.tree.unflatten(structure, leaves)
        return (*args, *rest), {**kwargs, **captured}

    def store(self, parts: Sequence[Parts]) -> None:
        """Put new arrays into the objects, and change what else the step changed."""
        for own, part in zip(self.form.owners, parts, strict=True):
            for i, array in zip(own, part.arrays, strict=True):
                if isinstance(array, Tracer):  # Flax knows whether it may stay there
                    self._variables[i].set_value(array)
                else:
                    self._variables[i].set_raw_value(array)
        for path, name, value in self.form.changes:
            setattr(self._by_path[path], name, value)

    def with_callers_objects(self, returned: PyTree) -> PyTree:
        """What the step returned, with the caller's objects where it had them."""
        if not self.form.returns_objects:
            return returned
        roots = [each() for each in self._objects]

        def original(leaf: Any) -> Any:
            if not isinstance(leaf, _Same):
                return leaf
            (place, *rest) = leaf.path
            return self._by_path[leaf.path] if rest else roots[place]

        return jax.tree.map(original, returned, is_leaf=lambda x: isinstance(x, _Same))


@dataclasses.dataclass
class Form:
    """How objects are put together from arrays; equal for objects that are alike.

    Attributes:
      graph: Flax's description.
      structure: of their state.
      owners: for each object the variables that it has and none before it.
      names: of these.
      changes: what a step changes besides arrays: the path of a node, the name of its
        attribute, the value. Known when it was traced.
      returns_objects: whether it returns some of them.
    """

    graph: Any
    structure: Any
    owners: tuple[tuple[int, ...], ...]
    names: tuple[tuple[str, ...], ...]
    templates: list[Any] = dataclasses.field(default_factory=list, repr=False)
    changes: list[tuple[Any, str, Any]] = dataclasses.field(default_factory=list)
    returns_objects: bool = False

    @property
    def key(self) -> Any:
        """Equal for objects that are alike."""
        return self.graph, self.structure, self.owners

    def put_together(self, parts: Sequence[Parts]) -> list[Any]:
        """New objects with these arrays."""
        values: list[Any] = [None] * len(self.templates)
        for own, part in zip(self.owners, parts, strict=True):
            for i, array in zip(own, part.arrays, strict=True):
                values[i] = array
        state = jax.tree.unflatten(
            self.structure,
            [t.replace(v) for t, v in zip(self.templates, values, strict=True)],
        )
        return sys.modules["flax.nnx"].merge(self.graph, state)

    def take_apart(self, objects: list[Any]) -> list[Parts]:
        """The arrays of objects that were put together so, after the step.

        Raises:
          ObjectError: variables were added or removed.
        """
        nnx = sys.modules["flax.nnx"]
        graph, state = nnx.split(objects)
        leaves, structure = jax.tree.flatten(state, is_leaf=_is_variable)
        if structure != self.structure:
            raise ObjectError(
                "The step changed which variables its objects have: "
                f"{_difference(sum(self.names, ()), _paths(state))}. A compiled step "
                "gives back new arrays for the same variables: do this outside `run`, "
                "or take away (`nnx.pop`) what the step has added."
            )
        values = [leaf.get_raw_value() for leaf in leaves]
        if graph != self.graph:
            self.changes = list(self._changes(objects, state))
        return [
            Parts([values[i] for i in own], names)
            for own, names in zip(self.owners, self.names, strict=True)
        ]

    def _changes(self, objects: list[Any], state: Any) -> Iterator[Any]:
        nnx = sys.modules["flax.nnx"]
        before = dict(nnx.iter_graph(nnx.merge(self.graph, state)))
        for path, node in nnx.iter_graph(objects):
            if not is_object(node) or path not in before:
                continue
            old = vars(before[path])
            for name, value in vars(node).items():
                if name.startswith(("_pytree__", "_object__")) or not _is_plain(value):
                    continue
                if name not in old or old[name] != value:
                    yield path, name, value


def _is_plain(value: Any) -> bool:
    leaves = jax.tree.leaves(value, is_leaf=lambda x: is_object(x) or _is_variable(x))
    return not any(
        is_object(leaf) or _is_variable(leaf) or isinstance(leaf, jax.Array)
        for leaf in leaves
    )


def _is_variable(node: Any) -> bool:
    return isinstance(node, sys.modules["flax.nnx"].Variable)


def _dotted(path: Sequence[Any]) -> str:
    """`layers[0].kernel`, without the object's own place."""
    text = "".join(f"[{k}]" if isinstance(k, int) else f".{k}" for k in path[1:])
    return text.removeprefix(".") or "value"


def _paths(state: Any) -> set[str]:
    found, _ = jax.tree.flatten_with_path(state, is_leaf=_is_variable)
    return {_dotted([key.key for key in path]) for path, _ in found}


def _difference(before: Sequence[str], after: set[str]) -> str:
    added, removed = sorted(after - set(before)), sorted(set(before) - after)
    told = [f"added {_listed(added)}"] * bool(added)
    told += [f"removed {_listed(removed)}"] * bool(removed)
    return ", ".join(told) or "two names share one now, or do not any more"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - 3
    text = ", ".join(f"`{name}`" for name in names[:3])
    return f"{text} and {more} more" if more > 0 else text


# A step that works on objects, as a function of arrays.


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a step with objects, as one with arrays.

    Attributes:
      binding: the objects.
      captured: the names of those that the step captured.
      args: positional arguments, with `Parts` for objects.
      kwargs: keyword arguments; those that it captured stand here too.
    """

    binding: Binding
    captured: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_of(
    fn: Callable[..., Any], args: Any, kwargs: Any, known: Sequence[Binding] = ()
) -> Call | None:
    """The call `fn(*args, **kwargs)` as one with arrays; None without objects.

    Args:
      fn: the step.
      args: positional arguments.
      kwargs: keyword arguments.
      known: bindings that may be those of the objects.
    """
    if not kinds():
        return None
    captured = _captured.objects_of(fn, is_object)
    kwargs = {**kwargs, **captured}
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_given)
    objects = [leaf for leaf in leaves if _is_given(leaf)]
    if not objects:
        return None
    for binding in known:
        if binding.is_of(objects):
            break
    else:
        binding = Binding(objects)
    parts = iter(binding.parts())
    leaves = [next(parts) if _is_given(leaf) else leaf for leaf in leaves]
    args, kwargs = jax.tree.unflatten(structure, leaves)
    return Call(binding, tuple(captured), args, kwargs)


def as_arrays(
    fn: Callable[..., Any], args: Any, kwargs: Any, options: RunOptions
) -> tuple[Callable[..., Any], Any, Any, RunOptions]:
    """A call of a step as a function of arrays, whether it has objects or not."""
    call = call_of(fn, args, kwargs)
    if call is None:
        return fn, args, kwargs, options
    function = functional(lambda: fn, call.binding.form, call.captured)
    return function, call.args, call.kwargs, options_of(options)


def functional(
    get_fn: Callable[[], Any], form: Form, captured: tuple[str, ...]
) -> Callable[..., Any]:
    """A step with `Parts` for objects: what it returns, and their new arrays.

    Args:
      get_fn: returns the step, which is not kept alive.
      form: of the objects.
      captured: the names of those that the step captured.
    """

    def step(*args: Any, **kwargs: Any) -> tuple[PyTree, list[Parts]]:
        fn = get_fn()
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_parts)
        objects = form.put_together([leaf for leaf in leaves if _is_parts(leaf)])
        keys = _own_keys(objects)
        following = iter(objects)
        leaves = [next(following) if _is_parts(leaf) else leaf for leaf in leaves]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        own = _captured.with_objects(fn, {name: kwargs.pop(name) for name in captured})
        returned = own(*args, **kwargs)
        returned = _marked(returned, objects, form)
        for variable, folded, key in keys:
            if variable.get_raw_value() is folded:
                variable.set_raw_value(key)
        return returned, form.take_apart(objects)

    _name_like(step, get_fn())
    return step


def _name_like(step: Any, fn: Any) -> None:
    """What `functools.wraps` does, without a reference to `fn`."""
    step.__name__ = getattr(fn, "__name__", type(fn).__name__)
    step.__qualname__ = getattr(fn, "__qualname__", step.__name__)
    try:
        step.__signature__ = inspect.signature(fn)
    except (TypeError, ValueError):
        pass


def options_of(options: RunOptions) -> RunOptions:
    """The options of a step, for it as a function of arrays: its objects are mirrored.

    Replicas that go on with different weights are not one model any more.
    """
    expected = options.expect_mirrored
    if is_function(expected):

        def both(path: Any, leaf: Any) -> bool:
            return path[0].idx == 1 or expected(path[1:], leaf)

        return dataclasses.replace(options, expect_mirrored=both)
    own = False if expected is None else expected
    return dataclasses.replace(options, expect_mirrored=(own, True))


def explained(error: NotMirroredError) -> NotMirroredError:
    """An error about the results of the function of arrays, in terms of the objects."""
    found = re.fullmatch(r"(.*)\(\.\.\.\)\[(\d+)\](.*)", error.path or "", re.DOTALL)
    if found is None or found[2] != "1":
        path = error.path or ""
        return NotMirroredError(
            str(error).replace("(...)[0]", "(...)"),
            path=path.replace("(...)[0]", "(...)"),
            line=error.line,
        )
    _, *rest = str(error).splitlines()
    return NotMirroredError(
        f"`{found[1]}` leaves an object that it was given, or captured, different on "
        "each replica.\n"
        f"{rest[0]}\n"
        "Reduce what it is computed from: the gradients with "
        "`get_replica_context().all_reduce('mean', grads)`, statistics of BatchNorm "
        "with `jaxstrategy.flax.nnx.BatchNorm`, and give metrics what "
        "`get_replica_context().all_gather(values, 0)` returns.",
        path=error.path,
        line=error.line,
    )


def refused(error: Exception, name: str) -> ObjectError | None:
    """Flax's error about an object that a step captured, in our words."""
    is_ours = type(error).__name__ == "TraceContextError" or (
        isinstance(error, ValueError) and "different trace level" in str(error)
    )
    if not is_ours:
        return None
    line = _source.users_line(error.__traceback__)
    where = f"\n  {line}\n" if line else " "
    return ObjectError(
        f"`{name}` changes an object of Flax NNX that it was not given:{where}"
        "Pass it as an argument, and it is changed in place. Objects that a function "
        "captures by name are found too, but not attributes of other objects, or what "
        "functions of another module capture."
    )


def _own_keys(objects: list[Any]) -> list[tuple[Any, Any, Any]]:
    """Gives each replica random keys of its own, so that dropout differs.

    Returns:
      For each variable with a key: it, the replica's key, and the key of all.
    """
    context = _contexts.current()
    if context is None or context.strategy.num_replicas_in_sync == 1:
        return []
    nnx = sys.modules["flax.nnx"]
    found = []
    for _, node in nnx.iter_graph(objects):
        if isinstance(node, nnx.RngKey):
            key = node.get_raw_value()
            folded = context.replica.fold_in(key)
            node.set_raw_value(folded)
            found.append((node, folded, key))
    return found


def _marked(returned: PyTree, objects: list[Any], form: Form) -> PyTree:
    """What the step returned, with a mark for each object that it was given."""
    nnx = sys.modules["flax.nnx"]
    leaves, structure = jax.tree.flatten(returned, is_leaf=_is_given)
    if not any(map(_is_given, leaves)):
        return returned
    graph = list(nnx.iter_graph(objects))
    paths = {id(node): path for path, node in graph if _is_given(node)}
    given = {id(node) for _, node in graph}
    for i, leaf in enumerate(leaves):
        if not _is_given(leaf):
            continue
        if id(leaf) in paths:
            leaves[i] = _Same(paths[id(leaf)])
            form.returns_objects = True
        elif any(id(n) in given for _, n in nnx.iter_graph(leaf) if _is_variable(n)):
            raise ObjectError(
                f"The step returned a new {type(leaf).__name__} that shares variables "
                "with an object that it was given; they would not be shared any more. "
                "Return the object itself, or nothing: it is changed in place."
            )
    return jax.tree.unflatten(structure, leaves)


def _is_given(node: Any) -> bool:
    return isinstance(node, _kinds)


def _is_parts(node: Any) -> bool:
    return isinstance(node, Parts)
