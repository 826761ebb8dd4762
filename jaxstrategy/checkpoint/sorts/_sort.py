"""A value of a state as a checkpoint sees it: `Sort`."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from jax.sharding import NamedSharding

from jaxstrategy.checkpoint.sorts._entries import (
    Array,
    Entry,
    Reading,
)

_V = TypeVar("_V")


class Sort(abc.ABC, Generic[_V]):
    """One value of a state, and what it is on disk.

    A sort is made of a value of the state. When that is saved, it says what to write;
    when it is restored into, the value says what is wanted: dtype, shape and placement.

    Args:
      name: of its place.
      value: it.
      home: where it goes if it lies nowhere yet, None for JAX's default device.

    Attributes:
      kind: what entries of such values have as `kind`.
      may_refuse: whether `put` may raise. It then comes before anything is changed for
        good, and `undo` takes it back.
    """

    kind: ClassVar[str]
    may_refuse: ClassVar[bool] = False

    def __init__(self, name: str, value: _V, home: NamedSharding | None) -> None:
        self.name = name
        self.value = value
        self.home = home

    # Of all values of the sort.

    @staticmethod
    @abc.abstractmethod
    def takes(value: object) -> bool:
        """Whether a value of a state is of this sort."""

    @staticmethod
    @abc.abstractmethod
    def is_entry(fields: Entry) -> bool:
        """Whether `saved` of some value can have said this.

        Args:
          fields: of a record, besides the kind.
        """

    @staticmethod
    @abc.abstractmethod
    def told_of(entry: Entry) -> str:
        """A description of what was saved, for messages."""

    # Of this one.

    @property
    @abc.abstractmethod
    def describe(self) -> str:
        """A description of the value, for messages."""

    @abc.abstractmethod
    def saved(self) -> tuple[Entry, Array | None]:
        """The entry of the value, and the array to write, None if there is none."""

    @abc.abstractmethod
    def difference(self, entry: Entry, told: str) -> str | None:
        """The reason why an entry cannot be restored into it; None if it can.

        Args:
          entry: of what was saved, of any kind.
          told: what messages call that.
        """

    @abc.abstractmethod
    def reading(self, entry: Entry) -> Reading | None:
        """The reading of the array that was saved; None if there is none."""

    @abc.abstractmethod
    def restored(self, entry: Entry, array: Array | None) -> object:
        """The new value."""

    def placed(self) -> object:
        """The value as it is, where a restored one would be."""
        return self.value

    def put(self, restored: Any) -> object:
        """Change the value in place where it is an object; what then stands there.

        Args:
          restored: what `restored` gave.
        """
        return restored

    def undo(self) -> Callable[[], object]:
        """A function that takes a later `put` back, where that may be refused."""
        return lambda: None

    def differs(self, told: str) -> str:
        """A difference in words."""
        return (
            f"`{self.name}` is {told} in the checkpoint, and {self.describe} was wanted"
        )
