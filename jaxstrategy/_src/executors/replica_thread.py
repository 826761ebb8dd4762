"""Threads of the replicas of an eager step, and their scheduler: `ReplicaTurns`."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, final

import jax

from jaxstrategy._src.contexts.context import EagerReplica, Rebindings
from jaxstrategy._src.errors import DivergentCollectiveError, LateReplicaWarning
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.reductions.reduction import (
    EagerCollective,
    EagerReduction,
    RunCollective,
    SameShapes,
)
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text import user_code
from jaxstrategy._src.text.shown import array_type, listed
from jaxstrategy._src.text.user_code import Line
from jaxstrategy._src.values.arrays import PyTree
from jaxstrategy._src.values.trees import without_eager_sharding

Settings = Callable[[Replicas, int, Device], contextlib.AbstractContextManager[None]]
"""Enters JAX's settings for a replica, given all, its number and its device."""


def thread_settings(options: RunOptions, disable_jit: bool) -> Settings:
    """JAX's settings in this thread, to be entered in the threads of replicas."""
    config = jax.config
    has_wide, promotion = config.jax_enable_x64, config.jax_numpy_dtype_promotion
    ranks = config.jax_numpy_rank_promotion
    precision = config.jax_default_matmul_precision
    nans = config.jax_debug_nans or bool(options.check_finite)
    was_disabled = config.jax_disable_jit
    infs = config.jax_debug_infs

    @contextlib.contextmanager
    def entered(replicas: Replicas, number: int, device: Device) -> Iterator[None]:
        with contextlib.ExitStack() as blocks:
            for block in (
                jax.disable_jit(disable_jit or was_disabled),
                jax.default_device(device),
                jax.enable_x64(has_wide),
                jax.numpy_dtype_promotion(promotion),
                jax.numpy_rank_promotion(ranks),
                jax.default_matmul_precision(precision),
                jax.debug_nans(nans),
                jax.debug_infs(infs),
                without_eager_sharding(),
            ):
                blocks.enter_context(block)
            if replicas.inner_axes:
                blocks.enter_context(jax.set_mesh(replicas.mesh_of(number)))
            yield

    return entered


# To wait for a thread that was told to end.
_ENDING_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class EagerArrays:
    collective: EagerCollective
    arrays: tuple[jax.Array, ...]
    weak: tuple[bool, ...]

    @property
    def label(self) -> str:
        types = [array_type(each.dtype, each.shape) for each in self.arrays]
        return f"{self.collective.name} of {listed(types, 6)}"

    def is_like(self, other: EagerArrays) -> bool:
        types = [[(a.shape, a.dtype) for a in each.arrays] for each in (self, other)]
        return self.collective == other.collective and types[0] == types[1]


@dataclasses.dataclass(frozen=True)
class MergeCall:
    merge_fn: Callable[..., PyTree]
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]

    label = "merge_call"


Rendezvous: TypeAlias = EagerArrays | MergeCall
"""An operation of all replicas, in which each waits for the others."""


class ReplicaEnded(BaseException):  # not caught by a step's `except Exception`
    """Ends the thread of a replica whose step is given up."""


@final
class ReplicaThread(EagerReplica):
    """The thread of one replica, which runs when it is its turn."""

    def __init__(
        self,
        number: int,
        index: jax.Array,
        replicas: Replicas,
        run_collective: RunCollective,
        body: Callable[[ReplicaThread], object],
    ) -> None:
        self.number = number
        self.index = index
        self.reduction = EagerReduction(run_collective)
        self.waits_for: Rendezvous | None = None
        self.request: Callable[[], object] | None = None
        self.line: Line | None = None
        self.result: object = None
        self.error: BaseException | None = None
        self.is_ended = False
        self._is_paused = False
        self._shapes = SameShapes(replicas.count)
        self._body = body
        self._reply: object = None
        self._error_reply: BaseException | None = None
        self._gives_up = False
        self._turn = threading.Semaphore(0)
        self._is_over = threading.Semaphore(0)
        self._rebindings: list[Rebindings] = []
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._run,),
            name=f"replica {number}",
            daemon=True,
        )

    # Called in the thread of the caller.

    def begin_turn(
        self, reply: object = None, error_reply: BaseException | None = None
    ) -> None:
        """Resumes it with the result of the rendezvous, or an error to raise there."""
        self._reply, self._error_reply, self.request = reply, error_reply, None
        self._is_paused = False
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()

    def end_turn(self, seconds: float) -> bool:
        """Returns whether, within `seconds`, it waits for others or has ended."""
        return self._is_over.acquire(timeout=seconds)

    def give_up(self) -> None:
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
        if self._thread.ident is not None:
            self._thread.join(_ENDING_SECONDS)

    @property
    def frames(self) -> list[tuple[str, int, str]]:
        """The files, line numbers and modules of its stack, the innermost first."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return [
            (each.f_code.co_filename, line, str(each.f_globals.get("__name__", "")))
            for each, line in (traceback.walk_stack(frame) if frame else ())
        ]

    # Called in its own thread.

    def _run(self) -> None:
        try:
            self.result = self._body(self)
        except BaseException as error:  # the caller raises it
            self.error = error
        finally:
            self.is_ended = True
            self._is_over.release()

    def rendezvous(
        self, collective: EagerCollective, arrays: Sequence[jax.Array]
    ) -> list[jax.Array]:
        types = jax.tree.leaves(self.result_types(collective, arrays))
        weak = tuple(each.weak_type for each in types)
        results = self._wait(EagerArrays(collective, tuple(arrays), weak))
        assert isinstance(results, list), "the caller answers a collective so"
        return results

    def merge_call(
        self,
        merge_fn: Callable[..., PyTree],
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
    ) -> PyTree:
        return self._wait(MergeCall(merge_fn, tuple(args), dict(kwargs)))

    def result_types(
        self, collective: EagerCollective, arrays: Sequence[object]
    ) -> PyTree:
        """The shapes and dtypes of the results of a collective."""

        def results(*arrays: jax.Array) -> PyTree:
            return collective.results(self._shapes, arrays)

        return jax.eval_shape(results, *arrays)

    def in_caller(self, function: Callable[[], object]) -> object:
        """Calls `function` in the thread of the caller."""
        self.request = function
        return self._pause()

    def _wait(self, waits_for: Rendezvous) -> object:
        """Waits for all replicas and returns this one's result."""
        if self._gives_up:
            raise ReplicaEnded
        self.line = user_code.innermost([frame[:2] for frame in self.frames])
        self.waits_for = waits_for
        return self._pause()

    def _pause(self) -> object:
        """Lets others run until it is its turn again."""
        for rebindings in reversed(self._rebindings):
            rebindings.take_back()
        self._is_paused = True
        self._is_over.release()
        self._turn.acquire()
        if self._gives_up:
            self._rebindings.clear()
            raise ReplicaEnded
        for rebindings in self._rebindings:
            rebindings.set()
        if self._error_reply is not None:
            raise self._error_reply
        return self._reply

    @contextlib.contextmanager
    def rebinding(self, rebindings: Rebindings) -> Iterator[None]:
        rebindings.set()
        self._rebindings.append(rebindings)
        try:
            yield
        finally:
            if rebindings in self._rebindings:  # else they were taken back to end it
                self._rebindings.remove(rebindings)
                rebindings.take_back()


# After so long a replica that runs is named in a warning, once.
PATIENCE_SECONDS = 10.0

_DEBUGGERS = ("bdb", "pdb", "cmd", "pudb", "debugpy", "pydevd", "ipdb")


@final
class ReplicaTurns:
    """The replicas of one eager step: each runs until it waits for all the others."""

    def __init__(
        self,
        name: str,
        threads: Sequence[ReplicaThread],
        answer: Callable[[Sequence[Rendezvous]], Sequence[object]],
        agree: Callable[[str], None],
    ) -> None:
        self._name = name
        self._threads = threads
        self._answer = answer
        self._agree = agree
        self._has_warned = False

    def run(self) -> None:
        try:
            replies: Sequence[object] = [None] * len(self._threads)
            error_reply = None
            while not self._round(replies, error_reply):
                waiting = [
                    t.waits_for for t in self._threads if t.waits_for is not None
                ]
                self._agree(waiting[0].label)
                try:
                    replies, error_reply = self._answer(waiting), None
                except Exception as error:
                    error_reply = error
                    error.add_note(
                        f"All replicas of `{self._name}` had met, in "
                        f"`eager_replicas()`, at {waiting[0].label}: "
                        f"{self._threads[0].line}"
                    )
            self._agree("the end of the step")
        finally:
            for thread in self._threads:
                thread.give_up()
            for thread in self._threads:
                thread.join()

    def _round(
        self, replies: Sequence[object], error_reply: BaseException | None
    ) -> bool:
        """Gives each replica a turn; returns whether all have returned."""
        for thread in self._threads:
            thread.waits_for = None
        for thread, reply in zip(self._threads, replies, strict=True):
            thread.begin_turn(reply, error_reply)
            self._wait_for(thread)
            if thread.error is not None:
                self._raise(thread, thread.error, thread.error is error_reply)
        waiting = [thread for thread in self._threads if not thread.is_ended]
        if not waiting:
            return True
        if len(waiting) < len(self._threads) or not _are_alike(waiting):
            self._tell_others("replicas that do not meet")
            raise self._divergence(waiting)
        return False

    def _wait_for(self, thread: ReplicaThread) -> None:
        self._end_of_turn(thread)
        while thread.request is not None:
            try:
                reply, error_reply = thread.request(), None
            except Exception as error:
                reply, error_reply = None, error
            thread.begin_turn(reply, error_reply)
            self._end_of_turn(thread)

    def _end_of_turn(self, thread: ReplicaThread) -> None:
        while not thread.end_turn(PATIENCE_SECONDS):
            frames = thread.frames
            modules = {module.partition(".")[0] for _, _, module in frames}
            if self._has_warned or not modules.isdisjoint(_DEBUGGERS):
                continue
            self._has_warned = True
            line = user_code.innermost([(file, number) for file, number, _ in frames])
            others = [each for each in self._threads if each.waits_for is not None]
            user_code.warn(
                f"Replica {thread.number} of `{self._name}` has run for "
                f"{PATIENCE_SECONDS:g} s and has not come to a collective, nor to its "
                f"end. It is at\n  {line}\n{_waits(others)}",
                LateReplicaWarning,
            )

    def _raise(
        self, thread: ReplicaThread, error: BaseException, is_reply: bool
    ) -> None:
        self._tell_others(f"{type(error).__name__} in replica {thread.number}")
        if not is_reply:
            others = [each for each in self._threads if each.waits_for is not None]
            error.add_note(
                f"Replica {thread.number} of `{self._name}` raised this, in "
                f"`eager_replicas()`. {_waits(others)}".rstrip()
            )
        raise error

    def _tell_others(self, what: str) -> None:
        try:
            self._agree(what)
        except Exception:
            pass  # the other processes differ: the error here is raised instead

    def _divergence(self, waiting: Sequence[ReplicaThread]) -> DivergentCollectiveError:
        what = "do not meet at the same collective"
        if any(isinstance(each.waits_for, MergeCall) for each in waiting):
            what = "have a different number of merge_call() calls"
        lines = "\n".join(f"  {_where(thread)}" for thread in self._threads)
        return DivergentCollectiveError(
            f"The replicas of `{self._name}` {what}; compiled, or in several "
            f"processes, they would wait for each other for ever:\n{lines}\n"
            "All replicas must call the same collectives in the same order, with "
            "arrays of the same shapes and dtypes. Take the call out of what depends "
            "on the replica, and choose the value instead.",
            collective_line=str(waiting[0].line),
        )


def _are_alike(threads: Sequence[ReplicaThread]) -> bool:
    first = threads[0].waits_for
    others = [thread.waits_for for thread in threads[1:]]
    if isinstance(first, EagerArrays):
        return all(isinstance(x, EagerArrays) and first.is_like(x) for x in others)
    return all(type(first) is type(other) for other in others)


def _where(thread: ReplicaThread) -> str:
    if thread.waits_for is not None:
        return (
            f"replica {thread.number} waits at {thread.waits_for.label}: {thread.line}"
        )
    last = "without any" if thread.line is None else f"after that at {thread.line}"
    return f"replica {thread.number} has returned, {last}"


def _waits(threads: Sequence[ReplicaThread]) -> str:
    if not threads:
        return ""
    who = listed([str(thread.number) for thread in threads], 8)
    first = threads[0]
    assert first.waits_for is not None, "the caller has looked"
    verb = "Replica {} waits" if len(threads) == 1 else "Replicas {} wait"
    return f"{verb.format(who)} at {first.waits_for.label}: {first.line}"
