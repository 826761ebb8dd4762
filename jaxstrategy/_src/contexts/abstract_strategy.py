"""The view that lower layers have of a strategy: `AbstractStrategy`.

Control rises through these classes, from variables, masks and checkpoints to the
strategy that they were given; imports do not.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence

from jaxstrategy._src.communication_options import CommunicationOptions
from jaxstrategy._src.options import ReduceOp
from jaxstrategy._src.reductions.packing import Overlap
from jaxstrategy._src.reductions.reduction import MetReduction, OwnReduction, Reduction
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.values.types import PyTree


class AbstractVariablePolicy(abc.ABC):
    """The view that lower layers have of a strategy's choices for variables.

    Attributes:
      are_owned: whether variables made in its scope belong to the strategy.
    """

    are_owned: bool

    @property
    @abc.abstractmethod
    def replicas(self) -> Replicas:
        """The replicas on whose devices mirrored variables are, one copy each."""

    # Not abstract, as most policies take any device.
    def check_devices(self, devices: tuple[Device, ...]) -> None:  # noqa: B027
        """Raise unless mirrored variables can be made on these devices.

        Raises:
          ValueError: they cannot.
        """

    def snapshot(self, step: int) -> contextlib.AbstractContextManager[None]:
        """For a `with` block: variables that are read in it are of one moment.

        Args:
          step: of the checkpoint that they are read for.
        """
        return contextlib.nullcontext()


class AbstractStrategy(abc.ABC):
    """A strategy, as lower layers may ask it.

    Attributes:
      _replicas: their number, their devices, their axes.
      _variable_policy: the choice of kinds and devices for its variables.
      _overlap: the means by which programs reduce beside the computation, if asked to.
    """

    # Users have no need of these: `dir(strategy)` shows what they may call.
    _replicas: Replicas
    _variable_policy: AbstractVariablePolicy
    _overlap: Overlap | None

    @property
    def _parameter_replicas(self) -> Replicas:
        """The replicas on whose devices mirrored variables are, one copy each."""
        return self._variable_policy.replicas

    @property
    @abc.abstractmethod
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that take a step together."""

    @property
    @abc.abstractmethod
    def devices(self) -> tuple[Device, ...]:
        """The replicas' devices, in replica order."""

    @abc.abstractmethod
    def experimental_local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Each replica's version."""

    @abc.abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[AbstractStrategy]:
        """A `with` block in which this is the current strategy."""

    @property
    @abc.abstractmethod
    def _reduction(self) -> Reduction | OwnReduction | MetReduction:
        """The way in which the replicas' values become one, where the code runs."""

    @abc.abstractmethod
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: PyTree,
        axis: int | Sequence[int] | None = None,
        *,
        options: CommunicationOptions | None = None,
    ) -> PyTree:
        """One value from all replicas' versions."""
