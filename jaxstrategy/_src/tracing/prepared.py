"""Programs that are compiled before they are called: `Preparation`, `PreparedCall`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, final

import jax
from jax.core import Tracer
from jax.stages import Compiled, Lowered

from jaxstrategy._src.errors import CompiledStepError, NonFiniteError
from jaxstrategy._src.replicas.devices import names as device_names
from jaxstrategy._src.replicas.mesh import is_key
from jaxstrategy._src.text.shown import array_type
from jaxstrategy._src.tracing.traced_step import TracedStep
from jaxstrategy._src.values.arrays import Leaf, TreeStructure
from jaxstrategy._src.values.per_replica import PerReplica


@final
@dataclasses.dataclass(frozen=True)
class Preparation:
    """A step that was traced to be compiled ahead of time."""

    step: TracedStep
    inputs: Sequence[Leaf]
    variables: Sequence[str]
    stages: Sequence[str]
    must_be_lowered: bool
    compiler_options: Mapping[str, str]
    lower: Callable[[], Lowered]

    @property
    def num_arguments(self) -> int:
        """How many of the inputs are arguments."""
        return len(self.step.signature.dynamic)

    def label(self, index: int) -> str:
        """The name of an input in messages."""
        if index < self.num_arguments:
            return f"argument {self.step.label(index)}"
        return f"variable {self.variables[index - self.num_arguments]!r}"

    @property
    def input_tree(self) -> TreeStructure:
        """The structure of what the program is called with, as JAX keeps it."""
        return jax.tree.structure(((0,) * len(self.inputs), {}))

    def output_tree(self, num_added: int, num_kept: int) -> TreeStructure:
        """The structure of what it returns."""
        varies = self.step.trace.varies
        results = self.step.results.rebuild([PerReplica(0) if v else 0 for v in varies])
        return jax.tree.structure((results, [0] * num_added, [0] * num_kept))


Obtain: TypeAlias = Callable[[Preparation], Compiled]


@final
class PreparedCall:
    """A program in place of a jitted function, for inputs of certain types."""

    __slots__ = ("_compiled", "_labels", "_name", "_types", "_weak")

    def __init__(self, compiled: Compiled, preparation: Preparation) -> None:
        self._compiled = compiled
        self._name = preparation.step.name
        self._types = [_type_of(each) for each in preparation.inputs]
        self._labels = [preparation.label(i) for i in range(len(self._types))]
        # JAX does not look at weak types here, by which the step's own promotions go.
        # Random keys have none.
        self._weak = [
            (index, getattr(each, "weak_type", False))
            for index, each in enumerate(
                preparation.inputs[: preparation.num_arguments]
            )
            if not is_key(each.dtype)
        ]

    def __call__(self, *inputs: Any) -> Any:
        try:
            for index, is_weak in self._weak:
                if inputs[index].weak_type is not is_weak:
                    raise TypeError
            return self._compiled(*inputs)
        except (TypeError, ValueError, AttributeError):
            told = self._difference(inputs)
            if told is None:
                raise
        except Exception as error:
            # By name: JAX keeps to itself what it raises where `jax_debug_nans` is on,
            # and it would trace the step again.
            if type(error).__name__ != "InternalFloatingPointError":
                raise
            raise NonFiniteError(_made_a_nan(self._name)) from None
        raise CompiledStepError(told)

    def lower(self, *inputs: Leaf) -> NoReturn:
        """As a jitted function has it; there is nothing to lower."""
        raise AssertionError("the program is compiled")

    def _difference(self, inputs: Sequence[Leaf]) -> str | None:
        """What differs from the types that it was compiled for, in words."""
        if any(isinstance(each, Tracer) for each in inputs):
            return traced_caller(self._name)
        for index, (known, given) in enumerate(zip(self._types, inputs, strict=True)):
            now = _type_of(given)
            if now[:3] != known[:3]:
                label = self._labels[index]
                was, came = _typed(known), _typed(now)
                return (
                    f"{label[0].upper()}{label[1:]} of `{self._name}` is {came}, and "
                    f"the step is compiled for {was}. Call it with what it was "
                    "compiled for, or compile it for this."
                    + _about_fewer_rows(now[0], known[0])
                )
        for index, (known, given) in enumerate(zip(self._types, inputs, strict=True)):
            if known[3] is None or known[3].is_equivalent_to(
                given.sharding, len(known[0])
            ):
                continue
            label = self._labels[index]
            return (
                f"{label[0].upper()}{label[1:]} of `{self._name}` lies otherwise than "
                f"the step was compiled for: as {_placed(given.sharding)}, not as "
                f"{_placed(known[3])}. Place it so, or compile the step for it."
            )
        return None


@final
class OutdatedCall:
    """In place of a program that was compiled for what is not there any more."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *inputs: Leaf) -> NoReturn:
        raise CompiledStepError(
            f"`{self._name}` was compiled ahead of time, and a variable that it uses "
            "is gone or has become a `jax.Ref`, or an object whose arrays are "
            "constants of it has changed. Compile it again."
        )

    def lower(self, *inputs: Leaf) -> NoReturn:
        """As a jitted function has it; see the call."""
        raise AssertionError("the program is compiled")


def traced_caller(name: str) -> str:
    """For messages: JAX traces the code that calls a compiled step."""
    return (
        f"`{name}` was compiled ahead of time, so it cannot be part of a function that "
        "JAX traces (`jax.jit`, `jax.grad`, `jax.lax.scan`). Call the step itself "
        "there."
    )


def _made_a_nan(name: str) -> str:
    return (
        f"`{name}` has made a NaN or an Inf, which JAX looks for (`jax_debug_nans`, "
        "`jax_debug_infs`). As it was compiled ahead of time, nothing says where: call "
        "the step itself, or compile it with `RunOptions(check_finite=True)`."
    )


def _type_of(given: Leaf) -> tuple[Any, ...]:
    """The shape, dtype and weak type, and the sharding, of an array or a type."""
    is_weak = bool(getattr(given, "weak_type", False))
    return given.shape, given.dtype, is_weak, given.sharding


def _typed(known: tuple[Any, ...]) -> str:
    shape, dtype, is_weak, _ = known
    weak = ", of the weak type of a Python number" if is_weak else ""
    return array_type(dtype, shape) + weak


def _about_fewer_rows(came: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    """Advice where an array has fewer rows, as the last batch of a dataset may."""
    is_same = len(came) == len(wanted) > 0 and came[1:] == wanted[1:]
    if not is_same or came[0] >= wanted[0]:
        return ""
    return (
        " A dataset's last batch may have fewer rows, which one replica takes as they "
        'are: `js.InputOptions(remainder="drop")` leaves it out.'
    )


def _placed(sharding: Any) -> str:
    spec = getattr(sharding, "spec", None)
    where = device_names(sorted(sharding.device_set, key=lambda device: device.id))
    return f"{spec} on {where}" if spec is not None else where
