"""Arrays on disk: `AbstractBackend`."""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping

from jaxstrategy.checkpoint.folders._files import Path
from jaxstrategy.checkpoint.folders._record import Record
from jaxstrategy.checkpoint.sorts._entries import (
    Array,
    Reading,
)


class AbstractBackend(abc.ABC):
    """Writes the arrays of one checkpoint at a time, and reads them.

    All else is done elsewhere: which values a state has, how folders are called, which
    of them stay, and whether their files are whole.

    With several processes all of them call the same methods, each with the same names;
    an array has the parts of all processes. If one of them fails, `finish` raises in
    all: `Barrier` tells the others.
    """

    @abc.abstractmethod
    def path_of(self, directory: str | os.PathLike[str]) -> Path:
        """An absolute path, as `etils.epath.Path` is one, to where it writes."""

    @abc.abstractmethod
    def begin(self, folder: Path, arrays: Mapping[str, Array], record: Record) -> None:
        """Begin to write; `arrays` may be donated and overwritten when this returns.

        Args:
          folder: an unfinished one, which exists.
          arrays: by name.
          record: what else is known.

        Raises:
          OSError: it cannot be written.
          ValueError: an array cannot be.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Wait until all processes have written.

        Then the first process has written the record (`_record.write`), which has the
        size of each other file, and after it has given the folder its name
        (`Folder.finish`): there is no checkpoint whose writing was cut.

        Raises:
          Exception: what went wrong, here or in another process.
        """

    @abc.abstractmethod
    def read(self, folder: Path, readings: Mapping[str, Reading]) -> dict[str, Array]:
        """Arrays by name, each read by each device as far as it holds it.

        Args:
          folder: of a checkpoint.
          readings: shapes, dtypes and places by name.

        Raises:
          OSError: a file cannot be read.
          ValueError: a file is not as it should be.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End the background threads."""
