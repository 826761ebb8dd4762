"""The folder that Orbax writes into, and its name in the end: `Unfinished`."""

from __future__ import annotations

import time
from typing import Any, Self, final

import orbax.checkpoint as ocp
from etils import epath

from jaxstrategy.checkpoint.folders._folder import Folder

_types = ocp.path.atomicity_types
_METADATA = "_CHECKPOINT_METADATA"


@final
class Unfinished(_types.TemporaryPath):
    """A folder that exists already, made where all processes learn of a failure.

    Orbax makes it in the background otherwise. If that fails, its other threads wait
    for the folder for 10 minutes, and Python cannot end before (measured with 0.12.8).

    Args:
      path: it; what its name begins with is its name in the end.
      store: writes metadata of Orbax into it.
    """

    def __init__(self, path: epath.Path, store: Any) -> None:
        self._path = path
        self._folder = Folder(path.parent)
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
        return self._folder.final(self._path.name)

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
        self._folder.finish(self._path.name)
