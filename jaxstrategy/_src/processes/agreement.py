"""Agreement of a job's processes: each gives a value and gets the values of all.

`jax.experimental.multihost_utils` agrees by collectives on the devices. These have no
deadline and name nobody: a process that does not come, or that is in another program,
leaves the others in them (measured with 0.10 and 0.12: a checkpoint that one process of
two saved held both for as long as we waited, 240 s, whatever the timeout). They also
compete with the steps for the devices, so no thread that reads ahead can use them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import traceback
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypedDict, final

import jax
import numpy as np
from jax.typing import ArrayLike

from jaxstrategy._src import text
from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.processes.rendezvous import Json
from jaxstrategy._src.processes.store import Store
from jaxstrategy._src.processes.watchdog import Watchdog
from jaxstrategy._src.text import Shaped, and_more, array_type

# The watchdog looks on, and the end of another process ends the wait: a deadline of its
# own would only end jobs one of whose processes compiles or reads for long.
AS_LONG_AS_IT_TAKES = 1e6


@final
class Agreement:
    """Agreement of all processes about one topic; by default of this process alone.

    All of them call `exchange` equally often. What follows from all answers alone is
    then the same in each process: that is what they agree on.
    """

    def __init__(
        self,
        topic: str | None = None,  # its name in all; None if there is one process
        store: Store | None = None,
        watch: Watchdog | None = None,
    ) -> None:
        self.topic = topic
        self._store = store
        self._watch = watch

    def exchange(
        self, said: Json, timeout_seconds: float = AS_LONG_AS_IT_TAKES
    ) -> list[Json]:
        """Say something; get what all processes say, in the order of their ids.

        The n-th call meets the n-th of each other process, whose end makes it an error.
        Any thread may call it, for one topic one at a time.
        """
        if self._store is None:
            return [said]
        return self._store.gather(str(self.topic), said, timeout_seconds)

    def reading(self, what: str) -> AbstractContextManager[object]:
        """A block in which this process reads `what`; the others may wait for it."""
        return nullcontext() if self._watch is None else self._watch.reading(what)

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """A block of waiting for `what` together; the watchdog ends it if it must."""
        return nullcontext() if self._watch is None else self._watch.waiting(what)


_HASHED_BYTES = 65536  # of an argument that comes from the host
_NAMED = 3  # captured values of a program; the others are counted


class ProgramPrint(TypedDict):
    """A program of a step, as its process tells the others of it."""

    name: str  # of the step
    prints: list[str]  # of its code, and of each value that it has captured
    captured: list[str]  # these values in words


@final
@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation that a process is about to do with all others."""

    name: str
    where: str  # its source line, which is only shown
    kinds: Sequence[str] = ()  # dtypes and shapes of what it is done with
    programs: Sequence[ProgramPrint] = ()  # that must be the same in all processes

    def told(self) -> list[Json]:
        """The operation as JSON; `Operation(*told)` is its inverse."""
        return [self.name, self.where, list(self.kinds), list(self.programs)]

    @property
    def prints(self) -> list[tuple[str, list[str]]]:
        """Names and fingerprints of its programs."""
        return [(program["name"], program["prints"]) for program in self.programs]


def other_programs(first: Operation, other: Operation, index: int) -> str | None:
    """Describe how the programs of two processes differ; None if they do not."""
    if first.prints == other.prints:
        return None
    pairs = itertools.zip_longest(first.programs, other.programs)
    one, two = next(pair for pair in pairs if _differ(*pair))
    name = (one or two)["name"]
    return (
        f"Processes 0 and {index} have made different programs of `{name}`, and were "
        f"about to run them together. {_what_differs(one, two)}\nA number or an array "
        "that a step captures is part of its program, and must be the same in all "
        "processes, as must be an argument that is no PerReplica. Pass it as an "
        "argument, as a PerReplica if it is to differ."
    )


def other_operation(first: Operation, other: Operation, index: int) -> str | None:
    """Describe how the operations of two processes differ; None if they do not."""
    if first.name != other.name:
        return (
            f"  process 0: `{first.name}` ({first.where})\n"
            f"  process {index}: `{other.name}` ({other.where})"
        )
    if len(first.kinds) != len(other.kinds):
        return (
            f"  process 0: `{first.name}` ({first.where}) with {len(first.kinds)} "
            f"arrays\n  process {index}: the same with {len(other.kinds)}"
        )
    pairs = zip(first.kinds, other.kinds, strict=True)
    for place, (one, two) in enumerate(pairs):
        if one != two:
            return (
                f"  process 0: `{first.name}` ({first.where}), array {place} of its "
                f"arguments: {one}\n  process {index}: {two}"
            )
    return None


def _differ(one: ProgramPrint | None, two: ProgramPrint | None) -> bool:
    if one is None or two is None:
        return True
    return (one["name"], one["prints"]) != (two["name"], two["prints"])


def _what_differs(one: ProgramPrint | None, two: ProgramPrint | None) -> str:
    if one is None or two is None or one["name"] != two["name"]:
        return "One of them has made none."
    prints = list(zip(one["prints"], two["prints"], strict=False))
    if prints[0][0] != prints[0][1] or len(one["prints"]) != len(two["prints"]):
        return "The code differs, or a number in it."
    captured = zip(one["captured"], prints[1:], strict=True)
    found = [text for text, (mine, other) in captured if mine != other]
    named = "\n".join(f"  {text}" for text in found[:_NAMED])
    more = and_more(len(found), _NAMED, before="\n  ")
    is_argument = any(", argument `" in text for text in found)
    what = "captures, or is given," if is_argument else "captures"
    return f"What it {what} differs:\n{named}{more}"


def users_line() -> str:
    """The line of the user's own code that is executed."""
    stack = traceback.walk_stack(None)
    frames = ((frame.f_code.co_filename, number) for frame, number in stack)
    return str(text.innermost(frames) or "unknown line")


def kind(array: Shaped) -> str:
    """Dtype and shape."""
    return array_type(array.dtype, array.shape, ", ")


def described(leaf: ArrayLike) -> str:
    """The part of an argument of a step that must be the same in all processes."""
    if isinstance(leaf, jax.Array):
        return kind(leaf)
    if isinstance(leaf, (bool, int, float, complex)):
        return f"{type(leaf).__name__} {leaf!r}"
    array = np.asarray(leaf)
    if array.nbytes > _HASHED_BYTES:
        return kind(array)
    bits = zlib.crc32(np.ascontiguousarray(array).tobytes())
    return f"{kind(array)} of bits {bits:08x}"


# One topic for all: a process that steps meets one that does something else.
_TOPIC = "together"
_OPERATIONS = "All processes must do the same, in the same order."
_EXCHANGES = (
    "All processes must make, change and read together what they share, not only one "
    "of them (`if jax.process_index() == 0`): mirrored values, variables, reductions."
)


@final
class OperationAgreement:
    """Agreement of several processes about what they do next."""

    def __init__(self, store: Store, watch: Watchdog) -> None:
        self._store = store
        self._watch = watch
        self._on_refusal: list[weakref.WeakMethod[Callable[[], None]]] = []

    def on_refusal(self, callback: Callable[[], None]) -> None:
        """Calls a method, as long as its object lives, when all are refused."""
        alive = [each for each in self._on_refusal if each() is not None]
        self._on_refusal = [*alive, weakref.WeakMethod(callback)]

    def compare(
        self, operation: Operation, advice: str, said: Json = None
    ) -> list[Json]:
        """Compare an operation with those of the others; get what each says besides."""
        told = [said, operation.told()]
        replies = self._store.gather(_TOPIC, told, AS_LONG_AS_IT_TAKES)
        done = [Operation(*told) for _, told in replies]
        for index, other in enumerate(done):
            if text := other_programs(done[0], other, index):
                raise self.refusal(text)
        for index, other in enumerate(done):
            if text := other_operation(done[0], other, index):
                raise self.refusal(
                    "The processes are about to do different things together:\n"
                    f"{text}\n{advice}"
                )
        return [each_said for each_said, _ in replies]

    def agree(self, what: str, said: Json = None) -> list[Json]:
        """Compare something done outside of steps; get what each says about it."""
        operation = Operation(what, users_line())
        with self._watch.waiting(what):
            return self.compare(operation, _OPERATIONS, said)

    @contextlib.contextmanager
    def exchanging(self, what: str, *arrays: Shaped) -> Iterator[None]:
        """A block in which the processes exchange `arrays`, outside of steps.

        The values may differ, their shapes and dtypes may not.
        """
        kinds = [kind(array) for array in arrays]
        operation = Operation(what, users_line(), kinds)
        self._watch.step_started(what, operation.where)
        try:
            self.compare(operation, _EXCHANGES)
            yield
        finally:
            self._watch.step_dispatched()

    def refusal(self, text: str) -> ClusterError:
        """An error that each process raises now, by what all of them have heard.

        None of them then takes the end of another one for the reason of its own.
        """
        self._store.common_error = text
        for get in self._on_refusal:
            if (callback := get()) is not None:
                callback()
        return ClusterError(text)


_TICK_SECONDS = 1.0
_PAUSE_SECONDS = 0.05


def announce(store: Store, name: str, reason: str) -> None:
    """Let all processes stop soon."""
    store.put(name, reason)


@final
class StopAgreement:
    """Lets all processes stop after the same number of calls.

    When one has announced that it wants to, a thread of each says how many calls its
    process has begun. From then on the process begins no other until all have said so;
    then those that are behind go on to where the first of them is, and stop there too.

    A thread says it, because the process itself may be inside a step, which does not
    end before all others have begun it. Each name is for one agreement; `count` calls
    were begun before.
    """

    def __init__(self, store: Store, name: str, count: int = 0) -> None:
        self._store = store
        self._name = name
        self._count = count
        self._limit: int | None = None
        self._stop: int | None = None
        self._error: ClusterError | None = None
        self._changed = threading.Condition()
        self._over = threading.Event()
        threading.Thread(
            target=self._look_on, name=f"jaxstrategy {name}", daemon=True
        ).start()

    def begin(self) -> bool:
        """Before each call: whether it is to be left out, since it is time to stop."""
        with self._changed:
            while self._must_wait():
                self._changed.wait(_TICK_SECONDS)
            if self._error is not None:
                raise self._error
            if self._stop is not None and self._count >= self._stop:
                return True
            self._count += 1
            return False

    def catch_up(self, count: int) -> None:
        """So many calls have been begun at least, some of them unseen."""
        with self._changed:
            self._count = max(self._count, count)

    @property
    def is_time(self) -> bool:
        """Whether the last call that was begun is the last one of all."""
        with self._changed:
            return self._stop is not None and self._count >= self._stop

    def close(self) -> None:
        """Take no part any more."""
        self._over.set()

    def _must_wait(self) -> bool:
        is_asked = self._limit is not None and self._count >= self._limit
        return is_asked and self._stop is None and self._error is None

    def _look_on(self) -> None:
        while not self._over.is_set():
            try:
                # Again and again for a short time, so that `close` is heard.
                self._store.get(self._name, _TICK_SECONDS)
            except ClusterError:
                self._over.wait(_PAUSE_SECONDS)  # it may be that it cannot answer
                continue
            break
        else:
            return
        with self._changed:
            self._limit = self._count
        try:
            counts = self._store.gather(
                f"{self._name}: calls", self._limit, AS_LONG_AS_IT_TAKES
            )
        except ClusterError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            return
        with self._changed:
            self._stop = max(counts)
            self._changed.notify_all()
