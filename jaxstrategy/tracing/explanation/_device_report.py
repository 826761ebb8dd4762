"""What the devices of a compiled program exchange, as sections of its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jaxstrategy.text._units import with_bytes
from jaxstrategy.tracing.explanation._explanation_report import total_bytes
from jaxstrategy.tracing.explanation._facts import CompiledCollective
from jaxstrategy.tracing.explanation._report_sections import (
    Row,
    Section,
    around,
    short,
)

_HEADER = ("times", "operation", "over", "dtype", "bytes", "where", "remarks")


def where(logical_axes: Mapping[str, int], per_device: int) -> str:
    """Where the replicas are, after their number."""
    if logical_axes:
        axes = ", ".join(f"{name}={size}" for name, size in logical_axes.items())
        return f", the devices of each along {axes}"
    return f", {per_device} on each device" if per_device > 1 else ""


def exchanges(
    found: Sequence[CompiledCollective] | None, logical_axes: Mapping[str, int]
) -> Iterator[Section]:
    """What is exchanged inside replicas, and over them."""
    if found is None:
        return
    if logical_axes:
        inner = [each for each in found if each.is_inner]
        yield _section("Inside a replica, between its devices", inner)
        over = [each for each in found if not each.is_inner]
        yield _section("Over the replicas, as compiled", over)
    else:
        yield _section("Between devices, as compiled", found)


def _section(title: str, found: Sequence[CompiledCollective]) -> Section:
    if not found:
        return Section(f"{title}: nothing")
    heading = f"{title}: {with_bytes(total_bytes(found))} from each device in a step"
    return Section(heading, _HEADER, list(_rows(found)))


def _rows(found: Sequence[CompiledCollective]) -> Iterator[Row]:
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
            short(first.line),
            ", ".join(around(first.loops, first.in_branch)),
        )
