"""Assignments to a variable, or to a part of one: `Assignments`."""

from __future__ import annotations

import abc

import jax

from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.values.types import Value
from jaxstrategy._src.variables.changes import ASSIGN, ASSIGN_ADD, ASSIGN_SUB, Change


class Assignments(abc.ABC):
    """Methods that change a value in place, all copies of it alike.

    In `run`, a mirrored variable takes the aggregate of the replicas' values, and an
    on-read one this replica's. A part has no aggregate: of a mirrored variable what is
    assigned must be equal on all replicas, which is proved.
    """

    @abc.abstractmethod
    def _write(self, value: Value, change: Change) -> jax.Array | PerReplica:
        """Makes the change; returns the new value of the whole variable."""

    def assign(
        self,
        value: Value,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Value:
        """Makes it `value`; returns the new value of the whole variable.

        Outside `run`, an on-read variable that sums gives each replica an equal share,
        so that it reads as `value`; of a `PerReplica` each copy takes its version. To
        gradients the value is a constant.

        Args:
          value: of the variable's shape. To a part, a value of fewer dimensions, or
            with dimensions of size 1, is repeated.
          use_locking: for TensorFlow's sake; a step is one program.
          name: the same.
          read_value: whether to return the new value, not None.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: a dtype that would lose something.
          ContextError: in another strategy's scope or `run`.
        """
        new = self._write(value, ASSIGN)
        return new if read_value else None

    def assign_add(
        self,
        delta: Value,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Value:
        """Adds `delta`, of the shape of what changes; otherwise as `assign`.

        To a whole variable, `IndexedSlices` are added to their rows; in `run`, of a
        mirrored variable with an aggregation, only rows go between the replicas.

        Outside `run`, of an on-read variable that sums the first copy takes it all.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: a dtype that would lose something.
          ContextError: in another strategy's scope or `run`.
        """
        new = self._write(delta, ASSIGN_ADD)
        return new if read_value else None

    def assign_sub(
        self,
        delta: Value,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Value:
        """Subtracts `delta`; otherwise as `assign_add`.

        Raises:
          ValueError: another shape; or the copies of a mirrored variable would differ.
          TypeError: a dtype that would lose something.
          ContextError: in another strategy's scope or `run`.
        """
        new = self._write(delta, ASSIGN_SUB)
        return new if read_value else None
