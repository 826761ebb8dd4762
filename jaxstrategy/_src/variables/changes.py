"""Changes of variables: `assign`, operators, scatters."""

from __future__ import annotations

import abc
import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Generic, NoReturn, Self, TypeVar, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.sharded.lookup import checked_ids
from jaxstrategy._src.values.arrays import Index, Leaf, Value
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.slices import IndexedSlices, is_slices

T = TypeVar("T")


@final
@dataclasses.dataclass(frozen=True)
class Change:
    """The way from an old value, and one that is given, to a new one."""

    method: str  # that the user called
    operation: str  # "set", "add", "subtract", "multiply", "divide", "min" or "max"
    index: Index = ...  # the part of the value that changes, as in `array[index]`

    @property
    def is_whole(self) -> bool:
        """Whether it changes the whole value, not only a part."""
        return self.index is ...

    def of_part(self, index: Index) -> Change:
        """The same, of a part only."""
        return dataclasses.replace(self, index=index)

    def shape(self, whole: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
        """The shape of the part, in a value of the shape `whole`."""
        if self.is_whole:
            return whole
        struct = jax.ShapeDtypeStruct(whole, dtype)
        return jax.eval_shape(lambda value: value[self.index], struct).shape

    def applied(self, old: jax.Array, value: jax.Array) -> jax.Array:
        """The new value, of the shape and dtype of `old`."""
        if self.index is not ...:
            return changed(old, self.index, value, self.operation)
        if self.operation == "set":
            return value
        return old + value if self.operation == "add" else old - value


def changed(
    old: jax.Array, index: Index, value: jax.Array, operation: str
) -> jax.Array:
    """`old` with its part at `index` changed; a row may be there more than once."""
    part = old.at[index]
    match operation:
        case "subtract":
            return part.add(-value)
        case "divide" if jnp.issubdtype(old.dtype, jnp.integer):
            # `at[].divide` divides as floats do; integers keep what is whole.
            return jax.lax.div(old, jnp.ones_like(old).at[index].multiply(value))
        case _:
            return getattr(part, operation)(value)


ASSIGN = Change("assign", "set")
ASSIGN_ADD = Change("assign_add", "add")
ASSIGN_SUB = Change("assign_sub", "subtract")
UPDATE = Change("update", "set")

# By the last word of the method, `scatter_add` and so on.
_METHODS = "add sub mul div min max update".split()
_OPERATIONS = "add subtract multiply divide min max set".split()
SCATTERS = {
    name: Change(f"scatter_{name}", operation)
    for name, operation in zip(_METHODS, _OPERATIONS, strict=True)
}
# By the operation that word.
WORDS: dict[str, str] = dict(zip(_OPERATIONS, _METHODS, strict=True))


_BINARY = "add sub mul truediv floordiv mod pow matmul lt le gt ge and or xor"
_BINARY += " lshift rshift"
_UNARY = "neg pos abs invert"


class Operators(abc.ABC):
    """Operators and conversions of the object's `value()`."""

    @abc.abstractmethod
    def value(self) -> jax.Array:
        """The value that the object stands for."""

    # A NumPy array on the left leaves the operation to us, as it does to a JAX array.
    __array_priority__ = 100

    def __jax_array__(self) -> jax.Array:
        return self.value()

    def __array__(
        self, dtype: np.dtype | None = None, copy: bool | None = None
    ) -> np.ndarray:
        return self.value().__array__(dtype)

    def __getitem__(self, index: Index) -> Value:
        return self.value()[index]

    def __len__(self) -> int:
        return len(self.value())

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __float__(self) -> float:
        return float(self.value())

    def __complex__(self) -> complex:
        return complex(self.value())

    def __eq__(self, other: object) -> Value:
        return self.value() == _comparable(other)

    def __ne__(self, other: object) -> Value:
        return self.value() != _comparable(other)

    __hash__ = None  # as of an array  # pyright: ignore[reportAssignmentType]

    def __index__(self) -> int:
        return operator.index(self.value())

    def __divmod__(self, other: Value) -> Value:
        return divmod(self.value(), _plain(other))

    def __rdivmod__(self, other: Value) -> Value:
        return divmod(other, self.value())

    def __round__(self, digits: int | None = None) -> Value:
        return round(self.value(), digits)

    def __format__(self, form: str) -> str:
        return format(self.value(), form) if form else str(self)


def _comparable(other: Value) -> Value:
    # To `==` of an array a list is something else than an array, and never equal.
    other = _plain(other)
    return np.asarray(other) if isinstance(other, (list, tuple)) else other


def _plain(other: Value) -> Value:
    return other.value() if isinstance(other, Operators) else other


def _add_operators(name: str) -> None:
    function = getattr(operator, f"__{name}__")

    def alone(self: Operators) -> Value:
        return function(self.value())

    def forward(self: Operators, other: Value) -> Value:
        return function(self.value(), _plain(other))

    def reflected(self: Operators, other: Value) -> Value:
        return function(other, self.value())

    is_unary = name in _UNARY.split()
    setattr(Operators, f"__{name}__", alone if is_unary else forward)
    if not is_unary and name not in ("lt", "le", "gt", "ge"):
        setattr(Operators, f"__r{name}__", reflected)


for _name in f"{_BINARY} {_UNARY}".split():
    _add_operators(_name)


class Assignments(Operators):
    """Methods that change a value in place, all copies of it alike.

    In `run`, a mirrored variable takes the aggregate of the replicas' values, and an
    on-read one this replica's. A part has no aggregate: of a mirrored variable what is
    assigned must be equal on all replicas, which is proved.
    """

    @abc.abstractmethod
    def _write(self, value: Value, change: Change) -> jax.Array | PerReplica:
        """Makes the change; returns the new value of the whole variable."""

    def assign(
        self,
        value: Value,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Value:
        """Makes it `value`; returns the new value of the whole variable.

        Outside `run`, an on-read variable that sums gives each replica an equal share,
        so that it reads as `value`; of a `PerReplica` each copy takes its version. To
        gradients the value is a constant.

        Args:
          value: of the variable's shape. To a part, a value of fewer dimensions, or
            with dimensions of size 1, is repeated.
          use_locking: for TensorFlow's sake; a step is one program.
          name: the same.
          read_value: whether to return the new value, not None.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: a dtype that would lose something.
          ContextError: in another strategy's scope or `run`.
        """
        new = self._write(value, ASSIGN)
        return new if read_value else None

    def assign_add(
        self,
        delta: Value,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Value:
        """Adds `delta`, of the shape of what changes; otherwise as `assign`.

        To a whole variable, `IndexedSlices` are added to their rows; in `run`, of a
        mirrored variable with an aggregation, only rows go between the replicas.

        Outside `run`, of an on-read variable that sums the first copy takes it all.
        """
        new = self._write(delta, ASSIGN_ADD)
        return new if read_value else None

    def assign_sub(
        self,
        delta: Value,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Value:
        """Subtracts `delta`; otherwise as `assign_add`."""
        new = self._write(delta, ASSIGN_SUB)
        return new if read_value else None


@final
@jax.tree_util.register_pytree_node_class
class VariablePart(Assignments):
    """The value of `variable[index]` when it was asked for, which can be assigned.

    In arithmetic and `jnp` functions it stands for its value, and has the attributes of
    that array. Where an array is demanded, `value()` is one.

    Args:
      value: of the part.
      index: which part.
      change: changes the variable, and returns its new value.

    >>> import jaxstrategy as js
    >>> v = js.Variable([1.0, 2.0, 3.0])
    >>> v[1:].assign([8.0, 9.0])
    Array([1., 8., 9.], dtype=float32)
    """

    def __init__(
        self,
        value: jax.Array,
        index: Index,
        change: Callable[[Value, Change], jax.Array | PerReplica],
    ) -> None:
        self._value = value
        self._index = index
        self._change = change

    def value(self) -> jax.Array:
        """The value that the part had when it was asked for."""
        return self._value

    def _write(self, value: Value, change: Change) -> jax.Array | PerReplica:
        return self._change(value, change.of_part(self._index))

    def __getattr__(self, name: str) -> Value:
        # JAX and NumPy ask objects by such names what they are.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._value, name)

    def __getitem__(self, index: Index) -> jax.Array:
        return self._value[index]

    def __repr__(self) -> str:
        return repr(self._value)

    # To JAX it is a node around its value, and comes back as that.

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        """The value, for JAX."""
        return (self._value,), None

    @classmethod
    def tree_unflatten(cls, auxiliary: None, children: tuple[Leaf]) -> Leaf:
        """The array that takes its place in a pytree."""
        return children[0]


def _index(indices: Value) -> tuple[jax.Array, ...]:
    """TensorFlow's indices `[..., k]` as those of an array, one for each dimension."""
    return tuple(jnp.moveaxis(mesh.array_of(indices), -1, 0))


# Without a type of what it returns, checkers know the arguments of each method.
def _scatter(change: Change, does: str, undefined: str = "is on-read"):
    """The method of a variable that makes `change`."""

    def scatter(
        self: VariableLike,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Value:
        return self._change_rows(sparse_delta, change)

    scatter.__name__ = change.method
    scatter.__qualname__ = f"VariableLike.{change.method}"
    scatter.__doc__ = f"""{does}

        Args:
          sparse_delta: rows `[rows, ...]` for a variable `[n, ...]`, and their indices.
          use_locking: for TensorFlow's sake; a step is one program.
          name: the same.

        Returns:
          The new value of the whole variable.

        Raises:
          NotImplementedError: the variable {undefined}.
          ValueError: the rows do not fit; or copies would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.
        """
    return scatter


# What has no sum of rows that several replicas give.
_NOT_SUMMED = "is on-read, or has aggregation SUM or MEAN"


@final
class Reference(Generic[T]):
    """Stands for one object; equal to other references to that object.

    Args:
      referent: the object, which the reference keeps alive.
    """

    def __init__(self, referent: T) -> None:
        self._referent = referent

    def deref(self) -> T:
        """The object."""
        return self._referent

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reference) and other._referent is self._referent

    def __hash__(self) -> int:
        return id(self._referent)

    def __repr__(self) -> str:
        return f"<Reference to {self._referent!r}>"


class VariableLike(Assignments):
    """What a variable and a table in shards have alike.

    In `run`, the rows of all replicas count if the variable has an aggregation: for
    MEAN their values are divided by the number of replicas first, for
    ONLY_FIRST_REPLICA they are the first replica's. With NONE the rows must be equal on
    all replicas. Outside `run`, and in `merge_call`, they count once.
    """

    _name: str

    @property
    def name(self) -> str:
        """The name in messages."""
        return self._name

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""

    @property
    def ndim(self) -> int:
        """The number of dimensions of the value."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the value."""
        return int(np.prod(self.shape))

    @property
    @abc.abstractmethod
    def strategy(self) -> AbstractStrategy | None:
        """The strategy it belongs to, None for an ordinary variable."""

    @property
    def distribute_strategy(self) -> AbstractStrategy | None:
        """The same as `strategy`, under TensorFlow's name."""
        return self.strategy

    @property
    def is_distributed(self) -> bool:
        """Whether it belongs to a strategy."""
        return self.strategy is not None

    def read_value(self) -> jax.Array:
        """The same as `value`, of the variable's shape.

        Raises:
          ValueError: outside `run`, an on-read variable whose aggregation is NONE.
          ContextError: in another strategy's scope or `run`.
        """
        return self.value()

    @abc.abstractmethod
    def numpy(self) -> np.ndarray:
        """The value as a NumPy array of its own shape; not inside `run`.

        With several processes, all of them must ask for that of a divided variable.

        Raises:
          ValueError: an on-read variable whose aggregation is NONE.
          ContextError: in another strategy's scope or `run`.
          TracedValueError: inside `run`, where only the devices know it.
        """

    def __array__(
        self, dtype: np.dtype | None = None, copy: bool | None = None
    ) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)

    def ref(self) -> Reference[Self]:
        """A reference that equals those to the same variable, as a key of dicts.

        Variables themselves are hashable, too: `{v: 1}` finds `v` by identity.

        >>> import jaxstrategy as js
        >>> v = js.Variable(1.0)
        >>> v.ref() == v.ref(), v.ref().deref() is v
        (True, True)
        """
        return Reference(self)

    def __copy__(self) -> Self:
        return self

    def _cannot_be_pickled(self) -> NoReturn:
        raise TypeError(
            f"Variable {self.name!r} cannot be pickled: it stands for memory of this "
            "process's devices. Save `variable.numpy()`, and assign it to a variable "
            "of the other process."
        )

    @abc.abstractmethod
    def _change_rows(self, rows: IndexedSlices, change: Change) -> Value:
        """Changes these rows; returns the new value."""

    @abc.abstractmethod
    def __getitem__(self, index: Index) -> VariablePart:
        """A part, which can be assigned."""

    def sparse_read(self, indices: Value, name: str | None = None) -> jax.Array:
        """The rows at `indices`, whole numbers of any shape `[...]`: `[..., row]`.

        Of indices that are traced, one that is no row gives what JAX gives for it.

        Raises:
          IndexError: one is no row.
          TypeError: they are no whole numbers.
          ValueError: one is a number that no integer dtype of JAX holds.
        """
        rows = self.shape[0] if self.shape else 0
        return self.rows_at(checked_ids(indices, rows, self._name))

    @abc.abstractmethod
    def rows_at(self, ids: jax.Array) -> jax.Array:
        """The rows `[*ids.shape, *shape[1:]]` with these numbers, unchecked."""

    def gather_nd(self, indices: Value, name: str | None = None) -> jax.Array:
        """The entries at `indices`, `[..., k]`: the first k dimensions' indices each.

        Returns:
          Of a variable with as many dimensions as k an array `[...]`; each dimension
          that it has more stands behind them.

        Raises:
          ValueError: an index is a number that no integer dtype of JAX holds.

        >>> import jaxstrategy as js
        >>> js.Variable([[1.0, 2.0], [3.0, 4.0]]).gather_nd([[0, 1], [1, 0]])
        Array([2., 3.], dtype=float32)
        """
        return self[_index(indices)].value()

    def scatter_nd_add(
        self, indices: Value, updates: Value, name: str | None = None
    ) -> Value:
        """Adds `updates` `[...]` to the entries at `indices`, as `gather_nd` has them.

        All copies change in the same way, as by `variable[index].assign_add`.

        Returns:
          The new value of the whole variable.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: a dtype that would lose something.

        >>> import jaxstrategy as js
        >>> js.Variable([1.0, 2.0, 3.0]).scatter_nd_add([[0], [2]], [10.0, 20.0])
        Array([11.,  2., 23.], dtype=float32)
        """
        return self._write(updates, ASSIGN_ADD.of_part(_index(indices)))

    def scatter_nd_sub(
        self, indices: Value, updates: Value, name: str | None = None
    ) -> Value:
        """Subtracts `updates` `[...]`; otherwise as `scatter_nd_add`."""
        return self._write(updates, ASSIGN_SUB.of_part(_index(indices)))

    def scatter_nd_update(
        self, indices: Value, updates: Value, name: str | None = None
    ) -> Value:
        """Makes them `updates` `[...]`; otherwise as `scatter_nd_add`."""
        return self._write(updates, ASSIGN.of_part(_index(indices)))

    def batch_scatter_update(
        self,
        sparse_delta: IndexedSlices,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Value:
        """Puts rows in the place of the variable's, in each batch by its own indices.

        Args:
          sparse_delta: with indices `[..., k]` and values `[..., k, *rest]`: row
            `indices[..., j]` of the variable's `[..., n, *rest]` becomes
            `values[..., j]`.
          use_locking: for TensorFlow's sake; a step is one program.
          name: the same.

        Returns:
          The new value of the whole variable.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: not `IndexedSlices`, or a dtype that would lose something.

        >>> import jaxstrategy as js
        >>> v = js.Variable([[1.0, 2.0], [3.0, 4.0]])
        >>> v.batch_scatter_update(js.IndexedSlices([[20.0], [30.0]], [[1], [0]]))
        Array([[ 1., 20.],
               [30.,  4.]], dtype=float32)
        """
        if not is_slices(sparse_delta):
            raise TypeError(
                f"`batch_scatter_update` was given {sparse_delta!r}, a "
                f"{type(sparse_delta).__name__}; `IndexedSlices(values, indices)` were "
                "wanted."
            )
        rows = mesh.array_of(sparse_delta.indices)
        indices = jnp.stack([*np.indices(rows.shape)[:-1], rows], axis=-1)
        return self.scatter_nd_update(indices, sparse_delta.values)

    scatter_add = _scatter(SCATTERS["add"], "Adds rows to those of the variable.")
    scatter_sub = _scatter(
        SCATTERS["sub"], "Subtracts rows from those of the variable."
    )
    scatter_mul = _scatter(SCATTERS["mul"], "Multiplies rows of the variable.")
    scatter_div = _scatter(
        SCATTERS["div"], "Divides rows of the variable; integers keep what is whole."
    )
    scatter_min = _scatter(
        SCATTERS["min"], "Makes rows of the variable the smaller of both.", _NOT_SUMMED
    )
    scatter_max = _scatter(
        SCATTERS["max"], "Makes rows of the variable the larger of both.", _NOT_SUMMED
    )
    scatter_update = _scatter(
        SCATTERS["update"], "Puts rows in the place of the variable's.", _NOT_SUMMED
    )
