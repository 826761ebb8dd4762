"""A step that several processes compile, or load, ahead: `AgreedPreparation`.

Each process reads a file of its own and compiles by itself. Were it alone with an
error, the others would wait for it in their first call of the step. So they meet before
the step is traced, before it is compiled, and when each has its program.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import final

from jax.stages import Compiled

from jaxstrategy._errors import ClusterError, CompiledStepError
from jaxstrategy.processes import _agreement
from jaxstrategy.processes._agreement import Operation, ProgramPrint
from jaxstrategy.processes._job import Processes
from jaxstrategy.processes._watchdog import COMPILES
from jaxstrategy.replicas import _overflow
from jaxstrategy.tracing._constants import fingerprint
from jaxstrategy.tracing._prepared import Obtain, Preparation
from jaxstrategy.tracing.jaxprs._visit import ClosedJaxpr
from jaxstrategy.values._types import Leaf

_TOLD = 2000  # characters of another process's error
_ADVICE = (
    "Each process must call `compile` or `load_compiled` for the same steps in the "
    "same order, with arguments of the same types."
)


@final
class AgreedPreparation:
    """A step that all processes compile or load, or none of them.

    Args:
      processes: those of the strategy.
      name: of the step.
      where: its source line.
    """

    def __init__(self, processes: Processes, name: str, where: str) -> None:
        self._processes = processes
        self._name = name
        self._where = where
        self._what = f"{name} at {os.path.basename(where)}, ahead of its calls"
        self._programs: list[ProgramPrint] = []
        self._common: Exception | None = None  # of which all processes know

    def traced(self, name: str, closed: ClosedJaxpr) -> None:
        """Takes note of the step's trace, which is compared before it is compiled."""
        self._programs = [fingerprint(name, closed)]

    def run(
        self,
        prepare: Callable[[Sequence[Leaf], Obtain], None],
        leaves: Sequence[Leaf],
        obtain: Obtain,
    ) -> None:
        """Prepares the step here, as all other processes do at once.

        Args:
          prepare: traces it for such arguments, and asks for its program.
          leaves: the arguments; types may stand for arrays.
          obtain: says what the program is.

        Raises:
          ClusterError: another process does something else, or has traced another
            program.
          CompiledStepError: another process has raised.
        """
        types = _overflow.types_of(leaves)
        self._compare(list(map(_agreement.kind, types)))
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
                self._processes.operations.compare(operation, _ADVICE)
            except ClusterError as error:
                self._common = error
                raise

    def _check_all(self, own: Exception | None) -> None:
        """Tells the others of an error; raises if only others have one."""
        said = None if own is None else f"{type(own).__name__}: {own}"[:_TOLD]
        try:
            heard = self._processes.operations.agree(self._what, said)
        except ClusterError as error:
            self._common = error
            raise
        failed = [(index, told) for index, told in enumerate(heard) if told is not None]
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
