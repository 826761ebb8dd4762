"""The interface of one variable, as a variable in several shards knows it."""

from __future__ import annotations

import abc
from collections.abc import Callable

import jax
import numpy as np

from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.types import Value
from jaxstrategy._src.variables.assignments import Assignments
from jaxstrategy._src.variables.cell import Holder
from jaxstrategy._src.variables.changes import Change
from jaxstrategy._src.variables.operators import Operators
from jaxstrategy._src.variables.properties import Properties
from jaxstrategy._src.variables.scatters import Scatters


class AbstractVariable(Operators, Assignments, Scatters, Properties):
    """One variable: `Variable`, for files that it is made of."""

    @abc.abstractmethod
    def _rows(self, numbers: np.ndarray) -> jax.Array:
        """Some rows of the value, outside of steps.

        Args:
          numbers: of rows, `[n]`, each of which it has.
        """

    @abc.abstractmethod
    def _written(
        self,
        value: Value,
        change: Change,
        write: Callable[..., jax.Array | PerReplica],
    ) -> jax.Array | PerReplica:
        """Changes it by `write`, a method of its kind's form; the new value."""

    @abc.abstractmethod
    def _reference(self) -> Holder:
        """The reference to work on: the step's own, or the one with all copies."""
