"""Arrays on disk by Orbax, which no other file imports."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any, Self, final

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxstrategy._src.checkpoint import (
    agreement as _agreement,
    record as _record,
)
from jaxstrategy._src.checkpoint.agreement import first_line
from jaxstrategy._src.checkpoint.folder import files_of, named_in_the_end
from jaxstrategy._src.checkpoint.handlers import Array, Reading
from jaxstrategy._src.checkpoint.record import Path, Record
from jaxstrategy._src.errors import ClusterError
from jaxstrategy._src.processes.job import Processes

_types = ocp.path.atomicity_types
_METADATA = "_CHECKPOINT_METADATA"


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
    """The arguments of a handler."""

    arrays: ocp.args.PyTreeSave
    record: Record


@final
class OrbaxBackend:
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
        processes = _agreement.current()
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


@final
class Unfinished(_types.TemporaryPath):
    """A folder that exists already, made where all processes learn of a failure."""

    def __init__(self, path: epath.Path, store: Any) -> None:
        self._path = path
        self._store = store

    @classmethod
    def from_final(
        cls, final_path: epath.Path, *, checkpoint_metadata_store: Any = None, **_: Any
    ) -> Self:
        """The folder at `final_path`, which is what Orbax was told to write."""
        return cls(final_path, checkpoint_metadata_store)

    @classmethod
    def from_temporary(cls, temporary_path: epath.Path, **_: Any) -> Self:
        """The folder at `temporary_path`."""
        return cls(temporary_path, None)

    @classmethod
    async def validate(cls, temporary_path: epath.Path) -> None:
        """Nothing is wrong with it."""

    @classmethod
    async def validate_final(cls, final_path: epath.Path) -> None:
        """Nothing is wrong with it."""

    def get(self) -> epath.Path:
        """The path that Orbax writes to."""
        return self._path

    def get_final(self) -> epath.Path:
        """The path at the end."""
        return named_in_the_end(self._path)

    async def create(self) -> epath.Path:
        """Make the file in which Orbax keeps its times; the folder is there."""
        if self._store is not None:
            now = {"init_timestamp_nsecs": time.time_ns()}
            self._store.write(self._path / _METADATA, now)
        return self._path

    async def finalize(self) -> None:
        """Give it its name; called in the first process, in the background."""
        if self._store is not None:
            now = time.time_ns()
            self._store.update(self._path / _METADATA, commit_timestamp_nsecs=now)
            self._store.wait_until_finished()
        mark = self._path / _types.COMMIT_SUCCESS_FILE  # so Orbax does it
        mark.write_text(f"Checkpoint commit was successful to {self.get_final()}")
        files_of(self._path).rename(self._path, self.get_final())


class ElsewhereError(OSError):
    """Another process could not write its part; the text says which, and why."""


@final
class Barrier:
    """Lets all processes fail when one of them does."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._watchdog = processes.watchdog
        self._name = ""

    def begin(self, name: str) -> None:
        """From now on they meet because of this checkpoint."""
        self._name = f"checkpoint {name}"
        self._watchdog.writes = self._name

    def end(self) -> None:
        """Nothing is written any more."""
        self._watchdog.writes = None

    def meet(self, *, key: str, timeout_ms: int) -> None:
        """Wait for all, as Orbax asks for it."""
        del key  # one for all: who fails does not know where the others are
        self._gather(None, timeout_ms / 1000)

    def fail(self, error: Exception, timeout_seconds: float) -> None:
        """Tell the others where they wait; raises as `meet` does."""
        self._gather(first_line(error), timeout_seconds)

    def _gather(self, failure: str | None, seconds: float) -> None:
        self._watchdog.writes = None  # this process waits for those that still do
        agreement = self._processes.agreement(self._name)
        told = agreement.exchange(failure, seconds)
        self._watchdog.writes = self._name
        for process, reason in enumerate(told):
            if reason is not None and failure is None:
                raise ElsewhereError(f"process {process}: {reason}")
