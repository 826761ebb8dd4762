"""Any Python iterable of batches, or a function that makes one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from jaxstrategy.inputs.sources._counted import CountedPass
from jaxstrategy.inputs.sources._source import Pass, Source, State
from jaxstrategy.values._types import PyTree

_AGAIN = (
    "To read it more than once or resume it, give a list of batches, or a function "
    "without arguments that returns a new iterator: the generator function itself, "
    "`read`, and not `read()`."
)


@final
class Repeatable(Source):
    """An iterable that begins anew whenever it is asked: a list, a loader."""

    def __init__(self, batches: Iterable[PyTree]) -> None:
        self._batches = batches

    def start(self) -> Pass:
        batches = self._batches
        in_memory = batches if type(batches) in (list, tuple) else ()
        return CountedPass(lambda: iter(batches), self.name, self.length, in_memory)

    @property
    def length(self) -> int | None:
        try:
            return len(self._batches)  # type: ignore[arg-type]  # asked, not known
        except (TypeError, NotImplementedError):
            return None

    @property
    def name(self) -> str:
        return f"the {type(self._batches).__name__}"


@final
class Generated(Source):
    """A function, called for each pass, that returns the iterator of its batches."""

    def __init__(self, read: Callable[[], Iterable[PyTree]]) -> None:
        self._read = read

    def start(self) -> Pass:
        return CountedPass(self._begin, self.name)

    def _begin(self) -> Iterator[PyTree]:
        batches: Any = self._read()
        if not isinstance(batches, Iterable):
            raise TypeError(
                f"Called for a pass, {self.name} returned {type(batches).__name__}, "
                "which is not an iterator of batches. A function given as a dataset is "
                "called once for each pass; write it with `yield`, or let it return an "
                "iterator."
            )
        return iter(batches)

    @property
    def name(self) -> str:
        function = getattr(self._read, "func", self._read)  # of a partial
        name = getattr(function, "__name__", type(function).__name__)
        return f"the function `{name}`"


@final
class Once(Source):
    """An iterator, which only one pass can read."""

    def __init__(self, batches: Iterator[PyTree]) -> None:
        self._batches = batches
        self._is_started = False

    def start(self) -> Pass:
        if self._is_started:
            raise TypeError(
                f"Only one pass can read {self.name}, and one did. {_AGAIN}"
            )
        self._is_started = True
        return _OncePass(self._batches, self.name)

    @property
    def name(self) -> str:
        return f"the {type(self._batches).__name__}"


@final
class _OncePass(Pass):
    def __init__(self, batches: Iterator[PyTree], name: str) -> None:
        # Never closed: the iterator is the user's own.
        self._batches: Iterator[PyTree] = batches
        self._name = name

    def __next__(self) -> PyTree:
        return next(self._batches)

    def get_state(self) -> State:
        raise TypeError(self._cannot_resume())

    def set_state(self, state: State) -> PyTree | None:
        raise TypeError(self._cannot_resume())

    def _cannot_resume(self) -> str:
        return (
            f"A pass over {self._name} cannot resume: it can be read only once, and "
            f"what it has given is gone. {_AGAIN}"
        )

    def close(self) -> None:
        self._batches = iter(())
