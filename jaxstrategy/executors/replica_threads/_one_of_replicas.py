"""One value of what each replica gives to `merge_call`: `OneOfReplicas`."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np
from jax.core import Tracer

from jaxstrategy._errors import ContextError
from jaxstrategy.contexts import _context
from jaxstrategy.contexts._abstract_strategy import AbstractStrategy
from jaxstrategy.executors.replica_threads import _versions_of_replicas
from jaxstrategy.executors.replica_threads._replica_thread import MergeCall
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.text._shown import shown
from jaxstrategy.values import _arrays, _trees
from jaxstrategy.values._per_replica import PerReplica
from jaxstrategy.values._types import Leaf, PyTree

_NUMBERS = (bool, int, float, complex)


@final
class OneOfReplicas:
    """Makes one value of all replicas' for code in cross-replica context.

    Args:
      replicas: all of them.
      name: of the step.
    """

    def __init__(self, replicas: Replicas, name: str) -> None:
        self._replicas = replicas
        self._name = name

    def merged(
        self, strategy: AbstractStrategy, calls: Sequence[MergeCall]
    ) -> list[PyTree]:
        """What each replica gets of a `merge_call`, which is made once for all."""
        merge_fn = self.function([each.merge_fn for each in calls], "`merge_fn`")
        args = self.tree([each.args for each in calls], "args")
        kwargs = self.tree([each.kwargs for each in calls], "kwargs")
        with _context.entered(strategy=strategy, replica=None):
            result = merge_fn(strategy, *args, **kwargs)
        return self.parts(result)

    def parts(self, result: PyTree) -> list[PyTree]:
        """What each replica gets of a result of all."""
        found: list[list[Leaf]] = []

        def take(leaf: Leaf) -> Leaf:
            found.append(_versions_of_replicas.apart(leaf, self._replicas))
            return leaf

        _trees.map_around_objects(take, result)
        trees = []
        for place in range(len(self._replicas.own)):
            following = iter(found)
            trees.append(
                _trees.map_around_objects(
                    lambda _, i=place, leaves=following: next(leaves)[i], result
                )
            )
        return trees

    def tree(self, trees: Sequence[PyTree], what: str) -> PyTree:
        """One pytree of those that replicas give, with `PerReplica`s for arrays."""
        paths, structure = jax.tree.flatten_with_path(trees[0], is_leaf=_is_leaf)
        columns = [[leaf] for _, leaf in paths]
        for number, tree in enumerate(trees[1:], start=1):
            leaves, other = jax.tree.flatten(tree, is_leaf=_is_leaf)
            if other != structure:
                raise ValueError(
                    f"`merge_call` was given `{what}` of other structures by the "
                    f"replicas of `{self._name}`: {structure} by the first, {other} by "
                    f"replica {self._replicas.own[number]}."
                )
            for column, leaf in zip(columns, leaves, strict=True):
                column.append(leaf)
        labels = [f"{what}{jax.tree_util.keystr(path)}" for path, _ in paths]
        pairs = zip(columns, labels, strict=True)
        return structure.unflatten([self._leaf(each, label) for each, label in pairs])

    def _leaf(self, column: Sequence[Leaf], label: str) -> Leaf:
        first = column[0]
        for leaf in column:
            if isinstance(leaf, PerReplica):
                leaf._misused()
            if isinstance(leaf, Tracer):
                raise ContextError(
                    f"`merge_call` was given, in `eager_replicas()`, `{label}` that "
                    "JAX traces (in a function that is differentiated or mapped), and "
                    "has no one number yet. Use `all_reduce` or `all_gather` there, or "
                    "leave `merge_call` out of what is traced."
                )
        if all(map(_arrays.is_array, column)):
            return self._array(column, label)
        if all(leaf is first for leaf in column):
            return first
        if callable(first):
            return self.function(column, f"`{label}`")
        if all(type(leaf) is type(first) and leaf == first for leaf in column):
            return first
        if all(isinstance(leaf, _NUMBERS) or _arrays.is_array(leaf) for leaf in column):
            return self._array([jax.numpy.asarray(leaf) for leaf in column], label)
        raise ValueError(
            f"`merge_call` was given `{label}` that differs between the replicas of "
            f"`{self._name}` and is no array: {', '.join(map(shown, column))}."
        )

    def _array(self, column: Sequence[Leaf], label: str) -> Leaf:
        if self._replicas.count == 1:
            return column[0]
        kinds = {(leaf.shape, leaf.dtype) for leaf in column}
        if len(kinds) > 1:
            seen = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in column)
            raise ValueError(
                f"`merge_call` was given `{label}` of other shapes or dtypes by the "
                f"replicas of `{self._name}`: {seen}. One array holds all versions, so "
                "they need one shape; pad them, or gather their sizes first."
            )
        return _versions_of_replicas.together(column, self._replicas)

    def function(self, found: Sequence[Any], what: str) -> Any:
        """One function of those that replicas give, which must do the same.

        What it refers to in its closure must be equal; arrays there are mirrored.
        """
        first = found[0]
        if all(each is first for each in found):
            return first
        kind = type(first)
        if any(type(each) is not kind for each in found):
            raise self._other_functions(what)
        if isinstance(first, types.FunctionType):
            return self._closure(found, what)
        if isinstance(first, types.MethodType):
            owner = self._captured([each.__self__ for each in found], what, "self")
            function = self.function([each.__func__ for each in found], what)
            return types.MethodType(function, owner)
        if isinstance(first, functools.partial):
            inner = self.function([each.func for each in found], what)
            args = self.tree([each.args for each in found], what)
            return functools.partial(
                inner, *args, **self.tree([each.keywords for each in found], what)
            )
        if all(each == first for each in found):
            return first
        raise self._other_functions(what)

    def _closure(
        self, found: Sequence[types.FunctionType], what: str
    ) -> types.FunctionType:
        first = found[0]
        code = first.__code__
        if any(each.__code__ is not code for each in found):
            raise self._other_functions(what)
        cells = []
        for place, name in enumerate(code.co_freevars):
            own = [(each.__closure__ or ())[place] for each in found]
            held = [_contents(cell) for cell in own]
            one = self._captured(held, what, name)
            cells.append(own[0] if one is held[0] else types.CellType(one))
        function = types.FunctionType(
            code, first.__globals__, first.__name__, None, tuple(cells)
        )
        defaults = [each.__defaults__ for each in found]
        function.__defaults__ = self._captured(defaults, what, "its defaults")
        named = [each.__kwdefaults__ for each in found]
        function.__kwdefaults__ = self._captured(named, what, "its defaults")
        return function

    def _captured(self, held: Sequence[Any], what: str, name: str) -> Any:
        first = held[0]
        is_array = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(first))
        if all(each is first for each in held) and not is_array:
            return first
        if isinstance(first, types.FunctionType):
            return self.function(held, what)
        structure = jax.tree.structure(first)
        if all(jax.tree.structure(each) == structure for each in held):
            columns = zip(*map(jax.tree.leaves, held), strict=True)
            return structure.unflatten(
                [self._equal(column, what, name) for column in columns]
            )
        raise self._differs(what, name)

    def _equal(self, column: Sequence[Leaf], what: str, name: str) -> Leaf:
        first = column[0]
        if all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in column):
            if any(isinstance(leaf, Tracer) for leaf in column):
                raise self._differs(what, name)
            if len(set(map(_versions_of_replicas.digest, column))) > 1:
                raise self._differs(what, name)
            return _versions_of_replicas.mirrored(first, self._replicas)
        if all(leaf is first for leaf in column):
            return first
        if callable(first):
            return self.function(column, what)
        if all(type(leaf) is type(first) and leaf == first for leaf in column):
            return first
        raise self._differs(what, name)

    def _differs(self, what: str, name: str) -> ValueError:
        return ValueError(
            f"The replicas of `{self._name}` called `merge_call`, in "
            f"`eager_replicas()`, with {what} that refers to `{name}`, which differs "
            "between them. It is called once for all: pass it as an argument, "
            f"`merge_call(merge_fn, args=({name},))`, which arrives as a PerReplica."
        )

    def _other_functions(self, what: str) -> ValueError:
        return ValueError(
            f"The replicas of `{self._name}` called `merge_call` with different "
            f"functions for {what}, which is called once for all. Give the same one on "
            "all replicas."
        )


def _contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return cell


def _is_leaf(node: object) -> bool:
    return _trees.is_whole(node)
