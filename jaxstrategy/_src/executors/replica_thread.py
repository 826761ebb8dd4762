"""Threads of the replicas of an eager step, and their scheduler: `run_in_turns`."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxstrategy._src import text
from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import EagerReplica, Rebindings
from jaxstrategy._src.errors import (
    ContextError,
    DivergentCollectiveError,
    LateReplicaWarning,
)
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.reductions import reduction as _reduction
from jaxstrategy._src.reductions.reduction import (
    EagerCollective,
    EagerReduction,
    SameShapes,
)
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text import Line, array_type, listed
from jaxstrategy._src.tracing.jaxprs import type_of
from jaxstrategy._src.values.arrays import PyTree
from jaxstrategy._src.values.trees import without_eager_sharding


def thread_settings(
    options: RunOptions, disable_jit: bool, replicas: Replicas
) -> Callable[[int], contextlib.ExitStack]:
    """JAX's settings in this thread, to be entered in the thread of each replica."""
    config = jax.config
    settings: list[tuple[Callable[[Any], Any], Any]] = [
        (jax.disable_jit, disable_jit or config.jax_disable_jit),
        (jax.enable_x64, config.jax_enable_x64),
        (jax.numpy_dtype_promotion, config.jax_numpy_dtype_promotion),
        (jax.numpy_rank_promotion, config.jax_numpy_rank_promotion),
        (jax.default_matmul_precision, config.jax_default_matmul_precision),
        (jax.debug_nans, config.jax_debug_nans or bool(options.check_finite)),
        (jax.debug_infs, config.jax_debug_infs),
    ]

    def entered(number: int) -> contextlib.ExitStack:
        with contextlib.ExitStack() as blocks:
            for setting, value in settings:
                blocks.enter_context(setting(value))
            blocks.enter_context(jax.default_device(replicas.devices_of(number)[0]))
            blocks.enter_context(without_eager_sharding())
            if replicas.inner_axes:
                blocks.enter_context(jax.set_mesh(replicas.mesh_of(number)))
            return blocks.pop_all()

    return entered


class Rendezvous(NamedTuple):
    """An operation of all replicas, in which each waits for the others."""

    label: str
    kind: object  # equal if replicas may do it together
    # The function, positional and keyword arguments of a merge call; or a collective,
    # its arrays, and whether each result has a weak type.
    value: tuple[Any, Any, Any]


MERGE_CALL = "merge_call"


class ReplicaEnded(BaseException):  # not caught by a step's `except Exception`
    """Ends the thread of a replica whose step is given up."""


# To wait for a thread that was told to end.
_ENDING_SECONDS = 5.0


@final
class ReplicaThread(EagerReplica):
    """The thread of one replica, which runs when it is its turn."""

    def __init__(
        self,
        number: int,
        replicas: Replicas,
        body: Callable[[ReplicaThread], object],
    ) -> None:
        self.number = number
        self.index = jax.device_put(np.int32(number), replicas.place_of(number))
        self.reduction = EagerReduction(_rendezvous)
        # What it waits for: all the others, or a call in the thread of the caller.
        self.waits_for: Rendezvous | None = None
        self.request: Callable[[], object] | None = None
        self.line: Line | None = None
        self.result: object = None
        self.error: BaseException | None = None
        self._is_ended = False
        self._shapes = SameShapes(replicas.count)
        self._body = body
        self._reply: object = None
        self._error_reply: BaseException | None = None
        self._is_paused = False
        self._gives_up = False
        self._turn = threading.Semaphore(0)
        self.is_over = threading.Semaphore(0)  # a part of its turn
        self._rebindings: list[Rebindings] = []
        self._thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(self._run,),
            name=f"replica {number}",
            daemon=True,
        )

    # Called in the thread of the caller.

    def begin_turn(self, reply: object, error_reply: BaseException | None) -> None:
        """Resumes it with the reply to what it waits for, or an error to raise."""
        self._reply, self._error_reply, self.request = reply, error_reply, None
        self._is_paused = False
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()

    def end(self) -> None:
        """Ends the thread, wherever it is, and waits for that."""
        if self._thread.ident is None:
            return
        if not self._is_ended:
            self._gives_up = True
            if self._is_paused:
                self._turn.release()
            else:  # in a loop, or at the prompt of a debugger
                thread = ctypes.c_ulong(self._thread.ident)
                error = ctypes.py_object(ReplicaEnded)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
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
            self._is_ended = True
            self.is_over.release()

    def rendezvous(
        self, collective: EagerCollective, arrays: Sequence[jax.Array]
    ) -> list[jax.Array]:
        types = [(each.dtype, each.shape) for each in arrays]
        texts = [array_type(dtype, shape) for dtype, shape in types]
        results = jax.tree.leaves(self.result_types(collective, arrays))
        operands = collective, arrays, [x.weak_type for x in results]
        label = f"{collective.name} of {listed(texts, 6)}"
        return self._wait(Rendezvous(label, (collective, types), operands))

    def merge_call(
        self,
        merge_fn: Callable[..., PyTree],
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
    ) -> PyTree:
        call = merge_fn, args, kwargs
        return self._wait(Rendezvous(MERGE_CALL, MERGE_CALL, call))

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

    def _wait(self, waits_for: Rendezvous) -> Any:
        """Waits for all replicas and returns this one's result."""
        if self._gives_up:
            raise ReplicaEnded
        self.line = text.innermost([frame[:2] for frame in self.frames])
        self.waits_for = waits_for
        return self._pause()

    def _pause(self) -> object:
        """Lets others run until it is its turn again."""
        for rebindings in reversed(self._rebindings):
            rebindings.take_back()
        self._is_paused = True
        self.is_over.release()
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


def run_in_turns(
    name: str,
    threads: Sequence[ReplicaThread],
    answer: Callable[[Sequence[Rendezvous]], Sequence[object]],
    agree: Callable[[str], object],
) -> None:
    """Runs the replicas of a step: each until it waits for all the others, in turn.

    Args:
      answer: makes the reply for each replica when all wait for the same.
      agree: compares what comes next with the other processes.
    """
    replies: Sequence[object] = [None] * len(threads)
    error_reply = None
    end_of_turn = _Patience(name, threads).end_of_turn

    def tell_others(what: str) -> None:
        # Where the other processes differ, the error here is raised instead.
        with contextlib.suppress(Exception):
            agree(what)

    try:
        while True:
            for thread in threads:
                thread.waits_for = None
            for thread, reply in zip(threads, replies, strict=True):
                thread.begin_turn(reply, error_reply)
                end_of_turn(thread)
                if (error := thread.error) is not None:
                    tell_others(f"{type(error).__name__} in replica {thread.number}")
                    if error is not error_reply:
                        error.add_note(
                            f"Replica {thread.number} of `{name}` raised this, in "
                            f"`eager_replicas()`. {_waits(threads)}".rstrip()
                        )
                    raise error
            waiting = [each.waits_for for each in threads if each.waits_for is not None]
            if not waiting:
                break
            is_same = all(each.kind == waiting[0].kind for each in waiting)
            if len(waiting) < len(threads) or not is_same:
                tell_others("replicas that do not meet")
                raise _divergence(name, threads)
            agree(waiting[0].label)
            try:
                replies, error_reply = answer(waiting), None
            except Exception as error:
                error_reply = error
                error.add_note(
                    f"All replicas of `{name}` had met, in `eager_replicas()`, at "
                    f"{waiting[0].label}: {threads[0].line}"
                )
        agree("the end of the step")
    finally:
        for thread in threads:
            thread.end()


# After so long a replica that runs is named in a warning, once.
PATIENCE_SECONDS = 10.0

_DEBUGGERS = ("bdb", "pdb", "cmd", "pudb", "debugpy", "pydevd", "ipdb")


@final
class _Patience:
    """Waits for the ends of turns, and warns once of one that takes long."""

    def __init__(self, name: str, threads: Sequence[ReplicaThread]) -> None:
        self._name = name
        self._threads = threads
        self._has_warned = False

    def end_of_turn(self, thread: ReplicaThread) -> None:
        """Waits until a replica waits for all the others or has ended."""
        self._end_of_part(thread)
        while thread.request is not None:
            try:
                reply, error_reply = thread.request(), None
            except Exception as error:
                reply, error_reply = None, error
            thread.begin_turn(reply, error_reply)
            self._end_of_part(thread)

    def _end_of_part(self, thread: ReplicaThread) -> None:
        while not thread.is_over.acquire(timeout=PATIENCE_SECONDS):
            frames = thread.frames
            modules = {module.partition(".")[0] for _, _, module in frames}
            if self._has_warned or not modules.isdisjoint(_DEBUGGERS):
                continue
            self._has_warned = True
            line = text.innermost([frame[:2] for frame in frames])
            text.warn(
                f"Replica {thread.number} of `{self._name}` has run for "
                f"{PATIENCE_SECONDS:g} s and has not come to a collective, nor to its "
                f"end. It is at\n  {line}\n{_waits(self._threads)}",
                LateReplicaWarning,
            )


def _divergence(
    name: str, threads: Sequence[ReplicaThread]
) -> DivergentCollectiveError:
    what, lines, collective_line = "do not meet at the same collective", [], None
    for thread in threads:
        if (rendezvous := thread.waits_for) is not None:
            where = f"waits at {rendezvous.label}: {thread.line}"
            collective_line = collective_line or thread.line
            if rendezvous.kind == MERGE_CALL:
                what = "have a different number of merge_call() calls"
        elif thread.line is None:
            where = "has returned, without any"
        else:
            where = f"has returned, after that at {thread.line}"
        lines.append(f"  replica {thread.number} {where}")
    text = "\n".join(lines)
    return DivergentCollectiveError(
        f"The replicas of `{name}` {what}; compiled, or in several "
        f"processes, they would wait for each other for ever:\n{text}\n"
        "All replicas must call the same collectives in the same order, with "
        "arrays of the same shapes and dtypes. Take the call out of what depends "
        "on the replica, and choose the value instead.",
        collective_line=str(collective_line),
    )


def _waits(threads: Sequence[ReplicaThread]) -> str:
    """Which replicas wait, and where the first of them does."""
    waiting = [thread for thread in threads if thread.waits_for is not None]
    if not waiting:
        return ""
    first, who = waiting[0], listed([str(each.number) for each in waiting], 8)
    assert first.waits_for is not None, "it was chosen so"
    verb = f"Replica {who} waits" if len(waiting) == 1 else f"Replicas {who} wait"
    return f"{verb} at {first.waits_for.label}: {first.line}"


# Collectives, which JAX may differentiate and map in the thread of a replica.

_rendezvous_p = Primitive("jaxstrategy_rendezvous")
_rendezvous_p.multiple_results = True


def _rendezvous(collective: EagerCollective, arrays: Sequence[jax.Array]) -> PyTree:
    types = _this_replica(collective).result_types(collective, arrays)
    results = _rendezvous_p.bind(*arrays, collective=collective)
    return jax.tree.structure(types).unflatten(results)


def _this_replica(collective: EagerCollective) -> ReplicaThread:
    thread = context.current().eager
    if isinstance(thread, ReplicaThread):
        return thread
    raise ContextError(
        f"{collective.name} was called in `eager_replicas()` by a thread that is no "
        "replica's. Call it in the step itself, not in a thread or callback of it."
    )


@_rendezvous_p.def_impl
def _run(*arrays: jax.Array, collective: EagerCollective) -> list[jax.Array]:
    return _this_replica(collective).rendezvous(collective, arrays)


@_rendezvous_p.def_abstract_eval
def _types(*types: ShapedArray, collective: EagerCollective) -> list[ShapedArray]:
    structs = [
        jax.ShapeDtypeStruct(each.shape, each.dtype, weak_type=each.weak_type)
        for each in types
    ]
    results = _this_replica(collective).result_types(collective, structs)
    return [
        ShapedArray(each.shape, each.dtype, weak_type=each.weak_type)
        for each in jax.tree.leaves(results)
    ]


def _derivative(
    primals: Sequence[Any], tangents: Sequence[Any], *, collective: EagerCollective
) -> tuple[list[Any], list[Any]]:
    results = _rendezvous_p.bind(*primals, collective=collective)
    differs = tuple(not isinstance(each, ad.Zero) for each in tangents)
    nonzero = [each for each in tangents if not isinstance(each, ad.Zero)]
    derivative = _reduction.derivative(collective, differs)
    out = iter(_rendezvous_p.bind(*primals, *nonzero, collective=derivative))
    return results, [
        next(out)
        if jnp.issubdtype(result.dtype, jnp.inexact)
        else ad.Zero(jax.typeof(result).to_tangent_aval())
        for result in results
    ]


def _transpose(
    cotangents: Sequence[Any], *operands: Any, collective: EagerCollective
) -> list[Any]:
    linear = tuple(
        type_of(each) if ad.is_undefined_primal(each) else None for each in operands
    )
    known = [each for each in operands if not ad.is_undefined_primal(each)]
    cotangents = [ad.instantiate_zeros(each) for each in cotangents]
    transposed = _reduction.transposed(collective, linear)
    out = iter(_rendezvous_p.bind(*known, *cotangents, collective=transposed))
    return [None if like is None else next(out) for like in linear]


def _mapped(
    operands: Sequence[Any], dimensions: Sequence[Any], *, collective: EagerCollective
) -> tuple[list[Any], list[int]]:
    mapped = _reduction.mapped(collective, tuple(dimensions))
    results = _rendezvous_p.bind(*operands, collective=mapped)
    return results, [0] * len(results)


def _compiled(*_: Any, collective: EagerCollective, **__: Any) -> Any:
    raise ContextError(
        f"{collective.name} was called in a function that JAX compiles for one replica "
        "by itself, where in `eager_replicas()` it cannot meet the others. Leave out "
        "what compiles there: `jax.jit` in `jax.disable_jit(False)`, `.lower()`."
    )


ad.primitive_jvps[_rendezvous_p] = _derivative
ad.primitive_transposes[_rendezvous_p] = _transpose
batching.primitive_batchers[_rendezvous_p] = _mapped
mlir.register_lowering(_rendezvous_p, _compiled)
