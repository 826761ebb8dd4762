"""The programs of one strategy, by function object: `Programs`.

A function is known by its code and what it refers to (`functions/`): one that is
defined anew at each call of the function around it, and refers to the same things each
time, has one program. While a function object lives, that is looked at once, and again
when a variable of its closure has been given another value, or an attribute that a
method reads of its object; a function at the top of a module is known by itself.

Programs are remembered in one place, the `ProgramTable`: by what functions do, and then
(`SharedPrograms`) by the structure of their arguments. Here stands only what a function
object refers to, so that `strategy.run(fn)` need not look into it each time.
"""

from __future__ import annotations

import types
from collections.abc import Hashable
from typing import final

from jaxstrategy._options import RunOptions
from jaxstrategy.tracing._function_programs import FunctionPrograms
from jaxstrategy.tracing._program_table import ProgramTable
from jaxstrategy.tracing._replica_step import StepEnvironment
from jaxstrategy.tracing._step_agreement import StepAgreement
from jaxstrategy.values._types import Function


@final
class Programs:
    """All programs of a strategy.

    Args:
      environment: what its steps run in.
      agreement: with the other processes, if there are any.
    """

    def __init__(
        self, environment: StepEnvironment, agreement: StepAgreement | None = None
    ) -> None:
        self._table = ProgramTable(environment, agreement)
        self._functions: dict[Hashable, FunctionPrograms] = {}

    def of(self, fn: Function, options: RunOptions | None = None) -> FunctionPrograms:
        """The programs of `fn`, the same object as long as `fn` lives."""
        key = _identity(fn), options
        programs = self._functions.get(key)
        if programs is None:
            programs = FunctionPrograms(
                fn, options, self._table, lambda: self._functions.pop(key, None)
            )
            self._functions[key] = programs
        return programs


def _identity(fn: Function) -> Hashable:
    if isinstance(fn, types.MethodType):
        return id(fn.__self__), id(fn.__func__)
    return id(fn)
