"""`Explanation`: what one call of a step would do, as data and as a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

from jaxstrategy._src import text
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
from jaxstrategy._src.tracing.explanation.facts import (
    AbstractCollective,
    CompiledCollective,
    ExplainedCollective,
    ExplainedLeaf,
    ExplainedSharding,
    ExplainedValue,
    Memory,
    total_bytes,
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
    compiled_collectives: tuple[CompiledCollective, ...] | None = None
    has_loops: bool = False
    uncounted_calls: tuple[str, ...] = ()

    @property
    def communicated_bytes(self) -> int:
        """The bytes that one replica gives to collectives over replicas in a step.

        The body of a loop of unknown length counts once, and each branch counts.
        """
        return total_bytes(self.collectives)

    @property
    def inner_collectives(self) -> tuple[CompiledCollective, ...] | None:
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
        return sum(
            found.seconds(self._devices(topology, algorithm), algorithm)
            for found in self.collectives
        )

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
        devices = self._devices(topology, algorithm)
        each = [found.bounds(devices, algorithm) for found in self.collectives]
        return sum(least for least, _ in each), sum(most for _, most in each)

    def _devices(self, topology: Topology, algorithm: str) -> Topology:
        """The topology of devices, for the replicas of `topology`."""
        if algorithm not in ("ring", "tree", "fastest"):
            raise ValueError(
                f"`algorithm` was {algorithm!r}; 'ring', 'tree' or 'fastest' was "
                "wanted."
            )
        return topology.with_replicas_per_device(self.replicas_per_device)

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
    collectives: Sequence[AbstractCollective],
    if_none: str = "nothing",
) -> _Section:
    """A table with one row for all equal collectives of a line."""
    if not collectives:
        return _Section(f"{heading}: {if_none}")
    by_line: dict[object, list[AbstractCollective]] = {}
    for each in collectives:
        key = (each.operation, each.dtypes, each.loops, each.in_branch, each.line)
        if isinstance(each, ExplainedCollective):
            more = (each.is_transposed, each.cause, each.why)
        else:
            more = _axes(each)
        by_line.setdefault((*key, *more), []).append(each)
    total = with_bytes(total_bytes(collectives))
    over = ("over",) if _axes(collectives[0]) else ()
    return _Section(
        f"{heading}: {total} from each {of_each} in a step",
        ("times", "operation", *over, "dtype", "bytes", "where", "remarks"),
        [
            (
                str(sum(each.least_times for each in group)),
                group[0].operation,
                *_axes(group[0]),
                ", ".join(group[0].dtypes),
                with_bytes(total_bytes(group)),
                _short(group[0].line),
                ", ".join(_remarks(group)),
            )
            for group in by_line.values()
        ],
    )


def _axes(collective: AbstractCollective) -> tuple[str, ...]:
    """The cell with mesh axes, which only compiled collectives have."""
    is_compiled = isinstance(collective, CompiledCollective)
    return (", ".join(collective.axes),) if is_compiled else ()


def _short(line: Line | None) -> str:
    """A line of the user's code, with the file's name only."""
    if line is None:
        return "unknown"
    return f"{line.name}:{line.number}: {line.code}"


def _remarks(group: Sequence[AbstractCollective]) -> Iterator[str]:
    first = group[0]
    for turns in first.loops:
        yield "in a loop, turns unknown" if turns is None else f"in {turns} turns"
    if first.in_branch:
        yield "in a branch"
    if not isinstance(first, ExplainedCollective):
        return
    if first.group is not None:
        yield f"in groups of {first.group}"
    if first.is_transposed:
        yield "from differentiation"
    arrays = [name for each in group if (name := getattr(each, "array", ""))]
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
        for algorithm in ("ring", "tree"):
            scaled = topology.with_replicas(replicas)
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
    amount = "none"
    if values:
        nbytes = with_bytes(sum(value.nbytes for value in values))
        amount = f"{with_noun(len(values), 'array')}, {nbytes}"
    rows = []
    for value in values[:_MOST_VALUES]:
        why = "; ".join(part.strip() for part in value.why.split("\n"))
        rows.append((value.path, array_type(value.dtype, value.shape), why))
    if more := and_more(len(values), _MOST_VALUES, before=""):
        rows.append((more, "", ""))
    width = 3 if with_why else 2
    return _Section(
        f"{heading}: {amount}{advice}",
        (what, "type", "differs since")[:width],
        [row[:width] for row in rows],
    )


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
    for leaf in sorted(leaves, key=lambda leaf: -leaf.nbytes)[:_MOST_VALUES]:
        how = [leaf.reason or f"dimension {leaf.dimension}"]
        for dimension, names in enumerate(leaf.inner):
            if names:
                axes = names if isinstance(names, str) else ", ".join(names)
                how.append(f"dimension {dimension} over {axes} in each replica")
        kind = array_type(leaf.dtype, leaf.shape)
        rows.append((leaf.path, kind, with_bytes(leaf.device_bytes), "; ".join(how)))
    if more := and_more(len(leaves), _MOST_VALUES, before=""):
        rows.append((more, "", "", ""))
    total = with_bytes(sum(leaf.device_bytes for leaf in leaves))
    heading = f"{title}: {with_noun(len(leaves), 'array')}, {total} on a device"
    return _Section(heading, ("array", "type", "on a device", "division"), rows)
