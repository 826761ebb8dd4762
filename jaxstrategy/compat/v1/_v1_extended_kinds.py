"""What TensorFlow 1 says otherwise of some strategies: kinds of `StrategyExtended`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NoReturn, final

import jax

from jaxstrategy.compat._first_named import first_named
from jaxstrategy.compat.v1._v1_extended import StrategyExtended
from jaxstrategy.strategies._destinations import Destinations
from jaxstrategy.values._types import PyTree
from jaxstrategy.variables._variable import Variable

_TASK = re.compile(r"^/job:(\w+)(?:/replica:\d+)?/task:(\d+)(?:/|$)")


@final
class CentralStorageExtended(StrategyExtended):
    """Of variables on one device: to TensorFlow, those of a parameter server."""

    @property
    def experimental_between_graph(self) -> bool:
        """True, as in TensorFlow, though there is one process."""
        return True

    @property
    def experimental_should_init(self) -> bool:
        """True: the initial values of this process count."""
        return True

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Variable:
        """The variable whose name comes first.

        Raises:
          ValueError: there is none.
          TypeError: they are no variables.
        """
        return first_named(var_list, "extended.non_slot_devices")


@final
class MultiWorkerExtended(StrategyExtended):
    """Of several processes, also where there is one."""

    @property
    def experimental_between_graph(self) -> bool:
        """True: each process runs the whole program."""
        return True


@final
class ParameterServerExtended(StrategyExtended):
    """Of variables on parameter servers."""

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Variable:
        """The variable whose name comes first.

        Raises:
          ValueError: there is none.
          TypeError: they are no variables.
        """
        return first_named(var_list, "extended.non_slot_devices")

    def _check_process(self, destinations: Destinations) -> None:
        names = destinations if isinstance(destinations, (list, tuple)) else ()
        resolver = self._strategy.cluster_resolver
        if resolver is None:
            return
        own = resolver.task_type, resolver.task_id
        for name in names or (destinations,):
            found = _TASK.match(name) if isinstance(name, str) else None
            if found and found[1] == own[0] and int(found[2]) != own[1]:
                raise ValueError(
                    f"Cannot reduce to another worker: {name!r}; this process is "
                    f"{own[0]} {own[1]}. Name one of its devices, or a variable."
                )


@final
class OneDeviceExtended(StrategyExtended):
    """Of one replica, on whose device all is."""

    def _broadcast(self, tensor: PyTree, destinations: Destinations) -> PyTree:
        if isinstance(tensor, jax.Array):
            return tensor
        return super()._broadcast(tensor, self.worker_devices[0])


@final
class DefaultExtended(StrategyExtended):
    """Of the default strategy, which has no devices."""

    @property
    def worker_devices(self) -> NoReturn:
        """Refused: there is none.

        Raises:
          RuntimeError: always.
        """
        raise _of_no_devices("worker_devices")

    @property
    def parameter_devices(self) -> NoReturn:
        """Refused: there is none.

        Raises:
          RuntimeError: always.
        """
        raise _of_no_devices("parameter_devices")

    @property
    def experimental_between_graph(self) -> NoReturn:
        """Refused: there is none.

        Raises:
          NotImplementedError: always.
        """
        raise _of_no_job("experimental_between_graph")

    @property
    def experimental_should_init(self) -> NoReturn:
        """Refused: there is none.

        Raises:
          NotImplementedError: always.
        """
        raise _of_no_job("experimental_should_init")

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Variable:
        """The variable whose name comes first.

        Raises:
          ValueError: there is none.
          TypeError: they are no variables.
        """
        return first_named(var_list, "extended.non_slot_devices")

    def _broadcast(self, tensor: PyTree, destinations: Destinations) -> PyTree:
        return tensor


def _of_no_devices(name: str) -> RuntimeError:
    return RuntimeError(
        f"`extended.{name}` was asked of the default strategy, which computes wherever "
        "its code does. Ask inside the scope of another strategy, or after "
        "`has_strategy()`."
    )


def _of_no_job(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"`extended.{name}` was asked of the default strategy, which is part of no "
        "job. Ask inside the scope of another strategy, or after `has_strategy()`."
    )
