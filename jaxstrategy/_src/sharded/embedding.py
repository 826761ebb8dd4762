"""Embedding tables, and optimizers that change only rows with a gradient."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.contexts.replica_context import ReplicaContext
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.reductions import rows as _rows
from jaxstrategy._src.reductions.operations import OPERATIONS, Axes
from jaxstrategy._src.reductions.rows import ShardFunction, registered, summed_by_id
from jaxstrategy._src.sharded import lookup as _lookup
from jaxstrategy._src.sharded.lookup import Combiner
from jaxstrategy._src.text import shown, whole
from jaxstrategy._src.values.arrays import Value
from jaxstrategy._src.values.slices import IndexedSlices

Slots: TypeAlias = dict[str, jax.Array]
"""The optimizer's state by name: arrays of the shape of the table."""


class RowOptimizer(abc.ABC):
    """An optimizer that changes each row by that row's gradient and slots alone.

    A row whose gradient is zero must stay as it is. Two optimizers of one class differ
    in their numbers only.

    Attributes:
      learning_rate: the factor of a step.
    """

    learning_rate: float

    @abc.abstractmethod
    def slots(self, table: jax.Array) -> Slots:
        """The slots of a new table."""

    @property
    @abc.abstractmethod
    def numbers(self) -> tuple[float, ...]:
        """The numbers that `changed` uses besides the learning rate."""

    @staticmethod
    @abc.abstractmethod
    def changed(
        rows: jax.Array,
        slots: Slots,
        gradient: jax.Array,
        learning_rate: jax.Array,
        *numbers: jax.Array,
    ) -> tuple[jax.Array, Slots]:
        """Rows `[n, ...]` and their slots after a step with their gradient."""


@final
@dataclasses.dataclass(frozen=True)
class SGD(RowOptimizer):
    """Gradient descent on the rows that were looked up: `row -= rate * gradient`.

    The same as `optax.sgd` with the whole gradient.

    Attributes:
      learning_rate: the rate, a number from 0.

    Raises:
      ValueError: it is negative or not finite.
      TypeError: it is no number.

    >>> import jaxstrategy as js
    >>> tags = js.sharded.Embedding(5, 2, js.sharded.SGD(0.1))
    >>> state = tags.from_rows(jnp.ones((5, 2)))
    >>> state.update([4, 4], jnp.ones((2, 2))).table[4]
    Array([0.8, 0.8], dtype=float32)
    """

    learning_rate: float

    def __post_init__(self) -> None:
        _check_number("learning_rate", self.learning_rate)

    def slots(self, table: jax.Array) -> Slots:
        """No slots, whatever the shape of the table."""
        return {}

    @property
    def numbers(self) -> tuple[float, ...]:
        """None."""
        return ()

    @staticmethod
    def changed(
        rows: jax.Array,
        slots: Slots,
        gradient: jax.Array,
        learning_rate: jax.Array,
        *numbers: jax.Array,
    ) -> tuple[jax.Array, Slots]:
        """Rows `[n, ...]` after a step with their gradient."""
        return rows - learning_rate * gradient, slots


@final
@dataclasses.dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """Adagrad on the rows that were looked up.

    `accumulator += gradient**2` and `row -= rate * gradient / sqrt(accumulator +
    epsilon)`: the same as `optax.adagrad` with the whole gradient. J. Duchi, E. Hazan,
    Y. Singer. Adaptive subgradient methods for online learning and stochastic
    optimization. J. Mach. Learn. Res. 12 (2011) 2121-2159.

    Attributes:
      learning_rate: the rate, a number from 0.
      initial_accumulator_value: what the slot `"accumulator"` begins with.
      epsilon: keeps the divisor from 0.

    Raises:
      ValueError: a number is negative or not finite.
      TypeError: it is no number.

    >>> import jaxstrategy as js
    >>> tags = js.sharded.Embedding(5, 2, js.sharded.Adagrad(0.1))
    >>> state = tags.from_rows(jnp.ones((5, 2)))
    >>> state = state.update([4], 3 * jnp.ones((1, 2)))
    >>> state.table[3:, 0].round(2), state.slots["accumulator"][3:, 0]
    (Array([1. , 0.9], dtype=float32), Array([0.1, 9.1], dtype=float32))
    """

    learning_rate: float
    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_number(field.name, getattr(self, field.name))

    def slots(self, table: jax.Array) -> Slots:
        """The slot `"accumulator"`, of the shape of the table."""
        return {"accumulator": jnp.full_like(table, self.initial_accumulator_value)}

    @property
    def numbers(self) -> tuple[float, ...]:
        """Epsilon."""
        return (self.epsilon,)

    @staticmethod
    def changed(
        rows: jax.Array,
        slots: Slots,
        gradient: jax.Array,
        learning_rate: jax.Array,
        *numbers: jax.Array,
    ) -> tuple[jax.Array, Slots]:
        """Rows `[n, ...]` and their accumulators after a step with their gradient."""
        (epsilon,) = numbers
        sums = slots["accumulator"] + gradient**2
        root = jnp.where(sums > 0, jax.lax.rsqrt(sums + epsilon), 0)
        return rows - learning_rate * (gradient * root), {"accumulator": sums}


def _check_number(name: str, value: Value) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"`{name}` was {shown(value)}; a number was wanted. One that changes is "
            "given to `update(..., learning_rate=)`."
        )
    if not 0 <= value < math.inf:
        raise ValueError(
            f"`{name}` was {shown(value)}; a finite number from 0 was wanted."
        )


def updated(
    optimizer: RowOptimizer,
    table: jax.Array,
    slots: Slots,
    ids: jax.Array,
    gradient: jax.Array,
    learning_rate: jax.Array,
) -> tuple[jax.Array, Slots]:
    """The table and its slots after a step on the rows in `ids`.

    Shapes: table and slots `[length, ...]`, ids `[n]` from -1 to the length, gradient
    `[n, ...]`: rows with the same id are added up.
    """
    names = tuple(sorted(slots))
    numbers = [jnp.asarray(number, table.dtype) for number in optimizer.numbers]
    function = _updating(type(optimizer), names, table.ndim, len(numbers))
    arrays = [table, *(slots[name] for name in names)]
    results = function(*arrays, ids, gradient, learning_rate, *numbers)
    assert isinstance(results, tuple), "the table, and its slots"
    return results[0], dict(zip(names, results[1:], strict=True))


@functools.cache
def _updating(
    kind: type[RowOptimizer], names: tuple[str, ...], rank: int, numbers: int
) -> ShardFunction:
    """`table, *slots, ids, gradient, learning_rate, *numbers -> table, *slots`."""
    stored = 1 + len(names)

    def whole(*operands: jax.Array) -> tuple[jax.Array, ...]:
        arrays, (ids, gradient, *scalars) = operands[:stored], operands[stored:]
        length = arrays[0].shape[0]
        if not ids.size:
            return arrays
        distinct, sums = summed_by_id(ids, gradient)
        places = jnp.where(distinct < 0, length, distinct)  # dropped, as all beyond
        rows, *slots = (
            array.at[places].get(mode="fill", fill_value=0) for array in arrays
        )
        by_name = dict(zip(names, slots, strict=True))
        rows, changed = kind.changed(rows, by_name, sums, *scalars)
        new = [rows, *(changed[name] for name in names)]
        return tuple(
            array.at[places].set(rows.astype(array.dtype), mode="drop")
            for array, rows in zip(arrays, new, strict=True)
        )

    def of_parts(*operands: jax.Array, axes: Axes) -> tuple[jax.Array, ...]:
        blocks, (ids, *rest) = operands[:stored], operands[stored:]
        local_ids = _rows.numbers_in_block(ids, blocks[0].shape[0], axes)
        return whole(*blocks, local_ids, *rest)

    return registered(
        ShardFunction(
            f"jaxstrategy_updated_rows_{kind.__name__}_{rank}",
            whole,
            ranks=(*(rank,) * stored, 1, rank, *(0,) * (1 + numbers)),
            of_parts=of_parts,
            divided=tuple(range(stored)),
            returns_divided=tuple(range(stored)),
        )
    )


Initializer = Callable[[jax.Array, tuple[int, ...], DTypeLike], jax.Array]
"""As of Flax: `initializer(key, shape, dtype)` returns an array."""

# That of `flax.linen.Embed`.
_initializer = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
_MOST_ROWS_TO_A_MULTIPLE = 1024


@final
@dataclasses.dataclass(frozen=True)
class Embedding:
    """A table of `rows` vectors of `features` numbers, as a description without arrays.

    `init` makes its state, an `EmbeddingState`, which is a pytree: it goes through
    `strategy.init`, into a `TrainState`, through steps and into checkpoints. Under a
    strategy with `js.StateSharding("state")` each replica has its part of the rows.

    There are two ways to learn it. The whole gradient, as of any parameter: give no
    optimizer here, differentiate with respect to the state, and let Optax update it.
    Or, for large tables, the sparse one: differentiate with respect to the rows that
    were looked up, and let `update` change those rows. No gradient of the size of the
    table is made, and other rows are neither read nor written.

    So that a number of replicas can divide it, the table is stored with some more rows,
    of zeros, that no id reaches: up to a multiple of the largest power of two that adds
    at most a sixteenth, up to 1024. It depends on `rows` alone, so that a checkpoint is
    restored on any number of replicas.

    Attributes:
      rows: the number of rows; ids are from 0 to it.
      features: the length of a row.
      optimizer: `js.sharded.SGD` or `js.sharded.Adagrad`, for `update`; None without.
      initializer: `initializer(key, shape, dtype)` returns the first values, as Flax's
        and `jax.nn.initializers` do; by default as `flax.linen.Embed`.
      dtype: of floating-point numbers.
      multiple: the number of stored rows is one of this. For replicas whose number is
        no power of two, give a multiple of it.

    Raises:
      ValueError: a number that is not from 1.
      TypeError: no whole number; no such optimizer; an initializer that cannot be
        called; a dtype of other numbers.

    >>> import jaxstrategy as js
    >>> words = js.sharded.Embedding(10, 2, js.sharded.SGD(learning_rate=0.1))
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> state = strategy.init(words.init, jax.random.key(0))
    >>> @strategy.run
    ... def step(state, ids):
    ...     rows = state.lookup(ids)  # [2, 2] on each replica
    ...     gradient = jax.grad(lambda rows: (rows**2).sum())(rows)
    ...     return state.update(ids, gradient)  # of the mean over the replicas
    >>> new = step(state, strategy.per_replica(np.array([[1, 5], [5, 7]])))
    >>> np.flatnonzero((new.table != state.table)[:, 0])
    array([1, 5, 7])
    """

    rows: int
    features: int
    optimizer: RowOptimizer | None = None
    # Not compared: embeddings that differ in it alone share compiled steps.
    initializer: Initializer = dataclasses.field(default=_initializer, compare=False)
    dtype: DTypeLike = np.dtype("float32")
    multiple: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "features", "multiple"):
            if name != "multiple" or self.multiple is not None:
                number = _positive(name, getattr(self, name))
                object.__setattr__(self, name, number)
        if self.optimizer is not None and not isinstance(self.optimizer, RowOptimizer):
            raise TypeError(
                f"`optimizer` was {shown(self.optimizer)}; `js.sharded.SGD(rate)`, "
                "`js.sharded.Adagrad(rate)` or None was wanted. One of Optax needs the "
                "whole gradient: differentiate with respect to the state."
            )
        if not callable(self.initializer):
            raise TypeError(
                f"`initializer` was {shown(self.initializer)}; a function of a key, a "
                "shape and a dtype was wanted, such as `jax.nn.initializers.zeros`."
            )
        try:
            kind = jnp.dtype(self.dtype)
        except TypeError:
            kind = None
        if kind is None or not jnp.issubdtype(kind, jnp.floating):
            raise TypeError(
                f"`dtype` was {shown(self.dtype)}; a type of floating-point numbers "
                'was wanted, such as "float32".'
            )
        object.__setattr__(self, "dtype", kind)

    @property
    def stored_rows(self) -> int:
        """The number of rows of the stored table: `rows`, and those that fill it up."""
        multiple = self.multiple
        if multiple is None:
            most = min(self.rows // 16, _MOST_ROWS_TO_A_MULTIPLE)
            multiple = 1 << max(most.bit_length() - 1, 0)
        return -(-self.rows // multiple) * multiple

    def init(self, key: jax.Array) -> EmbeddingState:
        """The first state: for `strategy.init(embedding.init, key)`.

        Args:
          key: a random key.

        Raises:
          ValueError: the initializer returned an array of another shape.
          TypeError: it returned something else.
        """
        shape = self.rows, self.features
        return self._state("initializer", self.initializer(key, shape, self.dtype))

    def from_rows(self, rows: Value) -> EmbeddingState:
        """The state with these values, such as of a table that was trained elsewhere.

        Args:
          rows: an array of shape `[rows, features]`.

        Raises:
          ValueError: an array of another shape.
          TypeError: it is no array of numbers.
        """
        return self._state("rows", rows)

    def _state(self, name: str, values: Value) -> EmbeddingState:
        array = _lookup.array(name, values)
        if array.shape != (self.rows, self.features):
            raise ValueError(
                f"`{name}` gave an array of shape {array.shape}; "
                f"{(self.rows, self.features)}, rows and features, was wanted."
            )
        more = self.stored_rows - self.rows
        table = jnp.pad(array.astype(self.dtype), ((0, more), (0, 0)))
        slots = {} if self.optimizer is None else self.optimizer.slots(table)
        return EmbeddingState(table, slots, self)


@final
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EmbeddingState:
    """A table and what its optimizer keeps for each row; `Embedding.init` makes it.

    A pytree of arrays. In a step it is whole to every replica, wherever its rows are.

    Attributes:
      table: `[stored_rows, features]`; its first `embedding.rows` rows are the values.
      slots: arrays of the shape of the table, by the optimizer's names for them.
      embedding: the description.

    >>> import jaxstrategy as js
    >>> state = js.sharded.Embedding(3, 2).from_rows(jnp.arange(6.0).reshape(3, 2))
    >>> state.lookup([[2, 1], [0, -1]], "mean")
    Array([[3., 4.],
           [0., 1.]], dtype=float32)
    >>> jax.grad(lambda state: state.lookup([2, 2]).sum())(state).table
    Array([[0., 0.],
           [0., 0.],
           [2., 2.]], dtype=float32)
    """

    table: jax.Array
    slots: Slots
    embedding: Embedding = dataclasses.field(metadata={"static": True})

    def lookup(
        self,
        ids: Value,
        combiner: Combiner | None = None,
        *,
        weights: Value | None = None,
    ) -> jax.Array:
        """The rows with these ids, or one for each group; see `js.sharded.lookup`.

        Shapes: `[...]` -> `[..., features]`, or with a combiner without the last
        dimension of the ids. Ids from `embedding.rows` give NaN.

        Raises:
          ValueError: no such combiner; weights that do not fit; numbers that no dtype
            of JAX holds.
          TypeError: the ids are no whole numbers.
        """
        return _lookup.looked_up(self.table, self._ids(ids), combiner, weights)

    def gradient(
        self,
        ids: Value,
        row_gradients: Value,
        combiner: Combiner | None = None,
        *,
        weights: Value | None = None,
    ) -> IndexedSlices:
        """The gradient of the table, of that of what `lookup` returned for `ids`.

        It has only the rows that were looked up; `to_dense()` is the whole gradient,
        and `all_reduce` of it joins the rows of all replicas.

        Args:
          ids: as given to `lookup`.
          row_gradients: an array of the shape that it returned.
          combiner: as given to it.
          weights: as given to it.

        Raises:
          ValueError: a gradient of another shape; no such combiner; weights that do not
            fit; numbers that no dtype of JAX holds.
          TypeError: the ids are no whole numbers, the gradient is no array of numbers.
        """
        places = self._ids(ids)
        rows = _lookup.rows_gradient(
            self.table, places, row_gradients, combiner, weights
        )
        length, *features = self.table.shape
        # Additions drop indices beyond the table; negative ones count from the end.
        indices = jnp.where(places < 0, length, places).reshape(-1)
        values = rows.reshape(-1, *features)
        return IndexedSlices(values, indices, self.table.shape)

    def update(
        self,
        ids: Value,
        row_gradients: Value,
        combiner: Combiner | None = None,
        *,
        weights: Value | None = None,
        op: ReduceOp | str = "mean",
        learning_rate: Value | None = None,
    ) -> EmbeddingState:
        """The state after a step of the optimizer on the rows that were looked up.

        In a step of a strategy it is a reduction: the rows of all replicas are added up
        as `op` says, and every replica gets the same state. What arrives at one row
        several times counts as often, as in the whole gradient. It is
        `state.apply(all_reduce(op, state.gradient(ids, row_gradients)))`.

        Args:
          ids: as given to `lookup`, this replica's.
          row_gradients: the gradient with respect to what it returned, of that shape.
          combiner: as given to it.
          weights: as given to it.
          op: `"mean"` over the replicas, as of gradients of losses that are means of
            each replica's examples, or `"sum"`.
          learning_rate: instead of the optimizer's; a number or a scalar.

        Raises:
          ValueError: no optimizer; another `op`; a gradient of another shape; no such
            combiner; weights that do not fit; a learning rate that is no scalar;
            numbers that no dtype of JAX holds.
          TypeError: the ids are no whole numbers; other arguments are no numbers.
          ContextError: in `merge_call` or `scope()`, where there is no replica.
        """
        slices = self.gradient(ids, row_gradients, combiner, weights=weights)
        return self.apply(_reduced(op, slices), learning_rate=learning_rate)

    def apply(
        self, gradient: IndexedSlices, *, learning_rate: Value | None = None
    ) -> EmbeddingState:
        """The state after a step of the optimizer with a gradient that is reduced.

        Args:
          gradient: of the table, as `all_reduce` of `state.gradient(...)` returns it:
            rows `[rows, features]` with their indices, equal on all replicas. Indices
            that are no rows are left out.
          learning_rate: instead of the optimizer's; a number or a scalar.

        Raises:
          ValueError: no optimizer; a gradient of another table; a learning rate that is
            no scalar; numbers that no dtype of JAX holds.
          TypeError: the gradient is no `IndexedSlices`; something is no number.
        """
        if self.embedding.optimizer is None:
            raise ValueError(
                f"This {self.embedding} has no optimizer, which `update` uses. Make it "
                "with one, as in `js.sharded.Embedding(rows, features, "
                "js.sharded.SGD(0.1))`."
            )
        ids, rows = self._checked(gradient)
        rate = self.embedding.optimizer.learning_rate
        table, slots = updated(
            self.embedding.optimizer,
            self.table,
            self.slots,
            ids,
            rows,
            _scalar(rate if learning_rate is None else learning_rate, self.table.dtype),
        )
        return EmbeddingState(table, slots, self.embedding)

    def _ids(self, value: Value) -> jax.Array:
        return _lookup.ids_of(value, self.embedding.rows, self.table.shape[0])

    def _checked(self, gradient: IndexedSlices) -> tuple[jax.Array, jax.Array]:
        """The ids and rows of a gradient of this table."""
        if not isinstance(gradient, IndexedSlices):
            raise TypeError(
                f"`gradient` was {shown(gradient)}; `IndexedSlices` were wanted, as "
                "`state.gradient(ids, row_gradients)` returns them."
            )
        rows = _lookup.array("gradient.values", gradient.values)
        ids = self._ids(gradient.indices)
        features = self.table.shape[1:]
        shapes = None, self.table.shape, (self.embedding.rows, *features)
        fits = ids.ndim == 1 and rows.shape == (*ids.shape, *features)
        if not fits or gradient.dense_shape not in shapes:
            raise ValueError(
                f"`gradient` has values of shape {rows.shape}, indices of shape "
                f"{ids.shape} and dense_shape {gradient.dense_shape}; the gradient of "
                f"a table of shape {self.table.shape} was wanted."
            )
        return ids, rows


def _reduced(op: ReduceOp | str, slices: IndexedSlices) -> IndexedSlices:
    """The rows of all replicas, joined."""
    checked = ReduceOp(op)
    if not OPERATIONS[checked].is_sum:
        raise ValueError(
            f"`op` was {checked.name}; 'mean' or 'sum' was wanted, which rows that are "
            "not there do not change."
        )
    context = _context.current()
    if context.strategy is None:
        return slices
    if context.replica is None:
        raise ContextError(
            "`update` was called in `merge_call` or `scope()`, where code sees all "
            "replicas at once. Call it in the step; or `apply` on what "
            "`strategy.reduce` returns."
        )
    assert isinstance(context.replica, ReplicaContext), "there is no other"
    return context.replica.all_reduce(checked, slices)


def _scalar(value: Value, kind: np.dtype) -> jax.Array:
    array = _lookup.array("learning_rate", value)
    if array.shape or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise ValueError(
            f"`learning_rate` was {shown(value)}; a number or a scalar was wanted."
        )
    return array.astype(kind)


def _positive(name: str, value: Value) -> int:
    number = whole(value)
    if number is None or number < 1:
        error = TypeError if number is None else ValueError
        raise error(f"`{name}` was {shown(value)}; a whole number from 1 was wanted.")
    return number
