"""Gradients with respect to the variables that a function reads."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.reductions.rows import over_rows, row_numbers, row_starts
from jaxstrategy._src.sharded.lookup import known_numbers
from jaxstrategy._src.values.arrays import PyTree
from jaxstrategy._src.values.per_replica import Handle
from jaxstrategy._src.values.slices import IndexedSlices
from jaxstrategy._src.variables import access, sharded_variable
from jaxstrategy._src.variables.rows import Lookup, RowTape, recording
from jaxstrategy._src.variables.sharded_variable import ShardedVariable
from jaxstrategy._src.variables.variable import Variable


def _lookups_of(
    fn: Callable[[], object], values: Mapping[int, jax.Array], tables: Iterable[int]
) -> tuple[list[Lookup], set[int]]:
    """The lookups of a function in tables, and variables that it uses only so."""
    made: list[RowTape] = []

    def traced(own: dict[int, jax.Array]) -> tuple[()]:
        made.append(RowTape(tables))
        given = access.entered({**values, **own}, is_repeated=False)
        with given, recording(made[-1]):
            fn()
        return ()

    types = jax.eval_shape(lambda given: given, {key: values[key] for key in tables})
    is_initial = access.tracing() is None  # then it must not change how they are kept
    try:
        with context.entered(is_initial=is_initial):
            jax.eval_shape(traced, types)
    except Exception:  # it looks at numbers; or fails, and will say so when called
        return [], set()
    (tape,) = made
    sparse = tape.sparse()
    return [each for each in tape.lookups if sparse.intersection(each.shards)], sparse


def _is_table(variable: Handle) -> bool:
    """Whether the gradient with respect to it is worth knowing by rows."""
    if not isinstance(variable, Variable) or not variable.ndim:
        return False
    is_float = jnp.issubdtype(variable.dtype, jnp.inexact)
    is_shard = sharded_variable.is_shard(variable)
    return is_float and (is_shard or variable._kind.has_remote_rows)


_RowGradient: TypeAlias = tuple[Lookup, jax.Array, jax.Array]
"""A lookup, its ids, and the gradient with respect to its rows, `[n, ...]`."""


def _of_rows(parts: Sequence[Handle], found: Sequence[_RowGradient]) -> IndexedSlices:
    """The gradient with respect to a table, of these shards."""
    # A row that was looked up twice is there twice. Of rows that are traced, one that
    # is in another shard stands as zeros of row 0.
    shards = [part for part in parts if isinstance(part, Variable)]
    first = row_starts(shards)
    starts = dict(zip(map(id, shards), first, strict=False))
    shape = (first[-1], *shards[0].shape[1:])
    indices = [jnp.zeros((0,), jnp.int32)]
    values = [jnp.zeros((0, *shape[1:]), shards[0].dtype)]
    for lookup, ids, gradient in found:
        if lookup.shards == tuple(starts):
            bounds = [(0, lookup.starts[-1], 0)]
        else:
            every = zip(lookup.shards, itertools.pairwise(lookup.starts), strict=True)
            bounds = [
                (start, stop, starts[key] - start)
                for key, (start, stop) in every
                if key in starts
            ]
        for each in bounds:
            own, rows = _within(ids, gradient, *each)
            indices.append(row_numbers(own, first[-1]))
            values.append(rows)
    return IndexedSlices(jnp.concatenate(values), jnp.concatenate(indices), shape)


def _within(
    ids: jax.Array, gradient: jax.Array, start: int, stop: int, offset: int
) -> tuple[jax.Array, jax.Array]:
    """The rows from `start` to `stop`, as numbers that `offset` is added to."""
    known = known_numbers(ids)
    if known is not None:
        (places,) = np.nonzero((known >= start) & (known < stop))
        if len(places) == len(known):
            return ids + offset, gradient
        return jnp.asarray(known[places] + offset), gradient[places]
    is_own = (ids >= start) & (ids < stop)
    rows = jnp.where(over_rows(is_own, gradient), gradient, 0)
    return jnp.where(is_own, ids + offset, 0), rows


_Source: TypeAlias = Handle | ShardedVariable


def value_and_grad(
    fn: Callable[..., PyTree], variables: PyTree, has_aux: bool = False
) -> Callable[..., tuple[PyTree, PyTree]]:
    """A function that calls `fn` and also differentiates it, like `jax.value_and_grad`.

    The gradient is with respect to variables that `fn` reads, not to its arguments. It
    is this replica's own inside `run`, as always: reduce it yourself. `fn` must not
    assign those variables; others it may.

    With respect to a `ShardedVariable`, one of its shards, or a variable on a parameter
    server it is `IndexedSlices`, the rows that were looked up, if `fn` uses that in
    `js.experimental.embedding_lookup` and `sparse_read` only, and not in a loop or in a
    function that JAX traces by itself. To find that out, `fn` is traced once before.

    Args:
      fn: returns a scalar, or with `has_aux` a scalar and something else.
      variables: a pytree of variables.
      has_aux: see `fn`.

    Returns:
      A function of the arguments of `fn` that returns what `fn` does, and gradients in
      a pytree like `variables`, each of the shape of its variable; of a table in
      shards, or on a parameter server, that `fn` only looks rows up in, those rows as
      `IndexedSlices`.

    Raises:
      TypeError: a leaf of `variables` is no variable.
      ValueError: `fn` assigns one of them.
      ContextError: `fn` runs a step that uses one of them.

    >>> import jaxstrategy as js
    >>> w = js.Variable(3.0)
    >>> loss_and_grad = js.value_and_grad(lambda x: (w * x) ** 2, [w])
    >>> loss_and_grad(2.0)
    (Array(36., dtype=float32), [Array(24., dtype=float32)])
    """
    leaves, treedef = jax.tree.flatten(
        variables, is_leaf=lambda node: isinstance(node, _Source)
    )
    for leaf in leaves:
        if not isinstance(leaf, _Source):
            raise TypeError(
                f"`variables` holds {leaf!r}, which is no Variable. For gradients with "
                "respect to arguments use `jax.value_and_grad`."
            )
    # By identity, so that a variable that is there twice gets its gradient twice.
    parts = {id(part): part for leaf in leaves for part in _parts_of(leaf)}

    def differentiated(*args: Any, **kwargs: Any) -> tuple[PyTree, PyTree]:
        values = {key: part.value() for key, part in parts.items()}

        def called(own: Mapping[int, jax.Array], tape: RowTape | None) -> PyTree:
            with access.entered({**values, **own}), recording(tape):
                return fn(*args, **kwargs)

        tables = [key for key, part in parts.items() if _is_table(part)]
        lookups, sparse = [], set()
        if tables:
            probed = functools.partial(fn, *args, **kwargs)
            lookups, sparse = _lookups_of(probed, values, tables)
        whole = {key: value for key, value in values.items() if key not in sparse}

        def of_values(
            own: dict[int, jax.Array], added: Sequence[jax.Array]
        ) -> tuple[jax.Array, tuple[PyTree, list[jax.Array]]]:
            tape = RowTape(sparse, added) if sparse else None
            result = called(own, tape)
            loss, aux = result if has_aux else (result, None)
            return loss, (aux, tape.ids if tape is not None else [])

        added = [jnp.zeros(each.rows.shape, each.rows.dtype) for each in lookups]
        both = jax.value_and_grad(of_values, argnums=(0, 1), has_aux=True)
        (loss, (aux, ids)), (of_whole, of_rows) = both(whole, added)
        found = list(zip(lookups, ids, of_rows, strict=True))
        grads: list[PyTree] = []
        for leaf in leaves:
            own = _parts_of(leaf)
            if not any(id(part) in of_whole for part in own):
                grads.append(_of_rows(own, found))
                continue
            dense = [
                of_whole[id(part)]
                if id(part) in of_whole
                else _of_rows([part], found).to_dense()
                for part in own
            ]
            grads.append(dense[0] if len(dense) == 1 else jnp.concatenate(dense))
        return (loss, aux) if has_aux else loss, treedef.unflatten(grads)

    return differentiated


def grad(
    fn: Callable[..., PyTree], variables: PyTree, has_aux: bool = False
) -> Callable[..., PyTree]:
    """The same as `value_and_grad`, without the value.

    Returns:
      A function of the arguments of `fn` that returns the gradients, each of the shape
      of its variable; with `has_aux` the gradients and what `fn` returns beside the
      scalar.

    >>> import jaxstrategy as js
    >>> w = js.Variable(3.0)
    >>> js.grad(lambda x: (w * x) ** 2, {"w": w})(2.0)
    {'w': Array(24., dtype=float32)}
    """
    both = value_and_grad(fn, variables, has_aux)

    def differentiated(*args: Any, **kwargs: Any) -> PyTree:
        result, grads = both(*args, **kwargs)
        return (grads, result[1]) if has_aux else grads

    return differentiated


def value_and_grad_of_read(
    fn: Callable[..., tuple[PyTree, PyTree]], strategy: AbstractStrategy
) -> Callable[..., tuple[PyTree, list[tuple[PyTree, Variable]]]]:
    """A function that calls `fn` and differentiates it by the variables it reads."""

    def differentiated(
        *args: Any,
    ) -> tuple[PyTree, list[tuple[PyTree, Variable]]]:
        found, read = _trainable(strategy), set[int]()
        with context.entered(reads=read):
            result, grads = value_and_grad(fn, found, has_aux=True)(*args)
        made = [v for v in _trainable(strategy) if all(v is not each for each in found)]
        if made:
            raise ValueError(
                f"Variable {made[0].name!r} was made inside the function that is "
                "differentiated with respect to the variables that it reads. Make "
                "variables before: call the function once by itself, in a step, or "
                "make them in the strategy's `scope()`."
            )
        pairs = zip(grads, found, strict=True)
        return result, [(grad, each) for grad, each in pairs if id(each) in read]

    return differentiated


def _trainable(strategy: AbstractStrategy) -> list[Variable]:
    """The variables with respect to which something in a step may be differentiated."""
    usable = cast("list[Variable]", access.usable_by(strategy))
    return [v for v in usable if v.trainable and jnp.issubdtype(v.dtype, jnp.inexact)]


def _parts_of(source: _Source) -> Sequence[Handle]:
    return source.variables if isinstance(source, ShardedVariable) else (source,)
