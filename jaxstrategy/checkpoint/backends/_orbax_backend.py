"""Arrays on disk by Orbax, which no other file than those of this folder imports."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import Any, final

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxstrategy._errors import ClusterError
from jaxstrategy.checkpoint.backends._backend import AbstractBackend
from jaxstrategy.checkpoint.backends._unfinished import Unfinished
from jaxstrategy.checkpoint.folders import _record
from jaxstrategy.checkpoint.folders._files import Path
from jaxstrategy.checkpoint.folders._record import Record
from jaxstrategy.checkpoint.processes import _checkpoint_agreement
from jaxstrategy.checkpoint.processes._barrier import (
    Barrier,
    ElsewhereError,
)
from jaxstrategy.checkpoint.sorts._entries import (
    Array,
    Reading,
)

_NOTHING = "nothing"  # Orbax writes at least one array
_MOST_SECONDS = 1200  # to write a checkpoint; Orbax's own choice


@final
class Handler(ocp.PyTreeCheckpointHandler):
    """Writes arrays as Orbax does, then the record; then the folder gets its name."""

    _record: Record

    # Its other arguments differ from one version of Orbax to the next.
    async def async_save(self, directory: Any, *_: Any, args: Any, **__: Any) -> Any:
        """Begin to write; the arrays may be changed when this returns."""
        self._record = args.record
        return await super().async_save(directory, args=args.arrays)

    def finalize(self, directory: epath.Path) -> None:
        """Called in the first process when all of them have written their arrays."""
        super().finalize(directory)
        _record.write(directory, self._record)


@ocp.args.register_with_handler(Handler, for_save=True, for_restore=True)
@dataclasses.dataclass
class ToSave(ocp.args.CheckpointArgs):
    """The arguments of a handler.

    Attributes:
      arrays: for Orbax.
      record: what else is known.
    """

    arrays: ocp.args.PyTreeSave
    record: Record


@final
class OrbaxBackend(AbstractBackend):
    """Writes and reads arrays with Orbax, whose tools can read them, too."""

    def __init__(self) -> None:
        # Made with the first checkpoint: until then the processes may not have met.
        self._checkpointer: ocp.AsyncCheckpointer | None = None
        self._barrier: Barrier | None = None

    def path_of(self, directory: str | os.PathLike[str]) -> epath.Path:
        """A folder here, or on cloud storage (`gs://...`)."""
        path = epath.Path(directory).expanduser()
        return path if "://" in str(directory) else path.absolute()

    def begin(self, folder: Path, arrays: Mapping[str, Array], record: Record) -> None:
        """Begin to write; `arrays` may be donated and overwritten when this returns."""
        tree = dict(arrays) or {_NOTHING: np.zeros(1, np.uint8)}
        args = ToSave(ocp.args.PyTreeSave(tree), record)
        checkpointer = self._checkpointer = self._checkpointer or self._made()
        if self._barrier is not None:
            self._barrier.begin(str(folder))
        with contextlib.ExitStack() as unless_begun:
            unless_begun.callback(self._end)
            checkpointer.save(folder, args=args)
            unless_begun.pop_all()

    def _made(self) -> ocp.AsyncCheckpointer:
        processes = _checkpoint_agreement.current()
        self._barrier = None if processes is None else Barrier(processes)
        meet = None if self._barrier is None else self._barrier.meet
        options = ocp.AsyncOptions(
            _MOST_SECONDS,
            barrier_sync_fn=meet,
            create_directories_asynchronously=False,  # they are there
        )
        # Of trained numbers zstd, Orbax's default, saves less than a tenth, and to save
        # and to restore them takes the processor 1.8 and 1.6 times as long
        # (100 MB, Orbax 0.12.8).
        return ocp.AsyncCheckpointer(
            Handler(use_compression=False),
            async_options=options,
            temporary_path_class=Unfinished,
        )

    def finish(self) -> None:
        """Wait until it is written; raises what went wrong, here or elsewhere."""
        assert self._checkpointer is not None, "it has begun"
        try:
            self._checkpointer.wait_until_finished()
        except (ElsewhereError, ClusterError):
            raise  # the others know
        except Exception as error:  # any error: the others wait for this process
            if self._barrier is not None:
                with contextlib.suppress(ClusterError):
                    self._barrier.fail(error, _MOST_SECONDS)
            raise
        finally:
            self._end()

    def _end(self) -> None:
        if self._barrier is not None:
            self._barrier.end()

    def read(self, folder: Path, readings: Mapping[str, Reading]) -> dict[str, Array]:
        """Arrays by name, each read by each device as far as it holds it."""
        if not readings:
            return {}
        item = {
            name: jax.ShapeDtypeStruct(reading.shape, reading.dtype)
            for name, reading in readings.items()
        }
        how = {name: _how(reading) for name, reading in readings.items()}
        # The names were compared with the record before: Orbax reads what is wanted.
        args = ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True)
        handler = ocp.PyTreeCheckpointHandler()
        try:
            return dict(handler.restore(folder, args=args))
        finally:
            handler.close()

    def close(self) -> None:
        """End the background threads."""
        if self._checkpointer is not None:
            self._checkpointer.close()


def _how(reading: Reading) -> ocp.RestoreArgs:
    if reading.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(
        sharding=reading.sharding, global_shape=reading.shape, dtype=reading.dtype
    )
