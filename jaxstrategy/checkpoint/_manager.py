"""`CheckpointManager`: saves states, and finds and restores them."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping
from typing import Self, final, overload

from jaxstrategy.checkpoint import _arguments
from jaxstrategy.checkpoint._restored import Restored
from jaxstrategy.checkpoint._restorer import Restorer
from jaxstrategy.checkpoint._saver import Saver
from jaxstrategy.checkpoint._written_state import WrittenState
from jaxstrategy.checkpoint.backends._installed import installed
from jaxstrategy.checkpoint.folders._catalogue import Catalogue
from jaxstrategy.checkpoint.folders._folder import Folder
from jaxstrategy.checkpoint.folders._record import Record
from jaxstrategy.checkpoint.folders._retention import Best
from jaxstrategy.contexts import _context
from jaxstrategy.contexts._strategy_face import AnyStrategy, checked_core
from jaxstrategy.processes._rendezvous import Json
from jaxstrategy.replicas._replicas import Replicas
from jaxstrategy.values._types import PyTree, TreeT


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

    Raises:
      MissingExtraError: Orbax is not installed.
      ValueError: `keep`, `best` or `every` is not as described.
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
    ) -> None:
        for name, number in {"keep": keep, "every": every}.items():
            if number is not None and operator.index(number) < 1:
                raise ValueError(f"`{name}` was {number}; at least 1 was wanted.")
        backend = installed()
        folder = Folder(backend.path_of(directory))
        self._strategy = None if strategy is None else checked_core(strategy)
        self._every = every
        self._catalogue = Catalogue(folder, None if best is None else Best.of(best))
        self._saver = Saver(self._catalogue, backend, keep, asynchronous)
        self._restorer = Restorer(self._catalogue, backend)
        self._restored: Restored | None = None

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
          restored before by this manager.

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
        _arguments.check_host("save")
        step = _arguments.checked_step(step)
        self._saver.raise_failure()
        if not force and self._every is not None and step % self._every:
            return False
        numbers = _arguments.checked_metrics(metrics)
        self._catalogue.check_metrics(numbers)
        _arguments.check_json(extra)
        return self._saver.save(step, state, numbers, extra)

    def wait(self) -> None:
        """Return when nothing is being written any more.

        Raises:
          CheckpointError: what was being written could not be.
        """
        self._saver.wait()

    def delete(self, step: int) -> None:
        """Delete the checkpoint of `step`.

        Raises:
          FileNotFoundError: there is none.
        """
        self.wait()
        self._catalogue.delete(step)

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
        _arguments.check_host("restore")
        self.wait()
        if step is not None:
            step = _arguments.checked_step(step)
        state, self._restored = self._restorer.restore(
            state_like, step, partial, self._replicas()
        )
        self._saver.own.add(self._restored.step)
        return state

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
        state = init() if _arguments.is_function(init) else init
        self.wait()
        if not self._catalogue.named(self._catalogue.what("restore")):
            return WrittenState(state, self._replicas()).placed(), 0
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
            strategy = _context.current().strategy
        if strategy is None or not strategy._replicas.axes:
            return None
        return strategy._replicas

    # What there is.

    def all_steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return self._catalogue.steps()

    def latest_step(self) -> int | None:
        """The last step whose checkpoint is complete; None if there is none."""
        return self._catalogue.latest()

    def best_step(self) -> int | None:
        """The step that is best by the metric; None if no checkpoint has it.

        Raises:
          ValueError: the manager was not given `best`.
        """
        return self._catalogue.best()

    def record(self, step: int) -> Record:
        """The description of a checkpoint, which is not restored.

        Raises:
          FileNotFoundError: there is none.
          CheckpointError: it is damaged.
        """
        what = self._catalogue.what("read the record of", step)
        self._catalogue.require(step, self._catalogue.named(what))
        return self._catalogue.record(step)

    # Its end.

    def close(self) -> None:
        """Wait, as `wait` does, and end the background threads."""
        self._saver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"CheckpointManager({str(self._catalogue.folder.path)!r})"
