"""The record of a checkpoint, one file of JSON, and errors about checkpoints.

It is written last, before the checkpoint gets its name, and has the size and checksum
of each other file. Orbax notices neither a flipped bit in an array nor a file that was
cut before it reads it. Its formats know checksums, but it writes none over the numbers
(measured with Orbax 0.12, with Zarr 2 and 3, each with and without OCDBT: all of 20
flipped bits gave other numbers, and no error), and has no option to. And a checksum
that is read with its array is read too late: variables before it were restored.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pathlib
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias, final

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
