"""Arrays on disk by Orbax, which no other file imports.

Orbax's checkpointers, which would also make the folder and give it its name, are not
used: a process that fails tells no other, and the record, with the checksums of all
files, has to be there before the name is.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxstrategy._src.checkpoint import agreement
from jaxstrategy._src.checkpoint.folder import Path, Record, files_of, write
from jaxstrategy._src.checkpoint.state import Array, Reading

_NOTHING = "nothing"  # Orbax writes at least one array


@final
class OrbaxBackend:
    """Writes and reads arrays with Orbax, whose tools can read them, too."""

    def __init__(self) -> None:
        # Made with the first checkpoint, because it asks JAX for the devices: until
        # then the processes may not know each other.
        self._handler: ocp.PyTreeCheckpointHandler | None = None
        self._commits: Sequence[Any] = ()
        self._began = 0  # nanoseconds

    def path_of(self, directory: str | os.PathLike[str]) -> epath.Path:
        path = epath.Path(directory).expanduser()
        return path if "://" in str(directory) else path.absolute()

    def begin(self, folder: Path, arrays: Mapping[str, Array]) -> None:
        """Begin to write; `arrays` may be donated and overwritten when this returns."""
        self._began = time.time_ns()
        self._announce(f"checkpoint {folder}")
        if self._handler is None:
            # Of trained numbers zstd, Orbax's default, saves less than a tenth, and to
            # save and to restore them takes the processor 1.8 and 1.6 times as long
            # (100 MB, Orbax 0.12.8).
            self._handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        args = ocp.args.PyTreeSave(dict(arrays) or {_NOTHING: np.zeros(1, np.uint8)})
        with contextlib.ExitStack() as unless_begun:
            unless_begun.callback(self._end)
            copied = self._handler.async_save(epath.Path(folder), args=args)
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                self._commits = asyncio.run(copied) or ()
            else:  # in a notebook: this thread runs a loop already
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    self._commits = pool.submit(asyncio.run, copied).result() or ()
            unless_begun.pop_all()

    def finish(self, folder: Path, final: Path, record: Record) -> None:
        """Wait until it is written, and give it its name.

        Raises:
          ElsewhereError: another process could not.
        """

        def written() -> None:
            for each in self._commits:
                each.result()

        def complete() -> None:
            if jax.process_index() != 0:
                return
            assert self._handler is not None, "it has begun"
            self._handler.finalize(epath.Path(folder))
            # Orbax's own tools look for these.
            times = {"init": self._began, "commit": time.time_ns()}
            told = {f"{name}_timestamp_nsecs": each for name, each in times.items()}
            (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(told))
            success = f"Checkpoint commit was successful to {final}"
            (folder / "commit_success.txt").write_text(success)
            write(folder, record)
            files_of(folder).rename(folder, final)

        try:
            name = f"checkpoint {folder}"
            agreement.together(name, written, writes=name)
            agreement.together(name, complete, writes=name)
        finally:
            self._end()

    def _end(self) -> None:
        self._commits = ()
        self._announce(None)

    def _announce(self, what: str | None) -> None:
        if (processes := agreement.current()) is not None:
            processes.watchdog.writes = what

    def read(self, folder: Path, readings: Mapping[str, Reading]) -> dict[str, Array]:
        """Arrays by name, each read by each device as far as it holds it."""
        if not readings:
            return {}
        item = {
            name: jax.ShapeDtypeStruct(reading.shape, reading.dtype)
            for name, reading in readings.items()
        }
        how = {
            name: ocp.RestoreArgs(restore_type=np.ndarray)
            if reading.sharding is None
            else ocp.ArrayRestoreArgs(
                sharding=reading.sharding,
                global_shape=reading.shape,
                dtype=reading.dtype,
            )
            for name, reading in readings.items()
        }
        # The names were compared with the record before: Orbax reads what is wanted.
        args = ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True)
        with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            return dict(handler.restore(folder, args=args))

    def close(self) -> None:
        if self._handler is not None:
            self._handler.close()
