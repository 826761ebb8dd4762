"""What shows how far a loop is: drawn by rich or tqdm, or printed line by line."""

from __future__ import annotations

import abc
import datetime
import sys
from collections.abc import Callable
from typing import Any, TextIO, TypeAlias, final

Console: TypeAlias = Any
"""A `rich.console.Console`; rich may be missing."""

# Of a narrower terminal, in columns, a line with all would leave too little to the bar.
_LEAST_WIDTH = 90
# Lines in a log: when the first comes, and the longest time between two.
_FIRST_LINE_SECONDS = 10.0
_MOST_SECONDS = 300.0
# Loops that are over sooner say nothing there: there may be thousands of them.
_LEAST_SECONDS = 1.0


class Display(abc.ABC):
    """A line that says how far a loop is."""

    @abc.abstractmethod
    def show(self, steps: int, rates: str) -> None:
        """So many steps are done, at these rates."""

    @abc.abstractmethod
    def end(self, steps: int) -> None:
        """The loop has come to its end, after so many steps."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the line as it is."""


@final
class Nothing(Display):
    """No line."""

    def show(self, steps: int, rates: str) -> None:
        """Nothing."""

    def end(self, steps: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


@final
class Rich(Display):
    """Drawn by rich, which knows terminals and notebooks.

    Raises:
      LiveError: an older rich draws another line, and cannot draw two.
    """

    def __init__(self, description: str, total: int | None, console: Console) -> None:
        from rich import progress as rich
        from rich.table import Column

        # The bar takes what the others leave, which in a narrow terminal is little.
        self._is_narrow = console.width < _LEAST_WIDTH
        columns = (
            # A long one would take the width of what comes behind it.
            rich.TextColumn(
                "{task.description}",
                table_column=Column(no_wrap=True, max_width=console.width // 4),
            ),
            rich.BarColumn(bar_width=None),
            rich.MofNCompleteColumn(),
            *([] if self._is_narrow else [rich.TimeElapsedColumn()]),
            rich.TimeRemainingColumn(compact=self._is_narrow),
            rich.TextColumn("{task.fields[rates]}"),
        )
        self._progress = rich.Progress(*columns, console=console, expand=True)
        self._task = self._progress.add_task(description, total=total, rates="")
        self._progress.start()

    def show(self, steps: int, rates: str) -> None:
        """Drawn a few times a second, whatever this is called."""
        shown = rates.partition(", ")[0] if self._is_narrow else rates
        self._progress.update(self._task, completed=steps, rates=shown)

    def end(self, steps: int) -> None:
        """A full bar, also where it was not known how many steps there are."""
        if self._progress.tasks[0].total is None:
            self._progress.update(self._task, total=steps)

    def close(self) -> None:
        """Leave the line as it is."""
        self._progress.stop()


@final
class Tqdm(Display):
    """Drawn by tqdm."""

    def __init__(self, description: str, total: int | None) -> None:
        from tqdm import tqdm

        self._bar = tqdm(desc=description or None, total=total, file=sys.stderr)

    def show(self, steps: int, rates: str) -> None:
        """Drawn a few times a second, whatever this is called."""
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(steps - self._bar.n)

    def end(self, steps: int) -> None:
        """A full bar, also where it was not known how many steps there are."""
        if self._bar.total is None:
            self._bar.total = steps
            self._bar.refresh()

    def close(self) -> None:
        """Leave the line as it is."""
        self._bar.close()


@final
class Lines(Display):
    """Printed now and then, where lines cannot be drawn over: in a pipe, in a log.

    Args:
      description: before the numbers.
      total: how many steps there are; None if that is not known.
      clock: tells the seconds.
      file: to print to.
    """

    def __init__(
        self,
        description: str,
        total: int | None,
        clock: Callable[[], float],
        file: TextIO,
    ) -> None:
        self._description = description
        self._total = total
        self._clock = clock
        self._file = file
        self._begin = clock()
        self._interval = _FIRST_LINE_SECONDS
        self._next = self._begin + self._interval
        self._rates = ""

    def show(self, steps: int, rates: str) -> None:
        """Printed after some seconds, and later less often."""
        self._rates = rates
        if self._clock() >= self._next:
            self._print(steps, "?" if self._total is None else str(self._total))
            self._interval = min(1.5 * self._interval, _MOST_SECONDS)
            self._next = self._clock() + self._interval

    def end(self, steps: int) -> None:
        """The last line, of a loop that somebody may have waited for."""
        if self._clock() - self._begin >= _LEAST_SECONDS:
            self._print(steps, str(steps if self._total is None else self._total))

    def _print(self, steps: int, total: str) -> None:
        passed = datetime.timedelta(seconds=int(self._clock() - self._begin))
        facts = [f"{steps}/{total}", str(passed), self._rates]
        text = ", ".join(filter(None, facts))
        print(f"{self._description} {text}".lstrip(), file=self._file, flush=True)

    def close(self) -> None:
        """Nothing."""
