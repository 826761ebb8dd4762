"""Strategies behind the names of another generation of the API: `StrategyFace`."""

from __future__ import annotations

import abc

from jaxstrategy.contexts._abstract_strategy import AbstractStrategy


class StrategyFace(abc.ABC):
    """An object with other methods, behind which a strategy does the work.

    Contexts, variables and values know the strategy only, so that programs may mix the
    generations.
    """

    @property
    @abc.abstractmethod
    def core(self) -> AbstractStrategy:
        """The strategy."""


def core_of(strategy: object) -> object:
    """The strategy behind a face; anything else as it is, to be checked."""
    return strategy.core if isinstance(strategy, StrategyFace) else strategy
