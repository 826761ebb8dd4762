"""`Explanation`: what one call of a step would do, as data and as a report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, final

from jaxstrategy._src import text
from jaxstrategy._src.replicas.inner_axes import WHOLE, InnerSpec
from jaxstrategy._src.replicas.topology import Topology
from jaxstrategy._src.text import (
    Line,
    and_more,
    array_type,
    columns,
    with_bytes,
    with_noun,
    with_prefix,
    with_seconds,
)


@final
@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """A description of a step, without running it. Prints as a report.

    Made by `Strategy.explain`.

    Attributes:
      name: the step's.
      num_replicas: how many replicas it was explained for.
      collectives: over the replicas, in program order, one entry for each place in the
        program.
      mirrored: the results that are equal on all replicas.
      per_replica: the results that may differ, with the line where they began to.
      static_arguments: what the step was specialised for, by argument; another value
        compiles another program.
      variables: names of the variables that it reads or assigns.
      donated: the arguments whose memory the step may reuse.
      donatable: further arguments whose memory it could reuse.
      donate_argnums: positions of arguments that could be donated whole, those that
        are already included.
      problems: what `run` would refuse or warn about.
      topology: what the report predicts communication times for.
      memory: of the compiled program, None if it was not compiled or XLA does not say.
      flops: floating-point operations of one device in the compiled program, as XLA
        counts them (a loop's body once); None likewise.
      has_loops: whether that program has loops, so that `flops` are the least there
        may be.
      uncounted_calls: names of library calls and kernels in it whose operations nobody
        counts, so that they are likewise.
      sharding: how state lies and why, and what is gathered and scattered for it; None
        if the strategy has no `sharding=`, no variable is divided, and each replica is
        one device.
      replicas_per_device: how many replicas share a device.
      logical_axes: the names and sizes of the axes of devices inside a replica.
      compiled_collectives: what the devices exchange in the compiled program, over the
        replicas and inside them; None if it was not compiled.

    >>> import jaxstrategy as js
    >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
    >>> def step(w, x):
    ...     mean = js.get_replica_context().all_reduce("mean", x)
    ...     return w - mean, x
    >>> shapes = jax.ShapeDtypeStruct((3,), "f4"), jax.ShapeDtypeStruct((2, 3), "f4")
    >>> found = strategy.explain(step, (shapes[0], js.PerReplica(shapes[1])))
    >>> [value.path for value in found.mirrored], found.communicated_bytes
    (['step(...)[0]'], 12)
    """

    name: str
    num_replicas: int
    collectives: tuple[ExplainedCollective, ...]
    mirrored: tuple[ExplainedValue, ...]
    per_replica: tuple[ExplainedValue, ...]
    static_arguments: dict[str, Any]
    variables: tuple[str, ...]
    donated: tuple[ExplainedValue, ...]
    donatable: tuple[ExplainedValue, ...]
    donate_argnums: tuple[int, ...]
    problems: tuple[str, ...]
    topology: Topology
    memory: Memory | None = None
    flops: float | None = None
    sharding: ExplainedSharding | None = None
    replicas_per_device: int = 1
    logical_axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    compiled_collectives: tuple[ExplainedCollective, ...] | None = None
    has_loops: bool = False
    uncounted_calls: tuple[str, ...] = ()

    @property
    def communicated_bytes(self) -> int:
        """The bytes that one replica gives to collectives over replicas in a step.

        The body of a loop of unknown length counts once, and each branch counts.
        """
        return total_bytes(self.collectives)

    @property
    def inner_collectives(self) -> tuple[ExplainedCollective, ...] | None:
        """Collectives of the compiled program between devices of one replica.

        XLA puts them in where arrays lie over the logical axes. None if the step was
        not compiled.
        """
        if self.compiled_collectives is None:
            return None
        return tuple(found for found in self.compiled_collectives if found.is_inner)

    @property
    def inner_bytes(self) -> int | None:
        """The bytes that one device gives to those in a step, as above."""
        found = self.inner_collectives
        return None if found is None else total_bytes(found)

    def communication_time(
        self, topology: Topology, algorithm: str = "fastest"
    ) -> float:
        """The predicted seconds that a step's collectives take on `topology`.

        Each collective counts by itself, one after the other, as often as
        `least_times` says; XLA may merge neighbours, which saves latency, and overlap
        them with computation. The formulas are those of `Topology`. Where replicas
        share devices, the devices are at the ends of the links, and each has as many of
        the topology's replicas. Where a replica has several devices, arrays count as if
        each sent all of them: what lies over the logical axes takes less.

        Args:
          topology: links and number of replicas.
          algorithm: `"ring"`, `"tree"`, or `"fastest"`: for each collective the better.

        Raises:
          ValueError: there is no such algorithm.
        """
        return self._times(topology, algorithm)[0]

    def communication_bounds(
        self, topology: Topology, algorithm: str = "fastest"
    ) -> tuple[float, float]:
        """Lower and upper bounds of that time, by what is known of the links.

        Links that were measured are known for some sizes only, and took longer at one
        time than at another: see `Topology.bounds`. On others both are the same.

        Args:
          topology: links and number of replicas.
          algorithm: as above.

        Raises:
          ValueError: there is no such algorithm.

        >>> import jaxstrategy as js
        >>> strategy = js.MirroredStrategy(js.simulate(8)[:2])
        >>> def step(x):
        ...     return js.get_replica_context().all_reduce("sum", x)
        >>> x = strategy.per_replica(np.ones((2, 100), np.float32))
        >>> found = strategy.explain(step, (x,), compiled=False)
        >>> known = ((100, 1.0), (1000, 3.0))
        >>> links = js.profiling.Topology(1e3, 1.0, 2, messages=known)
        >>> found.communication_bounds(links)
        (2.0, 6.0)
        """
        _, least, most = self._times(topology, algorithm)
        return least, most

    def _times(self, topology: Topology, algorithm: str) -> tuple[float, ...]:
        if algorithm not in ("ring", "tree", "fastest"):
            raise ValueError(
                f"`algorithm` was {algorithm!r}; 'ring', 'tree' or 'fastest' was "
                "wanted."
            )
        devices = topology.with_replicas_per_device(self.replicas_per_device)
        return _total(each._times(devices, algorithm) for each in self.collectives)

    def __str__(self) -> str:
        lines = [self._title]
        for section in _sections(self):
            lines += ["", section.heading]
            if section.rows:
                lines += columns([section.header, *section.rows])
            for problem in section.problems:
                lines += (f"  {line}".rstrip() for line in problem.split("\n"))
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = []
        for section in _sections(self):
            inside = list(map(text.problem, section.problems))
            if section.rows:
                inside.append(text.table(section.header, section.rows))
            parts.append(text.section(section.heading, *inside))
        return text.page(self._title, parts)

    @property
    def _title(self) -> str:
        where = ""
        if self.logical_axes:
            axes = ", ".join(f"{name}={n}" for name, n in self.logical_axes.items())
            where = f", the devices of each along {axes}"
        elif self.replicas_per_device > 1:
            where = f", {self.replicas_per_device} on each device"
        return f"`{self.name}` on {with_noun(self.num_replicas, 'replica')}{where}"


# The facts.


class DeviceExchange(NamedTuple):
    """A collective between devices that have several replicas each."""

    kind: str  # to a `Topology`, such as `"all_gather"`
    nbytes: int  # of one device's operands


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedCollective:
    """A collective of a step over the replicas, or of a compiled program.

    Attributes:
      operation: JAX's name for it, such as `"psum"`, or XLA's, such as `"all-reduce"`.
      kind: what it is to a `Topology`, such as `"all_reduce"`.
      nbytes: bytes of the operands of one replica, or device, each time.
      dtypes: of the operands.
      loops: how often each loop around it turns, the innermost first; None where only
        the devices will know.
      in_branch: whether it is in a branch, and may be left out.
      groups: the replicas, or the devices by their places in the mesh, that take part
        together; None: all of them.
      line: the user's line that made it, or else where the step is defined. In a
        compiled program that which computes what is exchanged, of several that XLA has
        put together the first, or else the one that reads it; None if XLA kept none.
      is_transposed: whether differentiation made it out of that line.
      cause: `"step"` if the step says so; `"sharding"` if it is there because state is
        divided (a reduce-scatter, or a gather before an array is used); `"compiler"` if
        XLA needs it, where it computes once for all replicas what follows the last
        reduction, and in a compiled program.
      array: the argument, variable or result that is gathered, if one is.
      why: the reason in words, if the step does not say so.
      parts: into how many parts the operand's array is divided; of more
        replicas, each has a smaller part. 1 if an operand is a whole array.
      between_devices: where replicas share devices, what several devices exchange for
        it; None where each replica has devices of its own.
      axes: in a compiled program the axes of the mesh along which the devices of a
        group differ.
      is_inner: whether devices of one replica take part together.
    """

    operation: str
    kind: str
    nbytes: int
    dtypes: tuple[str, ...]
    loops: tuple[int | None, ...] = ()
    in_branch: bool = False
    groups: tuple[tuple[int, ...], ...] | None = None
    line: Line | None = None
    is_transposed: bool = False
    cause: Literal["step", "sharding", "compiler"] = "step"
    array: str = ""
    why: str = ""
    parts: int = 1
    between_devices: tuple[DeviceExchange, ...] | None = None
    axes: tuple[str, ...] = ()
    is_inner: bool = False

    @property
    def group(self) -> int | None:
        """The size of a group of replicas or devices; None for all of them."""
        return None if self.groups is None else max(map(len, self.groups))

    @property
    def times(self) -> int | None:
        """How often a step does it, at most; None where only the devices know."""
        return None if None in self.loops else self.least_times

    @property
    def least_times(self) -> int:
        """The same, with one iteration for each loop of unknown length."""
        return math.prod(1 if turns is None else turns for turns in self.loops)

    def seconds(self, topology: Topology, algorithm: str) -> float:
        """The predicted time of `least_times` of it, by a method of `Topology`.

        Where replicas share devices, the topology is that of the devices.
        """
        return self._times(topology, algorithm)[0]

    def bounds(self, topology: Topology, algorithm: str) -> tuple[float, float]:
        """Lower and upper bounds of that time, by `Topology.bounds`."""
        _, least, most = self._times(topology, algorithm)
        return least, most

    def _times(self, topology: Topology, algorithm: str) -> tuple[float, ...]:
        """All three, of the slowest group."""
        n, links = topology.replicas, {topology}
        sent: Sequence[tuple[str, float]] = [(self.kind, self.nbytes)]
        if self.between_devices is not None:
            sent = self.between_devices
        elif self.groups is not None:
            groups = [[i for i in group if i < n] for group in self.groups]
            links = {topology.among(group) for group in groups if group}
        elif self.parts > 1:  # the number of replicas of the explained step
            sent = [(self.kind, self.nbytes * self.parts / n)]
        found = [
            _total(
                (getattr(each, algorithm)(*of), *each.bounds(*of, algorithm))
                for of in sent
            )
            for each in links
        ]
        return tuple(self.least_times * max(each) for each in zip(*found, strict=True))


def _total(times: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(map(sum, zip((0.0, 0.0, 0.0), *times, strict=True)))


@final
@dataclasses.dataclass(frozen=True)
class ExplainedValue:
    """An array among the arguments or results.

    Attributes:
      path: how the user would write it, such as `"step(...)['loss']"`.
      shape: on one replica.
      dtype: of its elements.
      nbytes: of it on one replica.
      line: for a result that varies, the user's line where it began to; None if it
        does not vary, or does so as the argument that it is.
      why: the same in words, empty if it does not vary.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    line: Line | None = None
    why: str = ""


@final
@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of the compiled program on one device, in bytes, as XLA reports it.

    Attributes:
      arguments: the arguments.
      results: the results, those in donated memory included.
      donated: the part of the results that lies in donated memory.
      temporary: what is needed in between.
      code: the program itself.
    """

    arguments: int
    results: int
    donated: int
    temporary: int
    code: int

    @property
    def peak(self) -> int:
        """All of it at once, an upper bound."""
        return self.arguments + self.results - self.donated + self.temporary + self.code


@final
@dataclasses.dataclass(frozen=True)
class ExplainedLeaf:
    """An array that is equal on all replicas, and the part of it that each keeps.

    Attributes:
      path: how the user would write it, such as `"state.params['kernel']"`.
      shape: of all of it.
      dtype: of its elements.
      nbytes: of all of it.
      device_bytes: of what lies on one device.
      dimension: along which it is divided over the replicas; None if it is whole.
      reason: why it is whole, in words; empty if it is divided.
      inner: how the devices of each replica divide it over the logical axes.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    device_bytes: int
    dimension: int | None
    reason: str
    inner: InnerSpec = WHOLE


@final
@dataclasses.dataclass(frozen=True)
class WholeSum:
    """A large all-reduce where a reduce-scatter would do.

    Attributes:
      shape: of the sum.
      dtype: of its elements.
      nbytes: of all of it.
      line: the user's line that sums, None if JAX did not keep it.
      reason: why each replica gets all of it, in words.
      reader: the user's line that is the reason, if one is.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    line: Line | None
    reason: str
    reader: Line | None = None


@final
@dataclasses.dataclass(frozen=True)
class UndecidedOperation:
    """An operation on divided arrays for which XLA alone chooses what it exchanges.

    Such are matrix products in an optimizer. What they exchange is not among the
    collectives of an explanation.

    Attributes:
      operation: JAX's name for it, such as `"dot_general"`.
      count: how many of them this line makes.
      line: the user's line that made it, None if JAX did not keep it.
    """

    operation: str
    count: int
    line: Line | None


@final
@dataclasses.dataclass(frozen=True)
class ExplainedSharding:
    """The state of a step that may be divided, and what that costs.

    Attributes:
      shard: what the strategy divides: `"state"` or `"optimizer"`; None if it divides
        nothing by itself, but for variables.
      num_replicas: over how many replicas.
      leaves: all arguments and variables that are equal on all replicas, divided ones
        and whole ones.
      results: likewise, of the results; one that XLA may place counts as if each device
        of a replica had all of it.
      collectives: those that are there because state is divided; `collectives` of the
        `Explanation` has them and all others.
      whole_sums: the large sums that are not divided.
      undecided: what may exchange more.
    """

    shard: str | None
    num_replicas: int
    leaves: tuple[ExplainedLeaf, ...]
    results: tuple[ExplainedLeaf, ...]
    collectives: tuple[ExplainedCollective, ...]
    whole_sums: tuple[WholeSum, ...]
    undecided: tuple[UndecidedOperation, ...]

    @property
    def divided(self) -> tuple[ExplainedLeaf, ...]:
        """The arguments and variables that are sharded over replicas."""
        return tuple(leaf for leaf in self.leaves if leaf.dimension is not None)

    @property
    def whole(self) -> tuple[ExplainedLeaf, ...]:
        """The arguments and variables that each replica keeps whole."""
        return tuple(leaf for leaf in self.leaves if leaf.dimension is None)

    @property
    def state_bytes(self) -> int:
        """The bytes of arguments and variables on one device, between steps."""
        return sum(leaf.device_bytes for leaf in self.leaves)

    @property
    def replicated_bytes(self) -> int:
        """The same if every replica kept all of them."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def gathered_bytes(self) -> int:
        """The bytes of all whole arrays that a step gathers."""
        return self.num_replicas * self._bytes("all_gather")

    @property
    def scattered_bytes(self) -> int:
        """The bytes of all whole sums that a step scatters."""
        return self._bytes("reduce_scatter")

    def _bytes(self, kind: str) -> int:
        return total_bytes(each for each in self.collectives if each.kind == kind)


def total_bytes(collectives: Iterable[ExplainedCollective]) -> int:
    """The bytes of the operands of one replica, or device, in a step."""
    return sum(found.least_times * found.nbytes for found in collectives)


# The report.

_Row: TypeAlias = tuple[str, ...]

_MOST_VALUES = 12
# Communication times are predicted for these, besides the number given.
_REPLICAS = (8, 64, 4096)


class _Section(NamedTuple):
    """A part of a report."""

    heading: str
    header: _Row = ()
    rows: Sequence[_Row] = ()
    problems: Sequence[str] = ()


def _sections(explained: Explanation) -> Iterator[_Section]:
    if explained.problems:
        yield _Section("Problems", problems=explained.problems)
    yield _collectives("Collectives", "replica", explained.collectives, "none")
    if explained.collectives:
        yield _predictions(explained)
    compiled = explained.compiled_collectives
    if compiled is not None and explained.inner_collectives is not None:
        if explained.logical_axes:
            inner = "Inside a replica, between its devices"
            over = [each for each in compiled if not each.is_inner]
            yield _collectives(inner, "device", explained.inner_collectives, "nothing")
            yield _collectives("Over the replicas, as compiled", "device", over)
        elif explained.replicas_per_device > 1:
            yield _collectives("Between devices, as compiled", "device", compiled)
    if explained.sharding is not None:
        yield from _sharding(explained.sharding, explained.memory)
    yield _values("Mirrored results", explained.mirrored)
    yield _values(
        "Results that may differ between replicas", explained.per_replica, with_why=True
    )
    if statics := explained.static_arguments:
        heading = "Static arguments: another value compiles again"
        rows = [(name, repr(value)) for name, value in statics.items()]
        yield _Section(heading, ("argument", "value"), rows)
    if explained.variables:
        rows = [(name,) for name in explained.variables]
        yield _Section("Variables", ("name",), rows)
    if explained.donated:
        yield _values("Donated arguments", explained.donated, "argument")
    if explained.donatable:
        heading = "Arguments that could be donated, if they are not used afterwards"
        which = explained.donate_argnums
        advice = f", with RunOptions(donate_argnums={which})" if which else ""
        yield _values(heading, explained.donatable, "argument", advice)
    if rows := list(_figures(explained)):
        heading = "The compiled program on one device, as XLA reports it"
        yield _Section(heading, ("what", "amount"), rows)


def _collectives(
    heading: str,
    of_each: str,
    collectives: Sequence[ExplainedCollective],
    if_none: str = "nothing",
) -> _Section:
    """A table with one row for all equal collectives of a line."""
    if not collectives:
        return _Section(f"{heading}: {if_none}")
    by_line: dict[object, list[ExplainedCollective]] = {}
    for each in collectives:
        key = (each.operation, each.dtypes, each.loops, each.in_branch, each.line)
        how = (each.is_transposed, each.cause, each.why, each.axes)
        by_line.setdefault((*key, *how), []).append(each)
    total = with_bytes(total_bytes(collectives))
    over = any(each.axes for each in collectives)
    return _Section(
        f"{heading}: {total} from each {of_each} in a step",
        ("times", "operation", *["over"] * over, "dtype", "bytes", "where", "remarks"),
        [
            (
                str(sum(each.least_times for each in group)),
                group[0].operation,
                *[", ".join(group[0].axes)] * over,
                ", ".join(group[0].dtypes),
                with_bytes(total_bytes(group)),
                _short(group[0].line),
                ", ".join(_remarks(group)),
            )
            for group in by_line.values()
        ],
    )


def _short(line: Line | None) -> str:
    """A line of the user's code, with the file's name only."""
    return "unknown" if line is None else f"{line.name}:{line.number}: {line.code}"


def _remarks(group: Sequence[ExplainedCollective]) -> Iterator[str]:
    first = group[0]
    for turns in first.loops:
        yield "in a loop, turns unknown" if turns is None else f"in {turns} turns"
    if first.in_branch:
        yield "in a branch"
    if first.axes:  # as compiled
        return
    if first.group is not None:
        yield f"in groups of {first.group}"
    if first.is_transposed:
        yield "from differentiation"
    arrays = [each.array for each in group if each.array]
    if arrays:
        yield f"{arrays[0]}{and_more(len(arrays), 1, before=' ')}"
    if first.why:
        yield first.why
    if first.cause == "compiler":
        yield "by XLA"


def _predictions(explained: Explanation) -> _Section:
    """The predicted times of collectives over replicas."""
    topology = explained.topology
    speed = f"{with_prefix(topology.bandwidth)}B/s and {with_seconds(topology.latency)}"
    heading = f"Predicted communication time of a step, {speed} a message"
    if count := len(topology.messages):
        heading += f" (between the times of {count} measured messages)"
    links = topology.inside
    while links is not None:
        heading += (
            f"; inside {with_noun(links.replicas, 'replica')} "
            f"{with_prefix(links.bandwidth)}B/s and {with_seconds(links.latency)}"
        )
        links = links.inside
    rows = []
    for replicas in sorted({topology.replicas, *_REPLICAS}):
        row = [str(replicas)]
        scaled = topology.with_replicas(replicas)
        for algorithm in ("ring", "tree"):
            least, most = explained.communication_bounds(scaled, algorithm)
            low, high = with_seconds(least), with_seconds(most)
            between = f"{low} to {high}" if least else f"up to {high}"
            row.append(high if low == high else between)
        rows.append(tuple(row))
    return _Section(heading, ("replicas", "ring", "tree"), rows)


def _values(
    heading: str,
    values: Sequence[ExplainedValue],
    what: str = "result",
    advice: str = "",
    with_why: bool = False,
) -> _Section:
    """A table of arguments or results, perhaps with where they began to vary."""
    if not values:
        return _Section(f"{heading}: none{advice}")
    nbytes = with_bytes(sum(value.nbytes for value in values))
    rows = []
    for value in values:
        why = "; ".join(part.strip() for part in value.why.split("\n"))
        kind = array_type(value.dtype, value.shape)
        rows.append((value.path, kind, why) if with_why else (value.path, kind))
    return _Section(
        f"{heading}: {with_noun(len(values), 'array')}, {nbytes}{advice}",
        (what, "type", *["differs since"] * with_why),
        _first(rows),
    )


def _first(rows: list[_Row]) -> list[_Row]:
    """The first rows, and how many more there are."""
    more = and_more(len(rows), _MOST_VALUES, before="")
    last = [(more, *[""] * (len(rows[0]) - 1))] if more else []
    return rows[:_MOST_VALUES] + last


def _figures(explained: Explanation) -> Iterator[_Row]:
    flops, memory = explained.flops, explained.memory
    if flops is not None:
        calls = ", ".join(explained.uncounted_calls)
        without = f", without {calls}" if calls else ""
        yield f"floating-point operations{without}", with_prefix(flops)
    if memory is not None:
        yield "memory, at most", with_bytes(memory.peak)
        yield "  arguments", with_bytes(memory.arguments)
        yield "  results", with_bytes(memory.results)
        yield "  of these in donated memory", with_bytes(memory.donated)
        yield "  in between", with_bytes(memory.temporary)
        yield "  code", with_bytes(memory.code)


def _sharding(
    explained: ExplainedSharding, memory: Memory | None
) -> Iterator[_Section]:
    """What is sharded, what is not and why, what that costs and saves."""
    results = sum(leaf.device_bytes for leaf in explained.results)
    rows = [
        ("state on a device", with_bytes(explained.state_bytes)),
        ("  if nothing were divided", with_bytes(explained.replicated_bytes)),
        ("results on a device", with_bytes(results)),
    ]
    over = with_noun(explained.num_replicas, "replica")
    heading = f"State, whole on each of {over}"
    if explained.shard is not None or explained.divided:
        chosen = "variables" if explained.shard is None else repr(explained.shard)
        heading = f"Sharded state: {chosen} over {over}"
        rows += [
            ("gathered in a step", with_bytes(explained.gathered_bytes)),
            ("scattered in a step", with_bytes(explained.scattered_bytes)),
        ]
    if memory is not None:
        rows.append(("memory of a device, at most", with_bytes(memory.peak)))
    yield _Section(heading, ("what", "amount"), rows)
    if explained.divided:
        yield _leaves("Divided arguments and variables", explained.divided)
    if explained.whole:
        yield _leaves("Whole arguments and variables", explained.whole)
    if explained.whole_sums:
        rows = [
            (
                array_type(each.dtype, each.shape),
                with_bytes(each.nbytes),
                each.reason,
                _short(each.line),
                "" if each.reader is None else _short(each.reader),
            )
            for each in explained.whole_sums
        ]
        header = ("type", "bytes", "why", "where", "because of")
        yield _Section("Large sums that every replica gets all of", header, rows)
    if explained.undecided:
        heading = "Operations on divided arrays that may exchange more: XLA chooses"
        rows = [
            (str(each.count), each.operation, _short(each.line))
            for each in explained.undecided
        ]
        yield _Section(heading, ("times", "operation", "where"), rows)


def _leaves(title: str, leaves: Sequence[ExplainedLeaf]) -> _Section:
    rows = []
    for leaf in sorted(leaves, key=lambda leaf: -leaf.nbytes):
        how = [leaf.reason or f"dimension {leaf.dimension}"]
        for dimension, names in enumerate(leaf.inner):
            if names:
                axes = names if isinstance(names, str) else ", ".join(names)
                how.append(f"dimension {dimension} over {axes} in each replica")
        kind = array_type(leaf.dtype, leaf.shape)
        rows.append((leaf.path, kind, with_bytes(leaf.device_bytes), "; ".join(how)))
    total = with_bytes(sum(leaf.device_bytes for leaf in leaves))
    heading = f"{title}: {with_noun(len(leaves), 'array')}, {total} on a device"
    return _Section(heading, ("array", "type", "on a device", "division"), _first(rows))
