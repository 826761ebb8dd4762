"""All stages that a program may have, in the order of `stages_of`."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
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
from jaxstrategy._src.tracing.nnx.object_form import (
    holders_of,
    structure_of,
)
from jaxstrategy._src.tracing.roles import Role, must_look_first
from jaxstrategy._src.tracing.stages.finite import Finite
from jaxstrategy._src.tracing.stages.stage import Stage
from jaxstrategy._src.tracing.trace import Evaluate
from jaxstrategy._src.tracing.traced_step import ReplicaStep, TracedStep
from jaxstrategy._src.values import arrays as _arrays
from jaxstrategy._src.values.arrays import Leaf
from jaxstrategy._src.values.trees import is_object


@final
class Donation(Stage):
    """The donated arguments of a program; none may be passed twice."""

    def __init__(self, step: ReplicaStep, donated: frozenset[int]) -> None:
        self.donated = donated
        self._step = step
        self._looks_first = must_look_first(len(step.replicas.all_devices))

    @property
    def is_active(self) -> bool:
        """Whether calls look for such an array before JAX does."""
        return self._looks_first

    def before(self, leaves: Sequence[Leaf]) -> None:
        """Raises if a donated array is passed twice."""
        check_once(self._step, leaves, self.donated)


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
class MaskArguments(Stage):
    """The masks among a program's arguments, and what its traces did with them."""

    def __init__(self, step: ReplicaStep) -> None:
        self._places = [i for i, role in enumerate(step.roles) if role is Role.MASK]
        self._step = step
        # What the step asked, known once it is traced.
        self._is_traced = False
        self._is_asked_for = False
        self._keeps_rows = False
        self._alike: set[tuple[int, ...]] = set()
        # Each warning is given once; and once more where JAX traces what calls.
        self._told: set[tuple[Callable[[str], str], bool]] = set()

    @property
    def is_active(self) -> bool:
        """Whether there is a mask among the arguments that has to be looked at."""
        is_settled = self._is_traced and self._is_asked_for and not self._keeps_rows
        return bool(self._places) and (bool(self._alike) or not is_settled)

    @contextlib.contextmanager
    def tracing(self, own: Sequence[Leaf]) -> Iterator[None]:
        """A `with` block in which the step can ask which rows are real."""
        batches = StepMasks([BatchArray(own[i - 1], own[i], i) for i in self._places])
        with masks.tracing_with(batches):
            yield
        self._is_traced = True
        self._is_asked_for |= batches.asked
        self._keeps_rows |= batches.gathered
        self._alike |= batches.ambiguous

    def before(self, leaves: Sequence[Leaf]) -> None:
        """Checks whether a call is one that the step does right by."""
        for places in self._alike:
            self._check_alike(places, [leaves[i] for i in places])
        if self._is_traced and (self._keeps_rows or not self._is_asked_for):
            self._check_used([leaves[i] for i in self._places])

    def _check_used(self, found: list[Leaf]) -> None:
        if any(isinstance(mask, Tracer) for mask in found):
            told = _may_be_unmasked
        elif any(map(masks.is_padded, found)):
            told = _gathered if self._is_asked_for else _unmasked
        else:
            return
        turn = told, _arrays.is_traced()
        if turn not in self._told:
            self._told.add(turn)
            user_code.warn(told(self._step.name), PaddedRowsWarning)

    def _check_alike(self, places: tuple[int, ...], masks: list[Leaf]) -> None:
        first, *others = masks
        if any(isinstance(mask, Tracer) for mask in masks):
            return  # of one array there can be several
        if all(mask is first for mask in others):
            return
        names = ", ".join(self._step.label(i - 1) for i in places)
        raise ValueError(
            f"`{self._step.name}` was given {names}, of different batches with equal "
            "numbers of rows, and asked which rows of something computed from them are "
            "real. Say which batch is meant, with an argument of the step itself: "
            "`masked_mean(losses, mask=batch_mask(images))`."
        )


def check_traced(masks: StepMasks, name: str) -> None:
    """Checks whether a function that was traced does right by batches with masks."""
    for places in masks.ambiguous:
        if len(set(places)) > 1:
            raise ValueError(
                f"`{name}` takes several batches with equal numbers of rows, and asked "
                "which rows of something computed from them are real. Say which batch "
                "is meant: `masked_mean(losses, mask=batch_mask(images))`, with an "
                "array of that batch itself."
            )
    if masks.gathered or not masks.asked:
        told = _gathered if masks.asked else _unmasked
        user_code.warn(told(name), PaddedRowsWarning)


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


DEPTH = 8

# One window for the process: all strategies share the threads.
_running: collections.deque[jax.Array] = collections.deque()


@final
class InFlight(Stage):
    """Counts the calls of a program, and waits until few enough are running."""

    def within(self, step: TracedStep, evaluate: Evaluate) -> Evaluate:
        """Adds an output that is ready when the step is done."""

        def with_token(
            inputs: Sequence[Leaf],
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            arrays, outputs = evaluate(inputs)
            return arrays, [jnp.zeros((), jnp.int8), *outputs]

        return with_token

    def after(self, output: jax.Array) -> None:
        """Counts the call, and waits for an earlier one."""
        dispatched(output)


def needed(devices: Iterable[Device]) -> bool:
    """Whether steps on `devices` must be bounded, or others are told of them."""
    devices = list(devices)
    if any(d.process_index != jax.process_index() for d in devices):
        return True
    if len(devices) == 1 or devices[0].platform != "cpu":
        return False
    return _version(metadata.version("jaxlib")) < (0, 12)


_observers: list[Callable[[jax.Array], None]] = []


def on_dispatch(observer: Callable[[jax.Array], None]) -> None:
    """Let `observer` be called with one of the results of each step that is counted."""
    if observer not in _observers:
        _observers.append(observer)


def dispatched(token: jax.Array) -> None:
    """Count a step, known by one of its results; sometimes wait for earlier ones."""
    if isinstance(token, Tracer):
        return  # part of a larger program, which its caller dispatches
    for observer in _observers:
        observer(token)
    _running.append(token)
    if len(_running) >= 2 * DEPTH:
        _wait_for_earlier()


def _wait_for_earlier() -> None:
    """Wait for the `DEPTH` steps that have been running longest."""
    for _ in range(DEPTH):
        # A step that failed says so to whoever reads its results, not to this one; and
        # another thread may be waiting for them already.
        with contextlib.suppress(jax.errors.JaxRuntimeError, IndexError):
            _running.popleft().block_until_ready()


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


@final
class ConstantObjects(Stage):
    """The objects whose arrays are constants of a program."""

    def __init__(self, step: ReplicaStep) -> None:
        self._name = step.name
        self._variables: list[tuple[Leaf, Leaf]] = []
        self._owners: list[tuple[weakref.ref[object], object]] = []
        self._times = 0

    @property
    def is_active(self) -> bool:
        """Whether a trace so far has such constants."""
        return bool(self._variables)

    def traced(self, step: TracedStep) -> None:
        """Takes note of the constants of a traced step."""
        found = (constant.value for constant in constants(step.trace.closed))
        arrays = {id(value) for value in found if isinstance(value, jax.Array)}
        if not arrays:
            return
        holders = holders_of(arrays)
        self._variables += ((v, v.get_raw_value()) for v, _ in holders)
        owners = {id(owner): owner for _, owner in holders if is_object(owner)}
        self._owners += (
            (weakref.ref(each), structure_of(each)) for each in owners.values()
        )

    def is_outdated(self) -> bool:
        """Whether a constant is not what its object has now; forgets them if so."""
        arrays = all(v.get_raw_value() is array for v, array in self._variables)
        if arrays and all(map(_is_as_it_was, self._owners)):
            return False
        self._variables, self._owners = [], []
        self._times += 1
        # Once can also mean that a constant came from a copy of what has changed.
        if self._times == 2:
            user_code.warn(
                f"`{self._name}` is compiled again because an object of Flax NNX has "
                "changed that it uses but was not given, and to which no name, "
                "attribute or container leads. Its arrays are constants of the "
                "compiled program. Pass it as an argument.",
                RecompilationWarning,
            )
        return True


def _is_as_it_was(known: tuple[weakref.ref[object], object]) -> bool:
    owner = known[0]()
    return owner is None or structure_of(owner) == known[1]


def stages_of(step: ReplicaStep, options: RunOptions) -> list[Stage]:
    """The stages of the program of a step that is compiled with these options.

    In this order they look at a call, and at what comes of it.
    """
    stages: list[Stage] = []
    if donated := frozenset(step.signature.donated(options.donated)):
        stages.append(Donation(step, donated))
    stages += (MaskArguments(step), ConstantObjects(step))
    if needed(step.replicas.all_devices):
        stages.append(InFlight())
    if options.check_finite:
        stages.append(Finite(step, with_infinities=options.check_finite != "nan"))
    return stages
