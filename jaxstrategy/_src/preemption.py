"""`PreemptionCheckpointHandler`: training that ends well when it is preempted."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import ParamSpec, TypeVar, final

from jaxstrategy._src.checkpoint.manager import CheckpointManager
from jaxstrategy._src.cluster.resolvers.cluster_resolver import ClusterResolver
from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.replica_context import AnyStrategy, checked_core
from jaxstrategy._src.processes import agreement, job
from jaxstrategy._src.processes.agreement import StopAgreement
from jaxstrategy._src.processes.exit_codes import ExitCode
from jaxstrategy._src.processes.store import Store
from jaxstrategy._src.strategies.current import get_strategy
from jaxstrategy._src.values.arrays import PyTree


@final
@dataclasses.dataclass(frozen=True)
class TerminationConfig:
    """Options of a job whose machine may be wanted back: the notice, and the end.

    Attributes:
      termination_watcher_fn: returns whether it is; asked each second or so in a
        thread. By default the signal SIGTERM says it.
      exit_fn: ends the process when the state is saved, by default with exit code 77,
        which tells `python -m jaxstrategy.launch` to start the job again. If it
        returns, training goes on.
      grace_period: seconds of training that are left after the notice. The state is
        saved at once, and again at their end. By default none.
      save_fn: saves, in place of the checkpoint manager.

    Raises:
      TypeError: a function cannot be called.
      ValueError: a negative time.

    >>> import jaxstrategy as js
    >>> js.experimental.TerminationConfig(grace_period=30).grace_period
    30
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., object] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            given = getattr(self, name)
            if given is not None and not callable(given):
                raise TypeError(f"`{name}` was {given!r}, which cannot be called.")
        if self.grace_period is not None and not self.grace_period >= 0:
            raise ValueError(
                f"`grace_period` was {self.grace_period!r}; a number of seconds, at "
                "least 0, was wanted."
            )


_POLL_SECONDS = 1.0


@final
class PreemptionWatcher:
    """Looks for the notice that this process is to end.

    Args:
      watcher_fn: returns whether it is; asked each second in a thread. By default the
        signal SIGTERM is the notice: it no longer ends the process.

    Raises:
      RuntimeError: signals can be handled only in the main thread.

    >>> import jaxstrategy as js
    >>> watcher = js.experimental.PreemptionWatcher(lambda: False)
    >>> watcher.preemption_message is None
    True
    >>> watcher.close()
    """

    def __init__(self, watcher_fn: Callable[[], bool] | None = None) -> None:
        self._noticed = threading.Event()
        self._closed = threading.Event()
        self._message: str | None = None
        self._raised: BaseException | None = None
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._is_installed = watcher_fn is None
        if watcher_fn is None:
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError(
                    "A signal can be handled only in the main thread, and this is "
                    "another. Make the PreemptionWatcher there, or give a "
                    "`termination_watcher_fn`."
                )
            self._before = signal.signal(signal.SIGTERM, self._signalled)
        else:
            threading.Thread(
                target=_poll,
                args=(watcher_fn, weakref.ref(self), self._closed),
                name="jaxstrategy preemption",
                daemon=True,
            ).start()

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self.notice(f"signal {signal.Signals(number).name}")

    def notice(self, message: str) -> None:
        """Let this be the notice; `preemption_message` is then `message`."""
        self._message = self._message or message
        self._noticed.set()

    @property
    def preemption_message(self) -> str | None:
        """The text of the notice, None as long as there is none.

        Raises:
          Exception: what the watcher function raised.
        """
        if self._raised is not None:
            raise self._raised
        return self._message

    def wait(self, timeout_seconds: float) -> bool:
        """Whether there is a notice, now or within the time."""
        return self._noticed.wait(timeout_seconds)

    def block_until_worker_exit(self) -> None:
        """Do nothing until there is a notice."""
        while not self._noticed.wait(_POLL_SECONDS):
            pass

    def close(self) -> None:
        """Stop looking; SIGTERM does again what it did before."""
        self._closed.set()
        if self._is_installed:
            self._is_installed = False
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)


def _poll(
    watcher_fn: Callable[[], bool],
    get_watcher: Callable[[], PreemptionWatcher | None],
    closed: threading.Event,
) -> None:
    while not closed.wait(_POLL_SECONDS / 4):
        watcher = get_watcher()
        if watcher is None:
            return
        try:
            if watcher_fn():
                watcher.notice("`termination_watcher_fn` returned True")
                return
        # SystemExit, too, which ends a thread silently: then nothing would be noticed.
        except BaseException as error:
            watcher._raised = error  # where the notice is waited for
            watcher._noticed.set()
            return
        del watcher


_P = ParamSpec("_P")
_R = TypeVar("_R")

# All processes make their handlers in the same order.
_handlers = itertools.count()


@final
class PreemptionCheckpointHandler:
    """Saves once, on all processes after the same step, when one is to end.

    When it is made, it restores the latest checkpoint, if there is one. Then the
    training step is called through `run`, or `save_checkpoint_if_preempted` after each
    step, or steps run inside `watch_preemption_scope`.

    Args:
      cluster_resolver: for TensorFlow's sake; the processes are those of the strategy.
      checkpoint_or_checkpoint_manager: a `checkpoint.CheckpointManager`; or the state
        itself, with `checkpoint_dir`.
      checkpoint_dir: where to save; only without a manager.
      termination_config: how a notice is noticed, and what then.
      state: what is saved: variables, modules, dataset iterators, in any pytree, which
        are restored in place; or a function that returns the state to be saved, whose
        restored form is then in `restored`.
      strategy: whose steps count in `watch_preemption_scope`, by default the current
        one.

    Attributes:
      restored: the state that was restored, None if there was no checkpoint.

    Raises:
      TypeError: something else than a manager, a config, a resolver or a strategy.
      ValueError: nothing says where to save.

    >>> import tempfile
    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> with strategy.scope():
    ...     count = js.Variable(0, aggregation="only_first_replica")
    >>> handler = js.experimental.PreemptionCheckpointHandler(
    ...     None, {"count": count}, tempfile.mkdtemp(),
    ...     js.experimental.TerminationConfig(lambda: False),  # else SIGTERM tells it
    ... )
    >>> step = strategy.step(lambda: count.assign_add(1))
    >>> while handler.total_run_calls < 3:
    ...     _ = handler.run(step)
    >>> int(count)
    3
    >>> handler.close()
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: CheckpointManager | PyTree,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
        *,
        state: PyTree | Callable[[], PyTree] = None,
        strategy: AnyStrategy | None = None,
    ) -> None:
        for name, option, kind, none in (
            ("cluster_resolver", cluster_resolver, ClusterResolver, " or None"),
            ("termination_config", termination_config, TerminationConfig, ""),
        ):
            if option is not None and not isinstance(option, kind):
                wanted = f"a {kind.__name__}{none} was wanted"
                raise TypeError(f"`{name}` was {option!r}; {wanted}.")
        self._config = termination_config or TerminationConfig()
        self._strategy = None if strategy is None else checked_core(strategy)
        given, self._manager, self._state = (
            checkpoint_or_checkpoint_manager,
            None,
            state,
        )
        if isinstance(given, CheckpointManager):
            if checkpoint_dir is not None:
                raise ValueError(
                    "`checkpoint_dir` was given together with a CheckpointManager, "
                    "which has a directory of its own."
                )
            self._manager = given
        elif checkpoint_dir is not None:
            self._manager = CheckpointManager(checkpoint_dir)
            self._state = given if state is None else state
        elif self._config.save_fn is None:
            raise ValueError(
                f"`checkpoint_or_checkpoint_manager` was {given!r} without "
                "`checkpoint_dir`. Give a `jaxstrategy.checkpoint.CheckpointManager`, "
                "or a directory as well, or a `save_fn` in the TerminationConfig."
            )
        self._calls = 0
        self.restored = self._restore()
        processes = job.current()
        self._store = Store() if processes is None else processes.store
        self._name = f"preemption {next(_handlers)}"
        self._agreement = StopAgreement(self._store, self._name, self._calls)
        self._is_last = not self._config.grace_period
        self._is_over = False
        self._watcher = PreemptionWatcher(self._config.termination_watcher_fn)
        self._closed = threading.Event()
        threading.Thread(
            target=self._announce, name=f"jaxstrategy {self._name}", daemon=True
        ).start()

    @property
    def total_run_calls(self) -> int:
        """The number of steps, those before the restored checkpoint included."""
        return self._calls

    def run(
        self,
        distributed_train_function: Callable[_P, _R],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _R:
        """Calls the function and returns its result.

        After the last step it saves first, and calls `exit_fn`, which ends the process.

        Raises:
          ClusterError: another process ended instead of stopping with this one.
        """
        with self._step():
            return distributed_train_function(*args, **kwargs)

    def save_checkpoint_if_preempted(self, *args: object, **kwargs: object) -> None:
        """To be called after each step that does not go through `run`.

        Args:
          *args: of `save_fn`, if there is one.
          **kwargs: the same.
        """
        self._calls += 1
        self._agreement.catch_up(self._calls)
        self._before(*args, **kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """A `with` block in which each `strategy.run` counts as one step."""
        strategy = self._strategy or get_strategy()
        with strategy.scope(), context.entered(around=self._step):
            yield

    def close(self) -> None:
        """Take no notice any more."""
        self._closed.set()
        self._agreement.close()
        self._watcher.close()

    def _before(self, *args: object, **kwargs: object) -> None:
        _ = self._watcher.preemption_message  # raises what the watcher raised
        while not self._is_over and self._agreement.begin():
            self._stop(*args, **kwargs)

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        self._before()
        try:
            yield
        finally:
            # Counts one that raises, too: other processes may not have seen it raise.
            self._calls += 1
        if not self._is_over and self._agreement.is_time:
            self._stop()

    def _stop(self, *args: object, **kwargs: object) -> None:
        """Save; then end, or go on for the rest of the time."""
        self._agreement.close()
        self._save(*args, **kwargs)
        if self._is_last:
            self._is_over = True
            self.close()
            exit_fn = self._config.exit_fn or (lambda: sys.exit(ExitCode.PREEMPTED))
            exit_fn()
            return
        self._is_last = True
        self._agreement = StopAgreement(
            self._store, f"{self._name}: at last", self._calls
        )

    def _announce(self) -> None:
        """Let all processes stop when this one is noticed, and when its time is up."""
        while not self._watcher.wait(1.0):
            if self._closed.is_set():
                return
        noticed, seconds = time.monotonic(), self._config.grace_period or 0
        try:
            message = str(self._watcher.preemption_message)
        except BaseException:
            return  # the next step says why
        agreement.announce(self._store, self._name, message)
        if seconds:
            self._closed.wait(max(0.0, noticed + seconds - time.monotonic()))
            last = f"{self._name}: at last"
            agreement.announce(self._store, last, "the time is up")

    def _save(self, *args: object, **kwargs: object) -> None:
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
            return
        assert self._manager is not None
        if self._manager.all_steps()[-1:] == [self._calls]:
            return
        state = self._state() if callable(self._state) else self._state
        self._manager.save(self._calls, state, force=True)
        self._manager.wait()

    def _restore(self) -> PyTree:
        if self._manager is None or self._manager.latest_step() is None:
            return None
        state = self._state() if callable(self._state) else self._state
        restored, self._calls = self._manager.restore_or_init(state)
        return restored
