"""The differences between one strategy and another: `Choices`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import final

from jaxstrategy._src.communication_options import CommunicationOptions
from jaxstrategy._src.contexts.abstract_strategy import AbstractStrategy
from jaxstrategy._src.executors.compiled import CompiledExecutor
from jaxstrategy._src.executors.executor import AbstractExecutor
from jaxstrategy._src.processes.job import Processes
from jaxstrategy._src.reductions.cross_device_ops import CrossDeviceOps
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.strategies.process_role import Task, no_task
from jaxstrategy._src.variables.policy import VariablePolicy

MakeExecutor = Callable[[AbstractStrategy, Processes | None], AbstractExecutor]


@final
@dataclasses.dataclass(frozen=True)
class Choices:
    """The parts that a strategy is composed of, chosen by its file in this folder.

    Attributes:
      replicas: where its replicas are.
      ops: how they combine values, by default all-reduces.
      options: the same, in more detail.
      variables: which kinds of variables it makes and where they live, by default
        mirrored and on-read ones on all replicas.
      executor: makes what runs its steps.
      processes: those that take its steps together; None for this one alone.
      is_chief: whether this process saves what all have, and makes initial values;
        None: the first of `processes` does.
      is_between_graph: whether each process runs the whole program for itself.
      task: says which of a cluster's tasks this process is, if there is a cluster.
    """

    replicas: Replicas
    ops: CrossDeviceOps | None = None
    options: CommunicationOptions | None = None
    variables: VariablePolicy | None = None
    executor: MakeExecutor = CompiledExecutor
    processes: Processes | None = None
    is_chief: bool | None = None
    is_between_graph: bool = False
    task: Callable[[], Task] = no_task
