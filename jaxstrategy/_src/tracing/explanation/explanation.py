"""`Explanation`: what one call of a step would do, as data and as a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

from jaxstrategy._src.replicas.topology import Topology
from jaxstrategy._src.text import html
from jaxstrategy._src.text.shown import (
    and_more,
    array_type,
    with_bytes,
    with_noun,
    with_prefix,
    with_seconds,
)
from jaxstrategy._src.text.user_code import Line
from jaxstrategy._src.tracing.explanation.facts import (
    AbstractCollective,
    CompiledCollective,
    ExplainedCollective,
    ExplainedLeaf,
    ExplainedSharding,
    ExplainedValue,
    Memory,
)


def in_columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows as lines, moved in, with each column as wide as its longest cell.

    >>> list(in_columns([("a", "1"), ("long", "2")]))
    ['  a     1', '  long  2']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


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
        """The seconds between which that time is, by what is known of the links.

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
        """The links between devices."""
        if algorithm not in ("ring", "tree", "fastest"):
            raise ValueError(
                f"`algorithm` was {algorithm!r}; 'ring', 'tree' or 'fastest' was "
                "wanted."
            )
        return topology.with_replicas_per_device(self.replicas_per_device)

    def __str__(self) -> str:
        return _text(self._title(), self._sections())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return _as_html(self._title(), self._sections())

    def _title(self) -> str:
        where = _where(self.logical_axes, self.replicas_per_device)
        return f"`{self.name}` on {with_noun(self.num_replicas, 'replica')}{where}"

    def _sections(self) -> Iterator[_Section]:
        yield from _problems(self.problems)
        yield from _communication(
            self.collectives, self.topology, self.communication_bounds
        )
        if self.logical_axes or self.replicas_per_device > 1:
            yield from _exchanges(self.compiled_collectives, self.logical_axes)
        if self.sharding is not None:
            yield from _sharding(self.sharding, self.memory)
        yield from _results(self.mirrored, self.per_replica)
        yield from _static_arguments(self.static_arguments)
        yield from _variables(self.variables)
        yield from _donation(self.donated, self.donatable, self.donate_argnums)
        yield from _compiled(self.flops, self.memory)


# The report, as text and as tables for notebooks.

_MOST_VALUES = 12

_Row: TypeAlias = tuple[str, ...]


class _Section(NamedTuple):
    """A part of a report."""

    heading: str
    header: _Row = ()
    rows: Sequence[_Row] = ()
    problems: Sequence[str] = ()


def _short(line: Line | None) -> str:
    """A line of the user's code, with the file's name only."""
    if line is None:
        return "unknown"
    return f"{line.name}:{line.number}: {line.code}"


def _around(loops: Sequence[int | None], in_branch: bool) -> Iterator[str]:
    """What is around something, in words."""
    for turns in loops:
        yield "in a loop, turns unknown" if turns is None else f"in {turns} turns"
    if in_branch:
        yield "in a branch"


# What a communication time is predicted for, besides the number given.
_REPLICAS = (8, 64, 4096)


def _text(title: str, sections: Iterable[_Section]) -> str:
    """The report as text."""
    lines = [title]
    for section in sections:
        lines += ["", section.heading]
        if section.rows:
            lines += in_columns([section.header, *section.rows])
        for problem in section.problems:
            lines += (f"  {line}".rstrip() for line in problem.split("\n"))
    return "\n".join(lines)


def _as_html(title: str, sections: Iterable[_Section]) -> str:
    """The report for notebooks."""
    return html.page(title, map(_html_of, sections))


def _html_of(section: _Section) -> str:
    parts = list(map(html.problem, section.problems))
    if section.rows:
        parts.append(html.table(section.header, section.rows))
    return html.section(section.heading, *parts)


def _problems(found: Sequence[str]) -> Iterator[_Section]:
    """The problems of the step."""
    if found:
        yield _Section("Problems", problems=found)


def _static_arguments(values: Mapping[str, Any]) -> Iterator[_Section]:
    """The arguments that are part of the program."""
    if values:
        rows = [(name, repr(value)) for name, value in values.items()]
        heading = "Static arguments: another value compiles again"
        yield _Section(heading, ("argument", "value"), rows)


def _variables(names: Sequence[str]) -> Iterator[_Section]:
    """The variables that the step reads or assigns."""
    if names:
        yield _Section("Variables", ("name",), [(name,) for name in names])


# Communication.


def _communication(
    collectives: Sequence[ExplainedCollective],
    topology: Topology,
    bounds: Callable[[Topology, str], tuple[float, float]],
) -> Iterator[_Section]:
    """The collectives over replicas, and how long they should take."""
    if not collectives:
        yield _Section("Collectives: none")
        return
    total = with_bytes(total_bytes(collectives))
    heading = f"Collectives: {total} from each replica in a step"
    header = ("times", "operation", "dtype", "bytes", "where", "remarks")
    groups = list(_alike(collectives))
    rows = list(map(_collective_row, groups))
    yield _Section(heading, header, rows)
    heading = (
        f"Predicted communication time of a step, {with_prefix(topology.bandwidth)}B/s "
        f"and {with_seconds(topology.latency)} a message{_known(topology)}"
        f"{_inside(topology)}"
    )
    rows = []
    for replicas in sorted({topology.replicas, *_REPLICAS}):
        there = topology.with_replicas(replicas)
        times = [_between(*bounds(there, algorithm)) for algorithm in ("ring", "tree")]
        rows.append((str(replicas), *times))
    yield _Section(heading, ("replicas", "ring", "tree"), rows)


def _between(least: float, most: float) -> str:
    """A time of which no more is known than its bounds."""
    low, high = with_seconds(least), with_seconds(most)
    if low == high:
        return high
    return f"{low} to {high}" if least else f"up to {high}"


def _known(topology: Topology) -> str:
    """How many messages the times lie between, in words."""
    count = len(topology.messages)
    return f" (between the times of {count} measured messages)" if count else ""


def _inside(topology: Topology) -> str:
    """The faster links, in words."""
    if (links := topology.inside) is None:
        return ""
    return (
        f"; inside {with_noun(links.replicas, 'replica')} "
        f"{with_prefix(links.bandwidth)}B/s and {with_seconds(links.latency)}"
        f"{_inside(links)}"
    )


def total_bytes(collectives: Iterable[AbstractCollective]) -> int:
    """The bytes that one replica, or device, gives to them in a step."""
    return sum(found.least_times * found.nbytes for found in collectives)


def _alike(
    collectives: Iterable[ExplainedCollective],
) -> Iterable[Sequence[ExplainedCollective]]:
    """All alike that one line made, together."""
    alike: dict[object, list[ExplainedCollective]] = {}
    for found in collectives:
        key = (found.operation, found.dtypes, found.loops, found.in_branch, found.line)
        more = (found.is_transposed, found.cause, found.why)
        alike.setdefault((*key, *more), []).append(found)
    return alike.values()


def _collective_row(group: Sequence[ExplainedCollective]) -> _Row:
    first = group[0]
    return (
        str(sum(found.least_times for found in group)),
        first.operation,
        ", ".join(first.dtypes),
        with_bytes(total_bytes(group)),
        _short(first.line),
        ", ".join((*_remarks(first), *_reasons(group))),
    )


def _remarks(found: ExplainedCollective) -> Iterator[str]:
    yield from _around(found.loops, found.in_branch)
    if found.group is not None:
        yield f"in groups of {found.group}"
    if found.is_transposed:
        yield "from differentiation"


def _reasons(alike: Sequence[ExplainedCollective]) -> Iterator[str]:
    """What is gathered, and why."""
    names = [found.array for found in alike if found.array]
    if names:
        more = and_more(len(names), 1, before=" ")
        yield f"{names[0]}{more}"
    if alike[0].why:
        yield alike[0].why
    if alike[0].cause == "compiler":
        yield "by XLA"


# Arguments and results.


def _results(
    mirrored: Sequence[ExplainedValue], per_replica: Sequence[ExplainedValue]
) -> Iterator[_Section]:
    """The results of the step."""
    heading = f"Mirrored results: {_amount(mirrored)}"
    yield _Section(heading, ("result", "type"), list(_value_rows(mirrored)))
    heading = f"Results that may differ between replicas: {_amount(per_replica)}"
    header = ("result", "type", "differs since")
    rows = [
        (*row, "; ".join(part.strip() for part in value.why.split("\n")))
        for row, value in zip(_value_rows(per_replica), per_replica, strict=False)
    ]
    yield _Section(heading, header, rows)


def _value_rows(values: Sequence[ExplainedValue]) -> Iterator[_Row]:
    for value in values[:_MOST_VALUES]:
        yield value.path, array_type(value.dtype, value.shape)
    if more := and_more(len(values), _MOST_VALUES, before=""):
        yield more, ""


def _amount(values: Sequence[ExplainedValue]) -> str:
    if not values:
        return "none"
    nbytes = sum(value.nbytes for value in values)
    return f"{with_noun(len(values), 'array')}, {with_bytes(nbytes)}"


def _donation(
    donated: Sequence[ExplainedValue],
    donatable: Sequence[ExplainedValue],
    positions: tuple[int, ...],
) -> Iterator[_Section]:
    """The arguments that give up their memory, or could."""
    if donated:
        heading = f"Donated arguments: {_amount(donated)}"
        yield _Section(heading, ("argument", "type"), list(_value_rows(donated)))
    if donatable:
        heading = (
            "Arguments that could be donated, if they are not used afterwards: "
            f"{_amount(donatable)}"
        )
        if positions:
            heading += f", with RunOptions(donate_argnums={positions})"
        yield _Section(heading, ("argument", "type"), list(_value_rows(donatable)))


# What XLA says.


def _compiled(flops: float | None, memory: Memory | None) -> Iterator[_Section]:
    """XLA's own figures of the program."""
    rows = []
    if flops is not None:
        rows.append(("floating-point operations", with_prefix(flops)))
    if memory is not None:
        rows += [
            ("memory, at most", with_bytes(memory.peak)),
            ("  arguments", with_bytes(memory.arguments)),
            ("  results", with_bytes(memory.results)),
            ("  of these in donated memory", with_bytes(memory.donated)),
            ("  in between", with_bytes(memory.temporary)),
            ("  code", with_bytes(memory.code)),
        ]
    if rows:
        heading = "The compiled program on one device, as XLA reports it"
        yield _Section(heading, ("what", "amount"), rows)


# Devices of a replica, and replicas of a device.


_EXCHANGE_HEADER = ("times", "operation", "over", "dtype", "bytes", "where", "remarks")


def _where(logical_axes: Mapping[str, int], per_device: int) -> str:
    """Where the replicas are, after their number."""
    if logical_axes:
        axes = ", ".join(f"{name}={size}" for name, size in logical_axes.items())
        return f", the devices of each along {axes}"
    return f", {per_device} on each device" if per_device > 1 else ""


def _exchanges(
    found: Sequence[CompiledCollective] | None, logical_axes: Mapping[str, int]
) -> Iterator[_Section]:
    """What is exchanged inside replicas, and over them."""
    if found is None:
        return
    if logical_axes:
        inner = [each for each in found if each.is_inner]
        yield _exchange("Inside a replica, between its devices", inner)
        over = [each for each in found if not each.is_inner]
        yield _exchange("Over the replicas, as compiled", over)
    else:
        yield _exchange("Between devices, as compiled", found)


def _exchange(title: str, found: Sequence[CompiledCollective]) -> _Section:
    if not found:
        return _Section(f"{title}: nothing")
    heading = f"{title}: {with_bytes(total_bytes(found))} from each device in a step"
    return _Section(heading, _EXCHANGE_HEADER, list(_exchange_rows(found)))


def _exchange_rows(found: Sequence[CompiledCollective]) -> Iterator[_Row]:
    """One row for all alike that one line made."""
    alike: dict[object, list[CompiledCollective]] = {}
    for each in found:
        key = (each.operation, each.axes, each.dtypes, each.loops, each.in_branch)
        alike.setdefault((*key, each.line), []).append(each)
    for group in alike.values():
        first = group[0]
        yield (
            str(sum(each.least_times for each in group)),
            first.operation,
            ", ".join(first.axes),
            ", ".join(first.dtypes),
            with_bytes(total_bytes(group)),
            _short(first.line),
            ", ".join(_around(first.loops, first.in_branch)),
        )


# State.


def _sharding(found: ExplainedSharding, memory: Memory | None) -> Iterator[_Section]:
    """What is divided, what is not and why, what that costs and saves."""
    yield _state_summary(found, memory)
    if found.divided:
        yield from _leaves("Divided arguments and variables", found.divided)
    if found.whole:
        yield from _leaves("Whole arguments and variables", found.whole)
    if found.whole_sums:
        header = ("type", "bytes", "why", "where", "because of")
        rows = [
            (
                array_type(each.dtype, each.shape),
                with_bytes(each.nbytes),
                each.reason,
                _short(each.line),
                _short_or_nothing(each.reader),
            )
            for each in found.whole_sums
        ]
        yield _Section("Large sums that every replica gets all of", header, rows)
    if found.undecided:
        heading = "Operations on divided arrays that may exchange more: XLA chooses"
        rows = [
            (str(each.count), each.operation, _short(each.line))
            for each in found.undecided
        ]
        yield _Section(heading, ("times", "operation", "where"), rows)


def _state_summary(found: ExplainedSharding, memory: Memory | None) -> _Section:
    rows = [
        ("state on a device", with_bytes(found.state_bytes)),
        ("  if nothing were divided", with_bytes(found.replicated_bytes)),
        ("results on a device", with_bytes(_on_a_device(found.results))),
    ]
    over = with_noun(found.num_replicas, "replica")
    heading = f"State, whole on each of {over}"
    if found.shard is not None or found.divided:
        chosen = "variables" if found.shard is None else repr(found.shard)
        heading = f"Sharded state: {chosen} over {over}"
        rows += [
            ("gathered in a step", with_bytes(found.gathered_bytes)),
            ("scattered in a step", with_bytes(found.scattered_bytes)),
        ]
    if memory is not None:
        rows.append(("memory of a device, at most", with_bytes(memory.peak)))
    return _Section(heading, ("what", "amount"), rows)


def _leaves(title: str, leaves: Sequence[ExplainedLeaf]) -> Iterator[_Section]:
    total = with_bytes(_on_a_device(leaves))
    heading = f"{title}: {with_noun(len(leaves), 'array')}, {total} on a device"
    largest_first = sorted(leaves, key=lambda leaf: -leaf.nbytes)
    header = ("array", "type", "on a device", "division")
    yield _Section(heading, header, list(_leaf_rows(largest_first)))


def _on_a_device(leaves: Sequence[ExplainedLeaf]) -> int:
    return sum(leaf.device_bytes for leaf in leaves)


def _leaf_rows(leaves: Sequence[ExplainedLeaf]) -> Iterator[_Row]:
    for leaf in leaves[:_MOST_VALUES]:
        kind = array_type(leaf.dtype, leaf.shape)
        how = "; ".join(_how(leaf))
        yield leaf.path, kind, with_bytes(leaf.device_bytes), how
    if more := and_more(len(leaves), _MOST_VALUES, before=""):
        yield more, "", "", ""


def _how(leaf: ExplainedLeaf) -> Iterator[str]:
    yield leaf.reason or f"dimension {leaf.dimension}"
    for dimension, names in enumerate(leaf.inner):
        if names:
            axes = names if isinstance(names, str) else ", ".join(names)
            yield f"dimension {dimension} over {axes} in each replica"


def _short_or_nothing(line: Line | None) -> str:
    return "" if line is None else _short(line)
