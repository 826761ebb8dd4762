"""A loop over steps until there is no more data: `Monitor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from jaxstrategy._errors import OutOfRangeError
from jaxstrategy.text._shown import shown
from jaxstrategy.text._whole_numbers import positive


@final
class Monitor:
    """Calls a step so many times, or until the data ends.

    Args:
      step_callable: a step without arguments. At the end of the data it raises
        `OutOfRangeError`, as `get_next()` of an iterator does.
      session: leave it out.

    Raises:
      TypeError: `step_callable` cannot be called.
      ValueError: a session is given.

    >>> from jaxstrategy.compat import contrib
    >>> contrib.Monitor(lambda: print("step")).run_steps(2)
    step
    step
    """

    def __init__(
        self, step_callable: Callable[[], object], session: object = None
    ) -> None:
        if not callable(step_callable):
            raise TypeError(
                f"`step_callable` was {shown(step_callable)}, which cannot be called."
            )
        if session is not None:
            raise ValueError(
                "Should not provide a `session`: steps are run without one."
            )
        self._step = step_callable

    def run_steps(self, num_steps: int | None = None) -> None:
        """Takes steps.

        Args:
          num_steps: how many; by default until the data ends.

        Raises:
          ValueError: the number is below 1.
          TypeError: no whole number.
        """
        left = None if num_steps is None else positive("num_steps", num_steps)
        while left is None or left > 0:
            try:
                self._step()
            except OutOfRangeError:
                return
            left = None if left is None else left - 1
