"""A folder of checkpoints: their records and checksums, names, and which of them stay.

The record of a checkpoint, one file of JSON, is written last, before the checkpoint
gets its name, and has the size and checksum of each other file. Orbax notices neither a
flipped bit in an array nor a file that was cut before it reads it. Its formats know
checksums, but it writes none over the numbers (measured with Orbax 0.12, with Zarr 2
and 3, each with and without OCDBT: all of 20 flipped bits gave other numbers, and no
error), and has no option to. And a checksum that is read with its array is read too
late: variables before it were restored.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
import pathlib
import re
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    ParamSpec,
    Self,
    TypeAlias,
    TypeVar,
    final,
)

from jaxstrategy._src.processes.rendezvous import Json, Message
from jaxstrategy._src.text import and_more, array_type, with_noun

if TYPE_CHECKING:
    from etils import epath  # which comes with Orbax

Entry: TypeAlias = dict[str, Any]
Path: TypeAlias = "epath.Path"
PathOrText: TypeAlias = "epath.Path | str"


VERSION = 1
FILE = "jaxstrategy.json"
# Orbax's tools may write these later.
_LATER = {FILE, "_CHECKPOINT_METADATA", "commit_success.txt"}
OTHER_CHECKSUM = "has another checksum than when it was written"
_CHUNK = 2**20
_THREADS = 4


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; earlier ones are as they were.

    >>> import pathlib, tempfile
    >>> import jaxstrategy as js
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> with js.checkpoint.CheckpointManager(folder) as manager:
    ...     _ = manager.save(1, {"w": np.ones(3)})
    ...     manager.wait()
    ...     _ = (folder / "1" / "jaxstrategy.json").write_text("{")
    ...     try:
    ...         manager.restore({"w": np.ones(3)}, step=1)
    ...     except js.checkpoint.CheckpointError as error:
    ...         print(str(error).partition(": ")[2].partition(". ")[0])
    its `jaxstrategy.json` is cut or overwritten
    """


class MismatchError(ValueError):
    """A checkpoint does not hold what was asked of it.

    Attributes:
      missing: names of values that the checkpoint has not.
      unexpected: names of values that only the checkpoint has.
      differing: one sentence for each value of another kind, dtype or shape.

    >>> import tempfile
    >>> import jaxstrategy as js
    >>> with js.checkpoint.CheckpointManager(tempfile.mkdtemp()) as manager:
    ...     _ = manager.save(1, {"w": np.ones(3, np.float32)})
    ...     try:
    ...         manager.restore({"w": np.ones(4, np.float32)})
    ...     except js.checkpoint.MismatchError as error:
    ...         print(error.differing[0])
    `w` is float32[3] in the checkpoint, and float32[4] was wanted
    """

    _NAMED = 8  # of each sort; the others are counted

    def __init__(
        self,
        where: str,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        differing: Sequence[str] = (),
        partial: bool = False,
    ) -> None:
        super().__init__(where, missing, unexpected, differing, partial)
        self._where = where
        self._is_partial = partial
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.differing = tuple(differing)

    def __str__(self) -> str:
        lines = [f"{self._where} does not fit what it is restored into:"]
        lines += self._listed("", self.differing)
        if self._is_partial:  # the rest is as it may be
            return "\n".join(lines)
        lines += self._listed("missing in the checkpoint: ", self.missing)
        # Many more than are missing are no renamed ones, and hide what matters.
        is_other = self.differing or (
            self.missing and len(self.unexpected) > 2 * len(self.missing) + 1
        )
        if self.unexpected and is_other:
            values = with_noun(len(self.unexpected), "value")
            lines.append(f"  only in the checkpoint: {values}")
        else:
            lines += self._listed("only in the checkpoint: ", self.unexpected)
        if not self.differing:
            lines.append(
                "Restore into the structure that was saved, or only what both have: "
                "`restore(..., partial=True)`."
            )
        return "\n".join(lines)

    def _listed(self, head: str, items: Sequence[str]) -> list[str]:
        quote = "`" if head else ""
        lines = [f"  {head}{quote}{item}{quote}" for item in items[: self._NAMED]]
        more = and_more(len(items), self._NAMED, before=f"  {head}")
        return [*lines, more] if more else lines


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint is damaged and an earlier one is used; it says which, and why.

    >>> import pathlib, tempfile, warnings
    >>> import jaxstrategy as js
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> with js.checkpoint.CheckpointManager(folder) as manager:
    ...     saved = [manager.save(step, {"w": np.ones(3)}) for step in (1, 2)]
    ...     manager.wait()
    ...     _ = (folder / "2" / "jaxstrategy.json").write_text("{")
    ...     with warnings.catch_warnings(record=True) as told:
    ...         warnings.simplefilter("always")
    ...         state, step = manager.restore_or_init({"w": np.zeros(3)})
    >>> print(told[0].category.__name__, step)
    DamagedCheckpointWarning 1
    """


class Damage(Exception):
    """A checkpoint cannot be used; the text says why."""

    def __init__(self, text: str, is_unread: bool = False) -> None:
        super().__init__(text)
        self.is_unread = is_unread


@final
@dataclasses.dataclass(frozen=True)
class Record:
    """A description of a checkpoint, which stands beside its arrays.

    Attributes:
      step: its number.
      leaves: for each value, by name, what it is: kind, dtype, shape.
      metrics: that were saved with it.
      extra: what was saved with it as such.
      files: for each file its size in bytes and its checksum.

    >>> import tempfile
    >>> import jaxstrategy as js
    >>> with js.checkpoint.CheckpointManager(tempfile.mkdtemp()) as manager:
    ...     _ = manager.save(7, {"w": np.ones(3)}, metrics={"loss": 0.5})
    ...     manager.wait()
    ...     record = manager.record(7)
    >>> record.leaves["w"], record.metrics
    ({'kind': 'array', 'dtype': 'float64', 'shape': [3]}, {'loss': 0.5})
    """

    step: int
    leaves: dict[str, Entry]
    metrics: dict[str, float]
    extra: Json
    files: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """The record as text."""
        # As it will be read, where numbers that are keys have become text: they sort
        # in another order then, and the checksum would be another.
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        content = json.loads(json.dumps(own))
        told = {"version": VERSION, "crc32": _checksum(content), "content": content}
        return json.dumps(told)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The record that a JSON text describes.

        Raises:
          Damage: it is not what was written.
          CheckpointError: a later version of the library has written it.
        """
        try:
            told = json.loads(text)
            version, checksum = told["version"], told["crc32"]
            content = dict(told["content"])
            found = _checksum(content)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Damage(f"its `{FILE}` is cut or overwritten") from None
        if type(version) is int and version > VERSION:
            raise CheckpointError(
                f"Checkpoint {content.get('step')} has format {version!r}, of a later "
                f"jaxstrategy; this one reads format {VERSION}. Upgrade jaxstrategy, "
                "or use another directory."
            )
        if version != VERSION or checksum != found:
            raise Damage(f"its `{FILE}` has another checksum than when it was written")
        try:
            sums = {name: (size, crc) for name, (size, crc) in content["files"].items()}
            found = cls(**{**content, "files": sums})
        except (TypeError, ValueError, KeyError, AttributeError):
            raise Damage(f"its `{FILE}` was not written by jaxstrategy") from None
        return found


def _checksum(content: Message) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


# Entries: what each value is. Arrays are beside the record, in Orbax's files.

NUMBERS = {"bool": bool, "int": int, "float": float, "complex": complex}


def described(entry: Entry) -> str:
    match entry["kind"]:
        case "array":
            return array_type(entry["dtype"], entry["shape"])
        case "per_replica":
            return versions(entry["dtype"], entry["shape"])
        case "number":
            return f"a Python {entry['type']}"
        case "text":
            return "a string"
    return "the state of an iterator"


def versions(dtype: object, shape: Any) -> str:
    """A `PerReplica` of this type `[replica, ...]`, in words."""
    return f"a PerReplica of {array_type(dtype, shape[1:])} for {shape[0]} replicas"


# Files.


def write(folder: Path, record: Record) -> None:
    names, folders = [], [folder]
    while folders:
        for path in folders.pop().iterdir():
            if path.is_dir():
                folders.append(path)
            elif path.name not in _LATER:
                names.append(str(path.relative_to(folder)))
    names.sort()
    sizes = [(folder / name).stat().length for name in names]
    sums = zip(sizes, checksums(folder, names), strict=True)
    whole = dataclasses.replace(record, files=dict(zip(names, sums, strict=True)))
    (folder / FILE).write_text(whole.to_json())


def verify(folder: Path, record: Record, share: int, shares: int) -> None:
    names = sorted(record.files)[share::shares]
    for name, checksum in zip(names, checksums(folder, names), strict=True):
        if checksum != record.files[name][1]:
            raise Damage(f"its file `{name}` {OTHER_CHECKSUM}")


def checksums(folder: Path | pathlib.Path, names: Sequence[str]) -> list[int]:
    def crc32(name: str) -> int:
        checksum = 0
        with (folder / name).open("rb") as file:
            while chunk := file.read(_CHUNK):
                checksum = zlib.crc32(chunk, checksum)
        return checksum

    # Some at once: zlib and reading let other threads run.
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(crc32, names))


# What is asked of the disk.

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
