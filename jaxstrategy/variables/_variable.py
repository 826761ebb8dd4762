"""`Variable`: a value that changes, and knows how it is replicated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NoReturn, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding

from jaxstrategy._errors import ContextError, shown
from jaxstrategy._options import VariableAggregation, VariableSynchronization
from jaxstrategy.contexts import _context
from jaxstrategy.contexts._context import (
    AbstractStrategy,
    Context,
)
from jaxstrategy.replicas import _mesh
from jaxstrategy.replicas._devices import Device
from jaxstrategy.replicas._random_keys import is_key
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.values._per_replica import (
    Handle,
    PerReplica,
)
from jaxstrategy.values._slices import IndexedSlices
from jaxstrategy.variables import (
    _access,
    _aggregation,
    _changes,
    _gradients,
    _registry,
)
from jaxstrategy.variables._cell import Cell
from jaxstrategy.variables._changes import Change
from jaxstrategy.variables._operators import Operators
from jaxstrategy.variables._part import VariablePart
from jaxstrategy.variables._policy import ORDINARY, VariablePolicy
from jaxstrategy.variables._reference import Reference
from jaxstrategy.variables._scatters import Scatters
from jaxstrategy.variables.kinds._mirrored_kind import MirroredKind

_numbers = itertools.count()

InitialValue = Any


@final
@jax.tree_util.register_pytree_node_class
class Variable(Operators, Scatters, Handle):
    """A value that steps read and change in place, replicated as its strategy says.

    Made inside `strategy.scope()` it belongs to that strategy; made outside any, it
    is one copy on JAX's default device, which steps of every strategy may use. Read
    and assigned by closure or as an argument: in `run` each replica works on its own
    copy, outside on all of them.

    A *mirrored* variable (synchronization AUTO or ON_WRITE) is equal on all replicas.
    What replicas assign to it is first combined as `aggregation` says; with NONE it
    must be equal already, which is proved when the step is traced. An *on-read* one has
    a copy per replica, which the replica changes freely; reading it outside `run`
    combines the copies.

    A step uses the variables that it found when it was traced, as long as these live:
    one that takes another's place is found when the other is gone. A step keeps no
    variable alive; its function may.

    In arithmetic, comparisons and `jnp` functions a variable stands for its value; only
    two variables are equal if they are the same one. `v[1:3]` is the value of a part,
    and `v[1:3].assign(x)` changes it.

    Args:
      initial_value: an array, a number, nested lists of numbers, or a function without
        arguments that returns one. Every copy starts with it.
      trainable: for your own use; on-read variables are not.
      dtype: of the value, by default that of `initial_value`.
      name: for messages; names need not differ.
      synchronization: a `VariableSynchronization` or its name.
      aggregation: a `VariableAggregation` or its name.

    Raises:
      ValueError: synchronization NONE, or no such synchronization or aggregation; an
        aggregation that the dtype has not (MEAN of integers); made inside a step that
        was traced before.
      TypeError: `initial_value` is not an array or number.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     total = js.Variable(0.0, name="total", aggregation="sum")
    >>> @strategy.run
    ... def step(x):
    ...     total.assign_add(x)
    >>> step(strategy.per_replica([1.0, 2.0]))
    >>> total
    Variable 'total' float32[] mirrored, {
      0: 3.0,
      1: 3.0
    }
    >>> total + 1
    Array(4., dtype=float32)
    """

    def __init__(
        self,
        initial_value: InitialValue,
        trainable: bool | None = None,
        dtype: Any = None,
        name: str = "Variable",
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str | None = VariableAggregation.NONE,
    ) -> None:
        self._synchronization = VariableSynchronization(synchronization)
        self._aggregation = VariableAggregation(
            "none" if aggregation is None else aggregation
        )
        if self._synchronization is VariableSynchronization.NONE:
            raise ValueError(
                "`synchronization` was NONE, which no strategy can keep. Use ON_WRITE "
                "for a value that is equal on all replicas, ON_READ for one that each "
                "replica has of its own."
            )
        on_read = self._synchronization is VariableSynchronization.ON_READ
        self._name = name
        self._trainable = not on_read if trainable is None else bool(trainable)
        self.number = next(_numbers)  # the how-manieth it is
        policy = _policy()
        self._strategy = _context.current().strategy if policy.are_owned else None
        self._kind = policy.kind(name, on_read, self._aggregation, self._strategy)
        step = _access.tracing()
        if step is not None and not step.may_create:
            raise ValueError(
                f"Variable {name!r} was made inside a step that is traced again: a "
                "step may make variables the first time it is traced, and must use the "
                "same ones afterwards. Make it outside the step, or once: "
                "`if self.v is None: self.v = Variable(...)`."
            )
        with jax.ensure_compile_time_eval(), _context.outside():
            start = _start(initial_value, dtype, name)
            _aggregation.check(self._aggregation, start.dtype, name)
            self._shape, self._dtype = start.shape, start.dtype
            # Copied, so that no array of the user's shares its memory.
            self._cell = Cell(self._kind.placed(jnp.copy(start)), is_alone=True)
        if step is not None:
            step.create(self, self._kind.of_one_replica(start))
        _registry.add(self, self._strategy)

    # What it is.

    @property
    def name(self) -> str:
        """The name in messages."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._shape

    @property
    def ndim(self) -> int:
        """The number of dimensions of the value."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """The number of elements of the value."""
        return int(np.prod(self._shape))

    @property
    def dtype(self) -> Any:
        """The dtype of the value."""
        return self._dtype

    @property
    def trainable(self) -> bool:
        """Whether an optimizer should change it."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """The moment at which its copies are brought together."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """The operation that makes one value of its copies, or of those assigned."""
        return self._aggregation

    @property
    def strategy(self) -> AbstractStrategy | None:
        """The strategy it belongs to, None for an ordinary variable."""
        return self._strategy

    @property
    def distribute_strategy(self) -> AbstractStrategy | None:
        """The same as `strategy`, under TensorFlow's name."""
        return self._strategy

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that hold its copies, in replica order."""
        return self.replicas.devices

    @property
    def device(self) -> Device:
        """The device that holds the first of its copies."""
        return self.devices[0]

    @property
    def is_distributed(self) -> bool:
        """Whether it belongs to a strategy."""
        return self._strategy is not None

    def ref(self) -> Reference[Variable]:
        """A reference that equals those to the same variable, as a key of dicts.

        Variables themselves are hashable, too: `{v: 1}` finds `v` by identity.

        >>> import jaxstrategy as js
        >>> v = js.Variable(1.0)
        >>> v.ref() == v.ref(), v.ref().deref() is v
        (True, True)
        """
        return Reference(self)

    # Its value.

    def value(self) -> jax.Array:
        """The value: in `run` this replica's, outside that of all replicas.

        It has the shape of the variable.
        In `extended.update` it is that of the copy which is updated.

        Raises:
          ValueError: outside `run`, an on-read variable whose aggregation is NONE.
          ContextError: in another strategy's scope or `run`.
        """
        given = _gradients.value_of(self)
        if given is not None:
            return given
        with _access.one_at_a_time:
            return self._kind.read(self._reference(), _access.side())

    def read_value(self) -> jax.Array:
        """The same as `value`, of the variable's shape.

        Raises:
          ValueError: outside `run`, an on-read variable whose aggregation is NONE.
          ContextError: in another strategy's scope or `run`.
        """
        return self.value()

    def numpy(self) -> np.ndarray:
        """The value as a NumPy array of the variable's shape; not inside `run`.

        Raises:
          ValueError: an on-read variable whose aggregation is NONE.
          ContextError: in another strategy's scope or `run`.
          TracedValueError: inside `run`, where only the devices know it.
        """
        return np.asarray(self.value())

    def __getitem__(self, index: Any) -> VariablePart:
        return VariablePart(_part_at(self.value(), index), index, self._write)

    def assign(
        self,
        value: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Make it `value`; returns the new value.

        In `run`, a mirrored variable takes the aggregate of the replicas' values, and
        an on-read one this replica's. Outside, an on-read variable that sums gives
        each replica an equal share, so that it reads as `value`. To gradients the value
        is a constant.

        Args:
          value: of the variable's shape.
          use_locking: nothing; here for TensorFlow's sake.
          name: the same.
          read_value: whether to return the new value, not None.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: a dtype that would lose something.
          ContextError: in another strategy's scope or `run`.
        """
        new = self._write(value, _changes.ASSIGN)
        return new if read_value else None

    def assign_add(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Add `delta`, of the variable's shape; otherwise as `assign`.

        `IndexedSlices` are added to their rows; in `run`, of a mirrored variable with
        an aggregation, only rows go between the replicas.

        Outside `run`, of an on-read variable that sums the first copy takes it all.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: a dtype that would lose something.
          ContextError: in another strategy's scope or `run`.
        """
        new = self._write(delta, _changes.ASSIGN_ADD)
        return new if read_value else None

    def assign_sub(
        self,
        delta: Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Subtract `delta`; otherwise as `assign_add`.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: a dtype that would lose something.
          ContextError: in another strategy's scope or `run`.
        """
        new = self._write(delta, _changes.ASSIGN_SUB)
        return new if read_value else None

    def distributed(self) -> Any:
        """All copies: a mirrored array, or a `PerReplica` if it is on-read.

        Raises:
          ContextError: in another strategy's scope or `run`.
        """
        with _access.one_at_a_time:
            return self._kind.copies(self._reference())

    def _write(self, value: Any, change: Change) -> Any:
        return self._written(value, change, self._kind.write)

    def _scatter(self, rows: IndexedSlices, change: Change) -> Any:
        return self._written(rows, change, self._kind.scatter)

    def _written(self, value: Any, change: Change, write: Callable[..., Any]) -> Any:
        if _gradients.value_of(self) is not None:
            raise ValueError(
                f"Variable {self._name!r} was assigned inside the function whose "
                "gradient with respect to it is taken. Assign it afterwards."
            )
        with _access.one_at_a_time:
            ref = self._reference()
            if ref is self._cell:
                _access.about_to_change(ref)
            return write(ref, _access.side(), value, change)

    def _reference(self) -> Any:
        self._check_strategy(_context.current())
        step = _access.tracing()
        if step is None:
            return self._cell
        ref = step.reference(self)
        assert ref is not None, "variables are made before the step or by it"
        return ref

    def _check_strategy(self, current: Context) -> None:
        if current.strategy is None or self._strategy in (None, current.strategy):
            return
        where = "a step" if current.in_step else "the scope"
        if current.strategy.variable_policy.are_owned:
            raise ContextError(
                f"Variable {self._name!r} belongs to {self._strategy!r}, but was used "
                f"in {where} of {current.strategy!r}. Make it in the scope of the "
                "strategy that uses it, or outside of any scope."
            )

    # Where it is, for the programs of steps.

    @property
    def cell(self) -> Cell:
        """The holder of all copies, outside of steps."""
        return self._cell

    @property
    def replicas(self) -> Replicas:
        """The replicas that have a copy each; one for an ordinary variable."""
        return self._kind.replicas

    @property
    def mesh(self) -> Mesh:
        """The mesh of the devices that hold its copies."""
        return self.replicas.mesh

    @property
    def sharding(self) -> NamedSharding:
        """The placement of the copies."""
        return self._kind.sharding

    @property
    def copies_must_agree(self) -> bool:
        """Whether it has no copies that may differ."""
        return isinstance(self._kind, MirroredKind)

    def lives_on(self, where: Replicas | Mesh) -> bool:
        """Whether steps of these replicas can work on it where it is."""
        mesh = where.mesh if isinstance(where, Replicas) else where
        return self._strategy is not None and self.mesh == mesh

    # How it prints and copies.

    def __repr__(self) -> str:
        kind = "" if self._strategy is None else f" {self._kind.describe}"
        head = f"Variable {self._name!r} {self._dtype.name}{_brackets(self._shape)}"
        if _access.tracing() is not None:
            return f"<{head}{kind}, being traced>"
        with _access.one_at_a_time:
            value = self._cell[...]
        if isinstance(value, Tracer):
            return f"<{head}{kind}, being traced>"
        copies = self._kind.host_copies(value)
        if self._strategy is None:
            return f"<{head} {_text(copies[0])}>"
        lines = (f"  {i}: {_text(copy)}" for i, copy in enumerate(copies))
        return f"{head}{kind}, {{\n" + ",\n".join(lines) + "\n}"

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> Any:
        # By identity between two, so that lists and sets of variables find them.
        return self is other if isinstance(other, Variable) else self._equal(other)

    def __ne__(self, other: object) -> Any:
        is_variable = isinstance(other, Variable)
        return self is not other if is_variable else self._unequal(other)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        if _access.tracing() is not None:
            raise ContextError(
                f"Variable {self._name!r} was deep-copied inside a step. Copy it "
                "outside, and use both in the step."
            )
        twin = object.__new__(Variable)
        memo[id(self)] = twin
        with _access.one_at_a_time, jax.ensure_compile_time_eval():
            vars(twin).update(vars(self))
            twin.number, twin._cell = next(_numbers), Cell(self._cell[...])
        _registry.add(twin, self._strategy)
        return twin

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"Variable {self._name!r} cannot be pickled: it stands for memory of this "
            "process's devices. Save `variable.numpy()`, and assign it to a variable "
            "of the other process."
        )

    # To JAX it is a node around its value, and comes back as that.

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        """The value, for JAX; all copies of a variable that has no one value.

        Shapes: the value has that of the variable, `[...]`; copies `[replica, ...]`.

        Raises:
          ContextError: in another strategy's scope or `run`.
        """
        has_one = _access.side() is not _access.Side.CROSS or self._kind.has_one_value
        return (self.value() if has_one else self.distributed(),), None

    @classmethod
    def tree_unflatten(cls, auxiliary: None, children: tuple[Any]) -> Any:
        """The array that takes its place in a pytree."""
        return children[0]


def _policy() -> VariablePolicy:
    """That of the current strategy."""
    strategy = _context.current().strategy
    policy = ORDINARY if strategy is None else strategy.variable_policy
    assert isinstance(policy, VariablePolicy), "which contexts know in part only"
    return policy


def _start(initial_value: Any, dtype: Any, name: str) -> jax.Array:
    value = initial_value() if isinstance(initial_value, Callable) else initial_value
    if isinstance(value, PerReplica):
        raise TypeError(
            f"Variable {name!r} was given a PerReplica to start with; every copy "
            "starts with the same value. Assign the versions afterwards."
        )
    try:
        start = jnp.asarray(value, dtype)
        if not is_key(start.dtype):
            start = start.astype(start.dtype)  # a Python number's dtype is settled here
    except OverflowError:
        raise ValueError(
            f"Variable {name!r}: {_mesh.too_large(value, dtype)}"
        ) from None
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Variable {name!r} was given {shown(value)} to start with; an array, a "
            "number or a function that returns one was wanted."
        ) from error
    if isinstance(start, Tracer):
        raise TypeError(
            f"Variable {name!r} was given a value of the step that makes it, which "
            "only the devices will know. Start with a constant, and assign."
        )
    return start


def _part_at(value: jax.Array, index: Any) -> jax.Array:
    try:
        return value[index]
    except OverflowError:
        raise ValueError(f"The index {_mesh.too_large(index)}") from None


def _brackets(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _text(copy: np.ndarray) -> str:
    return np.array2string(copy, separator=", ") if copy.ndim else repr(copy.item())
