"""Agreement of several processes about their next step: `StepAgreement`."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import final

import jax.monitoring
from jax.stages import Compiled

from jaxstrategy._src.errors import ClusterError, CompiledStepError
from jaxstrategy._src.inputs import origins
from jaxstrategy._src.processes import agreement
from jaxstrategy._src.processes.agreement import Operation, ProgramPrint
from jaxstrategy._src.processes.job import Processes
from jaxstrategy._src.processes.watchdog import COMPILES, Watchdog
from jaxstrategy._src.replicas import mesh
from jaxstrategy._src.tracing.constants import ProgramValue, code_of, fingerprint
from jaxstrategy._src.tracing.saved_step import Obtain, Preparation
from jaxstrategy._src.tracing.stages import stages
from jaxstrategy._src.tracing.traced_step import TracedStep
from jaxstrategy._src.values.arrays import Leaf

# Measured with JAX 0.10 and 0.12; its argument `fun_name` is `jit(name)`. Without such
# an event, the whole first call counts as compiling.
_COMPILED = "/jax/core/compile/backend_compile_duration"

# Of the thread that compiles: whom to tell, and the name of the function.
_own = threading.local()


def begin(watchdog: Watchdog, name: str) -> None:
    """From now until the function `name` is compiled, this process is busy."""
    _listen()
    _own.watched = watchdog, name.rpartition(".")[2]
    watchdog.step_busy(COMPILES)


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_replies)


def _replies(event: str, duration_secs: float, **told: object) -> None:
    watched = getattr(_own, "watched", None)
    if event != _COMPILED or watched is None:
        return
    watchdog, name = watched
    if told.get("fun_name") == f"jit({name})":
        _own.watched = None
        watchdog.step_busy(None)


_TOLD = 2000  # characters of another process's error
_ADVICE_AHEAD = (
    "Each process must call `compile` or `load_compiled` for the same steps in the "
    "same order, with arguments of the same types."
)


@final
class AgreedPreparation:
    """A step that all processes compile or load, or none of them."""

    def __init__(self, processes: Processes, name: str, where: str) -> None:
        self._processes = processes
        self._name = name
        self._where = where
        self._what = f"{name} at {os.path.basename(where)}, ahead of its calls"
        self._programs: list[ProgramPrint] = []
        self._common: Exception | None = None  # of which all processes know

    def traced(self, step: TracedStep) -> None:
        """Takes note of the step's trace, which is compared before it is compiled."""
        self._programs = [_print_of(step)]

    def run(
        self,
        prepare: Callable[[Sequence[Leaf], Obtain], None],
        leaves: Sequence[Leaf],
        obtain: Obtain,
    ) -> None:
        """Prepares the step here, as all other processes do at once."""
        types = mesh.types_of(leaves)
        self._compare(list(map(agreement.kind, types)))
        work = contextlib.ExitStack()  # of this process by itself

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
                if error is not self._common:
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
                self._common = error
                raise

    def _check_all(self, own: Exception | None) -> None:
        """Tells the others of an error; raises if only others have one."""
        said = None if own is None else f"{type(own).__name__}: {own}"[:_TOLD]
        try:
            replies = self._processes.operations.agree(self._what, said)
        except ClusterError as error:
            self._common = error
            raise
        failed = [
            (index, told) for index, told in enumerate(replies) if told is not None
        ]
        if failed and own is None:
            index, told = failed[0]
            self._common = CompiledStepError(
                f"`{self._name}` is not ready here, because process {index} has raised "
                f"{told}\nAll processes compile or load a step, or none does. Mend "
                "that; or catch the errors of loading in all processes, and compile."
            )
            self._processes.store.common_error = str(self._common)
            raise self._common
        if own is not None:
            self._processes.store.common_error = str(own)


# So many steps at the beginning are compared, and then each of so many. A comparison
# costs a message to process 0 and back, half a millisecond on one host.
_FIRST, _EACH = 32, 64


@final
class StepAgreement:
    """Agreement of the processes of a strategy about the step that each takes next."""

    def __init__(self, processes: Processes, each: int = _EACH) -> None:
        self._processes = processes
        self._watchdog = processes.watchdog
        self.end = self._watchdog.step_dispatched
        self._each = each
        self._count = 0
        # The programs that were traced, also as parts of others that the caller of a
        # step jits; and those of the latter that are not compared yet.
        self._known: set[tuple[str, ...]] = set()
        self._known_inside: set[tuple[str, ...]] = set()
        self._made: list[ProgramPrint] = []
        stages.on_dispatch(self._watchdog.watch)
        processes.operations.on_refusal(self._start_over)

    def _start_over(self) -> None:
        """Compares the next steps as the first ones."""
        self._count = 0

    def begin(self, name: str, where: str) -> bool:
        """Before each step; whether this one is to be compared."""
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
        made = sorted(self._made, key=lambda program: program["prints"])
        self._made = []
        operation = Operation(step, where, kinds, made)
        self._processes.operations.compare(operation, _ADVICE)
        self._watchdog.arrivals.passed_barrier()

    def preparation(self, name: str, where: str) -> AgreedPreparation:
        """A step that all are about to compile, or load, before they call it."""
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
        known = self._known if is_dispatched else self._known_inside
        # Without what it is called with: that may be something else by now. Nor may it
        # depend on what else lives here: the collector of each process has its own
        # time, and one that compares what another knows waits for it for ever.
        key = (step.name, *_print_of(step)["prints"])
        if key not in known:
            program = _print_of(step, same)
            if is_dispatched:
                self._compare_new(step.name, where, program)
            else:
                self._made.append(program)
            known.add(key)
        if is_dispatched:
            self.compiles(step.name)

    def _compare_new(self, name: str, where: str, program: ProgramPrint) -> None:
        # Who has traced it waits for who has not.
        self._watchdog.step_busy(None)
        operation = Operation(f"a new program of {name}", where, (), [program])
        self._processes.operations.compare(operation, _ADVICE)


def _print_of(
    step: TracedStep, given: dict[int, ProgramValue] | None = None
) -> ProgramPrint:
    code = code_of(step.own_jaxpr) + repr(step.replica_step.roles).encode()
    return fingerprint(step.name, step.trace.closed, given, code)


def _described(leaf: Leaf, given: ProgramValue | None) -> str:
    """The part of an argument that must be the same in all processes."""
    batch = origins.of(leaf)
    told = agreement.described(leaf)
    if given is not None and given.is_captured and given.is_unshared:
        told = f"{given.print}, {given.label}"
    return f"{told} of {batch}" if batch else told


_ADVICE = (
    "Each process must call `run` with the same functions in the same order, and with "
    "arguments of the same shapes; what is not a PerReplica must have the same values. "
    "A process that leaves out a step must not take its batch, either."
)
