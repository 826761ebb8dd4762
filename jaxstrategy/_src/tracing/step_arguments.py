"""Places a step's arguments, and what else a program does besides computing it."""

from __future__ import annotations

import collections
import contextlib
import math
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from jaxstrategy._src import masks, text
from jaxstrategy._src.errors import (
    DonatedValueError,
    PaddedRowsWarning,
    PlacementError,
    RecompilationWarning,
)
from jaxstrategy._src.masks import BatchArray, StepMasks
from jaxstrategy._src.replicas import devices, mesh
from jaxstrategy._src.replicas.devices import Device
from jaxstrategy._src.replicas.inner_axes import sharding_like
from jaxstrategy._src.replicas.replicas import (
    REPLICATED,
    STACKED,
    Replicas,
    sharded_along,
)
from jaxstrategy._src.tracing.constants import ProgramValue
from jaxstrategy._src.tracing.nnx import structure_of, variables_with
from jaxstrategy._src.tracing.references import weak_method
from jaxstrategy._src.tracing.signature import (
    Role,
    is_before_jaxlib_012,
    must_check_first,
)
from jaxstrategy._src.tracing.trace import shards_state
from jaxstrategy._src.tracing.traced_step import ReplicaStep, TracedStep
from jaxstrategy._src.values import arrays, arrays as _arrays
from jaxstrategy._src.values.arrays import Leaf
from jaxstrategy._src.values.trees import is_object
from jaxstrategy._src.variables import access
from jaxstrategy._src.variables.access import Cell


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
        if not self._indices:
            return
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
            text.warn(warning(self._step.name), PaddedRowsWarning)

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
        text.warn(warning(name), PaddedRowsWarning)


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

    def traced(self, constants: Iterable[ProgramValue]) -> None:
        values = (constant.value for constant in constants)
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
        if not self._variables:  # the usual case, kept short
            return False
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
            text.warn(
                f"`{self._name}` is compiled again because an object of Flax NNX has "
                "changed that it uses but was not given, and to which no name, "
                "attribute or container leads. Its arrays are constants of the "
                "compiled program. Pass it as an argument.",
                RecompilationWarning,
            )
        return True


# Placed numbers are cached: a learning rate is often the same at each step, and placing
# a number costs as much as dispatching a small step (44 to 60 us on CPU).
_MAX_NUMBERS = 256

_get_sharding = operator.attrgetter("sharding")


@final
class Placement:
    """Places the arguments of one program."""

    def __init__(self, step: ReplicaStep, donated: frozenset[int]) -> None:
        self._step = step
        self._replicas = step.replicas
        self._donated = donated
        self._label = step.label
        layouts = step.layouts
        self._split = tuple(layout is STACKED for layout in layouts)
        self.shardings: tuple[NamedSharding, ...] = tuple(
            map(self._replicas.sharding, layouts)
        )
        self.shards_state = shards_state(self._replicas)
        self.is_open = self.shards_state or bool(self._replicas.inner_axes)
        # The sharding of each `PerReplica` in the last call.
        self.last_shardings: dict[int, Sharding | None] = {
            i: None for i, s in enumerate(self._split) if s or self.is_open
        }
        # With an old jaxlib, all shardings of the last call.
        is_old = must_check_first(len(self._replicas.all_devices))
        # Whether donated arrays are looked at before each call.
        self.must_check_first = bool(donated) and is_old
        self._all_last_shardings: tuple[Sharding, ...] | None = () if is_old else None
        # The dimension along which state is sharded, by argument and shape.
        self._dimensions: dict[tuple[int, tuple[int, ...]], int | None] = {}
        self._numbers: dict[Hashable, jax.Array] = {}

    def is_as_before(self, leaves: Sequence[Leaf]) -> bool:
        """Whether each `PerReplica` has the sharding of the last call."""
        for index, last in self.last_shardings.items():
            sharding = getattr(leaves[index], "sharding", None)
            if sharding is not last and (last is None or sharding != last):
                return False
        if self._all_last_shardings is None:
            return True
        # JAX 0.10 ends the process for an array on the same devices in another order;
        # 0.12 raises.
        shardings = tuple(map(_get_sharding, leaves))
        if shardings != self._all_last_shardings:
            if any(map(mesh.is_in_another_order, shardings, self.shardings)):
                return False
            self._all_last_shardings = shardings
        return True

    def traced(self, step: TracedStep, leaves: Sequence[Leaf]) -> bool:
        """Stores how a trace shards state; returns whether some must be moved."""
        if step.partitioned is None:
            return False
        for index, dimension in step.partitioned.arguments.items():
            self._dimensions[index, step.type_of(index).shape] = dimension
        return any(
            arrays.is_placed(leaf)
            and not mesh.has_sharding_on_mesh(leaf, self.sharding(i, leaf))
            for i, leaf in enumerate(leaves)
        )

    def sharding(self, index: int, leaf: Leaf) -> NamedSharding:
        """The sharding for an argument: its own where the program accepts any."""
        if not self.shards_state or self._split[index]:
            return self._inner_sharding(index, leaf) or self.shardings[index]
        key = (index, np.shape(leaf))
        dimension = None
        if key in self._dimensions:
            dimension = self._dimensions[key]
        elif arrays.has_place(leaf):
            dimension = self._replicas.dimension_of(leaf)
        return sharding_like(leaf, self._replicas, sharded_along(dimension))

    def _inner_sharding(self, index: int, leaf: Leaf) -> NamedSharding | None:
        """The sharding of an argument that is sharded over inner axes at most."""
        if not (self._replicas.inner_axes and arrays.has_place(leaf)):
            return None
        layout = STACKED if self._split[index] else REPLICATED
        return self._replicas.inner_placement(leaf, layout)

    def placed(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """The leaves, placed; those that need no move are the same objects."""
        self.check_once(leaves)  # two copies of one array may share memory
        return [self._place(index, leaf) for index, leaf in enumerate(leaves)]

    def check_once(self, leaves: Sequence[Leaf]) -> None:
        """Raises if a donated array is passed twice."""
        if not self._donated or len(set(map(id, leaves))) == len(leaves):
            return
        first: dict[int, int] = {}
        for index, leaf in enumerate(leaves):
            other = first.setdefault(id(leaf), index)
            twice = other != index and isinstance(leaf, jax.Array)
            if twice and self._donated & {index, other}:
                raise DonatedValueError(
                    f"{self._label(other)} and {self._label(index)} are one array, and "
                    "it is donated: the step cannot both overwrite and read it. Pass a "
                    "copy (`jnp.copy`) in one place, or do not donate."
                ) from None

    def _place(self, index: int, leaf: Leaf) -> jax.Array:
        if self._split[index]:
            self._check_replicas(index, leaf)
        if isinstance(leaf, Tracer):
            # With sharded state the program has no `in_shardings`, so tracers are
            # constrained here; with inner axes they stay as they are.
            is_free = not self.shards_state or self._replicas.inner_axes
            if is_free and not mesh.has_explicit_axes(leaf):
                return leaf
            return mesh.place(leaf, self.sharding(index, leaf))
        if not isinstance(leaf, jax.Array):
            return self._place_host(index, leaf)
        if leaf.is_deleted():
            raise DonatedValueError(
                f"{self._label(index)} was donated to an earlier call, which has "
                "reused its memory. Go on with the value that call returned, or leave "
                "the argument out of `donate_argnums`."
            )
        sharding = self.sharding(index, leaf)
        # On another mesh of the same devices it has another type, and would be
        # compiled for a second time; it moves without a copy.
        if mesh.has_sharding_on_mesh(leaf, sharding):
            if index in self.last_shardings:
                self.last_shardings[index] = leaf.sharding
            return leaf
        if not (self._is_sharded_state(leaf) or self._inner_sharding(index, leaf)):
            self._check_movable(index, leaf)
        return mesh.place(leaf, sharding)

    def _place_host(self, index: int, leaf: Leaf) -> jax.Array:
        # The jitted function would place it, too. But to JAX an array from the host has
        # another type than one on a mesh, so that the second call, with the returned
        # state, would compile again.
        if type(leaf) not in (int, float) or index in self._donated:
            return mesh.place(leaf, self.sharding(index, leaf))
        # 0.0 equals -0.0, and floats have another dtype where 64 bits are on.
        sign = type(leaf) is float and math.copysign(1.0, leaf)
        key = (type(leaf), leaf, sign, jax.config.jax_enable_x64)
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= _MAX_NUMBERS:
                self._numbers.clear()
            number = self._numbers[key] = mesh.place(leaf, self.shardings[index])
        return number

    def _check_replicas(self, index: int, leaf: Leaf) -> None:
        """Raise unless the `PerReplica` `leaf` has a version for each replica."""
        n = self._replicas.count
        shape = np.shape(leaf)
        if not shape or shape[0] != n:
            held = f"for {shape[0]} replicas" if shape else f"of shape {shape}"
            raise PlacementError(
                f"{self._label(index)} is a PerReplica {held}, but this strategy has "
                f"{n} replicas on {self._replicas.device_names}. Make it with this "
                "strategy: `strategy.per_replica([...])`, one entry per replica."
            )

    def _check_movable(self, index: int, leaf: jax.Array) -> None:
        """Raise if the sharding of `leaf` suggests a bug."""
        if not self._split[index]:
            _check_not_sharded(
                leaf, self._replicas, self._label(index), "a plain argument"
            )
        elif mesh.is_split(leaf.sharding):
            raise PlacementError(
                f"{self._label(index)} is a PerReplica of another strategy: it lies on "
                f"{devices.names(_devices_of(leaf))}, this strategy's replicas are on "
                f"{self._replicas.device_names}. Make it with this strategy, or read "
                "it first with the other one's `reduce` or `gather`."
            )

    def _is_sharded_state(self, array: jax.Array) -> bool:
        return self.shards_state and self._replicas.dimension_of(array) is not None

    def check_types(self, leaves: Sequence[Leaf]) -> None:
        """Raises unless each `PerReplica` has a version for each replica."""
        for index, leaf in enumerate(leaves):
            if self._split[index]:
                self._check_replicas(index, leaf)

    def check_captured(self, constants: Iterable[ProgramValue]) -> None:
        """Raises if a step captures an array whose sharding no argument may have."""
        for constant in constants:
            if arrays.is_placed(constant.value):
                name = f"What `{self._step.name}` captures, {constant.description},"
                arrays.check_alive(constant.value, name)
                what = "what a step captures"
                is_inner = self._replicas.inner_placement(constant.value, REPLICATED)
                if not (is_inner or self._is_sharded_state(constant.value)):
                    _check_not_sharded(constant.value, self._replicas, name, what)


def _check_not_sharded(
    array: jax.Array, replicas: Replicas, name: str, what: str
) -> None:
    """Raise if the shards of a plain array may be meant for the replicas."""
    ours = replicas.all_devices
    is_ours = len(ours) > 1 and bool(ours & array.sharding.device_set)
    if is_ours and mesh.is_divided(array):
        raise PlacementError(
            f"{name} is a plain array that is split over the replicas' devices (its "
            f"shape is {array.shape}), but {what} is the same on every replica. "
            f"{_advice_for_per_replica(array, replicas.count)} If every replica should "
            "see all of it, as of state that another strategy has divided, pass "
            "`strategy.mirror(array)`."
        )


def _advice_for_per_replica(array: jax.Array, replicas: int) -> str:
    """How to pass `array` if each replica should have one shard."""
    rows, *rest = array.shape
    part = array.sharding.shard_shape(array.shape)
    if rows % replicas or part != (rows // replicas, *rest):
        return (
            "If each replica should have its own part, arrange it as "
            f"`[{replicas}, ...]`, entry i for replica i, and pass `PerReplica(array)`."
        )
    if rows == replicas:
        return (
            "If entry i belongs to replica i, pass `PerReplica(array)`, which copies "
            "nothing. If it is state that is equal in all entries, as "
            "`flax.jax_utils.replicate` and `jax.pmap` make it, pass it without that "
            "dimension: `array[0]`, or `flax.jax_utils.unreplicate(tree)`."
        )
    divided = ", ".join(map(str, (replicas, rows // replicas, *rest)))
    return (
        "If each replica should have the rows on its device, pass "
        f"`PerReplica(array.reshape({divided}))`, whose rows stay where they are."
    )


def _devices_of(array: jax.Array) -> list[Device]:
    return sorted(array.sharding.device_set, key=lambda device: device.id)


class _Buffer(NamedTuple):
    """A variable that is an argument; the variable itself is not kept alive."""

    cell: Cell
    sharding: NamedSharding
    where: str  # where it lives, for messages; empty on all replicas


@final
class VariableBuffers:
    """The variables that are arguments of one program; immutable."""

    def __init__(self, replicas: Replicas, buffers: Sequence[_Buffer] = ()) -> None:
        self._replicated = replicas.sharding(REPLICATED)
        self._has_inner_axes = bool(replicas.inner_axes)
        # On all replicas: the first of `values`, which may be donated.
        self.local = [each for each in buffers if not each.where]
        self.local_cells = [each.cell for each in self.local]
        self.remote = [each for each in buffers if each.where]
        self.cells = [*self.local_cells, *(each.cell for each in self.remote)]
        self.is_empty = not self.cells

    @property
    def shardings(self) -> list[NamedSharding]:
        """The shardings of `values`."""
        local = [each.sharding for each in self.local]
        return local + [self._replicated] * len(self.remote)

    def values(self) -> list[jax.Array]:
        """The arguments for the program."""
        # Written out, because it is done for every variable at every step.
        local = [cell.array for cell in self.local_cells if cell.is_alone]
        if len(local) < len(self.local_cells):
            local = [cell.lend() for cell in self.local_cells]
        return local + list(map(self._copy_of, self.remote)) if self.remote else local

    def _copy_of(self, buffer: _Buffer) -> jax.Array:
        if access.is_traced():
            raise PlacementError(
                f"Variable {buffer.where}, not on all replicas, so a step "
                "that uses it cannot be part of a function that JAX traces "
                "(`jax.jit`, `jax.lax.scan`): it is copied before and after each "
                "step. Call the step outside, or make the variable in the scope of a "
                "MirroredStrategy."
            )
        return jax.device_put(buffer.cell[...], self._replicated)

    def store(self, values: Sequence[jax.Array]) -> None:
        """Stores the values after a step."""
        for cell, value in zip(self.local_cells, values, strict=False):
            cell.array = value
        remote = values[len(self.local_cells) :]
        for buffer, value in zip(self.remote, remote, strict=True):
            first = value.addressable_data(0)
            buffer.cell[...] = jax.device_put(first, buffer.sharding)

    def references(self, values: Sequence[jax.Array]) -> dict[Cell, jax.Ref]:
        """References with these values, for the trace of the program."""
        return dict(zip(self.cells, map(jax.new_ref, values), strict=True))

    def frozen(self, references: Mapping[Cell, jax.Ref]) -> list[jax.Array]:
        """The values of references at the end of the step, with their shardings."""
        arrays = []
        for reference, sharding in zip(
            references.values(), self.shardings, strict=True
        ):
            array = jax.freeze(reference)
            # Along inner axes XLA might shard what is to be replicated.
            if self._has_inner_axes or not sharding.is_fully_replicated:
                array = jax.lax.with_sharding_constraint(array, sharding)
            arrays.append(array)
        return arrays


@final
class VariableArguments:
    """The variables that are arguments of a program, after the traces so far.

    References are captured instead: JAX makes variables references where it traces the
    code that calls the step.
    """

    def __init__(self, step: ReplicaStep, recompile: Callable[[], object]) -> None:
        self._step = step
        self._recompile = recompile
        self._used: list[weakref.ref[Any]] = []
        self.buffers = VariableBuffers(step.replicas)
        self.are_used = False
        self.by_reference = False
        self.caller_is_traced = False

    def check_outside(self) -> None:
        """Raises where JAX differentiates with respect to a variable."""
        access.check_outside(used() for used in self._used)

    def traced(self, step: TracedStep, is_traced: bool) -> bool:
        """Adds the variables of a trace; returns whether the arguments changed."""
        on_death = weak_method(self, VariableArguments._drop_all)
        known = {ref() for ref in self._used}
        watched = (v for v in (*step.used, *step.results.variables) if v not in known)
        self._used += [weakref.ref(variable, on_death) for variable in watched]
        replicas, buffers = step.replicas, self.buffers
        cells, added, by_reference = set(buffers.cells), [], False
        for variable in step.used:
            cell, where = variable.cell, ""
            if cell in cells:
                continue
            if not variable.lives_on(replicas):
                where = f"{variable.name!r} lives on {variable.replicas.device_names}"
            elif is_traced or cell.is_reference:
                by_reference = True
                continue
            added.append(_Buffer(cell, variable.sharding, where))
        if not added and by_reference <= self.by_reference:
            return False
        self.are_used = True
        self.by_reference |= by_reference
        added = [*buffers.local, *buffers.remote, *added]
        self.buffers = VariableBuffers(replicas, added)
        return True

    def drop_references(self) -> bool:
        """Before a call: drops arguments that are references now; whether any was."""
        self.caller_is_traced = access.is_traced()
        buffers = self.buffers
        traced = bool(buffers.local) and self.caller_is_traced
        if not traced and not any([cell.array is None for cell in buffers.local_cells]):
            return False
        self.by_reference = True
        local = [x for x in buffers.local if not (traced or x.cell.is_reference)]
        self.buffers = VariableBuffers(self._step.replicas, [*local, *buffers.remote])
        return True

    def in_references(self) -> list[tuple[jax.Ref, jax.Array]]:
        """The references that the step may change in place, and their values."""
        used = [variable.cell for ref in self._used if (variable := ref()) is not None]
        return [(cell.ref, cell[...]) for cell in used if cell.is_reference]

    def _drop_all(self, _: object) -> None:
        """Callback of a variable that died: compiles again."""
        if self._step.is_alive:
            self._used, self.by_reference = [], False
            self.buffers = VariableBuffers(self._step.replicas)
            self._recompile()
