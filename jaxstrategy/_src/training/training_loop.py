"""A training loop that resumes, saves, stays in sync and ends well: `training_loop`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self, final

import jax

from jaxstrategy._src.checkpoint.agreement import agree
from jaxstrategy._src.checkpoint.manager import CheckpointManager
from jaxstrategy._src.cluster.resolvers import environment
from jaxstrategy._src.contexts.replica_context import AnyStrategy
from jaxstrategy._src.inputs.dataset import DistributedDataset
from jaxstrategy._src.inputs.iterator import DistributedIterator
from jaxstrategy._src.preemption import PreemptionCheckpointHandler, TerminationConfig
from jaxstrategy._src.strategies.current import get_strategy
from jaxstrategy._src.strategies.strategy import Strategy, checked_strategy
from jaxstrategy._src.text import at_least, positive, with_noun, with_seconds
from jaxstrategy._src.values import trees
from jaxstrategy._src.values.arrays import PyTree


@final
class TrainingLoop:
    """Steps with their batches, and all that happens between them."""

    def __init__(
        self,
        dataset: DistributedDataset,
        state: PyTree,
        *,
        steps: int,
        strategy: Strategy,
        manager: CheckpointManager | None,
        every: int,
        in_sync_every: int | None,
        show_progress: bool,
        termination_config: TerminationConfig | None,
    ) -> None:
        is_object = isinstance(
            state, trees.object_kinds()
        )  # many of which are callable
        self.state = state() if callable(state) and not is_object else state
        self.step = 0
        self.manager = manager
        self._dataset = dataset
        self._steps = steps
        self._strategy = strategy
        self._every = every
        self._in_sync_every = in_sync_every
        self._show_progress = show_progress
        self._termination_config = termination_config or TerminationConfig()
        self._data: DistributedIterator = iter(dataset)
        self._saved: int | None = None
        self._handler: PreemptionCheckpointHandler | None = None
        self._count: _StepCount | None = None

    def __enter__(self) -> Self:
        if self.manager is not None:
            restored, self.step = self.manager.restore_or_init(self._checkpoint_state)
            self.state = restored["state"]
            told = self.manager.restored
            is_on_disk = told is not None and not told.from_memory
            self._saved = (self.step or None) if is_on_disk else None
            self._count = _StepCount(self.manager, self.step)
            self._handler = PreemptionCheckpointHandler(
                None, None, termination_config=self._termination
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(self._data.close)
            if self._handler is not None:
                closing.callback(self._handler.close)
            if self._count is not None:
                closing.callback(self._count.close)
            if self.manager is not None:
                closing.callback(self.manager.close)
                if kind is None:
                    self.save()

    def __iter__(self) -> Iterator[tuple[int, PyTree]]:
        """Pairs of the number of steps before this one, and its batch."""
        batches = self._batches()
        if self._show_progress:
            batches = _shown(batches, self._steps - self.step)
        for batch in batches:
            yield self.step, batch
            self.step += 1
            if self._count is not None:
                self._count.set(self.step)
            self._after_step()

    def save(self) -> None:
        """Saves now, if this step is not saved yet."""
        if self.manager is not None and self._saved != self.step:
            self.manager.save(self.step, self._checkpoint_state, force=True)
            self._saved = self.step

    @property
    def _checkpoint_state(self) -> PyTree:
        return {"state": self.state, "data": self._data}

    def _batches(self) -> Iterator[PyTree]:
        while self.step < self._steps:
            try:
                batch = next(self._data)
            except StopIteration:
                self._data = iter(self._dataset)
                batch = next(self._data)
            yield batch

    def _after_step(self) -> None:
        if self._in_sync_every and self.step % self._in_sync_every == 0:
            self._strategy.assert_in_sync(self.state, "state")
        if self.step % self._every == 0:
            self.save()
        elif self.manager is not None:
            self.manager.snapshot(self.step, self._checkpoint_state)
        if self._handler is not None:
            self._handler.save_checkpoint_if_preempted()

    @property
    def _termination(self) -> TerminationConfig:
        """The user's, saving as this does."""
        given = self._termination_config

        def save() -> None:
            (given.save_fn or self.save)()
            if self.manager is not None:
                self.manager.wait()

        return TerminationConfig(
            given.termination_watcher_fn, given.exit_fn, given.grace_period, save
        )


@final
class _StepCount:
    """How far the job is, where no process's end loses it; says what a loss cost."""

    def __init__(self, manager: CheckpointManager, step: int) -> None:
        self._file: int | None = None
        if (folder := os.environ.get(environment.MEMORY)) is None:
            return
        told = None
        if os.environ.get(environment.LOCAL_RANK, "0") == "0":  # one of each host
            name = hashlib.sha256(repr(manager).encode()).hexdigest()
            path = f"{folder}/{name}.steps"
            with contextlib.suppress(OSError):  # the folder is gone, or full
                self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                before = os.read(self._file, 40)
                if before and os.environ.get(environment.ATTEMPT, "0") != "0":
                    seconds = time.time() - os.fstat(self._file).st_mtime
                    told = [*map(int, before.split()), seconds]
        self._count = jax.process_count()
        told = list(filter(None, agree("go on with the training", told)))
        if told and jax.process_index() == 0:
            before, count, _ = max(told)
            restored = manager.restored
            in_memory = restored is not None and restored.from_memory
            where = "a snapshot in memory" if in_memory else "a checkpoint"
            where = where if step else "the beginning"
            repeated = with_noun(max(before - step, 0), "step")
            lasted = with_seconds(min(seconds for *_, seconds in told))
            print(
                f"jaxstrategy: {with_noun(self._count, 'process')}, before "
                f"{count}: goes on after step {step}, from {where}, repeating "
                f"{repeated}; {lasted} since the last one",
                file=sys.stderr,
            )

    def set(self, step: int) -> None:
        if self._file is not None:
            try:
                os.pwrite(self._file, b"%20d %19d" % (step, self._count), 0)
            except OSError:  # the memory is full
                self.close()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _shown(batches: Iterator[PyTree], total: int) -> Iterator[PyTree]:
    try:
        from tqdm import tqdm
    except ImportError:
        return batches

    class Bar(tqdm):
        monitor_interval = 0  # no thread that outlives the loop

    # Its own lock is of `multiprocessing`, and would decide how processes start.
    Bar.set_lock(threading.RLock())
    is_seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    return iter(
        Bar(
            batches,
            total=total,
            unit="step",
            disable=jax.process_index() > 0,
            delay=1.0,  # seconds: nothing for short loops
            mininterval=0.1 if is_seen else 60.0,  # in a log each is a line
        )
    )


def training_loop(
    dataset: DistributedDataset,
    state: PyTree | Callable[[], PyTree],
    *,
    steps: int,
    checkpoint: Any = None,
    every: int = 1000,
    in_sync_every: int | None = None,
    progress: bool = True,
    strategy: AnyStrategy | None = None,
    termination_config: TerminationConfig | None = None,
) -> TrainingLoop:
    """A loop over batches that goes on where the last run of the program ended.

    Between the steps it saves asynchronously, compares what the replicas hold, and
    looks whether the machine is wanted back: then all processes save after the same
    step and end, and `python -m jaxstrategy.launch` starts them again. At the end the
    last step is saved. After an error nothing is saved.

    Args:
      dataset: of the strategy; it begins anew when it ends.
      state: what is trained, a pytree, or a function that makes it. Variables, modules
        and what else changes in place may be in it.
      steps: how many there are to be in all.
      checkpoint: a directory or a `checkpoint.CheckpointManager`; without one nothing
        is saved, and SIGTERM ends the process as ever.
      every: after how many steps the state is saved.
      in_sync_every: after how many steps `assert_in_sync` compares the state, by
        default never.
      progress: whether the first process shows how far it is, if tqdm is installed.
      strategy: by default the current one.
      termination_config: how it is noticed that the machine is wanted back.

    Returns:
      A context manager to be iterated over: pairs of the steps done and a batch. Its
      `state` is to be replaced by the body.

    Raises:
      ValueError: a number is not positive; the dataset has no batches.
      TypeError: `dataset` is not a `DistributedDataset`, or `strategy` no strategy; a
        number is not whole.

    >>> import tempfile
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> rows = js.batches(np.arange(8.0), 4)
    >>> dataset = strategy.experimental_distribute_dataset(rows)
    >>> @strategy.run
    ... def step(total, x):
    ...     return total + js.get_replica_context().all_reduce("sum", x.sum())
    >>> def train(folder, steps):
    ...     loop = js.training.training_loop(
    ...         dataset, 0.0, steps=steps, checkpoint=folder, strategy=strategy
    ...     )
    ...     with loop:
    ...         for done, batch in loop:
    ...             loop.state = step(loop.state, batch)
    ...     return loop
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = train(folder, steps=1)
    ...     again = train(folder, steps=2)
    >>> first.state, again.step, again.state
    (Array(6., dtype=float32), 2, Array(28., dtype=float32))
    """
    if not isinstance(dataset, DistributedDataset):
        raise TypeError(
            f"`dataset` was {dataset!r}; what "
            "`strategy.experimental_distribute_dataset` returns was wanted."
        )
    steps, every = positive("steps", steps), positive("every", every)
    if in_sync_every is not None:
        in_sync_every = at_least(0, "in_sync_every", in_sync_every)
    core = get_strategy() if strategy is None else checked_strategy(strategy)
    manager = checkpoint
    if checkpoint is not None and not isinstance(checkpoint, CheckpointManager):
        manager = CheckpointManager(checkpoint, core)
    return TrainingLoop(
        dataset,
        state,
        steps=steps,
        strategy=core,
        manager=manager,
        every=every,
        in_sync_every=in_sync_every,
        show_progress=progress,
        termination_config=termination_config,
    )
