"""`plan`: the layouts in which a step could run, compared without running it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import jax

from jaxstrategy._src import text
from jaxstrategy._src.contexts import context as _context
from jaxstrategy._src.errors import ContextError
from jaxstrategy._src.executors.executor import CompiledStep, ReplicatedFunction
from jaxstrategy._src.options import RunOptions
from jaxstrategy._src.replicas import devices as _devices
from jaxstrategy._src.replicas.inner_axes import is_spec
from jaxstrategy._src.replicas.mesh import axes_of
from jaxstrategy._src.replicas.state_sharding import StateSharding
from jaxstrategy._src.replicas.topology import Topology
from jaxstrategy._src.strategies.mirrored import MirroredStrategy
from jaxstrategy._src.strategies.strategy import Strategy
from jaxstrategy._src.text import (
    bytes_of,
    columns,
    positive,
    shown,
    with_bytes,
    with_seconds,
)
from jaxstrategy._src.tracing.explanation import compiled_program
from jaxstrategy._src.tracing.explanation.explain import nbytes_of
from jaxstrategy._src.tracing.explanation.explanation import Explanation, Memory
from jaxstrategy._src.tracing.init import InnerShardings
from jaxstrategy._src.tracing.traced_step import name_of
from jaxstrategy._src.values.arrays import Function, Leaf, PyTree
from jaxstrategy._src.values.per_replica import PerReplica, contents, is_per_replica
from jaxstrategy._src.values.trees import annotated_leaves

_NUMBERS = ("memory", "flops", "memory_bandwidth", "bandwidth", "call_seconds")
# Of data sheets, by a part of `device_kind`: bytes; operations a second in products of
# 16-bit matrices; bytes a second of the memory, and one way over the links.
_PUBLISHED = {
    "B200": (180e9, 2250e12, 8e12, 900e9),
    "H200": (141e9, 989e12, 4.8e12, 450e9),
    "H100": (80e9, 989e12, 3.35e12, 450e9),
    "A100": (80e9, 312e12, 2e12, 300e9),
    "V100": (16e9, 125e12, 0.9e12, 150e9),
    "L4": (24e9, 121e12, 0.3e12, 32e9),
    "T4": (16e9, 65e12, 0.3e12, 16e9),
    "TPU v4": (32 * 2**30, 275e12, 1.2e12, 150e9),
    "TPU v5 lite": (16 * 2**30, 197e12, 0.82e12, 100e9),
    "TPU v5": (95 * 2**30, 459e12, 2.76e12, 300e9),
    "TPU v6 lite": (32 * 2**30, 918e12, 1.64e12, 224e9),
}


@final
@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices by numbers, for `js.plan`. Made by `planning.describe`.

    Attributes:
      kind: what they are called.
      devices: what XLA compiles for.
      memory: bytes of one device; None where that is not known.
      flops: floating-point operations that one can do in a second.
      memory_bandwidth: bytes that one can read or write in a second.
      topology: the links between them.
      call_seconds: how long the host takes to start a program on all of them.
      is_here: whether they are devices of this process.

    >>> import jaxstrategy as js
    >>> from jaxstrategy import planning
    >>> _ = js.simulate(8)
    >>> planning.describe("A100", count=2).topology.bandwidth
    300000000000.0
    """

    kind: str
    devices: Sequence[_devices.Device] = dataclasses.field(repr=False)
    memory: int | None
    flops: float
    memory_bandwidth: float
    topology: Topology
    call_seconds: float
    is_here: bool

    def __post_init__(self) -> None:
        links, count = self.topology, len(self.devices)
        if not isinstance(links, Topology):
            raise TypeError(
                f"`topology` was {shown(links)}; a `js.profiling.Topology` was wanted, "
                "for example what `strategy.measure_links()` returns."
            )
        if links.replicas != count:
            raise ValueError(
                f"`topology` was that of {links.replicas} replicas, but there are "
                f"{count} devices. Give `topology.with_replicas({count})`."
            )

    def __str__(self) -> str:
        of = "" if self.memory is None else f" of {with_bytes(self.memory)}"
        return f"{len(self.devices)} {self.kind}{of}"


def describe(
    what: str | Sequence[_devices.Device | str] | None = None,
    *,
    count: int | None = None,
    memory: int | str | None = None,
    flops: float | None = None,
    memory_bandwidth: float | None = None,
    bandwidth: float | None = None,
    call_seconds: float | None = None,
    topology: Topology | None = None,
) -> Machine:
    """Devices by numbers, for `js.plan`: those given, else those of data sheets.

    They are devices of this process, by default all; or a slice of TPUs, as `"v5p-64"`
    or `"v5e:4x8"`, which need not be here, as XLA compiles for it where `libtpu` is
    installed; or GPUs by a `count` and a name, such as `"H100"`, or numbers. XLA cannot
    compile for GPUs that are not here, so that programs are those of as many simulated
    CPU devices (`js.simulate`): the state is right to the byte, what a step needs in
    between is near.

    Args:
      what: devices or names, see above.
      count: how many GPUs.
      memory: of one device, in bytes or as `"80GiB"`.
      flops: floating-point operations that one device can do in a second; published
        ones are those of products of 16-bit matrices, those of CPUs a guess.
      memory_bandwidth: bytes that it can read or write in a second.
      bandwidth: bytes that it can send in a second.
      call_seconds: how long the host takes to start a program on all of them.
      topology: the links in more detail, such as `strategy.measure_links()`.

    Raises:
      ValueError: nothing is known by this name, a number is missing or not positive, or
        there are too few simulated devices.
      TypeError: `count` is no whole number, `memory` no size, `topology` none.
      RuntimeError: `libtpu` is missing, or cannot make such a slice.

    >>> import jaxstrategy as js
    >>> from jaxstrategy import planning
    >>> _ = js.simulate(8)
    >>> print(planning.describe("H100", count=8))
    8 H100 of 74.5 GiB
    """
    size = None if memory is None else bytes_of(memory)
    given = (size, flops, memory_bandwidth, bandwidth, call_seconds)
    told = {x: y for x, y in zip(_NUMBERS, given, strict=True) if y is not None}
    for name, number in told.items():
        if not number > 0:
            raise ValueError(f"`{name}` was {number}; a positive number was wanted.")
    numbers: dict[str, Any] = {"call_seconds": 5e-5}
    kind = name = str(what or "devices")
    if is_here := count is None and not re.match(r"v\d", kind):
        devices = _devices.default_devices() if what is None else _devices.choose(what)
        kind = name = devices[0].device_kind
        # A guess, of simulated devices, which share the cores.
        shared = ((os.cpu_count() or 1) * 1e11, 4e10, 1e10)
        guess = (None, *(each / len(devices) for each in shared), 3e-4)
        numbers = dict(zip(_NUMBERS, guess, strict=True))
    elif count is None:
        devices = _devices.tpu_slice(kind)
        name = devices[0].device_kind
    elif len(devices := jax.local_devices(backend="cpu")) < positive("count", count):
        raise ValueError(
            f"Programs for {count} GPUs that are not here are compiled for as many "
            f"simulated devices, and there are {len(devices)}. Call "
            f"`js.simulate({count})` before anything uses JAX's devices."
        )
    devices = tuple(devices[:count])
    known = (each for part, each in _PUBLISHED.items() if part in name)
    numbers |= zip(_NUMBERS, next(known, ()), strict=False)
    if is_here and (stats := devices[0].memory_stats()):
        numbers["memory"] = stats.get("bytes_limit", numbers["memory"])
    numbers |= told | ({} if topology is None else {"bandwidth": 1.0})
    if missing := [each for each in _NUMBERS if each not in numbers]:
        raise ValueError(
            f"`{missing[0]}` of {name!r} is not known. Give `memory=`, `flops=`, "
            "`memory_bandwidth=` and `bandwidth=`, or the name of one of "
            f"{', '.join(_PUBLISHED)}."
        )
    links = Topology(numbers.pop("bandwidth"), 1e-5, len(devices))
    links = links if topology is None else topology
    return Machine(kind, devices, topology=links, is_here=is_here, **numbers)


# Of layouts that take about as long, the one that says less is better.
_SIMPLER = 1.02
# Where so many fit, the others are not compiled.
_ENOUGH = 6
# Steps in a call, tried where starting a program is so much of a step.
_SEVERAL, _CALLS = 8, 0.2


@dataclasses.dataclass(frozen=True)
class _Step:
    """What is planned, and where: the same for all layouts."""

    machine: Machine
    types: PyTree
    batch: PyTree
    specs: PyTree
    function: Function
    options: RunOptions | None

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    @property
    def rows(self) -> int:
        return jax.tree.leaves(self.batch)[0].shape[0]


@final
@dataclasses.dataclass(frozen=True)
class PlannedLayout:
    """One way to run a step, and what it would take. An entry of a `Plan`.

    Attributes:
      arguments: of `MirroredStrategy`, by name.
      accumulate: in how many parts the step takes the batch of a replica.
      several: how many steps one call makes.
      state_bytes: of the state on one device, between steps.
      memory: of one device, as XLA reports it; None if it was not compiled.
      seconds: of one step, by what takes them: `"operations"` and `"memory traffic"`,
        which go on at once, `"communication"`, and `"calls"`; empty likewise.
      reason: why it was not compiled; else empty.

    >>> import jaxstrategy as js
    >>> _ = js.simulate(8)
    >>> w, batch = jnp.ones(3), np.ones((8, 2))
    >>> layout = js.plan(w, lambda w, x: w + 1, batch, memory="1MiB")[-1]
    >>> layout.name, layout.reason
    ("sharding='state'", 'no array of the state is large enough to be divided')
    """

    _step: _Step = dataclasses.field(repr=False, compare=False)
    arguments: Mapping[str, Any]
    accumulate: int = 1
    several: int = 1
    state_bytes: int = 0
    memory: Memory | None = None
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    reason: str = ""
    _least: float = dataclasses.field(default=0.0, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The layout in words."""
        told = dict(self.arguments, accumulate=self.accumulate, several=self.several)
        told["sharding"] = getattr(told.get("sharding", 1), "shard", 1)
        found = [f"{name}={value!r}" for name, value in told.items() if value != 1]
        return ", ".join(found) or "replicated"

    @property
    def left(self) -> float:
        """The bytes that a device has left, below zero where they do not suffice."""
        used = math.inf if self.memory is None else self.memory.peak
        return (self._step.machine.memory or 0) - used

    @property
    def fits(self) -> bool:
        """Whether it was compiled, and a device has the memory for it."""
        return self.left >= 0

    @property
    def step_seconds(self) -> float:
        """The predicted time of a step; infinite if it was not compiled."""
        operations, traffic, *rest = self.seconds.values() or [math.inf] * 2
        return max(operations, traffic) + sum(rest)

    @property
    def limited_by(self) -> str:
        """The longest part of a step, or `"memory"` if that does not suffice."""
        longest = max(self.seconds, key=self.seconds.__getitem__, default="memory")
        return longest if self.fits else "memory"

    def strategy(self) -> MirroredStrategy:
        """A new strategy with this layout, on the devices of the plan.

        Raises:
          ValueError: these devices are not here.
        """
        machine = self._step.machine
        if not machine.is_here:
            raise ValueError(
                f"The plan is for {machine}, which are not here. There, call "
                f"`MirroredStrategy` with {dict(self.arguments) or 'no arguments'}."
            )
        return MirroredStrategy(machine.devices, **self.arguments)

    def step(self, strategy: Strategy) -> ReplicatedFunction:
        """The step as this layout calls it, decorated by a strategy.

        With `several`, its last argument is a tuple of so many batches.
        """
        function, options = self._step.function, self._step.options
        if self.accumulate > 1:
            part = functools.partial(function, accumulate=self.accumulate)
            function = functools.wraps(function)(part)
        decorate = strategy.several if self.several > 1 else strategy.step
        return decorate(function, options=options)

    def explain(self, compiled: bool = True) -> Explanation:
        """The report of `strategy.explain`; the step is traced and compiled anew."""
        strategy, step, args = self._call()
        links = self._step.machine.topology.with_replicas(self._num_replicas)
        with _context.outside():
            return strategy.explain(step, args, topology=links, compiled=compiled)

    @property
    def _num_replicas(self) -> int:
        inner = self.arguments.get("logical_axes", {}).values()
        return len(self._step.machine.devices) // math.prod(inner)

    def _call(self) -> tuple[Strategy, ReplicatedFunction, tuple[PyTree, ...]]:
        step, count = self._step, self._num_replicas
        strategy = Strategy(step.machine.devices, **self.arguments)

        def divided(leaf: Leaf) -> PerReplica:  # filled up, as a dataset does
            rows, *rest = leaf.shape
            return PerReplica(_typed(leaf, count, -(-rows // count), *rest))

        batch = jax.tree.map(divided, step.batch)
        last = batch if self.several == 1 else (batch,) * self.several
        state = InnerShardings(step.specs, (), strategy._replicas).typed(step.types)
        required = [x for x in step.parameters.values() if x.default is x.empty]
        is_spread = isinstance(state, tuple) and len(required) == len(state) + 1 > 2
        return strategy, self.step(strategy), (*(state if is_spread else [state]), last)

    def _traced(self) -> PlannedLayout:
        count, machine = self._num_replicas, self._step.machine
        leaves, sharding = (
            jax.tree.leaves(self._step.types),
            self.arguments.get("sharding"),
        )
        useless = "no array of the state is large enough to be divided"
        if sharding and not any(sharding.is_divisible(leaf, count) for leaf in leaves):
            useless = "there is one replica" if count == 1 else useless
            return dataclasses.replace(self, reason=useless)
        found, state, reason = self.explain(compiled=False), nbytes_of(leaves), ""
        if found.sharding is not None:
            state = found.sharding.state_bytes
            reason = useless if sharding and not found.sharding.divided else ""
        if not reason and state > (machine.memory or 0):
            reason = f"the state alone takes {with_bytes(state)}"
        # Without latencies, as XLA may join what is sent; where the devices of a
        # replica divide it, each sends a part. State is read and written.
        links = dataclasses.replace(found.topology, latency=0, messages=(), spread=())
        least = found.communication_time(links) * count / len(machine.devices)
        least += 2 * state / machine.memory_bandwidth
        return dataclasses.replace(self, state_bytes=state, reason=reason, _least=least)

    def _compiled(self) -> PlannedLayout:
        strategy, step, args = self._call()
        with _context.outside():
            program = strategy.compile(step, args).compiled
        found, machine = compiled_program.figures(program), self._step.machine
        memory, moved = found.memory, found.moved
        if machine.devices[0].platform == "cpu":
            if self.several > 1 and " convolution(" in found.module.text:
                raise NotImplementedError("XLA on CPUs is slow at them in loops")
            # Memory for what is in between is fresh in each call.
            moved += 0 if memory is None else memory.temporary
        sent = found.module.collectives(strategy._replicas, outermost=__file__)
        # Links are measured by a ring, which takes that time. On TPUs XLA
        # does not say how often loops turn, and the trace does.
        algorithm = "ring" if machine.topology.messages else "fastest"
        sending = sum(each.seconds(machine.topology, algorithm) for each in sent)
        traffic = 2 * self.state_bytes / machine.memory_bandwidth
        seconds = {
            "operations": found.operations / machine.flops,
            "memory traffic": moved / machine.memory_bandwidth,
            "communication": max(sending, self._least - traffic),
            "calls": machine.call_seconds / self.several,
        }
        if self.several > 1:  # of the same step
            seconds = {**self.seconds, "calls": seconds["calls"]}
        return dataclasses.replace(self, memory=memory, seconds=seconds, reason="")

    def _tried(self, compiled: bool = True) -> PlannedLayout:
        """What is known of it, compiled or traced, or the reason why it cannot be."""
        try:
            return self._compiled() if compiled else self._traced()
        except Exception as error:  # of the user's step, or XLA's
            line = str(error).strip().partition("\n")[0]
            reason = f"not possible: {type(error).__name__}: {line}"[:100]
            return dataclasses.replace(self, reason=reason, memory=None)

    def _rank(self) -> tuple[int, float]:
        """The order of a plan: what fits, by time; what does not; the rest."""
        if self.fits:
            words = self.name.count("=") + ("'state'" in self.name)
            return 0, self.step_seconds * _SIMPLER**words
        return (2, self.state_bytes) if self.memory is None else (1, -self.left)


def plan(
    build: Callable[[], PyTree] | PyTree,
    step: Function,
    batch: PyTree,
    *,
    devices: Machine | Sequence[_devices.Device | str] | str | None = None,
    memory: int | str | None = None,
    topology: Topology | None = None,
    specs: PyTree = None,
    options: RunOptions | None = None,
) -> Plan:
    """The layouts in which a step could run, best first, without running any.

    The step is traced and compiled for each, of types alone: nothing is allocated on a
    device. Layouts are replicated state, `StateSharding("optimizer")` and `("state")`,
    `logical_axes` where the model is annotated, and both together; the batch in parts
    where memory does not suffice, if the step has a parameter `accumulate`; several
    steps in a call where starting a program takes much of a step. What is not worth
    compiling, by its state or what it must move, is listed with the reason.

    Memory is what XLA reserves. A step's time is that of its operations or of memory
    traffic, whatever is longer, plus its collectives one after the other, plus the
    host's part: it says which layout is faster, not how long a step will take.

    Args:
      build: makes the state, as for `strategy.init`, but takes no arguments; or a
        pytree of types.
      step: the unchanged step, of the state and a batch, as one replica sees it; or
        what `@strategy.run` made of one. Of a tuple of states it may take each by
        itself. A parameter `accumulate=1` is for `js.get_strategy().accumulate`.
      batch: a global batch, of all replicas together, `[rows, ...]`; arrays or types,
        or the `element_spec` of a dataset.
      devices: what `planning.describe` returns, or takes as its first argument.
      memory: bytes of one device, such as `"16GiB"`; by default what it has.
      topology: the links between devices.
      specs: as for `strategy.init`.
      options: how the step is compiled; by default as it was decorated.

    Raises:
      ValueError: the memory of the devices is not known; the arrays of `batch` have no
        rows, or not as many; `topology` is of another number of devices.
      TypeError: `step` cannot be called, `build` needs arguments; `memory` is no size,
        `topology` none.
      ContextError: it is called in a step.
      Exception: whatever the step raises in every layout.

    >>> import jaxstrategy as js
    >>> _ = js.simulate(8)
    >>> def build():
    ...     return {"w": jnp.zeros((512, 512)), "m": jnp.zeros((512, 512))}
    >>> def step(state, x):
    ...     grad = jax.grad(lambda w: ((x @ w) ** 2).mean())(state["w"])
    ...     m = state["m"] + js.get_replica_context().all_reduce("mean", grad)
    ...     return {"w": state["w"] - 0.1 * m, "m": m}
    >>> batch = jax.ShapeDtypeStruct((64, 512), np.float32)
    >>> donate = js.RunOptions(donate_argnums=0)
    >>> plan = js.plan(build, step, batch, memory="3.5MiB", options=donate)
    >>> sorted(layout.name for layout in plan if layout.fits)
    ["sharding='optimizer'", "sharding='state'"]
    >>> train = plan.best.step(plan.best.strategy())
    """
    if isinstance(step, (ReplicatedFunction, CompiledStep)):
        step, options = step.function, step.options if options is None else options
    if not callable(step):
        raise TypeError(
            f"`plan` was given {shown(step)} as the step, which cannot be called. Give "
            "the function itself: `js.plan(build, step, batch)`."
        )
    if _context.current().in_step:
        raise ContextError("`plan` was called in a step. Call it outside of `run`.")
    machine = devices if isinstance(devices, Machine) else describe(devices)
    size = machine.memory if memory is None else bytes_of(memory)
    if size is None:
        have = "has" if len(machine.devices) == 1 else "have"
        raise ValueError(
            f"How much memory {machine} {have} is not known. Give that of one device: "
            '`memory="16GiB"`.'
        )
    links = machine.topology if topology is None else topology
    machine = dataclasses.replace(machine, memory=size, topology=links)
    if callable(build) and jax.tree_util.all_leaves([build]):
        try:
            inspect.signature(build).bind()
        except TypeError as error:
            raise TypeError(
                f"`build` was {shown(build)}, which takes arguments. Give it with "
                "them, such as `functools.partial(build, key)`."
            ) from error
        except ValueError:  # it has no signature
            pass
        types = jax.eval_shape(build)
    else:
        types = _types("build", build)
    of_batch = _types("batch", batch)
    if len(counts := {x.shape[0] for x in jax.tree.leaves(of_batch)}) != 1:
        raise ValueError(
            f"`batch` was {shown(batch)}, whose arrays have "
            f"{' or '.join(map(str, sorted(counts))) or 'no'} rows. One array at least "
            "was wanted, and as many rows in all of them."
        )
    return Plan(_Step(machine, types, of_batch, specs, step, options))


def _types(name: str, tree: PyTree) -> PyTree:
    """The types of the state, or of a batch of all replicas together."""

    def typed(path: tuple[Any, ...], leaf: Any) -> Any:
        where = f"`{name}{jax.tree_util.keystr(path)}` was {shown(leaf)}"
        is_divided = name == "batch" and is_per_replica(leaf)
        try:
            found = jax.eval_shape(lambda x: x, contents(leaf) if is_divided else leaf)
        except TypeError as error:
            raise TypeError(
                f"{where}; an array that JAX can hold was wanted, or its type."
            ) from error
        if is_divided:
            found = _typed(found, math.prod(found.shape[:2]), *found.shape[2:])
        if name == "batch" and not any(found.shape[:1]):
            raise ValueError(
                f"{where}; an array of shape [rows, ...] was wanted, or its type, with "
                "the rows of all replicas."
            )
        return found

    return jax.tree.map_with_path(typed, tree, is_leaf=is_per_replica)


def _typed(leaf: Leaf, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def _candidates(step: _Step) -> Iterator[PlannedLayout]:
    """The layouts to look at, the simplest first."""
    specs: list[Any] = [spec for _, _, spec in annotated_leaves(step.types)]
    specs += filter(is_spec, jax.tree.leaves(step.specs, is_leaf=is_spec))
    entries = [entry for spec in specs for entry in spec or ()]
    axes = list(dict.fromkeys(name for entry in entries for name in axes_of(entry)))
    count, inner = len(step.machine.devices), [{}]
    divisors = [size for size in range(2, count + 1) if count % size == 0]
    for each in itertools.product(divisors, repeat=len(axes)):
        if axes and count % math.prod(each) == 0:
            inner.append({"logical_axes": dict(zip(axes, each, strict=True))})
    for arguments in inner:
        yield PlannedLayout(step, arguments)
        for shard in ("optimizer", "state"):
            yield PlannedLayout(step, {"sharding": StateSharding(shard)} | arguments)


def _searched(step: _Step) -> Iterator[PlannedLayout]:
    """All layouts, with what is known of them."""
    plain, *others = [layout._tried(compiled=False) for layout in _candidates(step)]
    if not any(layout.state_bytes for layout in (plain, *others)):
        plain._traced()  # raises
    fitting: list[PlannedLayout] = []
    # What the devices of a replica exchange is known of programs only.
    others.sort(key=lambda layout: ("logical_axes" in layout.arguments, layout._least))
    for layout in (plain, *others):
        reason, least = layout.reason, layout._least
        if not reason and len(fitting) >= _ENOUGH:
            reason = f"{_ENOUGH} that seem better fit"
        if not reason and any(least > other.step_seconds for other in fitting):
            reason = f"what it moves takes {with_seconds(least)}"
        made = dataclasses.replace(layout, reason=reason) if reason else layout._tried()
        yield made
        if made.memory is not None and not made.fits:
            made = _in_parts(made)
            yield from [made] if made.accumulate > 1 else []
        fitting += [made] if made.fits else []
    for layout in sorted(fitting, key=PlannedLayout._rank)[:2]:
        if layout.seconds["calls"] > _CALLS * layout.step_seconds:
            yield dataclasses.replace(layout, several=_SEVERAL)._tried()


def _in_parts(layout: PlannedLayout) -> PlannedLayout:
    """The same with the fewest parts of a batch that fit, or that take the least."""
    between = layout.memory.temporary if layout.memory is not None else 0
    if "accumulate" not in layout._step.parameters or layout.left + between <= 0:
        return layout
    # What is needed in between seldom shrinks by more than the number of parts.
    best, least = layout, max(between / (layout.left + between), 2)
    rows = -(-layout._step.rows // layout._num_replicas)
    for parts in (n for n in range(2, rows + 1) if rows % n == 0):
        if best.fits or parts > 16 * least:
            break
        if parts >= least:
            made = dataclasses.replace(layout, accumulate=parts)._tried()
            # The first parts need a sum of gradients, which may be more than they save.
            if made.memory is None or (best is not layout and made.left <= best.left):
                break
            # Nothing is faster in parts.
            slower = {x: max(made.seconds[x], y) for x, y in layout.seconds.items()}
            best, least = dataclasses.replace(made, seconds=slower), 2 * parts
    return best


_HEADER = ("", "layout", "memory of a device", "left", "step", "limited by")


@final
class Plan:
    """The layouts in which a step could run, a sequence. Made by `js.plan`.

    Prints as a table: what fits, the fastest first (of about equal ones the simplest);
    then what does not, and what was not compiled.

    Attributes:
      machine: the devices.
      layouts: all of them.
      advice: what would help, in sentences, where nothing fits.

    >>> import jaxstrategy as js
    >>> _ = js.simulate(8)
    >>> w, batch = jnp.ones(3), np.ones((8, 2))
    >>> plan = js.plan(w, lambda w, x: w + 1, batch, memory="1MiB")
    >>> plan.best is plan[0], plan.advice
    (True, ())
    """

    def __init__(self, step: _Step) -> None:
        self.machine, function = step.machine, step.function
        self.layouts = tuple(sorted(_searched(step), key=PlannedLayout._rank))
        self.advice = () if self.layouts[0].fits else tuple(_advice(self.layouts))
        while isinstance(function, functools.partial):
            function = function.func
        self._title = f"Plan of `{name_of(function)}` on {step.machine}"

    def __getitem__(self, index: int) -> PlannedLayout:
        return self.layouts[index]

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def best(self) -> PlannedLayout:
        """The first layout.

        Raises:
          ValueError: none fits; it says what would help.
        """
        if not self.layouts[0].fits:
            raise ValueError("\n".join(self._sentences()))
        return self.layouts[0]

    def __repr__(self) -> str:
        lines = [line[2:] for line in columns([_HEADER, *self._rows()])]
        return "\n".join([self._title, *lines, *self._sentences()])

    def _repr_html_(self) -> str:
        told = map(text.paragraph, self._sentences())
        return text.page(self._title, [text.table(_HEADER, self._rows()), *told])

    def plot(self) -> Any:
        """A `matplotlib` figure: the memory and the time of each compiled layout."""
        import matplotlib.pyplot as plt

        known = [each for each in self.layouts if each.memory][::-1]
        size = (11, 1.2 + 0.4 * len(known))
        figure, (left, right) = plt.subplots(1, 2, figsize=size, sharey=True)
        names = [each.name for each in known]
        left.barh(names, [x.memory.peak / 2**20 for x in known if x.memory])
        left.axvline((self.machine.memory or 0) / 2**20, color="tab:red")
        left.set_xlabel("MiB on a device; red: what it has")
        # Each bar covers the one before, but for its own part.
        sent, calls = ("communication", "calls"), ("calls",)
        right.barh(
            names,
            [1e3 * x.step_seconds for x in known],
            label="operations, memory traffic",
        )
        for parts in (sent, calls):
            told = [1e3 * sum(x.seconds[each] for each in parts) for x in known]
            right.barh(names, told, label=parts[0])
        right.set_xlabel("predicted ms of a step")
        right.legend(loc="upper left", bbox_to_anchor=(1, 1))
        figure.tight_layout()
        plt.close(figure)
        return figure

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for i, x in enumerate(self.layouts):
            if x.memory is None:
                least = f"> {with_bytes(x.state_bytes)}" if x.state_bytes else ""
                yield str(i), x.name, least, "", "", x.reason
                continue
            left = f"{'-' * (not x.fits)}{with_bytes(abs(x.left))}"
            peak, seconds = with_bytes(x.memory.peak), with_seconds(x.step_seconds)
            yield str(i), x.name, peak, left, seconds, x.limited_by

    def _sentences(self) -> list[str]:
        fitting = [each for each in self.layouts if each.fits]
        if not fitting:
            size = with_bytes(self.machine.memory or 0)
            return [f"No layout fits into {size}.", *self.advice]
        name = f"`{fitting[0].name}` is the"
        if len(fitting) == 1:
            return [f"{name} only layout that fits."]
        first, second = fitting[:2]
        ratio = second.step_seconds / first.step_seconds
        if ratio < _SIMPLER:
            return [f"{name} simplest of the fastest that fit."]
        most = max(first.seconds, key=lambda x: second.seconds[x] - first.seconds[x])
        return [
            f"{name} fastest of {len(fitting)} layouts that fit: `{second.name}` takes "
            f"{ratio:.2f} times as long, by its {most}."
        ]


def _advice(layouts: Sequence[PlannedLayout]) -> Iterator[str]:
    """What would help where none fits, in sentences."""
    known = [each for each in layouts if each.accumulate == 1 and each.state_bytes]
    known = known or [each for each in layouts if each.memory]  # there is no state
    least = max(known, key=lambda each: each.left)
    if least.memory is None:
        least = min(known, key=lambda each: (each.state_bytes, each._least))._tried()
    if least.memory is None:
        return
    step, peak, state = least._step, least.memory.peak, least.state_bytes
    yield (
        f"The least is `{least.name}`, {with_bytes(peak)}, of which the state takes "
        f"{with_bytes(state)}. What would help:"
    )
    found = least.explain(compiled=False)
    if 0 in found.donate_argnums and not found.donated:
        told = f"a step reuses the memory of its state, {with_bytes(state)}."
        yield f"- `options=js.RunOptions(donate_argnums=0)`: {told}"

    def peak_of(count: int) -> float:
        batch = jax.tree.map(lambda x: _typed(x, count, *x.shape[1:]), step.batch)
        fewer = dataclasses.replace(step, batch=batch)
        memory = dataclasses.replace(least, _step=fewer)._tried().memory
        return math.inf if memory is None else memory.peak

    limit, growing = (
        least.left + peak,
        2 * max(peak - peak_of(max(step.rows // 2, 1)), 0),
    )
    fixed = peak - growing
    if growing and limit > fixed:
        fewer = int(step.rows * (limit - fixed) / growing)
        fewer -= fewer % found.num_replicas
        if fewer and (needed := peak_of(fewer)) <= limit:
            yield f"- {fewer} rows in place of {step.rows}: {with_bytes(needed)}."
    has_parts = "accumulate" in step.parameters
    parts = (
        "Rows with more divisors"
        if has_parts
        else "A parameter `accumulate` of the step"
    )
    yield (
        f"- {parts}, or `jax.checkpoint` around layers: "
        f"{with_bytes(growing)} grow with the rows, {with_bytes(fixed)} do not."
    )
    # On each of n devices there are 1/n of the rows, and of what is divided.
    n = len(step.machine.devices)
    divided = (nbytes_of(jax.tree.leaves(step.types)) - state) / (n - 1) if n > 1 else 0
    if limit > fixed - divided and growing + divided:
        more = math.log2((growing + divided) / (limit - fixed + divided))
        yield f"- {n * 2 ** math.ceil(more)} devices in place of {n}, about."
