"""What a function uses that only its worker has, while it is traced: `Recorder`."""

from __future__ import annotations

from typing import cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxstrategy.contexts import _context
from jaxstrategy.masks._step_masks import BatchArray, StepMasks
from jaxstrategy.parameter_servers._shipped_program import Input
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.values import _per_replica
from jaxstrategy.values._handle import Handle
from jaxstrategy.values._types import PyTree
from jaxstrategy.variables import _access
from jaxstrategy.variables._server_functions import named
from jaxstrategy.variables.kinds._pending_change import PendingChange

PREFIX = "jaxstrategy_worker_input_"
"""An equation of this name and a number stands for what the worker has."""


@final
class Recorder:
    """The inputs that a trace asks for besides the arguments.

    Args:
      replicas: of the function.

    Attributes:
      token: a variable that all stand-ins are made of, so that they are values that are
        unknown while the function is traced.
      inputs: those asked for, by the number in the name of the equation.
      split: which of them have one version for each replica.
      changes: the methods by which variables were changed, by their `added`.
      turns: how many elements of each iterator are taken.
      masks: of the batches among them that are filled up.
      had_masks: whether there were some.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        scalar = jax.ShapeDtypeStruct((), np.int32)
        self.token = PendingChange("what the worker has", scalar, replicas)
        self.inputs: list[Input] = []
        self.split: list[bool] = []
        self.changes: dict[Handle, set[str]] = {}
        self.turns: dict[int, int] = {}
        self._batches: list[BatchArray] = []
        self._elements: dict[tuple[int, int], int] = {}
        self.masks = StepMasks(self._batches)
        self.had_masks = False
        self._index: jax.Array | None = None

    def begin(self) -> None:
        """Forget what an earlier trace has asked for."""
        for kept in (self.inputs, self.split, self.changes, self.turns):
            kept.clear()

    def end(self) -> None:
        """Drop what only the trace may use, as it ends."""
        self.had_masks = self.masks.any
        self._batches.clear()
        self._index = None

    def ask_for_index(self) -> None:
        """Before inner functions can, whose values nobody else may use."""
        self._index = self.input(Input("index"), (), np.int32)

    @property
    def index(self) -> jax.Array | None:
        """The worker's index, an int32 scalar; None of a step that no worker runs."""
        return self._index

    def note(self, variable: Handle, method: str) -> None:
        """Takes note of a change of a variable."""
        self.changes.setdefault(variable, set()).add(method)

    def turn(self, iterator: int) -> int:
        """How many elements of an iterator were taken before; now it is one more."""
        turn = self.turns.get(iterator, 0)
        self.turns[iterator] = turn + 1
        return turn

    def input(
        self,
        given: Input,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        is_split: bool = False,
    ) -> jax.Array:
        """A stand-in for something that the worker has.

        Args:
          given: where the worker finds it.
          shape: of one replica's version.
          dtype: of it.
          is_split: whether each replica has a version of its own.
        """
        name = f"{PREFIX}{len(self.inputs)}"
        self.inputs.append(given)
        self.split.append(is_split)
        token = self._token(is_split)

        def stand_in(token: jax.Array) -> jax.Array:
            return jnp.zeros(shape, dtype) + token.astype(dtype)

        return named(name, stand_in)(token)

    def note_mask(
        self, array: jax.Array, mask: jax.Array, element: tuple[int, int]
    ) -> None:
        """Takes note of which rows are real of an array.

        Args:
          array: of a batch.
          mask: of all replicas.
          element: of which iterator which one the batch is.
        """
        place = self._elements.setdefault(element, len(self._elements))
        self._batches.append(BatchArray(array, mask, place))

    def across(self, array: jax.Array) -> PyTree:
        """One replica's version as code sees all of them in cross-replica context."""
        if self._replicas.count == 1:
            return array
        return _per_replica.from_local(array, self._replicas)

    def _token(self, is_split: bool) -> jax.Array:
        step = _access.tracing()
        found = None if step is None else step.reference(self.token)
        assert found is not None, "the function is being traced"
        # What differs between replicas comes from their number, as far as proofs go.
        return found[...] + self._replicas.index() if is_split else found[...]


def current() -> Recorder | None:
    """The recorder of the function that is being traced; None outside of one."""
    return cast("Recorder | None", _context.current().function)
