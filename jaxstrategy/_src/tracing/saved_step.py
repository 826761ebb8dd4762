"""Steps compiled ahead of time, and saved to files: `SavedStep`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
import re
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, final

import jax
from jax.core import Tracer
from jax.stages import Compiled, Lowered

from jaxstrategy._src.errors import CompiledStepError, NonFiniteError
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.text import array_type, shown
from jaxstrategy._src.tracing.constants import code_of, constants
from jaxstrategy._src.tracing.jaxprs import all_eqns
from jaxstrategy._src.tracing.traced_step import ReplicaStep, TracedStep
from jaxstrategy._src.values.arrays import Leaf
from jaxstrategy._src.values.per_replica import PerReplica
from jaxstrategy._src.version import version_of


@final
@dataclasses.dataclass(frozen=True)
class Preparation:
    """A traced step and what is needed to compile it ahead of time."""

    step: TracedStep
    inputs: Sequence[Leaf]
    variables: Sequence[str]
    stages: str
    must_be_lowered: bool
    compiler_options: Mapping[str, str]
    lower: Callable[[], Lowered]


def _label(step: ReplicaStep, variables: Sequence[str], index: int) -> str:
    count = len(step.roles)
    if index < count:
        return f"argument {step.label(index)}"
    return f"variable {variables[index - count]!r}"


Obtain: TypeAlias = Callable[[Preparation], Compiled]


@final
class PreparedCall:
    """A compiled program in place of a jitted function; raises for other types."""

    __slots__ = ("_compiled", "_name", "_step", "_types", "_variables", "_weak")

    def __init__(self, compiled: Compiled, preparation: Preparation) -> None:
        self._compiled = compiled
        # The preparation itself would keep arrays and the trace alive.
        self._step = step = preparation.step.replica_step
        self._variables = preparation.variables
        self._name = step.name
        self._types: list[Any] = [
            jax.ShapeDtypeStruct(
                each.shape,
                each.dtype,
                sharding=each.sharding,
                weak_type=bool(getattr(each, "weak_type", False)),
            )
            for each in preparation.inputs
        ]
        # JAX does not check weak types here, but type promotion in the step depended on
        # them. Random keys have none.
        arguments = enumerate(self._types[: len(step.roles)])
        self._weak = [(i, x.weak_type) for i, x in arguments if not is_key(x.dtype)]

    def __call__(self, *inputs: Any) -> Any:
        try:
            for index, is_weak in self._weak:
                if inputs[index].weak_type is not is_weak:
                    raise TypeError
            return self._compiled(*inputs)
        except (TypeError, ValueError, AttributeError):
            message = self._difference(inputs)
            if message is None:
                raise
        except Exception as error:
            # By name: JAX does not export what it raises with `jax_debug_nans`, for
            # which it would trace the step again.
            if type(error).__name__ != "InternalFloatingPointError":
                raise
            raise NonFiniteError(
                f"`{self._name}` has made a NaN or an Inf, which JAX "
                "looks for (`jax_debug_nans`, `jax_debug_infs`). As it was compiled "
                "ahead of time, nothing says where: call the step itself, or compile "
                "it with `RunOptions(check_finite=True)`."
            ) from None
        raise CompiledStepError(message)

    def _difference(self, inputs: Sequence[Leaf]) -> str | None:
        """Describes how inputs differ from those the step was compiled for."""
        if any(isinstance(each, Tracer) for each in inputs):
            return traced_caller(self._name)
        pairs = zip(self._types, inputs, strict=True)
        for index, (known, leaf) in enumerate(pairs):
            was, came = _type_of(known), _type_of(leaf)
            expected, sharding = known.sharding, leaf.sharding
            if was == came and not expected.is_equivalent_to(sharding, known.ndim):
                was, came = f"{was}, {expected.spec}", f"{came}, {sharding.spec}"
            if was == came:
                continue
            label = _label(self._step, self._variables, index)
            message = (
                f"{label[0].upper()}{label[1:]} of `{self._name}` is {came}, and the "
                f"step is compiled for {was}. Call it with what it was compiled for, "
                "or compile it for this."
            )
            (rows, *row), (new_rows, *new_row) = (
                each.shape or (0,) for each in (known, leaf)
            )
            if new_row == row and new_rows < rows:
                message += (
                    " A dataset's last batch may have fewer rows, which one "
                    'replica takes as they are: `js.InputOptions(remainder="drop")`'
                    " leaves it out."
                )
            return message
        return None


def _type_of(leaf: Leaf) -> str:
    is_weak = getattr(leaf, "weak_type", False)
    weak = ", of the weak type of a Python number" if is_weak else ""
    return array_type(leaf.dtype, leaf.shape) + weak


def outdated(name: str) -> Callable[..., NoReturn]:
    """Replaces a program whose variables or constants have changed: calls raise."""

    def call(*inputs: Leaf) -> NoReturn:
        raise CompiledStepError(
            f"`{name}` was compiled ahead of time, and a variable that it uses "
            "is gone or has become a `jax.Ref`, or an object whose arrays are "
            "constants of it has changed. Compile it again."
        )

    return call


def traced_caller(name: str) -> str:
    """The message for a call of a compiled step inside a JAX transformation."""
    return (
        f"`{name}` was compiled ahead of time, so it cannot be part of a function that "
        "JAX traces (`jax.jit`, `jax.grad`, `jax.lax.scan`). Call the step itself "
        "there."
    )


# What a program depends on: values by their names in messages.
Facts: TypeAlias = dict[str, str]

# Environment variables with options of XLA.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Options of JAX that change no program.
_OTHER_OPTIONS = re.compile(
    "cache|log|dump|trace|tracing|profil|compiler_detailed|explain|pgle|coordination|"
    "num_cpu_devices|platforms|include_full|check_tracer|transfer_guard|array_garbage|"
    "distributed|heartbeat|debug_|raise_persistent|share_binary|platform_name"
)


def facts_of(preparation: Preparation) -> Facts:
    """Everything a program depends on; raises `CompiledStepError` for callbacks."""
    step, replicas = preparation.step, preparation.step.replicas
    for eqn in all_eqns(step.jaxpr):
        name = eqn.primitive.name
        if "callback" in name or name == "debug_print":
            raise CompiledStepError(
                f"`{step.name}` calls Python while it runs (`{name}`: `jax.debug.print`"
                ", `jax.pure_callback` or `io_callback`), which no file can hold, so "
                "that it cannot be saved. Leave that out, or use "
                "`js.experimental.compilation_cache(directory)`."
            )
    facts = {
        f"the version of {name}": version_of(name)
        for name in ("jaxstrategy", "jax", "jaxlib")
    }
    devices = devices_of(step)
    first = devices[0]
    axes = dict([*replicas.axis_sizes, *replicas.inner_sizes.items()])
    mesh = [f"{replicas.count} replicas", *(f"{name}={n}" for name, n in axes.items())]
    if replicas.per_device > 1:
        mesh.append(f"{replicas.per_device} replicas on a device")
    facts |= {
        "the platform": f"{first.platform} ({first.client.platform_version})",
        "the kind of device": ", ".join(sorted({d.device_kind for d in devices})),
        "the mesh": ", ".join(mesh),
        "the devices of the mesh": ", ".join(str(device.id) for device in devices),
        "the place of this process": f"{jax.process_index()} of {jax.process_count()}",
        "the processor": _processor() if first.platform == "cpu" else "any",
    }
    for name in _FLAGS:
        facts[f"the environment's {name}"] = os.environ.get(name, "")
    for name in sorted(jax.config.values):
        if not _OTHER_OPTIONS.search(name):
            # `values` lacks what a `with` block has set.
            facts[f"JAX's option {name}"] = str(getattr(jax.config, name, None))
    for name, value in sorted(preparation.compiler_options.items()):
        facts[f"the compiler's option {name}"] = value
    for index, leaf in enumerate(preparation.inputs):
        label = _label(step.replica_step, preparation.variables, index)
        facts[label] = (
            array_type(leaf.dtype, leaf.shape)
            + (", weak" if getattr(leaf, "weak_type", False) else "")
            + (", donated" if index in step.donated else "")
            + f", {getattr(leaf.sharding, 'spec', leaf.sharding)}"
        )
    facts["what is done for the step besides"] = preparation.stages
    facts["what the step computes"] = _hash_of(step)
    return facts


def devices_of(step: TracedStep) -> list[Device]:
    """The devices of a step, in the order of the replicas."""
    groups = step.replicas.groups
    return list(dict.fromkeys(device for group in groups for device in group))


@functools.cache
def _processor() -> str:
    """The architecture and instruction sets of the CPU."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = file.read().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    flags = [line for line in lines if line.startswith(("flags", "Features"))]
    text = "".join(flags) or platform.processor()
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{platform.machine()}, instructions {digest}"


def _hash_of(step: TracedStep) -> str:
    """Equal for steps that compute the same, whatever their names."""
    digest = hashlib.sha256(code_of(step.live_jaxpr))
    for constant in constants(step.closed):
        digest.update(constant.fingerprint.encode())
    digest.update(repr(step.varies).encode())
    return digest.hexdigest()[:16]


def difference(saved: Facts, now: Facts) -> tuple[str, str, str] | None:
    """The first fact that differs, its old and its new value."""
    for name in dict.fromkeys([*saved, *now]):
        was, value = saved.get(name, "nothing"), now.get(name, "nothing")
        if was != value:
            return name, was, value
    # Inputs are passed by position, while facts have them by name.
    was, value = (
        ", ".join(name for name in facts if name.startswith(("argument ", "variable ")))
        for facts in (saved, now)
    )
    return None if was == value else ("the order of its inputs", was, value)


_FIRST_LINE = b"jaxstrategy compiled step 1\n"
_SIZE = 8
# Library calls, which JAX initializes when it lowers a program: one with LAPACK's ends
# the process if it is only loaded (JAX 0.10 and 0.12).
_LIBRARY_CALL = re.compile(r'custom_call_target="(?!Sharding|SPMD|TopK|AllocateBuffer)')


@final
@dataclasses.dataclass(frozen=True)
class SavedStep:
    """The contents of a file with a compiled step."""

    facts: Facts
    num_added: int  # outputs of stages
    num_kept: int  # new values of variables
    calls_libraries: bool
    executable: bytes

    @classmethod
    def of(cls, compiled: Compiled, facts: Facts, name: str) -> SavedStep:
        """Serializes a compiled step."""
        from jax.experimental import serialize_executable

        try:
            executable, _, tree = serialize_executable.serialize(compiled)
        except Exception as error:  # from JAX, pickle or the backend
            raise CompiledStepError(
                f"`{name}` cannot be saved: JAX cannot serialize what it was compiled "
                f"to ({error}). Use `js.experimental.compilation_cache(directory)`."
            ) from error
        _, outputs, values = tree.children()
        text = compiled.as_text() or 'custom_call_target="unknown"'
        calls = _LIBRARY_CALL.search(text) is not None
        return cls(facts, outputs.num_leaves, values.num_leaves, calls, executable)

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
        # Without `O_NONBLOCK`, opening a pipe would wait for a writer.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with open(os.open(path, flags), "rb") as file:
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
        """The program, in this process."""
        from jax.experimental import serialize_executable

        differs = difference(self.facts, facts_of(preparation))
        if differs is not None:
            fact, was, now = differs
            what = f"{fact} was {shown(was)}, and is {shown(now)}"
            if fact == "what the step computes":
                what = (
                    f"the step computes something else now (its code, {was}, is {now})"
                )
            elif fact.startswith(("argument ", "variable ")):
                what = f"{fact} was {was}, and is {now}"
            raise CompiledStepError(
                f"The compiled step in {path!r} is not used for "
                f"`{preparation.step.name}`: {what}. Compile and save it again."
            )
        if self.calls_libraries or preparation.must_be_lowered:
            preparation.lower()
        step = preparation.step
        results = step.results.rebuild([PerReplica(0) if x else 0 for x in step.varies])
        devices = devices_of(step)
        try:
            return serialize_executable.deserialize_and_load(
                self.executable,
                jax.tree.structure(((0,) * len(preparation.inputs), {})),
                jax.tree.structure(
                    (results, [0] * self.num_added, [0] * self.num_kept)
                ),
                backend=devices[0].client,
                execution_devices=devices,
            )
        except (RuntimeError, ValueError, KeyError) as error:
            raise CompiledStepError(
                f"The compiled step in {path!r} cannot be loaded by this backend "
                f"({error}). Compile and save it again."
            ) from error


def _checksum(header: dict[str, Any], executable: bytes) -> str:
    return hashlib.sha256(json.dumps(header).encode() + executable).hexdigest()


def _check_trusted(path: str, status: os.stat_result) -> None:
    """Raises unless it is a file that no other user can write."""
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
