"""One replica of a step that runs eagerly, in a thread of its own: `ReplicaThread`.

One thread runs at a time: the caller's, or that of one replica, until it waits for the
others or has ended. So prints of replicas come in their order, a debugger has the
terminal for itself, and who has not arrived is known without waiting for it.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, final

import jax

from jaxstrategy.contexts._eager_replica import EagerReplica, Loans
from jaxstrategy.reductions._met_collectives import MetCollective, SameShapes
from jaxstrategy.reductions._met_reduction import Meet, MetReduction
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.text import _user_code
from jaxstrategy.text._array_types import array_type
from jaxstrategy.text._lists import listed
from jaxstrategy.text._user_code import Line
from jaxstrategy.values._types import PyTree

# For a replica that runs on after it was told to end.
_ENDING_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class MetArrays:
    """A collective with one replica's arrays.

    Attributes:
      collective: what is called.
      arrays: of this replica.
      weak: for each result whether it gives way to other dtypes, as numbers do.
    """

    collective: MetCollective
    arrays: tuple[jax.Array, ...]
    weak: tuple[bool, ...]

    @property
    def told(self) -> str:
        """The call in words."""
        types = [array_type(each.dtype, each.shape) for each in self.arrays]
        return f"{self.collective.name} of {listed(types, 6)}"

    def is_like(self, other: MetArrays) -> bool:
        """Whether both are of one program."""
        kinds = [[(a.shape, a.dtype) for a in each.arrays] for each in (self, other)]
        return self.collective == other.collective and kinds[0] == kinds[1]


@dataclasses.dataclass(frozen=True)
class MergeCall:
    """A `merge_call` of one replica."""

    merge_fn: Callable[..., PyTree]
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]

    told = "merge_call"


Wanted: TypeAlias = MetArrays | MergeCall
"""What a replica waits for."""


class ReplicaEnded(BaseException):  # which no `except Exception` of a step takes
    """Ends the thread of a replica whose step is given up."""


@final
class ReplicaThread(EagerReplica):
    """One replica, which runs when it is its turn.

    Args:
      number: of the replica.
      index: the same on its device.
      replicas: all of them.
      meet: what its reductions do.
      body: what it runs; returns its results.

    Attributes:
      wanted: what it waits for; None if it has not come to that in this round.
      request: what the caller's thread is to do for it alone, if anything.
      line: of the user's code, where it met the others last.
      result: what `body` returned.
      error: what it raised.
      is_ended: whether it has returned or raised.
    """

    def __init__(
        self,
        number: int,
        index: jax.Array,
        replicas: Replicas,
        meet: Meet,
        body: Callable[[ReplicaThread], object],
    ) -> None:
        self.number = number
        self.index = index
        self.reduction = MetReduction(meet)
        self.wanted: Wanted | None = None
        self.request: Callable[[], object] | None = None
        self.line: Line | None = None
        self.result: object = None
        self.error: BaseException | None = None
        self.is_ended = False
        self._is_paused = False
        self._shapes = SameShapes(replicas)
        self._body = body
        self._reply: object = None
        self._refusal: BaseException | None = None
        self._gives_up = False
        self._turn = threading.Semaphore(0)
        self._is_over = threading.Semaphore(0)
        self._loans: list[Loans] = []
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._run,),
            name=f"replica {number}",
            daemon=True,
        )

    # In the thread of the caller.

    def begin_turn(
        self, reply: object = None, refusal: BaseException | None = None
    ) -> None:
        """Lets it run, with what came of what it waited for, or an error to raise."""
        self._reply, self._refusal, self.request = reply, refusal, None
        self._is_paused = False
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()

    def end_turn(self, seconds: float) -> bool:
        """Waits until it waits or has ended; whether it does after so many seconds."""
        return self._is_over.acquire(timeout=seconds)

    def give_up(self) -> None:
        """Ends the thread, wherever it is."""
        if self._thread.ident is None or self.is_ended:
            self.is_ended = True
            return
        self._gives_up = True
        if self._is_paused:
            self._turn.release()
        else:  # in a loop, or at the prompt of a debugger
            thread = ctypes.c_ulong(self._thread.ident)
            error = ctypes.py_object(ReplicaEnded)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
        self._thread.join(_ENDING_SECONDS)

    def join(self) -> None:
        """Waits for the end of the thread, whose body has ended."""
        if self._thread.ident is not None:
            self._thread.join(_ENDING_SECONDS)

    @property
    def frames(self) -> list[tuple[str, int, str]]:
        """Where it is: files, line numbers and modules, the innermost first."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        found: list[tuple[str, int, str]] = []
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            found.append((frame.f_code.co_filename, frame.f_lineno, module))
            frame = frame.f_back
        return found

    # In its own thread.

    def _run(self) -> None:
        try:
            self.result = self._body(self)
        except BaseException as error:  # the caller raises it
            self.error = error
        finally:
            self.is_ended = True
            self._is_over.release()

    def meet(
        self, collective: MetCollective, arrays: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """This replica's results of a collective of all."""
        types = jax.tree.leaves(self.result_types(collective, arrays))
        weak = tuple(each.weak_type for each in types)
        found = self._wait(MetArrays(collective, tuple(arrays), weak))
        assert isinstance(found, list), "the caller answers what was asked"
        return found

    def merge_call(
        self,
        merge_fn: Callable[..., PyTree],
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
    ) -> PyTree:
        """This replica's part of what `merge_fn`, called once for all, returns."""
        return self._wait(MergeCall(merge_fn, tuple(args), dict(kwargs)))

    def result_types(
        self, collective: MetCollective, arrays: Sequence[object]
    ) -> PyTree:
        """The shapes and dtypes of what a collective of these arrays returns."""

        def results(*arrays: jax.Array) -> PyTree:
            return collective.results(self._shapes, arrays)

        return jax.eval_shape(results, *arrays)

    def in_caller(self, function: Callable[[], object]) -> object:
        """What `function` returns, called in the thread of the caller.

        There JAX's settings are those of all replicas.
        """
        self.request = function
        return self._pause()

    def _wait(self, wanted: Wanted) -> object:
        """What comes of something for which all replicas meet.

        Raises:
          ReplicaEnded: the step is given up.
        """
        if self._gives_up:
            raise ReplicaEnded
        self.line = _user_code.innermost(_frames_here())
        self.wanted = wanted
        return self._pause()

    def _pause(self) -> object:
        """Lets others run until it is its turn again."""
        for loans in reversed(self._loans):
            loans.take_back()
        self._is_paused = True
        self._is_over.release()
        self._turn.acquire()
        if self._gives_up:
            self._loans.clear()
            raise ReplicaEnded
        for loans in self._loans:
            loans.set()
        if self._refusal is not None:
            raise self._refusal
        return self._reply

    @contextlib.contextmanager
    def lending(self, loans: Loans) -> Iterator[None]:
        """A `with` block with these loans, which are there while this replica runs."""
        loans.set()
        self._loans.append(loans)
        try:
            yield
        finally:
            if loans in self._loans:  # else they were taken back to end it
                self._loans.remove(loans)
                loans.take_back()


def _frames_here() -> list[tuple[str, int]]:
    frame = sys._getframe(1)
    found: list[tuple[str, int]] = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found
