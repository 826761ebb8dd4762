"""A value, or none: what `get_next_as_optional` gives."""

from __future__ import annotations

from typing import Self, final

from jaxstrategy.values._types import PyTree


@final
class Optional:
    """A batch, or nothing.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> dataset = strategy.experimental_distribute_dataset([np.arange(4)])
    >>> with iter(dataset) as iterator:
    ...     first = iterator.get_next_as_optional()
    ...     second = iterator.get_next_as_optional()
    >>> first.has_value(), second.has_value()
    (True, False)
    """

    def __init__(self, values: tuple[PyTree, ...]) -> None:
        self._values = values

    @classmethod
    def of(cls, value: PyTree) -> Self:
        """One that has a value."""
        return cls((value,))

    @classmethod
    def empty(cls) -> Self:
        """One without."""
        return cls(())

    def has_value(self) -> bool:
        """Whether there is one."""
        return bool(self._values)

    def get_value(self) -> PyTree:
        """The value.

        Raises:
          ValueError: there is none.
        """
        if not self._values:
            raise ValueError(
                "The optional has no value: the data has ended. Ask `has_value()` "
                "first."
            )
        return self._values[0]

    def __repr__(self) -> str:
        return f"Optional({self._values[0]!r})" if self._values else "Optional.empty()"
