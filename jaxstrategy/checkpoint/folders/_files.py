"""Operations on files and folders: `AbstractFiles`, and the disks there are."""

from __future__ import annotations

import abc
import errno
import os
import pathlib
import shutil
import stat
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, TypeAlias, TypeVar, final

if TYPE_CHECKING:
    from etils import epath  # which comes with Orbax

Path: TypeAlias = "epath.Path"
# A thousand paths take longer to put together than to ask the disk for, texts do not.
PathOrText: TypeAlias = "epath.Path | str"

_T = TypeVar("_T")


class AbstractFiles(abc.ABC):
    """Operations on files and folders; all may raise `OSError`."""

    @abc.abstractmethod
    def names(self, folder: PathOrText) -> list[str]:
        """The names in a folder; none if it is no folder."""

    @abc.abstractmethod
    def make(self, folder: PathOrText) -> None:
        """Make a folder, and those above it; it may exist."""

    @abc.abstractmethod
    def rename(self, old: PathOrText, new: PathOrText) -> None:
        """Give a folder another name, under which nothing is yet."""

    @abc.abstractmethod
    def remove(self, path: PathOrText) -> None:
        """Delete it with all that is in it; of a link, the link. It may be gone."""

    @abc.abstractmethod
    def size(self, path: PathOrText) -> int:
        """The size of a file in bytes."""

    @abc.abstractmethod
    def text(self, path: PathOrText) -> str:
        """The text in a file."""

    @abc.abstractmethod
    def version(self, path: PathOrText) -> Hashable:
        """Another value when the file or folder is another one, or was changed."""


@final
class LocalFiles(AbstractFiles):
    """Files of the operating system, network file systems included."""

    def names(self, folder: PathOrText) -> list[str]:
        """The names in a folder; none if it is no folder."""
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make(self, folder: PathOrText) -> None:
        """Make a folder, and those above it; it may exist."""
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)

    def rename(self, old: PathOrText, new: PathOrText) -> None:
        """Give a folder another name, under which nothing is yet."""
        # POSIX puts a folder in the place of an empty one, without an error.
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        os.rename(old, new)

    def remove(self, path: PathOrText) -> None:
        """Delete it with all that is in it; of a link, the link. It may be gone."""
        try:
            is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
            shutil.rmtree(path) if is_folder else os.unlink(path)
        except FileNotFoundError:
            if os.path.lexists(path):  # a file in it was gone; the rest is there
                raise

    def size(self, path: PathOrText) -> int:
        """The size of a file in bytes."""
        return _regular(os.stat(path), path).st_size

    def text(self, path: PathOrText) -> str:
        """The text in a file."""
        # To open a pipe otherwise would wait for its other end.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            size = _regular(os.fstat(file), path).st_size
            parts = []
            while part := os.read(file, size + 1):
                parts.append(part)
            return b"".join(parts).decode()
        finally:
            os.close(file)

    def version(self, path: PathOrText) -> Hashable:
        """Another value when the file or folder is another one, or was changed."""
        try:
            found = os.stat(path)
        except OSError:  # a link to nothing can be renamed, too
            found = os.lstat(path)
        return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _regular(found: os.stat_result, path: PathOrText) -> os.stat_result:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return found


@final
class CloudFiles(AbstractFiles):
    """Files of cloud storage (`gs://...`), which has no links.

    Args:
      path_of: makes an `etils.epath.Path` of its text.
    """

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        self._path_of = path_of

    def names(self, folder: PathOrText) -> list[str]:
        """The names in a folder; none if it is no folder."""
        try:
            return [path.name for path in self._of(folder).iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make(self, folder: PathOrText) -> None:
        """Make a folder, and those above it; it may exist."""
        self._of(folder).mkdir(parents=True, exist_ok=True)

    def rename(self, old: PathOrText, new: PathOrText) -> None:
        """Give a folder another name, under which nothing is yet."""
        self._of(old).rename(self._of(new))

    def remove(self, path: PathOrText) -> None:
        """Delete it with all that is in it. It may be gone."""
        found = self._of(path)
        if found.exists():
            found.rmtree() if found.is_dir() else found.unlink()

    def size(self, path: PathOrText) -> int:
        """The size of a file in bytes."""
        return self._of(path).stat().length

    def text(self, path: PathOrText) -> str:
        """The text in a file."""
        return self._of(path).read_text()

    def version(self, path: PathOrText) -> Hashable:
        """Another value when the file or folder is another one, or was changed."""
        found = self._of(path).stat()
        return found.length, found.mtime

    def _of(self, path: PathOrText) -> Path:
        return self._path_of(os.fspath(path))


# What network file systems say of what they can do a moment later.
_PASSING = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.EIO,
    errno.ENOTEMPTY,  # NFS keeps a deleted file that is open, for a while
    errno.ESTALE,
    errno.ETIMEDOUT,
}
_PAUSES = (0.05, 0.2, 1.0)  # seconds before further attempts


@final
class PatientFiles(AbstractFiles):
    """Files of another disk; what fails for a passing reason is tried again.

    Args:
      files: the others.
      pause: waits for so many seconds.
    """

    def __init__(
        self, files: AbstractFiles, pause: Callable[[float], object] = time.sleep
    ) -> None:
        self._files = files
        self._pause = pause

    def names(self, folder: PathOrText) -> list[str]:
        """The names in a folder; none if it is no folder."""
        return self._again(lambda: self._files.names(folder))

    def make(self, folder: PathOrText) -> None:
        """Make a folder, and those above it; it may exist."""
        self._again(lambda: self._files.make(folder))

    def rename(self, old: PathOrText, new: PathOrText) -> None:
        """Give a folder another name, under which nothing is yet."""
        before = self._again(lambda: self._files.version(old))

        def rename() -> None:
            try:
                self._files.rename(old, new)
            except OSError:
                # A server may do it and lose its answer; asked again, it says that
                # there is no such folder.
                if not self._is(new, before):
                    raise

        self._again(rename)

    def _is(self, path: PathOrText, version: Hashable) -> bool:
        try:
            return self._files.version(path) == version
        except OSError:
            return False

    def remove(self, path: PathOrText) -> None:
        """Delete it with all that is in it; of a link, the link. It may be gone."""
        self._again(lambda: self._files.remove(path))

    def size(self, path: PathOrText) -> int:
        """The size of a file in bytes."""
        return self._again(lambda: self._files.size(path))

    def text(self, path: PathOrText) -> str:
        """The text in a file."""
        return self._again(lambda: self._files.text(path))

    def version(self, path: PathOrText) -> Hashable:
        """Another value when the file or folder is another one, or was changed."""
        return self._again(lambda: self._files.version(path))

    def _again(self, work: Callable[[], _T]) -> _T:
        for seconds in _PAUSES:
            try:
                return work()
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
            self._pause(seconds)
        return work()


def files_of(path: Path) -> AbstractFiles:
    """The operations for a folder, by where it is."""
    is_cloud = "://" in os.fspath(path)
    return PatientFiles(CloudFiles(type(path)) if is_cloud else LocalFiles())
