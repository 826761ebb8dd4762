"""`CheckpointManager`: saves states, and finds and restores them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import operator
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Self, final, overload

import jax

from jaxstrategy._src import text
from jaxstrategy._src.checkpoint import agreement
from jaxstrategy._src.checkpoint.agreement import first_line
from jaxstrategy._src.checkpoint.folder import (
    CheckpointError,
    Damage,
    DamagedCheckpointWarning,
    Folder,
    Record,
    verify,
)
from jaxstrategy._src.checkpoint.memory import Read, Snapshots
from jaxstrategy._src.checkpoint.state import Array, Reading, State
from jaxstrategy._src.cluster.resolvers import environment
from jaxstrategy._src.contexts import context
from jaxstrategy._src.contexts.replica_context import AnyStrategy, checked_core
from jaxstrategy._src.errors import ContextError, MissingExtraError
from jaxstrategy._src.processes.rendezvous import Json
from jaxstrategy._src.replicas.replicas import Replicas
from jaxstrategy._src.text import shown, whole
from jaxstrategy._src.values import arrays as _arrays, trees
from jaxstrategy._src.values.arrays import PyTree, TreeT

_STEPS = 2**63  # such numbers are names of files, and of 64 bits elsewhere


@final
@dataclasses.dataclass(frozen=True)
class Restored:
    """The outcome of restoring: which checkpoint, and what did not fit.

    Attributes:
      step: of the checkpoint.
      metrics: that were saved with it.
      extra: what was saved with it as such.
      missing: names of values that it had not, which stayed as they were.
      unexpected: names of values that only it has.
      damaged: for each later checkpoint that could not be used: why.
      from_memory: whether it was a snapshot in memory (`memory_every`).

    >>> import tempfile
    >>> import jaxstrategy as js
    >>> with js.checkpoint.CheckpointManager(tempfile.mkdtemp()) as manager:
    ...     _ = manager.save(7, {"w": np.ones(3)}, extra="after the first pass")
    ...     state = manager.restore({"w": np.zeros(3), "b": 0.0}, partial=True)
    >>> restored = manager.restored
    >>> restored.step, restored.extra, restored.missing
    (7, 'after the first pass', ('b',))
    """

    step: int
    metrics: dict[str, float]
    extra: Json
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    damaged: dict[int, str] = dataclasses.field(default_factory=dict)
    from_memory: bool = False


@final
class CheckpointManager:
    """Checkpoints of one training, in one folder.

    A state is any pytree of arrays, numbers and strings; `Variable`s, objects of Flax
    NNX (modules, optimizers, metrics, random streams), typed random keys, `PerReplica`s
    and iterators of distributed datasets may stand in it. Their logical values are
    saved: what is mirrored once, an on-read variable as what its copies combine to. So
    any strategy restores what any other saved, whatever the number of replicas, devices
    and processes, or of parameter servers. Only a `PerReplica` needs the same number of
    replicas again. While functions of a `coordinator.ClusterCoordinator` change
    variables on parameter servers, `save` pauses them to read, so that all values are
    of one moment.

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
      memory_every: also keep the last snapshot in the memory of the hosts, taken by
        `save` and `training.training_loop` at multiples of so many steps. It outlives
        the processes, and not the job: whatever restores the latest checkpoint after
        `python -m jaxstrategy.launch` has started processes again, takes the snapshot
        if it is of a later step, with the same checks. With `--nodes` or on Ray each
        host keeps what its processes hold, and of what no other host holds, the next
        host has a copy. So the loss of all processes, or of a host, costs at most so
        many steps, and those during which the next snapshot was being written; that of
        two hosts at once may cost those since the last checkpoint. It costs memory of
        each host: up to three times the bytes that its processes hold, or five times
        where no other host holds them. Where other launchers run the job, or the memory
        is full or deleted, a RuntimeWarning says that there are no snapshots.

    Raises:
      MissingExtraError: Orbax is not installed.
      ValueError: `keep`, `best`, `every` or `memory_every` is not as described.
      TypeError: `strategy` is no strategy.

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
        directory: str | os.PathLike[str],
        strategy: AnyStrategy | None = None,
        *,
        keep: int | None = 3,
        best: tuple[str, str] | None = None,
        every: int | None = None,
        asynchronous: bool = True,
        memory_every: int | None = None,
    ) -> None:
        numbers = {"keep": keep, "every": every, "memory_every": memory_every}
        for name, number in numbers.items():
            if number is not None and operator.index(number) < 1:
                raise ValueError(f"`{name}` was {number}; at least 1 was wanted.")
        match best:
            case None | (str(), "max" | "min"):
                pass
            case _:
                raise ValueError(
                    f"`best` was {best!r}; the name of a metric and 'max' or 'min' was "
                    "wanted: `best=('accuracy', 'max')`."
                )
        try:
            from jaxstrategy._src.checkpoint.orbax import OrbaxBackend
        except ImportError as missing:
            raise MissingExtraError(
                "`jaxstrategy.checkpoint` needs Orbax, which is not installed. Install "
                "the extra: pip install 'jaxstrategy[checkpoint]'"
            ) from missing
        self._backend = OrbaxBackend()
        self._folder = Folder(self._backend.path_of(directory), best)
        self._strategy = None if strategy is None else checked_core(strategy)
        self._keep, self._best, self._every = keep, best, every
        self._asynchronous = asynchronous
        self._restored: Restored | None = None
        self._own: set[int] = set()  # saved or restored by this manager
        self._writing = agreement.Background()
        self._memory_every = memory_every
        self._memory = None if memory_every is None else self._in_memory()
        if asynchronous:
            _finish_at_exit(self)

    def _in_memory(self) -> Snapshots | None:
        """Of this job's snapshots in memory of what is saved to this directory."""
        if folder := os.environ.get(environment.MEMORY):
            return Snapshots(str(self._folder.path), folder)
        text.warn(
            "`memory_every` has no effect: the processes were not started by `python "
            "-m jaxstrategy.launch`. Only checkpoints in "
            f"`{self._folder.path}` are restored.",
            RuntimeWarning,
        )
        return None

    # Saving.

    def save(
        self,
        step: int,
        state: PyTree,
        metrics: Mapping[str, float] | None = None,
        extra: Json = None,
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
          restored before by this manager. Snapshots in memory do not count.

        Raises:
          ContextError: inside a step.
          CheckpointError: it cannot be written, or the one before could not be.
          ValueError: the folder has a later checkpoint, or one of this step by another
            manager; an on-read variable has aggregation NONE.
          TypeError: the state has something that a checkpoint cannot hold; `extra` is
            more than JSON can say.
          DonatedValueError: an array was donated to an earlier step.
          ParameterServerLost: a server of some variable is gone; nothing is saved.
        """
        _check_host("save")
        step = _checked_step(step)
        self._writing.check()
        self.snapshot(step, state, metrics, extra)
        if not force and self._every is not None and step % self._every:
            return False
        numbers = self._checked(metrics, extra)
        what = self._topic("save", step)
        self._writing.join()
        if self._is_saved(step, what):
            return False
        written = State(state)
        # Nothing is restored meanwhile by another thread.
        with written.snapshot(step):
            entries, arrays, _ = written.saved(what)
            record = Record(step, entries, numbers, extra)
            unfinished = self._prepare(step, what)
            try:
                with agreement.watched(what):
                    self._backend.begin(self._folder.path / unfinished, arrays)
            except (OSError, ValueError) as error:
                raise self._unwritten(step, first_line(error)) from error
            waiting = f"checkpoint {step} in `{self._folder.path}` to be written"
            finish = functools.partial(self._finish, record, unfinished)
            self._writing.start("checkpoint", waiting, finish)
        if not self._asynchronous:
            self._writing.join()
        return True

    def snapshot(
        self,
        step: int,
        state: PyTree,
        metrics: Mapping[str, float] | None = None,
        extra: Json = None,
    ) -> bool:
        """Keep the state in memory, and nothing on disk; `save` does so by itself.

        Args:
          step, state, metrics, extra: as for `save`.

        Returns:
          Whether it was kept: not if `step` is no multiple of `memory_every`.

        Raises:
          ContextError, DonatedValueError, ParameterServerLost, TypeError, ValueError:
            as for `save`.
        """
        if self._memory is None or _checked_step(step) % (self._memory_every or 1):
            return False
        numbers = self._checked(metrics, extra)
        with self._or_without_memory():
            return self._memory.save(step, State(state), numbers, extra)
        return False

    @contextlib.contextmanager
    def _or_without_memory(self) -> Iterator[None]:
        """A block in which snapshots may fail, which all processes hear of."""
        try:
            yield
        except CheckpointError as error:
            text.warn(
                f"There are no snapshots in memory any more: {first_line(error)}",
                RuntimeWarning,
            )
            self._memory = None

    def _checked(
        self, metrics: Mapping[str, float] | None, extra: Json
    ) -> dict[str, float]:
        """The metrics; raises if they or `extra` cannot be saved."""
        try:
            json.dumps(extra)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(
                f"`extra` was {shown(extra)}, which JSON cannot say ({error}). Put "
                "arrays and other values into the state."
            ) from error
        try:
            numbers = {str(k): float(value) for k, value in dict(metrics or {}).items()}
        except (TypeError, ValueError, OverflowError):
            raise TypeError(
                f"`metrics` was {shown(metrics)}; numbers by name were wanted: "
                "`{'accuracy': 0.9}`."
            ) from None
        if self._best is not None and numbers and self._best[0] not in numbers:
            raise ValueError(
                f"`metrics` has {', '.join(numbers)}, but the best checkpoint is "
                f"chosen by {self._best[0]!r}."
            )
        return numbers

    def _topic(self, doing: str, step: int | None = None) -> str:
        """The topic by which the processes compare what they do."""
        which = "" if step is None else f" checkpoint {step}"
        return f"{doing}{which} in `{self._folder.path}`"

    def _is_saved(self, step: int, what: str) -> bool:
        is_own = step in self._own and self._folder.good_record(step) is not None
        is_own, latest = agreement.agree(what, [is_own, self._folder.latest()])[0]
        if not is_own and latest is not None and latest >= step:
            raise ValueError(
                f"Checkpoint {step} was to be saved, but `{self._folder.path}` has "
                f"checkpoint {latest} already, of another training or another course "
                "of this one. Restore that one and go on, use another directory, or "
                f"delete it first: `manager.delete({latest})`."
            )
        return is_own

    def _prepare(self, step: int, what: str) -> str:
        """The name of a new folder to write into; all raise if the first cannot."""
        name = failure = None
        if jax.process_index() == 0:
            try:
                name = self._folder.begin(step)
            except OSError as error:
                failure = first_line(error)
        # The name has a random part, so the first process makes it for all.
        name, failure = agreement.agree(what, [name, failure])[0]
        if failure is not None:
            raise self._unwritten(step, failure)
        # `begin` has given these checkpoints other names.
        self._folder.damaged.clear()
        return name

    def _finish(self, record: Record, unfinished: str) -> None:
        """In the background: wait until all is written, then delete older ones."""
        step, path = record.step, self._folder.path
        try:
            self._backend.finish(path / unfinished, path / str(step), record)
        except Exception as error:
            reason = self._other_writer(step, unfinished, error) or first_line(error)
            raise self._unwritten(step, reason) from error
        self._own.add(step)
        try:
            if jax.process_index() == 0 and self._keep is not None:
                self._folder.delete_old(self._keep)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoint {step} is written, but an older one could not be deleted "
                f"in `{self._folder.path}`: {first_line(error)}"
            ) from error

    def _unwritten(self, step: int, reason: str) -> CheckpointError:
        return CheckpointError(
            f"Checkpoint {step} could not be written to `{self._folder.path}`: "
            f"{reason}\nEarlier checkpoints are as they were. Is the folder "
            "writable, and is there room on the disk?"
        )

    def _other_writer(self, step: int, unfinished: str, error: Exception) -> str | None:
        """The damage that another writer into this folder did; None if it did none."""
        if isinstance(error, FileExistsError):
            did = f"checkpoint {step} is there meanwhile"
        elif not self._folder.has(unfinished) and not self._folder.has(str(step)):
            did = f"`{unfinished}`, into which it was written, was deleted"
        else:
            return None
        return f"{did}. Does another training save to this folder? Give it another one."

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
          CheckpointError: what was being written could not be.
        """
        if self._memory is not None:
            with self._or_without_memory():
                self._memory.join()
        self._writing.join()

    def delete(self, step: int) -> None:
        """Delete the checkpoint of `step`.

        Raises:
          FileNotFoundError: there is none.
        """
        self.wait()
        what = self._topic("delete", step)
        self._require(step, what)
        if jax.process_index() == 0:
            self._folder.delete(step)
        # No process goes on before it is deleted.
        agreement.agree(what, None)

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
          ValueError: `step` is no number from 0 on.
        """
        _check_host("restore")
        self.wait()
        step = None if step is None else _checked_step(step)
        what = self._topic("restore", step)
        on_disk, kept = self._steps_on_disk(what), self._latest_in_memory(what)
        # The latest first; of one step the checkpoint before the snapshot.
        tried = [(each, True) for each in on_disk]
        if kept is not None:
            tried.append((kept, False))
        tried.sort(reverse=True)
        if step is not None:
            tried = [each for each in tried if each[0] == step][:1]
        damaged: dict[int, str] = {}
        for each, is_on_disk in tried:
            if not is_on_disk:
                try:
                    return self._from_memory(state_like, partial, damaged)
                except CheckpointError as error:
                    text.warn(str(error), DamagedCheckpointWarning)
            elif reason := self._damage(each):
                damaged[each] = reason
            else:
                return self._from_disk(state_like, each, partial, damaged)
        if step in damaged:
            raise CheckpointError(
                f"Checkpoint {step} in `{self._folder.path}` is damaged: "
                f"{damaged[step]}. Without a step the latest good one is restored."
            )
        if not damaged:
            raise self._absent(step, on_disk)
        raise CheckpointError(
            f"All checkpoints in `{self._folder.path}` are damaged. {_listed(damaged)}."
            " Delete or move them to begin anew."
        )

    def _from_memory(
        self, state_like: PyTree, partial: bool, damaged: dict[int, str]
    ) -> PyTree:
        assert self._memory is not None, "there is a snapshot"
        record, read = self._memory.find(self._topic("restore a snapshot"))
        where = f"The snapshot of step {record.step} in memory"
        return self._restore_into(
            state_like, record, where, partial, read, damaged, from_memory=True
        )

    def _from_disk(
        self, state_like: PyTree, step: int, partial: bool, damaged: dict[int, str]
    ) -> PyTree:
        record = self._record(step, is_known=True)  # it was verified just now
        where = f"Checkpoint {step} in `{self._folder.path}`"

        def read(readings: Mapping[str, Reading]) -> dict[str, Array]:
            what = self._topic("restore", step)
            try:
                with agreement.watched(what, busy="reads arrays"):
                    return self._backend.read(self._folder.path / str(step), readings)
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    f"{where} could not be read: {first_line(error)}. Did "
                    "another program delete or change it meanwhile?"
                ) from error

        state = self._restore_into(state_like, record, where, partial, read, damaged)
        self._own.add(step)
        if self._memory is not None:  # these are of a course that is left
            self._memory.delete(self._topic("leave the snapshots of"))
        return state

    def _restore_into(
        self,
        state_like: PyTree,
        record: Record,
        where: str,
        partial: bool,
        read: Read,
        damaged: dict[int, str],
        from_memory: bool = False,
    ) -> PyTree:
        """The state with the saved values, while later checkpoints are damaged."""
        self._folder.damaged |= set(damaged)
        state, is_read = State(state_like, self._replicas()), True
        what = self._topic("restore", record.step)
        agreement.compare_leaves(what, list(state.leaves))
        try:
            restored, missing, unexpected = state.restored(
                record.leaves, where, partial, read
            )
        except CheckpointError:  # of a snapshot that is damaged, too
            is_read = False
            raise
        finally:
            if damaged and is_read:
                text.warn(
                    f"{where} is restored, because later ones are damaged. "
                    f"{_listed(damaged)}.",
                    DamagedCheckpointWarning,
                )
        self._restored = Restored(
            record.step,
            record.metrics,
            record.extra,
            missing,
            unexpected,
            damaged,
            from_memory,
        )
        return restored

    def _latest_in_memory(self, what: str) -> int | None:
        if self._memory is not None:
            with self._or_without_memory():
                return self._memory.latest(what)
        return None

    def _steps_on_disk(self, what: str) -> list[int]:
        """Steps for which there is something, good or not, in order."""
        return agreement.agree(what, self._folder.steps())[0]

    def _require(self, step: int, what: str) -> None:
        on_disk = self._steps_on_disk(what)
        if step not in on_disk:
            raise self._absent(step, on_disk)

    def _absent(self, step: int | None, on_disk: list[int]) -> FileNotFoundError:
        if step is None:
            return FileNotFoundError(
                f"There is no checkpoint in `{self._folder.path}`. Save one, "
                "or begin with `restore_or_init`."
            )
        has = ", ".join(map(str, on_disk)) if on_disk else "none"
        return FileNotFoundError(
            f"There is no checkpoint {step} in `{self._folder.path}`; it has: {has}."
        )

    def _damage(self, step: int) -> str | None:
        """The reason why a checkpoint cannot be used, the same in all processes."""
        folder = self._folder.path / str(step)
        what, reason = self._topic("verify", step), None
        try:
            with agreement.watched(what, busy="reads its files"):
                record = self._folder.record(step)
                verify(folder, record, jax.process_index(), jax.process_count())
        except Damage as damage:
            reason = str(damage)
        except OSError as error:
            reason = f"it cannot be read: {first_line(error)}"
        return next(filter(None, agreement.agree(what, reason)), None)

    @overload
    def restore_or_init(
        self, init: Callable[[], TreeT], *, partial: bool = False
    ) -> tuple[TreeT, int]: ...
    @overload
    def restore_or_init(
        self, init: TreeT, *, partial: bool = False
    ) -> tuple[TreeT, int]: ...
    def restore_or_init(
        self, init: PyTree | Callable[[], PyTree], *, partial: bool = False
    ) -> tuple[PyTree, int]:
        """The latest state and its step; where there is none, the first one and 0.

        Args:
          init: the first state, or a function without arguments that makes it.
          partial: as for `restore`.

        Raises:
          ContextError: inside a step.
          CheckpointError: there are checkpoints, and all are damaged.
          MismatchError: as for `restore`.
        """
        state = init() if _is_function(init) else init
        self.wait()
        what = self._topic("restore")
        if self._latest_in_memory(what) is None and not self._steps_on_disk(what):
            return State(state, self._replicas()).placed(), 0
        state = self.restore(state, partial=partial)
        assert self._restored is not None, "it has just restored"
        return state, self._restored.step

    @property
    def restored(self) -> Restored | None:
        """The outcome of restoring last; None before."""
        return self._restored

    def _replicas(self) -> Replicas | None:
        strategy = self._strategy
        if strategy is None:
            strategy = context.current().strategy
        if strategy is None or not strategy._replicas.axes:
            return None
        return strategy._replicas

    # What there is.

    def all_steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        found = list(self._folder.good())
        return agreement.agree(self._topic("list the checkpoints"), found)[0]

    def latest_step(self) -> int | None:
        """The last step whose checkpoint is complete; None if there is none.

        It may be that of a snapshot in memory, which `all_steps` does not have.
        """
        latest = self._folder.latest()
        found = agreement.agree(self._topic("find the latest checkpoint"), latest)[0]
        kept = self._latest_in_memory(self._topic("find the latest snapshot"))
        return max((each for each in (found, kept) if each is not None), default=None)

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
        best = self._folder.best(self._folder.good())
        return agreement.agree(self._topic("find the best checkpoint"), best)[0]

    def record(self, step: int) -> Record:
        """The description of a checkpoint, which is not restored.

        Raises:
          FileNotFoundError: there is none.
          CheckpointError: it is damaged.
        """
        self._require(step, self._topic("read the record of", step))
        return self._record(step)

    def _record(self, step: int, is_known: bool = False) -> Record:
        try:
            return self._folder.record(step, is_known)
        except Damage as damage:
            raise CheckpointError(
                f"Checkpoint {step} in `{self._folder.path}` is damaged: {damage}."
            ) from None

    # Its end.

    def close(self) -> None:
        """Wait, as `wait` does, and end the background threads."""
        try:
            self.wait()
        finally:
            self._backend.close()
            if self._memory is not None:
                self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"CheckpointManager({str(self._folder.path)!r})"


def _finish_at_exit(manager: CheckpointManager) -> None:
    """Let a program that ends finish its files before Orbax's executors end."""
    alive = weakref.ref(manager)

    def finish() -> None:
        if (manager := alive()) is None or manager._writing.thread is None:
            return
        manager._writing.thread.join()
        try:
            manager._writing.check()
        except CheckpointError as error:  # nobody is left to catch it
            print(error, file=sys.stderr)

    threading._register_atexit(finish)  # pyright: ignore[reportAttributeAccessIssue]


def _listed(damaged: Mapping[int, str]) -> str:
    return "; ".join(f"{step}: {reason}" for step, reason in damaged.items())


def _check_host(method: str) -> None:
    if _arrays.is_traced():
        raise ContextError(
            f"`{method}` was called inside a step, or inside another function that JAX "
            "compiles, which would do it once, while it is traced. Call it between "
            "steps."
        )


def _checked_step(step: object) -> int:
    number = whole(step)
    if number is None or not 0 <= number < _STEPS:
        raise ValueError(
            f"`step` was {shown(step)}; a number from 0 to {_STEPS - 1} was wanted."
        )
    return number


def _is_function(init: object) -> bool:
    """Whether it makes a state; a model can be both callable and a state."""
    if not callable(init):
        return False
    trees.object_kinds()
    if trees.is_object(init):
        return False
    leaves = jax.tree.leaves(init)
    return len(leaves) == 1 and leaves[0] is init
