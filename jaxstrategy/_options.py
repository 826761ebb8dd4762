"""What users choose: enums and frozen dataclasses."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

PyTree = Any


class ReduceOp(enum.Enum):
    """How the replicas' versions of a value become one.

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
        if isinstance(value, str):
            return cls.__members__.get(value.upper())
        if value is None or not isinstance(value, (str, ReduceOp)):
            raise TypeError(
                f"A reduce operation was expected, got {value!r}. "
                "Use a ReduceOp or one of 'sum', 'mean', 'min', 'max'."
            )
        return None


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How one call of `Strategy.run` is compiled.

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
        new choice, for which the step is compiled again.

    >>> RunOptions(donate_argnums=0).donate_argnums
    (0,)
    >>> options = RunOptions(expect_mirrored=(True, {"loss": False}))
    """

    donate_argnums: int | Sequence[int] = dataclasses.field(default=(), compare=False)
    expect_mirrored: PyTree | Callable[[Any, Any], bool] = dataclasses.field(
        default=None, compare=False
    )
    # What makes two options equal. A pytree counts by its entries and its structure,
    # whether its class can be compared or not.
    _key: Any = dataclasses.field(init=False, repr=False, default=None)
    # Worked out once: options are looked up at each call of `run`.
    _hash: int = dataclasses.field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        self._check_donated()
        self._check_expected()

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
        numbers = (given,) if isinstance(given, int) else given
        try:
            positions = tuple(sorted({operator.index(n) for n in numbers}))
        except TypeError:
            raise TypeError(
                f"`donate_argnums` was {given!r}; an argument position or a sequence "
                "of them was wanted, for example `donate_argnums=(0,)`."
            ) from None
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


def is_function(expected: Any) -> bool:
    """Whether an `expect_mirrored` is a function, not a pytree of True and False.

    A model can be both callable and a pytree: then its leaves are what counts.
    """
    return callable(expected) and not any(
        isinstance(leaf, bool) for leaf in jax.tree.leaves(expected)
    )


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """Which replica a value is made for.

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
    """When the copies of a variable are brought together.

    AUTO is ON_WRITE. NONE is refused, as in TensorFlow's mirrored strategies.
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"

    @classmethod
    def _missing_(cls, value: object) -> VariableSynchronization | None:
        return cls.__members__.get(value.upper()) if isinstance(value, str) else None


class VariableAggregation(enum.Enum):
    """How the replicas' values for a variable, or their copies of it, become one."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"

    @classmethod
    def _missing_(cls, value: object) -> VariableAggregation | None:
        return cls.__members__.get(value.upper()) if isinstance(value, str) else None
