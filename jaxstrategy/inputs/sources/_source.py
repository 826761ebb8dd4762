"""A `Source` of batches, and one `Pass` over it.

A batch is a pytree of arrays on the host, each with the examples along its first
dimension. Sources do not check that; the reader does, for all of them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Self, TypeAlias

from jaxstrategy.values._types import PyTree

State: TypeAlias = Any
"""A state that JSON can hold: dicts, lists, text, numbers, None."""

Dataset: TypeAlias = Any
"""A dataset of another library, an iterable, or a function that makes one."""


class Source(abc.ABC):
    """Batches, read from the beginning as often as asked for."""

    @abc.abstractmethod
    def start(self) -> Pass:
        """A new pass over all batches.

        Raises:
          TypeError: the batches can be read only once, and were.
        """

    @property
    def length(self) -> int | None:
        """The number of batches of a pass; None when unknown or without end."""
        return None

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name in messages."""


class Pass(abc.ABC):
    """One pass over a source.

    Attributes:
      are_own: whether nobody else has the arrays that it gives, so that devices may
        share their memory.
      is_in_memory: whether its batches are in memory already, so that it never waits.
    """

    are_own = False
    is_in_memory = False

    def __iter__(self) -> Self:
        return self

    @abc.abstractmethod
    def __next__(self) -> PyTree:
        """The next batch.

        Raises:
          StopIteration: there is none.
        """

    def part(self, choose: Callable[[int], slice]) -> tuple[int, PyTree] | None:
        """Some rows of the next batch, for a source that need not read the others.

        Args:
          choose: from the number of rows in the batch, those that are wanted.

        Returns:
          The number of rows in the whole batch, and the rows; None if this source
          reads batches only whole (then `__next__` is called instead).

        Raises:
          StopIteration: there is no batch left.
        """
        return None

    def rows_ahead(self, most: int) -> list[int]:
        """The numbers of rows of the next batches, as far as they are sure unread.

        Args:
          most: of how many batches at most.
        """
        return []

    @abc.abstractmethod
    def get_state(self) -> State:
        """The place of this pass, for `set_state` of a pass in another process.

        Raises:
          TypeError: the source cannot be resumed; the message says why.
        """

    @abc.abstractmethod
    def set_state(self, state: State) -> PyTree | None:
        """Go on where the pass was whose state it is.

        Returns:
          The batch before, where it had to be read to get there; else None.

        Raises:
          ValueError: it is the state of something else, or there are not so many
            batches.
          TypeError: the source cannot be resumed.
        """

    def close(self) -> None:  # noqa: B027 (most passes hold nothing)
        """Let go of files and workers. A closed pass is not used again."""
