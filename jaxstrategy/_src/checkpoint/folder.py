"""A folder of checkpoints: what is asked of the disk, names, and which of them stay."""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import pathlib
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Concatenate, ParamSpec, TypeVar, final

from jaxstrategy._src.checkpoint.record import FILE, Damage, Path, PathOrText, Record

_P = ParamSpec("_P")
_S = TypeVar("_S")
_T = TypeVar("_T")

# What network file systems say of what they can do a moment later.
_TRANSIENT = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.EIO,
    errno.ENOTEMPTY,  # NFS keeps a deleted file that is open, for a while
    errno.ESTALE,
    errno.ETIMEDOUT,
}
_PAUSES = (0.05, 0.2, 1.0)  # seconds before further attempts
# Errors of a file that is no such file, and not of a disk that does not answer.
_NO_FILE = {
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
}


def _retried(
    method: Callable[Concatenate[_S, _P], _T],
) -> Callable[Concatenate[_S, _P], _T]:
    """`method`, called again after an error that may pass."""

    @functools.wraps(method)
    def again(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        for seconds in _PAUSES:
            try:
                return method(self, *args, **kwargs)
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    raise
            time.sleep(seconds)
        return method(self, *args, **kwargs)

    return again


@final
class LocalFiles:
    """Files of the operating system, network file systems included."""

    @_retried
    def names(self, folder: PathOrText) -> list[str]:
        """The names in a folder; none if it is no folder."""
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    @_retried
    def make(self, folder: PathOrText) -> None:
        """Makes a folder, and those above it; it may exist."""
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)

    def rename(self, old: PathOrText, new: PathOrText) -> None:
        """Gives a folder another name, under which nothing is yet."""
        self._rename(old, new, self.version(old))

    @_retried
    def _rename(self, old: PathOrText, new: PathOrText, before: Hashable) -> None:
        try:
            # POSIX puts a folder in the place of an empty one, without an error.
            if os.path.lexists(new):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
            os.rename(old, new)
        except OSError:
            # A server may do it and lose its answer; asked again, it says that there
            # is no such folder.
            with contextlib.suppress(OSError):
                if self.version(new) == before:
                    return
            raise

    @_retried
    def remove(self, path: PathOrText) -> None:
        """Deletes it with all that is in it; of a link, the link. It may be gone."""
        try:
            is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
            shutil.rmtree(path) if is_folder else os.unlink(path)
        except FileNotFoundError:
            if os.path.lexists(path):  # a file in it was gone; the rest is there
                raise

    @_retried
    def size(self, path: PathOrText) -> int:
        return os.stat(path).st_size

    @_retried
    def text(self, path: PathOrText) -> str:
        # To open a pipe otherwise would wait for its other end.
        def opened(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NONBLOCK)

        with open(path, encoding="utf-8", opener=opened) as file:
            return file.read()

    @_retried
    def version(self, path: PathOrText) -> Hashable:
        """Another value when the file or folder is another one, or was changed."""
        try:
            found = os.stat(path)
        except OSError:  # a link to nothing can be renamed, too
            found = os.lstat(path)
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


@final
class CloudFiles:
    """The same for files of cloud storage (`gs://...`), which has no links."""

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        self._path_of = path_of

    def _of(self, path: PathOrText) -> Path:
        return self._path_of(os.fspath(path))

    @_retried
    def names(self, folder: PathOrText) -> list[str]:
        try:
            return [path.name for path in self._of(folder).iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    @_retried
    def make(self, folder: PathOrText) -> None:
        self._of(folder).mkdir(parents=True, exist_ok=True)

    @_retried
    def rename(self, old: PathOrText, new: PathOrText) -> None:
        self._of(old).rename(self._of(new))

    @_retried
    def remove(self, path: PathOrText) -> None:
        found = self._of(path)
        if found.exists():
            found.rmtree() if found.is_dir() else found.unlink()

    @_retried
    def size(self, path: PathOrText) -> int:
        return self._of(path).stat().length

    @_retried
    def text(self, path: PathOrText) -> str:
        return self._of(path).read_text()

    @_retried
    def version(self, path: PathOrText) -> Hashable:
        found = self._of(path).stat()
        return found.length, found.mtime


def files_of(path: Path) -> LocalFiles | CloudFiles:
    return CloudFiles(type(path)) if "://" in os.fspath(path) else LocalFiles()


# As `str` writes numbers: `007` and digits of other scripts are names like any other.
_STEP = re.compile("0|[1-9][0-9]*")
# What is being written has such a name, and is renamed when all is there; Orbax looks
# for it. What is being deleted was renamed before.
_WRITING = ".orbax-checkpoint-tmp"
_UNFINISHED = re.compile(
    rf"({_STEP.pattern})({re.escape(_WRITING)}.*|(\.[0-9a-f]+)?\.deleted)"
)


@final
class Folder:
    """Checkpoints, each in a folder named like its step.

    Attributes:
      damaged: steps whose checkpoints have turned out to be damaged.
    """

    def __init__(self, path: Path, best: tuple[str, str] | None) -> None:
        self.path = path
        self.damaged: set[int] = set()
        self._files = files_of(path)
        # A thousand paths take longer to put together than to ask the disk for.
        self._base = os.fspath(path)
        self._best = best
        # What was complete when it was looked at last.
        self._read: dict[int, tuple[Hashable, Record]] = {}

    def steps(self) -> list[int]:
        """Steps for which there is something, good or not, in order."""
        names = self._files.names(self.path)
        return sorted(map(int, filter(_STEP.fullmatch, names)))

    def has(self, name: str) -> bool:
        """Whether anything has that name; not if the disk does not say."""
        try:
            return name in self._files.names(self.path)
        except OSError:
            return False

    def record(self, step: int, is_known: bool = False) -> Record:
        """The record of `step`, all of whose files are there in their sizes.

        With `is_known` it is read only if it is another than the last time.

        Raises:
          Damage: they are not.
        """
        folder = f"{self._base}/{step}"
        version, (before, record) = None, self._read.pop(step, (None, None))
        with contextlib.suppress(OSError):
            version = self._files.version(f"{folder}/{FILE}")
        if record is None or not is_known or version is None or before != version:
            record = self._record_in(folder)
            if record.step != step:
                raise Damage(f"it is the checkpoint of step {record.step}, renamed")
        for name, (size, _) in record.files.items():
            try:
                found = self._files.size(f"{folder}/{name}")
            except (FileNotFoundError, ValueError):
                raise Damage(f"its file `{name}` is missing") from None
            except OSError as error:
                is_unread = error.errno not in _NO_FILE
                told = f"its file `{name}` cannot be read: {error}"
                raise Damage(told, is_unread) from None
            if found != size:
                raise Damage(f"its file `{name}` has {found} bytes instead of {size}")
        self._read[step] = version, record
        return record

    def _record_in(self, folder: str) -> Record:
        try:
            text = self._files.text(f"{folder}/{FILE}")
        except FileNotFoundError:
            raise Damage(
                f"it has no `{FILE}`: it was not written to its end, or not by "
                "jaxstrategy"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_FILE:
                raise Damage(f"its `{FILE}` cannot be read: {error}", True) from None
            raise Damage(f"its `{FILE}` is cut or overwritten") from None
        return Record.from_json(text)

    def good_record(self, step: int) -> Record | None:
        """The record of a complete checkpoint that is not known to be damaged."""
        if step not in self.damaged:
            with contextlib.suppress(Damage):
                return self.record(step, is_known=True)
        return None

    def latest(self) -> int | None:
        for step in reversed(self.steps()):
            if self.good_record(step) is not None:
                return step
        return None

    def good(self) -> dict[int, Record]:
        found = {step: self.good_record(step) for step in self.steps()}
        return {step: record for step, record in found.items() if record is not None}

    def begin(self, step: int) -> str:
        """Makes room for a checkpoint; the name of a new folder to write it into."""
        self._files.make(self.path)
        names = self._files.names(self.path)
        for name in filter(_UNFINISHED.fullmatch, names):
            self._files.remove(self.path / name)
        for name in filter(_STEP.fullmatch, names):
            if self._is_in_the_way(int(name)):
                aside = f"{name}.damaged"
                while aside in names:
                    aside += "-again"
                self._files.rename(self.path / name, self.path / aside)
        name = f"{step}{_WRITING}-{secrets.token_hex(4)}"
        self._files.make(self.path / name)
        return name

    def _is_in_the_way(self, step: int) -> bool:
        """Whether something that is no good checkpoint has the name of one."""
        if step in self.damaged:
            return True
        if step in self._read:
            return False
        try:
            self.record(step)
        except Damage as damage:
            return not damage.is_unread
        return False

    def delete(self, step: int) -> None:
        self._read.pop(step, None)
        # Renamed first: what is left if this is killed is no checkpoint.
        left = self.path / f"{step}.{secrets.token_hex(4)}.deleted"
        try:
            self._files.rename(self.path / str(step), left)
        except FileNotFoundError:
            return
        self._files.remove(left)

    # Which checkpoints stay is decided here. Orbax's `LatestN` and `BestN` know less: a
    # NaN among the metrics hides the best checkpoint from them (0.12: of 0.9, NaN and
    # 0.1 they keep 0.1), a missing metric is a `KeyError`, they go by times, though
    # clocks may go backwards, and know no damaged checkpoints, which must not push out
    # good ones.

    def best(self, records: Mapping[int, Record]) -> int | None:
        """The best of these, the latest of equal ones; None if none has the metric."""
        if self._best is None:
            return None
        metric, mode = self._best
        sign = 1 if mode == "max" else -1
        ranked = [
            (sign * record.metrics[metric], step)
            for step, record in records.items()
            if not math.isnan(record.metrics.get(metric, math.nan))
        ]
        return max(ranked)[1] if ranked else None

    def delete_old(self, keep: int) -> None:
        """Deletes what is neither among the last `keep` nor the best."""
        records = self.good()
        best = self.best(records)
        for step in list(records)[:-keep]:
            if step != best:
                self.delete(step)
