"""Agreement of several processes about their next step: `StepAgreement`.

A compiled step waits for all processes, and a process that is in another step makes
all of them wait for ever, or worse. So the first steps, and some later ones, are
compared before they are dispatched, and the watchdog is told of each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import final

from jaxstrategy.inputs import _origins
from jaxstrategy.processes import _agreement
from jaxstrategy.processes._agreement import Operation, ProgramPrint
from jaxstrategy.processes._job import Processes
from jaxstrategy.tracing import _compiling
from jaxstrategy.tracing._agreed_preparation import AgreedPreparation
from jaxstrategy.tracing._constants import Given, fingerprint
from jaxstrategy.tracing.jaxprs._visit import ClosedJaxpr
from jaxstrategy.tracing.stages import _in_flight
from jaxstrategy.values._types import Leaf

# So many steps at the beginning are compared, and then each of so many. A comparison
# costs a message to process 0 and back, half a millisecond on one host.
_FIRST, _EACH = 32, 64


@final
class StepAgreement:
    """Agreement of the processes of a strategy about the step that each takes next.

    Args:
      processes: those of the strategy.
      each: of how many steps one is compared, after the first ones.

    Attributes:
      end: called after a step was dispatched, or has failed to be.
    """

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
        _in_flight.on_dispatch(self._watchdog.watch)
        processes.operations.on_refusal(self._start_over)

    def _start_over(self) -> None:
        """Compares the next steps as the first ones.

        One process was in a step and another was not, so that they count differently,
        and would compare different steps.
        """
        self._count = 0

    def begin(self, name: str, where: str) -> bool:
        """Before each step; whether this one is to be compared.

        Args:
          name: what users call it.
          where: its source line.
        """
        # Two processes on two cores call this with cold caches, where each line of
        # Python costs five times what it does in a loop by itself. So what only a
        # comparison needs is left to `compare`.
        self._count = count = self._count + 1
        self._watchdog.step_started(name, where)
        return count <= _FIRST or count % self._each == 0

    def compare(
        self, name: str, where: str, leaves: Sequence[Leaf], same: dict[int, Given]
    ) -> None:
        """Compare a step that has begun with those of the other processes.

        Args:
          name: what users call it.
          where: its source line.
          leaves: what it is called with.
          same: those of `leaves` that should be the same in all processes, and are not
            part of a new program.

        Raises:
          ClusterError: another process is about to take another step.
        """
        step = f"{name} at {os.path.basename(where)}"
        kinds = [_described(leaf, same.get(i)) for i, leaf in enumerate(leaves)]
        made = sorted(self._made, key=lambda program: program["prints"])
        self._made = []
        operation = Operation(step, where, kinds, made)
        self._processes.operations.compare(operation, _ADVICE)
        self._watchdog.arrivals.met()

    def preparation(self, name: str, where: str) -> AgreedPreparation:
        """A step that all are about to compile, or load, before they call it.

        Args:
          name: what users call it.
          where: its source line.
        """
        return AgreedPreparation(self._processes, name, where)

    def compiles(self, name: str) -> None:
        """Before the first call of a step, which is compiled."""
        _compiling.begin(self._watchdog, name)

    def traced(
        self,
        name: str,
        where: str,
        closed: ClosedJaxpr,
        same: dict[int, Given],
        is_dispatched: bool,
    ) -> None:
        """Compare a new program with those of the other processes.

        A program may be made once more in one process only, when something else was
        forgotten there; so all that is compared is what is new.

        Args:
          name: of its step.
          where: its source line.
          closed: its trace.
          same: what it is called with, and should be the same in all processes, by
            its place.
          is_dispatched: whether it is about to be. If not, JAX traces the code that
            calls the step, and it is compared before one of the next steps.

        Raises:
          ClusterError: another process has made another one, or none.
        """
        known = self._known if is_dispatched else self._known_inside
        # Without what it is called with: that may be something else by now.
        key = (name, *fingerprint(name, closed)["prints"])
        if key not in known:
            program = fingerprint(name, closed, same)
            if is_dispatched:
                self._compare_new(name, where, program)
            else:
                self._made.append(program)
            known.add(key)
        if is_dispatched:
            self.compiles(name)

    def _compare_new(self, name: str, where: str, program: ProgramPrint) -> None:
        # Who has traced it waits for who has not.
        self._watchdog.step_busy(None)
        operation = Operation(f"a new program of {name}", where, (), [program])
        self._processes.operations.compare(operation, _ADVICE)


def _described(leaf: Leaf, given: Given | None) -> str:
    """The part of an argument that must be the same in all processes.

    Args:
      leaf: it.
      given: the same, if all of it must be.
    """
    batch = _origins.of(leaf)
    told = _agreement.described(leaf)
    if given is not None and given.is_captured and given.is_unshared:
        told = f"{given.print}, {given.label}"
    return f"{told} of {batch}" if batch else told


_ADVICE = (
    "Each process must call `run` with the same functions in the same order, and with "
    "arguments of the same shapes; what is not a PerReplica must have the same values. "
    "A process that leaves out a step must not take its batch, either."
)
