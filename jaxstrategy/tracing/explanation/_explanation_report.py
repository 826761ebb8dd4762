"""An explanation as text, and as tables and charts for notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxstrategy.charts._bars import ChartBar, bars, one_part
from jaxstrategy.replicas._topology import Topology
from jaxstrategy.text import _html_report
from jaxstrategy.text._array_types import array_type
from jaxstrategy.text._columns import in_columns
from jaxstrategy.text._html_colours import Colour
from jaxstrategy.text._lists import and_more
from jaxstrategy.text._units import (
    with_bytes,
    with_noun,
    with_prefix,
    with_seconds,
)
from jaxstrategy.tracing.explanation._facts import (
    AbstractCollective,
    ExplainedCollective,
    ExplainedValue,
    Memory,
)
from jaxstrategy.tracing.explanation._report_sections import (
    MOST_VALUES,
    Row,
    Section,
    around,
    short,
)

# What a communication time is predicted for, besides the number given.
_REPLICAS = (8, 64, 4096)
_MOST_BARS = 6


def text(title: str, sections: Iterable[Section]) -> str:
    """The report as text."""
    lines = [title]
    for section in sections:
        lines += ["", section.heading]
        if section.rows:
            lines += in_columns([section.header, *section.rows])
        for problem in section.problems:
            lines += (f"  {line}".rstrip() for line in problem.split("\n"))
    return "\n".join(lines)


def html(title: str, sections: Iterable[Section]) -> str:
    """The report for notebooks."""
    return _html_report.page(title, map(_html_of, sections))


def _html_of(section: Section) -> str:
    parts = list(map(_html_report.problem, section.problems))
    if section.bars:
        parts.append(bars("", section.bars))
    if section.rows:
        parts.append(_html_report.table(section.header, section.rows))
    return _html_report.section(section.heading, *parts)


def problems(found: Sequence[str]) -> Iterator[Section]:
    """The problems of the step."""
    if found:
        yield Section("Problems", problems=found)


def static_arguments(values: Mapping[str, Any]) -> Iterator[Section]:
    """The arguments that are part of the program."""
    if values:
        rows = [(name, repr(value)) for name, value in values.items()]
        heading = "Static arguments: another value compiles again"
        yield Section(heading, ("argument", "value"), rows)


def variables(names: Sequence[str]) -> Iterator[Section]:
    """The variables that the step reads or assigns."""
    if names:
        yield Section("Variables", ("name",), [(name,) for name in names])


# Communication.


def communication(
    collectives: Sequence[ExplainedCollective],
    topology: Topology,
    bounds: Callable[[Topology, str], tuple[float, float]],
) -> Iterator[Section]:
    """The collectives over replicas, and how long they should take.

    Args:
      collectives: in order.
      topology: links that times are predicted for.
      bounds: the least and the most seconds of all, by links and algorithm.
    """
    if not collectives:
        yield Section("Collectives: none")
        return
    total = with_bytes(total_bytes(collectives))
    heading = f"Collectives: {total} from each replica in a step"
    header = ("times", "operation", "dtype", "bytes", "where", "remarks")
    groups = list(_alike(collectives))
    rows = list(map(_collective_row, groups))
    yield Section(heading, header, rows, bars=_collective_bars(groups))
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
    yield Section(heading, ("replicas", "ring", "tree"), rows)


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


def _collective_row(group: Sequence[ExplainedCollective]) -> Row:
    first = group[0]
    return (
        str(sum(found.least_times for found in group)),
        first.operation,
        ", ".join(first.dtypes),
        with_bytes(total_bytes(group)),
        short(first.line),
        ", ".join((*_remarks(first), *_reasons(group))),
    )


def _collective_bars(
    groups: Sequence[Sequence[ExplainedCollective]],
) -> Sequence[ChartBar]:
    """The bytes of the largest ones; of one alone there is nothing to compare."""
    if len(groups) == 1:
        return ()
    largest = sorted(groups, key=total_bytes, reverse=True)[:_MOST_BARS]
    return [
        one_part(
            f"{group[0].operation}, {short(group[0].line)}",
            total_bytes(group),
            with_bytes(total_bytes(group)),
            Colour.COMMUNICATION,
        )
        for group in largest
    ]


def _remarks(found: ExplainedCollective) -> Iterator[str]:
    yield from around(found.loops, found.in_branch)
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


def results(
    mirrored: Sequence[ExplainedValue], per_replica: Sequence[ExplainedValue]
) -> Iterator[Section]:
    """The results of the step."""
    heading = f"Mirrored results: {_amount(mirrored)}"
    yield Section(heading, ("result", "type"), list(_rows(mirrored)))
    heading = f"Results that may differ between replicas: {_amount(per_replica)}"
    header = ("result", "type", "differs since")
    rows = [
        (*row, "; ".join(part.strip() for part in value.why.split("\n")))
        for row, value in zip(_rows(per_replica), per_replica, strict=False)
    ]
    yield Section(heading, header, rows)


def _rows(values: Sequence[ExplainedValue]) -> Iterator[Row]:
    for value in values[:MOST_VALUES]:
        yield value.path, array_type(value.dtype, value.shape)
    if more := and_more(len(values), MOST_VALUES, before=""):
        yield more, ""


def _amount(values: Sequence[ExplainedValue]) -> str:
    if not values:
        return "none"
    nbytes = sum(value.nbytes for value in values)
    return f"{with_noun(len(values), 'array')}, {with_bytes(nbytes)}"


def donation(
    donated: Sequence[ExplainedValue],
    donatable: Sequence[ExplainedValue],
    positions: tuple[int, ...],
) -> Iterator[Section]:
    """The arguments that give up their memory, or could."""
    if donated:
        heading = f"Donated arguments: {_amount(donated)}"
        yield Section(heading, ("argument", "type"), list(_rows(donated)))
    if donatable:
        heading = (
            "Arguments that could be donated, if they are not used afterwards: "
            f"{_amount(donatable)}"
        )
        if positions:
            heading += f", with RunOptions(donate_argnums={positions})"
        yield Section(heading, ("argument", "type"), list(_rows(donatable)))


# What XLA says.


def compiled(flops: float | None, memory: Memory | None) -> Iterator[Section]:
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
        yield Section(heading, ("what", "amount"), rows, bars=_memory_bars(memory))


def _memory_bars(memory: Memory | None) -> Sequence[ChartBar]:
    if memory is None:
        return ()
    sizes = {
        "arguments": memory.arguments,
        "results": memory.results,
        "in between": memory.temporary,
    }
    return [
        one_part(name, size, with_bytes(size), Colour.COMPUTE)
        for name, size in sizes.items()
    ]
