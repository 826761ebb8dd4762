"""A compiled step in a file: `SavedStep`.

The file has a line that says what it is, the size of a header, the header as JSON, and
the executable as JAX serializes it. Whoever can write such a file can let the process
that loads it run anything: the executable is code of the machine, and JAX unpickles
what is around it. So nothing is read of a file that another user can write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import stat
import tempfile
from typing import Any, final

from jax.stages import Compiled

from jaxstrategy._errors import CompiledStepError
from jaxstrategy.text._shown import shown
from jaxstrategy.tracing._prepared import Preparation
from jaxstrategy.tracing._step_facts import Facts, devices_of, difference, facts_of

_FIRST_LINE = b"jaxstrategy compiled step 1\n"
_SIZE = 8
# Calls of libraries that JAX makes ready when it lowers a program that has them: one
# with LAPACK's ends the process if it is only loaded (JAX 0.10 and 0.12).
_LIBRARY_CALL = re.compile(r'custom_call_target="(?!Sharding|SPMD|TopK|AllocateBuffer)')


@final
@dataclasses.dataclass(frozen=True)
class SavedStep:
    """A compiled step as it is saved.

    Attributes:
      facts: what it depends on.
      num_added: how many outputs it has beside the step's results.
      num_kept: how many variables it returns.
      calls_libraries: whether it must be lowered before it is loaded.
      executable: as JAX serializes it.
    """

    facts: Facts
    num_added: int
    num_kept: int
    calls_libraries: bool
    executable: bytes

    @classmethod
    def of(cls, compiled: Compiled, facts: Facts, name: str) -> SavedStep:
        """What there is to save of a compiled step.

        Raises:
          CompiledStepError: JAX cannot serialize it.
        """
        from jax.experimental import serialize_executable

        try:
            executable, _, tree = serialize_executable.serialize(compiled)
        except Exception as error:  # whatever JAX, pickle or the backend says
            raise CompiledStepError(
                f"`{name}` cannot be saved: JAX cannot serialize what it was compiled "
                f"to ({error}). Use `js.compilation_cache(directory)`."
            ) from error
        _, added, kept = tree.children()
        text = compiled.as_text() or 'custom_call_target="unknown"'
        calls = _LIBRARY_CALL.search(text) is not None
        return cls(facts, added.num_leaves, kept.num_leaves, calls, executable)

    def write(self, path: str) -> None:
        """Writes the file, whole or not at all; only its owner may read it."""
        header = dataclasses.asdict(self)
        checksum = _checksum(header, header.pop("executable"))
        text = json.dumps(header | {"checksum": checksum}).encode()
        size = len(text).to_bytes(_SIZE, "little")
        number, draft = tempfile.mkstemp(dir=os.path.dirname(path) or ".")
        try:
            with open(number, "wb") as file:
                file.write(_FIRST_LINE + size + text + self.executable)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise

    @classmethod
    def read(cls, path: str) -> SavedStep:
        """The step in a file.

        Raises:
          FileNotFoundError: there is none.
          CompiledStepError: it is another user's, or no compiled step, or damaged.
        """
        with open(path, "rb", opener=_without_waiting) as file:
            _check_trusted(path, os.fstat(file.fileno()))
            first = file.read(len(_FIRST_LINE))
            rest = file.read() if first == _FIRST_LINE else b""
        if first != _FIRST_LINE:
            raise CompiledStepError(
                f"{path!r} is no compiled step of this version of jaxstrategy: it "
                f"begins with {shown(first[:20])}. Give the path that `save` was given."
            )
        try:
            end = _SIZE + int.from_bytes(rest[:_SIZE], "little")
            header: dict[str, Any] = json.loads(rest[_SIZE:end])
            executable = rest[end:]
            if header.pop("checksum") != _checksum(header, executable):
                raise ValueError("its checksum is wrong")
            return cls(**header, executable=executable)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CompiledStepError(
                f"The compiled step in {path!r} is damaged ({error}). Compile and save "
                "it again."
            ) from error

    def loaded(self, path: str, preparation: Preparation) -> Compiled:
        """The program, in this process.

        Args:
          path: of the file, for messages.
          preparation: the step, as it is now.

        Raises:
          CompiledStepError: the file is not of this step, or not for this machine.
        """
        from jax.experimental import serialize_executable

        differs = difference(self.facts, facts_of(preparation))
        if differs is not None:
            raise CompiledStepError(_told(path, preparation.step.name, *differs))
        if self.calls_libraries or preparation.must_be_lowered:
            preparation.lower()
        devices = devices_of(preparation.step)
        try:
            return serialize_executable.deserialize_and_load(
                self.executable,
                preparation.input_tree,
                preparation.output_tree(self.num_added, self.num_kept),
                backend=devices[0].client,
                execution_devices=devices,
            )
        except (RuntimeError, ValueError, KeyError) as error:
            raise CompiledStepError(
                f"The compiled step in {path!r} cannot be loaded by this backend "
                f"({error}). Compile and save it again."
            ) from error


def _checksum(header: dict[str, Any], executable: bytes) -> str:
    """Of all that is saved: with other numbers of outputs a call would fail."""
    text = json.dumps(header).encode()
    return hashlib.sha256(text + executable).hexdigest()


def _told(path: str, name: str, fact: str, was: str, now: str) -> str:
    what = f"{fact} was {shown(was)}, and is {shown(now)}"
    if fact == "what the step computes":
        what = f"the step computes something else now (its code, {was}, is {now})"
    elif fact.startswith(("argument ", "variable ")):
        what = f"{fact} was {was}, and is {now}"
    return (
        f"The compiled step in {path!r} is not used for `{name}`: {what}. Compile and "
        "save it again."
    )


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file; where it is a pipe, without waiting for who writes it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _check_trusted(path: str, status: os.stat_result) -> None:
    """Raises if it is no file, or another user can write it.

    Raises:
      CompiledStepError: it is none, or another one can.
    """
    if not stat.S_ISREG(status.st_mode):
        raise CompiledStepError(
            f"{path!r} is no file but a pipe or a device, which is not read. Give the "
            "path that `save` was given."
        )
    if not hasattr(os, "getuid"):  # Windows has other rights
        return
    if status.st_uid not in (0, os.getuid()):
        why = f"it belongs to user {status.st_uid}, this process to {os.getuid()}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        why = f"others may write it (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return
    raise CompiledStepError(
        f"{path!r} is not loaded: {why}, and a compiled step runs whatever is in it. "
        "Save one of your own; or, if you trust everybody who could write this one, "
        f"`chown` it and `chmod go-w {path}`."
    )
