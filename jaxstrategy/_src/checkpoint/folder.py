"""A folder of checkpoints: what is asked of the disk, names, and which of them stay."""

from __future__ import annotations

import contextlib
import dataclasses
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
from typing import (
    Concatenate,
    ParamSpec,
    Self,
    TypeAlias,
    TypeVar,
    final,
)

from jaxstrategy._src.checkpoint import agreement, record as _record
from jaxstrategy._src.checkpoint.record import (
    CheckpointError,
    Damage,
    Path,
    PathOrText,
    Record,
)

_P = ParamSpec("_P")
_S = TypeVar("_S")
_T = TypeVar("_T")

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


def _patient(
    method: Callable[Concatenate[_S, _P], _T],
) -> Callable[Concatenate[_S, _P], _T]:
    """`method`, called again when it fails for a passing reason."""

    @functools.wraps(method)
    def again(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        for seconds in _PAUSES:
            try:
                return method(self, *args, **kwargs)
            except OSError as error:
                if error.errno not in _PASSING:
                    raise
            time.sleep(seconds)
        return method(self, *args, **kwargs)

    return again


@final
class LocalFiles:
    """Files of the operating system, network file systems included."""

    @_patient
    def names(self, folder: PathOrText) -> list[str]:
        """The names in a folder; none if it is no folder."""
        try:
            return os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    @_patient
    def make(self, folder: PathOrText) -> None:
        """Makes a folder, and those above it; it may exist."""
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)

    def rename(self, old: PathOrText, new: PathOrText) -> None:
        """Gives a folder another name, under which nothing is yet."""
        before = self.version(old)
        self._rename(old, new, before)

    @_patient
    def _rename(self, old: PathOrText, new: PathOrText, before: Hashable) -> None:
        try:
            # POSIX puts a folder in the place of an empty one, without an error.
            if os.path.lexists(new):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
            os.rename(old, new)
        except OSError:
            # A server may do it and lose its answer; asked again, it says that there
            # is no such folder.
            if not self._is(new, before):
                raise

    def _is(self, path: PathOrText, version: Hashable) -> bool:
        try:
            return self.version(path) == version
        except OSError:
            return False

    @_patient
    def remove(self, path: PathOrText) -> None:
        """Deletes it with all that is in it; of a link, the link. It may be gone."""
        try:
            is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
            shutil.rmtree(path) if is_folder else os.unlink(path)
        except FileNotFoundError:
            if os.path.lexists(path):  # a file in it was gone; the rest is there
                raise

    @_patient
    def size(self, path: PathOrText) -> int:
        """The size of a file in bytes."""
        return _regular(os.stat(path), path).st_size

    @_patient
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

    @_patient
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
class CloudFiles:
    """Files of cloud storage (`gs://...`), which has no links."""

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        self._path_of = path_of

    def _of(self, path: PathOrText) -> Path:
        return self._path_of(os.fspath(path))

    @_patient
    def names(self, folder: PathOrText) -> list[str]:
        """The names in a folder; none if it is no folder."""
        try:
            return [path.name for path in self._of(folder).iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    @_patient
    def make(self, folder: PathOrText) -> None:
        """Makes a folder, and those above it; it may exist."""
        self._of(folder).mkdir(parents=True, exist_ok=True)

    @_patient
    def rename(self, old: PathOrText, new: PathOrText) -> None:
        """Gives a folder another name, under which nothing is yet."""
        self._of(old).rename(self._of(new))

    @_patient
    def remove(self, path: PathOrText) -> None:
        """Deletes it with all that is in it. It may be gone."""
        found = self._of(path)
        if found.exists():
            found.rmtree() if found.is_dir() else found.unlink()

    @_patient
    def size(self, path: PathOrText) -> int:
        """The size of a file in bytes."""
        return self._of(path).stat().length

    @_patient
    def text(self, path: PathOrText) -> str:
        """The text in a file."""
        return self._of(path).read_text()

    @_patient
    def version(self, path: PathOrText) -> Hashable:
        """Another value when the file or folder is another one, or was changed."""
        found = self._of(path).stat()
        return found.length, found.mtime


Files: TypeAlias = LocalFiles | CloudFiles


def files_of(path: Path) -> Files:
    """The operations for a folder, by where it is."""
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
    """Checkpoints, each in a folder named like its step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = files_of(path)
        self._base = os.fspath(path)
        self._known: set[int] = set()
        self._read: dict[int, tuple[Hashable, Record]] = {}

    def of(self, step: int) -> Path:
        """The path of the checkpoint of `step`."""
        return self.path / str(step)

    def _text(self, step: int) -> str:
        return f"{self._base}/{step}"

    def named(self) -> list[int]:
        """Steps for which there is something, good or not, in order."""
        return sorted(int(name) for name in self._names() if _STEP.fullmatch(name))

    def has(self, name: str) -> bool:
        """Whether anything has that name; not if the disk does not say."""
        try:
            return name in self._names()
        except OSError:
            return False

    def _names(self) -> list[str]:
        return self.files.names(self.path)

    def records(self) -> dict[int, Record]:
        """The complete checkpoints, in order."""
        found = {}
        for step in self.named():
            try:
                found[step] = self._seen(step)
            except Damage:
                continue
        return found

    def _seen(self, step: int) -> Record:
        """The record of `step`, read only if it is another than the last time."""
        folder = self._text(step)
        try:
            version = self.files.version(f"{folder}/{_record.FILE}")
        except OSError:
            return self.record(step)
        before, record = self._read.get(step, (None, None))
        if record is None or before != version:
            record = self.record(step)
            self._read[step] = version, record
        else:
            _record.check_sizes(self.files, folder, record)
        return record

    def record(self, step: int) -> Record:
        """The record of `step`."""
        record = _record.read(self.files, self._text(step))
        if record.step != step:
            raise Damage(f"it is the checkpoint of step {record.step}, renamed")
        return record

    def newest(self, damaged: set[int]) -> int | None:
        """The last step whose checkpoint is complete now, in `records`."""
        for step in reversed(self.named()):
            if step not in damaged:
                with contextlib.suppress(Damage):
                    self._seen(step)
                    return step
        return None

    def latest(self, damaged: set[int]) -> int | None:
        """The last step whose checkpoint was complete when it was first looked at."""
        for step in reversed(self.named()):
            if step not in damaged and self._was_complete(step):
                return step
        return None

    def _was_complete(self, step: int) -> bool:
        if step not in self._known:
            try:
                self.record(step)
            except Damage:
                return False
            self._known.add(step)
        return True

    def begin(self, step: int, damaged: set[int]) -> str:
        """Make room for a checkpoint, and a folder to write it into."""
        self.files.make(self.path)
        for name in self._names():
            if _UNFINISHED.fullmatch(name):
                self.files.remove(self.path / name)
        for other in self.named():
            if other in damaged or self._is_in_the_way(other):
                self._set_aside(other)
        name = f"{step}{_WRITING}-{secrets.token_hex(4)}"
        self.files.make(self.path / name)
        return name

    def _is_in_the_way(self, step: int) -> bool:
        if step in self._known:
            return False
        try:
            self.record(step)
        except Damage as damage:
            return not damage.is_unread
        self._known.add(step)
        return False

    def _set_aside(self, step: int) -> None:
        self._known.discard(step)
        taken = set(self._names())
        name = f"{step}.damaged"
        while name in taken:
            name += "-again"
        self.files.rename(self.of(step), self.path / name)

    def finish(self, name: str) -> None:
        """Give what was written into the folder of that name its name in the end."""
        self.files.rename(self.path / name, self.final(name))

    def final(self, name: str) -> Path:
        """The final path of the checkpoint that is written under that name."""
        return self.path / name.partition(".")[0]

    def delete(self, step: int) -> None:
        """Delete the checkpoint of `step`; another writer may have done it."""
        self._known.discard(step)
        self._read.pop(step, None)
        # Renamed first: what is left if this is killed is no checkpoint.
        left = self.path / f"{step}.{secrets.token_hex(4)}.deleted"
        try:
            self.files.rename(self.of(step), left)
        except FileNotFoundError:
            return
        self.files.remove(left)


# Which checkpoints stay is decided here. Orbax's `LatestN` and `BestN` know less: a NaN
# among the metrics hides the best checkpoint from them (0.12: of 0.9, NaN and 0.1 they
# keep 0.1), a missing metric is a `KeyError`, they go by times, though clocks may go
# backwards, and know no damaged checkpoints, which must not push out good ones.


@dataclasses.dataclass(frozen=True)
class Best:
    """The metric and the mode that find the best checkpoint."""

    metric: str
    mode: str

    @classmethod
    def of(cls, given: object) -> Self:
        """From a pair of a name and a mode."""
        match given:
            case (str(metric), ("max" | "min") as mode):
                return cls(metric, mode)
        raise ValueError(
            f"`best` was {given!r}; the name of a metric and 'max' or 'min' was "
            "wanted: `best=('accuracy', 'max')`."
        )

    def among(self, metrics: Mapping[int, Mapping[str, float]]) -> int | None:
        """The best step, the latest of equal ones; None if no step has the metric."""
        sign = 1 if self.mode == "max" else -1
        ranked = [
            (sign * values[self.metric], step)
            for step, values in metrics.items()
            if not math.isnan(values.get(self.metric, math.nan))
        ]
        return max(ranked)[1] if ranked else None


@final
class Catalogue:
    """The checkpoints of a folder."""

    def __init__(self, folder: Folder, best: Best | None) -> None:
        self.folder = folder
        self.damaged: set[int] = set()
        self._best = best

    def what(self, doing: str, step: int | None = None) -> str:
        """Something that is done, in the words by which the processes compare it."""
        which = "" if step is None else f" checkpoint {step}"
        return f"{doing}{which} in `{self.folder.path}`"

    def named(self, what: str) -> list[int]:
        """Steps for which there is something, good or not, in order."""
        return agreement.agree(what, self.folder.named())[0]

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return self._of_first("list the checkpoints", list(self.good()))

    def latest(self) -> int | None:
        """The last step whose checkpoint is complete; None if there is none."""
        newest = self.folder.newest(self.damaged)
        return self._of_first("find the latest checkpoint", newest)

    def best(self) -> int | None:
        """The step that is best by the metric; None if no checkpoint has it."""
        if self._best is None:
            raise ValueError(
                "The manager was not told what is best: "
                "`CheckpointManager(..., best=('accuracy', 'max'))`."
            )
        return self._of_first("find the best checkpoint", self._best_of(self.good()))

    def _of_first(self, doing: str, found: _T) -> _T:
        """The first process's finding, in all processes."""
        return agreement.agree(self.what(doing), found)[0]

    def good(self) -> dict[int, Record]:
        """The complete checkpoints that have not turned out to be damaged."""
        records = self.folder.records()
        return {s: each for s, each in records.items() if s not in self.damaged}

    def surplus(self, keep: int) -> list[int]:
        """The steps that are neither among the last `keep` nor the best."""
        records = self.good()
        best = self._best_of(records)
        return [step for step in sorted(records)[:-keep] if step != best]

    def _best_of(self, records: Mapping[int, Record]) -> int | None:
        if self._best is None:
            return None
        return self._best.among({s: each.metrics for s, each in records.items()})

    def check_metrics(self, metrics: Mapping[str, float]) -> None:
        """Raise ValueError if the metric is not among them that says what is best."""
        if self._best is not None and metrics and self._best.metric not in metrics:
            raise ValueError(
                f"`metrics` has {', '.join(metrics)}, but the best checkpoint is "
                f"chosen by {self._best.metric!r}."
            )

    def record(self, step: int) -> Record:
        """The record of a checkpoint."""
        try:
            return self.folder.record(step)
        except Damage as damage:
            raise CheckpointError(
                f"Checkpoint {step} in `{self.folder.path}` is damaged: {damage}."
            ) from None

    def require(self, step: int, named: list[int]) -> None:
        """Raise FileNotFoundError unless `step` is one of those that there are."""
        if step not in named:
            has = ", ".join(map(str, named)) if named else "none"
            raise FileNotFoundError(
                f"There is no checkpoint {step} in `{self.folder.path}`; it has: {has}."
            )

    def delete(self, step: int) -> None:
        """Delete the checkpoint of `step`."""
        what = self.what("delete", step)
        self.require(step, self.named(what))
        if agreement.is_first():
            self.folder.delete(step)
        # No process goes on before it is deleted.
        agreement.agree(what, None)
