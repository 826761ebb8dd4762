"""What `strategy.scope()` does for Keras, once Keras is imported."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import final

from jaxstrategy._src.contexts.context import AbstractStrategy


@contextlib.contextmanager
def block(strategy: AbstractStrategy) -> Iterator[None]:
    """A block in which variables of Keras get the layouts of `strategy`.

    If Keras is imported inside, they do from then on.
    """
    with contextlib.ExitStack() as entered:
        if _is_imported():
            _enter(strategy, entered)
            yield
            return
        finder = _KerasFinder(lambda: _enter(strategy, entered))
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)


def _is_imported() -> bool:
    # A module that is being imported has no models yet.
    return hasattr(sys.modules.get("keras"), "Model")


def _enter(strategy: AbstractStrategy, entered: contextlib.ExitStack) -> None:
    # Imports Keras: only where a program has done so.
    from jaxstrategy._src.keras import keras_models

    entered.enter_context(keras_models.scope(strategy))


@final
class _KerasFinder(importlib.abc.MetaPathFinder):
    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._is_looking = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != "keras" or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_then(module: ModuleType) -> None:
            run(module)
            self._then()

        spec.loader.exec_module = run_and_then
        return spec
