"""Schedules functions on the workers of a strategy: `ClusterCoordinator`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Self, final

import jax
import numpy as np

from jaxstrategy._src.checkpoint.manager import CheckpointManager
from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.context import AbstractStrategy
from jaxstrategy._src.contexts.replica_context import AnyStrategy, core_of
from jaxstrategy._src.coordinator.datasets import (
    DatasetOfShard,
    PerWorkerDataset,
    shard_iterators,
)
from jaxstrategy._src.coordinator.recovery import ServerRecovery
from jaxstrategy._src.coordinator.scheduler import Scheduler
from jaxstrategy._src.coordinator.workers import (
    Console,
    CoordinatorMetrics,
    LiveTable,
    Stopwatch,
    WorkerStates,
)
from jaxstrategy._src.executors.executor import ReplicatedFunction
from jaxstrategy._src.launch.child_process import started
from jaxstrategy._src.parameter_servers.worker import (
    AbstractWorkerBackend,
    WorkerContext,
)
from jaxstrategy._src.scheduled.arguments import IteratorArgument, is_whole
from jaxstrategy._src.scheduled.functions import FunctionTracer
from jaxstrategy._src.scheduled.values import RemoteValue, sums_of
from jaxstrategy._src.strategies.parameter_server import ParameterServerStrategy
from jaxstrategy._src.text import shown, whole
from jaxstrategy._src.values.arrays import Function, PyTree
from jaxstrategy._src.variables.policy import ServerVariables


@final
class CoordinatedFunction:
    """A function that may be scheduled. Made by `ClusterCoordinator.function`.

    Called, it is the function as it was given.

    Attributes:
      function: as it was given.
    """

    def __init__(self, fn: Function) -> None:
        self.function = fn
        functools.update_wrapper(self, fn)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self.function(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", repr(self.function))
        return f"<{name}, which may be scheduled>"


def check_schedulable(fn: object) -> None:
    """Refuse what is no jitted function, step of `run`, or marked as schedulable."""
    own = fn.__func__ if isinstance(fn, types.MethodType) else fn
    if isinstance(own, CoordinatedFunction | ReplicatedFunction | jax.stages.Wrapped):
        return
    what = "a plain function" if callable(fn) else "no function"
    raise TypeError(
        f"`schedule` was given {fn!r}, {what}. It takes functions that are compiled as "
        "a whole: decorate yours with `@coordinator.function`, `@strategy.run` or "
        "`@jax.jit`."
    )


def checked_arguments(
    fn: Function, args: Any, kwargs: Any
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """What a function is called with."""
    if not isinstance(args, list | tuple | None):
        raise TypeError(
            f"`args` was a {type(args).__name__}; a list or a tuple of the arguments "
            "was wanted: `(x,)` for a single one."
        )
    if not isinstance(kwargs, dict | None):
        raise TypeError(
            f"`kwargs` was a {type(kwargs).__name__}; a dict of the arguments by their "
            "names was wanted."
        )
    given = tuple(args or ()), dict(kwargs or {})
    # A variable is an argument by itself: to look into it would read it.
    leaves = jax.tree.leaves(given, is_leaf=is_whole)
    if any(isinstance(leaf, RemoteValue) for leaf in leaves):
        raise TypeError(
            "An argument of a function to be scheduled was a `RemoteValue`, which has "
            "its results when its own function has ended. Give what `get()` returns."
        )
    if isinstance(fn, jax.stages.Wrapped) and any(
        isinstance(leaf, IteratorArgument) for leaf in leaves
    ):
        raise TypeError(
            f"{fn!r} is a jitted function, and was given a per-worker iterator, which "
            "`jax.jit` does not take. Decorate it with `@coordinator.function` instead "
            "of `@jax.jit`: it is compiled as well."
        )
    return given


def plain(fn: Function) -> Function:
    """What is traced of a function."""
    if isinstance(fn, types.MethodType):
        return types.MethodType(plain(fn.__func__), fn.__self__)
    return fn.function if isinstance(fn, CoordinatedFunction) else fn


_SHARDS_PER_WORKER = 5
_SECONDS_TO_END = 1.0
_one_at_a_time = threading.Lock()


@final
class ClusterCoordinator:
    """Schedules functions on the workers of a `ParameterServerStrategy`.

    There is one for each strategy: `ClusterCoordinator(strategy)` is the same object
    each time, until it is closed. Workers run one function at a time. One that is lost
    is started again, and what it was running is run again by any worker; the others go
    on meanwhile. What a function pushes to variables counts once all the same.

    A function's error cancels what is queued and what runs: what runs ends, as a
    program cannot be interrupted, but changes no variable any more that it has not
    changed by then. The error is raised once, by the next `schedule`, `join` or `done`,
    when nothing runs any more. With that it is gone. As a function sends its changes
    when it has ended, one that fails has changed nothing.

    Left as a `with` block, it is joined and closed.

    Args:
      strategy: a `ParameterServerStrategy`.
      max_restarts: how often in five minutes a worker is started again that finishes no
        function in between; then that is an error, and the others go on without it. By
        default 3 times. Likewise of parameter servers, with `restore_from`.
      restore_from: has a lost parameter server started again, where the backend can do
        that (threads and processes of this host). All variables on all servers are then
        rolled back together to the last checkpoint of this manager. Workers start anew,
        too, and their data sets and own variables with them. What was queued or ran
        goes on; what had finished since the checkpoint is lost, as a warning of the
        next `schedule`, `join` or `done` says. If there is no checkpoint yet, one of
        step 0 is saved now. Without a manager a lost server is an error for ever.
      state: what that manager saves, with all variables that functions use.

    Raises:
      ValueError: it is another strategy, or has a coordinator with other options; or
        `max_restarts` is negative, its backend cannot start servers again, or `state`
        has no variables on servers.

    >>> import jaxstrategy as js
    >>> strategy = js.ParameterServerStrategy(workers=2, backend="threads")
    >>> with strategy.scope():
    ...     total = js.Variable(0.0)
    >>> with js.coordinator.ClusterCoordinator(strategy) as coordinator:
    ...     @coordinator.function
    ...     def add(x):
    ...         total.assign_add(x)
    ...         return 2 * x
    ...     values = [coordinator.schedule(add, (x,)) for x in (1.0, 2.0)]
    ...     coordinator.fetch(values)
    ...     coordinator.join()
    [np.float32(2.0), np.float32(4.0)]
    >>> total.value()
    Array(3., dtype=float32)
    """

    _strategy: AbstractStrategy
    _backend: AbstractWorkerBackend
    _tracer: FunctionTracer
    _scheduler: Scheduler
    _tracings: Stopwatch
    _restore_from: CheckpointManager | None = None

    def __new__(
        cls,
        strategy: AnyStrategy,
        *,
        max_restarts: int | None = None,
        restore_from: CheckpointManager | None = None,
        state: PyTree = None,
    ) -> Self:
        """The coordinator of `strategy`."""
        core = core_of(strategy)
        if not isinstance(core, ParameterServerStrategy):
            raise ValueError(
                f"`ClusterCoordinator` was given {shown(strategy)}. Only a "
                "`ParameterServerStrategy` has workers that functions can be scheduled "
                "on; other strategies run steps themselves, by `strategy.run`."
            )
        with _one_at_a_time:
            found = core.coordinator
            if isinstance(found, cls) and not found._scheduler.is_stopped:
                found._check_options(max_restarts, restore_from)
                return found
            made = cls._made(core, max_restarts, restore_from, state)
            core.coordinator = made
        return made

    @classmethod
    def _made(
        cls,
        strategy: ParameterServerStrategy,
        max_restarts: int | None,
        restore_from: CheckpointManager | None,
        state: PyTree,
    ) -> Self:
        limit = _checked_restarts(3 if max_restarts is None else max_restarts)
        backend, pool = strategy.backend, strategy.server_pool
        recovery = None
        if restore_from is not None:
            recovery = ServerRecovery(backend, pool, restore_from, state, limit)
        self = super().__new__(cls)
        self._strategy, self._backend = strategy, backend
        self._tracings, self._restore_from = Stopwatch(), restore_from
        self._tracer = FunctionTracer(
            strategy, pool, backend.platforms, observe=self._tracings.add
        )
        self._scheduler = scheduler = Scheduler(backend, limit, recovery)
        atexit.register(scheduler.stop, _SECONDS_TO_END)
        weakref.finalize(self, _end_later, scheduler).atexit = False
        policy = strategy._variable_policy
        assert isinstance(policy, ServerVariables), "it is that strategy's"
        policy.read_copies, policy.pause = scheduler.copies, scheduler.snapshot
        return self

    def _check_options(
        self, max_restarts: int | None, restore_from: CheckpointManager | None
    ) -> None:
        present = self._scheduler.max_restarts
        if max_restarts is not None and _checked_restarts(max_restarts) != present:
            raise ValueError(
                f"`max_restarts` was {max_restarts}, and the strategy has a "
                f"coordinator with {present} already. Close that one before."
            )
        if restore_from not in (None, self._restore_from):
            raise ValueError(
                "`restore_from` was given, and the strategy has a coordinator without "
                "it, or with another one, already. Close that one before."
            )

    @property
    def strategy(self) -> AbstractStrategy:
        """The strategy that this was made with."""
        return self._strategy

    def schedule(
        self,
        fn: Function,
        args: Sequence[PyTree] | None = None,
        kwargs: dict[str, PyTree] | None = None,
    ) -> RemoteValue:
        """Let a worker run `fn(*args, **kwargs)`, and go on at once.

        The function is traced here and now, once for each structure and each types of
        arguments; arrays and numbers are its inputs, bools and strings part of its
        program.

        Args:
          fn: a function marked by `function`, a jitted one or a step of `strategy.run`.
          args: a list or a tuple of its arguments.
          kwargs: its arguments by name.

        Returns:
          What it will return. Need not be kept.

        Raises:
          TypeError: `fn` is a plain function, or `args` no list; a per-worker iterator
            is given to a jitted function.
          RuntimeError: this is part of a scheduled function, or the coordinator is
            closed.
          ParameterServerLost: a server is lost, now or before.
          BaseException: the first error of a function that was scheduled before, or
            what `fn` raises while it is traced; `fn` is not scheduled.
        """
        self._refuse_in_function("schedule")
        check_schedulable(fn)
        args, kwargs = checked_arguments(fn, args, kwargs)
        return self._schedule(fn, args, kwargs)

    def _schedule(
        self,
        fn: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        until_end: bool = False,
    ) -> RemoteValue:
        self._scheduler.raise_error()
        prepared = self._tracer.prepare(plain(fn), args, kwargs, until_end)
        return self._scheduler.schedule(fn, prepared, until_end)

    def join(self, timeout: float | None = None) -> None:
        """Wait until all functions that were scheduled have ended.

        Without any worker it waits until one is back, and says so by a warning.

        Args:
          timeout: in seconds.

        Raises:
          TimeoutError: they took longer; it says what runs where.
          ParameterServerLost: a server is lost, now or before.
          BaseException: the first error of a function.
        """
        self._refuse_in_function("join")
        self._scheduler.join(timeout)

    def done(self) -> bool:
        """Whether all functions that were scheduled have ended.

        Raises:
          BaseException: as `join`.
        """
        self._refuse_in_function("done")
        return self._scheduler.done()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """For a `with` block: no function runs, so that variables do not change by any.

        Functions that run end first; those that are queued, also by the block, begin
        after it. A worker may be lost meanwhile: what it was running is queued again.
        What `CheckpointManager.save` reads is read in such a pause by itself.

        >>> import jaxstrategy as js
        >>> strategy = js.ParameterServerStrategy(workers=2, backend="threads")
        >>> with strategy.scope():
        ...     first, second = js.Variable(0.0), js.Variable(0.0)
        >>> with js.coordinator.ClusterCoordinator(strategy) as coordinator:
        ...     @coordinator.function
        ...     def step():
        ...         first.assign_add(1.0)
        ...         second.assign_add(1.0)
        ...     values = [coordinator.schedule(step) for _ in range(10)]
        ...     with coordinator.paused():
        ...         bool(first.value() == second.value())
        True
        """
        self._refuse_in_function("paused")
        with self._scheduler.paused():
            yield

    def fetch(self, val: PyTree) -> PyTree:
        """`val` with what `RemoteValue.fetch` gives for each remote value in it.

        Waits until those are there, and for nothing else. The rest stays as it is.

        Raises:
          BaseException: what one of the functions has raised.
        """
        leaves, structure = jax.tree.flatten(val)
        # No generator: it would make another error of `OutOfRangeError`.
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, RemoteValue):
                leaves[index] = leaf.fetch()
        return jax.tree.unflatten(structure, leaves)

    def create_per_worker_dataset(
        self, dataset_fn: Any, *, resume: bool = False
    ) -> PerWorkerDataset:
        """A dataset that each worker makes and reads by itself, from its beginning.

        Each worker calls the function, and again when it was lost; and so does the
        coordinator, once and now, so that errors come out here. It reads one element
        when something asks what elements are like. Each worker reads all elements,
        unless the function uses `experimental_get_current_worker_index()` to choose
        some. Functions take elements of `iter(dataset)`, which they are passed.

        Args:
          dataset_fn: a function that returns a dataset, without arguments or of an
            `InputContext`; or a dataset. All that `experimental_distribute_dataset`
            takes is one, and what that returns: then elements are batches divided over
            the worker's devices. Workers in other processes get it by cloudpickle.
          resume: whether a worker that was lost goes on after the last element that a
            function has used there, instead of at the beginning.

        Raises:
          ValueError: it is, or returns, no dataset; or it makes variables.
          TypeError: likewise; or it takes other arguments, can be read only once, or
            not be resumed.
          Exception: what the function raises.

        >>> import jaxstrategy as js
        >>> strategy = js.ParameterServerStrategy(workers=2, backend="threads")
        >>> with js.coordinator.ClusterCoordinator(strategy) as coordinator:
        ...     dataset = coordinator.create_per_worker_dataset(lambda: [3.0] * 4)
        ...     @coordinator.function
        ...     def double(iterator):
        ...         return 2 * next(iterator)
        ...     coordinator.schedule(double, (iter(dataset),)).fetch()
        np.float32(6.0)
        """
        self._refuse_in_function("create_per_worker_dataset")
        return PerWorkerDataset(
            dataset_fn, self._surroundings(), len(self.workers), resume
        )

    def _surroundings(self) -> WorkerContext:
        return WorkerContext(0, self._backend.servers, self._strategy._replicas)

    def function(self, fn: Function) -> CoordinatedFunction:
        """Mark a plain function as one that may be scheduled; also as a decorator."""
        if not callable(fn):
            raise TypeError(f"`function` was given {fn!r}; a function was wanted.")
        return CoordinatedFunction(fn)

    def evaluate(
        self,
        fn: Function,
        shards: int | None = None,
        dataset_fn: DatasetOfShard | None = None,
    ) -> PyTree:
        """The sums of what `fn` returns for each shard of a data set.

        Exact, whatever happens to workers: each shard counts once, as sums are results
        of functions and added up here. Call `join` before, and no variable changes
        meanwhile.

        Args:
          fn: a function as `schedule` takes it: with `dataset_fn` of a batch, else of
            the number of the shard and of how many there are, two int32 scalars. Its
            results are numbers to be summed: of losses, of right answers, of examples.
          shards: how many there are; by default 5 for each worker.
          dataset_fn: makes the dataset of a shard, of its number and of how many there
            are, on the worker that evaluates it; and on the coordinator, which reads
            one element. `fn` is called for each batch.

        Returns:
          The sums, as NumPy arrays, in the structure of what `fn` returns.

        Raises:
          ValueError: there is less than one shard, or no batch in any; or `fn` changes
            variables at each batch.
          TypeError: `fn` returns what cannot be summed.
          BaseException: the first error of a function, which `join` then does not
            raise again.

        >>> import jaxstrategy as js
        >>> strategy = js.ParameterServerStrategy(workers=2, backend="threads")
        >>> data = np.arange(10.0, dtype=np.float32)
        >>> with js.coordinator.ClusterCoordinator(strategy) as coordinator:
        ...     count = coordinator.function(lambda batch: (batch.sum(), batch.size))
        ...     coordinator.evaluate(count, 3, lambda shard, n: [data[shard::n]])
        (np.float32(45.0), np.int32(10))
        """
        self._refuse_in_function("evaluate")
        check_schedulable(fn)
        default = _SHARDS_PER_WORKER * len(self.workers)
        count = default if shards is None else whole(shards)
        if count is None or count < 1:
            raise ValueError(f"`shards` was {shards!r}; at least one shard was wanted.")
        try:
            if dataset_fn is None:
                values = [
                    self.schedule(fn, (number, np.int32(count)))
                    for number in np.arange(count, dtype=np.int32)
                ]
                return sums_of(self.fetch(values))
            iterators = shard_iterators(dataset_fn, count, self._surroundings())
            values = [
                self._schedule(fn, (each,), {}, until_end=True) for each in iterators
            ]
            results = [sums for sums in self.fetch(values) if sums is not None]
        except Exception:
            # Whether a value has the first error, was cancelled for it, or is not even
            # scheduled is chance. It is raised here, and by no `join` again.
            self._scheduler.raise_error()
            raise
        if not results:
            raise ValueError(
                "All shards of the dataset were empty on the workers, although there "
                "was an element on the coordinator. Do they find the same files?"
            )
        return sums_of(results)

    @property
    def workers(self) -> WorkerStates:
        """What the workers are doing now; in a notebook a table."""
        return self._scheduler.states

    @property
    def metrics(self) -> CoordinatorMetrics:
        """How many functions there were, and how long they took."""
        scheduler = self._scheduler
        return CoordinatorMetrics(
            function_tracing=self._tracings.durations,
            closure_execution=scheduler.executions.durations,
            remote_value_fetch=scheduler.fetches.durations,
            queued_closures=scheduler.queued,
            inflight_closures=scheduler.running,
        )

    def progress(self, description: str = "", *, console: Console = None) -> LiveTable:
        """For a `with` block: a table of the workers, drawn while the block runs.

        It says what each worker is doing, and how many functions are finished, queued
        and running. It is drawn by rich, in a terminal or a notebook; elsewhere, and
        without rich, nothing is drawn.

        Args:
          description: stands above the table.
          console: a `rich.console.Console` to draw on, instead of one on standard
            error.
        """
        return LiveTable(self._scheduler, description, console)

    def close(self) -> None:
        """End the workers, whatever they are doing, and cancel what is queued.

        The servers keep the variables. `ClusterCoordinator(strategy)` makes another
        coordinator afterwards. May be called twice.
        """
        atexit.unregister(self._scheduler.stop)
        self._scheduler.stop(_SECONDS_TO_END)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self.join()
        finally:
            self.close()

    def __repr__(self) -> str:
        scheduler = self._scheduler
        return (
            f"<ClusterCoordinator of {len(self.workers)} workers: {scheduler.queued} "
            f"queued, {scheduler.running} running>"
        )

    def _refuse_in_function(self, method: str) -> None:
        is_traced = context.current().function is not None
        if is_traced or self._scheduler.is_in_thread:
            raise RuntimeError(
                f"`{method}` was called by code that runs for a scheduled function. It "
                "is for the coordinator: let the function return what the next one "
                "needs, and schedule that where this one was scheduled."
            )


def _checked_restarts(max_restarts: int) -> int:
    found = whole(max_restarts)
    if found is None or found < 0:
        raise ValueError(
            f"`max_restarts` was {max_restarts!r}; a number of times was wanted, 0 for "
            "none."
        )
    return found


def _end_later(scheduler: Scheduler) -> None:
    """End the threads of a coordinator that is gone."""
    atexit.unregister(scheduler.stop)
    started(threading.Thread(target=scheduler.stop, daemon=True))
