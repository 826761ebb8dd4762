"""A loop over a dataset, and on the terminal or in the notebook how far it is.

rich or tqdm draws the line, knows terminals and notebooks, and how often to draw. What
is here is what they do not know: their one rate is that of the turns of the loop, here
there are steps and examples, of which only real rows count; one process of several
draws; and neither need be installed.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Generic, TypeVar, final

import jax

from jaxstrategy.inputs._grouped import Grouped
from jaxstrategy.inputs._progress_displays import (
    Console,
    Display,
    Lines,
    Nothing,
    Rich,
    Tqdm,
)
from jaxstrategy.masks._filled_rows import number_of_examples
from jaxstrategy.text._units import plural
from jaxstrategy.text._whole_numbers import whole
from jaxstrategy.values._types import PyTree, Value

_T = TypeVar("_T")

# Rates are those of so many seconds.
_WINDOW_SECONDS = 10.0


def progress(
    iterable: Iterable[_T],
    *,
    description: str | None = None,
    examples: Callable[[_T], int] | int | None = None,
    total: int | None = None,
    console: Console = None,
) -> Progress[_T]:
    """`iterable`, and while it is looped over a line that says how far the loop is.

    The line has the steps done, those there are if that is known, and of the last
    seconds the steps and the examples per second. It is drawn by rich, else by tqdm, in
    a terminal or a notebook. Elsewhere, as in a pipe, and without either, it is printed
    on standard error every now and then: after 10 seconds, and later less often, and at
    the end of a loop that took a second. Other processes than the first print nothing.
    Counting does not wait for the devices.

    Args:
      iterable: a `DistributedDataset`, or anything else. A turn of the loop is a step;
        of `grouped` it is as many steps as the tuple has batches.
      description: stands before the bar.
      examples: how many a batch has, or a function of what the loop is given that says
        how many there are in it. By default the rows of a batch's first array; of a
        batch for replicas those that are real.
      total: how many steps there are; by default as many as `iterable` has batches.
      console: a `rich.console.Console` to draw on, instead of one on standard error.

    Returns:
      An iterable with the `len` of `iterable`. Its `iterator` is the one in use: for
      `get_state`. One that the loop made is closed when the loop is left.

    Raises:
      TypeError: `iterable` cannot be iterated over; `examples` or `total` is no number.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> dataset = strategy.experimental_distribute_dataset([np.arange(4)] * 3)
    >>> for batch in js.progress(dataset, description="train"):
    ...     total = strategy.run(js.masked_sum, (batch,))
    """
    if not isinstance(iterable, Iterable):
        raise TypeError(
            f"`iterable` was {iterable!r}, which cannot be iterated over. Give a "
            "dataset, or an iterator over one."
        )
    if total is not None:
        total = _whole(total, "total", "a number of steps")
    if examples is not None and not callable(examples):
        examples = _whole(examples, "examples", "a number, or a function of a batch,")
    return Progress(iterable, description or "", examples, total, console)


def _whole(number: Value, name: str, wanted: str) -> int:
    found = whole(number)
    if found is None:
        raise TypeError(f"`{name}` was {number!r}; {wanted} was wanted.")
    return found


@final
class Progress(Generic[_T]):
    """A loop with a line that says how far it is. Made by `progress`.

    Attributes:
      iterator: over what is looped, in the latest loop; None before the first.
    """

    def __init__(
        self,
        iterable: Iterable[_T],
        description: str,
        examples: Callable[[_T], int] | int | None,
        total: int | None,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.iterator: Iterator[_T] | None = None
        self._iterable = iterable
        self._description = description
        self._examples = examples
        self._total = total
        self._console = console
        self._clock = clock

    def __len__(self) -> int:
        """The number of turns of the loop, where the iterable knows it."""
        return len(self._iterable)  # type: ignore[arg-type]  # it raises TypeError

    def __bool__(self) -> bool:
        return True  # without it, Python asks for the `len`

    def __iter__(self) -> Generator[_T]:
        self.iterator = iterator = iter(self._iterable)
        try:
            display = _display(
                self._description, self._steps(), self._console, self._clock
            )
            with contextlib.closing(display):
                yield from self._counted(iterator, display)
        finally:
            if iterator is not self._iterable:  # else it is the user's own
                closing = getattr(iterator, "close", None)
                if callable(closing):
                    closing()

    def _counted(self, iterator: Iterator[_T], display: Display) -> Generator[_T]:
        rates = Rates(self._clock)
        for batch in iterator:
            # Now: the step may donate it.
            steps, examples = self._count(batch)
            yield batch
            rates.add(examples, steps)
            display.show(rates.steps, str(rates))
        display.end(rates.steps)

    def _count(self, turn: PyTree) -> tuple[int, int | None]:
        """The numbers of steps, and of examples, of one turn of the loop."""
        batches = turn if isinstance(self._iterable, Grouped) else (turn,)
        if callable(self._examples):
            return len(batches), self._examples(turn)
        if self._examples is not None:
            return len(batches), self._examples * len(batches)
        rows = [number_of_examples(batch) for batch in batches]
        known = [number for number in rows if number is not None]
        return len(batches), sum(known) if len(known) == len(rows) else None

    def _steps(self) -> int | None:
        if self._total is not None:
            return self._total
        with contextlib.suppress(TypeError):  # not known
            if isinstance(self._iterable, Grouped):
                return self._iterable.number_of_batches()
            return len(self)
        return None


@final
class Rates:
    """Steps and examples per second, of the last seconds.

    Attributes:
      steps: how many there were in all.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.steps = 0
        self._examples: int | None = 0
        self._marks = collections.deque([(clock(), 0, 0)])

    def add(self, examples: int | None, steps: int = 1) -> None:
        """So many steps are done, with so many examples in all."""
        self.steps += steps
        if self._examples is not None:
            self._examples = None if examples is None else self._examples + examples
        now = self._clock()
        self._marks.append((now, self.steps, self._examples or 0))
        while len(self._marks) > 2 and now - self._marks[0][0] > _WINDOW_SECONDS:
            self._marks.popleft()

    @property
    def steps_per_second(self) -> float | None:
        """None before the first step."""
        return self._per_second(1)

    @property
    def examples_per_second(self) -> float | None:
        """None before the first step, and if a batch did not tell its examples."""
        return None if self._examples is None else self._per_second(2)

    def _per_second(self, which: int) -> float | None:
        first, last = self._marks[0], self._marks[-1]
        seconds = last[0] - first[0]
        return (last[which] - first[which]) / seconds if seconds > 0 else None

    def __str__(self) -> str:
        rates = {"step": self.steps_per_second, "example": self.examples_per_second}
        return ", ".join(
            f"{_short(rate)} {plural(1 if rate == 1 else 2, noun)}/s"
            for noun, rate in rates.items()
            if rate is not None
        )


def _short(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _display(
    description: str, total: int | None, console: Console, clock: Callable[[], float]
) -> Display:
    if jax.distributed.is_initialized() and jax.process_index() > 0:
        return Nothing()
    lines = Lines(description, total, clock, sys.stderr)
    with contextlib.suppress(ImportError):
        from rich.console import Console
        from rich.errors import LiveError

        console = Console(stderr=True) if console is None else console
        if not (console.is_terminal or console.is_jupyter):
            return Lines(description, total, clock, console.file)
        with contextlib.suppress(LiveError):
            return Rich(description, total, console)
        return Nothing()
    if not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return lines
    with contextlib.suppress(ImportError):
        return Tqdm(description, total)
    return lines
