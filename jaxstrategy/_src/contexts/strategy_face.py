"""Strategies behind the names of another generation of the API: `StrategyFace`."""

from __future__ import annotations

import abc
from typing import TypeAlias

from jaxstrategy._src.contexts.abstract_strategy import AbstractStrategy
from jaxstrategy._src.text.shown import shown


class StrategyFace(abc.ABC):
    """An object with other methods, behind which a strategy does the work.

    Contexts, variables and values know the strategy only, so that programs may mix the
    generations.
    """

    @property
    @abc.abstractmethod
    def core(self) -> AbstractStrategy:
        """The strategy."""


AnyStrategy: TypeAlias = AbstractStrategy | StrategyFace
"""A strategy, or a face of one, which means the same."""


def core_of(strategy: object) -> object:
    """The strategy behind a face; anything else as it is, to be checked."""
    return strategy.core if isinstance(strategy, StrategyFace) else strategy


def checked_core(strategy: object) -> AbstractStrategy:
    """The strategy that an argument `strategy` means.

    Raises:
      TypeError: it is none, and no face of one.
    """
    core = core_of(strategy)
    if not isinstance(core, AbstractStrategy):
        raise TypeError(f"`strategy` was {shown(strategy)}; a strategy was wanted.")
    return core
