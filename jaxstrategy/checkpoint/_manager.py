"""`CheckpointManager`: saves states, and finds and restores them."""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Self, final

import jax

from jaxstrategy._errors import MissingExtraError
from jaxstrategy.checkpoint import (
    _arguments,
    _operations,
    _record,
    _retention,
)
from jaxstrategy.checkpoint._checkpoint_errors import (
    CheckpointError,
    DamagedCheckpointWarning,
)
from jaxstrategy.checkpoint._entries import Entry
from jaxstrategy.checkpoint._folder import Folder
from jaxstrategy.checkpoint._record import Damage, Record
from jaxstrategy.checkpoint._restored import Restored
from jaxstrategy.checkpoint._retention import Best
from jaxstrategy.checkpoint._written_state import WrittenState
from jaxstrategy.checkpoint.sorts._sorts import described
from jaxstrategy.contexts import _context
from jaxstrategy.contexts._context import AbstractStrategy
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.values._per_replica import PyTree


@final
class CheckpointManager:
    """Checkpoints of one training, in one folder.

    A state is any pytree of arrays, numbers and strings; `Variable`s, objects of Flax
    NNX (modules, optimizers, metrics, random streams), typed random keys, `PerReplica`s
    and iterators of distributed datasets may stand in it. Their logical values are
    saved: what is mirrored once, an on-read variable as what its copies combine to. So
    any strategy restores what any other saved, whatever the number of replicas, devices
    and processes. Only a `PerReplica` needs the same number of replicas again.

    A checkpoint appears under its name when it is complete, and its files have
    checksums. A writer may be killed at any moment: earlier checkpoints stay as they
    are.

    With several processes all of them call the same methods, in the same order, on a
    folder that all of them see. Close it, or use it in `with`: what is still being
    written when Python ends is lost.

    Args:
      directory: the folder; it is made when the first checkpoint is.
      strategy: where arrays go that lie nowhere in particular yet: they are mirrored.
        By default the strategy of the scope in which it restores, if there is one.
      keep: how many of the last checkpoints stay, None for all.
      best: a metric and `"max"` or `"min"`: the best one by it stays, too.
      every: save only at multiples of so many steps.
      asynchronous: whether `save` returns while the files are still written. The state
        may be changed and donated then.

    Raises:
      MissingExtraError: Orbax is not installed.
      ValueError: `keep`, `best` or `every` is not as described.

    >>> import tempfile
    >>> import jaxstrategy as js
    >>> from jaxstrategy import checkpoint
    >>> two = js.MirroredStrategy(js.simulate(8)[:2])
    >>> eight = js.MirroredStrategy(js.simulate(8))
    >>> directory = tempfile.mkdtemp()
    >>> with checkpoint.CheckpointManager(directory, two) as manager:
    ...     manager.save(10, {"w": two.mirror(np.arange(3.0)), "epoch": 1})
    True
    >>> with checkpoint.CheckpointManager(directory, eight) as manager:
    ...     state, step = manager.restore_or_init({"w": jnp.zeros(3), "epoch": 0})
    >>> step, state["epoch"], state["w"], len(state["w"].devices())
    (10, 1, Array([0., 1., 2.], dtype=float32), 8)
    """

    def __init__(
        self,
        directory: Any,
        strategy: AbstractStrategy | None = None,
        *,
        keep: int | None = 3,
        best: tuple[str, str] | None = None,
        every: int | None = None,
        asynchronous: bool = True,
    ) -> None:
        for name, number in {"keep": keep, "every": every}.items():
            if number is not None and operator.index(number) < 1:
                raise ValueError(f"`{name}` was {number}; at least 1 was wanted.")
        self._arrays = _orbax()
        self._folder = Folder(self._arrays.path_of(directory))
        self._strategy = strategy
        self._keep, self._every = keep, every
        self._best = None if best is None else Best.of(best)
        self._asynchronous = asynchronous
        self._writer = self._arrays.Writer()
        self._thread: threading.Thread | None = None
        self._writing = 0
        self._unfinished = ""  # the folder that is written into
        self._failure: Exception | None = None
        self._damaged: set[int] = set()
        self._own: set[int] = set()  # steps that this training has saved or restored
        self._restored: Restored | None = None

    # Saving.

    def save(
        self,
        step: int,
        state: PyTree,
        metrics: Mapping[str, float] | None = None,
        extra: Any = None,
        *,
        force: bool = False,
    ) -> bool:
        """Save the state after `step` steps.

        Args:
          step: how many steps were taken; the name of the checkpoint.
          state: what to save.
          metrics: numbers by name, for `best`.
          extra: what JSON can say, for your own use.
          force: save although it is no multiple of `every`.

        Returns:
          Whether it was saved: not if it is no multiple of `every`, or was saved or
          restored before by this manager.

        Raises:
          ContextError: inside a step.
          CheckpointError: it cannot be written, or the one before could not be.
          ValueError: the folder has a later checkpoint, or one of this step by another
            manager; an on-read variable has aggregation NONE.
          TypeError: the state has something that a checkpoint cannot hold; `extra` is
            more than JSON can say.
          DonatedValueError: an array was donated to an earlier step.
        """
        _arguments.check_host("save")
        step = _arguments.checked_step(step)
        self._raise_failure(is_over=False)
        if not force and self._every is not None and step % self._every:
            return False
        numbers = _arguments.checked_metrics(metrics)
        self._check_metrics(numbers)
        _arguments.check_json(extra)
        self.wait()
        what = self._what("save", step)
        if self._is_saved(step, what):
            return False
        entries, arrays = WrittenState(state, None).saved()
        _operations.compare_leaves(what, _leaves(entries))
        record = Record(step, entries, numbers, extra)
        self._unfinished = self._prepare(step, what)
        try:
            with _operations.watched(what):
                folder = self._folder.path / self._unfinished
                self._writer.begin(folder, arrays, record)
        except (OSError, ValueError) as error:
            raise self._unwritten(step, _arguments.first_line(error)) from error
        self._writing = step
        self._thread = threading.Thread(target=self._finish, name="checkpoint")
        self._thread.start()
        if not self._asynchronous:
            self.wait()
        return True

    def _what(self, doing: str, step: int | None = None) -> str:
        """What is done, in the words by which the processes compare it."""
        which = "" if step is None else f" checkpoint {step}"
        return f"{doing}{which} in `{self._folder.path}`"

    def _prepare(self, step: int, what: str) -> str:
        """The name of a new folder to write into; all raise if the first cannot."""
        name = failure = None
        if _operations.is_first():
            try:
                name = self._folder.begin(step, self._damaged)
            except OSError as error:
                failure = _arguments.first_line(error)
        name, failure = _operations.gather(what, [name, failure])[0]
        if failure is not None:
            raise self._unwritten(step, failure)
        self._damaged.clear()
        return name

    def _finish(self) -> None:
        """In the background: wait until all is written, then delete older ones."""
        step = self._writing
        try:
            self._writer.finish()
            self._own.add(step)
        except Exception as error:
            reason = self._other_writer(step, error) or _arguments.first_line(error)
            self._failure = self._unwritten(step, reason)
            self._failure.__cause__ = error
            return
        try:
            if _operations.is_first():
                self._thin_out()
        except OSError as error:
            self._failure = CheckpointError(
                f"Checkpoint {step} is written, but an older one could not be deleted "
                f"in `{self._folder.path}`: {_arguments.first_line(error)}"
            )
            self._failure.__cause__ = error

    def _thin_out(self) -> None:
        if self._keep is None:
            return
        records = self._good()
        best = self._best_of(records)
        for step in _retention.surplus(list(records), self._keep, best):
            self._folder.delete(step)

    def _unwritten(self, step: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"Checkpoint {step} could not be written to `{self._folder.path}`: "
            f"{reason}\nEarlier checkpoints are as they were. Is the folder "
            "writable, and is there room on the disk?"
        )

    def _other_writer(self, step: int, error: Exception) -> str | None:
        """What another writer into this folder did to a checkpoint; None if nothing."""
        if isinstance(error, FileExistsError):
            did = f"checkpoint {step} is there meanwhile"
        elif not self._folder.has(self._unfinished) and not self._folder.has(str(step)):
            did = f"`{self._unfinished}`, into which it was written, was deleted"
        else:
            return None
        return f"{did}. Does another training save to this folder? Give it another one."

    def _check_metrics(self, metrics: Mapping[str, float]) -> None:
        if self._best is not None and metrics and self._best.metric not in metrics:
            raise ValueError(
                f"`metrics` has {', '.join(metrics)}, but the best checkpoint is "
                f"chosen by {self._best.metric!r}."
            )

    def _is_saved(self, step: int, what: str) -> bool:
        """Whether this manager has done so already.

        Raises:
          ValueError: there is another checkpoint that is not earlier.
        """
        is_own = step in self._own and step in self._good()
        latest = self._folder.latest(self._damaged)
        is_own, latest = _operations.gather(what, [is_own, latest])[0]
        if is_own:
            return True
        if latest is None or latest < step:
            return False
        raise ValueError(
            f"Checkpoint {step} was to be saved, but `{self._folder.path}` has "
            f"checkpoint {latest} already, of another training or another course of "
            "this one. Restore that one and go on, use another directory, or delete it "
            f"first: `manager.delete({latest})`."
        )

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
          CheckpointError: what was being written could not be.
        """
        if self._thread is not None:
            what = f"checkpoint {self._writing} in `{self._folder.path}` to be written"
            _operations.join(self._thread, what)
            self._thread = None
        self._raise_failure(is_over=True)

    def _raise_failure(self, is_over: bool) -> None:
        is_over = is_over or self._thread is None or not self._thread.is_alive()
        if is_over and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def delete(self, step: int) -> None:
        """Delete the checkpoint of `step`.

        Raises:
          FileNotFoundError: there is none.
        """
        self.wait()
        what = self._what("delete", step)
        self._require(step, self._named(what))
        if _operations.is_first():
            self._folder.delete(step)
        _operations.gather(what, None)

    # Restoring.

    def restore(
        self, state_like: PyTree, step: int | None = None, *, partial: bool = False
    ) -> PyTree:
        """A state as it was saved.

        Each array is read to where it will be: each device reads what it holds.
        Variables, objects of Flax NNX and iterators are changed in place, and stand in
        the result, too; nothing is changed if anything cannot be restored. What else is
        known of the checkpoint is in `restored` afterwards.

        Args:
          state_like: a state of the same structure. Its values say what is wanted:
            dtype, shape and placement; they may be `jax.ShapeDtypeStruct`s.
          step: which one; by default the latest that is not damaged. If that is not
            the latest of all, a `DamagedCheckpointWarning` says why.
          partial: restore what both have; the rest stays as in `state_like`.

        Raises:
          ContextError: inside a step.
          FileNotFoundError: there is no such checkpoint.
          CheckpointError: it is damaged, or all are.
          MismatchError: a dtype or shape differs; without `partial`, values are missing
            in the checkpoint, or only there.
        """
        _arguments.check_host("restore")
        self.wait()
        if step is not None:
            step = _arguments.checked_step(step)
        named = self._named(self._what("restore", step))
        if step is not None:
            self._require(step, named)
            reason = self._verified(step)
            if reason is not None:
                raise CheckpointError(
                    f"Checkpoint {step} in `{self._folder.path}` is damaged: {reason}. "
                    "Without a step the latest good one is restored."
                )
            return self._restore(state_like, step, partial, {})
        if not named:
            raise FileNotFoundError(
                f"There is no checkpoint in `{self._folder.path}`. Save one, or begin "
                "with `restore_or_init`."
            )
        step, damaged = self._latest_good(named)
        return self._restore(state_like, step, partial, damaged)

    def restore_or_init(
        self, init: PyTree | Callable[[], PyTree], *, partial: bool = False
    ) -> tuple[PyTree, int]:
        """The latest state and its step; where there is none, the first one and 0.

        Args:
          init: the first state, or a function without arguments that makes it.
          partial: as for `restore`.

        Raises:
          CheckpointError: there are checkpoints, and all are damaged.
          MismatchError: as for `restore`.
        """
        state = init() if _arguments.is_function(init) else init
        self.wait()
        if not self._named(self._what("restore")):
            return WrittenState(state, self._replicas()).placed(), 0
        state = self.restore(state, partial=partial)
        assert self._restored is not None, "it has just restored"
        return state, self._restored.step

    @property
    def restored(self) -> Restored | None:
        """What was restored last; None before."""
        return self._restored

    def _latest_good(self, named: list[int]) -> tuple[int, dict[int, str]]:
        damaged: dict[int, str] = {}
        step = named[-1]
        for step in reversed(named):
            reason = self._verified(step)
            if reason is None:
                break
            damaged[step] = reason
        told = "; ".join(f"{step}: {reason}" for step, reason in damaged.items())
        if len(damaged) == len(named):
            raise CheckpointError(
                f"All checkpoints in `{self._folder.path}` are damaged. {told}. Delete "
                "or move them to begin anew."
            )
        if damaged:
            self._damaged |= set(damaged)
            warnings.warn(
                f"Checkpoint {step} in `{self._folder.path}` is restored, because "
                f"later ones are damaged. {told}.",
                DamagedCheckpointWarning,
                stacklevel=4,
            )
        return step, damaged

    def _verified(self, step: int) -> str | None:
        """Why the checkpoint cannot be used; all processes say the same."""
        folder, what = self._folder.of(step), self._what("verify", step)
        try:
            with _operations.watched(what, busy="reads its files"):
                record = self._folder.record(step)
                _record.verify(folder, record, jax.process_index(), jax.process_count())
            reason = None
        except Damage as damage:
            reason = str(damage)
        except OSError as error:
            reason = f"it cannot be read: {_arguments.first_line(error)}"
        reasons = _operations.gather(what, reason)
        return next((each for each in reasons if each is not None), None)

    def _restore(
        self, state_like: PyTree, step: int, partial: bool, damaged: dict[int, str]
    ) -> PyTree:
        record = self._record(step)
        state = WrittenState(state_like, self._replicas())
        what = self._what("restore", step)
        _operations.compare_leaves(what, list(state.names))
        where = f"Checkpoint {step} in `{self._folder.path}`"
        fit = state.fit(record.leaves, where, partial)
        readings = state.readings(record.leaves, fit.common)
        try:
            with _operations.watched(what, busy="reads arrays"):
                arrays = self._arrays.read(self._folder.of(step), readings)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{where} could not be read: {_arguments.first_line(error)}. Did "
                "another program delete or change it meanwhile?"
            ) from error
        restored = state.restored(record.leaves, fit.common, arrays)
        self._own.add(step)
        self._restored = Restored(
            step, record.metrics, record.extra, fit.missing, fit.unexpected, damaged
        )
        return restored

    def _replicas(self) -> Replicas | None:
        strategy = self._strategy or _context.current().strategy
        return None if strategy is None or strategy.is_default else strategy.replicas

    # What there is.

    def all_steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return self._steps()

    def latest_step(self) -> int | None:
        """The last step whose checkpoint is complete; None if there is none."""
        newest = self._folder.newest(self._damaged)
        return self._of_first("find the latest checkpoint", newest)

    def best_step(self) -> int | None:
        """The step that is best by the metric; None if no checkpoint has it.

        Raises:
          ValueError: the manager was not given `best`.
        """
        if self._best is None:
            raise ValueError(
                "The manager was not told what is best: "
                "`CheckpointManager(..., best=('accuracy', 'max'))`."
            )
        return self._of_first("find the best checkpoint", self._best_of(self._good()))

    def record(self, step: int) -> Record:
        """What is known of a checkpoint without restoring it.

        Raises:
          FileNotFoundError: there is none.
          CheckpointError: it is damaged.
        """
        self._require(step, self._named(self._what("read the record of", step)))
        return self._record(step)

    def _record(self, step: int) -> Record:
        try:
            return self._folder.record(step)
        except Damage as damage:
            raise CheckpointError(
                f"Checkpoint {step} in `{self._folder.path}` is damaged: {damage}."
            ) from None

    def _best_of(self, records: Mapping[int, Record]) -> int | None:
        if self._best is None:
            return None
        return self._best.among({s: each.metrics for s, each in records.items()})

    def _steps(self) -> list[int]:
        return self._of_first("list the checkpoints", list(self._good()))

    def _good(self) -> dict[int, Record]:
        """The complete checkpoints that have not turned out to be damaged."""
        records = self._folder.records()
        return {s: each for s, each in records.items() if s not in self._damaged}

    def _named(self, what: str) -> list[int]:
        return _operations.gather(what, self._folder.named())[0]

    def _of_first(self, doing: str, found: Any) -> Any:
        """What the first process has found: others may see a folder later."""
        return _operations.gather(self._what(doing), found)[0]

    def _require(self, step: int, named: list[int]) -> None:
        if step not in named:
            has = ", ".join(map(str, named)) if named else "none"
            raise FileNotFoundError(
                f"There is no checkpoint {step} in `{self._folder.path}`; "
                f"it has: {has}."
            )

    # Its end.

    def close(self) -> None:
        """Wait, as `wait` does, and let go of threads."""
        try:
            self.wait()
        finally:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"CheckpointManager({str(self._folder.path)!r})"


def _leaves(entries: Mapping[str, Entry]) -> list[str]:
    """Names with kinds."""
    return [f"`{name}` ({described(entry)})" for name, entry in entries.items()]


def _orbax() -> ModuleType:
    try:
        from jaxstrategy.checkpoint import _orbax_arrays
    except ImportError as missing:
        raise MissingExtraError(
            "`jaxstrategy.checkpoint` needs Orbax, which is not installed. Install the "
            "extra: pip install 'jaxstrategy[checkpoint]'"
        ) from missing
    return _orbax_arrays
