"""Steps that are called as they are: the programs of the default strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

from jaxstrategy._options import RunOptions
from jaxstrategy.tracing.nnx import _objects


@final
class EagerPrograms:
    """What `Programs` are to a strategy that compiles, for one that does not.

    Args:
      run: calls a function as the only replica: `run(fn, args, kwargs, options)`.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def of(
        self, fn: Callable[..., Any], options: RunOptions | None = None
    ) -> EagerProgram:
        """The function, called with a tuple and a dict of arguments."""
        return EagerProgram(fn, functools.partial(self._run, fn, options=options))


@final
class EagerProgram:
    """One function of `EagerPrograms`."""

    def __init__(self, fn: Callable[..., Any], run: Callable[..., Any]) -> None:
        self._fn = fn
        self._run = run

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What the function returns."""
        return self._run(tuple(args), kwargs)

    def bound(self, objects: Sequence[Any]) -> Callable[..., Any]:
        """The function with these first arguments.

        Raises:
          TypeError: none of them can be changed in place.
        """
        captured = _objects.captured_by(self._fn)
        _objects.require_objects(tuple(objects), captured)

        @functools.wraps(self._fn)
        def step(*rest: Any, **kwargs: Any) -> Any:
            return self((*objects, *rest), kwargs)

        return step
