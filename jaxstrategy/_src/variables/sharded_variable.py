"""`ShardedVariable`: a table in several variables, and `embedding_lookup`."""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import SequenceKey

from jaxstrategy._src.contexts import context, replica_context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.options import VariableAggregation, VariableSynchronization
from jaxstrategy._src.reductions.rows import own_rows, row_numbers, row_starts
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.sharded import lookup
from jaxstrategy._src.sharded.lookup import Combiner
from jaxstrategy._src.text import array_type, shown
from jaxstrategy._src.values import per_replica
from jaxstrategy._src.values.arrays import Index, Leaf, Value
from jaxstrategy._src.values.per_replica import Handle, PerReplica
from jaxstrategy._src.values.slices import IndexedSlices, is_slices
from jaxstrategy._src.variables import access, rows as _rows
from jaxstrategy._src.variables.access import Access, Side
from jaxstrategy._src.variables.changes import WORDS, Change, VariableLike, VariablePart
from jaxstrategy._src.variables.initial_value import is_host_array
from jaxstrategy._src.variables.kinds import VariableKind, whole
from jaxstrategy._src.variables.remote_kinds import server_kind_of

_ALIKE: dict[str, Any] = {
    "dtype": lambda each: each.dtype.name,
    "number of dimensions": lambda each: each.ndim,
    "shape beyond dimension 0": lambda each: each.shape[1:],
    "strategy": lambda each: each.strategy,
    "synchronization": lambda each: each.synchronization.name,
    "aggregation": lambda each: each.aggregation.name,
}


_Part: TypeAlias = tuple[Any, Value, Change]
"""A shard that changes, what it takes, and how."""

# By the numbers of their shards, so that what JAX takes apart becomes the same again.
_known: weakref.WeakValueDictionary[tuple[int, ...], ShardedVariable]
_known = weakref.WeakValueDictionary()
_all_shards: weakref.WeakSet[Handle] = weakref.WeakSet()


def is_shard(variable: Handle) -> bool:
    """Whether it is, or was, one of several that are used as one."""
    return variable in _all_shards


@final
@jax.tree_util.register_pytree_with_keys_class
class ShardedVariable(VariableLike):
    """A table in several variables, the shards: each has some of its rows.

    It is used as one variable of the shape of all: in arithmetic and `jnp` functions it
    stands for its value, `v[1:3]` is the value of a part and can be assigned, and
    `assign` and its kin take a value for all. What is asked of some rows (a part,
    `sparse_read`, `js.experimental.embedding_lookup`, the `scatter_` methods) goes to
    the shards that have them.

    `Variable(...)` in the scope of a strategy that has a partitioner returns one. With
    respect to one that is used in `embedding_lookup` only, `js.grad` gives the rows, as
    `IndexedSlices`; otherwise an array of its shape.

    To JAX it is a pytree of its shards. What `jax.jit` or `jax.tree.map` make of it is
    one of arrays, which is read in the same ways, and cannot be assigned.

    Args:
      variables: the shards, in the order of their rows: of one dtype, and of one shape
        but for dimension 0.
      name: for messages.

    Raises:
      TypeError: not a list of variables, or an empty one.
      ValueError: shards that are no rows of one table: of several dtypes or shapes, of
        other strategies or aggregations; one that is there twice.

    >>> import jaxstrategy as js
    >>> shards = [js.Variable([[1.0, 2.0]]), js.Variable([[3.0, 4.0], [5.0, 6.0]])]
    >>> table = js.experimental.ShardedVariable(shards, name="table")
    >>> table
    <ShardedVariable 'table' float32[3,2], in shards of 1 and 2 rows>
    >>> table.assign_add(jnp.ones((3, 2))) is table
    True
    >>> table[1:].value()
    Array([[4., 5.],
           [6., 7.]], dtype=float32)
    >>> rows = js.IndexedSlices(jnp.array([[9.0, 9.0]]), jnp.array([2]))
    >>> _ = table.scatter_update(rows)
    >>> shards[1].numpy()
    array([[4., 5.],
           [9., 9.]], dtype=float32)
    """

    # Variables, or what JAX puts in their place.
    _shards: tuple[Any, ...]

    def __init__(self, variables: Sequence[Any], name: str = "ShardedVariable") -> None:
        self._shards = _checked_shards(variables, name)
        self._name = name
        _known[tuple(shard.number for shard in self._shards)] = self
        _all_shards.update(self._shards)

    @property
    def variables(self) -> list[Any]:
        """The shards, in the order of their rows."""
        return list(self._shards)

    # What no assignment changes.

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return (self._starts[-1], *self._shards[0].shape[1:])

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the value."""
        return self._shards[0].dtype

    @property
    def trainable(self) -> bool:
        """Whether an optimizer should change it."""
        return all(shard.trainable for shard in self._shards)

    @property
    def synchronization(self) -> VariableSynchronization:
        """The moment at which copies of the shards are brought together."""
        return self._shards[0].synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """The operation that makes one value of copies, or of those assigned."""
        return self._shards[0].aggregation

    @property
    def strategy(self) -> AbstractStrategy | None:
        """The strategy it belongs to, None for ordinary variables."""
        return self._shards[0].strategy

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices that hold a copy of a shard."""
        every = (device for shard in self._shards for device in shard.devices)
        return tuple(dict.fromkeys(every))

    @property
    def device(self) -> NoReturn:
        """None, but an AttributeError with the device of each shard."""
        each = ", ".join(f"{s.name!r} on {s.device}" for s in self._shards)
        raise AttributeError(
            f"Variable {self._name!r} has no one device: its shards are {each}. Ask "
            "one of `variables`."
        )

    # Its value.

    def value(self) -> jax.Array:
        """The value: all rows, of the shape of the whole.

        Raises:
          ValueError: outside `run`, of on-read variables whose aggregation is NONE.
          ContextError: in another strategy's scope or `run`.
        """
        values = [
            shard.value() if isinstance(shard, Handle) else shard
            for shard in self._shards
        ]
        return values[0] if len(values) == 1 else jnp.concatenate(values)

    def numpy(self) -> np.ndarray:
        return np.concatenate([np.asarray(shard) for shard in self._shards])

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Index) -> VariablePart:
        value = _rows.part(self._shards, index, self.value)
        return VariablePart(value, index, self._write)

    def rows_at(self, ids: jax.Array) -> jax.Array:
        return _rows.looked_up(self._shards, ids)

    def gather_nd(self, indices: Value, name: str | None = None) -> jax.Array:
        """The entries at `indices`, `[..., k]`: the first k dimensions' indices each.

        Each dimension that it has more stands behind theirs.

        Raises:
          IndexError: one of them is in no row.
          TypeError: they are no whole numbers.
        """
        first, *rest = jnp.moveaxis(mesh.array_of(indices), -1, 0)
        rows = self.sparse_read(first)
        if not rest:
            return rows
        flat = rows.reshape(first.size, *self.shape[1:])
        each = [index.reshape(-1) for index in rest]
        found = flat[(jnp.arange(first.size), *each)]
        return found.reshape(*first.shape, *self.shape[1 + len(rest) :])

    # Changes of it. Nothing is changed if what was given does not fit.

    def _write(self, value: Value, change: Change) -> Any:
        self._check_changeable(change)
        is_rows = is_slices(value) and self._kind.copies_must_agree
        if is_rows and change.is_whole and change.operation != "set":
            return self._change_rows(value, change)
        value = whole(value, self.shape)
        if isinstance(value, PerReplica) and access.tracing() is not None:
            value = replica_context.to_replica(value)
        parts = self._parts if change.is_whole else self._parts_of_index
        with access.one_at_a_time:
            for shard, part, own in list(parts(value, change)):
                shard._change_by(shard._kind.write, part, own)
        return self

    def _parts(self, value: Value, change: Change) -> Iterator[_Part]:
        kind, shape, dtype = self._kind, self.shape, self.dtype
        if isinstance(value, PerReplica):
            versions = per_replica.contents(value)
            kind._checked(versions, (len(versions), *shape), dtype)
            for shard, start, stop in self._bounded:
                yield shard, PerReplica(versions[:, start:stop]), change
            return
        if is_host_array(value):
            # Checked by its type: no device need have all of it.
            jax.eval_shape(lambda given: kind._checked(given, shape, dtype), value)
        else:
            value = kind._checked(value, shape, dtype)
        for shard, start, stop in self._bounded:
            yield shard, value[start:stop], change

    def _parts_of_index(self, value: Value, change: Change) -> Iterator[_Part]:
        """As `_parts`, of a part of all: its rows, or entries that arrays name."""
        index, shape = change.index, self.shape
        is_named = isinstance(index, tuple) and isinstance((*index, 0)[0], jax.Array)
        found = None if is_named else _rows.row_index(index, len(shape))
        if found is None and not is_named:
            raise TypeError(
                f"`{change.method}` of variable {self._name!r}, which is in shards, "
                f"was called on its part [{shown(index)}]; numbers and slices were "
                "wanted. For rows that an array names use `scatter_update`, "
                "`scatter_add` and their kin."
            )
        given = self._kind._checked_part(value, shape, self.dtype, change)
        if found is None:
            first, *rest = index
            for shard, own in zip(self._shards, self._own(first), strict=True):
                yield shard, given, change.of_part((own, *rest))
            return
        named, rest = found
        for number, rows, place in _rows.row_pieces(named, self._starts):
            is_many = isinstance(named, slice)
            own = _rows.as_slice(rows) if is_many else rows[0]
            part = given[place] if is_many else given
            yield self._shards[number], part, change.of_part((own, *rest))

    def _change_rows(self, rows: IndexedSlices, change: Change) -> Any:
        self._check_changeable(change)
        kind, shape = self._kind, self.shape
        at = self._shards[0]._access()
        rows = kind.rows_for(at, rows, change)
        if rows.dense_shape not in (None, shape):
            raise ValueError(
                f"Variable {self._name!r} has shape {shape} and was given rows of an "
                f"array of shape {rows.dense_shape}."
            )
        ids = lookup.checked_ids(rows.indices, shape[0], self._name)
        values = kind._checked(rows.values, (len(ids), *shape[1:]), self.dtype)
        rows = kind.combined(at, IndexedSlices(values, ids))
        with access.one_at_a_time:
            if at.in_step and kind.has_remote_rows:
                self._change_together(rows, change)
                return self
            # Of known rows, shards without any are left out.
            ids, values = rows.indices, rows.values
            known = None if at.in_step else lookup.known_numbers(ids)
            if known is None:
                every = zip(self._shards, self._own(ids), strict=True)
                pieces = [(shard, IndexedSlices(values, own)) for shard, own in every]
            else:
                pieces = []
                for number, (places, own) in _rows.places_of(known, self._starts):
                    some = values if len(places) == len(known) else values[places]
                    pieces.append((self._shards[number], IndexedSlices(some, own)))
            for shard, own in pieces:

                def scatter(at: Access, *given: Any, kind: Any = shard._kind) -> Any:
                    # The rows are those of all replicas.
                    return kind.scatter(at._replace(side=Side.CROSS), *given)

                shard._change_by(scatter, own, change)
        return self

    def _change_together(self, rows: IndexedSlices, change: Change) -> None:
        """Change all shards by one equation, in a function that goes to workers."""
        held = [shard._access().holder[...] for shard in self._shards]
        ids, values = rows.indices, rows.values
        new = _rows.changed_rows(WORDS[change.operation], ids, values, held)
        for shard, each, own in zip(self._shards, new, self._own(ids), strict=True):
            kind = server_kind_of(shard)
            assert kind is not None, "the shards of a table are of one kind"
            rows = IndexedSlices(values, own)
            shard._change_by(kind.rows_changed, rows, change, each)

    def _own(self, ids: jax.Array) -> Iterator[jax.Array]:
        """For each shard the numbers of its rows, its length for those of others."""
        starts = self._starts
        return (own for own, _ in own_rows(row_numbers(ids, starts[-1]), starts))

    def _check_changeable(self, change: Change) -> None:
        if not self.holds_variables:
            raise TypeError(
                f"`{change.method}` was called on what JAX made of a "
                "`ShardedVariable`: its shards are arrays, which do not change. Assign "
                "the variable itself, outside of what `jax.jit` traces."
            )

    @functools.cached_property
    def _kind(self) -> VariableKind:
        """That of the first shard, which speaks of the whole in messages."""
        kind = copy.copy(self._shards[0]._kind)
        kind.name = self._name
        return kind

    # Its shards.

    @property
    def holds_variables(self) -> bool:
        """Whether the shards are variables, and not what JAX made of them."""
        return all(isinstance(shard, Handle) for shard in self._shards)

    @property
    def _starts(self) -> list[int]:
        return row_starts(self._shards)

    @property
    def _bounded(self) -> Iterator[tuple[Any, int, int]]:
        """Each shard with its first row, and the one behind its last."""
        for shard, bounds in zip(
            self._shards, itertools.pairwise(self._starts), strict=True
        ):
            yield shard, *bounds

    # How it prints and copies.

    def __repr__(self) -> str:
        if not all(hasattr(shard, "shape") for shard in self._shards):
            return f"ShardedVariable({list(self._shards)!r})"
        kind = array_type(np.dtype(self.dtype).name, self.shape)
        *most, last = (str(shard.shape[0]) for shard in self._shards)
        lengths = f"{', '.join(most)} and {last}" if most else last
        shards = "shards" if most else "one shard"
        rows = "row" if lengths == "1" else "rows"
        return (
            f"<ShardedVariable {self._name!r} {kind}, in {shards} of {lengths} {rows}>"
        )

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, object]) -> ShardedVariable:
        twin = ShardedVariable(copy.deepcopy(list(self._shards), memo), self._name)
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[object, ...]:
        if context.current().is_shipping:
            return ShardedVariable, (list(self._shards), self._name)
        self._cannot_be_pickled()

    # To JAX it is a node around its shards.

    def tree_flatten_with_keys(
        self,
    ) -> tuple[tuple[tuple[object, Leaf], ...], None]:
        """The shards, by their numbers."""
        numbered = ((SequenceKey(i), shard) for i, shard in enumerate(self._shards))
        return tuple(numbered), None

    def tree_flatten(self) -> tuple[tuple[Leaf, ...], None]:
        """The shards."""
        return self._shards, None

    @classmethod
    def tree_unflatten(
        cls, auxiliary: None, children: tuple[Leaf, ...]
    ) -> ShardedVariable:
        """The same one again; one of arrays, if the shards have become these."""
        children = tuple(children)
        if all(isinstance(child, Handle) for child in children):
            found = _known.get(tuple(child.number for child in children))
            if found is not None:
                return found
        made = object.__new__(cls)
        made._shards, made._name = children, "ShardedVariable"
        return made


def _checked_shards(given: object, name: str) -> tuple[Any, ...]:
    """`given` as the shards of a table."""
    shards = tuple(given) if isinstance(given, Sequence) else ()
    if not shards or not all(isinstance(each, Handle) for each in shards):
        wrong = [each for each in shards if not isinstance(each, Handle)]
        which = f", which holds a {type(wrong[0]).__name__}" if wrong else ""
        raise TypeError(
            f"`variables` of ShardedVariable {name!r} was {shown(given)}{which}; a "
            "list of one or more `Variable`s was wanted."
        )
    if len({id(each) for each in shards}) < len(shards):
        raise ValueError(
            f"`variables` of ShardedVariable {name!r} has a variable twice; each row "
            "must be in one shard."
        )
    first = shards[0]
    if not first.shape:
        raise ValueError(
            f"Variable {first.name!r} has no dimensions, and so no rows; shards "
            f"[rows, ...] of ShardedVariable {name!r} were wanted."
        )
    for other, (what, see) in itertools.product(shards[1:], _ALIKE.items()):
        if see(first) != see(other):
            raise ValueError(
                f"The shards of ShardedVariable {name!r} differ in their {what}: "
                f"{first.name!r} has {see(first)} and {other.name!r} has {see(other)}. "
                "All must have the same, and only dimension 0 may be of another length."
            )
    return shards


Table: TypeAlias = ShardedVariable | Handle | jax.Array


def embedding_lookup(
    params: Table,
    ids: Value,
    max_norm: float | None = None,
    *,
    combiner: Combiner | None = None,
    weights: Value | None = None,
) -> jax.Array:
    """The rows of a table with these ids, or one row for each group of ids.

    Of a variable on parameter servers only these rows are read, each from the server
    that has it. With respect to a `ShardedVariable` that a function uses in no other
    way, `js.grad` gives `IndexedSlices`: the rows that were looked up.

    Shapes: table `[rows, ...]`, ids `[...]` -> `[*ids.shape, *table.shape[1:]]`, or
    with a combiner, without the last dimension of the ids.

    Args:
      params: a variable, a `ShardedVariable` or an array.
      ids: whole numbers from 0 to the number of rows. Of those that are traced, one
        that is no row gives what `jnp.take` fills in, NaN, and on a server an error.
      max_norm: rows that are longer are made this long; the table does not change.
      combiner: how the rows of the last dimension of `ids` become one: "sum", "mean"
        or "sqrtn", as in `js.sharded.lookup`. A negative id then stands for none, so
        that groups of several lengths can be filled up; a group without ids is zeros.
      weights: for each id, of the same shape. For "mean" and "sqrtn", an id of which
        it is not positive counts as none.

    Raises:
      IndexError: an id is no row.
      ValueError: a table without dimensions; no such combiner; weights of another
        shape, or without a combiner; `max_norm` is not positive.
      TypeError: the ids are no whole numbers; `params` is no table.

    >>> import jaxstrategy as js
    >>> shards = [js.Variable([[1.0, 2.0], [3.0, 4.0]]), js.Variable([[5.0, 6.0]])]
    >>> table = js.experimental.ShardedVariable(shards)
    >>> js.experimental.embedding_lookup(table, [2, 0])
    Array([[5., 6.],
           [1., 2.]], dtype=float32)
    >>> groups = [[0, 2], [1, -1]]  # [0, 2] and [1]
    >>> js.experimental.embedding_lookup(table, groups, combiner="mean")
    Array([[3., 4.],
           [3., 4.]], dtype=float32)
    """
    if isinstance(params, (list, tuple)):
        raise TypeError(
            f"`params` was a {type(params).__name__} of {len(params)}; one variable or "
            "array was wanted. Shards that are one table, one's rows after the "
            "other's, are `js.experimental.ShardedVariable(shards)`."
        )
    is_variable = isinstance(params, (ShardedVariable, Handle))
    table: Any = params if is_variable else lookup.array("params", params)
    if not table.ndim:
        raise ValueError(
            "`params` has no dimensions, and so no rows; [rows, ...] was wanted."
        )
    shape, has_groups = table.shape, combiner is not None
    name = getattr(table, "name", "params")
    numbers = lookup.checked_ids(ids, shape[0], name, are_padded=has_groups)
    each = lookup.check_combiner(combiner, numbers, weights)
    is_none = numbers < 0
    if each is not None and combiner != "sum":
        is_none |= each <= 0
    # Row 0 in the place of none: a server refuses what is no row.
    asked = jnp.where(is_none, 0, numbers) if has_groups else numbers
    shards = table._shards if isinstance(table, ShardedVariable) else (table,)
    rows = _rows.looked_up(shards, asked)
    rows = _shortened(rows, len(shape) - 1, max_norm)
    if combiner is None:
        return rows
    mask = is_none.reshape(*is_none.shape, *(1,) * (len(shape) - 1))
    rows = jnp.where(mask, jnp.zeros_like(rows), rows)
    return lookup.combined(rows, jnp.where(is_none, -1, numbers), combiner, each)


def _shortened(rows: jax.Array, rank: int, max_norm: float | None) -> jax.Array:
    """Each row, of so many dimensions, at most as long as `max_norm`."""
    if max_norm is None:
        return rows
    if not isinstance(max_norm, Tracer) and not max_norm > 0:
        raise ValueError(f"`max_norm` was {shown(max_norm)}; more than 0 was wanted.")
    axes = tuple(range(rows.ndim - rank, rows.ndim))
    squares = (rows**2).sum(axes, keepdims=True)
    # The derivative of the root of 0 would be infinite.
    is_long = squares > max_norm**2
    norms = jnp.sqrt(jnp.where(is_long, squares, 1))
    return jnp.where(is_long, rows * (max_norm / norms), rows).astype(rows.dtype)
