"""Arithmetic with something that has a value."""

from __future__ import annotations

import abc
import operator
from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax
import numpy as np

from jaxstrategy._src.values.types import Index, Value

Operation: TypeAlias = Callable[..., Value]

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

    def _equal(self, other: object) -> Value:
        return self.value() == _comparable(other)

    def _unequal(self, other: object) -> Value:
        return self.value() != _comparable(other)

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


def _forward(function: Operation) -> Operation:
    def apply(self: Operators, other: Value) -> Value:
        return function(self.value(), _plain(other))

    return apply


def _reflected(function: Operation) -> Operation:
    def apply(self: Operators, other: Value) -> Value:
        return function(other, self.value())

    return apply


def _alone(function: Operation) -> Operation:
    def apply(self: Operators) -> Value:
        return function(self.value())

    return apply


for _name in _BINARY.split():
    _function = getattr(operator, f"__{_name}__")
    setattr(Operators, f"__{_name}__", _forward(_function))
    if _name not in ("lt", "le", "gt", "ge"):
        setattr(Operators, f"__r{_name}__", _reflected(_function))
for _name in _UNARY.split():
    setattr(Operators, f"__{_name}__", _alone(getattr(operator, f"__{_name}__")))
