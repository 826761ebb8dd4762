"""What users choose: enums and frozen dataclasses."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import jax
from jax.tree_util import KeyPath

from jaxstrategy._src.text.shown import several_whole, whole

PyTree = Any
_Choice = TypeVar("_Choice", bound=enum.Enum)


class ReduceOp(enum.Enum):
    """The operation by which the replicas' versions of a value become one.

    Everything that takes a `ReduceOp` also takes its name as a string, in any case.

    >>> ReduceOp("sum") is ReduceOp.SUM
    True
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"

    @classmethod
    def _missing_(cls, value: object) -> ReduceOp | None:
        if isinstance(value, VariableAggregation):
            return cls.from_variable_aggregation(value)
        if not isinstance(value, str):
            names = ", ".join(_quoted(cls))
            raise TypeError(
                f"A reduce operation was expected, got {value!r}. "
                f"Use a ReduceOp or one of {names}."
            )
        if value.upper() in cls.__members__:
            return cls[value.upper()]
        raise ValueError(f"{value!r} is not a valid ReduceOp; {_all_of(cls)} are.")

    @classmethod
    def from_variable_aggregation(cls, aggregation: VariableAggregation) -> ReduceOp:
        """The operation that a variable's aggregation does.

        >>> ReduceOp.from_variable_aggregation(VariableAggregation.MEAN).name
        'MEAN'
        """
        aggregation = VariableAggregation(aggregation)
        if aggregation.name in cls.__members__:
            return cls[aggregation.name]
        raise ValueError(
            f"Could not convert from {aggregation} to a ReduceOp: it reduces nothing. "
            f"{_all_of(cls)} do."
        )


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`: how a step is compiled, and what is checked.

    Attributes:
      donate_argnums: positions in `args` whose memory the step may reuse for its
        results. Arrays passed there cannot be used afterwards; a later `run` that is
        given one says which argument it was.
      expect_mirrored: the results that must be equal on all replicas, proved while the
        step is traced; one that is not raises `NotMirroredError`, which names it and
        the line where it began to vary. True for all of them, a pytree prefix of bools
        like the results (`(True, False)` for `return state, loss`), or a function
        `(path, leaf) -> bool` that is given JAX's key path and a
        `jax.ShapeDtypeStruct`. Give the same function at each call: a new one is a
        new choice, for which the step is compiled again. False says that a result may
        differ, so that no `NotMirroredWarning` is given for it.
      check_finite: whether to look for NaN and Inf in the arguments, in each value that
        the step computes, and in its variables: the first that arises raises
        `NonFiniteError`, which names the replicas, the line, and the argument if it
        came in. 'nan' looks for NaN only. What the step writes down or captures as
        infinite is meant, as in a mask. Each call then waits for the devices, and takes
        several times as long, and donates nothing: the results of a step that raises
        are lost, arguments, variables and objects are what they were before it. Without
        the option nothing is looked at.

    Raises:
      TypeError: `donate_argnums` are no whole numbers, or `expect_mirrored` has
        something else in it than True and False.
      ValueError: a negative position, or another value of `check_finite`.

    >>> RunOptions(donate_argnums=0).donate_argnums
    (0,)
    >>> options = RunOptions(expect_mirrored=(True, {"loss": False}))
    """

    donate_argnums: int | Sequence[int] = dataclasses.field(default=(), compare=False)
    expect_mirrored: PyTree | Callable[[KeyPath, jax.ShapeDtypeStruct], bool] = (
        dataclasses.field(default=None, compare=False)
    )
    check_finite: bool | Literal["nan"] = False
    # What makes two options equal. A pytree counts by its entries and its structure,
    # whether its class can be compared or not.
    _key: tuple[object, ...] | None = dataclasses.field(
        init=False, repr=False, default=None
    )
    # Worked out once: options are looked up at each call of `run`.
    _hash: int = dataclasses.field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        self._check_donated()
        self._check_expected()
        if self.check_finite not in (True, False, "nan"):
            raise ValueError(
                f"`check_finite` was {self.check_finite!r}; True, False or 'nan' was "
                "wanted."
            )

    def __hash__(self) -> int:
        return self._hash

    def _check_expected(self) -> None:
        leaves, structure = jax.tree.flatten(
            self.expect_mirrored, is_leaf=lambda entry: entry is None
        )
        wrong = [
            entry for entry in leaves if entry is not None and type(entry) is not bool
        ]
        if wrong and not is_function(self.expect_mirrored):
            raise TypeError(
                f"`expect_mirrored` was {self.expect_mirrored!r}, with {wrong[0]!r} "
                "where True or False was wanted. Give True for all results, a pytree "
                "of True and False in the shape of the results, or a function of a "
                "path and a leaf."
            )
        key = self.donate_argnums, tuple(leaves), structure
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key[:2]))

    def _check_donated(self) -> None:
        given = self.donate_argnums
        one = whole(given)
        numbers = several_whole(given if one is None else (one,))
        if numbers is None:
            raise TypeError(
                f"`donate_argnums` was {given!r}; an argument position or a sequence "
                "of them was wanted, for example `donate_argnums=(0,)`."
            )
        positions = tuple(sorted(set(numbers)))
        if positions and positions[0] < 0:
            raise ValueError(
                f"`donate_argnums` was {given!r}; positions count from 0 at the first "
                "argument of the function and cannot be negative."
            )
        object.__setattr__(self, "donate_argnums", positions)

    @property
    def donated(self) -> tuple[int, ...]:
        """The positions of `donate_argnums`, always as a tuple."""
        given = self.donate_argnums
        return (given,) if isinstance(given, int) else tuple(given)


def is_function(expected: object) -> bool:
    """Whether an `expect_mirrored` is a function, not a pytree of True and False.

    A model can be both callable and a pytree: then its leaves are what counts.
    """
    return callable(expected) and not any(
        isinstance(leaf, bool) for leaf in jax.tree.leaves(expected)
    )


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """The replica that a value is made for.

    Given to the function of `Strategy.experimental_distribute_values_from_function`.

    >>> print(ValueContext(1, 4))
    jaxstrategy.experimental.ValueContext(replica id 1, total replicas in sync: 4)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            "jaxstrategy.experimental.ValueContext"
            f"(replica id {self.replica_id_in_sync_group}, "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )


class VariableSynchronization(enum.Enum):
    """The moment at which the copies of a variable are brought together.

    AUTO is ON_WRITE. NONE is refused, as in TensorFlow's mirrored strategies. A
    variable takes the name as a string, too, in any case.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> on_read = js.VariableSynchronization.ON_READ
    >>> with strategy.scope():
    ...     seen = js.Variable(0, synchronization=on_read, aggregation="sum")
    >>> _ = strategy.run(lambda: seen.assign_add(1))
    >>> int(seen)
    2
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"

    @classmethod
    def _missing_(cls, value: object) -> VariableSynchronization:
        return named(cls, value, "synchronization")


class VariableAggregation(enum.Enum):
    """The operation that makes one value of those of the replicas, for a variable.

    A variable takes the name as a string, too, in any case.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     best = js.Variable(0.0, aggregation=js.VariableAggregation.MEAN)
    >>> strategy.run(best.assign, (strategy.per_replica([1.0, 2.0]),))
    Array(1.5, dtype=float32)
    """

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"

    @classmethod
    def _missing_(cls, value: object) -> VariableAggregation:
        return named(cls, value, "aggregation")


def _quoted(kind: type[enum.Enum]) -> list[str]:
    """The names that an enum's members may be given by."""
    return [repr(name.lower()) for name in kind.__members__]


def _all_of(kind: type[enum.Enum]) -> str:
    *names, last = _quoted(kind)
    return f"{', '.join(names)} and {last}"


def named(kind: type[_Choice], value: object, what: str) -> _Choice:
    """The member of the enum `kind` with this name, in any case."""
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    names = ", ".join(_quoted(kind))
    raise ValueError(
        f"`{what}` was {value!r}; a {kind.__name__} or one of {names} was wanted."
    )
