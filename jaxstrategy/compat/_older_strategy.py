"""What strategies of all older generations are as objects: `OlderStrategy`."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from jaxstrategy.compat._absent_members import missing_member
from jaxstrategy.contexts._strategy_face import StrategyFace, core_of
from jaxstrategy.strategies._calls import name_methods_after
from jaxstrategy.strategies._strategy import Strategy
from jaxstrategy.text._shown import shown


class OlderStrategy(StrategyFace):
    """One strategy of today, under other names.

    Args:
      core: a strategy of today.
    """

    # The module whose users know it.
    _module: ClassVar[str]
    # What it calls the members of other generations.
    _names: ClassVar[Mapping[str, str]]

    def __init__(self, core: Strategy) -> None:
        self._core = core

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name_methods_after(cls)

    @property
    def core(self) -> Strategy:
        """The strategy of today, for what older ones had not: `core.gather`."""
        return self._core

    @staticmethod
    @abc.abstractmethod
    def over(core: Strategy | StrategyFace) -> OlderStrategy:
        """The object of this generation for a strategy, the same each time.

        Args:
          core: a strategy of `jaxstrategy`.

        Raises:
          TypeError: it is something else.
        """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin: Any = self.over(copy.deepcopy(self._core, memo))
        memo[id(self)] = twin
        return twin

    def __copy__(self) -> NoReturn:
        self._core.__copy__()

    def __reduce__(self) -> tuple[Callable[[Any], OlderStrategy], tuple[Strategy]]:
        return self.over, (self._core,)

    def __repr__(self) -> str:
        text = repr(self._core).removeprefix(type(self._core).__name__)
        return f"{self._module}.{type(self).__name__}{text}"

    def _repr_html_(self) -> str:
        return self._core._repr_html_()

    if not TYPE_CHECKING:  # type checkers would find any name

        def __getattr__(self, name: str) -> NoReturn:
            core = vars(self).get("_core")
            missing_member(self, core, name, "strategy.core", self._names)


def checked_core(core: object) -> Strategy:
    """The strategy that `core` is, or stands over.

    Raises:
      TypeError: it is none.
    """
    found = core_of(core)
    if not isinstance(found, Strategy):
        raise TypeError(
            f"`core` was {shown(core)}; a strategy of `jaxstrategy` was wanted, for "
            "example `jaxstrategy.MirroredStrategy()`."
        )
    return found
