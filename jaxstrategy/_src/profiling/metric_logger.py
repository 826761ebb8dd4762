"""Metrics of steps, written when they are there: `MetricLogger`."""

from __future__ import annotations

import collections
import operator
from collections.abc import Iterator
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.errors import DonatedValueError
from jaxstrategy._src.text import positive
from jaxstrategy._src.values import arrays as _arrays, trees
from jaxstrategy._src.values.arrays import Leaf, PyTree, Value
from jaxstrategy._src.values.per_replica import PerReplica

# A method that all arrays have, and that the abstract class does not mention.
_is_ready = operator.methodcaller("is_ready")


@final
class MetricLogger:
    """Writes the metrics of a training loop, without making it wait for the devices.

    A step's metrics are arrays that the devices have yet to compute; reading them would
    hold up the loop until they have. So they are kept, and written in order when later
    calls find them ready; all of them at the end of the `with` block. With several
    processes, only process 0 writes; call it in all.

    Args:
      writer: an object with `write_scalars(step, scalars)`, such as the writers of CLU,
        or a function of a step's number and a dict of scalars. The guide on speed has
        such functions for TensorBoard, Weights & Biases, MLflow and Trackio. What it
        opened, it closes itself; its `flush()` is called if it has one.
      every: of how many steps one is written; their numbers are multiples of it.
      most_waiting: of how many calls metrics may wait; then the loop waits for the
        oldest ones, so that memory is bounded.

    Raises:
      TypeError: `writer` is neither of these; a number is not whole.
      ValueError: a number is less than 1.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> @strategy.run
    ... def step(x):
    ...     return {"mean": js.get_replica_context().all_reduce("mean", x)}
    >>> with js.profiling.MetricLogger(print) as log:
    ...     for number in range(2):
    ...         log(number, {"train": step(strategy.per_replica([1.0, 2.0 + number]))})
    0 {'train/mean': 1.5}
    1 {'train/mean': 2.0}
    """

    def __init__(self, writer: Any, *, every: int = 1, most_waiting: int = 100) -> None:
        write = getattr(writer, "write_scalars", writer)
        if isinstance(writer, type) or not callable(write):
            raise TypeError(
                f"`writer` was {writer!r}; an object with `write_scalars(step, "
                "scalars)`, or a function of a step and a dict of scalars was wanted."
            )
        self._write = write
        self._flush = getattr(writer, "flush", lambda: None)
        self._every = positive("every", every)
        self._most_waiting = positive("most_waiting", most_waiting)
        self._waiting: collections.deque[_Entry] = collections.deque()
        self._is_writing = jax.process_index() == 0

    def __call__(self, step: int, metrics: PyTree) -> None:
        """Write `metrics` when they are there.

        Args:
          step: the number of the step; of several steps that of the first.
          metrics: a pytree of scalars: numbers, or arrays that are the same on all
            replicas. Names are joined by "/". Arrays `[step, ...]` as
            `strategy.several` returns them are the metrics of as many steps.

        Raises:
          TypeError: a value is not a number, or a `PerReplica`.
          ValueError: an array is no scalar, and no row of scalars as long as others;
            two metrics have one name.
          DonatedValueError: one that was logged before has been given to a step that
            overwrites its arguments.
        """
        self._take(step, metrics, self._every)

    def always(self, step: int, metrics: PyTree) -> None:
        """Write `metrics` as a call does, whatever the step's number is.

        `every` does not count.

        Raises:
          TypeError: as above.
          ValueError: as above.
          DonatedValueError: as above.

        >>> import jaxstrategy as js
        >>> with js.profiling.MetricLogger(print, every=10) as log:
        ...     log(3, {"loss": 0.5})
        ...     log.always(3, {"accuracy": 0.75})
        3 {'accuracy': 0.75}
        """
        self._take(step, metrics, 1)

    def _take(self, step: int, metrics: PyTree, every: int) -> None:
        if not self._is_writing:
            return
        entry = _Entry(operator.index(step), metrics, every)
        if entry.rows:
            self._waiting.append(entry)
        self._write_waiting(self._most_waiting)

    def flush(self) -> None:
        """Wait for all metrics, and write them."""
        self._write_waiting(0)
        if self._is_writing:
            self._flush()

    def _write_waiting(self, most: int) -> None:
        """Write in order what is ready, and what it takes until `most` entries wait."""
        while (waiting := self._waiting) and (
            len(waiting) > most or waiting[0].is_ready
        ):
            for number, scalars in waiting.popleft().read():
                self._write(number, scalars)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            # The devices may never finish what is not ready by now.
            self._write_waiting(len(self._waiting))
            self._waiting.clear()
        self.flush()


class _Entry:
    """The metrics of one call, by name, and which rows belong to which steps."""

    def __init__(self, step: int, metrics: PyTree, every: int) -> None:
        self._step = step
        self._leaves: dict[str, Value] = {}
        lengths: dict[int, str] = {}
        found = jax.tree.leaves_with_path(metrics, is_leaf=trees.is_whole)
        for path, leaf in found:
            name = jax.tree_util.keystr(path, simple=True, separator="/") or "value"
            _check(name, leaf)
            if name in self._leaves:
                raise ValueError(f"Two metrics are called `{name}`. Rename one.")
            self._leaves[name] = leaf
            if np.ndim(leaf) == 1:
                lengths.setdefault(len(leaf), name)
        if len(lengths) > 1:
            told = " and ".join(f"`{name}` of {n}" for n, name in lengths.items())
            raise ValueError(
                f"Metrics of several steps were logged, {told} steps. Log together "
                "what one call of the step has returned."
            )
        self._steps = next(iter(lengths), 1)
        numbered = enumerate(range(step, step + self._steps))
        self.rows = [(row, number) for row, number in numbered if number % every == 0]
        if self.rows:
            self._check_alive()
            for leaf in self._leaves.values():
                if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
                    leaf.copy_to_host_async()

    @property
    def is_ready(self) -> bool:
        arrays = [x for x in self._leaves.values() if isinstance(x, jax.Array)]
        return all(array.is_deleted() or _is_ready(array) for array in arrays)

    def read(self) -> Iterator[tuple[int, dict[str, float]]]:
        self._check_alive()
        values = {
            name: np.broadcast_to(np.asarray(leaf), (self._steps,))
            for name, leaf in self._leaves.items()
        }
        for row, number in self.rows:
            yield number, {name: float(value[row]) for name, value in values.items()}

    def _check_alive(self) -> None:
        for name, leaf in self._leaves.items():
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise DonatedValueError(
                    f"`{name}`, logged for step {self._step}, was given to a later "
                    "step that overwrites it, before it was read. Return it from the "
                    "step a second time among the metrics, or log `jnp.copy(...)` of "
                    "it."
                )


def _check(name: str, leaf: Leaf) -> None:
    if isinstance(leaf, PerReplica):
        raise TypeError(
            f"`{name}` is a PerReplica, with a value for each replica. Log one: return "
            "`get_replica_context().all_reduce('mean', value)` from the step, or "
            "`strategy.reduce('mean', value)`."
        )
    kinds = (jnp.bool_, jnp.integer, jnp.floating)
    if not isinstance(leaf, (bool, int, float)) and not (
        _arrays.is_array(leaf) and any(jnp.issubdtype(leaf.dtype, k) for k in kinds)
    ):
        raise TypeError(f"`{name}` is {leaf!r}; a number or an array was wanted.")
    if np.ndim(leaf) > 1:
        raise ValueError(
            f"`{name}` has shape {np.shape(leaf)}; a scalar was wanted, or a scalar "
            "for each of several steps. Log its mean, for example."
        )
