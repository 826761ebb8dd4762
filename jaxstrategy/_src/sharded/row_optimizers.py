"""Optimizers of which a step changes only the rows that have a gradient."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import TypeAlias, final

import jax
import jax.numpy as jnp

from jaxstrategy._src.text.shown import shown
from jaxstrategy._src.values.arrays import Value

Slots: TypeAlias = dict[str, jax.Array]
"""What an optimizer keeps for each row, by name: arrays like the table."""


class RowOptimizer(abc.ABC):
    """An optimizer that changes each row by that row's gradient and slots alone.

    A row whose gradient is zero must stay as it is. Another class, other formulas: two
    of one class differ in their numbers only.

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
