"""What a program does for a step besides computing it: `Stages`."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxstrategy._src import masks
from jaxstrategy._src.errors import (
    DonatedValueError,
    PaddedRowsWarning,
    RecompilationWarning,
)
from jaxstrategy._src.masks import BatchArray, StepMasks
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.text import user_code
from jaxstrategy._src.tracing.constants import constants
from jaxstrategy._src.tracing.nnx.objects import structure_of, variables_with
from jaxstrategy._src.tracing.roles import Role, is_before_jaxlib_012
from jaxstrategy._src.tracing.stages.finite import Finite
from jaxstrategy._src.tracing.trace import Evaluate
from jaxstrategy._src.tracing.traced_step import ReplicaStep, TracedStep
from jaxstrategy._src.values import arrays as _arrays
from jaxstrategy._src.values.arrays import Leaf
from jaxstrategy._src.values.trees import is_object


def check_once(
    step: ReplicaStep, leaves: Sequence[Leaf], donated: frozenset[int]
) -> None:
    """Raises if a donated array is passed twice."""
    if len(set(map(id, leaves))) == len(leaves):
        return
    first: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        other = first.setdefault(id(leaf), index)
        twice = other != index and isinstance(leaf, jax.Array)
        if twice and donated & {index, other}:
            raise DonatedValueError(
                f"{step.label(other)} and {step.label(index)} are one array, and "
                "it is donated: the step cannot both overwrite and read it. Pass a "
                "copy (`jnp.copy`) in one place, or do not donate."
            ) from None


@final
class MaskArguments:
    """Lets a step use the masks of batches; warns if it ignores padded rows."""

    def __init__(self, step: ReplicaStep) -> None:
        self._indices = [i for i, role in enumerate(step.roles) if role is Role.MASK]
        self._step = step
        # What the traces so far did.
        self._is_traced = False
        self._uses_masks = False
        self._gathers_rows = False
        # Masks of batches with equal numbers of rows, which the step could not tell
        # apart.
        self._ambiguous: set[tuple[int, ...]] = set()
        # Each warning is given once; and once more where JAX traces the caller.
        self._given: set[tuple[Callable[[str], str], bool]] = set()

    @property
    def is_active(self) -> bool:
        """Whether calls need `check`, after the traces so far."""
        is_fine = self._is_traced and self._uses_masks and not self._gathers_rows
        return bool(self._indices) and (bool(self._ambiguous) or not is_fine)

    @contextlib.contextmanager
    def tracing(self, leaves: Sequence[Leaf]) -> Iterator[None]:
        """A `with` block for the user's code; `leaves` are one replica's arguments."""
        arrays = [BatchArray(leaves[i - 1], leaves[i], i) for i in self._indices]
        batches = StepMasks(arrays)
        with masks.tracing_with(batches):
            yield
        self._is_traced = True
        self._uses_masks |= batches.asked
        self._gathers_rows |= batches.gathered
        self._ambiguous |= batches.ambiguous

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Before a call; may raise."""
        for indices in self._ambiguous:
            self._check_same(indices, [leaves[i] for i in indices])
        if self._is_traced and (self._gathers_rows or not self._uses_masks):
            self._warn_if_padded([leaves[i] for i in self._indices])

    def _warn_if_padded(self, row_masks: list[Leaf]) -> None:
        if any(isinstance(mask, Tracer) for mask in row_masks):
            warning = _may_be_unmasked
        elif any(map(masks.is_padded, row_masks)):
            warning = _gathered if self._uses_masks else _unmasked
        else:
            return
        key = warning, _arrays.is_traced()
        if key not in self._given:
            self._given.add(key)
            user_code.warn(warning(self._step.name), PaddedRowsWarning)

    def _check_same(self, indices: tuple[int, ...], row_masks: list[Leaf]) -> None:
        if any(isinstance(mask, Tracer) for mask in row_masks):
            return  # there may be several tracers of one array
        if all(mask is row_masks[0] for mask in row_masks):
            return
        names = ", ".join(self._step.label(i - 1) for i in indices)
        raise ValueError(
            f"`{self._step.name}` was given {names}, of different batches with equal "
            "numbers of rows, and asked which rows of something computed from them are "
            "real. Say which batch is meant, with an argument of the step itself: "
            "`masked_mean(losses, mask=batch_mask(images))`."
        )


def check_traced(masks: StepMasks, name: str) -> None:
    """Raises or warns if a traced function may ignore masks of batches."""
    for indices in masks.ambiguous:
        if len(set(indices)) > 1:
            raise ValueError(
                f"`{name}` takes several batches with equal numbers of rows, and asked "
                "which rows of something computed from them are real. Say which batch "
                "is meant: `masked_mean(losses, mask=batch_mask(images))`, with an "
                "array of that batch itself."
            )
    if masks.gathered or not masks.asked:
        warning = _gathered if masks.asked else _unmasked
        user_code.warn(warning(name), PaddedRowsWarning)


def _gathered(name: str) -> str:
    return (
        f"`{name}` was given a batch that is filled up with copies of its last row, "
        "and gathers an array of it in `merge_call`, where shapes are static, so that "
        "the copies stay in the result. Return the array and gather it outside the "
        "step, where they are left out; or gather `batch_mask(array)` as well, which "
        "says which rows are real."
    )


def _may_be_unmasked(name: str) -> str:
    return (
        f"`{name}` is given batches of a dataset inside a function that JAX traces "
        "(`jax.jit`), and never asks which of their rows are real. If one is filled up "
        "with copies of its last row, these count in its sums and means, and no later "
        "warning can say so. Use `masked_mean` or `masked_sum` for them, or "
        '`batch_mask`; or choose `InputOptions(remainder="drop")` or `"error"`, with '
        "which all rows are real."
    )


def _unmasked(name: str) -> str:
    return (
        f"`{name}` was given a batch that is filled up with copies of its last row, "
        "and never asked which rows are real, so that the copies count in its sums and "
        "means. Use `masked_mean` or `masked_sum` for them, or `batch_mask`; or leave "
        'out the rest with `InputOptions(remainder="drop")`.'
    )


# At least so many steps may run at once, and at most twice as many.
DEPTH = 8

# One queue for the process: all strategies share the threads.
_running: collections.deque[jax.Array] = collections.deque()


def must_count(devices: Iterable[Device]) -> bool:
    """Whether steps on these devices must be limited, or reported to observers."""
    devices = list(devices)
    if any(d.process_index != jax.process_index() for d in devices):
        return True
    if len(devices) == 1 or devices[0].platform != "cpu":
        return False
    return is_before_jaxlib_012()


_observers: list[Callable[[jax.Array], None]] = []


def on_dispatch(observer: Callable[[jax.Array], None]) -> None:
    """Calls `observer` with one result of each step that is counted."""
    if observer not in _observers:
        _observers.append(observer)


def count_dispatch(token: jax.Array) -> None:
    """Counts a step, given one of its results; sometimes waits for earlier ones."""
    if isinstance(token, Tracer):
        return  # part of a larger program, which its caller dispatches
    for observer in _observers:
        observer(token)
    _running.append(token)
    if len(_running) < 2 * DEPTH:
        return
    for _ in range(DEPTH):
        # A step that failed raises where its results are read, not here; and another
        # thread may be waiting for them already.
        with contextlib.suppress(jax.errors.JaxRuntimeError, IndexError):
            _running.popleft().block_until_ready()


@final
class ConstantObjects:
    """Compiles again when Flax NNX objects change whose arrays are constants."""

    def __init__(self, step: ReplicaStep) -> None:
        self._name = step.name
        self._variables: list[tuple[Leaf, Leaf]] = []
        self._owners: list[tuple[weakref.ref[object], object]] = []
        self._num_changes = 0

    @property
    def are_used(self) -> bool:
        return bool(self._variables)

    def traced(self, step: TracedStep) -> None:
        values = (constant.value for constant in constants(step.trace.closed))
        arrays = {id(value) for value in values if isinstance(value, jax.Array)}
        if not arrays:
            return
        holders = variables_with(arrays)
        self._variables += ((v, v.get_raw_value()) for v, _ in holders)
        owners = {id(owner): owner for _, owner in holders if is_object(owner)}
        self._owners += (
            (weakref.ref(each), structure_of(each)) for each in owners.values()
        )

    def is_outdated(self) -> bool:
        """Before a call: whether the program must be compiled again."""
        is_same = all(v.get_raw_value() is array for v, array in self._variables)
        for ref, structure in self._owners:
            owner = ref()
            is_same &= owner is None or structure_of(owner) == structure
        if is_same:
            return False
        self._variables, self._owners = [], []
        self._num_changes += 1
        # The first time, the constant may have been that of a copy.
        if self._num_changes == 2:
            user_code.warn(
                f"`{self._name}` is compiled again because an object of Flax NNX has "
                "changed that it uses but was not given, and to which no name, "
                "attribute or container leads. Its arrays are constants of the "
                "compiled program. Pass it as an argument.",
                RecompilationWarning,
            )
        return True


@final
class Stages:
    """What a program does for a step besides computing it."""

    def __init__(self, step: ReplicaStep, options: RunOptions) -> None:
        self.donated = frozenset(step.signature.donated(options.donated))
        self.masks = MaskArguments(step)
        self.objects = ConstantObjects(step)
        self.is_counted = must_count(step.replicas.all_devices)
        self.finite: Finite | None = None
        if options.check_finite:
            self.finite = Finite(step, with_infinities=options.check_finite != "nan")

    @property
    def description(self) -> str:
        """Equal if the same is added to a program."""
        kinds = ["Counted"] * self.is_counted
        return ", ".join([*kinds, *([self.finite.kind] if self.finite else [])])

    def instrument(
        self, step: TracedStep, evaluate: Evaluate, finite: Finite | None
    ) -> Evaluate:
        """In the compiled function: adds the outputs that are looked at after a call.

        If calls are counted, the first one is ready when the step is done.
        """
        inner = evaluate if finite is None else finite.instrument(step, evaluate)
        if not self.is_counted:
            return inner

        def with_token(
            inputs: Sequence[Leaf],
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            arrays, outputs = inner(inputs)
            return arrays, [jnp.zeros((), jnp.int8), *outputs]

        return with_token
