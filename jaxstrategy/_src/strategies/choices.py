"""The parts that a strategy chooses, and checks of arguments of `run`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TypeAlias, final

from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.executors.executor import AbstractExecutor, CompiledExecutor
from jaxstrategy._src.options import CommunicationOptions, RunOptions
from jaxstrategy._src.processes.job import Processes
from jaxstrategy._src.reductions.cross_device_ops import CrossDeviceOps
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.values.arrays import Function
from jaxstrategy._src.variables.policy import VariablePolicy

Task: TypeAlias = tuple[str | None, int | None]
"""The name of a job, and the number of a task of it; None where there are none."""

# The jobs whose tasks run the program; parameter servers only keep variables.
_RUNNING = ("chief", "master", "worker", "evaluator")


def no_task() -> Task:
    return None, None


MakeExecutor = Callable[[AbstractStrategy, Processes | None], AbstractExecutor]


@final
@dataclasses.dataclass(frozen=True)
class Choices:
    """The parts that a strategy is composed of, chosen by its file in this folder."""

    replicas: Replicas
    # How they combine values, by default by all-reduces; and the same in more detail.
    ops: CrossDeviceOps | None = None
    options: CommunicationOptions | None = None
    # By default mirrored and on-read variables on all replicas.
    variables: VariablePolicy | None = None
    executor: MakeExecutor = CompiledExecutor
    # Those that take its steps together; None for this one alone.
    processes: Processes | None = None
    # Whether it is the chief, for which the others wait; None: all begin alike.
    is_chief: bool | None = None
    is_between_graph: bool = False  # whether each process runs the whole program
    task: Callable[[], Task] = no_task  # returns which of the cluster's tasks it is

    @property
    def saves(self) -> bool:
        """Whether this process saves what all have."""
        if self.is_chief is not None:
            return self.is_chief
        return self.processes is None or self.processes.index == 0

    def is_another(self, task: tuple[str, int]) -> bool:
        """Whether this is the task of another process that runs the program."""
        if task[0] not in _RUNNING:
            return False
        this_task = self.task()
        return None not in this_task and this_task != task


def needs_arguments(fn: Function) -> bool:
    """Whether `fn` cannot be called without arguments."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some builtins have none
        return False
    if isinstance(fn, functools.partial):  # its keywords are given
        parameters = [p for p in parameters if p.name not in fn.keywords]
    empty = inspect.Parameter.empty
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(p.default is empty and p.kind not in variadic for p in parameters):
        return True
    if parameters:
        name = getattr(fn, "__name__", "step")
        raise TypeError(
            f"`run` was given `{name}` without arguments, which takes "
            f"`{', '.join(map(str, parameters))}` and needs none: it is not clear "
            "whether it is to run now. Decorate it with `@strategy.step`, or run it: "
            f"`strategy.run({name}, args=())`."
        )
    return False


def check_function(
    fn: object,
    method: str,
    advice: str = "the function itself, and its arguments as `args`",
) -> None:
    """Raise unless `fn`, an argument of a method, can be called."""
    if not callable(fn):
        raise TypeError(
            f"`{method}` was given {fn!r}, which cannot be called. Give {advice}."
        )


def check_options(options: object) -> None:
    """Raise unless this is a `RunOptions` or None."""
    if options is not None and not isinstance(options, RunOptions):
        raise TypeError(
            f"`options` was {options!r}; a `RunOptions` was wanted, for example "
            "`RunOptions(donate_argnums=0)`."
        )
