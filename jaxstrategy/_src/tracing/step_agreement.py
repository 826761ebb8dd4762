"""Checks that all processes run the same steps in the same order: `StepAgreement`."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import final

import jax
import jax.monitoring
from jax.stages import Compiled

from jaxstrategy._src.errors import ClusterError, CompiledStepError
from jaxstrategy._src.inputs import origins
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.processes import agreement
from jaxstrategy._src.processes.agreement import Operation, ProgramPrint
from jaxstrategy._src.processes.job import Processes
from jaxstrategy._src.processes.watchdog import COMPILES, Watchdog
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.tracing import step_arguments
from jaxstrategy._src.tracing.constants import ProgramValue, code_of, fingerprint
from jaxstrategy._src.tracing.program import InputLayout, Program
from jaxstrategy._src.tracing.references import source_location
from jaxstrategy._src.tracing.saved_step import Obtain, Preparation
from jaxstrategy._src.tracing.traced_step import ReplicaStep, TracedStep
from jaxstrategy._src.values.arrays import Leaf, PyTree
from jaxstrategy._src.variables import access

# Measured with JAX 0.10 and 0.12; its argument `fun_name` is `jit(name)`. Without such
# an event, the whole first call counts as compiling.
_COMPILED = "/jax/core/compile/backend_compile_duration"

# The compilation in progress on this thread: its watchdog and the function's name.
_thread = threading.local()


def begin(watchdog: Watchdog, name: str) -> None:
    """Reports this process as busy until the function `name` is compiled."""
    _listen()
    _thread.compilation = watchdog, name.rpartition(".")[2]
    watchdog.step_busy(COMPILES)


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, duration_secs: float, **details: object) -> None:
    compilation = getattr(_thread, "compilation", None)
    if event != _COMPILED or compilation is None:
        return
    watchdog, name = compilation
    if details.get("fun_name") == f"jit({name})":
        _thread.compilation = None
        watchdog.step_busy(None)


_MAX_MESSAGE = 2000  # characters of another process's error
_ADVICE_AHEAD = (
    "Each process must call `compile` or `load_compiled` for the same steps in the "
    "same order, with arguments of the same types."
)


@final
class AgreedPreparation:
    """Compiles or loads a step in all processes, or in none."""

    def __init__(self, processes: Processes, name: str, where: str) -> None:
        self._processes = processes
        self._name = name
        self._where = where
        self._what = f"{name} at {os.path.basename(where)}, ahead of its calls"
        self._programs: list[ProgramPrint] = []
        self._common_error: Exception | None = None  # raised by all processes

    def traced(self, step: TracedStep) -> None:
        """Stores the trace, to be compared before it is compiled."""
        self._programs = [_fingerprint(step)]

    def run(
        self,
        prepare: Callable[[Sequence[Leaf], Obtain], None],
        leaves: Sequence[Leaf],
        obtain: Obtain,
    ) -> None:
        """Prepares the step, as all other processes do at the same time."""
        types = mesh.types_of(leaves)
        self._compare(list(map(agreement.kind, types)))
        work = contextlib.ExitStack()  # without the other processes

        def obtained(preparation: Preparation) -> Compiled:
            work.close()
            self._check_all(None)
            self._compare((), self._programs)
            work.enter_context(self._working())
            return obtain(preparation)

        with work:
            work.enter_context(self._working())
            try:
                prepare(leaves, obtained)
            except Exception as error:
                work.close()
                if error is not self._common_error:
                    self._check_all(error)
                raise
        self._check_all(None)

    def _working(self) -> contextlib.AbstractContextManager[object]:
        return self._processes.watchdog.waiting(self._what, COMPILES)

    def _compare(
        self, kinds: Sequence[str], programs: Sequence[ProgramPrint] = ()
    ) -> None:
        operation = Operation(self._what, self._where, kinds, programs)
        with self._processes.watchdog.waiting(self._what):
            try:
                self._processes.operations.compare(operation, _ADVICE_AHEAD)
            except ClusterError as error:
                self._common_error = error
                raise

    def _check_all(self, error: Exception | None) -> None:
        """Sends an error to the other processes; raises if only others have one."""
        message = error and f"{type(error).__name__}: {error}"[:_MAX_MESSAGE]
        try:
            replies = self._processes.operations.agree(self._what, message)
        except ClusterError as cluster_error:
            self._common_error = cluster_error
            raise
        failed = [(i, reply) for i, reply in enumerate(replies) if reply is not None]
        if failed and error is None:
            index, reply = failed[0]
            self._common_error = CompiledStepError(
                f"`{self._name}` is not ready here, because process {index} has raised "
                f"{reply}\nAll processes compile or load a step, or none does. Mend "
                "that; or catch the errors of loading in all processes, and compile."
            )
            self._processes.store.common_error = str(self._common_error)
            raise self._common_error
        if error is not None:
            self._processes.store.common_error = str(error)


# The first steps are compared, and then one in `_EACH`. A comparison costs a message to
# process 0 and back, half a millisecond on one host.
_FIRST, _EACH = 32, 64


@final
class StepAgreement:
    """Compares the next step of each process of a strategy."""

    def __init__(self, processes: Processes, each: int = _EACH) -> None:
        self._processes = processes
        self._watchdog = processes.watchdog
        self.end = self._watchdog.step_dispatched
        self._each = each
        self._count = 0
        # The programs that were traced, dispatched by themselves and as parts of larger
        # programs; and those of the latter that are to be compared.
        self._known: set[tuple[str, ...]] = set()
        self._known_inner: set[tuple[str, ...]] = set()
        self._pending: list[ProgramPrint] = []
        step_arguments.on_dispatch(self._watchdog.watch)
        processes.operations.on_refusal(self._compare_again)

    def _compare_again(self) -> None:
        """Compares the next steps like the first ones."""
        self._count = 0

    def begin(self, name: str, where: str) -> bool:
        """Before each step; returns whether it is to be compared."""
        # Two processes on two cores call this with cold caches, where each line of
        # Python costs five times what it does in a loop by itself. So what only a
        # comparison needs is left to `compare`.
        self._count = count = self._count + 1
        self._watchdog.step_started(name, where)
        return count <= _FIRST or count % self._each == 0

    def compare(
        self,
        name: str,
        where: str,
        leaves: Sequence[Leaf],
        same: dict[int, ProgramValue],
    ) -> None:
        """Compare a step that has begun with those of the other processes."""
        step = f"{name} at {os.path.basename(where)}"
        kinds = [_described(leaf, same.get(i)) for i, leaf in enumerate(leaves)]
        programs = sorted(self._pending, key=lambda program: program["prints"])
        self._pending = []
        operation = Operation(step, where, kinds, programs)
        self._processes.operations.compare(operation, _ADVICE)
        self._watchdog.arrivals.passed_barrier()

    def preparation(self, name: str, where: str) -> AgreedPreparation:
        return AgreedPreparation(self._processes, name, where)

    def compiles(self, name: str) -> None:
        """Before the first call of a step, which is compiled."""
        begin(self._watchdog, name)

    def traced(
        self,
        step: TracedStep,
        where: str,
        same: dict[int, ProgramValue],
        is_dispatched: bool,
    ) -> None:
        """Compare a new program with those of the other processes."""
        known = self._known if is_dispatched else self._known_inner
        # The key must not depend on arguments, which may have changed by now, nor on
        # which objects are alive: garbage collection happens at another time in each
        # process, and one that compares what another knows would wait for ever.
        key = (step.name, *_fingerprint(step)["prints"])
        if key not in known:
            program = _fingerprint(step, same)
            if is_dispatched:
                # Those that have traced wait for the others.
                self._watchdog.step_busy(None)
                what = f"a new program of {step.name}"
                operation = Operation(what, where, (), [program])
                self._processes.operations.compare(operation, _ADVICE)
            else:
                self._pending.append(program)
            known.add(key)
        if is_dispatched:
            self.compiles(step.name)


def _fingerprint(
    step: TracedStep, arguments: dict[int, ProgramValue] | None = None
) -> ProgramPrint:
    code = code_of(step.live_jaxpr) + repr(step.replica_step.roles).encode()
    return fingerprint(step.name, step.closed, arguments, code)


def _described(leaf: Leaf, value: ProgramValue | None) -> str:
    """Describes what must be the same of an argument in all processes."""
    batch = origins.of(leaf)
    text = agreement.described(leaf)
    if value is not None and value.is_captured and value.is_unshared:
        text = f"{value.fingerprint}, {value.label}"
    return f"{text} of {batch}" if batch else text


_ADVICE = (
    "Each process must call `run` with the same functions in the same order, and with "
    "arguments of the same shapes; what is not a PerReplica must have the same values. "
    "A process that leaves out a step must not take its batch, either."
)


@final
class AgreedProgram:
    """A program that several processes agree on before they trace or run it."""

    def __init__(
        self,
        step: ReplicaStep,
        options: RunOptions,
        on_trace: Callable[[TracedStep], object],
        agreement: StepAgreement,
    ) -> None:
        self._step = step
        self._program = Program(step, options, on_trace)
        self._agreement = agreement
        self._name = getattr(step.fn, "__qualname__", type(step.fn).__name__)
        location = source_location(step.fn)
        self._where = f"{location[0]}:{location[1]}" if location else "unknown line"
        self._is_new = True
        # Of the call in progress.
        self._is_dispatched = False  # and not part of a larger program
        self._leaves: Sequence[Leaf] = ()
        self._preparation: AgreedPreparation | None = None

    @property
    def layout(self) -> InputLayout:
        return self._program.layout

    def __call__(self, leaves: Sequence[Leaf], inputs: Sequence[PyTree]) -> PyTree:
        return self._agreed(self._program, leaves, inputs)

    def place_and_call(self, leaves: Sequence[Leaf]) -> PyTree:
        return self._agreed(self._program.place_and_call, leaves)

    def prepare(self, leaves: Sequence[Leaf], obtain: Obtain) -> None:
        self._preparation = self._agreement.preparation(self._name, self._where)
        try:
            self._preparation.run(self._program.prepare, leaves, obtain)
        finally:
            self._preparation = None
        self._is_new = False  # its first call does not compile

    def _agreed(
        self,
        call: Callable[..., PyTree],
        leaves: Sequence[Leaf],
        *more: Sequence[PyTree],
    ) -> PyTree:
        agreement, self._leaves = self._agreement, leaves
        try:
            # Part of a larger program, which the caller dispatches.
            if access.is_traced():
                return call(leaves, *more)
            if agreement.begin(self._name, self._where):
                same = {} if self._is_new else self._step.mirrored_values(leaves)
                agreement.compare(self._name, self._where, leaves, same)
            if self._is_new:
                agreement.compiles(self._name)
            self._is_dispatched = True
            try:
                results = call(leaves, *more)
            finally:
                self._is_dispatched = False
                agreement.end()
            self._is_new = False
            return results
        finally:
            self._leaves = ()

    def traced(self, step: TracedStep) -> None:
        """Compares a new trace with those of the other processes."""
        if self._preparation is not None:
            self._preparation.traced(step)
            return
        # Another thread's call may have cleared them.
        leaves = self._leaves
        same = self._step.mirrored_values(leaves) if leaves else {}
        self._agreement.traced(step, self._where, same, self._is_dispatched)
