"""A loop over a dataset, and on the terminal or in the notebook how far it is.

rich or tqdm draws the line. What is here is what they do not know: steps and examples
per second (only real rows count); that one process of several draws; and that
neither need be installed.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, TextIO, TypeAlias, TypeVar, final

import jax

from jaxstrategy._src.inputs import sources
from jaxstrategy._src.inputs.dataset import Grouped
from jaxstrategy._src.masks import number_of_examples
from jaxstrategy._src.text.shown import plural, whole
from jaxstrategy._src.values.arrays import PyTree, Value

_T = TypeVar("_T")
_Show: TypeAlias = Callable[[int, str, bool], None]  # steps, rates, whether it ends

Console: TypeAlias = Any
"""A `rich.console.Console`; rich may be missing."""

# Rates are those of so many seconds.
_WINDOW_SECONDS = 10.0
# Lines in a log: when the first comes, and the longest time between two.
_FIRST_LINE_SECONDS, _MOST_SECONDS = 10.0, 300.0
# Loops that are over sooner say nothing there: there may be thousands of them.
_LEAST_SECONDS = 1.0


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
    >>> for batch in js.training.progress(dataset, description="train"):
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
    ) -> None:
        self.iterator: Iterator[_T] | None = None
        self._iterable = iterable
        self._description = description
        self._examples = examples
        self._total = total
        self._console = console

    def __len__(self) -> int:
        """The number of turns of the loop, where the iterable knows it."""
        return len(self._iterable)  # type: ignore[arg-type]  # it raises TypeError

    def __bool__(self) -> bool:
        return True  # without it, Python asks for the `len`

    def __iter__(self) -> Generator[_T]:
        self.iterator = iterator = iter(self._iterable)
        total = self._total
        if total is None:
            with contextlib.suppress(TypeError):  # not known
                turns: Any = self._iterable
                is_grouped = isinstance(turns, Grouped)
                total = turns.number_of_batches() if is_grouped else len(turns)
        try:
            with _display(self._description, total, self._console) as show:
                yield from self._shown(iterator, show)
        finally:
            if iterator is not self._iterable:  # else it is the user's own
                sources.close(iterator)

    def _shown(self, iterator: Iterator[_T], show: _Show) -> Generator[_T]:
        # When so many steps were done, with so many examples.
        marks = collections.deque([(time.monotonic(), 0, 0)])
        steps, examples, rates = 0, 0, ""
        is_counted = True
        for turn in iterator:
            # Now: the step may donate it.
            made, seen = self._count(turn)
            yield turn
            steps, examples = steps + made, examples + (seen or 0)
            is_counted &= seen is not None
            marks.append((time.monotonic(), steps, examples))
            while len(marks) > 2 and marks[-1][0] - marks[0][0] > _WINDOW_SECONDS:
                marks.popleft()
            rates = _rates(marks, ("step", "example") if is_counted else ("step",))
            show(steps, rates, False)
        show(steps, rates, True)

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


def _rates(marks: Sequence[tuple[float, int, int]], nouns: Sequence[str]) -> str:
    """`2 steps/s, 16 examples/s`; nothing before time has passed."""
    (start, *before), (now, *after) = marks[0], marks[-1]
    if now <= start:
        return ""
    told = []
    for noun, first, last in zip(nouns, before, after, strict=False):
        rate = (last - first) / (now - start)
        number = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
        told.append(f"{number} {plural(1 if rate == 1 else 2, noun)}/s")
    return ", ".join(told)


def _display(
    description: str, total: int | None, console: Console
) -> contextlib.AbstractContextManager[_Show]:
    """What shows it here: rich, tqdm, printed lines, or nothing."""
    if jax.distributed.is_initialized() and jax.process_index() > 0:
        return contextlib.nullcontext(lambda *_: None)
    with contextlib.suppress(ImportError):
        from rich.console import Console

        console = Console(stderr=True) if console is None else console
        if console.is_terminal or console.is_jupyter:
            return _rich(description, total, console)
        return contextlib.nullcontext(_lines(description, total, console.file))
    if sys.stderr.isatty() or "ipykernel" in sys.modules:
        with contextlib.suppress(ImportError):
            import tqdm

            return _tqdm(description, total, tqdm.tqdm)
    return contextlib.nullcontext(_lines(description, total, sys.stderr))


@contextlib.contextmanager
def _rich(description: str, total: int | None, console: Console) -> Iterator[_Show]:
    from rich import progress as rich
    from rich.errors import LiveError
    from rich.table import Column

    # A long description would take the width of what comes behind it.
    column = Column(no_wrap=True, max_width=console.width // 4)
    bar = rich.Progress(
        rich.TextColumn("{task.description}", table_column=column),
        rich.BarColumn(bar_width=None),
        rich.MofNCompleteColumn(),
        rich.TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        rich.TextColumn("{task.fields[rates]}"),
        console=console,
        expand=True,
    )
    task = bar.add_task(description, total=total, rates="")
    try:
        bar.start()
    except LiveError:  # an older rich draws another line, and cannot draw two
        yield lambda *_: None
        return

    def show(steps: int, rates: str, is_end: bool) -> None:
        # A full bar in the end, also where it was not known how many steps there are.
        most = steps if is_end and total is None else total
        bar.update(task, completed=steps, rates=rates, total=most)

    try:
        yield show
    finally:
        bar.stop()


@contextlib.contextmanager
def _tqdm(description: str, total: int | None, tqdm: Any) -> Iterator[_Show]:
    with tqdm(desc=description or None, total=total, file=sys.stderr) as bar:

        def show(steps: int, rates: str, is_end: bool) -> None:
            bar.set_postfix_str(rates, refresh=False)
            bar.update(steps - bar.n)
            if is_end and bar.total is None:
                bar.total = steps
                bar.refresh()

        yield show


def _lines(description: str, total: int | None, file: TextIO) -> _Show:
    """Prints a line after 10 seconds, later less often, and at the end."""
    begin = time.monotonic()
    interval, due = _FIRST_LINE_SECONDS, begin + _FIRST_LINE_SECONDS

    def show(steps: int, rates: str, is_end: bool) -> None:
        nonlocal interval, due
        now = time.monotonic()
        if now < due and not (is_end and now - begin >= _LEAST_SECONDS):
            return
        of = (steps if is_end else "?") if total is None else total
        passed = datetime.timedelta(seconds=int(now - begin))
        text = ", ".join(filter(None, [f"{steps}/{of}", str(passed), rates]))
        print(f"{description} {text}".lstrip(), file=file, flush=True)
        interval = min(1.5 * interval, _MOST_SECONDS)
        due = now + interval

    return show
