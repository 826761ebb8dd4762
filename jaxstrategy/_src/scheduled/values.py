"""What functions return, values for each worker, and sums of them."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from jaxstrategy._src.text import shown
from jaxstrategy._src.values.arrays import Leaf, PyTree, TreeStructure

_Build = Callable[[], PyTree]


class RemoteValueStatus(enum.Enum):
    """What is known of a `RemoteValue`.

    >>> import jaxstrategy as js
    >>> js.coordinator.RemoteValueStatus.READY.name
    'READY'
    """

    NOT_READY = "NOT_READY"
    """The function is queued, or runs."""
    READY = "READY"
    """The function has ended, and its results are here."""
    ABORTED = "ABORTED"
    """The function has raised, or was cancelled."""


@final
class RemoteValue:
    """The results of a scheduled function, which need not have run yet.

    Made by `ClusterCoordinator.schedule`. The results stay here, whatever happens to
    the worker afterwards; without them, an error stays here in the same way.

    >>> import jaxstrategy as js
    >>> value = js.coordinator.RemoteValue("step")
    >>> value
    <RemoteValue of step: NOT_READY>
    """

    def __init__(
        self,
        name: str,
        observe: Callable[[float], None] | None = None,
        check_waiting: Callable[[], None] | None = None,
    ) -> None:
        self._name = name
        self._check_waiting = check_waiting
        self._observe = observe
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._build: _Build | None = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._host: PyTree = None
        self._device: list[PyTree] = []  # once it was asked for

    def fetch(self) -> PyTree:
        """What the function returned, with NumPy arrays, once it has ended.

        Arrays without a dimension are NumPy's scalars; the others cannot be written to.
        What is no array, such as a string, is as the function returned it.

        Raises:
          BaseException: what the function has raised; the same object each time.
          CancelledError: it was cancelled, because another one had failed.
          RuntimeError: it has not ended, in a block of `ClusterCoordinator.paused`.
        """
        began = time.perf_counter()
        check = self._check_waiting
        if check is not None and not self._event.is_set():
            check()
        self._event.wait()
        if self._error is not None:
            # Always from where it came: the traceback of one object would only grow.
            raise self._error.with_traceback(self._traceback)
        with self._lock:
            if self._build is not None:
                self._host = jax.tree.map(_on_host, self._build())
                self._build = None
                if self._observe is not None:
                    self._observe(time.perf_counter() - began)
        return self._host

    def get(self) -> PyTree:
        """What the function returned, with JAX's arrays, once it has ended.

        Each call returns the same object. Raises as `fetch` does.
        """
        host = self.fetch()
        with self._lock:
            if not self._device:
                self._device.append(jax.tree.map(_on_device, host))
        return self._device[0]

    @property
    def status(self) -> RemoteValueStatus:
        """Whether the function has ended, and how; does not wait."""
        if not self._event.is_set():
            return RemoteValueStatus.NOT_READY
        failed = self._error is not None
        return RemoteValueStatus.ABORTED if failed else RemoteValueStatus.READY

    def set_results(self, build: _Build) -> None:
        """The function has ended: `build` makes what it returned, when it is asked for.

        What has ended stays as it is.
        """
        if not self._event.is_set():
            self._build = build
            self._end()

    def set_error(self, error: BaseException) -> None:
        """The function has raised, or will not run; what has ended stays as it is."""
        if not self._event.is_set():
            self._error, self._traceback = error, error.__traceback__
            self._end()

    def _end(self) -> None:
        self._check_waiting = None  # which the coordinator belongs to
        self._event.set()

    def __repr__(self) -> str:
        return f"<RemoteValue of {self._name}: {self.status.name}>"


def _on_host(leaf: object) -> object:
    if not isinstance(leaf, np.ndarray):
        return leaf
    if not leaf.ndim:
        return leaf[()]
    leaf.flags.writeable = False
    return leaf


def _on_device(leaf: object) -> object:
    # A copy: what `fetch` returned is not to change with it, or be kept by it.
    return jnp.array(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


class WorkerArgument:
    """An argument of a scheduled function that each worker has its own version of."""


class PerWorkerValue(WorkerArgument):
    """One value for each worker, in the order of their indices.

    As an argument of a scheduled function, alone or in a structure, it stands for the
    value of the worker that runs the function. `schedule` waits until the
    first worker's value is there, for which the function is traced; each worker waits
    for its own.

    Args:
      values: a `RemoteValue` for each worker. They need one structure, and the same
        shapes and dtypes.

    Raises:
      AssertionError: something else is among them.

    >>> import jaxstrategy as js
    >>> strategy = js.ParameterServerStrategy(workers=2, parameter_servers=1,
    ...                                       backend="threads")
    >>> with js.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...     @coordinator.function
    ...     def ten(index):
    ...         return 10 * index
    ...     tens = [coordinator.schedule(ten, (i,)) for i in range(2)]
    ...     @coordinator.function
    ...     def rest(own):
    ...         return own - 10 * js.coordinator.experimental_get_current_worker_index()
    ...     value = js.coordinator.PerWorkerValue(tens)
    ...     coordinator.schedule(rest, (value,)).fetch()
    np.int32(0)
    """

    def __init__(self, values: Sequence[RemoteValue]) -> None:
        self._values = tuple(values)
        wrong = [each for each in self._values if not isinstance(each, RemoteValue)]
        if wrong:
            raise AssertionError(
                f"A PerWorkerValue was given {shown(wrong[0])}; `RemoteValue`s were "
                "wanted, such as `schedule` returns. What is the same for all workers "
                "is an argument by itself."
            )

    @property
    def values(self) -> tuple[RemoteValue, ...]:
        """One for each worker."""
        return self._values

    def of_worker(self, worker: int) -> PyTree:
        """What one worker is given; waits until it is there.

        Raises:
          IndexError: there is none for it.
          BaseException: what the function has raised that was to return it.
        """
        if worker >= len(self._values):
            raise IndexError(
                f"Worker {worker} runs a function that was given a PerWorkerValue of "
                f"{len(self._values)} values. Give one for each worker."
            )
        return self._values[worker].fetch()

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._values))})"


def sums_of(trees: Iterable[PyTree]) -> PyTree:
    """The sums of pytrees of numbers, all of one structure; None of none.

    Added up in a wide type, and returned in that of the first.
    """
    structure: TreeStructure | None = None
    dtypes: list[np.dtype] = []
    totals: list[np.ndarray] = []
    for tree in trees:
        leaves, own = jax.tree.flatten(tree)
        types = [_number_type(leaf) for leaf in leaves]
        if structure is None:
            structure, dtypes = own, types
            totals = [
                np.zeros(np.shape(leaf), _wide(dtype))
                for leaf, dtype in zip(leaves, types, strict=True)
            ]
        for total, leaf in zip(totals, leaves, strict=True):
            total += np.asarray(leaf).astype(total.dtype)
    if structure is None:
        return None
    sums = [t.astype(dtype)[()] for t, dtype in zip(totals, dtypes, strict=True)]
    return jax.tree.unflatten(structure, sums)


def _number_type(leaf: Leaf) -> np.dtype:
    """The dtype of a number; what JAX makes of one of Python's."""
    is_number = isinstance(leaf, np.ndarray | np.generic | int | float)
    if not is_number or np.result_type(leaf) == np.bool_:
        raise TypeError(
            f"A function that was evaluated returned {shown(leaf)}; sums of numbers "
            "were wanted, such as of losses and of examples."
        )
    return np.dtype(jnp.result_type(leaf))


def _wide(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype
